"""Objects of an ``sl.Opaque`` class as arguments, for schemas, traces and audits."""

from __future__ import annotations

import inspect
from typing import Any, NoReturn

from shiplap.declare.spec import OpSpec
from shiplap.declare.values import Args, Opaque, Value
from shiplap.errors import error
from shiplap.torch_private import graph_objects


def opaque_schema_name(cls: type[Opaque], where: str) -> str:
    """Return the name under which torch's schemas carry objects of ``cls``, after registering the class. Raise
    ``SL103`` if torch does not support such a class.
    """
    if graph_objects.REASON:
        fix = "pass a number by which your library finds the object, or use a newer torch"
        raise error(
            "SL103", where=where, got=f"{cls.__qualname__}: {graph_objects.REASON}", expected="torch 2.13", fix=fix
        )
    # torch finds the class by its qualified name, which has "<locals>" in it inside of a function.
    if "<" in cls.__qualname__ or not f"{cls.__module__}.{cls.__qualname__}".isascii():
        raise error(
            "SL103",
            where=where,
            got=f"{cls.__qualname__}, defined in a function",
            expected="a class that its module has by name",
            fix="define the class at the top of a module",
        )
    return graph_objects.register_opaque(cls, cls.fields)


class _TracedObject:
    """A wrapper around an ``sl.Opaque`` object for a trace. Only the object's declared fields can be read
    through it.
    """

    def __init__(self, op: str, value: Opaque) -> None:
        """Wrap the object ``value`` for the reference of ``op`` during a trace."""
        self._op, self._value = op, value

    def __getattr__(self, name: str) -> Any:
        """Return a declared field of the object. Raise ``SL132`` for any other attribute."""
        if name in self._value.fields:
            return graph_objects.read_attribute(self._value, name)
        self._refuse(name)

    def _refuse(self, name: str) -> NoReturn:
        """Raise ``SL132`` for an attribute that the class does not declare in ``fields=``. A trace cannot read such an
        attribute.
        """
        kind = type(self._value).__name__
        raise error(
            "SL132",
            where=self._op,
            got=f"{kind}.{name}",
            expected=f"one of {', '.join(self._value.fields)}" if self._value.fields else "no attribute",
            fix=f'write class {kind}(sl.Opaque, fields=("{name}",)), if sizes depend on that attribute',
        )


def traced_arguments(spec: OpSpec, args: Args) -> Args:
    """Return ``args`` as the reference receives them during a trace. Each ``sl.Opaque`` object (an argument of the
    author's own class) is wrapped so that only its declared fields can be read.
    """

    def seen(value: Value) -> Any:
        """Return ``value`` unchanged unless it is an ``sl.Opaque`` object. Return such an object wrapped, so that only
        its declared fields can be read.
        """
        plain = graph_objects.real_object(value)
        return _TracedObject(spec.name, plain) if isinstance(plain, Opaque) else value

    return tuple(map(seen, args)) if any(a.scalar == "object" for a in spec.args) else args


def guarded_fields(value: Opaque) -> list[Any]:
    """Return the values of the declared fields of an object. Compiled code is reused only for an object with equal
    values.
    """
    return [graph_objects.read_attribute(value, name) for name in value.fields]


def make_sample_object(cls: type[Opaque], op: str, argument: str, rng: Any, sizes: Any) -> Opaque:
    """Return an object of ``cls`` for a sample of ``op``, made by ``cls.sample(rng, sizes)``. ``rng`` is a random
    generator, and ``sizes`` holds the sizes of dims by name. Raise ``SL502``, which names ``argument``, if the class
    has no such method.
    """
    make = inspect.getattr_static(cls, "sample", None)
    if make is None:
        raise error(
            "SL502",
            where=f"{op}, argument {argument!r}",
            got=f"no way to make a {cls.__name__}",
            expected=f"a class method {cls.__name__}.sample(rng, sizes), or @op.samples",
            fix=f"write {cls.__name__}.sample, which makes an object that fits the sizes",
        )
    made: Opaque = cls.sample(rng, sizes)
    return made
