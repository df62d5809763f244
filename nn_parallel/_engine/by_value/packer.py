"""The sending side: packs calls, and the definitions and functions that workers keep for many calls.

To pack an object means to pickle it, with the memory of large tensors beside the pickle (`pickling`), and to turn the
result into a *payload*, the form in which the pool sends the object. A *definition* is a class or a named function of
the script. A *handle* stands for a packed object that the workers keep. The docstring of this package describes a call
step by step.
"""

from __future__ import annotations

import abc
import functools
import itertools
import operator
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from ..interrupts import RLock
from ..pickling import Packed, dump_atoms, dumps
from ..process_environment import ProcessEnvironment
from ..ranks.records import call_name
from ..tracebacks import warn_user
from . import globals as receiving
from . import reducer
from .globals import CachedFunction, GlobalName, Missing, Namespace, Needed, keys
from .reducer import Deferred, Reducer, contents_of_function, goes_by_name, is_constant, is_definition

# The number of functions, and of definitions, that a packer remembers as known to the workers. If there are more, the
# packer forgets the least recently used one, and packs it again when it is needed again.
FUNCTIONS_KEPT = 128
DEFINITIONS_KEPT = 256
ELEMENTS_COMPARED = 1000  # if a list, dict or set in a class has more elements, a change of its elements is not noticed


class CallOptions(NamedTuple):
    """Options of all calls of one executor."""

    pass_device: bool  # whether the worker binds its device to the parameter ``device`` of the function
    timeout_s: float | None  # how long a call may run on a worker; if None, there is no limit


class Handle:
    """A reference to an object that workers keep, such as an object from `ParallelExecutor.put` or a definition.

    If an argument of a call is a handle, the function receives the object itself. The workers delete the object when
    the script has no reference to the handle any more.
    """

    def __init__(self, payload: Any, kind: str, owner: object) -> None:
        """Hold a packed object.

        Args:
            payload: the packed object, as `Packer` sends it.
            kind: the kind of the object, for the ``repr``.
            owner: the packer that makes the handle. Only calls that this packer packs may contain the handle.
        """
        self.number = next(_numbers)
        self.payload = payload
        self._kind = kind
        self.owner = owner
        # The definitions and globals to which the object refers. Each call with this handle updates them in the worker.
        self.definitions: Sequence[Any] = ()
        self.globals: Sequence[GlobalName] = ()
        # Maps the `id` of each `torch.nn.Parameter` in the object to a reference to this parameter. If a call contains
        # one of these parameters a second time, for example inside an optimizer, a warning is issued.
        self.parameters: Mapping[int, weakref.ref[Any]] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError(
            "a handle works only in calls of the executor whose put() made it: put the object with this executor too"
        )

    def __repr__(self) -> str:
        return f"<Handle of a {self._kind}>"


class PackedCall:
    """A packed function with its arguments, and the handles of the objects that a worker must have before the call.

    This object refers to the handles, so the workers keep the objects at least as long as it exists.
    """

    __slots__ = ("alive", "arguments", "function", "handles", "name", "options", "payload")

    def __init__(
        self,
        name: str,
        options: CallOptions,
        handles: list[Handle],
        function: int = 0,
        arguments: bytes | None = None,
        payload: Any = None,
        alive: Sequence[Any] = (),
    ) -> None:
        """Hold the parts of a call.

        Args:
            name: the name of the function, for error messages.
            options: the options of the executor.
            handles: the objects that a worker must have before the call.
            function: the number under which the workers keep the function; 0 if the function is in the payload.
            arguments: the pickled arguments, if the workers keep the function and if all arguments are numbers, short
                strings and the like.
            payload: the packed ``(fn, args, kwargs)`` in all other cases; ``fn`` is None if the workers keep it.
            alive: the definitions and namespaces to which the result of the call may refer. This object keeps them
                alive until the result has been unpickled.
        """
        self.name = name
        self.options = options
        self.handles = handles
        self.function = function
        self.arguments = arguments
        self.payload = payload
        self.alive = alive


