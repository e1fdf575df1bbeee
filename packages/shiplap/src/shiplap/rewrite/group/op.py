"""Merge calls of a shiplap op that declares along which dims its calls may be joined."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from shiplap.dispatch import Op, compile_cache_key
from shiplap.errors import error
from shiplap.rewrite.graph import fake_tensor
from shiplap.rewrite.group.base import GroupRewrite, MergedCall
from shiplap.rewrite.group.cost import Machine, MergePrice, tensor_bytes
from shiplap.rewrite.normalize_call import canonical_name
from shiplap.rewrite.program import Program
from shiplap.sampling.samples import Samples
from shiplap.torch_private.dynamo import is_folded

CALLS_IN_PROOF = 3  # calls in a program of the proof


class JoinedCalls(GroupRewrite):
    """A rewrite that joins independent calls of ``op`` into one call by concatenating their arguments along ``dim``.
    The calls must be equal in all arguments without that dim.

    Args:
        op: the op, which declares by ``op.batches(...)`` that its calls may be joined.
        dim: one of the dims that ``op.batches`` names.

    Raises:
        ShiplapError: ``SL117`` if ``op`` does not declare ``dim``.
    """

    def __init__(self, op: Op, dim: str, **options: Any) -> None:
        """Set the op and the dim along which its calls are joined. ``options`` are those of ``GroupRewrite``. Raise
        ``SL117`` if the op does not declare ``dim``.
        """
        super().__init__(**options)
        batching = next((b for b in op.batching if b.dim == dim), None)
        if batching is None:
            raise error(
                "SL117",
                where=f"JoinedCalls({op.spec.name}, {dim!r})",
                got="a dim that it does not declare",
                expected=f"one of {[b.dim for b in op.batching]}",
                fix=f"call op.batches({dim!r})",
            )
        self.op, self.batching = op, batching
        self.name = f"joined_{op.spec.namespace}_{op.spec.opname}_{dim}"

    @property
    def code_is_fully_hashed(self) -> bool:
        """Always false, because the results also depend on the kernels of the op, which ``digest`` does not cover."""
        return False  # the kernels of the op decide as well

    def describe_options(self) -> str:
        """Return, as text for the rewrite's digest, the key of the op's code and the dims along which its calls are
        joined.
        """
        return f"{compile_cache_key.op_cache_key(self.op)} {self.batching}"

    def key(self, node: Node) -> Hashable | None:
        """Return a tuple that is equal for calls of the op that can be joined into one. In such calls, arguments with
        the joined dim differ at most in its size, and all other arguments are equal. Return None for other calls.
        """
        if node.op != "call_function" or canonical_name(node) != self.op.spec.name:
            return None
        return tuple(_unjoined_properties(v, at) for v, at in zip(self._arguments(node), self._places(), strict=True))

    def merge(self, members: Sequence[Node]) -> MergedCall:
        """Return a function that computes all of ``members`` by one call of the op, and the arguments of that function.
        The function concatenates the members' arguments along the joined dim, calls the op and splits its result.
        """
        calls = [self._arguments(m) for m in members]
        joined = [
            [c[i] for c in calls] if at is not None and calls[0][i] is not None else None
            for i, at in enumerate(self._places())
        ]
        return _make_joined_call(self.op, self._places(), self.batching.outputs[0]), (joined, calls[0])

    def price(self, members: Sequence[Node], machine: Machine) -> MergePrice | str:
        """Return a ``MergePrice`` with the estimated nanoseconds that merging ``members`` saves by fewer launches and
        adds by concatenating arguments and splitting the result.
        """
        parts = [
            v
            for m in members
            for v, at in zip(self._arguments(m), self._places(), strict=True)
            if at is not None and isinstance(v, Node) and not is_folded(v)
        ]
        added = 2 * (tensor_bytes(parts) + tensor_bytes(members)) / machine.copy + machine.launch
        work = tensor_bytes({n for m in members for n in m.all_input_nodes} | set(members)) / machine.read
        count = len(members)
        return MergePrice(count * machine.launch + work, (count - 1) * machine.launch, added, "joining arguments costs")

    def programs(self) -> Iterator[Program]:
        """Yield functions with example arguments on which the rewrite is proven. Each calls the op three times with
        different values. A result that is returned for the wrong call would therefore be noticed.
        """
        samples = Samples(self.op, 0)
        # Absent arguments change which arguments are joined.
        for case in (*samples.plain(), *samples.optionals()):
            # Each call gets values of its own, so that exchanged results would be noticed.
            draws = [case.fresh(), *(samples.build(case.recipe).fresh() for _ in range(CALLS_IN_PROOF - 1))]
            yield self._program(draws, case.label)

    def _program(self, draws: Sequence[tuple[Any, ...]], label: str) -> Program:
        """Return a program on which this rewrite is proven, that is a function with example arguments. It calls the op
        once for each of ``draws``, which holds the arguments of one call each. ``label`` names the program in findings.
        """
        places = self._places()
        shared = [draws[0][i] if at is None else None for i, at in enumerate(places)]
        own = [[d[i] for d in draws] if at is not None else None for i, at in enumerate(places)]
        flat = [v for v in (*shared, *(x for each in own if each for x in each)) if isinstance(v, Tensor)]
        return Program(_make_separate_calls(self.op, shared, own), tuple(flat), f"{CALLS_IN_PROOF} x {label}")

    def _places(self) -> list[int | None]:
        """Return, for each argument of the op, the position of the dim along which calls are joined. It is None for an
        argument that does not have that dim.
        """
        joined = dict(self.batching.joined)
        return [joined.get(a.name) for a in self.op.spec.args]

    def _arguments(self, node: Node) -> list[Any]:
        """Return the arguments of the call ``node`` in declared order. An absent argument is returned as its default,
        or as None if it has no default.
        """
        spec = self.op.spec.args
        given = [*node.args, *(node.kwargs.get(a.name, a.default) for a in spec[len(node.args) :])]
        return [None if v is ... else v for v in given]


def _unjoined_properties(given: Any, at: int | None) -> Hashable:
    """Return what must be equal in an argument of calls that are joined.

    For a tensor that is joined along the dim ``at``, it is a tuple of the dtype, the device and the sizes without that
    dim. If ``at`` is None, or for any other value, it is the node itself or the ``repr`` of a constant.
    """
    held = fake_tensor(given)
    if at is None or held is None:
        return given if isinstance(given, Node) else repr(given)
    sizes = [s for i, s in enumerate(held.shape) if i != at]
    return (held.dtype, str(held.device), *map(str, sizes))


def _make_joined_call(op: Op, places: Sequence[int | None], out: int) -> Callable[..., list[Tensor]]:
    """Return a function that computes several calls of ``op`` by one call and returns a list of their results.
    ``places`` holds, for each argument, the dim along which the function concatenates its values, or None for an
    argument that is not joined. ``out`` is the dim along which it splits the result.
    """

    def call(joined: list[Any], first: list[Any]) -> list[Tensor]:
        """Return the results of all joined calls of the op, computed by one call. ``joined`` holds for each argument a
        list of the values of all calls, or None if the argument is not joined. ``first`` holds the arguments of the
        first call, which provide the values that are not joined.
        """
        parts = list(zip(joined, first, places, strict=True))
        args = [v if own is None or at is None else torch.cat(own, at) for own, v, at in parts]
        # Any joined argument gives the sizes, since all of them have the same dim.
        sizes = next([t.shape[at] for t in own] for own, _, at in parts if own is not None and at is not None)
        # The results of single calls are contiguous, and parts of a joined one need not be.
        return [part.contiguous() for part in op.overload(*args).split(sizes, out)]

    return call


def _make_separate_calls(op: Op, shared: Sequence[Any], own: Sequence[Any]) -> Callable[..., Any]:
    """Return a function of tensors that calls ``op`` three times. ``shared`` holds, for each argument of the op, the
    value that all calls share, or None. ``own`` holds, for each argument, a list with one value per call, or None.

    The tensors are separate parameters of the function, because a program takes only tensors and scalars.
    """

    def run(*tensors: Tensor) -> tuple[Tensor, ...]:
        """Return the sines of the results of three calls of the op as a tuple. ``tensors`` are the tensors in
        ``shared``, followed by the tensors of each argument in ``own``.
        """
        given = iter(tensors)
        common = [next(given) if isinstance(v, Tensor) else v for v in shared]
        single = [[next(given) if isinstance(v, Tensor) else v for v in each] if each else None for each in own]
        # Each result passes through a sine, so that the joined calls have a pointwise reader as in a model.
        calls = [[c if s is None else s[k] for c, s in zip(common, single, strict=True)] for k in range(CALLS_IN_PROOF)]
        return tuple(op.overload(*call).sin() for call in calls)

    return run
