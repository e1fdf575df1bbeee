"""The ways of a call: each calls an op and compares what it did with the reference, called eagerly."""

from __future__ import annotations

import copy
import threading
import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shiplap.sampling.run import suppress_warnings
from shiplap_testing.crossed.arguments import Arguments, flat_tensors
from shiplap_testing.crossed.calls import WRONG, Calls, Model, NotMetError, function_of, one_line, refusal_id
from shiplap_testing.crossed.capture import capture_call
from shiplap_testing.crossed.declared import Declared
from shiplap_testing.crossed.observe import Function, Observed, difference, directions, flat, long_strides, observe
from shiplap_testing.crossed.region import nested
from shiplap_testing.private import compiled_autograd, fake_mode


def eager(calls: Calls) -> str:
    """Call the op of ``calls`` eagerly two times, since the second call runs less code. Return how it differs from its
    reference, or an empty string if it does not.
    """
    return calls.compare(calls.op) or calls.compare(calls.op)  # the second call takes the short way


def _compiled(calls: Calls, backend: str, dynamic: bool | None) -> str:
    """Compile a call of the op of ``calls`` with ``backend``. Return how it differs from its reference, or an empty
    string. ``dynamic`` is passed to ``torch.compile``. Unless it is None, a call at other sizes is compared as well.
    """
    torch.compiler.reset()
    fn = torch.compile(function_of(calls.op), backend=backend, fullgraph=True, dynamic=dynamic)
    if problem := calls.compare(fn):
        return problem
    if dynamic is None:
        return ""
    other = Arguments(calls.case, calls.device, other=True)
    problem = calls.compare(fn, other)
    return f"at other sizes: {problem}" if problem else ""


def aot_eager(calls: Calls) -> str:
    """Return how the op of ``calls``, compiled by ``aot_eager``, differs from its reference, or an empty string."""
    return _compiled(calls, "aot_eager", None)


def inductor(calls: Calls, dynamic: bool | None = None) -> str:
    """Return how a call of the op of ``calls``, compiled by Inductor, differs from its reference, or an empty string if
    nothing differs. ``dynamic`` is passed to ``torch.compile``. Raise ``NotMetError`` if torch fails for the reference
    with an exception of the same type, such as torch 2.11 for tensors without rows on a GPU.
    """
    try:
        return _compiled(calls, "inductor", dynamic)
    except Exception as e:
        # If torch fails for the reference as well, the failure is torch's and not ours.
        own = copy.copy(calls)
        own.op = calls.reference
        try:
            _compiled(own, "inductor", dynamic) if not refusal_id(e) else None
        except type(e) as alike:
            raise NotMetError(f"torch fails for the reference alike: {one_line(alike)}") from None
        raise


def inductor_dynamic(calls: Calls) -> str:
    """Return how calls of the op of ``calls`` at two sizes, compiled by Inductor with dynamic shapes, differ from its
    reference, or an empty string if nothing differs.
    """
    return inductor(calls, True)


def dynamic(calls: Calls) -> str:
    """Return how calls of the op of ``calls`` at changing sizes differ from its reference, or an empty string. Torch
    compiles the first call for its sizes, and the second, at other sizes, for any size. The third has the first sizes.
    """
    torch.compiler.reset()
    fn = torch.compile(function_of(calls.op), backend="aot_eager", fullgraph=True)
    other = Arguments(calls.case, calls.device, other=True)
    for name, given in (("first", calls.given), ("other", other), ("first again", calls.given)):
        if problem := calls.compare(fn, given):
            return f"{name} sizes: {problem}"
    return ""


