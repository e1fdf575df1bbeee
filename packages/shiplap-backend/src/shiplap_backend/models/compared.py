"""A model on the device and on the CPU: inference, generation and one training step, with float64 as the judge."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from shiplap.compat.trees import leaves, map_leaves
from shiplap_backend.models.case import Case, Maker

__all__ = ["compared"]

NEAR = 1e-5  # relative distance from float64 that is rounding, whatever the CPU's own distance is
DOUBT = 3  # times the distance that is allowed: from here on other weights are not asked
SEEDS = 3  # of a model's weights
RATE = 0.05  # of the training step
SMALL = 0.1  # of the norm of all gradients: one that is smaller is measured as if it were of this norm
_WIDE = {torch.float32: torch.float64, torch.complex64: torch.complex128}
_DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


@dataclass
class Run:
    """What a model did on one device. The tensors are on the CPU."""

    shapes: list[tuple[Any, ...]] = field(default_factory=list)  # dtype, size and strides of each result
    results: list[Tensor] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    moved: dict[str, Tensor] = field(default_factory=dict)  # parameters and buffers after the step
    tokens: list[int] = field(default_factory=list)


def compared(make: Maker, device: str) -> str:
    """What of the model is not as on the CPU, or nothing. Seeds torch.

    Parameters must stay the same objects, tied ones stay tied, and an optimiser that was made before ``to(device)``
    must train them. A value may be as far from float64 as a few times the CPU's own value is. Whose rounding errors
    cancel is chance, so a model that is a little further off must be so for each of ``SEEDS``.
    """
    wrong = ""
    for seed in range(SEEDS):
        wrong, rounding = _compared(make, device, seed)
        if not rounding:
            return wrong
    return wrong


def _compared(make: Maker, device: str, seed: int) -> tuple[str, bool]:
    """What is wrong with the weights of ``seed``, and whether another seed may tell otherwise."""
    torch.manual_seed(seed)
    case = make()
    for layer in case.module.modules():
        if isinstance(layer, _DROPOUT):
            layer.p = 0.0
    ours, wrong = _run(copy.deepcopy(case), device, torch.float32)
    if wrong:
        return wrong, False
    theirs, _ = _run(copy.deepcopy(case), "cpu", torch.float32)
    try:
        exact, _ = _run(case, "cpu", torch.float64)
    except RuntimeError:  # an operator of it has no float64, as grouped products have none
        exact = theirs
    if wrong := next(itertools.chain(_differences(ours, theirs), _distances(ours, theirs, exact, DOUBT)), ""):
        return wrong, False
    wrong = next(_distances(ours, theirs, exact), "")
    return wrong, bool(wrong)


def _run(case: Case, device: str, dtype: torch.dtype) -> tuple[Run, str]:
    """Run the model, and say what is wrong with its parameters."""
    module: Any = case.module
    run = Run()
    optimiser = torch.optim.SGD(module.parameters(), lr=RATE)
    before = {name: id(p) for name, p in module.named_parameters(remove_duplicate=False)}
    module.to(device)
    if dtype is torch.float64:
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.data = tensor.data.to(_WIDE.get(tensor.dtype, tensor.dtype))
    if before != {name: id(p) for name, p in module.named_parameters(remove_duplicate=False)}:
        return run, f"a parameter is another object after .to({device!r})"
    args, kwargs, train = (_moved(v, device, dtype) for v in (case.args, case.kwargs, case.train))
    with torch.no_grad():
        results = _tensors(module.eval()(*args, **kwargs))
    run.shapes = [(str(t.dtype), tuple(t.shape), t.stride()) for t in results]
    run.results = [t.cpu() for t in results]
    if case.generate and dtype is not torch.float64:
        run.tokens = module.generate(**_moved(case.generate, device, dtype)).flatten().tolist()
    torch.manual_seed(1)
    loss = case.loss(module.train()(*args, **kwargs, **train))
    loss.backward()
    run.results.append(loss.detach().cpu())
    run.gradients = {name: p.grad.cpu() for name, p in module.named_parameters() if p.grad is not None}
    optimiser.step()
    run.moved = {name: value.detach().cpu() for name, value in module.state_dict().items()}
    return run, ""


def _moved(value: Any, device: str, dtype: torch.dtype) -> Any:
    def there(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return leaf.to(device, dtype if leaf.is_floating_point() else leaf.dtype)

    return map_leaves(there, value)


def _tensors(output: Any) -> list[Tensor]:
    """The tensors of an output, which may be an object with attributes such as a cache."""
    given = dict(output) if isinstance(output, dict) else output
    return [t for t in leaves(given) if isinstance(t, Tensor)]


def _differences(ours: Run, theirs: Run) -> Iterator[str]:
    if ours.tokens != theirs.tokens:
        yield f"generated {ours.tokens} for {theirs.tokens}"
    for got, want in zip(ours.shapes, theirs.shapes, strict=True):
        if got != want:
            yield f"a result is {got} for {want}"
    if ours.gradients.keys() != theirs.gradients.keys():
        yield f"gradients differ: {sorted(ours.gradients.keys() ^ theirs.gradients.keys())}"


def _distances(ours: Run, theirs: Run, exact: Run, times: float = 1) -> Iterator[str]:
    """What is further off than ``times`` the distance that is allowed."""
    everything = max((float(g.abs().double().norm()) for g in exact.gradients.values()), default=0.0)
    for i, (a, b, e) in enumerate(zip(ours.results, theirs.results, exact.results, strict=True)):
        yield from _distance(f"result {i}", a, b, e, 0.0, times)
    for what in ("gradients", "moved"):
        values = [getattr(run, what) for run in (ours, theirs, exact)]
        for name in values[0]:
            least = everything * SMALL if what == "gradients" else 0.0
            a, b, e = (v[name] for v in values)
            yield from _distance(f"{'gradient of' if least else 'after the step'} {name}", a, b, e, least, times)


def _distance(name: str, ours: Tensor, theirs: Tensor, exact: Tensor, least: float, times: float) -> Iterator[str]:
    """Say that ``ours`` is further from ``exact`` than rounding explains, relative to ``least`` or the norm."""
    if not ours.is_floating_point() and not ours.is_complex():
        if not torch.equal(ours, theirs):
            yield f"{name} differs"
        return
    if ours.shape != exact.shape:  # it depends on values that rounding may move
        exact = theirs
    if not torch.equal(ours.isnan(), theirs.isnan()):
        yield f"{name} is NaN in other places than the CPU's"
    ours, theirs, exact = (t.nan_to_num() for t in (ours, theirs, exact))
    scale = max(float(exact.abs().double().norm()), least, 1e-30)
    us, them = (float((t.to(exact.dtype) - exact).abs().double().norm()) / scale for t in (ours, theirs))
    if not us <= max(NEAR, 3 * them) * times:
        yield f"{name} is {us:.1e} from float64, the CPU's {them:.1e}"
