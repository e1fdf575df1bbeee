"""The cross entropy of a linear layer without its logits: the ops, their references and their kernels.

A kernel goes over chunks of rows: a product with the weights, a pass over the logits of the chunk, and two products for
the gradients. The pass is Triton on CUDA (``loss_rows.py``) and torch on the CPU. The loss of a training step is one
number, so ``linear_cross_entropy_with_gradients`` computes its gradients in the forward, while the logits are there:
three products in all. ``linear_cross_entropy`` returns a loss for each row, and its backward computes the logits again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import BFloat16, Float16, Float32, Int64
from torch import Tensor
from torch.nn import functional as F

import shiplap as sl
from shiplap.plugin_api import error, is_last_backward

__all__ = [
    "chunk_rows",
    "linear_cross_entropy",
    "linear_cross_entropy_gradients",
    "linear_cross_entropy_with_gradients",
]

# float64 is left out, since losses are float32. The second op leaves out float16, too: gradients of a mean over many
# rows are below its range unless the factor of a loss scaler is known when they are rounded.
Hidden = Float16[Tensor, "n h"] | BFloat16[Tensor, "n h"] | Float32[Tensor, "n h"]
Weight = Float16[Tensor, "v h"] | BFloat16[Tensor, "v h"] | Float32[Tensor, "v h"]
Bias = Float16[Tensor, "v"] | BFloat16[Tensor, "v"] | Float32[Tensor, "v"] | None
HiddenGradient = Float16[Tensor, "n*of_hidden h"] | BFloat16[Tensor, "n*of_hidden h"] | Float32[Tensor, "n*of_hidden h"]
WeightGradient = Float16[Tensor, "v*of_weight h"] | BFloat16[Tensor, "v*of_weight h"] | Float32[Tensor, "v*of_weight h"]
BiasGradient = Float16[Tensor, "v*of_bias"] | BFloat16[Tensor, "v*of_bias"] | Float32[Tensor, "v*of_bias"]
RangedHidden = BFloat16[Tensor, "n h"] | Float32[Tensor, "n h"]
RangedWeight = BFloat16[Tensor, "v h"] | Float32[Tensor, "v h"]
RangedBias = BFloat16[Tensor, "v"] | Float32[Tensor, "v"] | None
RangedHiddenGradient = BFloat16[Tensor, "n*of_hidden h"] | Float32[Tensor, "n*of_hidden h"]
RangedWeightGradient = BFloat16[Tensor, "v*of_weight h"] | Float32[Tensor, "v*of_weight h"]
RangedBiasGradient = BFloat16[Tensor, "v*of_bias"] | Float32[Tensor, "v*of_bias"]

FLAGS = ("of_hidden", "of_weight", "of_bias")  # 1 where the gradient of this argument is computed, else 0
OPTIONS = ("0 <= label_smoothing", "label_smoothing <= 1", "0 <= softcap", "1 <= v")
FLAGGED = (*OPTIONS, *(f"{text} <= 1" for text in FLAGS), *(f"0 <= {text}" for text in FLAGS))


@dataclass(frozen=True)
class LossOptions:
    """The numeric options of a loss, under their names in ``linear_cross_entropy``. A target of ``ignore_index`` does
    not count. ``label_smoothing`` is that of torch. ``lse_square_scale`` is the factor of ``logsumexp(logits) ** 2``,
    which is added to each loss. Logits become ``softcap * tanh(logits / softcap)`` unless ``softcap`` is 0.
    """

    ignore_index: int
    label_smoothing: float
    lse_square_scale: float
    softcap: float


# --- in plain operators -----------------------------------------------------------------------------------------------


def _written_losses(
    hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, options: LossOptions
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss of each row, the logits after the soft cap, and the derivative of the cap. The cap is ``softcap *
    tanh(logits / softcap)``. The function uses only operators of torch and defines the result of the op. ``options``
    holds the numeric options of the loss.
    """
    logits = F.linear(hidden, weight, bias)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    slope = torch.ones_like(logits)
    if options.softcap:
        capped = torch.tanh(logits / options.softcap)
        logits, slope = capped * options.softcap, 1 - capped * capped
    ignored, smooth = options.ignore_index, options.label_smoothing
    losses = F.cross_entropy(logits, target, ignore_index=ignored, label_smoothing=smooth, reduction="none")
    if options.lse_square_scale:
        squares = options.lse_square_scale * logits.logsumexp(1).square()
        losses = losses + squares.masked_fill(target == options.ignore_index, 0)
    return losses, logits, slope