class OfTensors(torch.nn.Module):
    """A module that calls an op. Its inputs are the tensor arguments of the op, and other arguments are constants."""

    def __init__(self, op: Any, given: Arguments) -> None:
        """Create a module that calls ``op``. The arguments in ``given`` that are not tensors are its constants."""
        super().__init__()
        self.op, self.given = op, given
        self.rest = [None if flat_tensors(v) else v for v in given.values]
        self.at = [i for i, v in enumerate(given.values) if flat_tensors(v)]

    def forward(self, *tensors: Any) -> Any:
        """Return the result of the op for ``tensors``, its tensor arguments in declared order, and the module's
        constants.
        """
        values = list(self.rest)
        for i, value in zip(self.at, tensors, strict=True):
            values[i] = value
        positional, named = self.given.split(values)
        return self.op(*positional, **named)


def _exported(calls: Calls, dims: bool) -> str:
    """Export a module that calls the op of ``calls``, with dynamic dims if ``dims`` is true, and with fixed sizes
    otherwise. Return how the exported program differs from the reference, or an empty string if nothing differs.
    """
    model = OfTensors(calls.op, calls.given)
    values = calls.given.fresh()
    tensors = tuple(values[i] for i in model.at)
    # With ``AUTO``, torch finds out itself which dims are equal or have bounds.
    auto = torch.export.Dim.AUTO

    def shape(v: Any) -> Any:
        """Return the dynamic shape of ``v`` for ``torch.export``, with all dims ``AUTO``. It is a dict for a tensor,
        and a list of dicts for a list of tensors.
        """
        return [shape(e) for e in v] if isinstance(v, list) else dict.fromkeys(range(v.dim()), auto)

    shapes = (tuple(map(shape, tensors)),) if dims else None
    module = torch.export.export(model, tensors, dynamic_shapes=shapes).module()

    def called(*args: Any, **kwargs: Any) -> Any:
        """Return the result of the exported program, which gets only the tensors among the arguments."""
        named = dict(zip([n for n in calls.given.names if n not in calls.given.keywords], args, strict=True)) | kwargs
        return module(*(v for v in (named[n] for n in calls.given.names) if flat_tensors(v)))

    return calls.compare(called, differentiate=False, requires=False)


def export(calls: Calls) -> str:
    """Return how the op of ``calls``, exported with fixed sizes, differs from its reference, or an empty string."""
    return _exported(calls, False)


def export_dynamic(calls: Calls) -> str:
    """Return how the op of ``calls``, exported with dynamic sizes, differs from its reference, or an empty string."""
    return _exported(calls, True)


def _stacked(calls: Calls) -> tuple[list[Any], list[Any]]:
    """Return a list of arguments for ``torch.vmap`` and the list of their ``in_dims``, made from copies of the
    arguments of ``calls``. Each floating-point tensor, also in a list, is stacked with a second sample along a new
    first dim, and has 0 in ``in_dims``. All other arguments have None there.
    """
    values = calls.given.fresh()
    dims: list[Any] = []
    stacked: list[Any] = []
    for name, value in zip(calls.given.names, values, strict=True):
        if isinstance(value, Tensor) and value.is_floating_point():
            # The samples differ, so that a result of the wrong sample is noticed.
            stacked.append(torch.stack([value, value * 0.5 + 0.25]))
            dims.append(0)
        elif isinstance(value, list) and value and isinstance(value[0], Tensor):
            stacked.append([torch.stack([v, v * 0.5 + 0.25]) for v in value])
            dims.append(0)
        else:
            stacked.append(value)
            dims.append(None)
        del name
    return stacked, dims


