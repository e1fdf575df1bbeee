"""``fake``: compiled code reads from the fake the properties that the outputs of the real op have.

The properties are sizes, dtype, strides, offset, device and aliasing, with plain and with symbolic sizes. A symbolic
run must not pin a dim to the size of the sample either, or every other size recompiles.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from shiplap import torch_private
from shiplap.audit.check import Check, Observation
from shiplap.dispatch import Op
from shiplap.sampling.case import SampleCase, tensors_among, tree_map
from shiplap.sampling.pairwise import padded_multiples
from shiplap.sampling.run import call_op, results_of
from shiplap.sampling.samples import Samples


def fake_cases(samples: Samples) -> Iterable[SampleCase]:
    """Yield the samples on which the check ``fake`` calls the op.

    They are samples with all dtypes, layouts and scalars, and with sizes of 0 and 1. Others have larger sizes than one
    block of a kernel, or larger ones than the integers in the op's code.
    """
    yield from chain(samples.plain(), samples.dtypes(), samples.optionals(), samples.scalars(), samples.layouts())
    yield from chain(samples.edges(), padded_multiples(samples), samples.grown(2), samples.wide())


def observe_fake(op: Op, case: SampleCase) -> Observation:
    """Call the op on real tensors and on fake ones, which have no data. The returned observation has a problem if the
    outputs differ in a property on which compiled code relies, or if a symbolic size becomes a constant.
    """
    args = case.fresh()
    with torch.no_grad():
        real = call_op(op, args)
        for symbolic in (False, True) if _can_vary_sizes(case) else (False,):
            how = "symbolic sizes" if symbolic else "plain sizes"
            with torch_private.fake_mode(symbolic or bool(op.spec.bounds)) as mode:
                fakes = tree_map(partial(_make_fake_tensor, mode, symbolic), case.args)
                sizes = [list(t.shape) for t in tensors_among(fakes)]
                promised = results_of(op, op.overload, fakes)
                problem = _difference_of_outputs(real, args, promised, fakes)
                if problem:
                    return Observation(f"with {how}, {problem}")
            if symbolic and (pinned := _find_pinned_dim(op, case, sizes)):
                return Observation(
                    f"the fake pins {pinned} to this sample's size: every other size recompiles",
                    fix="compute sizes with SymInts: no int(), no comparison, no loop over them",
                )
    return Observation()


def _can_vary_sizes(case: SampleCase) -> bool:
    """Return whether a run with symbolic sizes adds evidence.

    It does unless a size is 0 or 1, which torch treats as a constant, or only some arguments have a special layout.
    """
    sizes = [v for _, v in case.recipe.sizes if type(v) is int]
    return min(sizes, default=2) > 1 and set(dict(case.recipe.layouts)) <= {"every"}


def _make_fake_tensor(mode: Any, symbolic: bool, t: Tensor) -> Tensor:
    """Return a fake tensor (a tensor without data) like ``t``, made in the fake mode ``mode``. If ``symbolic`` is true,
    its sizes are symbols. Otherwise they are the sizes of ``t`` as numbers.
    """
    return torch_private.make_fake_tensor(mode, t, dynamic=symbolic)


def _difference_of_outputs(real: tuple[Tensor, ...], args: Any, fake: tuple[Tensor, ...], fakes: Any) -> str:
    """Return a message that describes the first difference between the real outputs ``real`` and the fake ones
    ``fake``, or an empty string if there is none.

    The outputs are compared in number, dtype, device, shape, strides and storage offset. Another difference is whether
    an output shares memory with an input. ``args`` are the real inputs, and ``fakes`` the fake ones.
    """
    if len(real) != len(fake):
        return f"{len(fake)} fake outputs, {len(real)} real ones"
    # Symbols are replaced by the sizes of the real outputs, so that strides can be compared as numbers.
    known = {
        symbol: size
        for r, f in zip(real, fake, strict=True)
        for size, s in zip(r.shape, f.shape, strict=False)
        if (symbol := torch_private.size_symbol(s))
    }
    for index, (r, f) in enumerate(zip(real, fake, strict=True)):
        for name, is_real, is_fake in _properties_of_output(r, f, known):
            if is_real != is_fake:
                return f"output {index}: {name} {is_real} is real, {is_fake} is promised"
        for position, (a, b) in enumerate(zip(tensors_among(args), tensors_among(fakes), strict=True)):
            # An empty real tensor has no storage to share.
            if r.numel() and (torch_private.same_storage(r, a) != torch_private.same_storage(f, b)):
                which = "the real" if torch_private.same_storage(r, a) else "only the fake"
                return f"output {index}: {which} output shares the memory of input {position}"
    return ""


def _properties_of_output(r: Tensor, f: Tensor, known: dict[str, int]) -> Iterable[tuple[str, Any, Any]]:
    """Yield ``(property, real value, fake value)`` for each property of one output, whose real tensor is ``r`` and
    whose fake tensor is ``f``. ``known`` maps symbols in sizes of ``f`` to numbers.
    """

    def plain(sizes: Iterable[Any]) -> tuple[int | None, ...]:
        """Return symbolic sizes or strides as a tuple of numbers. A symbol becomes its value in ``known``, or None if
        it has none.
        """
        return tuple(torch_private.size_value(s, known) for s in sizes)

    yield "dtype", r.dtype, f.dtype
    yield "device", r.device, f.device
    yield "shape", tuple(r.shape), plain(f.shape)
    if r.numel() > 1:  # strides of an empty tensor are never used
        relevant = [i for i, size in enumerate(r.shape) if size > 1]
        yield "strides", tuple(r.stride(i) for i in relevant), plain(f.stride(i) for i in relevant)
    yield "storage offset", r.storage_offset(), torch_private.size_value(f.storage_offset(), known)


def _find_pinned_dim(op: Op, case: SampleCase, sizes: list[list[Any]]) -> str:
    """Return a message that names the first dim to which the fake implementation gives a constant size, although the
    declaration leaves the size free. Return an empty string if there is none. ``sizes`` holds the symbolic sizes of
    each tensor argument.
    """
    free = {n for n, _ in case.recipe.sizes} - {n for e in op.spec.requires for n in e.names}
    if op.spec.traced and op.spec.scalars:
        return ""  # the reference may relate sizes to the values of scalars, such as those of pieces to a whole
    free -= {a.name for a in op.spec.scalars}  # a dim that an argument names has that size, and no other
    named = [
        (a, t)
        for a, v in zip(op.spec.args, case.args, strict=True)
        for t in (v if isinstance(v, list) else [v])
        if isinstance(t, Tensor)
    ]
    for (arg, _), symbols in zip(named, sizes, strict=True):
        assert arg.tensor is not None
        for dim, size in zip(arg.tensor.dims, symbols, strict=False):
            if arg.tensor.variadic or dim.text not in free or isinstance(size, int):
                continue
            if torch_private.size_constant(size) is not None:
                return f"dim {dim.text!r} of {arg.name}"
    return ""


CHECK = Check(
    "fake",
    order=100,
    observes="shape, dtype, strides, offset, device and aliasing are as the fake says, for plain and symbolic sizes",
    observe=observe_fake,
    cases=fake_cases,
    obligations=("fake",),
    fix="correct the fake (or declare the op with sl.op, which derives it); return contiguous outputs",
)
