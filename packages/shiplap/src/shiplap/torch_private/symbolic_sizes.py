"""Symbolic sizes: of fakes, of patterns in terms of a graph, and of exported programs called with numbers."""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from itertools import islice, product
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode


def is_size(held: Any) -> bool:
    """Return whether a fake value is a size. A size is an int or an integer symbol, and not a bool."""
    return isinstance(held, (int, torch.SymInt)) and not isinstance(held, bool)


def is_number(held: Any) -> bool:
    """Return whether a fake value is a size, or a symbolic float that was computed from sizes, as in ``x.shape[-1] **
    -0.5``.
    """
    return is_size(held) or isinstance(held, torch.SymFloat)


def guards_of_program(program: torch.export.ExportedProgram) -> list[str]:
    """Return the conditions on its inputs that an exported program checks before it runs, as Python expressions of
    ``L``, a dict of the inputs by name. Return an empty list on a torch that does not keep them.
    """
    return list(getattr(program, "_guards_code", None) or [])


Bounds = tuple[int, int | None]  # the least and the greatest size, or None for no greatest one


def size_bounds(program: torch.export.ExportedProgram) -> dict[str, tuple[Bounds, Bounds]]:
    """Return the bounds of each input size that varies in an exported program, by a name such as ``x.shape[0]``: those
    for which the program was exported, and those that are left by the guards of compilations since.

    A declared bound below 2 counts as 2. Torch exports for sizes from 2 on, whatever least size was declared.
    """
    from torch.utils._sympy.numbers import int_oo
    from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy

    inputs = {node.name: node.meta.get("val") for node in program.graph.nodes if node.op == "placeholder"}
    sizes: dict[str, Any] = {
        f"{name}.shape[{dim}]": n
        for name, held in inputs.items()
        if isinstance(held, torch.Tensor)
        for dim, n in enumerate(held.shape)
        if not isinstance(n, int)
    }
    from_two = ValueRanges(2, int_oo)
    ranges = {s: r for s, r in program.range_constraints.items() if s.is_symbol and r.is_int}  # others are of floats
    exported = {s: r & from_two for s, r in ranges.items() if r.upper >= 2}
    bounds = {}
    for name, size in sizes.items():
        node = size.node
        # A guard may have replaced the symbol that the program was exported with, such as by a number.
        declared = next((e for e in (node._expr, node.expr) if e.free_symbols <= exported.keys()), None)
        if declared is not None:
            bounds[name] = _bounds(bound_sympy(declared, exported)), _bounds(node.shape_env.bound_sympy(node.expr))
    return bounds


def _bounds(found: Any) -> Bounds:
    """Return a range of torch's as integers. Torch writes infinity and the greatest integer for no upper bound."""
    return int(found.lower), None if found.upper >= sys.maxsize - 1 else int(found.upper)


def size_in_call(size: int | torch.SymInt) -> int | None:
    """Return the value of a size in the call for which a graph is made. Return None for a size that depends on data."""
    if isinstance(size, int):
        return size
    known = size.node.hint
    return known if isinstance(known, int) else None


def new_size() -> torch.SymInt:
    """Return a new data-dependent size of at least 0, for use in a fake implementation, which computes the shapes of
    results.

    Under ``torch.compile``, ``ctx.new_dynamic_size`` breaks the graph unless ``fullgraph=True`` or
    ``capture_dynamic_output_shape_ops`` is set. A size with a proven bound needs no such caution. The graph then breaks
    only at a later line that needs the unknown value. Torch's own ops for device meshes do the same.
    """
    ctx = torch.library.get_ctx()
    env = getattr(ctx, "_shape_env", None)
    if env is None or not hasattr(env, "create_unbacked_symint"):
        return ctx.new_dynamic_size()
    from torch.fx.experimental.symbolic_shapes import _constrain_range_for_size

    size: torch.SymInt = env.create_unbacked_symint()
    _constrain_range_for_size(size, min=0)
    return size


def in_trace() -> bool:
    """Return whether fake implementations run for Dynamo or AOTAutograd, which trace the calls into a graph."""
    return torch._guards.TracingContext.try_get() is not None


