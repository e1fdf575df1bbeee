"""What a candidate has to compute: inputs that nobody can know beforehand, and the results that the reference gives."""

from __future__ import annotations

import copy
import math
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from shiplap.cached_property import cached_property
from shiplap.dispatch import Op
from shiplap.errors import error
from shiplap.judge.variants import CHANCE, Form, forms_of, vary
from shiplap.sampling.case import tree_map
from shiplap.sampling.compare import Difference, Reduction, bitwise, reduction
from shiplap.sampling.compare_to_reference import settle
from shiplap.sampling.recipe import Recipe
from shiplap.sampling.run import last_line, split, tensors, widen
from shiplap.sampling.samples import Samples
from shiplap.sampling.sizes import free_dims
from shiplap.sandbox.candidate import Expected, Wrong
from shiplap.sandbox.protocol import leaves, nested, overlaps
from shiplap.sandbox.rng_state import places

KEPT = 1e-5  # relative error of what a module keeps: reference and candidate may sum in another order
LONGEST = 300  # a size of a declared op that is drawn

Args = tuple[Any, ...]


@dataclass
class Problem:
    """The common part of problems; ``call`` is the reference, ``wide`` the same for arguments in float64."""

    name: str
    call: Callable[..., Any]
    wide: Callable[..., Any]
    tolerance: float = 0.0
    terms: dict[str, int] = field(default_factory=dict)
    takes: float = 0.0  # seconds of one call of the reference
    constant: bool = False  # whether every draw has the same values
    until: float = math.inf  # the time (``time.monotonic``) after which no more forms are looked for
    hurried: bool = False  # whether that time was over
    always: list[int] = field(default_factory=list)  # tensors of integers that every draw has alike
    compares_nesting: bool = False  # whether a result has to lie in the same containers

    def forms(self, numbers: Sequence[float] = (), most: int = 14) -> list[Form]:
        """What the candidate is called with. ``numbers``: those at which it may branch; ``most``: of other shapes."""
        raise NotImplementedError

    def draw(self, form: Form) -> Args:
        """Arguments of this form with values of a new, secret seed."""
        raise NotImplementedError

    def sums(self, form: Form, args: Args) -> Reduction:
        raise NotImplementedError

    def expect(self, form: Form, args: Args) -> Expected:
        """Run the reference on copies of ``args``."""
        with torch.no_grad():
            given = tree_map(lambda t: t.detach().clone(), args)
            result = self.call(*given)
            before, after = tensors(args), tensors(given)
            changed = tuple(i for i, (b, a) in enumerate(zip(before, after, strict=True)) if bitwise([a], [b]))
            places = {t.untyped_storage().data_ptr() for t in after if t.numel()}
            outs = _tensors_of(result)
            aliased = any(o.untyped_storage().data_ptr() in places for o in outs if o.numel())
            loose = any(overlaps(o.shape, o.stride()) for o in outs)
            own = [o.detach().clone() for o in (*outs, *(after[i] for i in changed))]
            precise = tree_map(widen, args)
            wide = self._wide(precise, changed, own)

        def recompute() -> list[Tensor]:
            with torch.no_grad():
                return self._run(self.wide, precise, changed)

        sums = self.sums(form, args)

        def against(got: Sequence[Tensor]) -> Difference:
            return settle(list(got), own, wide, sums, recompute, self.tolerance)

        lies = nested(result) if self.compares_nesting else ""
        return Expected(own, against, changed, aliased, lies, loose)

    def _wide(self, precise: Args, changed: tuple[int, ...], own: list[Tensor]) -> list[Tensor]:
        try:
            wide = self._run(self.wide, precise, changed)
        except (RuntimeError, TypeError, ValueError):  # it insists on a narrower precision
            return own
        fits = len(wide) == len(own) and all(w.shape == o.shape for w, o in zip(wide, own, strict=True))
        return wide if fits else own

    def _run(self, call: Callable[..., Any], args: Args, changed: tuple[int, ...]) -> list[Tensor]:
        given = tree_map(lambda t: t.detach().clone(), args)
        outs = _tensors_of(call(*given))
        after = tensors(given)
        return [o.detach().clone() for o in (*outs, *(after[i] for i in changed))]

    def renew(self, state: Mapping[str, Tensor]) -> bool:
        """Give the parameters of the reference these values. False if it has none."""
        return False

    def unfit(self, timed: Sequence[Form]) -> tuple[str, str] | None:
        """What no candidate can be judged by, and why: results that are drawn, or the same whatever the inputs are."""
        args = self.draw(timed[0])
        torch.manual_seed(secrets.randbits(62))
        before = places()
        first = self.expect(timed[0], args)
        moved = places() != before
        torch.manual_seed(secrets.randbits(62))
        if moved and bitwise(first.own, self._own(args, first)):
            return "values", "the reference draws random numbers, with which nobody can compare any others"
        for form in timed:
            if not all(o.is_floating_point() for o in first.own):
                return None
            expected = first if form is timed[0] else self.expect(form, self.draw(form))
            if expected.against(self._own(self.draw(form), expected)).problem:
                return None
        return "results", "the reference has nearly the same results for all inputs: a constant would do"

    def _own(self, args: Args, like: Expected) -> list[Tensor]:
        with torch.no_grad():
            return self._run(self.call, args, like.changed)

    def gives_numbers(self, args: Args) -> bool:
        """Whether the reference still computes something finite, with the parameters that it has now."""
        with torch.no_grad():
            try:
                outs = _tensors_of(copy.deepcopy(self.call)(*tree_map(lambda t: t.detach().clone(), args)))
            except Exception:
                return False
        return all(bool(torch.isfinite(o).all()) for o in outs if o.is_floating_point())

    def kept_after(self, args: Args) -> dict[str, Tensor]:
        """What a call leaves in the module of the reference, such as running means: only what is other than before."""
        if not isinstance(self.call, torch.nn.Module):
            return {}
        before, module = self.call.state_dict(), copy.deepcopy(self.call)
        with torch.no_grad():
            module(*tree_map(lambda t: t.detach().clone(), args))
        after = module.state_dict()
        return {k: v for k, v in after.items() if k in before and bitwise([v], [before[k]])}

    def compare_kept(self, expected: Mapping[str, Tensor], got: Sequence[Tensor]) -> None:
        """Raises Wrong where a module keeps something else than the module of the reference after one call."""
        own = [t.detach().clone() for t in expected.values()]
        wide = [widen(t) for t in own]
        largest = max(own, key=lambda t: t.numel(), default=None)
        if largest is None:
            return
        sums = Reduction(max(self.terms.values(), default=1 << 10))
        if problem := settle(list(got), own, wide, sums, lambda: wide, max(self.tolerance, KEPT)).problem:
            raise Wrong("state", f"{', '.join(expected)} after a call: {problem}")

    def flops(self, args: Args) -> int:
        """Operations of the products in the reference."""
        given = tree_map(lambda t: t.detach().clone(), args)
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            self.call(*given)
        return int(counter.get_total_flops())

    @property
    def parameters(self) -> list[str]:
        """Names of the parameters of the reference that have gradients."""
        module = self.call if isinstance(self.call, torch.nn.Module) else None
        return [name for name, p in module.named_parameters() if p.requires_grad] if module is not None else []

    def gradients(self, args: Args, seeds: Sequence[Tensor], *, wide: bool) -> list[Tensor]:
        """Gradients of the floating arguments, then of the parameters, for these gradients of the results."""
        given = [widen(a).detach().clone() if isinstance(a, Tensor) and wide else a for a in args]
        given = [a.detach().clone().requires_grad_() if _floating(a) else a for a in given]
        call = self.wide if wide else self.call
        outs = [o for o in _tensors_of(call(*given)) if o.requires_grad]
        wanted = [a for a in given if _floating(a)]
        owned = dict(call.named_parameters()) if isinstance(call, torch.nn.Module) else {}
        wanted += [owned[name] for name in self.parameters]
        grads = torch.autograd.grad(
            outs, wanted, [s.to(o.dtype) for s, o in zip(seeds, outs, strict=True)], allow_unused=True
        )
        return [torch.zeros_like(w) if g is None else g for g, w in zip(grads, wanted, strict=True)]