def vmap(calls: Calls) -> str:
    """Return how the op of ``calls`` under ``torch.func.vmap`` over two samples differs from its reference on each
    sample, or an empty string.
    """
    stacked, dims = _stacked(calls)
    # The op may write to its arguments, from which the reference must not read.
    before = [[t.clone() for t in v] if isinstance(v, list) and flat_tensors(v) else v for v in stacked]
    before = [v.clone() if isinstance(v, Tensor) else v for v in before]
    written = [i for i, name in enumerate(calls.given.names) if name.startswith("acc")]

    def called(fn: Function) -> Function:
        """Return a function that calls ``fn`` with arguments in declared order, and some of them by keyword."""

        def run(*values: Any) -> Any:
            """Return the result of ``fn`` (argument of ``called``) for the arguments ``values``."""
            positional, named = calls.given.split(list(values))
            return fn(*positional, **named)

        return run

    tensors = [i for i, d in enumerate(dims) if d is not None]

    def mapped(*some: Any) -> Any:
        """Return the result of the op of ``calls`` (argument of ``vmap``) for ``some``, those arguments of one sample
        over which vmap maps.
        """
        values = list(stacked)
        for i, v in zip(tensors, some, strict=True):
            values[i] = v
        return called(calls.op)(*values)

    def mapped_results(*some: Any) -> Any:
        """Return a tuple of the tensors among the results of the op of ``calls`` (argument of ``vmap``), since vmap
        returns only tensors. ``some`` are those arguments of one sample over which vmap maps.
        """
        results = flat(mapped(*some))
        return tuple(r for r in results if isinstance(r, Tensor))

    try:
        got = flat(torch.func.vmap(mapped_results)(*[stacked[i] for i in tensors]))
    except RuntimeError as e:
        if calls.case.state == "view" and not refusal_id(e):
            raise NotMetError(f"torch has no vmap of the reference, through which it sees: {one_line(e)}") from None
        raise
    for number in range(2):

        def pick(v: Any, number: int = number) -> Any:
            """Return sample ``number`` of the argument ``v``, a stacked tensor or a list of stacked tensors."""
            return [t[number] for t in v] if isinstance(v, list) else v[number]

        values = [pick(v) if i in tensors else v for i, v in enumerate(before)]
        own, wide = (_of_sample(calls, called(calls.reference), v, written) for v in (values, _wide(values)))
        own.summed = calls.bound_of_sum(values)
        found = [t for i in written for t in flat_tensors(pick(stacked[i]) if stacked[i] is not None else None)]
        mine = Observed(outs=[g[number] for g in got], written=found, aliases=own.aliases)
        if problem := difference(mine, own, wide, calls.terms, strides=False, requires=False):
            return f"sample {number}: {problem}"
    return ""


def _of_sample(calls: Calls, fn: Function, values: list[Any], written: list[int]) -> Observed:
    """Return the results of the reference ``fn`` for copies of ``values``, the arguments of one sample, and the values
    of those that it writes to. ``written`` has the indices of the latter.
    """
    values = [[t.clone() for t in v] if isinstance(v, list) and flat_tensors(v) else v for v in values]
    values = [v.clone() if isinstance(v, Tensor) else v for v in values]
    outs = [o for o in flat(fn(*values)) if isinstance(o, Tensor)]
    return Observed(outs=outs, written=[t for i in written for t in flat_tensors(values[i])], aliases=[-1] * len(outs))


def _wide(value: Any) -> Any:
    """Return ``value``, a tensor, a list or any other value, with its floating-point tensors converted to float64."""
    if isinstance(value, list):
        return [_wide(v) for v in value]
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def func_grad(calls: Calls) -> str:
    """Return how the gradients of the op of ``calls`` by ``torch.func.grad`` differ from those of its reference, or an
    empty string. Raise ``NotMetError`` if the op has no gradient.
    """
    if not calls.differentiable:
        raise NotMetError("no gradient is declared")

    def gradients(fn: Function, values: list[Any]) -> list[Any]:
        """Return a list of the gradients of ``fn``, by ``torch.func.grad``, for the floating-point tensors in
        ``values``.
        """
        at = [i for i, v in enumerate(values) if isinstance(v, Tensor) and v.is_floating_point()]

        def total(*some: Tensor) -> Tensor:
            """Return the sum of all floating-point results of ``fn`` (argument of ``gradients``), weighted by random
            numbers. ``some`` are passed in place of its floating-point tensors. Raise ``NotMetError`` if there is no
            such result.
            """
            replaced = list(values)
            for i, v in zip(at, some, strict=True):
                replaced[i] = v
            positional, named = calls.given.split(replaced)
            outs = [o for o in flat(fn(*positional, **named)) if isinstance(o, Tensor) and o.is_floating_point()]
            if not outs:
                raise NotMetError("no result carries a gradient")
            return sum((o * d).sum() for o, d in zip(outs, directions(outs, calls.case.seed), strict=True))

        return list(torch.func.grad(total, argnums=tuple(range(len(at))))(*[values[i] for i in at]))

    got = gradients(calls.op, calls.given.fresh())
    own = gradients(calls.reference, calls.given.fresh())
    wide = gradients(calls.reference, calls.given.fresh(dtype=torch.float64))
    return difference(Observed(grads=got), Observed(grads=own), Observed(grads=wide), calls.terms)


