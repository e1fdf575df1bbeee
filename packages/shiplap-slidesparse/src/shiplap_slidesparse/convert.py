"""``convert``: quantise and replace the linear layers of a model, with the reason for each weight that was not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from shiplap import ShiplapError
from shiplap.plugin_api import error, notice
from shiplap.plugin_api.timing import progress_bar
from shiplap_slidesparse.experts import convert_experts, expert_weights, why_experts_stay
from shiplap_slidesparse.formats import Pattern
from shiplap_slidesparse.layers import INT8_DEPTH
from shiplap_slidesparse.linear import Linear
from shiplap_slidesparse.packed import MODES, known_mode

SKIPPED = ("lm_head",)  # its errors are the model's: kept by default, as other quantisers do
LARGE_ERROR = 0.05  # of an output, in relation to its norm: more than 8 bits alone cost (int8 about 1 %, FP8 4 %)
_ROWS = 32  # on which the outputs of a layer are compared


@dataclass(frozen=True)
class ConvertedLayer:
    """A linear layer whose weight ``[n, k]`` was converted. ``name`` is its name in the model. ``error`` is the norm of
    the weight's change divided by the norm of the weight. ``output_error`` is the corresponding ratio for the layer's
    output.

    The output is taken on rows of the example that ``convert`` was given, or on normally distributed rows if there is
    no example.
    """

    name: str
    n: int
    k: int
    error: float
    output_error: float


@dataclass(frozen=True)
class SkippedLayer:
    """A linear layer, or another parameter of two or more dimensions, that was not converted. ``name`` is its name in
    the model, and ``reason`` says why it was not.
    """

    name: str
    reason: str


@dataclass(frozen=True)
class Conversion:
    """The result of ``convert``. ``pattern`` and ``dtype`` are its arguments. ``converted`` holds a ``ConvertedLayer``
    for each converted layer, and ``skipped`` a ``SkippedLayer`` for each weight that was left as it was. ``share`` is
    the fraction of the model's parameters that lie in converted layers.
    """

    pattern: str
    dtype: str
    converted: tuple[ConvertedLayer, ...]
    skipped: tuple[SkippedLayer, ...]
    share: float

    @property
    def large(self) -> tuple[ConvertedLayer, ...]:
        """The converted layers whose output has a relative error above ``LARGE_ERROR`` (5 %), largest error first.
        Rounding to 8 bits alone does not explain such an error.
        """
        found = [c for c in self.converted if c.output_error > LARGE_ERROR]
        return tuple(sorted(found, key=lambda c: -c.output_error))

    def __str__(self) -> str:
        """Return a summary of the conversion as lines of text. They give the numbers of layers, the errors, the layers
        with large errors, and the layers that were kept.
        """
        worst, weights = max(self.converted, key=lambda c: c.output_error), max(c.error for c in self.converted)
        lines = [
            f"{len(self.converted)} layers, {self.share:.0%} of the parameters → {self.pattern} {self.dtype}, outputs "
            f"off by at most {worst.output_error:.1%} ({worst.name}), weights by {weights:.1%}"
        ]
        lines += [f"off by {c.output_error:.1%}: {c.name}" for c in self.large]
        return "\n".join([*lines, *(f"kept {s.name}: {s.reason}" for s in self.skipped)])


def convert(
    model: nn.Module,
    pattern: str | Pattern = "dense",
    dtype: str = "int8",
    *,
    skip: str | Iterable[str] = SKIPPED,
    example: Any = None,
    progress: bool | None = None,
) -> Conversion:
    """Replace the linear layers of ``model``, in place, by :class:`Linear` layers with pruned, quantised and packed
    weights.

    Experts of transformers' models, whose weights have three dimensions, become one layer for each projection.
    Everything is checked before anything is replaced. Layers are then replaced one at a time, so little memory is
    needed beside the model.

    Args:
        pattern: ``"dense"``, which prunes nothing, or ``"2:4"``, ``"4:6"``, ``"6:8"``, ...
        dtype: ``"int8"``, ``"fp8"``, ``"bf16"`` or ``"fp16"``.
        skip: names of layers that stay unconverted. Each is a full name, the last components of one, or has wildcards
            (``"model.layers.0.*"``).
        example: arguments of the model (a tensor, a tuple or a dict). The model is called with them once, and the
            output errors are those of its own activations.
        progress: show a bar on stderr, by default when that is a terminal.

    Raises:
        ShiplapError: ``SL211`` for weights that are not finite, not loaded (on ``meta``) or without sizes (of lazy
            modules), for a ``skip`` that names nothing, and for a model without linear layers to convert.
    """
    shape = Pattern.parse(pattern)
    skip = skip_patterns(skip)
    require_form(shape, dtype)
    _refuse_lazy(model)
    chosen, skipped = _choose_layers(model, skip, dtype)
    experts = _choose_experts(model, skip, shape, dtype, skipped)
    # All checks come before the first replacement, so that an error leaves the model unchanged.
    _check_layers(model, dtype, chosen, experts, skipped, [] if skip == SKIPPED else skip)
    inputs = {} if example is None else _inputs_of(model, chosen, example)
    total = sum(p.numel() for p in model.parameters())
    done: list[ConvertedLayer] = []
    with progress_bar(progress) as report:
        for name, linear in chosen.items():
            report(f"convert {name}", len(done), len(chosen) + len(experts))
            made = Linear.of(linear, shape, dtype)
            done.append(_converted_layer(name, linear.weight, made, inputs.get(name)))
            replace_module(model, linear, made)
        for name, module in experts.items():
            report(f"convert {name}", len(done), len(chosen) + len(experts))
            for part, weight, layer in convert_experts(module, dtype):
                done.append(_converted_layer(f"{name}.{part}", weight, layer, None))
    skipped |= {n: r for n, r in _large_parameters(model) if not {n, n.removesuffix(".weight")} & skipped.keys()}
    kept = tuple(SkippedLayer(n, r) for n, r in skipped.items())
    conversion = Conversion(str(shape), dtype, tuple(done), kept, sum(c.n * c.k for c in done) / total)
    _warn_of_large_errors(conversion)
    return conversion


def _warn_of_large_errors(conversion: Conversion) -> None:
    """Issue a notice that names the layer with the largest output error. Do nothing if no output error is above
    ``LARGE_ERROR``.
    """
    if not (large := conversion.large):
        return
    worst, count = large[0], f"{len(large)} of {len(conversion.converted)} layers"
    instead = 'pattern="dense" prunes nothing' if conversion.pattern != "dense" else 'dtype="int8" rounds less'
    notice(
        f"slidesparse/error/{conversion.pattern}/{conversion.dtype}/{worst}",
        f"slidesparse.convert: the outputs of {count} are off by more than {LARGE_ERROR:.0%}, at most by "
        f"{worst.output_error:.1%} ({worst.name}). Compare the model's results, or convert otherwise: {instead}",
    )


def skip_patterns(skip: str | Iterable[str]) -> tuple[str, ...]:
    """Return the names of layers to leave unconverted as a tuple. ``skip`` is a sequence of names, or a string, which
    counts as one name.
    """
    return (skip,) if isinstance(skip, str) else tuple(skip)


def layers_of(model: nn.Module) -> dict[str, Linear]:
    """Return the converted layers (``Linear``) of a model, by module name."""
    return {name: m for name, m in model.named_modules() if isinstance(m, Linear)}


def matches_name(name: str, wanted: str) -> bool:
    """Return whether ``wanted`` matches the module name ``name``. ``wanted`` is a full name, the last dotted components
    of one, or a wildcard pattern such as ``layers.0.*``.
    """
    return name == wanted or name.endswith(f".{wanted}") or fnmatchcase(name, wanted)


def replace_module(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Replace the module ``old`` of a model by ``new`` under each name where it is used."""
    for parent in model.modules():
        for name, child in list(parent._modules.items()):  # named_children() leaves out a second name
            if child is old:
                setattr(parent, name, new)


