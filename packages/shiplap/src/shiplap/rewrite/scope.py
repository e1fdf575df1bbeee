"""``rewrites``, the set of rewrites that are in force for a block or a compilation, with their outcomes.

Nothing remains in force after the block or the compilation.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from contextvars import ContextVar, Token
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from torch.fx import Graph

from shiplap.errors import error
from shiplap.rewrite.base import Rewrite
from shiplap.rewrite.graph import remove_dead_calls, sort_graph
from shiplap.rewrite.match import Level, Match, NearMiss, Outcome
from shiplap.rewrite.program import placing
from shiplap.rewrite.prove import require_proof

if TYPE_CHECKING:
    from shiplap.torch_private.inductor_passes import InductorPass

_active_scopes: ContextVar[tuple[Rewrites, ...]] = ContextVar("shiplap_rewrites", default=())


class _EnteredBlocks(threading.local):
    """The ``with`` blocks of one :class:`Rewrites` object that a thread has entered and not left, the innermost last.
    Each thread has a list of its own, since threads may share the object.
    """

    def __init__(self) -> None:
        """Start without entered blocks. This runs once in each thread that uses the :class:`Rewrites` object."""
        self.blocks: list[tuple[Token[tuple[Rewrites, ...]], ExitStack]] = []


class Rewrites:
    """A set of rewrites, to be switched on for a ``with`` block or for one ``torch.compile``. Each rewrite is proven
    before it changes a graph.

    Attributes:
        rewrites: the rewrites in the order in which they are tried at each level of compilation.
        labels: the name of each rewrite in ``outcomes``. If a name repeats, the second rewrite is called ``name_2``, so
            any two sets may be joined.
        outcomes: the matches and near misses in the graphs compiled so far. Code that comes from a cache is not
            compiled and adds none.
        graphs: the number of graphs that the rewrites have been applied to, at all levels.
    """

    def __init__(self, *rewrites: Rewrite) -> None:
        """Collect the rewrites without duplicates, and prove those that do not wait for their first match. Raise
        ``SL802`` for an object that is no rewrite. Raise ``SL801`` for a rewrite that changes results.

        Rewrites are duplicates if their names, classes and digests are equal.
        """
        if strange := [r for r in rewrites if not isinstance(r, Rewrite)]:
            fix = "write sl.rewrites(*several) for a list, or sl.rewrite(pattern, replacement) for functions"
            raise error(
                "SL802",
                where="sl.rewrites(...)",
                got=repr(strange[0])[:80],
                expected="what sl.rewrite returns",
                fix=fix,
            )
        # Sets share members: the same rewrite, or one that does the same under the same name, is used once.
        once: dict[tuple[Any, ...], Rewrite] = {}
        for given in rewrites:
            once.setdefault((given.name, type(given), given.digest), given)
        rewrites = tuple(once.values())
        # Two rewrites of one name stay apart in the outcomes.
        self.labels = _make_labels(rewrites)
        self.rewrites = tuple(r if r.prove_on_first_match else require_proof(r) for r in rewrites)
        self.outcomes: list[Outcome] = []
        self.graphs = 0
        self._entered = _EnteredBlocks()

    @property
    def levels(self) -> set[Level]:
        """The stages of compilation at which one of the rewrites runs, such as ``"pre-grad"``."""
        return {r.level for r in self.rewrites}

    @property
    def matches(self) -> list[Match]:
        """The replacements that these rewrites have made in the graphs compiled so far, in the order in which they were
        made.
        """
        return [o for o in self.outcomes if isinstance(o, Match)]

    @property
    def near_misses(self) -> list[NearMiss]:
        """The near misses in the graphs compiled so far, in the order in which they were found. A near miss is a part
        of a graph that a rewrite would have replaced if there were not a single obstacle.
        """
        return [o for o in self.outcomes if isinstance(o, NearMiss)]

    def __iter__(self) -> Iterator[Rewrite]:
        """Return an iterator over the rewrites, in the order in which they are applied."""
        return iter(self.rewrites)

    def __enter__(self) -> Self:
        """Apply the rewrites to compilations inside the ``with`` block in this thread, and return this object."""
        from shiplap.torch_private import inductor_passes

        token, stack = _active_scopes.set((*_active_scopes.get(), self)), ExitStack()
        # The pass looks up the active scopes when a graph is compiled, not when the block is entered.
        stack.enter_context(inductor_passes.install_passes(_pass_of_active_scopes))
        self._entered.blocks.append((token, stack))
        return self

    def __exit__(self, *exception: object) -> None:
        """End the ``with`` block that was entered last. Its rewrites no longer apply to compilations."""
        token, stack = self._entered.blocks.pop()
        stack.close()
        _active_scopes.reset(token)

    def options(self, **options: Any) -> dict[str, Any]:
        """Return ``options`` with compiler passes that apply these rewrites, as a new dict for ``torch.compile(fn,
        options=...)``.

        The rewrites run after the compiler passes that the user configured in ``options`` or in Inductor. Inside the
        ``with`` blocks of other :class:`Rewrites` objects, the rewrites of the blocks come first.
        """
        from shiplap.torch_private import inductor_passes

        made = (inductor_passes.EARLY if "pre-grad" in self.levels else {}) | options
        for level in self.levels:
            place = inductor_passes.PLACES[level]
            # A pass that the user configured keeps running ahead of the rewrites.
            before = options.get(place, inductor_passes.user_pass(level))
            made[place] = _make_pass(level, lambda: (*_active_scopes.get(), self), before)
        return made

    def run(self, level: Level, graph: Graph) -> None:
        """Apply the rewrites of the stage ``level`` to ``graph``, in place. Append their matches and near misses to
        ``outcomes``, and add 1 to ``graphs``.
        """
        for rewrite in self.rewrites:
            if rewrite.level == level and rewrite.may_match(graph):
                label = self.labels[rewrite]
                self.outcomes.extend(
                    replace(o, graph=self.graphs, rewrite=label) for o in _prove_and_apply(rewrite, graph)
                )
        self.graphs += 1

    def identity(self, level: Level) -> str:
        """Return a digest of everything on which the effect of :meth:`run` at the stage ``level`` depends, as 16
        hexadecimal digits. It becomes a part of the compiler's cache key.
        """
        # The order of rewrites is part of the digest, since an earlier one may take the place of a later one.
        parts = [f"{r.name} {r.digest}" for r in self.rewrites if r.level == level]
        return hashlib.sha256("\n".join([_engine_digest(), *parts]).encode()).hexdigest()[:16]


def _prove_and_apply(rewrite: Rewrite, graph: Graph) -> list[Outcome]:
    """Apply ``rewrite`` to ``graph`` in place and return its matches and near misses. A rewrite that was not proven in
    this process is proven before it changes the graph. Raise ``SL801`` if the proof fails.
    """
    if not rewrite.prove_on_first_match:
        return list(require_proof(rewrite).apply(graph))
    token = placing.set(_ProofOnFirstCall(rewrite))
    try:
        return list(rewrite.apply(graph))
    finally:
        placing.reset(token)


class _ProofOnFirstCall:
    """A function that proves the field ``rewrite`` at its first call and does nothing at later calls. ``asked`` states
    whether it was called.

    The proof applies the rewrite and thereby calls this function again, which then does nothing.
    """

    def __init__(self, rewrite: Rewrite) -> None:
        """Set the rewrite, which is not proven yet."""
        self.rewrite, self.asked = rewrite, False

    def __call__(self) -> None:
        """Prove the rewrite at the first call. Raise ``SL801`` if the proof refuses it."""
        if not self.asked:
            self.asked = True
            require_proof(self.rewrite)


def _make_labels(rewrites: tuple[Rewrite, ...]) -> dict[Rewrite, str]:
    """Return a dict from each rewrite to a name for reports. If several rewrites have one name, the names of all but
    the first get the suffix ``_2``, ``_3`` and so on.
    """
    labels: dict[Rewrite, str] = {}
    taken = {r.name for r in rewrites}
    for rewrite in rewrites:
        label, number = rewrite.name, 2
        # A rewrite that is really called name_2 keeps its name.
        while label in labels.values() or (label != rewrite.name and label in taken):
            label, number = f"{rewrite.name}_{number}", number + 1
        labels[rewrite] = label
    return labels


@cache
def _engine_digest() -> str:
    """Return a hexadecimal digest of the source code that finds patterns in graphs and replaces them. It is a part of
    cache keys, since another version of this code may change a graph differently.
    """
    package = Path(__file__).parent
    names = ("graph_nodes", "inductor_passes", "symbolic_sizes")
    private = [package.parent / "torch_private" / f"{name}.py" for name in names]
    files = [*package.glob("*.py"), *private]
    return hashlib.sha256(b"".join(f.read_bytes() for f in sorted(files))).hexdigest()


def rewrites(*rewrites: Rewrite) -> Rewrites:
    """Return a ``Rewrites`` object of ``rewrites``. They are switched on with a ``with`` block, or with
    ``torch.compile`` and the object's ``options()``.

    Each rewrite is proven once in a process. A rewrite that ships with Shiplap is proven when a graph first has a call
    that it may replace, before that graph is changed. Raise ``SL801`` if a proof fails.
    """
    return Rewrites(*rewrites)


def _make_pass(level: Level, scopes: Callable[[], tuple[Rewrites, ...]], before: Any) -> InductorPass:
    """Return a compiler pass for the stage ``level``. It runs the user's own pass ``before``, which may be None. It
    then applies all sets of rewrites that ``scopes()`` returns when the pass runs.
    """

    from shiplap.torch_private import inductor_passes

    def run(graph: Graph) -> None:
        """Sort ``graph``, remove calls that are not used, and apply all sets of rewrites that ``scopes()`` returns. If
        there are none, leave the graph unchanged.
        """
        active = scopes()
        if not active:
            return
        sort_graph(graph)  # torch's own fusions leave that for later
        remove_dead_calls(graph)
        for scope in active:
            scope.run(level, graph)
        # An error of a rewrite shows here, and not as a wrong result.
        graph.lint()

    return inductor_passes.InductorPass(run, lambda: [scope.identity(level) for scope in scopes()], before)


def _pass_of_active_scopes(level: Any, before: Any) -> InductorPass:
    """Return a compiler pass for the stage ``level``. It runs the user's own pass ``before``, which may be None. It
    then applies all sets of rewrites whose ``with`` blocks are active when the pass runs.
    """
    return _make_pass(level, _active_scopes.get, before)