def jvp(calls: Calls) -> str:
    """Return how the results and forward-mode derivatives of the op of ``calls`` by ``torch.func.jvp`` differ from
    those of its reference, or an empty string.
    """

    def tangents(fn: Function, values: list[Any]) -> list[Any]:
        """Return a list of the results of ``fn`` for ``values`` and then their derivatives along random directions."""
        at = [i for i, v in enumerate(values) if isinstance(v, Tensor) and v.is_floating_point()]
        rng = torch.Generator().manual_seed(calls.case.seed)
        along = [torch.randn(values[i].shape, generator=rng, dtype=torch.float64).to(values[i]) for i in at]

        def called(*some: Tensor) -> Any:
            """Return the tensors among the results of ``fn`` (argument of ``tangents``) as a tuple. ``some`` are passed
            in place of its floating-point tensors. Raise ``NotMetError`` if no result is a tensor.
            """
            replaced = list(values)
            for i, v in zip(at, some, strict=True):
                replaced[i] = v
            positional, named = calls.given.split(replaced)
            results = tuple(o for o in flat(fn(*positional, **named)) if isinstance(o, Tensor))
            if not results:
                raise NotMetError("no result is a tensor")
            return results

        outs, moved = torch.func.jvp(called, tuple(values[i] for i in at), tuple(along))
        return [*flat(outs), *flat(moved)]

    # torch makes no dual of a tensor whose elements share memory
    try:
        own = Observed(outs=tangents(calls.reference, calls.given.fresh(contiguous=True)))
        wide = Observed(outs=tangents(calls.reference, calls.given.fresh(dtype=torch.float64, contiguous=True)))
    except RuntimeError as e:  # it writes to a tensor without a tangent, or returns nothing: the op refuses such a call
        tangents(calls.op, calls.given.fresh(contiguous=True))
        raise NotMetError(f"torch differentiates no such function: {one_line(e)}") from None
    got = Observed(outs=tangents(calls.op, calls.given.fresh(contiguous=True)))
    return difference(got, own, wide, calls.terms, strides=False)


def autocast(calls: Calls) -> str:
    """Return how a call of the op of ``calls`` under autocast to bfloat16 differs from its reference, or an empty
    string if nothing differs. The arguments of the reference are converted as the autocast rule of the op declares.
    Raise ``NotMetError`` if the op writes to an argument that is converted.
    """
    rule, case = calls.case.rule, calls.case
    to = {"autocast": torch.bfloat16, "float32": torch.float32}.get(rule or "")
    if case.annotation != "Float" or case.dtype == "float64" or case.state == "view":
        to = None
    with torch.autocast(calls.device, dtype=torch.bfloat16):
        values = calls.given.fresh(gradients=calls.differentiable)
        got = observe(calls.op, calls.given, values)
    own, wide = [], []
    for widened in (False, True):
        values = [_cast(v, to) for v in calls.given.fresh(contiguous=calls.case.state != "view")]
        values = [_wide(v) for v in values] if widened else values
        (wide if widened else own).append(observe(calls.reference, calls.given, values))
        own[-1].summed = calls.bound_of_sum(values)
    if case.mutates and to is not None:
        raise NotMetError("an argument that is cast cannot be written to")
    return difference(got, own[0], wide[0], calls.terms, requires=False)