def require_form(pattern: Pattern, dtype: str) -> None:
    """Raise ``SL211`` if ``dtype`` is unknown. Raise it also if ``dtype`` has 16 bits and ``pattern`` is ``dense``,
    since such a conversion would change nothing.
    """
    if MODES[known_mode(dtype, "slidesparse.convert", "dtype")].itemsize > 1 and not pattern.sparse:
        raise error(
            "SL211",
            where="slidesparse.convert",
            got=f"dense weights in {dtype}",
            expected="int8 or fp8, or a sparse pattern",
            fix=f"call model.to({MODES[dtype]}), or pass dtype='int8'",
        )


def _refuse_lazy(model: nn.Module) -> None:
    """Raise ``SL211`` if a parameter of ``model`` has no sizes yet, since the model was not called."""
    for name, parameter in model.named_parameters():
        if isinstance(parameter, UninitializedParameter):
            got, fix = "a parameter of a lazy module, without sizes", "call the model once, and convert it then"
            raise error("SL211", where=f"slidesparse.convert: {name}", got=got, expected="finite weights", fix=fix)


def _inputs_of(model: nn.Module, chosen: dict[str, nn.Linear], example: Any) -> dict[str, Tensor]:
    """Return the first ``_ROWS`` rows of the input of each layer of ``chosen``, by layer name. The model is called once
    with ``example``, which is a tensor, a tuple or a dict of arguments. Layers that this call does not reach are
    missing from the result.
    """
    inputs: dict[str, Tensor] = {}

    def keep(name: str) -> Callable[..., None]:
        """Return a forward pre-hook that stores rows of the input of the layer ``name`` in the enclosing ``inputs``."""

        def hook(module: nn.Module, args: tuple[Any, ...]) -> None:  # what it returned would replace the input
            """Store the first rows of the layer's first input in ``inputs[name]``, at its first call only. Return None,
            since torch would use a result as the new input.
            """
            if args and name not in inputs and args[0].numel():
                # A copy, since a view would keep the whole input in memory.
                inputs[name] = args[0].detach().reshape(-1, args[0].shape[-1])[:_ROWS].clone()

        return hook

    handles = [linear.register_forward_pre_hook(keep(name)) for name, linear in chosen.items()]
    try:
        with torch.no_grad():
            if isinstance(example, dict):
                model(**example)
            else:
                model(*(example if isinstance(example, tuple) else (example,)))
    finally:
        for handle in handles:
            handle.remove()
    return inputs


