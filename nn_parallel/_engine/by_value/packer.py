"""The sending side: calls, and what workers keep because many calls need it."""

from __future__ import annotations

import abc
import functools
import itertools
import operator
import threading
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from ..pickling import Packed, dump_atoms, dumps
from ..process_environment import ProcessEnvironment
from ..ranks.records import call_name
from ..tracebacks import warn_user
from . import globals as receiving
from . import reducer
from .globals import CachedFunction, GlobalName, Missing, Namespace, Needed, keys
from .reducer import Deferred, Reducer, contents_of_function, goes_by_name, is_constant, is_definition

FUNCTIONS_KEPT = 128
DEFINITIONS_KEPT = 256
ELEMENTS_COMPARED = 1000  # of a container that is an attribute of a class


class CallOptions(NamedTuple):
    """Options of all calls of one executor."""

    pass_device: bool
    timeout_s: float | None  # seconds that a call may take on a worker, from when it begins there


class Handle:
    """Stands for an object that `ParallelExecutor.put` keeps in the workers; a task receives the object itself.

    The workers let go of the object when the last reference to its handle is gone.
    """

    def __init__(self, payload: Any, what: str, owner: object) -> None:
        """``payload``: the packed object, as `Packer` sends it."""
        self.number = next(_numbers)
        self.payload = payload
        self._what = what
        self.owner = owner
        # What the object refers to is brought up to date by each call that this goes with.
        self.definitions: Sequence[Any] = ()
        self.globals: Sequence[GlobalName] = ()
        self.parameters: Mapping[int, weakref.ref[Any]] = {}  # of the object, by their identity

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError("a handle is good for the calls of the executor that made it, and for nothing else")

    def __repr__(self) -> str:
        return f"<Handle of a {self._what}>"


class PackedCall:
    """A packed function and its arguments, with the handles of what workers need before: it keeps these alive."""

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
        """Hold what is sent.

        Args:
            name: the name of the function, for errors.
            options: those of the executor.
            handles: what the workers need to have before.
            function: the number under which the workers keep the function; 0: it is in the payload.
            arguments: the pickled arguments, where the function is kept and they are numbers, texts and the like.
            payload: the packed ``(fn, args, kwargs)`` in all other cases.
            alive: definitions and globals that a result may refer to.
        """
        self.name = name
        self.options = options
        self.handles = handles
        self.function = function
        self.arguments = arguments
        self.payload = payload
        self.alive = alive


class Definition:
    """A class or function of the script, as the workers have been sent it."""

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
        self.parts = parts
        self.made_before = made_before  # must be there before it can be made
        self.definitions = [*pickler.definitions.values(), *made_before]
        self.globals = [*pickler.globals, *filter(None, [reducer.global_naming(obj)])]
        self.users_modules = pickler.users_modules
        self.handle = handle

    def is_current(self) -> bool:
        """Return whether nothing has been bound anew in it since it was sent."""
        return _is_made_of(self.obj, self.parts)


