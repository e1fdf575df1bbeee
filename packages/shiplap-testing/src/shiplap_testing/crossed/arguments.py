"""Arguments of a crossed declaration: values from a seed, sizes, layouts, absent and repeated ones."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shiplap.sampling.layouts import LAYOUTS, clone_exactly
from shiplap_testing.crossed.declared import Declared
from shiplap_testing.crossed.source import PASSED, Shade, parameters

USUAL = {"n": 5, "c": 4, "h": 2, "w": 3}
OTHER = {"n": 7, "c": 6, "h": 3, "w": 2}
SPECIAL = {
    "zero_rows": {"n": 0},
    "one_row": {"n": 1},
    "one_column": {"n": 5, "c": 1},
    "tile": {"n": 9, "c": 33},
}


def sizes_of(case: Declared, other: bool = False) -> dict[str, int]:
    """Return the sizes of the dims ``n``, ``c``, ``h`` and ``w`` by name. If ``other`` is true, they are those of a
    second call of the op declaration ``case``, and otherwise those of the first.
    """
    return {**OTHER} if other else {**USUAL, **SPECIAL.get(case.sizes, {})}


def shape_of(case: Declared, sizes: dict[str, int], other: bool = False) -> tuple[int, ...]:
    """Return the shape of the tensor ``x`` of the op declaration ``case`` for ``sizes``, a mapping from dim names to
    sizes. If the declaration is variadic and has at least two dims, a third of the seeds give ``x`` a further dim of 2
    in front. ``other`` is not read.
    """
    shape = tuple(sizes[n] for n in ("n", "c", "h", "w")[: case.rank])
    return (2, *shape) if case.variadic and case.rank > 1 and case.seed % 3 == 0 else shape


def rank_of(case: Declared) -> int:
    """Return the number of dims of the tensor ``x`` that the op declaration ``case`` is called with."""
    return len(shape_of(case, sizes_of(case)))


class Arguments:
    """The values of all arguments of an op declaration, in declared order. They are never passed to an op themselves,
    since :meth:`fresh` returns copies for a call.

    ``values`` has the arguments that a call passes, and ``names`` has their names. ``keywords`` has the names of those
    that are passed by keyword.
    """

    def __init__(
        self, case: Declared, device: str = "cpu", other: bool = False, dtype: torch.dtype | None = None
    ) -> None:
        """Draw the arguments of the op declaration ``case`` on ``device`` from its seed. If ``other`` is true, they
        have the sizes of a second call, and otherwise those of the first. Floating-point tensors have ``dtype``, or the
        dtype of the declaration if it is None.
        """
        self.case, self.device = case, device
        # A generator of its own, so that the values do not depend on what ran before.
        self.rng = torch.Generator().manual_seed(case.seed * 2 + other)
        self.dtype = dtype or getattr(torch, case.dtype)
        self.turn = 0
        self.shape = shape_of(case, sizes_of(case, other))
        self.names: list[str] = []
        self.values: list[Any] = []
        self.keywords: list[str] = []
        named = False
        for name, annotation, default in parameters(case):
            if name == "*":
                named = True
                continue
            if default and case.omitted and name in PASSED:
                continue
            value = self._value(name, annotation)
            self.names.append(name)
            self.values.append(value)
            if named or (case.by_name and len(self.names) > 1) or (case.omitted and default):
                self.keywords.append(name)
        if case.repeated:
            self._repeat()

    def _value(self, name: str, annotation: str) -> Any:
        """Return the argument for the parameter ``name`` of the op declaration. Depending on the parameter, it is a
        scalar, a list of scalars, a tensor, a list of tensors, or None. ``annotation`` is not read.
        """
        if name in PASSED:
            if name == "ks" and self.case.kernel == "template":
                return [2, 0, 1]
            return eval(PASSED[name], {"torch": torch, "Shade": Shade})  # texts of this package
        shape = self.shape
        if name in ("accs", "ts"):
            return [self._tensor(shape, mutated=name == "accs") for _ in range(2)]
        if name == "idx":
            return torch.randint(-2, 3, shape[-1:], generator=self.rng).to(self.device)
        if name == "o":
            return None if self.case.absent else self._tensor(shape[-1:])
        if name == "acc" and self.case.state == "mutated_optional" and self.case.seed % 3 == 0:
            return None
        if name == "b":
            at = len(shape) - self.case.rank + 1 if self.case.variadic else 0
            return self._tensor(shape if self.case.seed % 2 else (*shape[:at], 1, *shape[at + 1 :]))
        return self._tensor(shape, mutated=name == "acc")

    def _tensor(self, shape: tuple[int, ...], mutated: bool = False) -> Tensor:
        """Return a random tensor of ``shape``. Its strides are those of the next of the declaration's layouts, which
        are used in turns.

        If ``shape`` does not allow this layout, the tensor is contiguous. ``mutated`` says whether the op writes to the
        tensor, which rules out expanded layouts.
        """
        # Drawn on the CPU in float64, so that values are the same on each device and in each dtype.
        t = torch.randn(shape, generator=self.rng, dtype=torch.float64).to(self.dtype).to(self.device)
        layout = self.case.layouts[self.turn % len(self.case.layouts)]
        self.turn += 1
        if layout == "plain" or t.dim() < LAYOUTS[layout][0]:
            return t
        if layout.startswith("expanded") and (mutated or not t.numel()):
            return t
        return LAYOUTS[layout][1](t)

    def _repeat(self) -> None:
        """Replace another tensor argument by the tensor ``x``, so that ``x`` is passed twice. If the other argument is
        a list of tensors, put its first tensor into it twice instead.
        """
        x = self.values[self.names.index("x")]
        for name in ("y", "acc", "ts", "accs"):
            if name in self.names:
                at = self.names.index(name)
                if isinstance(self.values[at], list):
                    self.values[at] = [self.values[at][0]] * 2
                elif self.values[at] is not None:
                    self.values[at] = x
                return

    def fresh(
        self, *, gradients: bool = False, dtype: torch.dtype | None = None, contiguous: bool = False
    ) -> list[Any]:
        """Return a list of copies of the arguments, in declared order. A tensor that is passed twice is copied once.

        Floating-point tensors are converted to ``dtype`` if it is given. They are contiguous if ``contiguous`` is true,
        and otherwise have the strides of the arguments. If ``gradients`` is true, those to which the op does not write
        are leaves that require a gradient.
        """
        # By identity: a tensor that is passed twice must be one tensor in the copies as well.
        copies: dict[int, Tensor] = {}

        def copy(value: Any, name: str) -> Any:
            """Return the copy of ``value``, which is the argument ``name`` or a tensor of its list. The arguments of
            ``fresh`` select its dtype, its strides and whether it requires a gradient. Return ``value`` itself if it is
            neither a tensor nor a list of tensors.
            """
            if isinstance(value, list) and value and isinstance(value[0], Tensor):
                return [copy(v, name) for v in value]
            if not isinstance(value, Tensor):
                return value
            if id(value) not in copies:
                made = clone_exactly(value)
                if value.is_floating_point():
                    made = made.to(dtype) if dtype is not None else made
                    made = made.contiguous() if contiguous else made
                    # A leaf that requires a gradient must not be written to.
                    if gradients and not name.startswith("acc"):
                        made = made.detach().requires_grad_()
                copies[id(value)] = made
            return copies[id(value)]

        return [copy(v, n) for v, n in zip(self.values, self.names, strict=True)]

    def split(self, values: list[Any]) -> tuple[list[Any], dict[str, Any]]:
        """Return the arguments ``values``, which are in declared order, as a list of the positional ones and a dict of
        those that are passed by keyword.
        """
        pairs = list(zip(self.names, values, strict=True))
        return [v for n, v in pairs if n not in self.keywords], {n: v for n, v in pairs if n in self.keywords}


def flat_tensors(values: Any) -> list[Tensor]:
    """Return the tensors in ``values``, a tensor or nested lists, tuples and dicts, in order. Other values are left
    out.
    """
    if isinstance(values, Tensor):
        return [values]
    if isinstance(values, (list, tuple)):
        return [t for v in values for t in flat_tensors(v)]
    return [t for v in values.values() for t in flat_tensors(v)] if isinstance(values, dict) else []
