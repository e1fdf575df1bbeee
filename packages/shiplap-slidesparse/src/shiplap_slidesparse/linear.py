"""``Linear``: a layer that holds the pruned dense weight as a checkpoint has it, and multiplies with its packed form.

State is that of ``nn.Linear`` (``weight [n, k]``, ``bias``); the 8-bit modes add ``weight_scale [n, 1]``, as W8A8
checkpoints of compressed-tensors do. The packed form is derived from it, at load and never in a forward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from shiplap import ShiplapError
from shiplap.plugin_api import blocked, error, notice
from shiplap.plugin_api.memos import built_outside_modes
from shiplap_slidesparse import formats, ops
from shiplap_slidesparse.formats import Pattern
from shiplap_slidesparse.packed import MODES, Packed, known_mode, multiply_fields, pack
from shiplap_slidesparse.sharded import gather_whole, is_dtensor, state_of, state_of_shard

LOOKS = 2  # how often a weight that was written to is compared with what is packed
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}  # a cast of floating tensors leaves these alone


class PlacedPart(Protocol):
    """The interface of a layer's shard on one rank. ``shiplap_slidesparse.tensor_parallel`` implements it."""

    @property
    def mesh(self) -> Any:
        """The device mesh of the ranks that hold the shards of the layer."""

    def local(self, held: Tensor) -> Tensor:
        """Return this rank's shard of ``held``, a parameter of the layer."""

    def forward(self, layer: Linear, x: Tensor) -> Tensor:
        """Return this rank's result of ``layer`` on ``x``. All ranks of the mesh must call this method together."""

    def refuse_move(self, layer: Linear) -> Linear:
        """Raise ``SL211``, since a shard is packed for the device on which it was cut and cannot be moved. Nothing is
        returned.
        """


