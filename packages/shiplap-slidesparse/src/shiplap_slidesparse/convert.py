"""``convert``: prune, quantise and replace the linear layers of a model, with the reason for each that was not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from shiplap.plugin_api import error
from shiplap.plugin_api.timing import progress_bar
from shiplap_slidesparse.formats import Pattern
from shiplap_slidesparse.layers import INT8_DEPTH
from shiplap_slidesparse.linear import Linear
from shiplap_slidesparse.packed import MODES, known_mode

__all__ = [
    "SKIPPED",
    "Conversion",
    "ConvertedLayer",
    "SkippedLayer",
    "convert",
    "layers_of",
    "matches_name",
    "replace_module",
    "skip_patterns",
]

SKIPPED = ("lm_head",)  # its errors are the model's: kept by default, as other quantisers do


@dataclass(frozen=True)
class ConvertedLayer:
    """A replaced layer. ``error`` is the norm of the weight's change divided by the norm of the weight."""

    name: str
    n: int
    k: int
    error: float


@dataclass(frozen=True)
class SkippedLayer:
    """A linear layer that was left as it is, and the reason."""

    name: str
    reason: str


@dataclass(frozen=True)
class Conversion:
    """The result of ``convert``."""

    pattern: str
    dtype: str
    converted: tuple[ConvertedLayer, ...]
    skipped: tuple[SkippedLayer, ...]

    def __str__(self) -> str:
        worst = max(self.converted, key=lambda c: c.error)
        lines = [
            f"{len(self.converted)} layers → {self.pattern} {self.dtype}, weights off by at most "
            f"{worst.error:.1%} ({worst.name})"
        ]
        return "\n".join([*lines, *(f"kept {s.name}: {s.reason}" for s in self.skipped)])


def convert(
    model: nn.Module,
    pattern: str | Pattern = "6:8",
    dtype: str = "int8",
    *,
    skip: str | Iterable[str] = SKIPPED,
    progress: bool | None = None,
) -> Conversion:
    """Replace the linear layers of ``model``, in place, by :class:`Linear`: pruned by magnitude, quantised, packed.

    Everything is checked before anything is replaced; then one layer at a time, so that little memory is needed beside
    the model.

    Args:
        pattern: ``"2:4"``, ``"4:6"``, ``"6:8"``, ...
        dtype: ``"int8"``, ``"fp8"``, ``"bf16"`` or ``"fp16"``.
        skip: layers to keep, by name, last parts of a name, or wildcards (``"model.layers.0.*"``).
        progress: show a bar on stderr, by default when that is a terminal.

    Raises:
        ShiplapError: SL211 for weights that are not finite or not there (meta), for a ``skip`` that names nothing and
            for a model without linear layers to convert.
    """
    shape = Pattern.parse(pattern)
    skip = skip_patterns(skip)
    chosen, skipped = _choose_layers(model, skip, dtype)
    # All checks come before the first replacement, so that an error leaves the model unchanged.
    _check_layers(model, dtype, chosen, skipped, [] if skip == SKIPPED else skip)
    done: list[ConvertedLayer] = []
    with progress_bar(progress) as report:
        for name, linear in chosen.items():
            report(f"convert {name}", len(done), len(chosen))
            made = Linear.of(linear, shape, dtype)
            done.append(ConvertedLayer(name, made.out_features, made.in_features, _relative_error(linear.weight, made)))
            replace_module(model, linear, made)
    return Conversion(str(shape), dtype, tuple(done), tuple(SkippedLayer(n, r) for n, r in skipped.items()))


def skip_patterns(skip: str | Iterable[str]) -> tuple[str, ...]:
    """Return the names of layers to keep. A single text is one name, not a sequence of letters."""
    return (skip,) if isinstance(skip, str) else tuple(skip)


def layers_of(model: nn.Module) -> dict[str, Linear]:
    """Return the converted layers, by name."""
    return {name: m for name, m in model.named_modules() if isinstance(m, Linear)}


def matches_name(name: str, wanted: str) -> bool:
    """Return whether ``wanted`` names the module ``name``: by its full name, its last parts, or a wildcard."""
    return name == wanted or name.endswith(f".{wanted}") or fnmatchcase(name, wanted)