def _large_parameters(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield ``(name, reason)`` for each parameter of ``model`` that has two or more dims and lies outside converted
    layers. An embedding table is one. The reason says why the parameter was not converted.
    """
    for home, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.dim() > 1 and not isinstance(module, Linear):
                table = isinstance(module, nn.Embedding | nn.EmbeddingBag)
                reason = (
                    "a table, which is read and not multiplied" if table else f"{type(module).__name__} is no layer"
                )
                yield f"{home}.{name}" if home else name, f"{reason} that convert knows" if not table else reason


def _choose_experts(
    model: nn.Module, skip: Sequence[str], pattern: Pattern, dtype: str, skipped: dict[str, str]
) -> dict[str, nn.Module]:
    """Return the modules of experts (mixtures with weights of three dims) that are to be converted, by name. Add the
    weights of all other modules of experts to ``skipped``, with the reason. ``skip`` holds the names of modules to
    leave unconverted.
    """
    chosen: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        parts = [f"{name}.{part}" for part in expert_weights(module)]
        wanted = next((s for s in skip if any(matches_name(n, s) for n in (name, *parts))), None)
        reason = "" if not parts else f"skip={wanted!r}" if wanted else why_experts_stay(module, pattern, dtype)
        if parts and not reason:
            chosen[name] = module
        skipped |= dict.fromkeys(parts, reason) if reason else {}
    return chosen


def _choose_layers(model: nn.Module, skip: Sequence[str], dtype: str) -> tuple[dict[str, nn.Linear], dict[str, str]]:
    """Return two mappings by layer name. The first holds the linear layers of ``model`` to convert to ``dtype``. The
    second holds the reason for each linear layer that is left as it is. ``skip`` holds names of layers to leave.
    """
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
    """Return a string such as ``it has hooks`` if ``module`` has state that a conversion would lose. Such state is
    hooks, a replaced ``forward``, or tensors and modules beside weight and bias. Otherwise return an empty string.
    """
    if any((module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)):
        return "it has hooks"
    if "forward" in vars(module) and not hasattr(module, "_hf_hook"):  # accelerate's aligns devices, as its block does
        return "its forward was replaced"
    extra = module._modules or module._buffers or len(module._parameters) > 2
    return "it holds other tensors or modules" if extra else ""


def _linear_layers(model: nn.Module) -> Iterator[tuple[str, nn.Linear, list[str]]]:
    """Yield ``(first name, layer, all names)`` for each linear layer of ``model`` that is not yet converted. A layer
    has several names if several modules share it.
    """
    layers: dict[int, tuple[nn.Linear, list[str]]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, nn.Linear) and not isinstance(module, Linear):
            # A layer that modules share has several names.
            layers.setdefault(id(module), (module, []))[1].append(name)
    for module, names in layers.values():
        yield names[0], module, names


def _check_layers(
    model: nn.Module,
    dtype: str,
    chosen: dict[str, nn.Linear],
    experts: dict[str, nn.Module],
    skipped: dict[str, str],
    skip: Sequence[str],
) -> None:
    """Raise ``SL211`` if a name in ``skip`` matches no module of ``model``, or if ``chosen`` and ``experts`` leave
    nothing to convert. Raise it also if a weight to convert is on the meta device or not finite in ``dtype``.
    """
    where = "slidesparse.convert"
    # A module that is used twice has two names, and ``skip`` may hold either.
    names = [name for name, _ in model.named_modules(remove_duplicate=False)] + list(skipped)
    for wanted in skip:
        if not any(matches_name(name, wanted) for name in names):
            raise error(
                "SL211",
                where=where,
                got=f"skip={wanted!r}, which names no module",
                expected="names of modules, their last parts, or wildcards",
                fix="take names from model.named_modules()",
            )
    if not (chosen or experts) or "" in chosen:
        raise _nothing_to_convert(model, dtype, chosen, skipped)
    weights = {f"{name}.weight": linear.weight for name, linear in chosen.items()}
    weights |= {f"{name}.{part}": w for name, m in experts.items() for part, w in expert_weights(m).items()}
    for name, weight in weights.items():
        # A value may be finite in float32 and infinite in float16.
        kind = MODES[dtype] if MODES[dtype].itemsize > 1 else weight.dtype
        if weight.is_meta or not torch.isfinite(weight.to(kind)).all():
            meta = weight.is_meta
            got = "a weight on the meta device" if meta else f"NaN or an infinity as {kind}"
            fix = "load the weights first, and offload none" if meta else "repair the checkpoint"
            raise error("SL211", where=f"{where}: {name}", got=got, expected="finite weights", fix=fix)


def _nothing_to_convert(
    model: nn.Module, dtype: str, chosen: dict[str, nn.Linear], skipped: dict[str, str]
) -> ShiplapError:
    """Return the error ``SL211`` for a model without a layer to convert to ``dtype``, or for a layer alone. Its fix
    depends on what the model has instead. ``skipped`` holds the reason for each layer that stays.
    """
    where, expected = "slidesparse.convert", "a model with linear layers"
    if "" in chosen:
        fix = "call slidesparse.Linear.of(linear) for a single layer"
        return error("SL211", where=where, got="nn.Linear itself", expected=expected, fix=fix)
    converted = len(layers_of(model))
    others = {n: r for n, r in _large_parameters(model) if n.removesuffix(".weight") not in skipped}
    kinds = dict.fromkeys(reason for reason in others.values() if reason.endswith("convert knows"))
    subclasses = any(reason.endswith("does more than nn.Linear") for reason in skipped.values())
    why = "".join(f"; {reason}" for reason in dict.fromkeys([*skipped.values(), *kinds]))
    done = f", {converted} converted already" if converted else ""
    linear = {name for name, _, _ in _linear_layers(model)}
    experts = any(reason.startswith("skip=") for name, reason in skipped.items() if name not in linear)
    got = f"no linear layer to convert, {len(skipped)} to keep{why}{done}"
    if experts or _choose_layers(model, (), dtype)[0]:
        fix = "remove names from skip="
    elif converted:
        fix = "load the model again to convert it in another way"
    elif kinds or subclasses:
        fix = "build the model with nn.Linear layers in place of the modules under 'got'"
    else:
        fix = (
            "give a layer a weight of its own, layer.weight = nn.Parameter(layer.weight.clone()), or pass another model"
        )
    return error("SL211", where=where, got=got, expected=expected, fix=fix)


def _converted_layer(name: str, weight: Tensor, made: Linear, x: Tensor | None) -> ConvertedLayer:
    """Return a ``ConvertedLayer`` with the relative errors of the layer's weight and of its output. The output is
    computed for the rows ``x``, or for random rows if ``x`` is None. ``weight`` is the weight before the conversion,
    and ``made`` is the converted layer.
    """
    before = weight.detach().to(torch.float32)
    if x is None:
        # A fixed seed, so that two conversions of a model report equal errors.
        drawn = torch.randn(_ROWS, made.in_features, generator=torch.Generator().manual_seed(0))
        x = drawn.to(weight.device, weight.dtype)
    with torch.no_grad():
        after = made.multiply(x, None)
        errors = (
            _relative_error(before, made.as_packed().dequantised()),
            _relative_error(x.to(torch.float32) @ before.t(), after.to(torch.float32)),
        )
    return ConvertedLayer(name, made.out_features, made.in_features, *errors)


def _relative_error(before: Tensor, after: Tensor) -> float:
    """Return the Frobenius norm of ``before - after`` divided by that of ``before``, or 0 if that is 0."""
    norm = before.norm()
    return float((before - after).norm() / norm) if norm else 0.0
