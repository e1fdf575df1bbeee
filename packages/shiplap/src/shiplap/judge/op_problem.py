"""The task of implementing a declared op. Functions and modules of torch are judged without this module."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from shiplap.dispatch import Op
from shiplap.judge.problem import Args, JudgeProblem
from shiplap.judge.shapes import SECRET_RANDOM
from shiplap.judge.variants import InputForm
from shiplap.sampling.case import SampleCase
from shiplap.sampling.compare import Reduction, derive_reduction
from shiplap.sampling.recipe import SampleRecipe
from shiplap.sampling.samples import Samples
from shiplap.sampling.sizes import free_dims

MAX_DRAWN_SIZE = 300  # the largest random size of a declared op


class OpProblem(JudgeProblem):
    """The problem of implementing a declared op. The expected results are those of the op's reference, and the inputs
    are samples like those of an audit.
    """

    def __init__(self, op: Op, sizes: Sequence[dict[str, Any]], device: str) -> None:
        """Make the problem for ``op`` on ``device``. Each of ``sizes`` maps dims of the declaration to a size, and the
        op is timed at these. If there are none, the two largest samples of the audit are timed.
        """

        def body(*args: Any) -> Any:
            """Return the result of the op's reference for ``args``, the arguments in the order of the op's schema."""
            positional, named = op.spec.split(args)
            return op.reference(*positional, **named)

        super().__init__(op.spec.name, body, body, op.spec.tolerated)
        self.op, self.asked, self.device = op, sizes, device

    def forms(self, numbers: Sequence[float] = (), most: int = 14) -> list[InputForm]:
        """Return the forms of inputs (descriptions of samples) for the op, without repetitions.

        They are samples of every kind that the audit draws, samples of secret sizes, and samples of the timed sizes.
        ``numbers`` are constants in the candidate's code, which are tried as sizes. ``most`` limits the number of
        samples with these sizes.
        """
        samples = Samples(self.op, secrets.randbits(40), self.device)
        grown = list(samples.wide()) or list(samples.grown(2))
        large = [samples.base.but(sizes=s) for s in self.asked]
        large = large or [c.recipe for c in sorted(grown, key=lambda c: c.numel)[-2:]]
        series: dict[Callable[[], Iterable[SampleCase]], int] = {
            samples.values: 10,
            samples.optionals: 6,
            samples.scalars: 8,
            samples.dtypes: 4,
            samples.layouts: 8,
            samples.special: 12,
            samples.edges: 12,
            samples.tiles: 22,
        }
        # Each series has its share, so that none of the properties that they vary is left out.
        recipes = [c.recipe for make, most in series.items() for c in _pick_evenly(list(make()), most)]
        recipes += self._secret_recipes(samples, numbers, most)
        unique = {str(r): r for r in (*recipes, *large)}
        marked = {str(r) for r in large}
        return [InputForm(label, timed=label in marked, recipe=recipe) for label, recipe in unique.items()]

    def _secret_recipes(self, samples: Samples, numbers: Sequence[float], most: int) -> list[SampleRecipe]:
        """Return recipes in which one dim has another size. A recipe is a description from which ``samples`` draws
        arguments.

        Each dim gets two random sizes. At most ``most`` further recipes have a size from ``numbers``, the constants in
        the candidate's code. Recipes that break a precondition of the op are left out.
        """
        names = [
            n for n, kind in free_dims(self.op.spec).items() if kind != "variadic" and n in dict(samples.base.sizes)
        ]
        listed = [(n, v) for n in names for v in {int(v) for v in numbers if 0 < v <= MAX_DRAWN_SIZE and v == int(v)}]
        pairs = SECRET_RANDOM.sample(listed, min(most, len(listed)))
        # Two random sizes for each dim: no candidate can special-case them.
        pairs += [(n, 1 + SECRET_RANDOM.randrange(MAX_DRAWN_SIZE)) for n in names * 2]
        recipes = [samples.base.but(sizes={n: v}) for n, v in pairs]
        # A size may break a precondition of the op.
        return [r for r in recipes if samples.make(r) is not None]

    def draw(self, form: InputForm) -> Args:
        """Return the arguments of one call, drawn from the recipe of ``form`` with a secret seed."""
        assert isinstance(form.recipe, SampleRecipe)
        return Samples(self.op, secrets.randbits(40), self.device).build(form.recipe).args

    def sums(self, form: InputForm, args: Args) -> Reduction:
        """Return how many terms are summed for one element of the results, and in which precision. Both follow from the
        declared dims of the op's arguments and results.
        """
        return derive_reduction(self.op.spec, self.op.bind(args).env)


def _pick_evenly(items: list[Any], count: int) -> list[Any]:
    """Return ``items``, or ``count`` of them at even distances in the list if there are more."""
    step = max(1.0, len(items) / count)
    return [items[int(i * step)] for i in range(min(count, len(items)))]