class Definition:
    """The record of one definition of the script, in the version that was last packed for the workers.

    The record shows whether the definition has changed since then, and so must be packed again.
    """

    def __init__(
        self,
        obj: Any,
        key: str,
        parts: list[Any],
        pickler: _DefinitionReducer,
        made_before: Sequence[Any],
        handle: Handle,
    ) -> None:
        self.obj = obj
        self.key = key
        self.parts = parts  # the objects of which the definition consisted when it was packed; see `_parts`
        self.made_before = made_before  # other definitions that a worker must create before this one
        # The other definitions and the globals that a worker needs with this definition.
        self.definitions = [*pickler.definitions.values(), *made_before]
        self.globals = [*pickler.globals, *filter(None, [reducer.global_naming(obj)])]
        self.users_modules = pickler.users_modules  # the user's own modules in the pickle, to warn if they are reloaded
        self.handle = handle  # the handle of the definition's pickle

    def is_current(self) -> bool:
        """Return whether the definition still consists of the same objects as when it was packed."""
        return _is_made_of(self.obj, self.parts)


class _DefinitionReducer(Reducer):
    """The pickler of one definition, or of an object that workers keep.

    It notes the other definitions, and the globals, to which the pickled object refers, because a call that needs the
    object needs them too.
    """

    def __init__(self, *defined: Any) -> None:
        """Make a pickler that pickles the definitions ``defined`` by value, and all other definitions as references."""
        super().__init__()
        self._defined = defined
        self.by_value.update(map(id, defined))
        self.definitions: dict[int, Any] = {}
        self.globals: dict[GlobalName, None] = {}

    def another(self) -> _DefinitionReducer:
        return _DefinitionReducer(*self._defined)

    def refer_to(self, obj: Any) -> Any:
        self.definitions[id(obj)] = obj
        return receiving.find_definition, (keys.key_of_or_add(obj),)

    def note_globals(self, names: Sequence[GlobalName]) -> None:
        self.globals.update(dict.fromkeys(names))


