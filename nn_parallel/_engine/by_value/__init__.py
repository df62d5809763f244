"""Functions, classes and globals of a script, as they reach a worker.

The problem. A worker has not run the script: to run it again would need a ``__main__`` guard, and takes as long as
the script does. So what a call needs of the script is sent. cloudpickle can do that: it pickles a function with its
code and with all the globals that the code reads, a class with all its attributes, and so again for each call. Three
things do not work then:

- *Time.* To pickle a function with its globals takes ten times as long as a small call, and the globals may be large.
- *Identity.* Each call brings other copies: a `functools.cache` is empty each time, `isinstance` is false between
  calls, a mark such as ``MISSING = object()`` is another one. And what an import would find (a lock, a registry, a
  sentinel) is copied with the rest.
- *Hooks.* A class is made by its metaclass and then filled. ``__init_subclass__`` and the metaclass run a second
  time, on an empty class and without their arguments.

What does not work either is to make that good by guesses: to know a namespace by its name (each class of attrs has
one without), a class by its qualified name (`def f(): class A` has many), or a change by comparing pickles. So there
is one rule, and everything in this package serves it:

    *What a fresh interpreter would import is sent by name. Definitions of the script are sent once, and again after
    the script has bound something in them anew. All else is data, and comes with each call.*

How it is done:

- `reducer` decides. By name goes what an import is known to find: the finders of `sys.meta_path` are asked, and must
  name the file that the script has. A class, a function that a global has under the function's own name, and the like
  are *definitions*. Each has a key, the same in all processes, in both directions.
- `packer` has a record of each definition that was sent: what it was made of, the definitions that it refers to, and
  the globals that its code reads (by its bytecode: `reducer.names_in`). It is current as long as all that it was made
  of are the same objects. A call walks from its function along these records: so it knows which definitions it needs,
  and which globals. Those that cannot change without being bound anew (numbers, modules, definitions) go into a
  header. Data goes into the pickle of the arguments, so that what is one object stays one.
- `globals` is the worker's side. A dict of globals of the script is a *space*, and has a key too, so identity is that
  of the dict. A definition that comes again is the same object, changed. A binding has a number, which is another one
  after the script has bound the name anew: as long as the number is the same, what a task binds stays.

A function that refers to no data is kept by the workers, ready to be called. Whether it still is what it was takes
one comparison by ``is`` for each thing that it refers to, and no pickling.
"""
