"""Objects of users in graphs: containers of tensors, which torch flattens, and opaque objects, which it passes whole.

``torch.utils._pytree`` is the module that Dynamo, ``torch.export`` and ``make_fx`` use; torch offers no public way.
Torch has opaque objects since 2.11 or so, and every release has renamed a part. If a part is missing, :data:`REASON`
states it, and a declaration with such an argument is refused with that reason.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from torch.utils import _pytree

# --- containers -------------------------------------------------------------------------------------------------------


def leaves(tree: Any, whole: tuple[type, ...] = ()) -> list[Any]:
    """Return the leaves of the pytree ``tree`` in order. An object of an unknown class is one leaf, and so is an
    instance of a class in ``whole``.
    """
    return list(_pytree.tree_leaves(tree, is_leaf=lambda value: isinstance(value, whole)))


def map_leaves(fn: Callable[[Any], Any], tree: Any) -> Any:
    """Return the pytree ``tree`` with each leaf replaced by ``fn(leaf)``."""
    return _pytree.tree_map(fn, tree)


def register_node(
    cls: type,
    take: Callable[[Any], tuple[Sequence[Any], Any]],
    make: Callable[[Sequence[Any], Any], Any],
    *,
    dump: Callable[[Any], Any],
    load: Callable[[Any], Any],
) -> None:
    """Register ``cls`` with torch's pytrees as a container of tensors. If the class is already registered, do nothing.

    Args:
        take: a function that returns the children of an object in order, and all other data of the object. Torch
            compares these data with ``==``.
        make: the inverse of ``take``. The children may be anything, since ``tree_map`` replaces them.
        dump: a function that converts the other data of an object to a value for JSON, which ``torch.export.save``
            writes.
        load: the inverse of ``dump``.
    """
    if cls in _pytree.SUPPORTED_NODES:
        return
    _pytree.register_pytree_node(
        cls,
        lambda value: (list(take(value)[0]), take(value)[1]),
        lambda children, rest: make(list(children), rest),
        serialized_type_name=f"{cls.__module__}.{cls.__qualname__}",
        to_dumpable_context=lambda rest: json.dumps(dump(rest)),
        from_dumpable_context=lambda text: load(json.loads(text)),
        flatten_with_keys_fn=lambda value: (
            [(_pytree.SequenceKey(i), child) for i, child in enumerate(take(value)[0])],
            take(value)[1],
        ),
    )


def register_constant(cls: type) -> Callable[[], None]:
    """Register objects of ``cls`` as constants of compiled graphs and of pytrees. In each call, Dynamo compares them
    with ``==``. Return a function without parameters that undoes the registration. If the class is already registered,
    it stays so, and the function does nothing.

    Return a function that undoes the registration. If the class is already registered, it stays so, and the function
    does nothing.
    """
    if cls in _pytree.SUPPORTED_NODES:
        # The class was registered by other code, which must not be undone here.
        return lambda: None
    _pytree.register_constant(cls)
    forget_texts = _trace_computed_texts(cls)

    def undo() -> None:
        """Remove the registration of ``cls`` as a constant, if it is still registered."""
        if cls in _pytree.SUPPORTED_NODES:
            _pytree._deregister_pytree_node(cls)
        _pytree.CONSTANT_NODES.discard(cls)
        forget_texts()

    return undo


def _text_of_tuple(items: tuple[Any, ...]) -> str:
    """Return the ``repr`` of the tuple ``items``. The function is written so that Dynamo traces the ``repr`` of each
    item.
    """
    return "(" + ", ".join([repr(item) for item in items]) + (",)" if len(items) == 1 else ")")


def _text_of_list(items: list[Any]) -> str:
    """Return the ``repr`` of the list ``items``. The function is written so that Dynamo traces the ``repr`` of each
    item.
    """
    return "[" + ", ".join([repr(item) for item in items]) + "]"


def _trace_computed_texts(cls: type) -> Callable[[], None]:
    """Make Dynamo trace ``str``, ``repr`` and f-strings of objects of ``cls`` that a graph computes. Return a function
    that undoes it.

    Tuples and lists of such objects are traced as well. Dynamo (2.11 to 2.14) computes the ``str`` of a sequence only
    if every element is a constant, and fails at an f-string of such an object. It does trace ``repr`` of each object,
    so all these strings are computed by ``repr``.
    """
    try:
        from torch._dynamo import variables as kinds
        from torch._dynamo.variables.base import VariableTracker

        handlers: dict[Any, Any] = kinds.BuiltinVariable.call_function_handler_cache
        make_handler = kinds.BuiltinVariable._make_handler
        of_tuple, of_list, of_object = kinds.TupleVariable, kinds.ListVariable, kinds.UserDefinedObjectVariable
        constant = kinds.ConstantVariable
    except (ImportError, AttributeError):
        return lambda: None

    def trace(function: Any, given: list[Any], text: Callable[..., str]) -> tuple[Any, Any]:
        """Return a key and a value of Dynamo's table of handlers. With them, Dynamo traces a call of ``function`` as a
        call of ``text``.

        ``function`` is ``str``, ``repr`` or ``str.format``. ``given`` has the classes of Dynamo's variables that stand
        for the arguments of such a call.
        """
        usual = make_handler(function, given, False)

        def handle(tx: Any, args: Any, kwargs: Any) -> Any:
            """Return Dynamo's variable for ``text(value)``, a traced call for the value that is formatted. For a
            constant, an object of another class, or a format specification, return the result of Dynamo's own handler.
            """
            # ``str.format`` has its format before the value.
            value, *written = reversed(args)
            other = isinstance(value, of_object) and value.python_type() is not cls
            if other or value.is_python_constant() or (written and written[0].as_python_constant() != "{:}"):
                return usual(tx, args, kwargs)
            return tx.inline_user_function_return(VariableTracker.build(tx, text), [value], {})

        return (function, *given), handle

    sequences = (of_tuple, _text_of_tuple), (of_list, _text_of_list)
    mine = dict(trace(function, [kind], text) for kind, text in sequences for function in (str, repr))
    mine |= dict(trace(str.format, [constant, kind], text) for kind, text in (*sequences, (of_object, cls.__str__)))
    handlers.update(mine)

    def undo() -> None:
        """Remove the handlers of ``cls`` from Dynamo's table. Leave those that other code has replaced."""
        for key, handler in mine.items():
            # Other code may have replaced it since.
            if handlers.get(key) is handler:
                del handlers[key]

    return undo


