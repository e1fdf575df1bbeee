"""The experts of a mixture in 8 bits: each projection is one layer of all experts, and one product for all rows.

``convert`` gives a module of transformers another class, whose forward pass multiplies each row with the weight of its
expert. Activation and gate stay those of the module.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from shiplap_slidesparse import layers
from shiplap_slidesparse.formats import Pattern
from shiplap_slidesparse.layers import INT8_DEPTH, MOST_EXPERTS
from shiplap_slidesparse.linear import Linear
from shiplap_slidesparse.packed import pack

PRODUCTS = {"int8": layers.experts_int8, "fp8": layers.experts_fp8}
_classes: dict[type[nn.Module], type[nn.Module]] = {}  # of modules, and of what they become
_PARTS = ("gate_up_proj", "up_proj", "down_proj")
_FACTS = ("has_gate", "has_bias", "is_transposed", "num_experts", "act_fn", "_apply_gate")  # of transformers' classes


class ConvertedExperts(nn.Module):
    """The experts of a mixture (a module of transformers) with 8-bit weights. A converted module's class derives from
    this class and from the class that the module had before. This class replaces the forward pass.
    """

    # Code that draws new weights for modules of the class reads these names, and leaves loaded weights alone.
    gate_up_proj = property(lambda self: self.gate_up_layer.weight)
    up_proj = property(lambda self: self.up_layer.weight)
    down_proj = property(lambda self: self.down_layer.weight)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the weighted sum of the results of each token's experts, ``[t, k]``, for the tokens ``hidden_states
        [t, k]``. ``top_k_index`` holds the numbers of each token's experts, and ``top_k_weights`` the weights of their
        results.
        """
        own: Any = self
        chosen, times = top_k_index.reshape(-1), top_k_index.shape[-1]
        rows = hidden_states[:, None].expand(-1, times, -1).flatten(0, 1)
        inner = self._project("gate_up_proj" if own.has_gate else "up_proj", rows, chosen)
        out = self._project("down_proj", own._apply_gate(inner) if own.has_gate else own.act_fn(inner), chosen)
        if getattr(own, "has_post_expert_norm", False):
            out = own.post_expert_norm(out)
        weighted = out * top_k_weights.reshape(-1, 1)
        return weighted.view(*top_k_index.shape, -1).sum(1).to(hidden_states.dtype)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Return how to pickle the module. The pickle names the class that the module was converted from, since the
        module's own class is made at run time.
        """
        # The class is made at run time, so that a pickle cannot name it.
        return _unpickled, (type(self).__mro__[2],), self.__dict__

    def _project(self, name: str, rows: Tensor, chosen: Tensor) -> Tensor:
        """Return each row of ``rows`` times the weight ``name`` of its expert, plus that expert's bias if there is one.
        ``chosen`` holds the number of the expert of each row.
        """
        own: Any = self
        layer: Linear = getattr(own, layer_name(name))
        out = experts_matmul(rows, chosen, layer, own.num_experts)
        if not own.has_bias:
            return out
        bias: Tensor = getattr(own, f"{name}_bias")
        # The number of a row without an expert is no index.
        return out + bias[chosen.clamp(0, own.num_experts - 1)]


def experts_matmul(x: Tensor, chosen: Tensor, layer: Linear, experts: int) -> Tensor:
    """Return ``[m, n]``, the products of the rows of ``x`` ``[m, k]`` and the weights of their experts. The layer's
    weight is ``[experts * n, k]``, with ``n`` rows for each expert. A row whose number in ``chosen`` is no expert's
    gives zeros. The backward ignores the rounding of ``x`` to 8 bits.
    """
    weight, scale = layer.checked_weight()
    assert scale is not None
    arguments = x, chosen, scale.view(-1), weight, experts
    learns = x.requires_grad and torch.is_grad_enabled()
    out: Tensor = _ExpertsStraightThrough.apply(*arguments, layer.mode) if learns else PRODUCTS[layer.mode](*arguments)
    return out


class _ExpertsStraightThrough(torch.autograd.Function):
    """The autograd function of the product of each row with the 8-bit weight of its expert. Its gradient is that of the
    product without the rounding of the rows. The weight gets no gradient.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, chosen: Tensor, scale: Tensor, weight: Tensor, experts: int, mode: str) -> Tensor:
        """Return the product of each row with the 8-bit weight of its expert. ``chosen`` holds the number of the expert
        of each row, and ``experts`` is the number of experts. ``mode`` is ``int8`` or ``fp8``.
        """
        out: Tensor = PRODUCTS[mode](x, chosen, scale, weight, experts)
        return out

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Save the chosen experts, the scale and the weight for the backward pass. ``torch.func`` requires that this
        not be done in ``forward``.
        """
        ctx.save_for_backward(*inputs[1:4])
        ctx.experts = inputs[4]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of the rows, and None for each other input. The rounding of the activations counts as the
        identity.
        """
        chosen, scale, weight = ctx.saved_tensors
        total = grad.new_zeros(len(grad), weight.shape[1])
        for number, (part, scales) in enumerate(zip(weight.chunk(ctx.experts), scale.chunk(ctx.experts), strict=True)):
            mine = (grad * scales.to(grad.dtype)) @ part.to(grad.dtype)
            total = torch.where((chosen == number)[:, None], mine, total)
        return total, None, None, None, None, None


