"""A torch schema → the text of a declaration: annotations, ``mutates=``, ``aliases=`` and ``specialize=``.

The text is the same whether a draft is written or ``tools/count_schemas.py`` counts the schemas that can be declared.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shiplap.dtypes import DTYPES

# The annotation in a declaration for each type of a schema.
ANNOTATIONS = {
    "Tensor": 'Shaped[Tensor, "..."]',
    "int": "int",
    "SymInt": "int",
    "float": "float",
    "bool": "bool",
    "str": "str",
    "complex": "complex",
    "Scalar": "int | float",
    "ScalarType": "torch.dtype",
    "Device": "torch.device",
    "Layout": "torch.layout",
    "MemoryFormat": "torch.memory_format",
    "Generator": "torch.Generator",
}
# Defaults of these types are plain ints in a schema.
_CONSTANTS_BY_NUMBER: dict[str, dict[int, object]] = {
    "ScalarType": {row.number: getattr(torch, name) for name, row in DTYPES.items()},
    "MemoryFormat": {0: torch.contiguous_format, 1: torch.preserve_format, 2: torch.channels_last},
    "Layout": {0: torch.strided, 1: torch.sparse_coo},
}
_ALIAS_SET = re.compile(r"\([\w*|$]+!?( -> [\w*|$]*)?\)")


class UndeclarableSchema(Exception):
    """The error for a schema that no declaration of Shiplap can have. Its text is the reason."""


@dataclass(frozen=True)
class SchemaField:
    """An argument or a result of a schema. ``kind`` is its type as the schema writes it, without alias sets.

    ``default`` is Python source, or None if the argument has no default. ``written`` states whether the op writes to
    it. ``alias`` is the name of the argument with which a result shares memory, or an empty string.
    """

    name: str
    kind: str
    default: str | None = None
    keyword_only: bool = False
    written: bool = False
    alias: str = ""

    @property
    def tensor(self) -> bool:
        """Whether the type is a tensor or a list of tensors."""
        return self.kind.startswith("Tensor")

    @property
    def many(self) -> bool:
        """Whether the type is a list."""
        return "[" in self.kind

    @property
    def optional(self) -> bool:
        """Whether the value may be None."""
        return self.kind.endswith("?")

    @property
    def default_value(self) -> Any:
        """The value of the argument's default in the schema, or None if it has no default."""
        return eval(self.default or "None", {"torch": torch, "inf": float("inf"), "nan": float("nan")})  # printed here

    def annotation(self, tensor: str = ANNOTATIONS["Tensor"]) -> str:
        """Return the annotation for the field's type in a declaration, with ``tensor`` in place of each tensor type.
        Raise ``UndeclarableSchema`` if a declaration has no annotation for the type.
        """
        return _annotation_of_type(self.kind, tensor)