def _written_gradients(
    scales: Tensor,
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    options: LossOptions,
    flags: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the losses of the rows and the gradients of ``sum(scales * losses)`` with respect to hidden states, weight
    and bias, by the closed formula. ``flags`` has a 1 for each gradient that is needed, in this order. A gradient whose
    flag is 0 is empty. ``options`` holds the numeric options of the loss.
    """
    losses, logits, slope = _written_losses(hidden, weight, target, bias, options)
    counted = target != options.ignore_index
    of_sum = 1 + 2 * options.lse_square_scale * logits.logsumexp(1, keepdim=True)
    # An ignored target is usually no class, which ``one_hot`` would refuse.
    hot = F.one_hot(target.masked_fill(~counted, 0), weight.shape[0])
    smooth = options.label_smoothing
    found = (logits.softmax(1) * of_sum - (1 - smooth) * hot - smooth / weight.shape[0]) * slope
    found = torch.where(counted[:, None], found * scales[:, None], 0).to(hidden.dtype).detach()
    made = (found @ weight.detach(), found.t() @ hidden.detach(), found.sum(0))
    of_hidden, of_weight, of_bias = (g if flag else g[:0] for g, flag in zip(made, flags, strict=True))
    return losses, of_hidden, of_weight, of_bias


@sl.op("dense::linear_cross_entropy", requires=OPTIONS, autocast="autocast")
def linear_cross_entropy(
    hidden: Hidden,
    weight: Weight,
    target: Int64[Tensor, "n"],
    bias: Bias = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    lse_square_scale: float = 0.0,
    softcap: float = 0.0,
) -> Float32[Tensor, "n"]:
    """Return the cross entropy of each row of ``hidden @ weight.T + bias``, 0 for an ignored target.

    A target of ``ignore_index`` is ignored. ``label_smoothing`` is that of ``torch.nn.functional.cross_entropy``. Where
    ``softcap`` is not 0, logits are ``softcap * tanh(logits / softcap)``. ``lse_square_scale`` is the factor of the
    squared logarithm of the sum of exponentials, which is added to each loss.
    """
    options = LossOptions(ignore_index, label_smoothing, lse_square_scale, softcap)
    return _written_losses(hidden, weight, target, bias, options)[0].to(torch.float32)


@sl.op(
    "dense::linear_cross_entropy_gradients",
    requires=FLAGGED,
    specialize=FLAGS,
    outputs=("losses", "grad_hidden", "grad_weight", "grad_bias"),
    autocast="autocast",
)
def linear_cross_entropy_gradients(
    scales: Float32[Tensor, "n"],
    hidden: Hidden,
    weight: Weight,
    target: Int64[Tensor, "n"],
    bias: Bias = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    lse_square_scale: float = 0.0,
    softcap: float = 0.0,
    of_hidden: int = 1,
    of_weight: int = 1,
    of_bias: int = 0,
) -> tuple[Float32[Tensor, "n"], HiddenGradient, WeightGradient, BiasGradient]:
    """Return the losses of the rows and the gradients of ``sum(scales * losses)`` with respect to hidden states, weight
    and bias. A gradient whose flag is 0 is empty.

    The flags are ``of_hidden``, ``of_weight`` and ``of_bias``. The losses and their options are those of
    :func:`linear_cross_entropy`.
    """
    options = LossOptions(ignore_index, label_smoothing, lse_square_scale, softcap)
    flags = (of_hidden, of_weight, of_bias)
    losses, *made = _written_gradients(scales, hidden, weight, target, bias, options, flags)
    return losses.detach().to(torch.float32), made[0], made[1], made[2]


@sl.op(
    "dense::linear_cross_entropy_with_gradients",
    requires=FLAGGED,
    specialize=(*FLAGS, "wide"),
    outputs=("loss", "grad_hidden", "grad_weight", "grad_bias"),
    nondifferentiable=("grad_hidden", "grad_weight", "grad_bias"),
    autocast="autocast",
)
def linear_cross_entropy_with_gradients(
    hidden: RangedHidden,
    weight: RangedWeight,
    target: Int64[Tensor, "n"],
    bias: RangedBias = None,
    reduction: Literal["mean", "sum"] = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    lse_square_scale: float = 0.0,
    softcap: float = 0.0,
    of_hidden: int = 1,
    of_weight: int = 1,
    of_bias: int = 1,
    wide: int = 0,
) -> tuple[Float32[Tensor, ""], RangedHiddenGradient, RangedWeightGradient, RangedBiasGradient]:
    """Return the mean or the sum of the losses, and its gradients with respect to hidden states, weight and bias. If
    ``wide`` is 1, gradients of 16 bits are summed in float32. If it is 0, they are summed in their own dtype.

    The losses and their options are those of :func:`linear_cross_entropy`. A gradient is empty if its flag
    ``of_hidden``, ``of_weight`` or ``of_bias`` is 0. The backward of the op owns the gradients that are returned. It
    may multiply them in place by the gradient of the loss.
    """
    options = LossOptions(ignore_index, label_smoothing, lse_square_scale, softcap)
    scale, flags = _loss_scale(target, reduction, ignore_index), (of_hidden, of_weight, of_bias)
    scales = scale.expand(target.shape[0])
    losses, *made = _written_gradients(scales, hidden, weight, target, bias, options, flags)
    return (losses.sum() * scale).to(torch.float32), made[0], made[1], made[2]


def _loss_scale(target: Tensor, reduction: str, ignore_index: int) -> Tensor:
    """Return the factor by which the sum of the losses is multiplied, as a float32 number on the device. It is 1 if
    ``reduction`` is ``"sum"``. Otherwise it is one over the number of rows whose ``target`` is not ``ignore_index``,
    and infinite if there are none.
    """
    if reduction == "sum":
        return torch.ones((), dtype=torch.float32, device=target.device)
    return (target != ignore_index).sum().to(torch.float32).reciprocal()


# --- gradients --------------------------------------------------------------------------------------------------------


@linear_cross_entropy.backward(once_differentiable=True)
def _(grad: Tensor, saved: Any, needs: Any) -> dict[str, Tensor]:
    """Return the gradients of the row losses by argument name. The dict has those of ``hidden``, ``weight`` and
    ``bias`` that autograd needs. They are computed from the inputs in another pass over the logits.
    """
    _, hidden, weight, bias = linear_cross_entropy_gradients(
        grad,
        saved.hidden,
        saved.weight,
        saved.target,
        saved.bias,
        saved.ignore_index,
        saved.label_smoothing,
        saved.lse_square_scale,
        saved.softcap,
        int(needs.hidden),
        int(needs.weight),
        int(needs.bias),
    )
    made = {"hidden": hidden, "weight": weight, "bias": bias}
    return {name: gradient for name, gradient in made.items() if getattr(needs, name)}


@linear_cross_entropy_with_gradients.backward(once_differentiable=True, strided=True)
def _(grads: tuple[Tensor, ...], saved: Any, needs: Any) -> dict[str, Tensor]:
    """Return the gradients of the mean or sum by argument name. The dict has those of ``hidden``, ``weight`` and
    ``bias`` that autograd needs. The forward has computed them. They are multiplied by the gradient of the loss, in
    place if the graph is not kept.
    """
    # A second copy of the gradient of the weights would be most of the memory that the op saves. For the same reason
    # the backward is strided: contiguous zeros for the results without a gradient would be as large.
    scale = _scale_in_place if is_last_backward() else torch.mul
    gradients = {}
    if needs.hidden:
        gradients["hidden"] = scale(saved.grad_hidden, grads[0])
    if needs.weight:
        gradients["weight"] = scale(saved.grad_weight, grads[0])
    if needs.bias:
        gradients["bias"] = scale(saved.grad_bias, grads[0])
    return gradients


def _scale_in_place(gradient: Tensor, factor: Tensor) -> Tensor:
    """Multiply ``gradient`` in place by the number ``factor`` and return it. If the factor is 1, the memory is not
    written.
    """
    if gradient.is_cuda:
        from shiplap_dense import loss_rows

        loss_rows.scale_unless_one(gradient, factor)
        return gradient
    return gradient if float(factor) == 1 else gradient.mul_(factor)


# --- kernels ----------------------------------------------------------------------------------------------------------

RowPass = Callable[[Tensor, Tensor, Tensor, Tensor | None, LossOptions], None]
"""A pass over the logits of a chunk: targets and scales are read, losses are written. With scales, the logits are
replaced by their gradients."""


def chunk_rows(rows: int, classes: int, width: int) -> int:
    """Return how many of ``rows`` rows form a chunk, whose logits are computed at once. With ``width`` features and
    ``classes`` classes, a chunk's logits are about as large as the hidden states and 1/32 of the weights together. A
    chunk has at least 128 rows if there are as many.
    """
    # Fewer rows read the weights more often, and add to their gradient more often.
    fitting = rows * width // classes + width // 32
    return max(1, min(rows, max(128, fitting - fitting % 128)))


def _add_product(total: Tensor, a: Tensor, b: Tensor, first: bool) -> None:
    """Add ``a @ b`` to ``total`` in place, in the dtype of ``total``. If ``first`` is true, write the product to
    ``total`` and ignore its content.
    """
    if total.dtype == a.dtype:
        if first:
            torch.mm(a, b, out=total)
        else:
            torch.addmm(total, a, b, out=total)
    elif total.is_cuda:
        # On CUDA alone torch adds products of 16 bits to a float32 matrix.
        torch.addmm(total, a, b, beta=0 if first else 1, out_dtype=total.dtype, out=total)
    elif first:
        total.copy_(a @ b)
    else:
        total.add_(a @ b)


def _in_chunks(
    row_pass: RowPass,
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    options: LossOptions,
    scales: Tensor | None = None,
    flags: Sequence[int] = (0, 0, 0),
    wide: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the losses of the rows and the gradients of ``sum(scales * losses)`` with respect to hidden states, weight
    and bias.

    The logits of a chunk of rows are computed at a time, and ``row_pass`` replaces them by their gradients. A gradient
    whose flag in ``flags`` is 0 is empty. If ``wide`` is true, gradients of 16 bits are summed in float32, and
    otherwise in their own dtype. If ``scales`` is None, only the losses are computed, and all flags must be 0.
    ``options`` holds the numeric options of the loss.
    """
    (n, h), v = hidden.shape, weight.shape[0]
    rows = chunk_rows(n, v, h)
    losses = hidden.new_empty(n, dtype=torch.float32)
    buffer = hidden.new_empty(min(rows, n), v)
    of_hidden = hidden.new_empty(n * flags[0], h)
    # One chunk is one product, to which nothing is added in a narrow dtype.
    sums = torch.float32 if wide and n > rows else weight.dtype
    # The first chunk overwrites it, and without rows there is none.
    of_weight = (weight.new_empty if n else weight.new_zeros)(v * flags[1], h, dtype=sums)
    of_bias = weight.new_zeros(v * flags[2], dtype=torch.float32)
    for start in range(0, n, rows):
        x, at = hidden[start : start + rows], slice(start, start + rows)
        logits = buffer[: x.shape[0]]
        if bias is None:
            torch.mm(x, weight.t(), out=logits)
        else:
            torch.addmm(bias, x, weight.t(), out=logits)
        row_pass(logits, target[at], losses[at], None if scales is None else scales[at], options)
        if flags[0]:
            # With scales, the pass has replaced the logits by their gradients.
            torch.mm(logits, weight, out=of_hidden[at])
        if flags[1]:
            _add_product(of_weight, logits.t(), x, start == 0)
        if flags[2]:
            of_bias += logits.sum(0, dtype=torch.float32)
    return losses, of_hidden, of_weight.to(weight.dtype), of_bias.to(weight.dtype)


def _pass_by_torch(logits: Tensor, target: Tensor, losses: Tensor, scales: Tensor | None, options: LossOptions) -> None:
    """Write the losses of a chunk of rows to ``losses`` with operators of torch. If ``scales`` is given, overwrite
    ``logits`` with their gradients times the row's scale. Raise ``SL211`` if a target is not a class. ``options`` holds
    the numeric options of the loss.
    """
    counted = target != options.ignore_index
    if bool((counted & ((target < 0) | (target >= logits.shape[1]))).any()):
        row = int((counted & ((target < 0) | (target >= logits.shape[1]))).nonzero()[0])
        got = f"target {int(target[row])} of {logits.shape[1]} classes"
        raise error("SL211", where="dense::linear_cross_entropy, argument 'target'", got=got)
    wide, smooth, capped = logits.float(), options.label_smoothing, None
    if options.softcap:
        capped = torch.tanh(wide / options.softcap)
        wide = capped * options.softcap
    # An ignored target is usually no class, which ``gather`` would refuse.
    lse, index = wide.logsumexp(1), target.where(counted, 0)[:, None]
    loss = lse - (1 - smooth) * wide.gather(1, index)[:, 0]
    if smooth:
        loss -= smooth * wide.mean(1)
    if options.lse_square_scale:
        loss += options.lse_square_scale * lse * lse
    losses.copy_(loss.where(counted, 0))
    if scales is None:
        return
    found = wide.sub_(lse[:, None]).exp_()
    if options.lse_square_scale:
        found *= 1 + 2 * options.lse_square_scale * lse[:, None]
    if smooth:
        found -= smooth / logits.shape[1]
    found.scatter_add_(1, index, torch.full_like(index, smooth - 1, dtype=torch.float32))
    if capped is not None:
        found *= 1 - capped * capped
    found *= scales[:, None]
    # Filled and not multiplied, since NaN times 0 is NaN.
    found.masked_fill_(~counted[:, None], 0)
    # Float32 logits without a cap were changed in place.
    if found is not logits:
        logits.copy_(found)


def _pass_by_triton(
    logits: Tensor, target: Tensor, losses: Tensor, scales: Tensor | None, options: LossOptions
) -> None:
    """Write the losses of a chunk of rows to ``losses`` with one Triton kernel. If ``scales`` is given, overwrite
    ``logits`` with their gradients times the row's scale. ``options`` holds the numeric options of the loss.
    """
    from shiplap_dense import loss_rows

    loss_rows.pass_over_rows(
        logits,
        target,
        losses,
        scales,
        options.ignore_index,
        options.label_smoothing,
        options.lse_square_scale,
        options.softcap,
    )


def attach_kernels(device: str, row_pass: RowPass) -> None:
    """Bind the kernels of the three loss ops for the device type ``device``. Each computes logits in chunks of rows and
    passes them to ``row_pass``. Tests bind the Triton pass for the interpreter's ``"cpu"``.
    """

    @linear_cross_entropy.kernel(device, name="chunks")
    def _(
        hidden: Tensor,
        weight: Tensor,
        target: Tensor,
        bias: Tensor | None,
        ignore_index: int,
        label_smoothing: float,
        lse_square_scale: float,
        softcap: float,
    ) -> Tensor:
        """Return the loss of each row, computed in chunks of rows, for the op ``linear_cross_entropy``."""
        options = LossOptions(ignore_index, label_smoothing, lse_square_scale, softcap)
        return _in_chunks(row_pass, hidden, weight, target, bias, options)[0]

    @linear_cross_entropy_gradients.kernel(device, name="chunks")
    def _(
        scales: Tensor,
        hidden: Tensor,
        weight: Tensor,
        target: Tensor,
        bias: Tensor | None,
        ignore_index: int,
        label_smoothing: float,
        lse_square_scale: float,
        softcap: float,
        of_hidden: int,
        of_weight: int,
        of_bias: int,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the results of the op ``linear_cross_entropy_gradients``, computed in chunks of rows."""
        options = LossOptions(ignore_index, label_smoothing, lse_square_scale, softcap)
        flags = (of_hidden, of_weight, of_bias)
        return _in_chunks(row_pass, hidden, weight, target, bias, options, scales, flags)

    @linear_cross_entropy_with_gradients.kernel(device, name="chunks")
    def _(
        hidden: Tensor,
        weight: Tensor,
        target: Tensor,
        bias: Tensor | None,
        reduction: str,
        ignore_index: int,
        label_smoothing: float,
        lse_square_scale: float,
        softcap: float,
        of_hidden: int,
        of_weight: int,
        of_bias: int,
        wide: int,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the results of the op ``linear_cross_entropy_with_gradients``, computed in chunks of rows."""
        options = LossOptions(ignore_index, label_smoothing, lse_square_scale, softcap)
        scale, flags = _loss_scale(target, reduction, ignore_index), (of_hidden, of_weight, of_bias)
        scales = scale.expand(target.shape[0])
        losses, *made = _in_chunks(row_pass, hidden, weight, target, bias, options, scales, flags, bool(wide))
        return losses.sum() * scale, made[0], made[1], made[2]


NUMBERS = ("ignore_index", "label_smoothing", "lse_square_scale", "softcap")


@linear_cross_entropy.samples
def _(rng: torch.Generator, sizes: dict[str, Any], dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
    """Return random hidden states, weight, targets and bias, then the options of the loss as ``sizes`` gives them. They
    are one sample of arguments of ``linear_cross_entropy``.
    """
    return *_draw_tensors(rng, sizes, dtype, device), *(sizes[name] for name in NUMBERS)


@linear_cross_entropy_gradients.samples
def _(rng: torch.Generator, sizes: dict[str, Any], dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
    """Return random scales of the losses, random hidden states, weight, targets and bias, and then the options and
    flags in ``sizes``. They are one sample of arguments of ``linear_cross_entropy_gradients``.
    """
    scales = torch.rand(sizes["n"], generator=rng).to(device)
    return scales, *_draw_tensors(rng, sizes, dtype, device), *(sizes[name] for name in (*NUMBERS, *FLAGS))


@linear_cross_entropy_with_gradients.samples
def _(rng: torch.Generator, sizes: dict[str, Any], dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
    """Return random hidden states, weight, targets and bias, the options in ``sizes``, the flag 1 for each of the three
    gradients, and ``wide`` from ``sizes``. They are one sample of arguments of ``linear_cross_entropy_with_gradients``.
    """
    options = (sizes[name] for name in ("reduction", *NUMBERS))
    # A flag of 0 promises that its gradient will not be computed, and the audit computes all of them (SL303).
    return *_draw_tensors(rng, sizes, dtype, device), *options, 1, 1, 1, sizes["wide"]


def _draw_tensors(
    rng: torch.Generator, sizes: dict[str, Any], dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, ...]:
    """Return random hidden states ``[n, h]``, a weight ``[v, h]``, targets ``[n]`` and a bias ``[v]``. About a fifth of
    the targets are ``ignore_index``.
    """
    n, v, h = sizes["n"], sizes["v"], sizes["h"]
    hidden, weight = torch.randn(n, h, generator=rng), torch.randn(v, h, generator=rng) / max(h, 1) ** 0.5
    target = torch.randint(0, v, (n,), generator=rng)
    target[torch.rand(n, generator=rng) < 0.2] = sizes["ignore_index"]
    bias = torch.randn(v, generator=rng)
    return hidden.to(device, dtype), weight.to(device, dtype), target.to(device), bias.to(device, dtype)


attach_kernels("cpu", _pass_by_torch)
attach_kernels("cuda", _pass_by_triton)