def expert_weights(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the two projection weights of a transformers module of experts, by parameter name. They are ``[experts, n,
    k]``, or ``[experts, k, n]`` if the module's ``is_transposed`` is true. Return an empty mapping for any other
    module.
    """
    own = {name: p for name, p in module.named_parameters(recurse=False) if name in _PARTS and p.dim() == 3}
    return own if len(own) == 2 and all(hasattr(module, fact) for fact in _FACTS) else {}


def why_experts_stay(module: nn.Module, pattern: Pattern, dtype: str) -> str:
    """Return the reason why the experts of ``module`` cannot be converted to ``dtype`` with the sparsity ``pattern``,
    such as too many experts. Return an empty string if they can.
    """
    held: Any = module
    weights = list(expert_weights(module).values())
    depth = max(w.shape[1 if held.is_transposed else 2] for w in weights)
    if pattern.sparse or dtype not in PRODUCTS:
        return f"experts are multiplied in int8 and fp8 with all weights, not in {pattern} {dtype}"
    if weights[0].device.type not in ("cpu", "meta"):
        return f"there is no 8-bit product of experts on {weights[0].device.type}"
    if len(weights[0]) > MOST_EXPERTS:
        return f"there are more than {MOST_EXPERTS} experts"
    if dtype == "int8" and depth > INT8_DEPTH:
        return f"int8 sums no more than {INT8_DEPTH} columns exactly"
    return ""


def convert_experts(module: nn.Module, dtype: str) -> Iterator[tuple[str, Tensor, Linear]]:
    """Convert the experts of ``module`` in place to 8-bit weights, one projection per step of the returned iterator.
    Yield the name of the new layer, the weight ``[experts * n, k]`` before the conversion, and the layer.
    """
    held: Any = module
    for name, weight in expert_weights(module).items():
        before = (weight.mT if held.is_transposed else weight).detach().flatten(0, 1)
        layer = Linear.from_weight(pack(before, "dense", dtype))
        replace_experts(module, name, layer)
        yield layer_name(name), before, layer


def layer_name(weight: str) -> str:
    """Return the name of the layer that replaces the parameter ``weight``, with ``layer`` in place of ``proj``. The
    names must differ, since transformers splits loaded tensors that have the parameter's name.
    """
    return weight.replace("proj", "layer")


def replace_experts(module: nn.Module, name: str, layer: Linear) -> None:
    """Replace the weight ``name`` of a module of experts by ``layer``. Change the module's class to one whose forward
    pass calls the layer.
    """
    delattr(module, name)
    setattr(module, layer_name(name), layer.train(module.training))
    if not isinstance(module, ConvertedExperts):
        module.__class__ = _converted_class(type(module))


def restore_experts(module: nn.Module, dtype: torch.dtype) -> None:
    """Give converted experts their original class and dense weights of ``dtype`` with three dims. The weights have the
    values that remain after rounding to 8 bits. Leave any other module unchanged.
    """
    if not isinstance(module, ConvertedExperts):
        return
    held: Any = module
    # Behind the converted class and ``ConvertedExperts`` comes the class that the module had.
    held.__class__ = type(module).__mro__[2]
    for name in _PARTS:
        if isinstance(layer := module._modules.pop(layer_name(name), None), Linear):
            weight = layer.as_packed().dequantised(dtype).unflatten(0, (held.num_experts, -1))
            setattr(module, name, nn.Parameter(weight.mT.contiguous() if held.is_transposed else weight))


def empty_expert_layer(module: nn.Module, weight: Tensor, dtype: str) -> Linear:
    """Return a converted layer on the meta device, without values, for ``weight``, a parameter of ``module`` with the
    weights of all experts. A checkpoint's values are loaded into it afterwards.
    """
    held: Any = module
    experts, n, k = weight.mT.shape if held.is_transposed else weight.shape
    return Linear(k, experts * n, False, mode=dtype, device="meta")


def _unpickled(kind: type[nn.Module]) -> nn.Module:
    """Return a module of the converted class of ``kind`` whose ``__init__`` was not called, for unpickling."""
    made = _converted_class(kind)
    return made.__new__(made)


def _converted_class(kind: type[nn.Module]) -> type[nn.Module]:
    """Return the class that derives from ``ConvertedExperts`` and ``kind``. Each ``kind`` gets one such class per
    process.
    """
    if kind not in _classes:
        _classes[kind] = type(f"Converted{kind.__name__}", (ConvertedExperts, kind), {})
    return _classes[kind]