def in_graph(number: int) -> int | torch.SymInt:
    """Return a new size symbol in place of ``number`` if a graph is traced and the number is not negative. Otherwise
    return ``number``. This is for a fake implementation whose only result is an integer.

    Dynamo stops at an op that returns an integer, and accepts a symbol. The dispatcher turns a symbol of a known value
    back into an integer. The value of this symbol is therefore left open.
    """
    known = in_trace() and getattr(torch.library.get_ctx(), "_shape_env", None) is not None
    return new_size() if known and number >= 0 else number


def assert_in_graph(condition: torch.Tensor, message: str) -> None:
    """Make a compiled graph raise ``RuntimeError`` with ``message`` if it runs with a false ``condition``. On a GPU the
    error shows later.
    """
    torch._assert_async(condition, message)


def check_condition(condition: bool | torch.SymBool, message: Callable[[], str]) -> None:
    """Raise ``RuntimeError`` if the condition is false. A symbolic condition becomes a guard or an assertion of the
    graph, by ``torch._check``.
    """
    torch_check: Any = torch._check
    torch_check(condition, message)


def not_one(size: int | torch.SymInt) -> bool:
    """Return whether a size is not 1. A data-dependent size is assumed not to be 1, as in torch's broadcasting."""
    from torch.fx.experimental.symbolic_shapes import guard_or_true

    return bool(guard_or_true(size != 1))


def unknown_size_error() -> type[Exception]:
    """Return the exception class that a trace raises if it needs a number that depends on data. Graphs break there."""
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    return GuardOnDataDependentSymNode


class SizeBindings:
    """A mapping from symbols in the sizes of a rewrite's pattern graph to sizes of the user's graph."""

    def __init__(self, known: dict[Any, Any] | None = None) -> None:
        """Start with the sizes in ``known``, which maps symbols of the pattern to sizes of the graph."""
        self._known: dict[Any, Any] = dict(known or {})

    def bind(self, pattern: Any, actual: Any) -> bool:
        """Map ``pattern``, a size in a rewrite's pattern graph, to ``actual``, the corresponding size of the user's
        graph. If ``pattern`` is no single symbol or was mapped before, the mapping stays as it is.

        Return whether ``pattern`` equals ``actual`` under the mapping.
        """
        expr, value = _size_to_sympy(pattern), _size_to_sympy(actual)
        if expr.is_Symbol and expr not in self._known:
            self._known[expr] = value
        return self.same(pattern, actual)

    def same(self, pattern: Any, actual: Any) -> bool:
        """Return whether ``pattern``, a size in a rewrite's pattern graph, equals the size ``actual`` of the user's
        graph.

        The symbols of ``pattern`` are first replaced by the sizes to which they are mapped. Return False if a symbol is
        not mapped.
        """
        expr = _size_to_sympy(pattern)
        if not expr.free_symbols <= self._known.keys():
            return False
        mine, theirs = expr.xreplace(self._known), _size_to_sympy(actual)
        if mine.is_Float or theirs.is_Float:  # computed from sizes, in an order of its own
            return bool(mine.is_number and theirs.is_number and math.isclose(mine, theirs, rel_tol=1e-12))
        return bool(mine - theirs == 0)

    def format_size(self, pattern: Any) -> str:
        """Return ``pattern``, a size of a rewrite's pattern graph, as a string. Symbols are replaced by the numbers or
        symbols of the user's graph to which they are mapped.
        """
        return str(_size_to_sympy(pattern).xreplace(self._known))


def _size_to_sympy(size: Any) -> Any:
    """Return a number or symbolic size as a sympy number or expression."""
    import sympy

    if isinstance(size, float):
        return sympy.Float(size)
    return sympy.Integer(int(size)) if isinstance(size, int) else size.node.expr


def condition_holds(condition: Any, *, may_guard: bool) -> bool:
    """Return whether a condition on sizes holds for all sizes. If ``may_guard`` is true, return whether it holds in the
    current call, and add a guard for that to the graph.
    """
    if isinstance(condition, torch.SymBool) and not may_guard:
        from torch.fx.experimental.symbolic_shapes import statically_known_true

        return statically_known_true(condition)
    return bool(condition)


