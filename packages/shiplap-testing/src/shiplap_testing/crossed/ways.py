"""The ways of a call: each calls an op and compares what it did with the reference, called eagerly."""

from __future__ import annotations

import copy
import re
import threading
import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shiplap.sampling.run import suppress_warnings
from shiplap_testing.crossed.arguments import Arguments, flat_tensors
from shiplap_testing.crossed.capture import capture_call
from shiplap_testing.crossed.declared import Declared
from shiplap_testing.crossed.observe import Function, Observed, difference, directions, flat, long_strides, observe
from shiplap_testing.crossed.region import region_may_count, region_may_write
from shiplap_testing.private import compiled_autograd, fake_mode

TERMS = 4  # an element is a product and a sum of a few


class NotMetError(Exception):
    """The way does not apply to the declaration: nothing was compared."""


class Calls:
    """An op, its arguments, and what the reference does with them."""

    def __init__(self, op: Any, case: Declared, device: str = "cpu") -> None:
        self.op, self.case, self.device = op, case, device
        self.given = Arguments(case, device)
        self.reference: Function = _in_tuple(op.reference) if case.tuple_of_one else op.reference
        self.terms = max(TERMS, self.given.values[self.given.names.index("x")].numel())

    @property
    def differentiable(self) -> bool:
        return self.case.differentiable

    def expected(
        self, given: Arguments | None = None, *, differentiate: bool = False, twice: bool = False
    ) -> tuple[Observed, Observed]:
        """The reference in its own precision, and in float64."""
        given = given or self.given
        found = []
        for dtype in (None, torch.float64):
            values = given.fresh(gradients=differentiate, dtype=dtype, contiguous=self.case.state != "view")
            found.append(observe(self.reference, given, values, differentiate=differentiate, twice=twice))
        found[0].summed = self.bound_of_sum(given.values)
        return found[0], found[1]

    def bound_of_sum(self, values: list[Any]) -> float:
        """Return what the terms of a result's sum over all of ``x`` may amount to in float64; 0 without such a sum.

        Nothing is wider than float64, so the reference does not show what another order of the terms changes.
        """
        if "total" not in self.case.outs or self.case.dtype != "float64":
            return 0.0
        sizes = [v.double().abs() for v in flat_tensors(values)]
        largest = max((float(v[v.isfinite()].max()) for v in sizes if v.isfinite().any()), default=0.0)
        return float(self.terms**0.5 * max(1.0, largest) ** 2)

    def compare(
        self,
        fn: Function,
        given: Arguments | None = None,
        *,
        differentiate: bool | None = None,
        twice: bool = False,
        strides: bool = True,
        requires: bool = True,
    ) -> str:
        """Call ``fn`` and compare."""
        given = given or self.given
        differentiate = self.differentiable if differentiate is None else differentiate
        own, wide = self.expected(given, differentiate=differentiate, twice=twice)
        values = given.fresh(gradients=differentiate)
        got = observe(fn, given, values, differentiate=differentiate, twice=twice)
        return difference(got, own, wide, self.terms, strides=strides, requires=requires)


def _in_tuple(fn: Function) -> Function:
    """Return ``fn`` with its only result in a tuple, as the op returns it."""

    def called(*args: Any, **kwargs: Any) -> Any:
        return (fn(*args, **kwargs),)

    return called


def function_of(op: Any) -> Function:
    """A function that calls the op: what torch compiles."""

    def called(*args: Any, **kwargs: Any) -> Any:
        return op(*args, **kwargs)

    return called


class Model(torch.nn.Module):
    def __init__(self, op: Any) -> None:
        super().__init__()
        self.op = op

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.op(*args, **kwargs)


def eager(calls: Calls) -> str:
    return calls.compare(calls.op) or calls.compare(calls.op)  # the second call takes the short way


def _compiled(calls: Calls, backend: str, dynamic: bool | None) -> str:
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
    return _compiled(calls, "aot_eager", None)


def inductor(calls: Calls, dynamic: bool | None = None) -> str:
    """Nothing is met where torch fails for the reference alike: 2.11 divides by zero for no rows on a GPU."""
    try:
        return _compiled(calls, "inductor", dynamic)
    except Exception as e:
        own = copy.copy(calls)
        own.op = calls.reference
        try:
            _compiled(own, "inductor", dynamic) if not refusal_id(e) else None
        except type(e) as alike:
            raise NotMetError(f"torch fails for the reference alike: {_short(alike)}") from None
        raise


