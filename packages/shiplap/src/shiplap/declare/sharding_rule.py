"""``ShardingRule``, which states how the arguments of a call are sharded over ranks and its results combined."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from shiplap.declare.spec import OpSpec
from shiplap.errors import error

ShardedPart: TypeAlias = int | Literal["whole", "sum", "max", "min"]
"""What one rank has of a tensor: its shard along an axis (an int), the whole tensor, or a partial result that is
combined with those of the other ranks by a sum, a maximum or a minimum."""

PARTS = ("whole", "sum", "max", "min")
FailureHook: TypeAlias = Callable[[Any, Sequence[Any], Exception], bool]
failure_hooks: list[FailureHook] = []
"""Functions of an op, its arguments and the error of a failed call. One raises a clearer error, or returns whether the
call should be tried once more."""


@dataclass(frozen=True)
class ShardingRule:
    """The distribution of a call's tensors over one dimension of a device mesh.

    Attributes:
        name: the sharded dim of the declaration, or ``"declared"`` for a rule of :meth:`Op.sharding`.
        inputs: pairs of the name of a tensor argument and its :data:`ShardedPart`, which is what one rank has of it.
        outputs: the :data:`ShardedPart` of each output.
        empty: whether the shard of a rank may be empty.
    """

    name: str
    inputs: tuple[tuple[str, ShardedPart], ...]
    outputs: tuple[ShardedPart, ...]
    empty: bool = True

    def __str__(self) -> str:
        """Return the rule as text, such as ``declared: a cut along 1, b cut along 0 → sum``."""
        given = ", ".join(f"{name} {_sharded_part_text(part)}" for name, part in self.inputs)
        return f"{self.name}: {given} → {', '.join(map(_sharded_part_text, self.outputs))}"


def _sharded_part_text(part: ShardedPart) -> str:
    """Return in words what one rank has of a tensor. It is ``cut along <axis>`` for a shard along an axis, and
    otherwise the declared word, such as ``whole`` or ``sum``.
    """
    return f"cut along {part}" if isinstance(part, int) else part


def read_sharding(
    spec: OpSpec, inputs: Mapping[str, ShardedPart], outputs: ShardedPart | Sequence[ShardedPart]
) -> ShardingRule:
    """Return the declared rule by which DTensor may shard the op. ``inputs`` maps names of arguments to what one rank
    has of them, and ``outputs`` has this for each output. It is the axis of a shard, ``"whole"``, or ``"sum"``,
    ``"max"`` or ``"min"`` for a partial result.

    Raise ``SL218`` for a name that is no tensor argument, for an axis that does not exist, and for an op that cannot be
    sharded.
    """
    given: list[Any] = list(outputs) if isinstance(outputs, (list, tuple)) else [outputs]
    names = [a.name for a in spec.tensors]
    where = f"{spec.name}.sharding"
    if not isinstance(inputs, Mapping):
        raise error("SL218", where=where, got=repr(inputs), expected="a dict of arguments and their parts")
    for name in inputs:
        if name not in names:
            raise error("SL218", where=where, got=f"{name!r}", expected=f"one of {', '.join(names)}")
    if len(given) != len(spec.outputs):
        raise error("SL218", where=where, got=f"parts of {len(given)} outputs", expected=f"{len(spec.outputs)}")
    if spec.mutated or any(a.many for a in spec.args):
        got = "an op that writes to its arguments, or takes lists of tensors"
        raise error("SL218", where=where, got=got, expected="an op of tensors that returns new ones")
    types = {a.name: a.tensor for a in spec.tensors} | {f"output {i}": o.tensor for i, o in enumerate(spec.outputs)}
    # An argument that a rule does not name is whole on each rank.
    parts = {name: inputs.get(name, "whole") for name in names}
    for name, part in [*parts.items(), *((f"output {i}", part) for i, part in enumerate(given))]:
        tensor = types[name]
        known = isinstance(part, str) and part in PARTS
        # A bool is an int in Python, too, but no axis.
        if type(part) is int and tensor is not None:
            known = part >= 0 and (tensor.variadic or part < len(tensor.dims))
        if not known:
            raise error("SL218", where=f"{where}, {name}", got=repr(part), expected=f"an axis of {tensor}, or {PARTS}")
    return ShardingRule("declared", tuple(parts.items()), tuple(given))