@dataclass(frozen=True)
class SchemaForm:
    """The arguments and results of a torch schema, from which a draft is made. ``schema`` is the schema as torch prints
    it.
    """

    name: str
    schema: str
    arguments: tuple[SchemaField, ...]
    results: tuple[SchemaField, ...]

    def split(self, values: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """Return ``(positional, keywords)`` for the values of all arguments by name. ``positional`` is a list in order,
        and ``keywords`` has the keyword-only arguments by name.
        """
        positional = [values[a.name] for a in self.arguments if not a.keyword_only]
        return positional, {a.name: values[a.name] for a in self.arguments if a.keyword_only}

    @property
    def mutates(self) -> tuple[str, ...]:
        """The names of the arguments that the op writes to."""
        return tuple(a.name for a in self.arguments if a.written)

    @property
    def aliases(self) -> tuple[str | None, ...]:
        """For each result, the name of the argument with which it shares memory, or None. The tuple is empty if no
        result shares memory.
        """
        names = tuple(r.alias or None for r in self.results)
        return names if any(names) else ()

    @property
    def specialize(self) -> tuple[str, ...]:
        """The names of the int arguments that the schema does not declare as symbols (``SymInt``). A graph is
        specialised to their values.
        """
        return tuple(a.name for a in self.arguments if re.match(r"int\b", a.kind))


def parse_schema(schema: Any) -> SchemaForm:
    """Return the arguments and results of ``schema``, a ``torch._C.FunctionSchema``, as a :class:`SchemaForm`. Raise
    ``UndeclarableSchema`` if a declaration of Shiplap cannot state the schema.
    """
    arguments, texts = list(schema.arguments), types_in_schema(schema)[0]
    # The text of a schema with any number of arguments has a part that its list lacks.
    if len(texts) != len(arguments):
        raise UndeclarableSchema("any number of arguments")
    fields = tuple(
        SchemaField(
            a.name,
            kind,
            _source_of_default(a) if a.has_default_value() else None,
            a.kwarg_only,
            bool(a.alias_info is not None and a.alias_info.is_write),
        )
        for a, kind in zip(arguments, texts, strict=True)
    )
    results = tuple(
        SchemaField(f"result{i}", kind, alias=_aliased_argument(r, arguments))
        for i, (r, kind) in enumerate(zip(schema.returns, types_in_schema(schema)[1], strict=True))
    )
    if not results and not any(f.written for f in fields):
        raise UndeclarableSchema("no result and nothing written to: torch would remove the call from a graph")
    # This raises for a type that a declaration cannot have.
    for field in (*fields, *results):
        field.annotation()
    return SchemaForm(schema_name(schema), str(schema), fields, results)


def schema_name(schema: Any) -> str:
    """Return the name of a schema with that of its overload, such as ``aten::add.Tensor``."""
    return f"{schema.name}.{schema.overload_name}" if schema.overload_name else str(schema.name)


def types_in_schema(schema: Any) -> tuple[list[str], list[str]]:
    """Return ``(arguments, results)``, the types in a schema as two lists of strings, as the schema writes them. Alias
    marks such as ``(a!)`` are left out.
    """
    head, opening, rest = str(schema).partition("(")
    # Types are read from the text, since torch's objects print some of them differently.
    plain = _ALIAS_SET.sub("", rest) if opening else head
    given, _, made = plain.rpartition(") -> ")
    arguments = [re.sub(r" \w+(=.*)?$", "", p) for p in _split_arguments(given) if p and p != "*"]
    results = _split_arguments(made[1:-1]) if made.startswith("(") else [made]
    return arguments, [re.sub(r" \w+$", "", p) for p in results if p]


def _split_arguments(text: str) -> list[str]:
    """Return the texts of the arguments in ``text``, which is cut at the commas that are not inside brackets."""
    return [p.strip() for p in re.split(r", (?![^\[]*\])(?![^()]*\))", text)]


def _annotation_of_type(kind: str, tensor: str) -> str:
    """Return the annotation in a declaration for ``kind``, a type of a schema. ``tensor`` takes the place of each
    tensor type. Raise ``UndeclarableSchema`` for a type without an annotation.
    """
    if kind.endswith("?"):
        return f"{_annotation_of_type(kind[:-1], tensor)} | None"
    if listed := re.fullmatch(r"(.+)\[(\d*)\]", kind):
        element, length = _annotation_of_type(listed[1], tensor), int(listed[2] or 0)
        return f"tuple[{', '.join([element] * length)}]" if length else f"list[{element}]"
    if kind not in ANNOTATIONS:
        raise UndeclarableSchema(f"the type {kind}, which no declaration has")
    return tensor if kind == "Tensor" else ANNOTATIONS[kind]


def _aliased_argument(result: Any, arguments: Sequence[Any]) -> str:
    """Return the name of the argument with which a result may share memory. Return an empty string for a new tensor.
    Raise ``UndeclarableSchema`` if no argument matches.
    """
    if result.alias_info is None:
        return ""
    wanted = result.alias_info.before_set
    shared = [a for a in arguments if a.alias_info is not None]
    known = [a.name for a in shared if a.alias_info.before_set & wanted or (not wanted and not a.alias_info.is_write)]
    if not known:
        raise UndeclarableSchema("a result that shares memory with no argument")
    return str(known[0])


def _source_of_default(argument: Any) -> str:
    """Return the default of an argument as Python source. torch's own types, such as dtypes, are numbers in a schema.
    They are written by name, such as ``torch.float32``.
    """
    value, kind = argument.default_value, str(argument.real_type)
    if isinstance(value, int) and not isinstance(value, bool) and kind in _CONSTANTS_BY_NUMBER:
        value = _CONSTANTS_BY_NUMBER[kind].get(value, value)
    return f"torch.device({str(value)!r})" if isinstance(value, torch.device) else repr(value)