def sizes_equal(a: Any, b: Any, *, may_guard: bool) -> bool:
    """Return whether two sizes, or two tuples of sizes, are equal in every call.

    If ``may_guard`` is true, two symbols that are equal only in the current call count as equal, too. A guard for their
    equality is added to the graph. Sizes that are different in the current call add no guard.
    """
    if isinstance(a, tuple) or isinstance(b, tuple):
        pairs = zip(a, b, strict=False) if isinstance(a, tuple) and isinstance(b, tuple) and len(a) == len(b) else None
        return pairs is not None and all(sizes_equal(x, y, may_guard=may_guard) for x, y in pairs)
    if condition_holds(a == b, may_guard=False):
        return True
    # Compared as numbers first, since a comparison of unequal symbols would add a guard, too.
    here = [n.node.hint if isinstance(n, torch.SymInt) else n for n in (a, b)]
    return may_guard and None not in here and here[0] == here[1] and condition_holds(a == b, may_guard=True)


def data_dependent() -> type[Exception]:
    """Return the exception class that torch raises if a condition depends on a data-dependent size."""
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    return GuardOnDataDependentSymNode


@contextmanager
def forgotten_sizes(program: torch.export.ExportedProgram) -> Iterator[None]:
    """Return a context in which ``program`` may be traced although its trace makes data-dependent sizes that no result
    binds.

    Without the context, torch would report such a size as an error of the next trace of the program.
    """
    modes = [getattr(node.meta.get("val"), "fake_mode", None) for node in program.graph.nodes]
    environment = next((mode.shape_env for mode in modes if mode is not None), None)
    pending = [] if environment is None else environment.pending_fresh_unbacked_symbols
    before = list(pending)
    try:
        yield
    finally:
        pending[:] = before


# --- calls of an exported program with sizes as numbers, for compilers that specialise on sizes -----------------------


ALIGNED = 16  # the multiple for which compilers of kernels specialise
LARGE = 1 << 20  # a size for a program that takes any
MOST = 16  # calls of one scale