def show_fields(cls: type, names: Sequence[str]) -> None:
    """Make ``cls`` look like a dataclass to torch. ``names`` are its attributes and the keywords of its constructor.

    ``DistributedDataParallel`` and ``fully_shard`` look for tensors only in tuples, lists, dicts and dataclasses. They
    make another object by ``cls(**{name: value})``.
    """
    made = dataclasses.make_dataclass("fields", [(name, Any) for name in names])
    cls.__dataclass_fields__ = made.__dataclass_fields__  # type: ignore[attr-defined]


# --- opaque objects ---------------------------------------------------------------------------------------------------


BASE: Any  # the base of classes of such objects
KIND: str  # that a graph takes such an object as an input, in torch's word
_is_registered: Callable[[type[Any]], bool]
_register_class: Callable[..., None]
try:
    from torch._library import opaque_object
    from torch._library.fake_class_registry import FakeScriptObject
    from torch._library.opaque_object import MemberType, get_opaque_type_name

    REASON = ""
    if hasattr(opaque_object, "register_custom_class"):  # since 2.14, where a use of the old names logs a warning
        BASE, KIND = import_module("torch._custom_class_base").CustomClassBase, "symbolic"
        _is_registered = vars(opaque_object)["is_custom_class"]
        _register_class = vars(opaque_object)["register_custom_class"]
    else:
        BASE, KIND = import_module("torch._opaque_base").OpaqueBase, "reference"
        _is_registered, _register_class = opaque_object.is_opaque_type, opaque_object.register_opaque_type
except (ImportError, AttributeError, KeyError) as e:
    BASE, REASON = object, f"this torch has no opaque objects ({e})"


def register_opaque(cls: type[Any], fields: Sequence[str]) -> str:
    """Register ``cls`` with torch as an opaque type if it is not registered yet, and return its name in schemas.
    Compiled code is guarded on the attributes ``fields`` of an object.
    """
    # A class is registered once for the whole process.
    if not _is_registered(cls):
        members = dict.fromkeys(fields, MemberType.USE_REAL)

        def guarded(value: Any) -> list[Any]:
            """Return the values of the attributes ``fields`` of ``value``. Compiled code is compiled again for an
            object with other values.
            """
            return [getattr(value, name) for name in fields]

        _register_class(cls, typ=KIND, guard_fn=guarded, members=members)
    name: str = get_opaque_type_name(cls)
    return name


def read_attribute(value: Any, name: str) -> Any:
    """Return the attribute ``name`` of ``value``. This is a function that graphs can call."""
    return getattr(value, name)


def real_object(value: Any) -> Any:
    """Return the real object that a fake one stands for while a graph is traced. Return ``value`` itself if it is not
    such a fake.
    """
    return value.real_obj if not REASON and isinstance(value, FakeScriptObject) else value