class _CallReducer(Reducer):
    """The pickler of a call, or of a function that workers keep.

    It collects the definitions and the *constants* that the call needs, for a pickle that precedes the call. Constants
    are globals whose values cannot change in place, such as numbers, or are imported by the worker, such as modules.
    All other globals, such as lists, are *data*, and become part of the pickle of the call.
    """

    def __init__(self, packer: Packer) -> None:
        super().__init__()
        self._packer = packer
        self.needed: dict[int, Definition] = {}  # maps the `id` of a definition to its record
        self.global_values: dict[tuple[Namespace, str], Any] = {}  # the value of each global in the call
        # For each global that is a constant, such as a number or a module: the arguments of `globals.bind`.
        self.constants: list[tuple[Namespace, str, int, Any]] = []
        # Maps the `id` of a definition to the globals that have this definition as value, each with the number of the
        # binding.
        self.bound: dict[int, list[tuple[Namespace, str, int]]] = {}
        self.handles: list[Handle] = []  # the handles in the pickle, such as handles among the arguments of the call
        self.has_data = False  # whether a global is data; if so, the workers do not keep the function

    def another(self) -> _CallReducer:
        return _CallReducer(self._packer)

    def refer_to(self, obj: Any) -> Any:
        bindings = self._collect_needed([obj], [])
        reference = receiving.find_definition, (keys.key_of(obj),)
        return (*reference, bindings, None, None, reducer.ignore_state) if bindings else reference

    def note_globals(self, names: Sequence[GlobalName]) -> list[Deferred]:
        return self._collect_needed([], names)

    def _reduce_handle(self, handle: Handle) -> Any:
        if handle.owner is not self._packer:
            return NotImplemented
        self.handles.append(handle)
        bindings = self._collect_needed(handle.definitions, handle.globals)
        return receiving.stored_object, (handle.number,), bindings, None, None, reducer.ignore_state

    REDUCERS: ClassVar = {**Reducer.REDUCERS, Handle: _reduce_handle}

    def _collect_needed(self, definitions: Iterable[Any], names: Iterable[GlobalName]) -> list[Deferred]:
        """Record that the call needs these definitions and globals, and all others to which they refer.

        Returns:
            The bindings of all globals that are data. They belong in the pickle of the call, whereas constants and
            definitions go into the pickle that precedes the call.
        """
        with self._packer.lock:
            return self._collect(list(definitions), list(names))

    def _collect(self, pending: list[Any], pending_names: list[GlobalName]) -> list[Deferred]:
        """Do the work of `_collect_needed`, while this thread holds the lock of the packer."""
        data: list[Deferred] = []
        while pending or pending_names:
            for obj in pending:
                if id(obj) not in self.needed:
                    record = self.needed[id(obj)] = self._packer.definition(obj)
                    pending += record.definitions
                    pending_names += record.globals
                    self.users_modules.update(record.users_modules)
            pending = []
            if pending_names:
                pending += self._resolve(*pending_names.pop(), data)
        return data

    def _resolve(self, namespace: Namespace, name: str, is_bound_by_code: bool, data: list[Deferred]) -> list[Any]:
        """Record that the call needs a global. If its value is data, add its binding to ``data``.

        Returns:
            A list with the value, if the value is a definition, or an empty list.
        """
        if (namespace, name) in self.global_values or name == "__builtins__":
            return []
        value = self.global_values[namespace, name] = namespace.variables.get(name, Missing)
        # A name without a value in the script is usually a builtin, such as `len`, and nothing is sent. But if the code
        # of a function assigns to the name, or if an earlier call has sent a value, a worker may have a value. It must
        # then learn that the script has none.
        if value is Missing and not is_bound_by_code and name not in namespace.sent:
            return []
        number = _number_of_binding(namespace, name, value)
        if is_constant(value):
            self.constants.append((namespace, name, number, value))
            if isinstance(value, types.ModuleType):
                self.note_module(value)
        elif is_definition(value, is_global=True):
            self.bound.setdefault(id(value), []).append((namespace, name, number))
            return [value]
        elif (module := self._import_of(namespace, name, number, value)) is not None:
            self.constants.append((namespace, name, number, Deferred(receiving.imported, module, name)))
        else:
            self.has_data = True
            data.append(Deferred(receiving.bind, namespace, name, number, value))
        return []

    def _import_of(self, namespace: Namespace, name: str, number: int, value: Any) -> str | None:
        """Return the name of the module from which a worker imports a global's value; None if the value is data.

        An object of a library is not copied, because the worker can use the object of its own copy of the library. An
        object of a user's module, such as a configuration that the script changes, is sent as data. It is imported only
        if it cannot be pickled.
        """
        if namespace.imports.get(name, (0,))[0] != number:  # the search is slow, so it is made once for each binding
            module = reducer.module_that_holds(name, value)
            if module is not None and reducer.is_users(module) and self._can_pickle(value):
                module = None
            namespace.imports[name] = number, None if module is None else module.__name__
        return namespace.imports[name][1]

    def alive(self) -> list[Any]:
        """Return the definitions and namespaces to which the result of the call may refer.

        They must stay alive in the script until the result has been unpickled.
        """
        definitions = [record.obj for record in self.needed.values()]
        return [*definitions, *self.namespaces, *{namespace for namespace, _ in self.global_values}]

    def prepare_arguments(self) -> tuple[Any, ...]:
        """Return the arguments of `globals.prepare`.

        The worker runs `prepare` before it unpickles the call, to create the definitions that the call needs.
        """
        records = sorted(self.needed.items(), key=_order)
        needed = []
        for identity, record in records:
            before = [keys.key_of(obj) or "" for obj in record.made_before]
            needed.append(Needed(record.key, record.handle.number, before, self.bound.get(identity, ())))
        return self.constants, needed


