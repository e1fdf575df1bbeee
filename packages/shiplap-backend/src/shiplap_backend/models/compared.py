"""The comparison of a model on the device and on the CPU: inference, generation and one training step.

The error model: a value may differ from the float64 value by ``TIMES`` the difference of the CPU's float32 value, or by
``NEAR`` of its norm. One run of the CPU has one draw of rounding errors, whose size depends on chance, such as a ReLU
mask that flips or terms that cancel. So the CPU's difference is the largest of several runs. The first run has the
given weights. Each further run moves every weight by a unit in its last place, up or down at random, which is no more
than the rounding of the weights themselves. Further runs are made only for a model that is not near enough.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from shiplap.torch_private.graph_objects import leaves, map_leaves
from shiplap_backend.models.case import CaseMaker, ModelCase

NEAR = 1e-5  # relative distance from float64 that is rounding, whatever the CPU's own distance is
TIMES = 3  # the CPU's own distance is allowed
RUNS = 8  # of the CPU with weights that are moved by a unit in the last place
RATE = 0.05  # of the training step
_WIDE = {torch.float32: torch.float64, torch.complex64: torch.complex128}
_DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


@dataclass
class ModelRun:
    """The results of a model on one device, with all tensors on the CPU.

    ``results`` are the output tensors in inference and the loss of the training step. ``shapes`` has the dtype, sizes
    and strides of each output. ``gradients`` are those of the parameters by name, and ``tokens`` are the generated
    ones. ``moved`` has the parameters and buffers after the training step.
    """

    shapes: list[tuple[Any, ...]] = field(default_factory=list)  # dtype, size and strides of each result
    results: list[Tensor] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    moved: dict[str, Tensor] = field(default_factory=dict)  # parameters and buffers after the step
    tokens: list[int] = field(default_factory=list)


def compare_model(make: CaseMaker, device: str) -> str:
    """Return a message that says how the model of ``make()`` on ``device`` differs from that on the CPU. Return an
    empty string if results, generated tokens, gradients and the training step agree.

    Parameters must stay the same objects, and tied parameters must stay tied. An optimiser that was created before
    ``to(device)`` must train them. Values may differ by as much as the rounding of float32 explains. Torch is seeded.
    """
    torch.manual_seed(0)
    case = make()
    for layer in case.module.modules():
        if isinstance(layer, _DROPOUT):
            # Dropout draws different numbers on each device, so a training step could not be compared.
            layer.p = 0.0
    ours, wrong = _run_model(copy.deepcopy(case), device, torch.float32)
    if wrong:
        return wrong
    theirs = [_run_model(copy.deepcopy(case), "cpu", torch.float32)[0]]
    try:
        exact, _ = _run_model(copy.deepcopy(case), "cpu", torch.float64)
    except RuntimeError:  # an operator of it has no float64, as grouped products have none
        exact = theirs[0]
    if wrong := next(_find_differences(ours, theirs[0]), ""):
        return wrong
    for seed in range(RUNS):
        wrong = next(_find_distances(ours, theirs, exact), "")
        if not wrong:
            return ""
        theirs.append(_run_model(_with_shifted_weights(copy.deepcopy(case), seed), "cpu", torch.float32)[0])
    return next(_find_distances(ours, theirs, exact), "")


def _with_shifted_weights(case: ModelCase, seed: int) -> ModelCase:
    """Change each parameter of ``case`` in place by one rounding error, and return the case.

    Each number goes up or down at random. ``seed`` determines the random numbers.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in case.module.parameters():
            if parameter.is_floating_point():
                sign = torch.randint(0, 2, parameter.shape, generator=generator) * 2 - 1
                parameter.mul_(1 + sign * torch.finfo(parameter.dtype).eps)
    return case


def _run_model(case: ModelCase, device: str, dtype: torch.dtype) -> tuple[ModelRun, str]:
    """Run the model of ``case`` on ``device`` in ``dtype``. Return the results, and a message if ``.to(device)`` has
    replaced parameter objects.

    The model runs for inference, for generation and for one training step. If ``.to(device)`` has replaced parameters,
    it does not run. Otherwise the message is empty.
    """
    module: Any = case.module
    run = ModelRun()
    optimiser = torch.optim.SGD(module.parameters(), lr=RATE)
    # The optimiser is made before the move, as many programs do, and holds these objects.
    before = {name: id(p) for name, p in module.named_parameters(remove_duplicate=False)}
    module.to(device)
    if dtype is torch.float64:
        # Assigning ``data`` keeps the parameter objects, which the optimiser refers to.
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.data = tensor.data.to(_WIDE.get(tensor.dtype, tensor.dtype))
    if before != {name: id(p) for name, p in module.named_parameters(remove_duplicate=False)}:
        return run, f"a parameter is another object after .to({device!r})"
    args, kwargs, train = (_move_tensors(v, device, dtype) for v in (case.args, case.kwargs, case.train))
    with torch.no_grad():
        results = _output_tensors(module.eval()(*args, **kwargs))
    run.shapes = [(str(t.dtype), tuple(t.shape), t.stride()) for t in results]
    run.results = [t.cpu() for t in results]
    if case.generate and dtype is not torch.float64:
        run.tokens = module.generate(**_move_tensors(case.generate, device, dtype)).flatten().tolist()
    torch.manual_seed(1)
    loss = case.loss(module.train()(*args, **kwargs, **train))
    loss.backward()
    run.results.append(loss.detach().cpu())
    run.gradients = {name: p.grad.cpu() for name, p in module.named_parameters() if p.grad is not None}
    optimiser.step()
    run.moved = {name: value.detach().cpu() for name, value in module.state_dict().items()}
    return run, ""