class Linear(nn.Linear):
    """An ``nn.Linear`` whose weight has 8 bits or the pattern (2N-2):2N, for inference, and frozen under adapters.

    ``weight`` and ``weight_scale`` keep their dtype when the model is cast (``.half()``), while ``bias`` is cast.
    Results have the dtype of the input, or that of autocast. Both the row-major weight (dense) and the packed one are
    kept. ``shiplap.tune`` chooses between them for each number of rows. Without a choice the row-major one is used.

    Gradients reach the input, and the bias if it requires one, as if activations were not rounded. The weight is
    frozen. Libraries that put adapters on layers accept the layer as an ``nn.Linear``, but adapters cannot be merged
    into a weight of 8 bits. Forward mode (``torch.func.jvp``) follows the reference. In the 8-bit modes its tangents
    are zero, since rounding has no slope.

    Args:
        in_features, out_features, bias, device: as in ``nn.Linear``. The weight is zero until it is loaded.
        dtype: the dtype of the bias.
        pattern: ``"dense"``, or a sparsity pattern such as ``"6:8"``.
        mode: ``"int8"``, ``"fp8"``, ``"bf16"`` or ``"fp16"``.
    """

    weight: nn.Parameter
    weight_scale: nn.Parameter | None
    bias: Any  # a parameter or None
    packed: Tensor | None
    placed: PlacedPart | None = None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        pattern: str | Pattern = "dense",
        mode: str = "int8",
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Make a layer with zero weights of the given pattern and mode (such as ``int8``), into which a checkpoint is
        loaded. The layer is not packed. If ``bias`` is true, it has a bias of zeros in ``dtype``, and otherwise none.
        """
        nn.Module.__init__(self)  # nn.Linear's would draw a weight
        self.in_features, self.out_features, self.pattern = in_features, out_features, Pattern.parse(pattern)
        self.mode, self.layout = known_mode(mode, "slidesparse.Linear"), ops.PORTABLE
        kind = MODES[mode]
        self.weight = _frozen_parameter(torch.zeros(out_features, in_features, dtype=kind, device=device))
        scale = torch.ones(out_features, 1, device=device, dtype=torch.float32) if kind.itemsize == 1 else None
        self.register_parameter("weight_scale", None if scale is None else _frozen_parameter(scale))
        self.register_parameter(
            "bias", _frozen_parameter(torch.zeros(out_features, device=device, dtype=dtype)) if bias else None
        )
        self.register_buffer("packed", None, persistent=False)
        self._packed_from: tuple[int, ...] | None = None
        self._shard: Tensor | None = None  # what fully_shard gathers the weight from
        self._looked = 0

    @classmethod
    @built_outside_modes
    def of(
        cls, linear: nn.Linear, pattern: str | Pattern = "dense", mode: str = "int8", *, pack: bool = True
    ) -> Linear:
        """Return a new layer with the weight of ``linear``, pruned by magnitude to the sparsity ``pattern`` and
        quantised to ``mode`` (such as ``int8``). If ``pack`` is true, the weight is packed for its device. Otherwise
        only the row-major matrix is kept, until :meth:`pack` is called. Raise ``SL211`` if the weight is not finite or
        ``linear`` is not an unconverted ``nn.Linear``.
        """
        if not isinstance(linear, nn.Linear) or isinstance(linear, cls):
            raise error(
                "SL211",
                where="slidesparse.Linear.of",
                got="a converted layer" if isinstance(linear, cls) else type(linear).__name__,
                expected="an nn.Linear",
                fix="pass an nn.Linear, or call convert(model) to replace every linear layer of a model",
            )
        weight, bias = formats.prune(linear.weight, pattern), linear.bias
        made = cls.from_weight(
            _packed_dense(weight, pattern, known_mode(mode, "slidesparse.Linear")),
            None if bias is None else bias.detach(),
        )
        made.train(linear.training)
        return made.pack() if pack else made

    @classmethod
    def from_weight(cls, weight: Packed, bias: Tensor | None = None) -> Linear:
        """Return a layer whose parameters hold the tensors of ``weight`` and ``bias`` without a copy. The layer has no
        packed weight until ``pack`` is called, even if ``weight`` has one. If ``bias`` is None, the layer has no bias.
        """
        made = cls(weight.k, weight.n, bias is not None, pattern=weight.pattern, mode=weight.mode, device="meta")
        made.weight = _frozen_parameter(weight.weight())
        if weight.scale is not None:
            made.weight_scale = _frozen_parameter(weight.scale[:, None])
        if bias is not None:
            made.bias = _frozen_parameter(bias)
        return made

    # --- packing --------------------------------------------------------------------------------------------------

    @property
    def fresh(self) -> bool:
        """Whether the packed weight was made from the present ``weight``. It is False if nothing is packed, after a
        write to ``weight``, and after ``weight`` was replaced by another tensor.
        """
        if self.packed is None or self._packed_from is None:
            return False
        now = self._weight_state(self.weight)
        return self._packed_from[: len(now)] == now

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute. A shard that becomes the weight is also stored as ``_shard``, since ``fully_shard`` later
        sets gathered weights in its place.
        """
        # A gathered weight is a plain tensor, so every DTensor is a shard, unless it is our own part.
        if name == "weight" and is_dtensor(value) and (self.placed is None or self.placed.mesh != value.device_mesh):
            self.__dict__["_shard"] = value
        super().__setattr__(name, value)

    def _weight_state(self, held: Tensor, weight: Tensor | None = None) -> tuple[int, ...]:
        """Return numbers that identify the present memory and values of the parameter ``held``. They change when
        ``held`` is written to or replaced.

        ``weight`` is this rank's shard of ``held``. If it is None, the shard that :meth:`local` returns is used. For a
        weight that ``fully_shard`` gathers, the numbers describe its shard and the gathered tensor. The address of the
        gathered tensor is left out, since torch reuses one object and gathering is not a write to the weight.
        """
        if self._shard is not None and held is self._shard:
            return state_of_shard(held)
        of, place, written = state_of(held, self.local()[0] if weight is None else weight)
        return (of, place, written) if self._shard is None else (*state_of_shard(self._shard), of, written)

    def local(self) -> tuple[Tensor, Tensor | None]:
        """Return ``weight`` and ``weight_scale`` (None in 16-bit modes). If ``shard`` has cut the layer over ranks,
        return this rank's shards of them.
        """
        weight, scale = self.weight, self.weight_scale
        if self.placed is None:
            return weight, scale
        return self.placed.local(weight), None if scale is None else self.placed.local(scale)

    def checked_weight(self) -> tuple[Tensor, Tensor | None]:
        """Return the weight and its scale as :meth:`local` does. Raise ``SL211`` if a cast has changed their dtypes."""
        weight, scale = self.local()
        if weight.dtype != MODES[self.mode] or (scale is not None and scale.dtype != torch.float32):
            self._refuse_cast(weight, scale)
        return weight, scale

    @built_outside_modes
    def pack(self) -> Linear:
        """Check that ``weight`` has the pattern, pack it for its device, and return the layer. Call this again after a
        change of the weight.

        If the new packed weight fits the existing tensor, it is written into that tensor, so that captured or compiled
        graphs stay correct. On a device without sparse units nothing is packed, and a notice is given. Each rank of a
        layer that ``fully_shard`` has sharded packs the whole weight, so all ranks have to call this method. Raise
        ``SL211`` for a weight that does not have the pattern, and ``SL608`` in a trace, a capture or an op.
        """
        if reason := blocked():
            raise error(
                "SL608",
                where="slidesparse.Linear.pack",
                what="packing is not allowed here",
                got=f"pack() inside {reason}",
                expected="a weight that was packed before",
                fix="call pack() after loading",
            )
        weight, scale = self.local()
        made = pack(
            gather_whole(weight),
            self.pattern,
            self.mode,
            scale=None if scale is None else _flatten_scale(gather_whole(scale)),
        )
        old, self.layout = self.packed, made.layout
        if (
            old is not None
            and made.packed is not None
            and (old.shape, old.device) == (made.packed.shape, made.packed.device)
        ):
            # Captured graphs hold the address of the old tensor.
            old.copy_(made.packed)
        else:
            self.packed = made.packed
        self._packed_from, self._looked = self._weight_state(self.weight), 0
        return self

    def _still_matches(self, weight: Tensor, packed: Tensor) -> bool:
        """Return whether ``weight`` equals the weight in ``packed``. It is called after a write to ``weight``, since a
        broadcast of DDP, for example, writes equal values.

        The comparison takes longer than a product, and a program may write to the weight in every step. So at most
        ``LOOKS`` comparisons are made after each packing, and the result is False afterwards. It is also False in a
        trace, a capture or an op.
        """
        if self._looked >= LOOKS or blocked():
            return False
        self._looked += 1
        rows, depth = weight.shape
        value = Packed.unchecked(self.mode, self.pattern.pairs, rows, depth, None, packed, None, self.layout)
        return torch.equal(value.weight().to(torch.float32), weight.to(torch.float32))

    def as_packed(self) -> Packed:
        """Return the weight, or this rank's shard of it, as the ``Packed`` value that ``matmul`` takes. Its field
        ``packed`` is None if the weight has changed since packing.
        """
        packed, (weight, scale) = self.packed if self.fresh else None, self.local()
        rows, depth = weight.shape
        held = weight, packed, _flatten_scale(scale), self.layout
        return Packed.unchecked(self.mode, self.pattern.pairs, rows, depth, *held)

    # --- forward --------------------------------------------------------------------------------------------------

    def forward(self, x: Tensor) -> Tensor:
        """Return the result ``[..., out_features]`` of the layer on ``x`` ``[..., in_features]``. A sharded layer
        returns this rank's result (see ``LayerPart.forward``).
        """
        return self.multiply(x, self.bias) if self.placed is None else self.placed.forward(self, x)

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return the result of the layer on ``x`` with ``bias`` in place of its own bias. If the weight was changed
        after packing, a notice is given and the unpacked weight is used.
        """
        held, packed = self.weight, self.packed  # once: a module's attributes are slow
        weight, scale = self.checked_weight()
        if (
            packed is not None
            and not torch.compiler.is_compiling()
            and self._packed_from != self._weight_state(held, weight)
        ):
            if self._still_matches(weight, packed):
                self._packed_from = self._weight_state(held, weight)
            else:
                stale = f"{self} was packed before its weight was changed, and runs dense: call pack()"
                notice("slidesparse/stale", stale)
                packed = None
        if not x.is_meta and torch.is_autocast_enabled(x.device.type) and _cast_by_autocast(x):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        other = scale is None and x.dtype != weight.dtype and x.is_floating_point()  # integers are the op's to refuse
        inner = x.to(weight.dtype) if other else x
        if bias is not None and bias.dtype != inner.dtype:
            bias = bias.to(inner.dtype)
        rest = weight, packed, _flatten_scale(scale), bias, self.mode, self.pattern.pairs, self.layout
        learns = inner.requires_grad or (bias is not None and bias.requires_grad)
        out = (
            _StraightThrough.apply(inner, *rest) if learns and torch.is_grad_enabled() else _layer_product(inner, *rest)
        )
        return out if out.dtype == x.dtype else out.to(x.dtype)

    def _refuse_cast(self, weight: Tensor, scale: Tensor | None) -> None:
        """Raise ``SL211`` with the dtypes of ``weight`` and ``scale``. The caller found that one was cast."""
        raise error(
            "SL211",
            where=f"slidesparse.Linear of mode {self.mode}",
            what="the weight of a converted layer was cast",
            got=f"a weight of {weight.dtype}" + ("" if scale is None else f" and scales of {scale.dtype}"),
            expected=f"{MODES[self.mode]}" + ("" if scale is None else " and torch.float32"),
            fix="apply fully_shard(layer) to each converted layer first, without a precision policy",
        )

    def reset_parameters(self) -> None:
        """Set the weight and bias to zeros and the scales to ones, as in a new layer. A checkpoint is loaded
        afterwards.
        """
        with torch.no_grad():
            for parameter in self.parameters(recurse=False):
                parameter.fill_(1 if parameter is self.weight_scale else 0)

    def extra_repr(self) -> str:
        """Return the sizes, the pattern and the mode of the layer for ``repr``. For a sparse pattern the string also
        says whether the weight is packed.
        """
        form = "packed" if self.fresh else "not packed" if self.packed is None else "stale"
        form = f", {form}" if self.pattern.sparse else ""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"pattern={self.pattern}, mode={self.mode}{form}"
        )

    # --- moves, copies and checkpoints ----------------------------------------------------------------------------

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Linear:
        """Apply ``fn``, which moves or casts a tensor, to all tensors of the layer, and return the layer. The weight
        and its scale are moved but not cast. If the device changes, an up-to-date packed weight is packed again.
        ``recurse`` is that of ``torch.nn.Module._apply``.
        """
        if self.placed is not None:
            return self.placed.refuse_move(self)
        held = {id(t) for t in (self.weight, self.weight_scale) if t is not None}
        before, fresh, packed = self.weight.device, self.fresh, self.packed
        held_before = self.weight.detach()  # follows where memory is moved in place (share_memory)
        self.packed = None

        def moved(t: Tensor) -> Tensor:
            """Return ``fn(t)``. The weight and its scale keep their dtypes, since they are passed to ``fn`` as integers
            of the same bits. A cast to floating dtypes leaves integers unchanged.
            """
            if id(t) not in held:
                return fn(t)
            # A cast to another floating dtype leaves integers alone, so the weight keeps its dtype and its values.
            bits = t.view(_BITS[t.itemsize])
            made = fn(bits)
            return made.view(t.dtype) if made.dtype == bits.dtype else t  # .type() casts integers as well

        super()._apply(moved, recurse)
        if self._shard is not None:
            self._shard = self.weight  # the same parameter, or another that took its place without setattr
        if packed is None or self.weight.device.type == "meta":
            return self
        if self.weight.device != before:  # what is packed is packed for a device
            return self.pack() if fresh else self
        self.packed = packed
        same = fresh and self.weight.data_ptr() == held_before.data_ptr()
        self._packed_from = self._weight_state(self.weight) if same else None
        return self

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to copy or pickle. A flag in it says whether the packed weight is valid."""
        # Addresses and versions mean nothing in another process.
        return {**self.__dict__, "_packed_from": self.fresh, "_shard": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the state. The packed weight is valid if it was valid in the original layer."""
        super().__setstate__(state)
        self._packed_from = self._weight_state(self.weight) if state["_packed_from"] else None

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Load the weight and its scale from a state dict, in the layer's dtypes, and pack the weight. Append errors to
        ``error_msgs``. ``strict`` is that of ``torch.nn.Module.load_state_dict``.
        """
        # Collected apart: a weight that torch did not load must not be packed.
        errors: list[str] = []
        given, scale = state_dict.get(f"{prefix}weight"), state_dict.get(f"{prefix}weight_scale")
        if given is not None and not _can_load(given.dtype, self.weight.dtype):
            error_msgs.append(
                f"{prefix}weight is {given.dtype}, and a layer of mode {self.mode} loads "
                f"{self.weight.dtype}: load the model first, then convert it"
            )
            return
        if given is not None:  # with assign=True it takes the place of the weight, which has the dtype of the mode
            state_dict = {**state_dict, f"{prefix}weight": given.detach().to(self.weight.dtype)}
        if scale is not None and self.weight_scale is not None:
            state_dict = {**state_dict, f"{prefix}weight_scale": _per_channel(scale, self.out_features)}
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, errors)
        if given is not None and not errors and not self.weight.is_meta:
            try:
                self.pack()
            except ShiplapError as e:
                # torch collects the errors of all modules and raises them together.
                errors.append(f"{prefix}weight: {e}")
        error_msgs.extend(errors)