def replace_module(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Replace ``old`` by ``new`` everywhere: a module may be used under several names."""
    for parent in model.modules():
        for name, child in list(parent._modules.items()):  # named_children() leaves out a second name
            if child is old:
                setattr(parent, name, new)


def _choose_layers(model: nn.Module, skip: Sequence[str], dtype: str) -> tuple[dict[str, nn.Linear], dict[str, str]]:
    """Return the layers to convert, and the others with the reason why each is kept."""
    holders = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    encoders = (m for m in model.modules() if isinstance(m, nn.TransformerEncoderLayer))  # for its fused inference
    read = {id(part) for encoder in encoders for part in (encoder.linear1, encoder.linear2)}
    chosen: dict[str, nn.Linear] = {}
    skipped: dict[str, str] = {}
    for name, module, names in _linear_layers(model):
        wanted = next((s for s in skip if any(matches_name(n, s) for n in names)), None)
        if wanted is not None:
            skipped[name] = f"skip={wanted!r}"
        elif type(module) is not nn.Linear:
            skipped[name] = f"{type(module).__name__} does more than nn.Linear"
        # The other module would keep the dense weight, and the two would no longer be tied.
        elif holders[id(module.weight)] > len(names):
            skipped[name] = "its weight is another module's, too"
        # TransformerEncoderLayer passes the weights to a fused kernel and does not call the layer.
        elif id(module) in read:
            skipped[name] = "nn.TransformerEncoderLayer reads its weight past it"
        elif more := _state_that_blocks(module):
            skipped[name] = more
        elif not module.weight.is_floating_point() or module.weight.itemsize == 1 or not module.weight.numel():
            skipped[name] = f"its weight is {module.weight.dtype} {tuple(module.weight.shape)}"
        elif dtype == "int8" and module.in_features > INT8_DEPTH:
            skipped[name] = f"int8 sums no more than {INT8_DEPTH} columns exactly"
        else:
            chosen[name] = module
    return chosen, skipped


def _state_that_blocks(module: nn.Linear) -> str:
    """Return the state besides weight and bias that a conversion would lose, or ""."""
    if any((module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)):
        return "it has hooks"
    if "forward" in vars(module) and not hasattr(module, "_hf_hook"):  # accelerate's aligns devices, as its block does
        return "its forward was replaced"
    extra = module._modules or module._buffers or len(module._parameters) > 2
    return "it holds other tensors or modules" if extra else ""


def _linear_layers(model: nn.Module) -> Iterator[tuple[str, nn.Linear, list[str]]]:
    """Yield each linear layer once, with all its names."""
    layers: dict[int, tuple[nn.Linear, list[str]]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, nn.Linear):
            layers.setdefault(id(module), (module, []))[1].append(name)
    for module, names in layers.values():
        yield names[0], module, names


def _check_layers(
    model: nn.Module, dtype: str, chosen: dict[str, nn.Linear], skipped: dict[str, str], skip: Sequence[str]
) -> None:
    """Raise SL211 for names in ``skip`` without a module, for nothing to convert, and for infinite weights or NaN."""
    where = "slidesparse.convert"
    known_mode(dtype, where, "dtype")
    for wanted in skip:
        if not any(matches_name(name, wanted) for name, _ in model.named_modules(remove_duplicate=False)):
            raise error(
                "SL211",
                where=where,
                got=f"skip={wanted!r}, which names no module",
                expected="names of modules, their last parts, or wildcards",
                fix="take names from model.named_modules()",
            )
    if not chosen or "" in chosen:
        done = f", {n} converted already" if (n := len(layers_of(model))) else ""
        why = "".join(f"; {reason}" for reason in dict.fromkeys(skipped.values()))
        got = "nn.Linear itself" if "" in chosen else f"no linear layer to convert, {len(skipped)} to keep{why}{done}"
        raise error(
            "SL211",
            where=where,
            got=got,
            expected="a model with linear layers",
            fix="call slidesparse.Linear.of(linear) for a single layer" if "" in chosen else "remove names from skip=",
        )
    for name, linear in chosen.items():
        # A value may be finite in float32 and infinite in float16.
        kind = MODES[dtype] if MODES[dtype].itemsize > 1 else linear.weight.dtype
        if linear.weight.is_meta or not torch.isfinite(linear.weight.to(kind)).all():
            meta = linear.weight.is_meta
            got = "a weight on the meta device" if meta else f"NaN or an infinity as {kind}"
            fix = "load the weights first, and offload none" if meta else "repair the checkpoint"
            raise error("SL211", where=f"{where}: {name}.weight", got=got, expected="finite weights", fix=fix)


def _relative_error(weight: Tensor, made: Linear) -> float:
    """Return the Frobenius norm of the change over that of ``weight``, or 0 for a weight of zeros."""
    before = weight.detach().to(torch.float32)
    lost, norm = (before - made.as_packed().dequantised()).norm(), before.norm()
    return float(lost / norm) if norm else 0.0