def inductor_dynamic(calls: Calls) -> str:
    return inductor(calls, True)


def dynamic(calls: Calls) -> str:
    """Automatic dynamic: compiled for one size, for any size at the second, and once more for the first."""
    torch.compiler.reset()
    fn = torch.compile(function_of(calls.op), backend="aot_eager", fullgraph=True)
    other = Arguments(calls.case, calls.device, other=True)
    for name, given in (("first", calls.given), ("other", other), ("first again", calls.given)):
        if problem := calls.compare(fn, given):
            return f"{name} sizes: {problem}"
    return ""


class OfTensors(torch.nn.Module):
    """Calls an op with the tensors that are given and all else as it was: what a program exports."""

    def __init__(self, op: Any, given: Arguments) -> None:
        super().__init__()
        self.op, self.given = op, given
        self.rest = [None if flat_tensors(v) else v for v in given.values]
        self.at = [i for i, v in enumerate(given.values) if flat_tensors(v)]

    def forward(self, *tensors: Any) -> Any:
        values = list(self.rest)
        for i, value in zip(self.at, tensors, strict=True):
            values[i] = value
        positional, named = self.given.split(values)
        return self.op(*positional, **named)


def _exported(calls: Calls, dims: bool) -> str:
    model = OfTensors(calls.op, calls.given)
    values = calls.given.fresh()
    tensors = tuple(values[i] for i in model.at)
    auto = torch.export.Dim.AUTO

    def shape(v: Any) -> Any:
        return [shape(e) for e in v] if isinstance(v, list) else dict.fromkeys(range(v.dim()), auto)

    shapes = (tuple(map(shape, tensors)),) if dims else None
    module = torch.export.export(model, tensors, dynamic_shapes=shapes).module()

    def called(*args: Any, **kwargs: Any) -> Any:
        named = dict(zip([n for n in calls.given.names if n not in calls.given.keywords], args, strict=True)) | kwargs
        return module(*(v for v in (named[n] for n in calls.given.names) if flat_tensors(v)))

    return calls.compare(called, differentiate=False, requires=False)


def export(calls: Calls) -> str:
    return _exported(calls, False)


def export_dynamic(calls: Calls) -> str:
    return _exported(calls, True)


def _stacked(calls: Calls) -> tuple[list[Any], list[Any]]:
    """Two sets of tensors, stacked along a new first dim, and ``in_dims``."""
    values = calls.given.fresh()
    dims: list[Any] = []
    stacked: list[Any] = []
    for name, value in zip(calls.given.names, values, strict=True):
        if isinstance(value, Tensor) and value.is_floating_point():
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
    stacked, dims = _stacked(calls)
    before = [[t.clone() for t in v] if isinstance(v, list) and flat_tensors(v) else v for v in stacked]
    before = [v.clone() if isinstance(v, Tensor) else v for v in before]
    written = [i for i, name in enumerate(calls.given.names) if name.startswith("acc")]

    def called(fn: Function) -> Function:
        def run(*values: Any) -> Any:
            positional, named = calls.given.split(list(values))
            return fn(*positional, **named)

        return run

    tensors = [i for i, d in enumerate(dims) if d is not None]

    def mapped(*some: Any) -> Any:
        values = list(stacked)
        for i, v in zip(tensors, some, strict=True):
            values[i] = v
        return called(calls.op)(*values)

    def mapped_results(*some: Any) -> Any:
        results = flat(mapped(*some))
        return tuple(r for r in results if isinstance(r, Tensor))

    try:
        got = flat(torch.func.vmap(mapped_results)(*[stacked[i] for i in tensors]))
    except RuntimeError as e:
        if calls.case.state == "view" and not refusal_id(e):
            raise NotMetError(f"torch has no vmap of the reference, through which it sees: {_short(e)}") from None
        raise
    for number in range(2):

        def pick(v: Any, number: int = number) -> Any:
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
    """What the reference does with one sample; ``values`` are copied first."""
    values = [[t.clone() for t in v] if isinstance(v, list) and flat_tensors(v) else v for v in values]
    values = [v.clone() if isinstance(v, Tensor) else v for v in values]
    outs = [o for o in flat(fn(*values)) if isinstance(o, Tensor)]
    return Observed(outs=outs, written=[t for i in written for t in flat_tensors(values[i])], aliases=[-1] * len(outs))