def _layer_product(
    x: Tensor,
    dense: Tensor,
    packed: Tensor | None,
    scale: Tensor | None,
    bias: Tensor | None,
    mode: str,
    pairs: int,
    layout: int,
) -> Tensor:
    """Return ``x`` times a weight given by its tensors, plus ``bias``. It is computed by the op for ``mode``, such as
    ``linear_int8`` for ``int8``. ``dense`` is the row-major weight, and ``packed`` and ``scale`` may be None. ``pairs``
    is the number of pairs in a group of the pattern, and ``layout`` is the number of the packed format.
    """
    return multiply_fields(x, mode, len(dense), scale, dense, packed, bias, pairs, layout)


class _StraightThrough(torch.autograd.Function):
    """The autograd function of a layer's product. Its gradient is that of the product without the rounding of the
    activations. The weight gets no gradient.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor,
        dense: Tensor,
        packed: Tensor | None,
        scale: Tensor | None,
        bias: Tensor | None,
        mode: str,
        pairs: int,
        layout: int,
    ) -> Tensor:
        """Return ``x`` times a weight given by its tensors, plus ``bias``. The arguments are those of
        ``_layer_product``.
        """
        return _layer_product(x, dense, packed, scale, bias, mode, pairs, layout)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Save the row-major weight and the scale for the backward pass. ``torch.func`` requires that this not be done
        in ``forward``.
        """
        ctx.save_for_backward(inputs[1], inputs[3])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the input and the bias, and None for each other argument. The rounding of the input
        counts as the identity.
        """
        dense, scale = ctx.saved_tensors
        # Rounding is treated as the identity, whose slope is one.
        scaled = grad if scale is None else grad * scale.to(grad.dtype)
        to_x = scaled @ dense.to(grad.dtype) if ctx.needs_input_grad[0] else None
        rows = grad if grad.dim() > 1 else grad[None]
        to_bias = rows.flatten(0, -2).sum(0) if ctx.needs_input_grad[4] else None
        return to_x, None, None, None, to_bias, None, None, None


def _packed_dense(weight: Tensor, pattern: str | Pattern, mode: str) -> Packed:
    """Return the pruned ``weight``, quantised to ``mode`` (such as ``int8``), as a ``Packed`` value. It holds the
    row-major weight and no packed one.
    """
    return pack(weight, pattern, mode, keep="dense")


def _flatten_scale(scale: Tensor | None) -> Tensor | None:
    """Return the scales ``[n, 1]`` of a weight's rows as a view ``[n]``, which the ops take. Return None if ``scale``
    is None.
    """
    return None if scale is None else scale.view(-1)


def _frozen_parameter(tensor: Tensor) -> nn.Parameter:
    """Return a parameter around ``tensor`` that requires no gradient."""
    return nn.Parameter(tensor, requires_grad=False)


def _can_load(given: torch.dtype, wanted: torch.dtype) -> bool:
    """Return whether a weight of dtype ``given`` can be loaded into one of dtype ``wanted``. An 8-bit ``wanted`` takes
    only its own dtype. A 16-bit ``wanted`` also takes floating dtypes of 16 or more bits, and rounds their values.
    """
    return given == wanted or (wanted.itemsize == 2 and given.is_floating_point and given.itemsize > 1)


def _per_channel(scale: Tensor, n: int) -> Tensor:
    """Return ``scale`` as float32 ``[n, 1]`` if it holds ``n`` scales, or one scale for the whole weight. Otherwise
    return it as float32 with its own shape, so torch reports the mismatch when it loads it.
    """
    wide = scale.detach().to(torch.float32)
    return wide.reshape(-1, 1).expand(n, 1).contiguous() if scale.numel() in (1, n) else wide


def _cast_by_autocast(x: Tensor) -> bool:
    """Return whether autocast casts the input ``x`` of an ``nn.Linear``. It casts floating dtypes except float64."""
    return x.is_floating_point() and x.dtype != torch.float64
