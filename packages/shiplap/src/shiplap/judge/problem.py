"""The task of a candidate: inputs that are drawn secretly, and the results of the reference on them."""

from __future__ import annotations

import copy
import inspect
import math
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shiplap.cached_property import cached_property
from shiplap.errors import error, error_line
from shiplap.judge.called_names import PRODUCT_NAMES, CalledNames
from shiplap.judge.index_bounds import IndexTrials
from shiplap.judge.result_distances import OwnErrors, clearly_differ
from shiplap.judge.shapes import SECRET_RANDOM
from shiplap.judge.variants import LARGE, InputFacts, InputForm, make_input_forms, vary_arguments
from shiplap.sampling.case import tensors_among, tree_map, widen_tensor, widened_copy
from shiplap.sampling.compare import (
    Difference,
    Reduction,
    agrees_without_float64,
    bitwise_difference,
    float8_to_float32,
    is_finite,
)
from shiplap.sampling.rounding import compare_with_rounding
from shiplap.sandbox.arguments import argument_facts, changed_facts
from shiplap.sandbox.candidate import CandidateError, ExpectedEffects
from shiplap.sandbox.equal_bits import bits_are_equal
from shiplap.sandbox.machine_lack import bounded_memory, is_lack
from shiplap.sandbox.protocol import structure_of, tree_leaves
from shiplap.sandbox.rng_state import rng_positions, seed_torch
from shiplap.sandbox.source_scan import marks_in_source, texts_in_source
from shiplap.sandbox.strided_memory import elements_overlap

# Held from a seed to the last number drawn from it: judgements of a suite share the generators of this process.
SEEDING = threading.RLock()
KEPT_STATE_TOLERANCE = 1e-5  # relative error of a module's state, since the candidate may sum in another order
SPOT_SHARE = 1 / 16  # of the draws are compared with float64 although the error of others is known
SLOW_CALL_S = 0.1  # seconds of a call of the reference, of which drawing and comparing take a multiple

Args = tuple[Any, ...]


