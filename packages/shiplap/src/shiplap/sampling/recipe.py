"""``SampleRecipe``: all properties of a sample except the seed. Its printed label can be parsed again.

``sizes(n=5, c=3), scalars(a=1.0), dtypes(Float='float32'), layouts(x='padded'), values('ties'), absent('bias')``
"""

from __future__ import annotations

import ast
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from shiplap.cached_property import cached_property
from shiplap.errors import error

if TYPE_CHECKING:
    from shiplap.declare import Arg

Pairs = tuple[tuple[str, Any], ...]


def _mapping_pairs(mapping: Mapping[str, Any]) -> Pairs:
    """Return a mapping as a tuple of (key, value) pairs, which can be hashed. A list among the values becomes a
    tuple.
    """
    return tuple((k, tuple(v) if isinstance(v, list) else v) for k, v in mapping.items())


@dataclass(frozen=True)
class SampleRecipe:
    """The description of a sample. It has the sizes of the free dims, the scalars, the dtype of each dtype class, the
    memory layouts of arguments, the kind of values, the names of absent tensors, and the lengths of lists.

    In place of a list's length, there may be a tuple with one number for each member, the size of its unnamed dims.
    """

    sizes: Pairs = ()
    scalars: Pairs = ()
    dtypes: Pairs = ()
    layouts: Pairs = ()
    values: str = "normal"
    absent: tuple[str, ...] = ()
    lists: Pairs = ()

    def but(self, **changes: Any) -> SampleRecipe:
        """Return a copy of the recipe with ``changes``. Each keyword is the name of a field. A mapping is merged into
        the pairs of that field, and any other value replaces the field.
        """
        merged: dict[str, Any] = {
            k: _mapping_pairs({**dict(getattr(self, k)), **v}) if isinstance(v, Mapping) else v
            for k, v in changes.items()
        }
        return replace(self, **merged)

    def shrunk(
        self, keeps: Callable[[SampleRecipe], bool], smaller: Callable[[int], Iterable[int]], seconds: float
    ) -> SampleRecipe:
        """Return a recipe with the smallest sizes found within ``seconds`` for which ``keeps(recipe)`` is true.

        ``keeps`` must be true for this recipe. The size of one dim at a time is replaced by one of the lower sizes that
        ``smaller(size)`` returns.
        """
        recipe, end, moved = self, time.monotonic() + seconds, True
        # Restart with the first dim after each success: a smaller size may make another one reducible.
        while moved:
            sizes = [(name, n) for name, size in recipe.sizes if type(size) is int for n in smaller(size)]
            tried = (recipe.but(sizes={name: n}) for name, n in sizes if time.monotonic() < end)
            found = next(filter(keeps, tried), None)
            recipe, moved = found or recipe, found is not None
        return recipe

    def members(self, arg: Arg) -> list[bool]:
        """Return, for each member of the list argument ``arg``, whether the sample has a tensor there. False stands for
        a member that is None. If the declaration allows absent members, the second member of a list of three is None.
        No other member is.
        """
        given = dict(self.lists).get(arg.name, arg.length or 2)
        count = len(given) if isinstance(given, tuple) else given
        return [not (arg.absent and i == 1 and count == 3) for i in range(count)]

    def member_sizes(self, arg: Arg, index: int) -> dict[str, Any]:
        """Return the sizes of the member number ``index`` of the list argument ``arg``, by the text of its unnamed
        dims. The mapping is empty unless the recipe gives each member its own size.
        """
        given = dict(self.lists).get(arg.name)
        if not isinstance(given, tuple):
            return {}
        return {text: given[index] if text != "..." else (given[index],) for text in unnamed_dims(arg)}

    @property
    def total(self) -> int:
        """The sum of the sizes of all dims. A variadic dim counts with all dims for which it stands."""
        sizes = [v if isinstance(v, tuple) else (v,) for _, v in self.sizes]
        return sum(n for size in sizes for n in size if type(n) is int)

    @cached_property
    def values_key(self) -> str:
        """The label of the recipe without its layouts, which determines the drawn values. Layouts are left out because
        they must not change values.
        """
        return str(replace(self, layouts=()))

    def __str__(self) -> str:
        """Return the label of the recipe, such as ``sizes(n=3), scalars(eps=1e-05)``. Empty fields are left out. The
        method ``parse`` makes the recipe from the label again.
        """
        return self._label

    @cached_property
    def _label(self) -> str:
        """The text that ``str`` returns. Searches of samples look up recipes by it."""
        parts = [_format_call(k, dict(getattr(self, k))) for k in ("sizes", "scalars", "dtypes", "layouts", "lists")]
        parts += [f"values({self.values!r})"] if self.values != "normal" else []
        parts += [f"absent({', '.join(map(repr, self.absent))})"] if self.absent else []
        return ", ".join(p for p in parts if p) or "sizes()"

    @classmethod
    def parse(cls, label: str) -> SampleRecipe:
        """Return the recipe with the text ``label``, as findings print it. Raise ``SL502`` if the text is not the label
        of a recipe.
        """
        try:
            nodes = ast.parse(f"[{label}]", mode="eval").body.elts  # type: ignore[attr-defined]
            fields: dict[str, Any] = {}
            for node in nodes:
                fields |= _parse_recipe_field(node.func.id, node)
            return cls(**fields)
        except (SyntaxError, AttributeError, IndexError, ValueError, TypeError):
            raise error(
                "SL502",
                where="sample",
                got=label,
                expected="a label printed by a finding",
                fix="copy the label from the finding",
            ) from None


def unnamed_dims(arg: Arg) -> list[str]:
    """Return the texts (``_`` or ``...``) of the dims of a tensor argument that the declaration does not name. Return
    an empty list if ``arg`` is no tensor.
    """
    return [dim.text for dim in arg.tensor.dims if dim.kind == "any" or dim.text == "..."] if arg.tensor else []


def _format_call(name: str, values: Mapping[str, Any]) -> str:
    """Return the string ``name(k=v, ...)`` of one field of a label. It is empty if there are no values. An infinity is
    printed as ``1e999``, a literal that overflows to infinity.
    """
    shown = {
        k: "1e999" if v == float("inf") else "-1e999" if v == float("-inf") else repr(v) for k, v in values.items()
    }
    return f"{name}({', '.join(f'{k}={v}' for k, v in shown.items())})" if values else ""


def _parse_recipe_field(name: str, node: ast.Call) -> dict[str, Any]:
    """Return ``{name: value}`` for the field ``name`` of a recipe, which ``node``, a call in a parsed label, describes.
    Raise ``ValueError`` for a call that describes no field.
    """
    positional = tuple(ast.literal_eval(a) for a in node.args)
    if name == "values":
        return {name: positional[0]}
    if name == "absent":
        return {name: positional}
    if name not in ("sizes", "scalars", "dtypes", "layouts", "lists") or positional:
        raise ValueError(name)
    return {name: tuple((str(k.arg), ast.literal_eval(k.value)) for k in node.keywords)}