def _wide(value: Any) -> Any:
    if isinstance(value, list):
        return [_wide(v) for v in value]
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def func_grad(calls: Calls) -> str:
    if not calls.differentiable:
        raise NotMetError("no gradient is declared")

    def gradients(fn: Function, values: list[Any]) -> list[Any]:
        at = [i for i, v in enumerate(values) if isinstance(v, Tensor) and v.is_floating_point()]

        def total(*some: Tensor) -> Tensor:
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
    def tangents(fn: Function, values: list[Any]) -> list[Any]:
        at = [i for i, v in enumerate(values) if isinstance(v, Tensor) and v.is_floating_point()]
        rng = torch.Generator().manual_seed(calls.case.seed)
        along = [torch.randn(values[i].shape, generator=rng, dtype=torch.float64).to(values[i]) for i in at]

        def called(*some: Tensor) -> Any:
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
        raise NotMetError(f"torch differentiates no such function: {_short(e)}") from None
    got = Observed(outs=tangents(calls.op, calls.given.fresh(contiguous=True)))
    return difference(got, own, wide, calls.terms, strides=False)


def autocast(calls: Calls) -> str:
    """What the rule of the op says, for tensors of a class of dtypes; those of one dtype stay."""
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
    if isinstance(value, list):
        return [_cast(v, to) for v in value]
    return value.to(to) if to is not None and isinstance(value, Tensor) and value.is_floating_point() else value


def inference(calls: Calls) -> str:
    with torch.inference_mode():
        values = calls.given.fresh()
        got = observe(calls.op, calls.given, values)
    own, wide = calls.expected()
    return difference(got, own, wide, calls.terms, requires=False) or calls.compare(calls.op)


def no_grad(calls: Calls) -> str:
    with torch.no_grad():
        own, wide = calls.expected(differentiate=False)
        got = observe(calls.op, calls.given, calls.given.fresh(gradients=calls.differentiable))
    return difference(got, own, wide, calls.terms, requires=False)


def fake(calls: Calls) -> str:
    """Shape, dtype, device and strides of a fake call, then a real call."""
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
        kept = any(type(s) is not int for s in f.shape)
        same = f.dim() == r.dim() and all(type(a) is not int or a == b for a, b in zip(f.shape, r.shape, strict=True))
        if not same or f.dtype != r.dtype or f.device != r.device:
            return f"fake result {index}: {f.dtype} {tuple(f.shape)} on {f.device}, the op's {r.dtype} {tuple(r.shape)}"
        if not kept and long_strides(f) != long_strides(r):
            return f"fake result {index}: strides {f.stride()}, the op's {r.stride()}"
    return calls.compare(calls.op)


def _faked(mode: Any, value: Any) -> Any:
    if isinstance(value, list):
        return [_faked(mode, v) for v in value]
    return mode.from_tensor(value, static_shapes=True) if isinstance(value, Tensor) else value


def checkpoint(calls: Calls) -> str:
    if not calls.differentiable:
        raise NotMetError("no gradient is declared")
    from torch.utils.checkpoint import checkpoint as recompute

    def called(*args: Any, **kwargs: Any) -> Any:
        return recompute(function_of(calls.op), *args, use_reentrant=False, **kwargs)

    return calls.compare(called)


def threads(calls: Calls) -> str:
    """Four threads at once, each with arguments of its own."""
    if calls.case.kernel == "triton" and calls.device == "cpu":
        raise NotMetError("Triton's interpreter serves one thread")
    problems: list[str] = []
    own, wide = calls.expected(differentiate=calls.differentiable)
    begin = threading.Barrier(4)

    def work() -> None:
        try:
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
    if not calls.differentiable:
        raise NotMetError("no gradient is declared")
    torch.compiler.reset()
    with compiled_autograd("aot_eager"):
        return calls.compare(calls.op)


def double_backward(calls: Calls) -> str:
    if not calls.differentiable:
        raise NotMetError("no gradient is declared")
    return calls.compare(calls.op, twice=True)


def with_deepcopy(calls: Calls) -> str:
    return calls.compare(copy.deepcopy(Model(calls.op)))