class _DefinitionReducer(Reducer):
    """Pickles one definition, or an object that workers keep; notes the other definitions and the globals in it."""

    def __init__(self, *defined: Any) -> None:
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
    """Pickles a call; collects the definitions that it needs, and binds the globals that are data."""

    def __init__(self, packer: Packer) -> None:
        super().__init__()
        self._packer = packer
        self.needed: dict[int, Definition] = {}  # by the identity of what they define
        self.global_values: dict[tuple[Namespace, str], Any] = {}  # of the globals that the call refers to
        self.constants: list[tuple[Namespace, str, int, Any]] = []
        # By the identity of definitions: the globals that are bound to them.
        self.bound: dict[int, list[tuple[Namespace, str, int]]] = {}
        self.handles: list[Handle] = []
        self.has_data = False  # some of the globals are data

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
        """Note all definitions and globals that these refer to, and these to in turn; return the bindings of data.

        Data is returned as it goes into the pickle of the call; constants and definitions go into the one before.
        """
        data: list[Deferred] = []
        pending = list(definitions)
        pending_names = list(names)
        with self._packer.lock:
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
        """Note what a global stands for: a constant, a definition, which is returned, or data."""
        if (namespace, name) in self.global_values or name == "__builtins__":
            return []
        value = self.global_values[namespace, name] = namespace.variables.get(name, Missing)
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
        """Return the module from which a worker imports a global; None: it is data.

        An object of a library is the library's own there, too. One of the user's modules, such as a configuration that
        the script fills, is data, unless it cannot be pickled.
        """
        if namespace.imports.get(name, (0,))[0] != number:  # to look takes long, and is done once for a binding
            module = reducer.module_that_holds(name, value)
            if module is not None and reducer.is_users(module) and self._can_pickle(value):
                module = None
            namespace.imports[name] = number, None if module is None else module.__name__
        return namespace.imports[name][1]

    def alive(self) -> list[Any]:
        """Return the definitions and globals that a result of the call may refer to."""
        definitions = [record.obj for record in self.needed.values()]
        return [*definitions, *self.namespaces, *{namespace for namespace, _ in self.global_values}]

    def prepare_arguments(self) -> tuple[Any, ...]:
        """Return the arguments with which a worker calls `prepare` before the call."""
        records = sorted(self.needed.items(), key=_order)
        needed = []
        for identity, record in records:
            before = [keys.key_of(obj) or "" for obj in record.made_before]
            needed.append(Needed(record.key, record.handle.number, before, self.bound.get(identity, ())))
        return self.constants, needed