def _move_tensors(value: Any, device: str, dtype: torch.dtype) -> Any:
    """Return the nested arguments ``value`` with all tensors on ``device``.

    Floating-point tensors are converted to ``dtype``.
    """

    def there(leaf: Any) -> Any:
        """Return the tensor ``leaf`` on ``device``, and any other value unchanged.

        A floating-point tensor is converted to ``dtype``. Both are arguments of ``_move_tensors``.
        """
        if not isinstance(leaf, Tensor):
            return leaf
        return leaf.to(device, dtype if leaf.is_floating_point() else leaf.dtype)

    return map_leaves(there, value)


def _output_tensors(output: Any) -> list[Tensor]:
    """Return the tensors of a model's ``output`` as a list, in the order in which they occur.

    The output may be a tensor, a nest of lists and dicts, or an object with attributes.
    """
    given = dict(output) if isinstance(output, dict) else output
    return [t for t in leaves(given) if isinstance(t, Tensor)]


def _find_differences(ours: ModelRun, theirs: ModelRun) -> Iterator[str]:
    """Yield a message for each difference between two runs that rounding cannot cause.

    ``ours`` ran on the device, and ``theirs`` on the CPU. Generated tokens, shapes, and the set of parameters with
    gradients are compared.
    """
    if ours.tokens != theirs.tokens:
        yield f"generated {ours.tokens} for {theirs.tokens}"
    for got, want in zip(ours.shapes, theirs.shapes, strict=True):
        if got != want:
            yield f"a result is {got} for {want}"
    if ours.gradients.keys() != theirs.gradients.keys():
        yield f"gradients differ: {sorted(ours.gradients.keys() ^ theirs.gradients.keys())}"


def _find_distances(ours: ModelRun, theirs: Sequence[ModelRun], exact: ModelRun) -> Iterator[str]:
    """Yield a message for each result of the device that is further from the exact one than rounding explains.

    Outputs, gradients and trained parameters are compared. ``ours`` ran on the device, and ``exact`` in float64. The
    first of ``theirs`` ran on the CPU with the given weights. The weights of the others are shifted by a rounding
    error.
    """
    for i, (a, e) in enumerate(zip(ours.results, exact.results, strict=True)):
        yield from _describe_distance(f"result {i}", a, [run.results[i] for run in theirs], e)
    for name, a in ours.gradients.items():
        others = [run.gradients[name] for run in theirs]
        yield from _describe_distance(f"gradient of {name}", a, others, exact.gradients[name])
    for name, a in ours.moved.items():
        yield from _describe_distance(
            f"after the step {name}", a, [run.moved[name] for run in theirs], exact.moved[name]
        )


def _describe_distance(name: str, ours: Tensor, theirs: Sequence[Tensor], exact: Tensor) -> Iterator[str]:
    """Yield a message about the tensor called ``name`` if ``ours`` is further from ``exact`` than rounding explains.

    The distance is relative to the norm of ``exact``. Tensors of integers and booleans must be equal to the first of
    ``theirs``, which is the CPU's. The distances of all of ``theirs`` from ``exact`` show how large rounding errors
    become.
    """
    first = theirs[0]
    if not ours.is_floating_point() and not ours.is_complex():
        if not torch.equal(ours, first):
            yield f"{name} differs"
        return
    if ours.shape != exact.shape:  # it depends on values that rounding may move
        exact = first
    if not torch.equal(ours.isnan(), first.isnan()):
        yield f"{name} is NaN in other places than the CPU's"
    exact = exact.nan_to_num()
    # A result of zeros must not divide by zero.
    scale = max(float(exact.abs().double().norm()), 1e-30)

    def off(tensor: Tensor) -> float:
        """Return the norm of the difference between ``tensor`` and the enclosing ``exact``, divided by the norm of
        ``exact``.
        """
        return float((tensor.nan_to_num().to(exact.dtype) - exact).abs().double().norm()) / scale

    us, them = off(ours), max(off(t) for t in theirs if t.shape == exact.shape)
    if not us <= max(NEAR, TIMES * them):
        yield f"{name} is {us:.1e} from float64, the CPU's {them:.1e}"
