"""Functions, classes and globals of a script, and how they reach a worker.

The problem. A worker has not run the script. To run the script again in each worker would need a ``__main__`` guard,
and would take as long as the script does. So a call must bring everything that it needs from the script. cloudpickle
can do that: for each call it pickles a function with its code and with all globals that the code reads, and a class
with all its attributes. Three things go wrong then:

- *Time.* To pickle a function with its globals takes ten times as long as a small call, and the globals may be large.
- *Identity.* Each call brings new copies of functions and of the objects in globals. Only classes stay the same,
  because cloudpickle gives each class an id. A `functools.cache` is empty in each call. A mark such as
  ``MISSING = object()`` is a different object each time. Even objects that the worker could import (a lock, a registry,
  a sentinel) are copied.
- *Hooks.* The metaclass makes an empty class first, and the attributes are set afterwards. So ``__init_subclass__`` and
  the metaclass run a second time, on an empty class and without the keyword arguments of the class statement.

Three simpler schemes fail:

- A dict of globals cannot be identified by the name of its module. attrs generates methods whose globals have no name
  at all, so these dicts could not be distinguished.
- A class cannot be identified by its qualified name, because one function may make many classes of that name.
- Changes cannot be found by comparing pickles, because two pickles of equal objects may differ.

So there is one rule, and every module of this package serves it:

    *An object that a fresh interpreter would import is sent by name. A definition of the script is sent once, and
    again after the script has bound something in it to another object. Everything else is data, and is sent with each
    call.*

The three modules:

- `reducer` decides how an object is sent. It sends a function, class or module by name only if the module is installed
  with Python, or if the finders of `sys.meta_path` lead to the file from which the script has loaded it. Definitions
  are: classes; functions that are bound to a global with the function's name and that hold no data in defaults,
  attributes or closure variables; results of `functools.cache`; type variables and type aliases. Each definition has a
  key. Each `object()` has a key too, because only its identity matters. The script and its workers use the same key for
  the same object, so a result can refer to an object of the script by the key.
- `packer` is the sending side. It keeps a record of each definition that it has sent: the parts of the definition, the
  other definitions that it refers to, and the globals that its code reads, which are found in the bytecode
  (`reducer.names_in`). The record is current as long as all parts are the same objects. Changes inside a part are not
  seen, with two exceptions: functions, and the elements of the lists, dicts and sets of a class.
- `globals` is the receiving side. A *namespace* is a dict of globals of the script. It has a key too, so functions that
  share their globals in the script share them in a worker. A class or function that arrives again changes the existing
  object. Each binding of a global has a number, which changes when the script binds the name to another object. As long
  as the number is the same, the worker keeps the value to which a task has bound the name.

One call, from the script to the worker:

1. `Packer.pack(fn, args, kwargs)` checks whether the workers keep ``fn``, and whether all globals and attributes that
   ``fn`` reaches are still the same objects. If so, the number of the kept function is sent in the place of ``fn``.
   Arguments that are numbers, short strings and the like are then pickled directly, and the next steps are left out.
2. Otherwise `_CallReducer` pickles ``(fn, args, kwargs)``. For each definition and function in them it follows the
   records to all definitions and globals that the call needs. It packs definitions that are new or have changed
   (`Packer.definition`). The workers store the pickle of a definition under the number of a `Handle`, as they store an
   object from `put`. Each worker is sent the pickle once, before the first call that needs it.
3. Globals that cannot change unless the script binds them to another object (numbers, modules, definitions) go into a
   pickle before that of the call, as arguments of `globals.prepare`. Globals that are data go into the pickle of the
   call itself, as calls of `globals.bind`. So an object that is both a global and an argument is one object in the
   worker as well.
4. In the worker, `store_object` stores the pickles of definitions as they arrive. When the call is read, `prepare` runs
   first: it binds the constants, makes or changes the definitions, and binds the globals that refer to them. Then the
   call itself is unpickled, which binds the data.
5. `AnswerReducer` pickles the result. A definition that came from the script is pickled as its key, so the script finds
   its own object.

How long things live: a record keeps its definition alive in the script, and the handle in the record keeps the copies
in the workers. `PackedCall.alive` holds the objects to which a result may refer, until the result has been rebuilt.
"""