def nested(calls: Calls) -> str:
    """Called twice in a region that torch compiles once."""
    if calls.case.state in ("returned", "view"):
        raise NotMetError("torch has no region that returns an argument, or a view of one")
    if "size" in calls.case.outs:
        raise NotMetError("torch has no region that returns a number")
    try:
        problem = _nested(calls, calls.op)
        # The second call of a region returns a tuple for a list in torch 2.13, whichever function is in it.
        if problem and problem == _nested(calls, calls.reference):
            raise NotMetError(f"torch's region of the reference differs alike: {problem}")
        return problem
    except NotMetError:
        raise
    except Exception as e:
        try:
            _nested(calls, calls.reference)
        except Exception:
            raise NotMetError(f"torch compiles no such region of the reference either: {_short(e)}") from None
        if calls.case.mutates and not region_may_write():
            raise NotMetError(f"this torch has no region with an op that writes: {_short(e)}") from None
        if "kept" in calls.case.outs and calls.differentiable and not region_may_count():
            raise NotMetError(f"this torch has no region with a gradient of a counted size: {_short(e)}") from None
        raise


def _nested(calls: Calls, fn: Function) -> str:
    """Call a case twice inside of a nested compile region."""
    torch.compiler.reset()
    region = torch.compiler.nested_compile_region(function_of(fn))

    def called(*args: Any, **kwargs: Any) -> Any:
        result = region(*args, **kwargs)
        return result if calls.case.mutates else (result, region(*args, **kwargs))[1]

    return calls.compare(torch.compile(called, backend="aot_eager", fullgraph=True))


def out(calls: Calls) -> str:
    """The out-variant: into tensors of the caller, filled with garbage."""
    if calls.op.variant is None:
        raise NotMetError("the op has no out-variant")
    own, wide = calls.expected()
    wanted = [o for o, a in zip(own.outs, own.aliases, strict=True) if a < 0 or not o.numel()]
    if calls.case.state in ("returned", "view"):
        wanted = own.outs[1:]
    values = calls.given.fresh()
    outs = [torch.full_like(o, 77, memory_format=torch.contiguous_format) for o in wanted]

    def called(*args: Any, **kwargs: Any) -> Any:
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
    """Captured once, replayed on other values."""
    if calls.device != "cuda":
        raise NotMetError("no GPU")
    values = calls.given.fresh()
    positional, named = calls.given.split(values)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream), torch.no_grad():
        for _ in range(2):
            calls.op(*positional, **named)
    torch.cuda.synchronize()
    start = calls.given.fresh()
    with torch.no_grad():
        graph, result = capture_call(lambda: calls.op(*positional, **named))
    for held, first in zip(flat_tensors(values), flat_tensors(start), strict=True):
        if not _overlaps(held):
            held.copy_(first)
    graph.replay()
    torch.cuda.synchronize()
    got = observe(lambda *a, **k: result, calls.given, values)
    own, wide = calls.expected()
    return difference(got, own, wide, calls.terms, requires=False)


def _overlaps(t: Tensor) -> bool:
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

# Errors that say that a kernel or a declaration is wrong. Those of this package are right, so they are no refusals.
WRONG = ("SL211", "SL301", "SL302", "SL303", "SL305", "SL402", "SL403", "SL405")
_ID = re.compile(r"\bSL\d{3}\b")


def refusal_id(cause: BaseException) -> str:
    """The id of the catalogue error that ``cause`` is, was caused by, or quotes; empty if it is none of ours."""
    seen: BaseException | None = cause
    while seen is not None:
        if found := getattr(seen, "id", None) or next(iter(_ID.findall(str(seen))), ""):
            return str(found)
        seen = seen.__cause__ or seen.__context__
    return ""


def run_way(way: str, op: Any, case: Declared, device: str = "cpu") -> tuple[str, str]:
    """``(outcome, detail)``: "met", "refused" with an id, "inapplicable", "differs" or "raised"."""
    torch.manual_seed(case.seed)
    try:
        with suppress_warnings():
            problem = WAYS[way](Calls(op, case, device))
    except NotMetError as e:
        return "inapplicable", str(e)
    except Exception as e:
        if (id := refusal_id(e)) and id not in WRONG:
            return "refused", f"{id}: {_short(e)}"
        return "raised", f"{type(e).__name__}: {_short(e)} | {_place(e)}"
    return ("differs", problem) if problem else ("met", "")


def _place(e: BaseException) -> str:
    """Return the innermost two places of an exception's traceback."""
    frames = traceback.extract_tb(e.__traceback__)[-2:]
    return " < ".join(f"{frame.filename[-60:]}:{frame.lineno}" for frame in reversed(frames))


def _short(e: BaseException) -> str:
    return " | ".join(line.strip() for line in str(e).strip().splitlines()[:8])[:500]