def concrete_calls(args: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
    """Yield copies of ``args`` with numbers in place of symbolic sizes and meta tensors in place of fake ones.

    The first copy has the sizes of the traced call. The next ones have sizes near those, and then near the ends of the
    ranges of the symbols, since other kernels may compute such calls. In up to 16 combinations each symbol is a
    multiple of 16 or an odd number. In the last copies, all symbols together or one of them alone lie at a power of two
    or just below it.
    """
    sizes = list(_symbolic_sizes(args))
    symbols = sorted({s for size in sizes for s in size.node.expr.free_symbols}, key=str)
    known = {size.node.expr: size.node.hint for size in sizes if size.node.expr in symbols}
    hints = [known.get(symbol) or ALIGNED for symbol in symbols]
    ranges = {} if not sizes else sizes[0].node.shape_env.var_to_range
    ends = [int(min(ranges[symbol].upper, LARGE)) if symbol in ranges else LARGE for symbol in symbols]
    # Triton compiles a form of its own for multiples of 16, so both kinds of sizes are needed.
    scales = [product(*[(-(-n // ALIGNED) * ALIGNED, max(3, n | 1)) for n in near]) for near in (hints, ends)]
    near = [tuple(hints), *islice(scales[0], MOST - 1), *islice(scales[1], MOST)]
    # Kernels have tiles whose width is a size rounded up to a power of two, and each width is a form of its own.
    powers = [1 << k for k in range(1, max(ends, default=0).bit_length())]
    for values in dict.fromkeys([*near, *_sizes_at(hints, ends, [n for p in powers for n in (p, p - 1) if n > 1])]):
        yield tuple([_with_concrete_sizes(a, dict(zip(symbols, values, strict=True))) for a in args])


def _sizes_at(hints: Sequence[int], ends: Sequence[int], numbers: Iterable[int]) -> Iterator[tuple[int, ...]]:
    """Yield one tuple of sizes after another for each of ``numbers``. In the first one, all symbols have the number as
    their size, and in each further one a single symbol has it. A symbol that does not have it, or whose largest size in
    ``ends`` is smaller, has its size in ``hints``.
    """
    for n in numbers:
        at = [n if n <= end else hint for hint, end in zip(hints, ends, strict=True)]
        yield tuple(at)
        for k in range(len(hints) if len(hints) > 1 else 0):
            yield (*hints[:k], at[k], *hints[k + 1 :])


def distinct_sizes(args: Sequence[Any], numbers: Sequence[int]) -> tuple[Any, ...]:
    """Return ``args`` with a different number in place of each symbol and with meta tensors. A number in a result then
    identifies its symbol.

    Raise ``ValueError`` if there are more symbols than ``numbers``.
    """
    symbols = sorted({s for size in _symbolic_sizes(args) for s in size.node.expr.free_symbols}, key=str)
    if len(symbols) > len(numbers):
        raise ValueError(f"{len(symbols)} sizes vary, and {len(numbers)} can")
    values = dict(zip(symbols, numbers, strict=False))
    return tuple([_with_concrete_sizes(a, values) for a in args])


def _symbolic_sizes(args: Sequence[Any]) -> Iterator[Any]:
    """Yield the symbolic sizes among the arguments, and among the sizes and strides of tensors, also inside lists."""
    for arg in args:
        if isinstance(arg, torch.SymInt):
            yield arg
        elif isinstance(arg, torch.Tensor):
            yield from _symbolic_sizes([*arg.shape, *arg.stride()])
        elif isinstance(arg, (list, tuple)):
            yield from _symbolic_sizes(arg)


def _with_concrete_sizes(arg: Any, values: dict[Any, int]) -> Any:
    """Return ``arg`` with each symbol replaced by its number in ``values``. A tensor becomes a meta tensor of the
    resulting sizes and strides.
    """
    if isinstance(arg, torch.SymInt):
        return int(arg.node.expr.xreplace(values))
    if isinstance(arg, torch.Tensor):
        sizes, strides = ([_with_concrete_sizes(n, values) for n in each] for each in (arg.shape, arg.stride()))
        return torch.empty_strided(sizes, strides, dtype=arg.dtype, device="meta")
    if isinstance(arg, (list, tuple)):
        return type(arg)([_with_concrete_sizes(each, values) for each in arg])
    return arg


def computed_sizes_unguarded() -> AbstractContextManager[None]:
    """Return a context in which ``torch.export`` and Inductor add no guard that a computed size is not 1.

    Torch adds such a guard to find out whether a result is contiguous. The guard may contradict the declared range of
    an input size, from 2 on. It does so, for example, if a result has one element for every 64 rows of the input.
    Inductor's guards make a package refuse sizes at both ends of the range.
    """
    from torch.fx.experimental import _config

    context: AbstractContextManager[None] = _config.patch(backed_size_oblivious=True)  # type: ignore[attr-defined]
    return context


@contextmanager
def sizes_from_zero() -> Iterator[None]:
    """Return a context in which ``torch.export`` assumes that a varying size is 0 or more. It otherwise assumes 2 or
    more.
    """
    from torch.fx.experimental import symbolic_shapes
    from torch.utils._sympy.symbol import SymT

    make: Any = symbolic_shapes.make_symbol  # type: ignore[attr-defined]

    def make_from_zero(kind: Any, number: int, **facts: Any) -> Any:
        """Return a new symbol with the number ``number``. If its ``kind`` is that of sizes, its assumptions ``facts``
        are changed so that it may be 0.
        """
        # A positive symbol is not 0 for sympy, whatever its range.
        if kind is SymT.SIZE and facts.get("positive"):
            facts = {**facts, "positive": None, "nonnegative": True}
        return make(kind, number, **facts)

    with computed_sizes_unguarded(), mock.patch.object(symbolic_shapes, "make_symbol", make_from_zero):
        yield


# --- conditions on data while a function is traced --------------------------------------------------------------------


class DecideConditions(TorchFunctionMode):
    """A mode that decides conditions in a traced function. It returns prepared answers when Python needs the truth
    value of a tensor, or of a condition on sizes.

    Other threads get torch's own answers. One thread at a time may decide.

    Attributes:
        asked: the conditions so far, tensors or symbolic booleans.
        guessed: whether Python has read a number of a tensor, which was ``number``.
    """

    def __init__(self, answers: Sequence[bool], most: int, number: int) -> None:
        """Make a mode that answers data-dependent conditions with ``answers`` in order.

        The mode raises an error after ``most`` conditions. Whenever Python reads a number from a tensor, it gets
        ``number``.
        """
        super().__init__()
        self.asked: list[Any] = []
        self.guessed = False
        self._answers, self._most, self._number = answers, most, number
        self._patches = ExitStack()

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        """Return the answer of this mode if ``func`` converts a tensor to a bool or a number. Otherwise call the torch
        function ``func``.
        """
        name = getattr(func, "__name__", "")
        if name == "__bool__":
            return self._answer(args[0])
        if name in ("__int__", "__index__", "__float__"):
            self.guessed = True
            return float(self._number) if name == "__float__" else self._number
        return func(*args, **(kwargs or {}))

    def __enter__(self) -> DecideConditions:
        """Enter the mode, and replace the truth of symbolic conditions by its answers in this thread."""
        usual: Any = torch.SymBool.__bool__
        thread = threading.get_ident()

        def decide(held: Any) -> bool:
            """Return the truth value of a symbolic condition that Python needs.

            If torch's own code or another thread needs it, return torch's usual value. Otherwise return the answer of
            this mode.
            """
            condition = held != 0 if isinstance(held, torch.SymInt) else held
            # torch's own questions about sizes, such as those of broadcasting, stay with torch.
            caller = sys._getframe(1).f_globals.get("__name__", "")
            own = caller.partition(".")[0] in ("torch", "sympy") or threading.get_ident() != thread
            return bool(usual(condition)) if own else self._answer(condition)

        for kind in (torch.SymBool, torch.SymInt):
            self._patches.enter_context(mock.patch.object(kind, "__bool__", decide))
        enter: Any = super().__enter__
        enter()
        return self

    def __exit__(self, *raised: Any) -> None:
        """Leave the mode and restore the truth of symbolic conditions."""
        leave: Any = super().__exit__
        leave(*raised)
        self._patches.close()

    def _answer(self, condition: Any) -> bool:
        """Return the truth value of a condition if it is the same for all sizes. Otherwise record the condition and
        return the next of the answers that the mode was given.

        Return False if no answer is left. Raise ``RuntimeError`` after too many conditions.
        """
        if isinstance(condition, torch.SymBool) and (known := _statically_known(condition)) is not None:
            return known
        number = len(self.asked)
        if number >= self._most:
            raise RuntimeError(f"a loop or more than {self._most} conditions that depend on the data")
        self.asked.append(condition)
        return self._answers[number] if number < len(self._answers) else False


def _statically_known(condition: torch.SymBool) -> bool | None:
    """Return the truth of a condition that holds for all sizes or for none, and None for any other."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    if statically_known_true(condition):
        return True
    return False if statically_known_true(torch.sym_not(condition)) else None


def number_as_tensor(number: int | torch.SymInt) -> torch.Tensor:
    """Return ``number`` as an int64 zero-dimensional tensor. In a graph, a symbolic number becomes a tensor of its
    symbol.
    """
    make: Any = torch.full  # documented for symbols, but typed for numbers only
    full: torch.Tensor = make((), number, dtype=torch.int64)
    return full


def number_of_tensor(tensor: torch.Tensor) -> Any:
    """Return the number that a zero-dimensional tensor holds. In a graph it is a symbol, and an integer symbol is
    assumed to be at least 0.
    """
    number: Any = tensor.item()
    if isinstance(number, torch.SymInt):
        torch_check: Any = torch._check
        torch_check(number >= 0)
    return number


def dtype_of_number(held: Any) -> torch.dtype | None:
    """Return the dtype of the tensor that stands for a symbolic number, bool or float in a model without torch. Return
    None for another value.
    """
    kinds = {torch.SymInt: torch.int64, torch.SymFloat: torch.float64, torch.SymBool: torch.bool}
    return next((dtype for kind, dtype in kinds.items() if isinstance(held, kind)), None)
