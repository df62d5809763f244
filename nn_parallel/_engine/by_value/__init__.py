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

Three simpler schemes fail:

- To identify a namespace by its name: the methods that attrs makes have namespaces without a name, all alike.
- To identify a class by its qualified name: one function may make many classes.
- To find changes by comparing pickles: two pickles of equal objects may differ.

So there is one rule, and everything in this package serves it:

    *What a fresh interpreter would import is sent by name. Definitions of the script are sent once, and again after
    the script has bound something in them anew. All else is data, and comes with each call.*

How it is done:

- `reducer` decides. A function, class or module is sent by name only if the finders of `sys.meta_path` lead to the
  file that the script has, or if it is installed with Python. Definitions are classes; functions that a global has
  under the function's own name, and that hold no data in defaults, attributes or closure variables; what
  `functools.cache` makes; type variables and aliases. Each definition has a key, and so has each `object()`, which
  has nothing but its identity. The script and the workers use the same key, so a result refers by it to the script's
  own object.
- `packer` has a record of each definition that was sent: what it was made of, the definitions that it refers to, and
  the globals that its code reads (by its bytecode: `reducer.names_in`). The record is current as long as all of these
  are the same objects. What is inside these is not compared, but for the functions of a class, and the elements of
  its lists, dicts and sets.
- `globals` is the receiving side. A dict of globals of the script is a *namespace*, and has a key too: so identity is
  that of the dict. A definition that comes again is the same object, changed. Each binding of a global has a number,
  which changes when the script binds the name anew. While it is the same, the worker keeps what a task has bound.

One call, from the script to the worker:

1. `Packer.pack(fn, args, kwargs)`. If the workers have ``fn``, and all globals and attributes that it reaches are
   still the same objects, only its number and the arguments are sent.
2. Else `_CallReducer` pickles ``(fn, args, kwargs)``. Where it meets a definition or a function, it walks from there
   along the records, and packs definitions that are new or have changed (`Packer.definition`). The workers store the
   pickle of each under the number of a `Handle`, like an object from `put`. It is sent to each worker once, before the
   first call that needs it.
3. Of the globals that are reached, those that cannot change without being bound anew (numbers, modules, definitions)
   go into a pickle before that of the call: `prepare`. Data goes into the pickle of the call itself, as a call of
   `globals.bind`, so that what is one object stays one.
4. In the worker `store_object` stores the pickles of definitions as they arrive. As the call is read, `prepare` binds
   the constants, makes or changes the definitions and binds these; then the rest is read, which binds the data.
5. `AnswerReducer` pickles the result. What came from the script goes by its key, so the script finds its own object.

A record keeps its definition alive in the parent, and its handle the copy in the workers. `PackedCall.alive` holds
what a result may refer to until that has been rebuilt.
"""
