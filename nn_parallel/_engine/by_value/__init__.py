"""Functions, classes and globals of a script, and how they reach a worker.

The problem. A worker has not run the script. To run the script again in each worker would need a ``__main__`` guard,
and would take as long as the script does. So a call must bring everything that it needs from the script. cloudpickle
can do that: for each call it pickles a function with its code and with all globals that the code reads, and a class
with all its attributes. Three things go wrong then:

- *Time.* To pickle a function with its globals takes ten times as long as a small call, and the globals may be large.
- *Identity.* Each call brings new copies of functions and of the objects in globals. Only classes stay the same,
  because cloudpickle gives each class an id. The cache of a function decorated with `functools.cache` is empty in each
  call. A mark such as ``MISSING = object()`` is a different object each time. Even objects that the worker could import
  (a lock, a registry, a sentinel) are copied.
- *Hooks.* In the worker, cloudpickle first creates an empty class with the metaclass, and then sets the attributes. So
  the metaclass and ``__init_subclass__`` run a second time, on an empty class and without the keyword arguments of the
  class statement.

Three simpler schemes fail:

- A dict of globals cannot be identified by its ``__name__``, which is the name of a module. attrs generates methods
  whose dicts of globals contain no ``__name__``, so these dicts could not be distinguished.
- A class cannot be identified by its qualified name, because one function may create many classes with the same name.
- Changes cannot be found by comparing pickles, because two pickles of equal objects may differ.

So there is one rule, and every module of this package serves it:

    *An object that a fresh interpreter would import is sent by name. A definition of the script is sent once, and
    again after one of its parts, such as an attribute, has become another object. Everything else is data, and is sent
    with each call.*

The three modules:

- `reducer` decides how an object is sent. It sends a function, class or module by name only if the module is installed
  with Python, or if the finders of `sys.meta_path` lead to the file from which the script has loaded it. Definitions
  are: classes; functions that are bound to a global with the function's name and that hold no data in defaults,
  attributes or closure variables; functions decorated with `functools.cache`; type variables and type aliases. Each
  definition has a key. Each `object()` has a key too, because only its identity matters. The script and its workers use
  the same key for the same object, so a result can refer to an object of the script by the key.
- `packer` is the sending side. It keeps a record of each definition that it has sent: the parts of the definition, the
  other definitions that it refers to, and the globals that its code reads, which are found in the bytecode
  (`reducer.names_in`). The record is current as long as all parts are the same objects. A change inside a part is
  noticed only if the part is a function, or a list, dict or set in a class. For example, a new element of a list in a
  class is noticed, but a new attribute of another object in the class is not.
- `globals` is the receiving side. A *namespace* is a dict of globals of the script. Each namespace has a key too, so
  functions that share their globals in the script share them in a worker. A class or function that arrives again
  changes the existing object. The *binding* of a global is the assignment of an object to its name. Each binding has a
  number, which changes when the script assigns another object. If a task assigns an object to a global, this object
  stays until a binding with another number arrives.

One call, from the script to the worker:

1. `Packer.pack(fn, args, kwargs)` checks whether the workers keep ``fn``, and whether all globals and attributes that
   ``fn`` reaches are still the same objects. If so, the number of the kept function is sent instead of ``fn``. If in
   addition all arguments are numbers, short strings and the like, they are pickled directly, and steps 2 and 3 are left
   out.
2. In all other cases `_CallReducer` pickles ``(fn, args, kwargs)``, with None for an ``fn`` that the workers keep. For
   each definition and function in this tuple, `_CallReducer` follows the packer's records to all definitions and
   globals that the call needs. Definitions that are new or have changed are packed (`Packer.definition`). The script
   keeps a `Handle` for each object that workers store, such as the pickle of a definition or an object from `put`.
   Each worker is sent such an object once, before the first call that needs it.
3. Some globals change only if the script binds them to another object: their values are numbers, modules, definitions
   and the like. These globals go into a pickle that precedes the pickle of the call, as arguments of `globals.prepare`.
   Globals that are data go into the pickle of the call itself, as calls of `globals.bind`. So an object that is both a
   global and an argument is one object in the worker as well.
4. In the worker, `store_object` stores the pickles of definitions as they arrive. When the call is read, `prepare` runs
   first: it binds the globals that are constants, creates or changes the definitions, and binds the globals whose
   values are definitions. Then the call itself is unpickled, which binds the globals that are data.
5. `AnswerReducer` pickles the result. A definition that came from the script is pickled as its key, so the script finds
   its own object.

How long things live: a record keeps its definition alive in the script. The workers keep their copies as long as the
handle in the record lives. `PackedCall.alive` holds the objects to which a result may refer, until the result has been
rebuilt.
"""