def _cast(value: Any, to: torch.dtype | None) -> Any:
    """Return ``value`` with its floating-point tensors converted to the dtype ``to``. ``value`` is a tensor, a list, or
    anything else, which is returned unchanged. If ``to`` is None, nothing is converted.
    """
    if isinstance(value, list):
        return [_cast(v, to) for v in value]
    return value.to(to) if to is not None and isinstance(value, Tensor) and value.is_floating_point() else value


def inference(calls: Calls) -> str:
    """Call the op of ``calls`` in inference mode and then outside it. Return how a call differs from the reference, or
    an empty string if nothing differs.
    """
    with torch.inference_mode():
        values = calls.given.fresh()
        got = observe(calls.op, calls.given, values)
    own, wide = calls.expected()
    return difference(got, own, wide, calls.terms, requires=False) or calls.compare(calls.op)


def no_grad(calls: Calls) -> str:
    """Return how a call of the op of ``calls`` under ``torch.no_grad``, with arguments that require gradients, differs
    from its reference, or an empty string.
    """
    with torch.no_grad():
        own, wide = calls.expected(differentiate=False)
        got = observe(calls.op, calls.given, calls.given.fresh(gradients=calls.differentiable))
    return difference(got, own, wide, calls.terms, requires=False)


def fake(calls: Calls) -> str:
    """Return how the op of ``calls`` on fake tensors differs from the op on real tensors in shape, dtype, device or
    strides. If it does not, return how the op on real tensors differs from its reference, or an empty string.
    """
    real = calls.op(*calls.given.split(values := calls.given.fresh())[0], **calls.given.split(values)[1])
    copies = calls.given.fresh()
    with fake_mode() as mode:
        faked = [_faked(mode, v) for v in copies]
        positional, named = calls.given.split(faked)
        outs = flat(calls.op(*positional, **named))
    reals = flat(real)
    if len(outs) != len(reals):
        return f"fake has {len(outs)} results, the op {len(reals)}"
    for index, (f, r) in enumerate(zip(outs, reals, strict=True)):
        if not isinstance(r, Tensor) or not isinstance(f, Tensor):
            if isinstance(f, Tensor) or isinstance(r, Tensor):
                return f"fake result {index} is {f!r}, the op's is {r!r}"
            continue
        # A size that depends on data is a symbol, so that the strides are no numbers to compare.
        kept = any(type(s) is not int for s in f.shape)
        same = f.dim() == r.dim() and all(type(a) is not int or a == b for a, b in zip(f.shape, r.shape, strict=True))
        if not same or f.dtype != r.dtype or f.device != r.device:
            return f"fake result {index}: {f.dtype} {tuple(f.shape)} on {f.device}, the op's {r.dtype} {tuple(r.shape)}"
        if not kept and long_strides(f) != long_strides(r):
            return f"fake result {index}: strides {f.stride()}, the op's {r.stride()}"
    return calls.compare(calls.op)


def _faked(mode: Any, value: Any) -> Any:
    """Return ``value``, a tensor, a list or any other value, with its tensors replaced by fake ones of ``mode``."""
    if isinstance(value, list):
        return [_faked(mode, v) for v in value]
    return mode.from_tensor(value, static_shapes=True) if isinstance(value, Tensor) else value


def checkpoint(calls: Calls) -> str:
    """Return how a call of the op of ``calls`` under activation checkpointing differs from its reference, or an empty
    string if nothing differs. The forward runs again in the backward. Raise ``NotMetError`` if the op has no gradient.
    """
    if not calls.differentiable:
        raise NotMetError("no gradient is declared")
    from torch.utils.checkpoint import checkpoint as recompute

    def called(*args: Any, **kwargs: Any) -> Any:
        """Return the result of the op of ``calls`` (argument of ``checkpoint``), called under a checkpoint."""
        return recompute(function_of(calls.op), *args, use_reentrant=False, **kwargs)

    return calls.compare(called)