class _SentFunction:
    """A function that workers keep, with all objects to which the packed function refers.

    If one of these objects has been replaced by another one, the workers' copy is outdated; see `is_current`.
    """

    def __init__(self, fn: Any, call: _CallReducer, handles: Sequence[Handle], environment: Handle | None) -> None:
        """Note the objects to which ``fn`` refers now, so that a later call can tell whether one was replaced.

        Args:
            fn: the function.
            call: the pickler that has pickled the function.
            handles: first the handle of the function, then the handles of objects that workers must have before they
                unpickle the function.
            environment: the handle of the script's environment, or None; see `Packer`.
        """
        self.handle = handles[0]
        self.handles = list(handles)
        self._environment = environment
        self._records = list(call.needed.values())
        self.alive = call.alive()
        self._function = fn
        self._globals = getattr(fn, "__globals__", None)
        self._is_definition = id(fn) in call.needed
        self._parts = _parts(fn)
        values: dict[int, tuple[dict[str, Any], list[str], list[Any]]] = {}
        watched: list[tuple[dict[str, Any], str, Any]] = []
        for (namespace, name), value in call.global_values.items():
            watched.append((namespace.variables, name, value))
            # The number of the binding is compared as well as the value. For example, the script binds the name to
            # another value, makes a call, and binds the first value again. The name then has its old value, but a new
            # number. So the function must be packed again, because its pickle contains the number.
            if name in namespace.sent:
                watched.append((namespace.sent, name, namespace.sent[name]))
        # If the ``__spec__`` of a module is another object, the module was reloaded.
        watched += [(vars(module), "__spec__", module.__spec__) for module in call.users_modules.values()]
        for names, name, value in watched:
            _, its_names, its_values = values.setdefault(id(names), (names, [], []))
            its_names.append(name)
            its_values.append(value)
        # The values that `is_current` compares: one tuple for each dict in which it looks up names, with the dict, the
        # names, and the values that these names had in the dict.
        self._values = list(values.values())

    def is_current(self, fn: Any, environment: Handle | None) -> bool:
        """Return whether a call of ``fn`` by the script can run the copy of the function that the workers keep.

        Three conditions must hold. First, ``fn`` is the function that was packed, or a lambda or inner function with
        the same code, defaults, closure variables and attributes as the packed function. Second, all names to which the
        packed function refers are still bound to the same objects. Third, the environment of the script is the same.
        """
        if environment is not self._environment:
            return False
        if fn is not self._function and (self._is_definition or getattr(fn, "__globals__", None) is not self._globals):
            return False
        if not self._is_definition and not _is_made_of(fn, self._parts):
            return False
        for names, its_names, its_values in self._values:
            if not all(map(operator.is_, map(names.get, its_names, _MISSING), its_values)):
                return False
        return all(record.is_current() for record in self._records)


