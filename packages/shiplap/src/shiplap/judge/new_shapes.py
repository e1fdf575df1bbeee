"""The shapes that a candidate is called with if it takes long for each new one, as one that compiles does."""

from __future__ import annotations

from collections.abc import Sequence

from shiplap.judge.shapes import Shapes
from shiplap.judge.variants import InputForm
from shiplap.sandbox.source_scan import compared_numbers

SHAPES_SHARE = 0.1  # of the time of the judgement, for the first calls on shapes that are new to the candidate
FEWEST_SHAPES, FEWEST_WITH_NEAR = 2, 3  # shapes that are compared in any case: of any kind, and with a near one
SLOW_SHARE = 0.9 * SHAPES_SHARE  # of the time, for a first call after which other timed shapes come last


class NewShapes:
    """The shapes that were compared so far, and the time that a candidate took for its first calls on them.

    Attributes:
        left_out: the labels of the inputs that were left out, since the candidate would have taken too long.
    """

    def __init__(self, file: str, seconds: float) -> None:
        """Start without a shape, for the candidate in ``file`` and a judgement of ``seconds``."""
        self._file, self._limit = file, SHAPES_SHARE * seconds
        self._seen: set[Shapes] = set()
        self._spent, self._longest = 0.0, 0.0
        self._decisive: set[int] | None = None
        self._slow, self._deferred = SLOW_SHARE * seconds, set[str]()
        self.left_out: set[str] = set()

    def leaves_out(self, form: InputForm) -> bool:
        """Return whether ``form`` is left out, and record its label if so.

        Its shapes must be new, two others must be compared, and its first call would probably exceed the time. A third
        shape that differs from the others in one dim of one tensor is compared all the same, since compiled code often
        serves it, and so is each shape with a size that the candidate's source compares, or with one more.
        """
        if self.is_known(form) or len(self._seen) < FEWEST_SHAPES or self._spent + self._longest <= self._limit:
            return False
        places = self._new_places(form.shapes)
        if len(places) == 1 and len(self._seen) < FEWEST_WITH_NEAR:
            return False
        if self._decisive is None:
            self._decisive = {n + more for n in compared_numbers(self._file) for more in (0, 1)}
        if not self._decisive.isdisjoint(size for _, _, size in places):
            return False
        self.left_out.add(form.label)
        return True

    def defers(self, form: InputForm, first_call: float) -> bool:
        """Return whether ``form``, of another shape that will be timed, comes behind all others, since the candidate
        took ``first_call`` seconds for its own shape. Smaller shapes have all kinds of values and layouts.
        """
        if first_call < self._slow or not form.timed or self.is_known(form) or form.label in self._deferred:
            return False
        self._deferred.add(form.label)
        return bool(self._seen)

    def is_known(self, form: InputForm) -> bool:
        """Return whether the candidate was compared on the shapes of ``form``."""
        return form.shapes in self._seen

    def note(self, form: InputForm, seconds: float, *, compared: bool) -> None:
        """Record that the candidate took ``seconds`` for inputs of ``form``, and whether they were compared. The first
        shape of all, for which more than its own code is loaded, uses up no time.
        """
        if self._seen and not self.is_known(form):
            self._spent, self._longest = self._spent + seconds, max(self._longest, seconds)
        if compared:
            self._seen.add(form.shapes)

    def _new_places(self, shapes: Shapes) -> set[tuple[int, int, int]]:
        """Return the number of the tensor, the dim and the size of each size in ``shapes`` that none of the compared
        shapes has there.
        """
        return _placed_sizes(shapes).difference(*map(_placed_sizes, self._seen))

    def describe(self, forms: Sequence[InputForm]) -> list[str]:
        """Return what a verdict says about those of ``forms`` that were left out, if there are any."""
        count = sum(form.label in self.left_out for form in forms)
        took = f"the candidate took {self._spent:.1f} s for {len(self._seen) - 1} others"
        return [f"{count} inputs of further shapes: {took}"] if count else []


def _placed_sizes(shapes: Shapes) -> set[tuple[int, int, int]]:
    """Return the number of the tensor, the dim and the size of each size in ``shapes``."""
    return {(at, dim, size) for at, shape in enumerate(shapes) for dim, size in enumerate(shape)}