@dataclass
class JudgeProblem:
    """What a candidate has to compute. This is the base class of all problems.

    ``call`` is the reference as a function of the arguments. ``wide`` is the reference for arguments in float64.
    ``tolerance`` is a relative error that is accepted in addition to rounding. ``terms`` caches the number of summed
    terms by shapes.
    """

    name: str
    call: Callable[..., Any]
    wide: Callable[..., Any]
    tolerance: float = 0.0
    terms: dict[str, int] = field(default_factory=dict)
    takes: float = 0.0  # seconds of one call of the reference
    queueable: int = 1 << 30  # calls of a batch that a GPU can queue, as far as batches have shown
    constant: bool = False  # whether every draw has the same values
    until: float = math.inf  # the time (``time.monotonic``) after which the search for forms ends
    hurried: bool = False  # whether the search ended early
    untried: int = 0  # forms whose indices took too long to look at
    lacked: list[InputForm] = field(default_factory=list)  # forms for which the machine lacks memory
    always: list[int] = field(default_factory=list)  # integer tensors with the same values in each draw
    flags: list[int] = field(default_factory=list)  # those of them that hold flags
    absent: list[int] = field(default_factory=list)  # arguments that are None in each draw
    texts: list[int] = field(default_factory=list)  # arguments that are the same text in each draw
    accepted: list[str] = field(default_factory=list)  # names of the arguments of the candidate
    runs_products: bool = True  # whether a call of the reference may run matrix products
    compares_nesting: bool = False  # whether a result has to lie in the same containers
    shares_results: bool = False  # whether results of the reference shared memory in a call
    own_errors: OwnErrors = field(default_factory=OwnErrors)  # of the reference in its own precision

    def forms(self, numbers: Sequence[float] = (), most: int = 14) -> list[InputForm]:
        """Return the forms of inputs (shapes and kinds of values) on which the candidate is compared with the
        reference.

        ``numbers`` are constants in the candidate's code, at which it may branch. ``most`` limits the number of shapes
        that are not those of the reference's own inputs.
        """
        raise NotImplementedError

    def draw(self, form: InputForm) -> Args:
        """Return the arguments of one call with inputs of ``form`` (shapes and kind of values), drawn with a new,
        secret seed.
        """
        raise NotImplementedError

    def count_elements(self, form: InputForm) -> int:
        """Return the number of elements of all tensor arguments together, for inputs of the shapes in ``form``."""
        shapes = form.shapes or [t.shape for t in tensors_among(self.draw(form))]
        return sum(map(math.prod, shapes))

    def sums(self, form: InputForm, args: Args) -> Reduction:
        """Return how many terms are summed for one element of the results on ``args``, and in which precision. The
        tolerance for rounding errors grows with that number.
        """
        raise NotImplementedError

    def expect_effects(self, form: InputForm, args: Args) -> ExpectedEffects:
        """Return the effects that a right candidate has on ``args``.

        They are the reference's results, the positions of the tensors that it changes, and a function that compares a
        candidate's effects with these.
        """
        with torch.no_grad():
            # The candidate gets the arguments themselves, which must be unchanged.
            given = tree_map(lambda t: t.detach().clone(), args)
            facts = argument_facts(given)
            # A call that changes sizes or memory of its arguments leaves those of these aliases.
            before, after = tensors_among(args), [t.detach() for t in tensors_among(given)]
            result = self.call(*given)
            altered = changed_facts(facts, argument_facts(given))
            changed = tuple(i for i, pair in enumerate(zip(before, after, strict=True)) if not _same_bits(*pair))
            places = {t.untyped_storage().data_ptr() for t in after if t.numel()}
            outs = _result_tensors(result)
            aliased = any(o.untyped_storage().data_ptr() in places for o in outs if o.numel())
            rooms = [o.untyped_storage().data_ptr() for o in outs if o.numel()]
            # Where the memory layout of the arguments decides, as for ``y, y.flatten()``, a candidate may always share.
            self.shares_results = self.shares_results or len(set(rooms)) < len(rooms)
            loose = self.shares_results or any(elements_overlap(o.shape, o.stride()) for o in outs)
            own = [o.detach().clone() for o in (*outs, *(after[i] for i in changed))]
        sums = self.sums(form, args)

        def recompute() -> list[Tensor]:
            """Run the reference in float64 on ``args`` once more. Return a list of its results, followed by the
            arguments that it changed.
            """
            with torch.no_grad():
                return self._run(self.wide, tree_map(widened_copy, args), changed, copy=False)

        def against(got: Sequence[Tensor]) -> Difference:
            """Return how ``got`` differs from the effects of the reference beyond rounding errors. ``got`` are a
            candidate's results, followed by the arguments that it changed.
            """
            # A few draws are compared with float64 all the same, and nobody knows which.
            is_spot = SECRET_RANDOM.random() < SPOT_SHARE
            likely = [0.0] * len(own) if is_spot else self.own_errors.likely(form.label, own)
            if agrees_without_float64(got, own, sums, wide_sums=True, near="none", errors=likely):
                return Difference()
            with torch.no_grad():
                wide = self._wide_results(args, changed, own)
                self.own_errors.note(form.label, own, wide)
            return compare_with_rounding(list(got), own, wide, sums, recompute, self.tolerance)

        lies = structure_of(result) if self.compares_nesting else ""
        return ExpectedEffects(own, against, changed, aliased, lies, loose, altered)

    def _wide_results(self, args: Args, changed: tuple[int, ...], own: list[Tensor]) -> list[Tensor]:
        """Return the reference's results for ``args`` in float64, followed by those arguments whose positions are in
        ``changed``, after the call.

        If the reference refuses float64 or returns other shapes, return ``own``, its results for the original
        arguments.
        """
        try:
            wide = self._run(self.wide, tree_map(widened_copy, args), changed, copy=False)
        except (RuntimeError, TypeError, ValueError):  # the reference requires a narrower precision
            return own
        fits = len(wide) == len(own) and all(w.shape == o.shape for w, o in zip(wide, own, strict=True))
        return wide if fits else own

    def _run(
        self, call: Callable[..., Any], args: Args, changed: tuple[int, ...], *, copy: bool = True
    ) -> list[Tensor]:
        """Return the results of ``call`` on copies of ``args`` as a list of tensors, followed by those copies whose
        positions are in ``changed``, after the call. If ``copy`` is false, neither arguments nor results are copied,
        since they are used once.
        """
        given = tree_map(lambda t: t.detach().clone(), args) if copy else args
        after = [t.detach() for t in tensors_among(given)]
        outs = [*_result_tensors(call(*given)), *(after[i] for i in changed)]
        return [o.detach().clone() if copy else o.detach() for o in outs]

    def renew(self, state: Mapping[str, Tensor]) -> bool:
        """Load the parameters ``state``, by name, into the reference, and return True. This base class returns False
        and does nothing, since its reference has no parameters.
        """
        return False

    def why_unfit(self, timed: Sequence[InputForm]) -> tuple[str, str] | None:
        """Return why candidates cannot usefully be compared with this reference, as a pair of kind and text, or None if
        they can.

        The kind is ``"values"`` if the results are random. It is ``"results"`` if they are nearly the same for inputs
        of every form in ``timed``.
        """
        args = self.draw(timed[0])
        with SEEDING:
            seed_torch(secrets.randbits(62))
            # Positions of the generators tell random results from nondeterministic ones.
            before = rng_positions()
            first = self.expect_effects(timed[0], args)
            moved = rng_positions() != before
            seed_torch(secrets.randbits(62))
        if moved and bitwise_difference(first.own, self._own_results(args, first)):
            return "values", "the reference draws random numbers, with which nobody can compare any others"
        for form in timed:
            if not all(o.is_floating_point() for o in first.own):
                return None
            expected = first if form is timed[0] else self.expect_effects(form, self.draw(form))
            if clearly_differ(expected.own, self._own_results(self.draw(form), expected)):
                return None
            if expected.against(self._own_results(self.draw(form), expected)).problem:
                return None
        return "results", "the reference has nearly the same results for all inputs: a constant would do"

    def note_products(self, args: Args) -> None:
        """Set ``runs_products`` to whether a call of the reference on ``args`` may compute matrix products.

        The names of the torch functions that it calls decide. If no names are seen, as for a compiled script,
        ``runs_products`` is set to True.
        """
        given = tree_map(lambda t: t.detach().clone(), args)
        with torch.no_grad(), CalledNames() as called:
            self.call(*given)
        parts = PRODUCT_NAMES.split()
        self.runs_products = not called.names or any(part in name for name in called.names for part in parts)

    def _own_results(self, args: Args, like: ExpectedEffects) -> list[Tensor]:
        """Return the reference's results for ``args`` in its own precision, followed by the arguments that it changed.
        ``like`` are the effects of an earlier call, which give the positions of these arguments.
        """
        with torch.no_grad():
            return self._run(self.call, args, like.changed)

    def gives_numbers(self, args: Args) -> bool:
        """Return whether a copy of the reference, with its present parameters, runs on ``args`` without an error and
        with finite results only.
        """
        with torch.no_grad():
            try:
                outs = _result_tensors(copy.deepcopy(self.call)(*tree_map(lambda t: t.detach().clone(), args)))
            except Exception:
                return False
        return all(is_finite(o) for o in outs if o.is_floating_point())

    def kept_after(self, args: Args) -> dict[str, Tensor]:
        """Return the parameters and buffers, such as running means, that one call of the reference on ``args`` changes.
        The result maps their names to their values after the call, which is made on a copy of the reference. It is
        empty for a function.
        """
        if not isinstance(self.call, torch.nn.Module):
            return {}
        before, module = self.call.state_dict(), copy.deepcopy(self.call)
        with torch.no_grad():
            module(*tree_map(lambda t: t.detach().clone(), args))
        after = module.state_dict()
        return {k: v for k, v in after.items() if k in before and bitwise_difference([v], [before[k]])}

    def depends_on_mode(self, args: Args) -> bool:
        """Return whether the reference is a module with other results on ``args`` in evaluation than now. The calls are
        made on copies of it.
        """
        if not isinstance(self.call, torch.nn.Module) or not any(m.training for m in self.call.modules()):
            return False
        if not _names_mode(self.call):
            return False
        outs = []
        for training in (True, False):
            # One copy at a time, since two may not fit into the memory of a GPU.
            module = copy.deepcopy(self.call)
            module = module if training else module.eval()
            with torch.no_grad():
                try:
                    outs.append(_result_tensors(module(*tree_map(lambda t: t.detach().clone(), args))))
                except Exception as e:
                    if is_lack(e):
                        raise
                    return False
            del module
        return bool(bitwise_difference(outs[0], outs[1]))

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Return a context manager in which the modules of the reference are set to evaluation."""
        both = [m for m in (self.call, self.wide) if isinstance(m, torch.nn.Module)]
        modes = [(module, module.training) for whole in both for module in whole.modules()]
        try:
            for whole in both:
                whole.eval()
            yield
        finally:
            for module, mode in modes:
                module.training = mode

    def compare_kept(self, expected: Mapping[str, Tensor], got: Sequence[Tensor]) -> None:
        """Raise ``CandidateError`` if ``got`` differs from ``expected`` beyond rounding errors. ``expected`` maps names
        of the reference's parameters and buffers to their values after a call, and ``got`` has those of the candidate
        in the same order.
        """
        own = [t.detach().clone() for t in expected.values()]
        # There is no run in float64 that would have kept this state.
        wide = [widen_tensor(t) for t in own]
        largest = max(own, key=lambda t: t.numel(), default=None)
        if largest is None:
            return
        # Without a call so far, 1,024 terms are assumed.
        sums = Reduction(max(self.terms.values(), default=1 << 10))
        if problem := compare_with_rounding(
            list(got), own, wide, sums, lambda: wide, max(self.tolerance, KEPT_STATE_TOLERANCE)
        ).problem:
            raise CandidateError("state", f"{', '.join(expected)} after a call: {problem}")

    def flops(self, args: Args) -> int:
        """Return the number of floating-point operations in the matrix products of one call of the reference. It is 0
        if the reference runs none.
        """
        if not self.runs_products:
            return 0
        from torch.utils.flop_counter import FlopCounterMode  # imported late, since it loads Triton and Dynamo

        given = tree_map(lambda t: t.detach().clone(), args)
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            self.call(*given)
        return int(counter.get_total_flops())

    @property
    def parameters(self) -> list[str]:
        """The names of the reference's parameters that require a gradient. The list is empty if the reference is no
        module.
        """
        module = self.call if isinstance(self.call, torch.nn.Module) else None
        return [name for name, p in module.named_parameters() if p.requires_grad] if module is not None else []

    def wide_gradients(self, args: Args, seeds: Sequence[Tensor | None]) -> list[Tensor]:
        """Return the gradients that ``gradients`` computes in float64 for the gradients ``seeds`` of the results.
        Return an empty list if the reference refuses float64.
        """
        try:
            return self.gradients(args, seeds, wide=True)
        except (RuntimeError, TypeError, ValueError):  # the reference requires a narrower precision
            return []

    def gradients(self, args: Args, seeds: Sequence[Tensor | None], *, wide: bool) -> list[Tensor]:
        """Return the reference's gradients. ``seeds`` are those of its floating-point results, or None for an unused
        result. Those of the floating-point arguments come first, then those of the parameters. A
        gradient that autograd does not compute is a tensor of zeros. If ``wide`` is true, all are computed in float64,
        and otherwise in the dtypes of ``args``.
        """
        copied = widened_copy if wide else lambda t: t.detach().clone()
        given = [copied(a) if isinstance(a, Tensor) else a for a in args]
        given = [a.requires_grad_() if _is_floating_tensor(a) else a for a in given]
        call = self.wide if wide else self.call
        floating = [o for o in _result_tensors(call(*given)) if o.is_floating_point()]
        # A result such as a mask has a seed, and no gradient.
        pairs = [(o, s.to(o.dtype)) for o, s in zip(floating, seeds, strict=True) if o.requires_grad and s is not None]
        wanted = [a for a in given if _is_floating_tensor(a)]
        owned = dict(call.named_parameters()) if isinstance(call, torch.nn.Module) else {}
        wanted += [owned[name] for name in self.parameters]
        outs, given_seeds = ([pair[side] for pair in pairs] for side in (0, 1))
        grads = torch.autograd.grad(outs, wanted, given_seeds, allow_unused=True)
        # An argument without influence has the gradient 0.
        return [torch.zeros_like(w) if g is None else g for g, w in zip(grads, wanted, strict=True)]


def _names_mode(module: torch.nn.Module) -> bool:
    """Return whether the source file of a class in ``module`` has a word such as ``training``, or cannot be read."""
    kinds = {kind for part in module.modules() for kind in type(part).__mro__} - {torch.nn.Module, object}
    try:
        return any(re.search(r"train|\beval\b", Path(inspect.getfile(kind)).read_text()) for kind in kinds)
    except (OSError, TypeError, ValueError):
        return True


def _same_bits(a: Tensor, b: Tensor) -> bool:
    """Return whether ``a`` and ``b`` have equal shapes, dtypes and bits."""
    return a.shape == b.shape and a.dtype == b.dtype and bits_are_equal(a, b)


def _is_floating_tensor(value: Any) -> bool:
    """Return whether ``value`` is a tensor of floating-point numbers."""
    return isinstance(value, Tensor) and value.is_floating_point()


def _result_tensors(result: Any) -> list[Tensor]:
    """Return the tensors in ``result`` as a flat list. Nested containers are flattened, and numbers become tensors
    without dims.
    """
    return [v if isinstance(v, Tensor) else torch.tensor(v) for v in tree_leaves(result)]


class FunctionProblem(JudgeProblem):
    """The problem of replacing a function or module of torch. A function that comes with it makes the inputs, whose
    shapes and values are then varied.
    """

    def __init__(
        self,
        name: str,
        call: Callable[..., Any],
        inputs: Callable[[], Any],
        tolerance: float,
        *,
        vary_shapes: bool = True,
        vary_layouts: bool = True,
        file: str = "",
    ) -> None:
        """Make the problem of the reference ``call``.

        ``inputs`` makes the arguments of one call. ``tolerance``, ``vary_shapes`` and ``vary_layouts`` are options as
        in ``JudgeOptions``. ``file`` is the source file of the reference. If ``call`` is a module, a copy of it in
        float64 computes the expected results.
        """
        # A plain function computes in the precision of its arguments, so it needs no copy.
        wide = copy.deepcopy(call).double() if isinstance(call, torch.nn.Module) else call
        super().__init__(name, call, wide, tolerance)
        self.inputs, self.compares_nesting = inputs, True
        self.vary_shapes, self.vary_layouts, self.file = vary_shapes, vary_layouts, file

    def renew(self, state: Mapping[str, Tensor]) -> bool:
        """Load the parameters and buffers ``state`` into the reference's module and into its copy in float64. Return
        True. If the reference is a function, do nothing and return False.
        """
        modules = [m for m in (self.call, self.wide) if isinstance(m, torch.nn.Module)]
        self.own_errors.clear()
        # load_state_dict converts the values for the module in float64.
        for module in modules:
            module.load_state_dict(dict(state))
        return bool(modules)

    def _make_arguments(self) -> Args:
        """Return the arguments of one call as a tuple. The reference's input function makes them, after torch's
        generators got a new, secret seed.
        """
        with SEEDING:
            seed_torch(secrets.randbits(62))
            made = self.inputs()
        return tuple(made) if isinstance(made, (list, tuple)) else (made,)

    @cached_property
    def first(self) -> Args:
        """The arguments of one call on which the reference ran without an error. They are drawn on the first access.

        Raise ``SL615`` if they cannot be made or contain no tensor, and ``SL616`` if the reference fails on them.
        """
        try:
            made = self._make_arguments()
        except Exception as e:
            raise error("SL615", where=self.name, got=error_line(e), expected="a list of arguments") from e
        if not tensors_among(made):
            raise error("SL615", where=self.name, got="no tensor among the inputs", expected="a list with tensors")
        try:
            self.note_products(made)
            began = time.perf_counter()  # of a second call, since the first of all may load a library
            self.call(*tree_map(lambda t: t.detach().clone(), made))
        except Exception as e:
            raise error("SL616", where=self.name, got=error_line(e), expected="a result for its own inputs") from e
        # The time of a call bounds how many other shapes are tried.
        self.takes = time.perf_counter() - began
        again = self._make_arguments()
        self._look_for_constants(tensors_among(made), tensors_among(again))
        pairs = list(zip(made, again, strict=False))
        self.absent = [i for i, pair in enumerate(pairs) if not any(v is not None for v in pair)]
        self.texts = [i for i, (a, b) in enumerate(pairs) if isinstance(a, str) and a == b]
        return made

    def _look_for_constants(self, first: list[Tensor], second: list[Tensor]) -> None:
        """Set ``constant``, ``always`` and ``flags`` from ``first`` and ``second``, the tensor arguments of two draws.

        These fields record which tensors have the same values in both draws. A candidate can know such values in
        advance, so times on them would not be valid. Do nothing if the shapes of the draws differ.
        """
        if [t.shape for t in first] != [t.shape for t in second] or any(t.is_meta for t in second):
            return
        alike = [i for i, (a, b) in enumerate(zip(first, second, strict=True)) if _same_bits(a, b)]
        self.constant = len(alike) == len(first) or any(
            _is_floating_tensor(first[i]) and first[i].numel() > 1 for i in alike
        )
        self.always = [i for i in alike if not _is_floating_tensor(first[i]) and first[i].numel()]
        self.flags = [i for i in self.always if first[i].dtype == torch.bool]

    def forms(self, numbers: Sequence[float] = (), most: int = 14) -> list[InputForm]:
        """Return the forms of inputs (shapes and kinds of values) on which the candidate is called.

        The reference's own inputs come first. Other shapes, kinds of values and memory layouts follow if the reference
        runs on them. ``numbers`` are constants in the candidate's code, which are tried as sizes and values. ``most``
        limits the number of other shapes.
        """

        def runs(form: InputForm) -> bool:
            """Return whether the reference runs on inputs of ``form`` and enough elements of its results are finite.
            For a form that is ``whole``, all elements of all results must be finite. For any other form, more than half
            of the elements of one result must be. If the time for trying forms is over, set ``hurried`` and return
            False.
            """
            if time.monotonic() > self.until:
                self.hurried = True
                return False
            with torch.no_grad(), bounded_memory():
                try:
                    args = self.draw(form)
                    scalars = bool(form.plain or form.added or form.text)  # which may be offsets of indices
                    if (scalars or form.shapes != own or form.changes_integers) and trials.would_end_device(
                        args, scalars=scalars
                    ):
                        return False
                    # The reference may change its arguments, and a draw may be the first one itself.
                    outs = _result_tensors(self.call(*tree_map(lambda t: t.detach().clone(), args)))
                except Exception as e:
                    self.lacked += [form] if is_lack(e) else []
                    return False
            if any(not o.numel() for o in outs):  # nothing to compare, as for half of a dim of one element
                return False
            numbers = [float8_to_float32(o) for o in outs if o.is_floating_point()]
            shares = [float(torch.isfinite(o).float().mean()) for o in numbers]
            return min(shares, default=1.0) == 1.0 if form.whole else max(shares, default=1.0) > 0.5

        trials = IndexTrials(self.call, tensors_among(self.first))
        own = tuple(tuple(t.shape) for t in tensors_among(self.first))
        with torch.no_grad():
            results = _result_tensors(self.call(*tree_map(lambda t: t.detach().clone(), self.first)))
        facts = InputFacts(
            self.constant,
            numbers,
            self.always,
            marks_in_source(self.file),
            self.absent,
            tuple(tuple(o.shape) for o in results),
            self.takes > SLOW_CALL_S,
            texts_in_source(self.file),
            self._defaults_behind(),
        )
        most = most if self.vary_shapes else 0
        forms = make_input_forms(self.first, runs, most=most, facts=facts, layouts=self.vary_layouts)
        self.untried = trials.left_out
        return forms

    def _defaults_behind(self) -> list[Any]:
        """Return the defaults of the positional arguments of the reference that its input function leaves out, as far
        as the candidate has arguments of the same names at the same places, and as they can be passed.
        """
        call = self.call.forward if isinstance(self.call, torch.nn.Module) else self.call
        try:
            parameters = list(inspect.signature(call).parameters.values())
        except (TypeError, ValueError):  # a function in C
            return []
        defaults: list[Any] = []
        for at, parameter in enumerate(parameters[len(self.first) :], len(self.first)):
            named = at < len(self.accepted) and self.accepted[at] == parameter.name
            plain = parameter.default is None or type(parameter.default) in (bool, int, float, str)
            if not (named and plain and parameter.kind is parameter.POSITIONAL_OR_KEYWORD):
                break
            defaults.append(parameter.default)
        return defaults

    def draw(self, form: InputForm) -> Args:
        """Return the arguments of one call with inputs of ``form`` (shapes and kind of values), varied with a new,
        secret seed.

        The reference's input function makes new arguments, which are then varied. Large arguments take long to make. If
        they are large and the form replaces their values or reduces their shapes, the arguments of the first draw are
        varied instead.
        """
        large = sum(t.numel() for t in tensors_among(self.first)) > LARGE
        made = self.first if large and (form.reduced or form.kind != "drawn") else self._make_arguments()
        return vary_arguments(made, form, secrets.randbits(62))

    def sums(self, form: InputForm, args: Args) -> Reduction:
        """Return an estimate of how many terms are summed for one element of the results. It follows from the numbers
        of elements of arguments and results, and from the floating-point operations of the reference. It is computed
        once for each set of shapes.
        """
        key = str(form.shapes)
        # Sizes decide it, so that it is computed once for each shape.
        if key not in self.terms:
            with torch.no_grad():
                outs = _result_tensors(self.call(*tree_map(lambda t: t.detach().clone(), args)))
            size = max(1, max((o.numel() for o in outs), default=1))
            inputs = max((t.numel() for t in tensors_among(args)), default=1)
            self.terms[key] = max(
                1,
                inputs // max(1, min((o.numel() for o in outs if o.numel()), default=1)),
                self.flops(args) // (2 * size),
            )
        return Reduction(self.terms[key])
