"""The parts for users: a pruned weight, packed for its device, and the product with it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from shiplap.plugin_api import error, notice
from shiplap.plugin_api.memos import built_outside_modes
from shiplap_slidesparse import formats, layers, lt, ops
from shiplap_slidesparse.formats import Pattern
from shiplap_slidesparse.quantise import quantise_weight

__all__ = ["LAYERS", "MODES", "Packed", "known_mode", "matmul", "multiply_fields", "pack"]

# The dtype of a weight in each mode.
MODES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn, "bf16": torch.bfloat16, "fp16": torch.float16}
Keep = Literal["both", "dense", "packed"]


def known_mode(mode: str, where: str, called: str = "mode") -> str:
    """Return ``mode`` if it is a key of ``MODES``, such as ``int8``. Otherwise raise ``SL211``. In the error, ``where``
    names the caller and ``called`` names the caller's argument.
    """
    if mode not in MODES:
        raise error(
            "SL211",
            where=where,
            got=f"{called} {mode!r}",
            expected=", ".join(MODES),
            fix="pass one of the expected values",
        )
    return mode


@dataclass(frozen=True, eq=False)  # tensors have no one answer to ==
class Packed:
    """A weight ``[n, k]`` with a sparsity pattern, ready for products. It consists of tensors and integers only.

    Attributes:
        mode: ``"int8"``, ``"fp8"``, ``"bf16"`` or ``"fp16"``.
        pairs: N of the pattern ``(2N-2):2N``, 0 for dense.
        n, k: the numbers of rows and of columns.
        dense: the pruned weight in the mode's dtype, ``[n, k]``, or None.
        packed: the weight packed for sparse tensor cores, uint8, or None.
        scale: one scale for each row, float32 ``[n]``, in the 8-bit modes, else None.
        layout: the number of the packed format.
    """

    mode: str
    pairs: int
    n: int
    k: int
    dense: Tensor | None
    packed: Tensor | None
    scale: Tensor | None
    layout: int = ops.PORTABLE

    def __post_init__(self) -> None:
        """Raise ``SL211`` if the tensors do not fit the integers, since kernels would read wrong memory."""
        self._check_sizes()
        if not self.pattern.sparse or any(t.is_meta for t in self.tensors):
            return
        rows, depth = formats.dense_depth(self.n), formats.lifted_depth(self.k, self.pairs)
        slid = formats.slide_weight(formats.pad_matrix(self.weight(), rows, self.k), self.pattern)
        packed = slid
        if self.packed is not None:
            packed = ops.expand_packed(self.packed, rows, depth, MODES[self.mode], self.layout)
        # Windows of other pairs may need as many bytes. They hold other numbers.
        if not torch.equal(packed.to(torch.float32), slid.to(torch.float32)):
            raise _unfit("a packed weight of other numbers", f"windows of {self.pattern} and depth {self.k}")

    def _check_sizes(self) -> None:
        """Raise ``SL211`` if the tensors do not have the sizes and dtypes that ``n``, ``k``, ``mode`` and the pattern
        imply. Raise it also if both ``dense`` and ``packed`` are None.
        """
        known_mode(self.mode, "slidesparse.Packed")
        dtype, bytes_ = MODES[self.mode], None
        if self.pattern.sparse:
            depth = formats.lifted_depth(self.k, self.pairs)
            bytes_ = (formats.compressed_bytes(formats.dense_depth(self.n), depth, dtype.itemsize),)
        expected = {
            "dense": (self.dense, (self.n, self.k), dtype, False),
            "packed": (self.packed, bytes_ if self.layout == ops.PORTABLE else None, torch.uint8, False),
            "scale": (self.scale, (self.n,) if dtype.itemsize == 1 else None, torch.float32, dtype.itemsize == 1),
        }
        for name, (tensor, shape, kind, needed) in expected.items():
            absent = shape is None and not (name == "packed" and self.pattern.sparse)
            if tensor is None and not needed:
                continue
            if tensor is None or absent or tensor.dtype != kind or (shape is not None and tensor.shape != shape):
                got = f"{name} None" if tensor is None else f"{name} {tuple(tensor.shape)} of {tensor.dtype}"
                size = f"{self.n} rows of {self.k} in mode {self.mode!r}, pattern {self.pattern}"
                raise _unfit(got, f"no {name} for {size}" if absent else f"{shape} of {kind} for {size}")
        if self.dense is None and self.packed is None:
            raise _unfit("neither a dense nor a packed weight", "one of them")

    @classmethod
    def unchecked(cls, *fields: Any) -> Packed:
        """Return a packed weight with the values ``fields``, in the order of the attributes, without checking them. A
        missing ``layout`` becomes the portable one. The method is for values that this package has made itself.
        """
        # Past ``__init__`` and its checks.
        made = object.__new__(cls)
        named = dict(
            zip(cls.__dataclass_fields__, (*fields, ops.PORTABLE)[: len(cls.__dataclass_fields__)], strict=True)
        )
        made.__dict__.update(named)
        return made

    @property
    def pattern(self) -> Pattern:
        """The sparsity pattern of the weight."""
        return Pattern(self.pairs)

    @property
    def nbytes(self) -> int:
        """The number of bytes of all tensors of the weight."""
        return sum(t.numel() * t.itemsize for t in self.tensors)

    def weight(self) -> Tensor:
        """Return the pruned weight ``[n, k]`` in the stored dtype, such as ``int8``, without its scales. If ``dense``
        is None, it is computed from ``packed``.
        """
        if self.dense is not None:
            return self.dense
        assert self.packed is not None
        depth = formats.lifted_depth(self.k, self.pairs)
        slid = ops.expand_packed(self.packed, formats.dense_depth(self.n), depth, MODES[self.mode], self.layout)
        return formats.unslide_weight(slid, self.k, self.pattern)[: self.n]

    def dequantised(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the weight ``[n, k]`` in ``dtype``. In the 8-bit modes its scales are multiplied in."""
        weight = self.weight().to(dtype)
        return weight if self.scale is None else weight * self.scale[:, None].to(dtype)

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors of the weight that are not None, in the order ``dense``, ``packed``, ``scale``."""
        return [t for t in (self.dense, self.packed, self.scale) if t is not None]

    @built_outside_modes
    def to(self, device: torch.device | str) -> Packed:
        """Return the weight on ``device``, packed again for that device. If ``dense`` or ``packed`` is None, it stays
        None. Return the weight itself if it is on that device.
        """
        target = torch.device(device)
        here = self.dense if self.dense is not None else self.packed
        if here is not None and here.device == target:
            return self
        keep: Keep = (
            "both"
            if self.dense is not None and self.packed is not None
            else ("packed" if self.dense is None else "dense")
        )
        scale = None if self.scale is None else self.scale.to(target)
        # The packed form depends on the device, so the weight is packed again there.
        return pack(self.weight().to(target), self.pattern, self.mode, scale=scale, keep=keep)

    @built_outside_modes
    def keeping(self, keep: Keep) -> Packed:
        """Return the weight with one of its two forms only, to save memory. ``"dense"`` keeps the row-major matrix, and
        ``"packed"`` keeps the packed weight of sparse tensor cores. Return the weight itself for ``"both"``, and for
        ``"packed"`` if there is no packed weight. Raise ``SL211`` for any other value.
        """
        _known_keep(keep, "Packed.keeping")
        if keep == "dense":
            return replace(self, dense=self.weight(), packed=None)
        return self if keep == "both" or self.packed is None else replace(self, dense=None)


def _unfit(got: str, expected: str) -> Exception:
    """Return the error ``SL211`` for fields of a packed weight that do not fit together. In the error's text, ``got``
    is the wrong value, and ``expected`` describes a right one.
    """
    fix = "call pack() on the weight, and change no field of its result"
    return error("SL211", where="slidesparse.Packed", got=got, expected=expected, fix=fix)


@built_outside_modes
def pack(
    weight: Tensor,
    pattern: str | Pattern = "dense",
    mode: str = "int8",
    *,
    scale: Tensor | None = None,
    keep: Keep = "both",
) -> Packed:
    """Return a pruned ``weight`` ``[n, k]``, quantised per row (8-bit modes) and packed for its device.

    Pack after loading, and after cutting a weight for tensor parallelism. Groups of the pattern begin at the first
    column of the packed weight. So a shard that begins within a group of the whole weight has to be pruned as a shard.

    Args:
        weight: a weight that has the pattern, see :func:`prune`.
        pattern: such as ``"6:8"``, or ``"dense"`` for any weight. A dense weight is not packed.
        mode: ``"int8"``, ``"fp8"``, ``"bf16"`` or ``"fp16"``.
        scale: the scales of a weight that is already in the mode's 8-bit dtype, float32 ``[n]``.
        keep: which weights the result holds, ``"dense"`` (row-major), ``"packed"`` or ``"both"``. With ``"both"``,
            ``sl.tune`` chooses between the two. A device without sparse units always gets ``"dense"``.

    Raises:
        ShiplapError: ``SL211`` for weights that are not of the pattern, not finite or too deep for int8 (65536
            columns), and for an unknown mode.
    """
    shape = Pattern.parse(pattern)
    known_mode(mode, "slidesparse.pack")
    _known_keep(keep, "slidesparse.pack")
    weight, dtype = formats.check_matrix(weight, "slidesparse.pack").detach(), MODES[mode]
    if mode == "int8" and weight.shape[1] > layers.INT8_DEPTH:
        raise error(
            "SL211",
            where="slidesparse.pack",
            got=f"{weight.shape[1]} columns in mode 'int8'",
            expected=f"at most {layers.INT8_DEPTH}, whose sums are exact",
            fix='take mode="fp8"',
        )
    if scale is not None:
        _check_quantised(weight, scale, mode)
    elif weight.itemsize == 1:
        raise error(
            "SL211",
            where="slidesparse.pack",
            got=f"{weight.dtype} without a scale",
            expected="a floating weight, or one of 8 bits with scale=",
            fix="pass the scales of the weight with scale=",
        )
    elif dtype.itemsize == 1:
        weight, scale = quantise_weight(weight, dtype)
    else:
        weight = weight.to(dtype)
        # After the cast, which may overflow.
        _refuse_infinite(torch.isfinite(weight), dtype)
    return _assemble_packed(weight.contiguous(), scale, mode, shape, keep)


def _known_keep(keep: str, where: str) -> None:
    """Raise ``SL211`` if ``keep`` is not ``"both"``, ``"dense"`` or ``"packed"``. ``where`` names the caller in the
    error.
    """
    if keep not in get_args(Keep):
        raise error(
            "SL211",
            where=where,
            got=f"keep {keep!r}",
            expected=", ".join(get_args(Keep)),
            fix="pass one of the expected values",
        )


def _refuse_infinite(finite: Tensor, dtype: torch.dtype) -> None:
    """Raise ``SL211`` with the number of the first row that has a False in the mask ``finite``, if there is one.
    ``dtype`` is that of the weight, for the error's text.
    """
    if (bad := ~finite.all(1)).any():
        raise error(
            "SL211",
            where="slidesparse.pack",
            got=f"row {int(bad.nonzero()[0, 0])} holds NaN or an infinity as {dtype}",
            expected="finite weights and scales",
            fix="repair the checkpoint, or take a mode of a wider range",
        )


def _check_quantised(weight: Tensor, scale: Tensor, mode: str) -> None:
    """Raise ``SL211`` if a quantised weight and its scale do not fit the mode, or if they are not finite."""
    if weight.dtype != MODES[mode] or MODES[mode].itemsize != 1:
        raise error(
            "SL211",
            where="slidesparse.pack",
            got=f"a scale with {weight.dtype} in mode {mode!r}",
            expected="a scale only with a weight of 8 bits",
            fix="leave scale out",
        )
    if scale.shape != weight.shape[:1] or scale.dtype != torch.float32:
        raise error(
            "SL211",
            where="slidesparse.pack",
            got=f"a scale {tuple(scale.shape)} of {scale.dtype}",
            expected=f"float32 ({weight.shape[0]},)",
            fix="pass one scale per output channel",
        )
    _refuse_infinite((weight == weight) & torch.isfinite(scale)[:, None], weight.dtype)  # NaN is not itself


def _assemble_packed(weight: Tensor, scale: Tensor | None, mode: str, pattern: Pattern, keep: Keep) -> Packed:
    """Return a ``Packed`` value around ``weight``, which is already pruned and in the dtype of ``mode``. Its ``packed``
    is set if the pattern is sparse and ``keep`` is not ``"dense"``. Its ``dense`` is set unless ``keep`` is
    ``"packed"`` and ``packed`` is set. Raise ``SL211`` if the weight does not have the pattern.
    """
    (n, k), packed, layout = weight.shape, None, ops.PORTABLE
    if pattern.sparse:
        # Before the test of ``keep``, since it refuses weights that are not of the pattern.
        slid = formats.slide_weight(formats.pad_matrix(weight, formats.dense_depth(n), k), pattern)
        if keep != "dense":
            packed, layout = _compress_for_device(slid)
    dense = None if keep == "packed" and packed is not None else weight
    return Packed.unchecked(mode, pattern.pairs, n, k, dense, packed, scale, layout)


def _compress_for_device(slid: Tensor) -> tuple[Tensor | None, int]:
    """Return a 2:4 weight (two non-zeros in each four neighbours) packed for its device, and the number of the packed
    format. On a GPU without cuSPARSELt the packed weight is None, and a notice is given.
    """
    if slid.device.type != "cuda":
        return formats.compress_two_of_four(slid), ops.PORTABLE
    available = lt.available(slid.device, slid.dtype)
    if available is True:
        return lt.compress_weight(slid), ops.CUSPARSELT
    notice(f"slidesparse/{slid.device}", f"slidesparse keeps its weights dense on {slid.device}: {available}")
    return None, ops.PORTABLE


LAYERS: dict[str, Any] = {
    "int8": layers.linear_int8,
    "fp8": layers.linear_fp8,
    "bf16": layers.linear_bf16,
    "fp16": layers.linear_fp16,
}


def matmul(x: Tensor, packed: Packed, bias: Tensor | None = None) -> Tensor:
    """Return ``x @ weight.T + bias`` in the dtype of ``x``. The result is a contiguous tensor ``[..., n]`` for ``x``
    ``[..., k]``.

    In the 8-bit modes ``x`` is quantised per row and may have any floating dtype. In the other modes it must have the
    weight's dtype. One op (``slidesparse::linear_*``) computes the result. Some of its kernels read the row-major
    weight and others the packed one. ``sl.tune`` chooses between them.
    """
    return multiply_fields(
        x, packed.mode, packed.n, packed.scale, packed.dense, packed.packed, bias, packed.pairs, packed.layout
    )


def multiply_fields(
    x: Tensor,
    mode: str,
    n: int,
    scale: Tensor | None,
    dense: Tensor | None,
    packed: Tensor | None,
    bias: Tensor | None,
    pairs: int,
    layout: int,
) -> Tensor:
    """Return the result of :func:`matmul` for a weight given by the fields of :class:`Packed`. A module holds them as
    parameters and buffers and has no ``Packed`` value.
    """
    # Two dims, the usual case, need no view, whose making costs time on the host.
    rows = x if x.dim() == 2 else x.flatten(0, -2) if x.dim() > 1 else x[None]
    # Without pairs nothing is packed, and the op reads the dense weight whatever their number.
    out = LAYERS[mode](rows, n if scale is None else scale, dense, packed, bias, pairs or 2, layout)
    return out if rows is x else out.view(*x.shape[:-1], n)
