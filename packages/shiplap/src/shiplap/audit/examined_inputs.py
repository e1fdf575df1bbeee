"""The inputs that a check has examined, observed on the tensors that the op actually received."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shiplap.dispatch import Op
from shiplap.sampling.case import SampleCase, is_float8, tensors_among

MOST_EXAMINED_ELEMENTS = 1 << 20  # elements beyond which values are not looked at


def describe_inputs(op: Op, case: SampleCase) -> dict[str, Any]:
    """Return a description of a sample of ``op`` as a dict of values that JSON can represent. It has the label, sizes,
    dtypes, kinds of values and layouts, and the optional arguments that are absent.
    """
    values = tensors_among(case.args)
    return {
        "label": case.label,
        "sizes": {k: str(v) for k, v in case.recipe.sizes},
        "dtypes": sorted({str(t.dtype).removeprefix("torch.") for t in values}),
        "values": sorted({fact for t in values for fact in _facts_of_values(t)}),
        "layouts": sorted({_layout_name(t) for t in values}),
        "absent": [a.name for a, v in zip(op.spec.args, case.args, strict=True) if a.tensor and v is None],
    }


def _facts_of_values(t: Tensor) -> list[str]:
    """Return facts about the values of a tensor on which a kernel may depend, such as ``NaN`` or ``negative``. The list
    is empty for complex, float8 and bool tensors and for more than 2^20 elements. It is ``["none"]`` for no elements.
    """
    if t.numel() == 0:
        return ["none"]
    if t.numel() > MOST_EXAMINED_ELEMENTS or t.is_complex() or is_float8(t) or t.dtype == torch.bool:
        return []
    if not t.is_floating_point():
        # Not each integer dtype has the operators below.
        wide = t.to(torch.int64)
        facts = {"negative integers": wide.min() < 0, "integers from 0": wide.min() >= 0}
        facts["repeated integers"] = wide.unique().numel() < wide.numel()
        return [name for name, holds in facts.items() if bool(holds)]
    wide = t.double()
    size = wide[torch.isfinite(wide)].abs()
    top = float(size.max()) if size.numel() else 0.0
    facts = {
        "NaN": torch.isnan(wide).any(),
        "infinity": torch.isinf(wide).any(),
        "-0.0": ((wide == 0) & torch.signbit(wide)).any(),
        "zeros": (wide == 0).any(),
        "subnormal": ((wide != 0) & (wide.abs() < torch.finfo(t.dtype).tiny)).any(),
        "negative": (wide < 0).any(),
    }
    # 65504 is the largest finite number of float16.
    sizes = {"beyond float16": top > 65504, "around 1": 0.1 < top < 50, "above 50": top >= 50}
    return [name for name, holds in {**facts, **sizes}.items() if bool(holds)]


def _layout_name(t: Tensor) -> str:
    """Return the name of a tensor's memory layout, which is ``contiguous``, ``offset``, ``expanded``, ``padded rows``,
    ``strided`` or ``permuted``.
    """
    if t.is_contiguous():
        return "offset" if t.storage_offset() else "contiguous"
    if any(stride == 0 and size > 1 for size, stride in zip(t.shape, t.stride(), strict=True)):
        return "expanded"
    if t.dim() and t.stride(-1) == 1:
        return "padded rows"
    order = sorted(t.stride(), reverse=True)
    return "strided" if list(t.stride()) == order else "permuted"