class _SentFunction:
    """A function that workers keep, and all that it referred to when they got it."""

    def __init__(self, fn: Any, call: _CallReducer, handles: Sequence[Handle], environment: Handle | None) -> None:
        """Note what ``fn`` refers to. ``handles``: that of the function comes first."""
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
            # A call of another function may have sent the worker a later binding of the name to the same value.
            if name in namespace.sent:
                watched.append((namespace.sent, name, namespace.sent[name]))
        watched += [(vars(module), "__spec__", module.__spec__) for module in call.users_modules.values()]
        for names, name, value in watched:
            _, its_names, its_values = values.setdefault(id(names), (names, [], []))
            its_names.append(name)
            its_values.append(value)
        self._values = list(values.values())

    def is_current(self, fn: Any, environment: Handle | None) -> bool:
        """Return whether ``fn`` does what this function does, and nothing that it refers to has been bound anew."""
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
    """Packs what one pool sends."""

    def __init__(
        self, make_payload: Callable[[Packed], Any], on_forgotten: Callable[[int], None], is_elsewhere: bool = False
    ) -> None:
        """Pack nothing yet.

        Args:
            make_payload: copies a packed object to where it is sent from.
            on_forgotten: called with the number of a handle that is gone, by the collector, in any thread.
            is_elsewhere: the workers are on other machines.
        """
        self.make_payload = make_payload
        self._on_forgotten = on_forgotten
        self._process_environment = ProcessEnvironment(is_elsewhere)
        self._environment: Handle | None = None  # of the environment, once it has changed
        # By the identity of what they define, the one used last at the end. A record keeps what it defines alive.
        self._definitions = OrderedDict[int, Definition]()
        # By the identity of their code, the one used last at the end.
        self._functions = OrderedDict[int, _SentFunction | str]()
        self._specs: dict[str, Any] = {}  # of the user's modules, as they were when the workers first needed them
        self.lock = threading.RLock()  # user code may call functions while it is pickled, and so may the collector

    def pack(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        options: CallOptions,
        name: str = "",
    ) -> PackedCall:
        """Return the call as it is sent; ``name`` is told in errors.

        The payload is several pickles: of `adopt_environment` if that has changed, of `prepare`, and of ``(fn, args,
        kwargs)``, where ``fn`` is None if the workers keep it. What the handles of the call stand for is sent before.

        Raises:
            TransferError: it cannot be pickled.
        """
        return self.look_at(fn, options, name).pack(args, kwargs)

    def look_at(self, fn: Callable[..., Any], options: CallOptions, name: str = "") -> FunctionPacker:
        """Return what packs calls of ``fn`` as `pack` does, as long as nothing that it refers to is bound anew."""
        with self.lock:
            if self._process_environment.changed():
                self._environment = self._make_handle(dumps(self._process_environment), "process environment")
            return FunctionPacker(self, fn, options, name or call_name(fn), self._environment, self._sent_function(fn))

    def warn_of_reloads(self, modules: Mapping[str, types.ModuleType]) -> None:
        """Warn of modules of the user's that were reloaded since workers first needed them."""
        for name, module in modules.items():
            spec = self._specs.setdefault(name, module.__spec__)
            if spec is not module.__spec__:
                self._specs[name] = module.__spec__
                warn_user(
                    f"Module {name} was reloaded in this process, but workers keep what they have imported. Make a new "
                    f"executor, or send the module by value: cloudpickle.register_pickle_by_value({name})."
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
        """Return the record of a definition, packed anew if it has changed."""
        record = self._definitions.get(id(obj))
        if record is None or not record.is_current():
            record = self._definitions[id(obj)] = self._define(obj)
        self._definitions.move_to_end(id(obj))
        if len(self._definitions) > DEFINITIONS_KEPT:  # one that is still in use is only sent again
            self._definitions.popitem(last=False)
        return record

    def close(self) -> None:
        """Keep nothing more, as the pool has ended."""
        self._on_forgotten = lambda number: None  # nobody needs to know
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
        weakref.finalize(handle, self._on_forgotten, handle.number).atexit = False
        return handle

    def _sent_function(self, fn: Any) -> _SentFunction | None:
        """Return the function that the workers keep for ``fn``: from its second call on, if it refers to no data."""
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
        call = _CallReducer(self)
        packed = call.pack(fn, lambda: {"the function": fn})
        can_stay = id(fn) in call.needed or is_constant(fn) or _is_plain_function(fn)
        if not can_stay or call.has_data or call.handles or packed.buffers or packed.shared:
            return _NEVER_SENT
        before = _DefinitionReducer().pack(call.prepare_arguments())
        environment = self._environment.number if self._environment else 0
        handle = self._make_handle(dumps(CachedFunction(environment, before.pickle, packed.pickle)), "function")
        return _SentFunction(fn, call, [handle, *_handles_of(call, self._environment)], self._environment)


class FunctionPacker:
    """Packs calls of one function."""

    def __init__(
        self,
        packer: Packer,
        fn: Callable[..., Any],
        options: CallOptions,
        name: str,
        environment: Handle | None,
        sent: _SentFunction | None,
    ) -> None:
        """``sent``: the function as the workers keep it, if they do."""
        self._packer = packer
        self._fn = fn
        self._options = options
        self._name = name
        self._environment = environment
        self._sent = sent
        self._kept_call: PackedCall | None = None  # without arguments

    def pack(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> PackedCall:
        """As `Packer.pack`."""
        sent = self._sent
        if sent and not kwargs and (arguments := dump_atoms(args)) is not None:
            return self._call_of(sent, arguments)
        call = _CallReducer(self._packer)
        packed = call.pack(
            (None if sent else self._fn, args, kwargs), functools.partial(_call_parts, self._fn, args, kwargs)
        )
        handles = [*call.handles, *_handles_of(call, self._environment)]
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
        """As `pack`; where only the arguments differ, return these, and one and the same call for all.

        What Python's garbage collector has to look through then is half as much.
        """
        if self._sent and (arguments := dump_atoms(args)) is not None:
            self._kept_call = self._kept_call or self._call_of(self._sent, None)
            return self._kept_call, arguments
        return self.pack(args, {}), None

    def _call_of(self, sent: _SentFunction, arguments: bytes | None) -> PackedCall:
        return PackedCall(self._name, self._options, sent.handles, sent.handle.number, arguments, alive=sent.alive)


def _handles_of(call: _CallReducer, environment: Handle | None) -> list[Handle]:
    """Return the handles of what a worker needs to prepare for the call."""
    handles = [record.handle for record in call.needed.values()]
    return handles if environment is None else [*handles, environment]


def _warn_of_copied_parameters(call: _CallReducer) -> None:
    """Tell of a model that was `put` and whose parameters also come with the call, as those of an optimizer."""
    for handle in call.handles:
        both = handle.parameters.keys() & call.parameters.keys()
        if any(handle.parameters[each]() is call.parameters[each]() is not None for each in both):
            warn_user(
                f"The call has parameters of {handle!r} also from elsewhere, such as an optimizer in a global. In a "
                f"worker these are copies, which training does not tie to the object. Put both together: "
                f"put((model, optimizer))."
            )


def _is_plain_function(fn: Any) -> bool:
    """Return whether a function without a name carries no state, so that to use it again cannot be noticed."""
    return type(fn) is types.FunctionType and not fn.__closure__ and all(map(is_constant, contents_of_function(fn)))


def _parts(obj: Any) -> list[Any]:
    """Return what a definition is made of: it has changed when one of these is another object.

    Of a class these are its attributes, what is in its functions, and the elements of lists, dicts and sets in these.
    """
    parts = list[Any]()
    functions = [obj]
    if isinstance(obj, type):
        parts += obj.__bases__
        for name, value in list(vars(obj).items()):
            # To read the annotations of a class may add an empty dict to it.
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
    """Return the functions of a method or property."""
    if type(attribute) is types.FunctionType:
        return [attribute]
    if type(attribute) is functools.singledispatchmethod:
        return [attribute.dispatcher]
    if type(attribute) is property:
        return [function for function in (attribute.fget, attribute.fset, attribute.fdel) if function is not None]
    return [attribute.__func__] if type(attribute) in (classmethod, staticmethod) else []


def _is_made_of(obj: Any, parts: list[Any]) -> bool:
    """Return whether the parts of a definition are still these objects."""
    now = _parts(obj)
    return len(now) == len(parts) and all(map(operator.is_, now, parts))


def _number_of_binding(namespace: Namespace, name: str, value: Any) -> int:
    """Return the number of a binding: another one after the name has been bound to another object."""
    number, last = namespace.sent.get(name, (0, None))
    held = last() if type(last) is weakref.ref else last
    is_gone = held is None and last is not None
    if number and held is value and not is_gone:
        return number
    number = next(_numbers)
    try:  # the script may let go of the value
        namespace.sent[name] = number, weakref.ref(value)
    except TypeError:
        namespace.sent[name] = number, value
    return number


def _order(item: tuple[int, Definition]) -> int:
    """Order definitions: functions, classes, others. To rebuild an attribute of a class may call a function."""
    obj = item[1].obj
    return 0 if isinstance(obj, types.FunctionType) else 1 if isinstance(obj, type) else 2


def _described(obj: Any) -> str:
    kind = "class" if isinstance(obj, type) else "function" if isinstance(obj, types.FunctionType) else "object"
    return f"{kind} {getattr(obj, '__qualname__', type(obj).__qualname__)!r}"


def _call_parts(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return what a call is made of, by name."""
    named = {"the function": fn}
    named |= {f"argument {index}": value for index, value in enumerate(args)}
    return named | {f"argument {name!r}": value for name, value in kwargs.items()}


_CALLED_ONCE = "called once"
_NEVER_SENT = "not sent by itself, as it refers to data"
_MISSING = itertools.repeat(Missing)
_numbers = itertools.count(1)
_CONTAINERS = (dict, list, set, deque)