def threads(calls: Calls) -> str:
    """Call the op of ``calls`` in four threads at once, three times in each. Return how a call differs from the
    reference, or an empty string if nothing differs. An exception in a thread is raised again. Raise ``NotMetError``
    for Triton's interpreter, which supports only one thread.
    """
    if calls.case.kernel == "triton" and calls.device == "cpu":
        raise NotMetError("Triton's interpreter serves one thread")
    problems: list[str] = []
    own, wide = calls.expected(differentiate=calls.differentiable)
    begin = threading.Barrier(4)

    def work() -> None:
        """Call the op of ``calls`` (argument of ``threads``) three times. Append each difference from its reference, or
        an exception, to the list ``problems``, which the four threads share.
        """
        try:
            # All threads begin at the same time.
            begin.wait()
            for _ in range(3):
                values = calls.given.fresh(gradients=calls.differentiable)
                got = observe(calls.op, calls.given, values, differentiate=calls.differentiable)
                if problem := difference(got, own, wide, calls.terms):
                    problems.append(problem)
        except Exception as e:
            problems.append(e)

    workers = [threading.Thread(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for problem in problems:
        if isinstance(problem, Exception):
            raise problem
    return problems[0] if problems else ""


def with_compiled_autograd(calls: Calls) -> str:
    """Return how a call of the op of ``calls``, with its backward compiled as one graph, differs from its reference, or
    an empty string if nothing differs. Raise ``NotMetError`` if the op has no gradient.
    """
    if not calls.differentiable:
        raise NotMetError("no gradient is declared")
    torch.compiler.reset()
    with compiled_autograd("aot_eager"):
        return calls.compare(calls.op)


def double_backward(calls: Calls) -> str:
    """Return how the first and second gradients of the op of ``calls`` differ from those of its reference, or an empty
    string if nothing differs. Raise ``NotMetError`` if the op has no gradient.
    """
    if not calls.differentiable:
        raise NotMetError("no gradient is declared")
    return calls.compare(calls.op, twice=True)


def with_deepcopy(calls: Calls) -> str:
    """Return how a call of the op of ``calls``, made by a deep copy of a module, differs from its reference, or an
    empty string if nothing differs.
    """
    return calls.compare(copy.deepcopy(Model(calls.op)))


def out(calls: Calls) -> str:
    """Return how the out-variant of the op of ``calls`` differs from its reference, or an empty string if nothing
    differs. The outputs are filled with 77 before the call. Raise ``NotMetError`` if the op has no out-variant.
    """
    if calls.op.variant is None:
        raise NotMetError("the op has no out-variant")
    own, wide = calls.expected()
    wanted = [o for o, a in zip(own.outs, own.aliases, strict=True) if a < 0 or not o.numel()]
    if calls.case.state in ("returned", "view"):
        wanted = own.outs[1:]
    values = calls.given.fresh()
    # Garbage, so that an element that is not written to shows.
    outs = [torch.full_like(o, 77, memory_format=torch.contiguous_format) for o in wanted]

    def called(*args: Any, **kwargs: Any) -> Any:
        """Return the tensors ``outs`` (variable of ``out``) after ``op.out`` has filled them. Raise ``AssertionError``
        if ``op.out`` returns other tensors.
        """
        made = calls.op.out(*args, out=outs[0] if len(outs) == 1 else outs, **kwargs)
        if [t.data_ptr() for t in flat(made) if t.numel()] != [t.data_ptr() for t in outs if t.numel()]:
            raise AssertionError("op.out returned other tensors than it was given")
        return tuple(outs)

    got = observe(called, calls.given, values)
    got.form = ""
    if calls.case.state in ("returned", "view"):
        own.outs, wide.outs, own.aliases = own.outs[1:], wide.outs[1:], own.aliases[1:]
    return difference(got, own, wide, calls.terms, strides=False, requires=False)


def cuda_graph(calls: Calls) -> str:
    """Capture a call of the op of ``calls`` as a CUDA graph, and replay the graph. Return how the result differs from
    the reference, or an empty string if nothing differs. Raise ``NotMetError`` without a GPU.
    """
    if calls.device != "cuda":
        raise NotMetError("no GPU")
    values = calls.given.fresh()
    positional, named = calls.given.split(values)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())  # on which ``fresh`` has copied the arguments
    with torch.cuda.stream(stream), torch.no_grad():
        # Warm up: what a first call allocates or compiles must not be captured.
        for _ in range(2):
            calls.op(*positional, **named)
    torch.cuda.synchronize()
    start = calls.given.fresh()
    with torch.no_grad():
        graph, result = capture_call(lambda: calls.op(*positional, **named))
    for held, first in zip(flat_tensors(values), flat_tensors(start), strict=True):
        if not _overlaps(held):
            held.copy_(first)  # the warm-up may have written to it, and the replay reads it
    graph.replay()
    torch.cuda.synchronize()
    got = observe(lambda *a, **k: result, calls.given, values)
    own, wide = calls.expected()
    return difference(got, own, wide, calls.terms, requires=False)


def _overlaps(t: Tensor) -> bool:
    """Return whether elements of ``t`` share memory because a dim longer than 1 has a stride of zero."""
    return any(s == 0 and n > 1 for s, n in zip(t.stride(), t.shape, strict=True))


WAYS: dict[str, Callable[[Calls], str]] = {
    "eager": eager,
    "aot_eager": aot_eager,
    "inductor": inductor,
    "inductor_dynamic": inductor_dynamic,
    "dynamic": dynamic,
    "export": export,
    "export_dynamic": export_dynamic,
    "vmap": vmap,
    "func_grad": func_grad,
    "jvp": jvp,
    "autocast": autocast,
    "inference": inference,
    "no_grad": no_grad,
    "fake": fake,
    "checkpoint": checkpoint,
    "threads": threads,
    "compiled_autograd": with_compiled_autograd,
    "double_backward": double_backward,
    "deepcopy": with_deepcopy,
    "nested": nested,
    "out": out,
    "cuda_graph": cuda_graph,
}


def run_way(way: str, op: Any, case: Declared, device: str = "cpu") -> tuple[str, str]:
    """Call ``op`` of the op declaration ``case`` on ``device`` in the way ``way``, such as ``vmap``. Return the outcome
    and its detail as a pair of strings. The outcome is ``met`` if nothing differs from the reference and ``differs``
    otherwise. It is ``refused`` for one of shiplap's errors that a user may cause, ``inapplicable`` for
    ``NotMetError``, and ``raised`` for any other exception.
    """
    # The numbers that a way draws must not depend on the ways before it.
    torch.manual_seed(case.seed)
    try:
        with suppress_warnings():
            problem = WAYS[way](Calls(op, case, device))
    except NotMetError as e:
        return "inapplicable", str(e)
    except Exception as e:
        # A refusal is an allowed outcome, unless its error says that the op is wrong.
        if (id := refusal_id(e)) and id not in WRONG:
            return "refused", f"{id}: {one_line(e)}"
        return "raised", f"{type(e).__name__}: {one_line(e)} | {_innermost_frames(e)}"
    return ("differs", problem) if problem else ("met", "")


def _innermost_frames(e: BaseException) -> str:
    """Return the files and lines of the two innermost frames of the traceback of ``e``, joined as one string."""
    frames = traceback.extract_tb(e.__traceback__)[-2:]
    return " < ".join(f"{frame.filename[-60:]}:{frame.lineno}" for frame in reversed(frames))