class Packer:
    """The packer of one pool, with a record of each definition and function that the workers have."""

    def __init__(
        self, make_payload: Callable[[Packed], Any], on_forgotten: Callable[[int], None], is_elsewhere: bool = False
    ) -> None:
        """Make a packer for workers that have nothing yet.

        Args:
            make_payload: copies a packed object into a payload of the pool's messages: `channel.Payload` for local
                workers, `ray.worker.Sent` on Ray.
            on_forgotten: called with the number of a handle after the handle was deleted. The call may come in any
                thread, because garbage collection may run in any thread.
            is_elsewhere: whether the workers are on other machines. If so, the import path is sent to them without the
                folders of the script's Python installation.
        """
        self.make_payload = make_payload
        self._on_forgotten = on_forgotten
        self._process_environment = ProcessEnvironment(is_elsewhere)
        # The handle of the script's environment. It is None until the script changes the environment.
        self._environment: Handle | None = None
        # Maps the `id` of a definition to its record. The record keeps the definition alive, so that no other object
        # gets the same `id`. The most recently used record is last.
        self._definitions = OrderedDict[int, Definition]()
        # Maps the `id` of the code of a function to the function's record, or to `_CALLED_ONCE` or `_NOT_KEPT`. The
        # most recently used entry is last.
        self._functions = OrderedDict[int, _SentFunction | str]()
        # Maps the name of a user's module to its last known ``__spec__``, which is another object after a reload.
        self._specs: dict[str, Any] = {}
        # Reentrant, because methods of the user's objects and finalizers run during pickling, and may make calls too.
        self.lock = RLock()

    def pack(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        options: CallOptions,
        name: str = "",
    ) -> PackedCall:
        """Pack a call.

        The payload consists of up to three pickles. The first one calls `adopt_environment`, if the environment of the
        script has changed since the pool was made. The second one calls `prepare`. The last one is ``(fn, args,
        kwargs)``, where ``fn`` is None if the workers keep it. Objects with a handle are sent before the call.

        Args:
            fn: the function.
            args: positional arguments of ``fn``.
            kwargs: keyword arguments of ``fn``.
            options: options of the executor.
            name: the name of the function in error messages; if it is empty, the name of ``fn``.

        Raises:
            TransferError: the call cannot be pickled.
        """
        return self.look_at(fn, options, name).pack(args, kwargs)

    def look_at(self, fn: Callable[..., Any], options: CallOptions, name: str = "") -> FunctionPacker:
        """Return a packer of calls of ``fn``, after checking whether the workers keep ``fn``.

        The packer is valid until a name that ``fn`` uses is bound to another object, or until the script changes its
        environment.
        """
        with self.lock:
            if self._process_environment.changed():
                self._environment = self._make_handle(dumps(self._process_environment), "process environment")
            return FunctionPacker(self, fn, options, name or call_name(fn), self._environment, self._sent_function(fn))

    def warn_of_reloads(self, modules: Mapping[str, types.ModuleType]) -> None:
        """Warn of user modules that were reloaded since workers first needed them."""
        for name, module in modules.items():
            spec = self._specs.setdefault(name, module.__spec__)
            if spec is not module.__spec__:
                self._specs[name] = module.__spec__
                warn_user(
                    f"Module {name} was reloaded in this process, but workers keep the version that they have "
                    f"imported. Make a new executor, or send the module by value: "
                    f"cloudpickle.register_pickle_by_value({name})."
                )

    def put(self, obj: Any) -> Handle:
        """Pack ``obj`` for the workers to keep as long as its handle lives."""
        pickler = _DefinitionReducer()
        handle = self._make_handle(pickler.pack(obj), type(obj).__qualname__)
        handle.definitions = list(pickler.definitions.values())
        handle.globals = list(pickler.globals)
        handle.parameters = pickler.parameters
        return handle

    def definition(self, obj: Any) -> Definition:
        """Return the record of a definition. A definition that is new or has changed is packed first."""
        record = self._definitions.get(id(obj))
        if record is None or not record.is_current():
            record = self._definitions[id(obj)] = self._define(obj)
        self._definitions.move_to_end(id(obj))
        if len(self._definitions) > DEFINITIONS_KEPT:  # a definition that is dropped here is sent again when needed
            self._definitions.popitem(last=False)
        return record

    def close(self) -> None:
        """Drop all records, because the pool has ended."""
        # The function that the constructor got refers to the supervisor. The packer drops this function, because
        # otherwise the supervisor would stay alive as long as the packer.
        self._on_forgotten = lambda number: None
        self._functions.clear()
        self._environment = None
        self._definitions.clear()

    def _define(self, obj: Any) -> Definition:
        key = keys.key_of_or_add(obj)
        made_before: list[Any] = []
        if isinstance(obj, type):
            others = (*obj.__bases__, type(obj))
            made_before = [other for other in others if not goes_by_name(other) and is_definition(other)]
        parts = _parts(obj)
        pickler = _DefinitionReducer(obj)
        packed = pickler.pack(obj, lambda: {_described(obj): obj})
        return Definition(obj, key, parts, pickler, made_before, self._make_handle(packed, "definition"))

    def _make_handle(self, packed: Packed, what: str) -> Handle:
        handle = Handle(self.make_payload(packed), what, self)
        weakref.finalize(handle, self._forget, handle.number).atexit = False
        return handle

    def _forget(self, number: int) -> None:
        self._on_forgotten(number)  # looked up now, because `close` may have replaced it

    def _sent_function(self, fn: Any) -> _SentFunction | None:
        """Return the `_SentFunction` of ``fn``, or None if the workers do not keep ``fn``.

        The first call of a function is only noted. On the second call, the function is packed for the workers to keep,
        unless it refers to data.
        """
        identity = id(getattr(fn, "__code__", fn))
        sent = self._functions.get(identity)
        if sent is _CALLED_ONCE:
            sent = self._send_function(fn)
        elif sent is None or (isinstance(sent, _SentFunction) and not sent.is_current(fn, self._environment)):
            sent = _CALLED_ONCE
        self._functions[identity] = sent
        self._functions.move_to_end(identity)
        if len(self._functions) > FUNCTIONS_KEPT:
            self._functions.popitem(last=False)
        return sent if isinstance(sent, _SentFunction) else None

    def _send_function(self, fn: Any) -> _SentFunction | str:
        """Pack a function for the workers to keep. Return `_NOT_KEPT` if each call must bring the function."""
        call = _CallReducer(self)
        packed = call.pack(fn, lambda: {"the function": fn})
        can_stay = id(fn) in call.needed or is_constant(fn) or _is_plain_function(fn)
        if not can_stay or call.has_data or call.handles or packed.buffers or packed.shared:
            return _NOT_KEPT
        before = _DefinitionReducer().pack(call.prepare_arguments())
        environment = self._environment.number if self._environment else 0
        handle = self._make_handle(dumps(CachedFunction(environment, before.pickle, packed.pickle)), "function")
        return _SentFunction(fn, call, [handle, *_handles_of(call, self._environment)], self._environment)