def _floating(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _tensors_of(result: Any) -> list[Tensor]:
    return [v if isinstance(v, Tensor) else torch.tensor(v) for v in leaves(result)]


class OpProblem(Problem):
    """The body of a declared op, on the audit's samples."""

    def __init__(self, op: Op, sizes: Sequence[dict[str, Any]], device: str) -> None:
        def body(*args: Any) -> Any:
            positional, named = split(op.spec, args)
            return op.reference(*positional, **named)

        super().__init__(op.spec.name, body, body, op.spec.tolerated)
        self.op, self.asked, self.device = op, sizes, device

    def forms(self, numbers: Sequence[float] = (), most: int = 14) -> list[Form]:
        samples = Samples(self.op, secrets.randbits(40), self.device)
        grown = list(samples.wide()) or list(samples.grown(2))
        large = [samples.base.but(sizes=s) for s in self.asked]
        large = large or [c.recipe for c in sorted(grown, key=lambda c: c.numel)[-2:]]
        looked = [*samples.values(), *samples.optionals(), *samples.layouts(), *samples.special()]
        odd = [*samples.edges(), *samples.tiles()]
        recipes = [c.recipe for c in (*_spread(looked, 40), *_spread(odd, 40))]
        recipes += self._secret(samples, numbers, most)
        unique = {str(r): r for r in (*recipes, *large)}
        marked = {str(r) for r in large}
        return [Form(label, timed=label in marked, recipe=recipe) for label, recipe in unique.items()]

    def _secret(self, samples: Samples, numbers: Sequence[float], most: int) -> list[Recipe]:
        """Sizes that nobody knows, and those that the candidate names, each in the place of one dim."""
        names = [
            n for n, kind in free_dims(self.op.spec).items() if kind != "variadic" and n in dict(samples.base.sizes)
        ]
        listed = [(n, v) for n in names for v in {int(v) for v in numbers if 0 < v <= LONGEST and v == int(v)}]
        pairs = CHANCE.sample(listed, min(most, len(listed)))
        pairs += [(n, 1 + CHANCE.randrange(LONGEST)) for n in names * 2]
        recipes = [samples.base.but(sizes={n: v}) for n, v in pairs]
        return [r for r in recipes if samples.make(r) is not None]

    def draw(self, form: Form) -> Args:
        assert isinstance(form.recipe, Recipe)
        return Samples(self.op, secrets.randbits(40), self.device).build(form.recipe).args

    def sums(self, form: Form, args: Args) -> Reduction:
        return reduction(self.op.spec, self.op.bind(args).env)


def _spread(items: list[Any], count: int) -> list[Any]:
    """At most ``count`` of them, spread over the whole."""
    step = max(1.0, len(items) / count)
    return [items[int(i * step)] for i in range(min(count, len(items)))]


class FunctionProblem(Problem):
    """A function or a module with a maker of inputs, whose shapes and values are varied."""

    def __init__(
        self, name: str, call: Callable[..., Any], inputs: Callable[[], Any], tolerance: float, vary_shapes: bool
    ) -> None:
        wide = copy.deepcopy(call).double() if isinstance(call, torch.nn.Module) else call
        super().__init__(name, call, wide, tolerance)
        self.inputs, self.vary_shapes, self.compares_nesting = inputs, vary_shapes, True

    def renew(self, state: Mapping[str, Tensor]) -> bool:
        modules = [m for m in (self.call, self.wide) if isinstance(m, torch.nn.Module)]
        for module in modules:
            module.load_state_dict(dict(state))
        return bool(modules)

    def _made(self) -> Args:
        torch.manual_seed(secrets.randbits(62))
        made = self.inputs()
        return tuple(made) if isinstance(made, (list, tuple)) else (made,)

    @cached_property
    def first(self) -> Args:
        """One draw, on which the reference is seen to run. SL615 or SL616."""
        try:
            made = self._made()
        except Exception as e:
            raise error("SL615", where=self.name, got=last_line(e), expected="a list of arguments") from e
        if not tensors(made):
            raise error("SL615", where=self.name, got="no tensor among the inputs", expected="a list with tensors")
        began = time.perf_counter()
        try:
            self.call(*tree_map(lambda t: t.detach().clone(), made))
        except Exception as e:
            raise error("SL616", where=self.name, got=last_line(e), expected="a result for its own inputs") from e
        self.takes = time.perf_counter() - began
        self._look_for_constants(tensors(made), tensors(self._made()))
        return made

    def _look_for_constants(self, first: list[Tensor], second: list[Tensor]) -> None:
        """Who knows an argument beforehand may have computed with it beforehand."""
        if [t.shape for t in first] != [t.shape for t in second] or any(t.is_meta for t in second):
            return
        alike = [i for i, (a, b) in enumerate(zip(first, second, strict=True)) if not bitwise([a], [b])]
        self.constant = len(alike) == len(first) or any(_floating(first[i]) and first[i].numel() > 1 for i in alike)
        self.always = [i for i in alike if not _floating(first[i])]

    def forms(self, numbers: Sequence[float] = (), most: int = 14) -> list[Form]:
        def runs(form: Form) -> bool:
            if time.monotonic() > self.until:
                self.hurried = True
                return False
            with torch.no_grad():
                try:
                    outs = _tensors_of(self.call(*self.draw(form)))
                except Exception:
                    return False
            shares = [float(torch.isfinite(o).float().mean()) for o in outs if o.is_floating_point() and o.numel()]
            return min(shares, default=1.0) == 1.0 if form.whole else max(shares, default=1.0) > 0.5

        return forms_of(self.first, runs, most=most if self.vary_shapes else 0, constant=self.constant, numbers=numbers)

    def draw(self, form: Form) -> Args:
        return vary(self._made(), form, secrets.randbits(62))

    def sums(self, form: Form, args: Args) -> Reduction:
        key = str(form.shapes)
        if key not in self.terms:
            with torch.no_grad():
                outs = _tensors_of(self.call(*tree_map(lambda t: t.detach().clone(), args)))
            size = max(1, max((o.numel() for o in outs), default=1))
            inputs = max((t.numel() for t in tensors(args)), default=1)
            self.terms[key] = max(
                1,
                inputs // max(1, min((o.numel() for o in outs if o.numel()), default=1)),
                self.flops(args) // (2 * size),
            )
        return Reduction(self.terms[key])