class FunctionPacker:
    """The packer of several calls of one function.

    `Packer.look_at` makes this object, and checks once for all these calls whether the workers keep the function.
    """

    def __init__(
        self,
        packer: Packer,
        fn: Callable[..., Any],
        options: CallOptions,
        name: str,
        environment: Handle | None,
        sent: _SentFunction | None,
    ) -> None:
        """Make a packer of calls of ``fn``.

        Args:
            packer: the packer of the pool.
            fn: the function.
            options: options of the executor.
            name: the name of the function in error messages.
            environment: the handle of the script's environment; None if the script has not changed its environment
                since the pool was made.
            sent: the function as the workers keep it, or None if they do not keep it.
        """
        self._packer = packer
        self._fn = fn
        self._options = options
        self._name = name
        self._environment = environment
        self._sent = sent
        self._kept_call: PackedCall | None = None  # the call that items of a map share; set by `pack_item`

    def pack(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> PackedCall:
        """Pack a call of the function; see `Packer.pack`."""
        sent = self._sent
        if sent and not kwargs and (arguments := dump_atoms(args)) is not None:
            return self._call_of(sent, arguments)
        call = _CallReducer(self._packer)
        packed = call.pack(
            (None if sent else self._fn, args, kwargs), functools.partial(_call_parts, self._fn, args, kwargs)
        )
        handles = [*call.handles, *_handles_of(call, self._environment)]
        # The last step below is the first one that the worker does: the environment, the definitions, the call itself.
        if call.needed or call.constants:
            packed = packed.after(_DefinitionReducer().pack(Deferred(receiving.prepare, *call.prepare_arguments())))
        if self._environment is not None:
            packed = packed.after(dumps(Deferred(receiving.adopt_environment, self._environment.number)))
        self._packer.warn_of_reloads(call.users_modules)
        _warn_of_copied_parameters(call)
        if sent:
            handles += sent.handles
        number = sent.handle.number if sent else 0
        payload = self._packer.make_payload(packed)
        return PackedCall(self._name, self._options, handles, number, payload=payload, alive=call.alive())

    def pack_item(self, args: tuple[Any, ...]) -> tuple[PackedCall, bytes | None]:
        """Pack the call for an item of a map. Return the call, and its arguments if they are not in the call.

        If the workers keep the function, all items whose arguments are numbers, short strings and the like share one
        `PackedCall`. Python's garbage collector then has half as many objects to traverse.
        """
        if self._sent and (arguments := dump_atoms(args)) is not None:
            self._kept_call = self._kept_call or self._call_of(self._sent, None)
            return self._kept_call, arguments
        return self.pack(args, {}), None

    def _call_of(self, sent: _SentFunction, arguments: bytes | None) -> PackedCall:
        return PackedCall(self._name, self._options, sent.handles, sent.handle.number, arguments, alive=sent.alive)


def _handles_of(call: _CallReducer, environment: Handle | None) -> list[Handle]:
    """Return the handles of the definitions and of the environment that a worker must have before the call."""
    handles = [record.handle for record in call.needed.values()]
    return handles if environment is None else [*handles, environment]


def _warn_of_copied_parameters(call: _CallReducer) -> None:
    """Warn if parameters of a model that was `put` also come with the call, for example inside an optimizer."""
    for handle in call.handles:
        both = handle.parameters.keys() & call.parameters.keys()
        if any(handle.parameters[identity]() is call.parameters[identity]() is not None for identity in both):
            warn_user(
                f"The call has parameters of {handle!r} also in another object, such as an optimizer in a global. A "
                f"worker gets two copies of them, so a step of the optimizer does not change the model. Put both "
                f"together: put((model, optimizer))."
            )


def _is_plain_function(fn: Any) -> bool:
    """Return whether ``fn`` is a lambda or inner function without state.

    Workers may keep such a function for several calls, because no call can notice that earlier calls have run the same
    function object.
    """
    return type(fn) is types.FunctionType and not fn.__closure__ and all(map(is_constant, contents_of_function(fn)))


def _parts(obj: Any) -> list[Any]:
    """Return the objects of which a function, class or other definition consists.

    If they are still the same as when the definition was packed, it need not be packed again; see `_is_made_of`. The
    parts of a function are its code, defaults, closure variables and attributes. If one of these is a function, its
    parts are included too. The parts of a class are its bases, attributes and virtual subclasses, the parts of the
    functions among the attributes, and the elements of each list, dict or set among all these.
    """
    parts = list[Any]()
    functions = [obj]
    if isinstance(obj, type):
        parts += obj.__bases__
        for name, value in list(vars(obj).items()):
            # Empty annotations are not compared, because Python adds them to a class if ``__annotations__`` is read.
            if name not in reducer.NOT_COPIED and (name != "__annotations__" or value):
                parts += name, value
        functions = [function for value in parts for function in _functions_in(value)]
        if isinstance(obj, abc.ABCMeta):
            parts += reducer.virtual_subclasses(obj)
    seen = set[int]()
    while functions:
        function = functions.pop()
        if id(function) not in seen:
            seen.add(id(function))
            contents = contents_of_function(function)
            parts.append(getattr(function, "__code__", None))
            parts += contents
            functions += [content for content in contents if type(content) is types.FunctionType]
    if isinstance(obj, type):
        containers = [value for value in parts if isinstance(value, _CONTAINERS) and len(value) <= ELEMENTS_COMPARED]
        for container in containers:
            parts += itertools.chain(*container.items()) if isinstance(container, dict) else container
    return parts


def _functions_in(attribute: Any) -> list[Any]:
    """Return the functions in an attribute of a class: a method, a property or a `functools.singledispatchmethod`."""
    if type(attribute) is types.FunctionType:
        return [attribute]
    if type(attribute) is functools.singledispatchmethod:
        return [attribute.dispatcher]
    if type(attribute) is property:
        return [function for function in (attribute.fget, attribute.fset, attribute.fdel) if function is not None]
    return [attribute.__func__] if type(attribute) in (classmethod, staticmethod) else []


def _is_made_of(obj: Any, parts: list[Any]) -> bool:
    """Return whether ``obj`` still consists of exactly the objects ``parts``, which `_parts` has returned earlier."""
    present_parts = _parts(obj)
    return len(present_parts) == len(parts) and all(map(operator.is_, present_parts, parts))


def _number_of_binding(namespace: Namespace, name: str, value: Any) -> int:
    """Return the number of the present binding of a global.

    If ``value`` is not the object that was last sent for this global, the binding gets a new number. While the number
    stays the same, a worker does not overwrite a value that a task has assigned to the global.
    """
    number, last = namespace.sent.get(name, (0, None))
    last_value = last() if type(last) is weakref.ref else last
    is_deleted = last_value is None and last is not None
    if number and last_value is value and not is_deleted:
        return number
    number = next(_numbers)
    try:  # a weak reference, so that the record does not keep the value alive
        namespace.sent[name] = number, weakref.ref(value)
    except TypeError:
        namespace.sent[name] = number, value
    return number


def _order(item: tuple[int, Definition]) -> int:
    """Return a number by which definitions are sorted: first functions, then classes, then others.

    A worker creates the functions first, because unpickling an attribute of a class may call a function.
    """
    obj = item[1].obj
    return 0 if isinstance(obj, types.FunctionType) else 1 if isinstance(obj, type) else 2


def _described(obj: Any) -> str:
    """Return the kind and the name of a definition, for error messages."""
    kind = "class" if isinstance(obj, type) else "function" if isinstance(obj, types.FunctionType) else "object"
    return f"{kind} {getattr(obj, '__qualname__', type(obj).__qualname__)!r}"


def _call_parts(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return a dict that maps the names for error messages to the function and the arguments of a call."""
    named = {"the function": fn}
    named |= {f"argument {index}": value for index, value in enumerate(args)}
    return named | {f"argument {name!r}": value for name, value in kwargs.items()}


# Values in `Packer._functions` that mark functions which the workers do not keep.
_CALLED_ONCE = "called once"
_NOT_KEPT = "not kept, because it refers to data"
# Yields `Missing` forever. `_SentFunction.is_current` maps `dict.get` over names, and takes the default of each look-up
# from this iterator.
_MISSING = itertools.repeat(Missing)
_numbers = itertools.count(1)  # for handles and bindings
# If a container of one of these types is an attribute of a class, `_parts` includes the elements of the container. So
# the class is sent again after an element was replaced, added or removed.
_CONTAINERS = (dict, list, set, deque)
