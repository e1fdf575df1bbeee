"""A call of an op in a region that torch compiles once, and what torch can do there."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from shiplap_testing.crossed.calls import Calls, NotMetError, function_of, one_line
from shiplap_testing.crossed.observe import Function


def nested(calls: Calls) -> str:
    """Return a description of how a call of the op of ``calls`` in a nested compile region differs from its reference.
    It is empty if they do not differ.

    Torch compiles such a region once for all its calls. Raise ``NotMetError`` if torch cannot compile such a region of
    the reference either.
    """
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
            raise NotMetError(f"torch compiles no such region of the reference either: {one_line(e)}") from None
        if calls.case.mutates and not region_may_write():
            raise NotMetError(f"this torch has no region with an op that writes: {one_line(e)}") from None
        if "kept" in calls.case.outs and calls.differentiable and not region_may_count():
            raise NotMetError(f"this torch has no region with a gradient of a counted size: {one_line(e)}") from None
        raise


def _nested(calls: Calls, fn: Function) -> str:
    """Call ``fn`` in a nested compile region, a part of a graph that torch compiles once for all its calls. Return a
    description of how the last call differs from the reference, which is empty if it does not.

    The region is called twice, or once if the op writes to an argument.
    """
    torch.compiler.reset()
    region = torch.compiler.nested_compile_region(function_of(fn))

    def called(*args: Any, **kwargs: Any) -> Any:
        """Call the region around ``fn`` (argument of ``_nested``) twice, or once if the op writes to an argument.
        Return the result of the last call.
        """
        # A second call must reuse the compiled region. A second write would change the argument twice.
        result = region(*args, **kwargs)
        return result if calls.case.mutates else (result, region(*args, **kwargs))[1]

    return calls.compare(torch.compile(called, backend="aot_eager", fullgraph=True))


def region_may_write() -> bool:
    """Return whether the installed torch can compile a nested region that calls an op that writes to an argument. The
    op is defined by ``torch.library``, without shiplap.
    """
    if not hasattr(torch.ops.crossed_plain, "write"):
        torch.library.define("crossed_plain::write", "(Tensor(a!) x) -> ()")
        torch.library.impl("crossed_plain::write", "CompositeExplicitAutograd", _write)
        torch.library.register_fake("crossed_plain::write", _write)
    torch.compiler.reset()
    region = torch.compiler.nested_compile_region(lambda x: torch.ops.crossed_plain.write(x))
    try:
        torch.compile(lambda x: region(x), backend="aot_eager", fullgraph=True)(torch.zeros(1))
    except Exception:
        return False
    return True


def _write(x: Tensor) -> None:
    """Add 1 to ``x`` in place. The function is both the implementation and the fake of the op ``crossed_plain::write``,
    with which nested compile regions are tried.
    """
    x.add_(1)


def region_may_count() -> bool:
    """Return whether the installed torch can compile a nested region with an op whose result has a size that depends on
    data.

    The op is defined by ``torch.library``, without shiplap, and has a gradient.
    """
    torch.compiler.reset()
    region = torch.compiler.nested_compile_region(lambda x: _select_positive()(x))
    try:
        # The partitioner of torch 2.13 makes the size of the incoming gradient an output of the forward.
        torch.compile(lambda x: region(x), backend="aot_eager", fullgraph=True)(torch.ones(2, requires_grad=True))
    except Exception:
        return False
    return True


@functools.cache
def _select_positive() -> Any:
    """Return an op, defined by ``torch.library`` with a gradient, that selects the positive elements of a vector."""

    @torch.library.custom_op("crossed_plain::select", mutates_args=())
    def select(x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the positive elements of the vector ``x``, and their indices in int64."""
        at = (x > 0).nonzero()[:, 0]
        return x[at], at

    @select.register_fake
    def _(x: Tensor) -> tuple[Tensor, Tensor]:
        """Return two uninitialised results of the op for fake tensors. Their number of elements is a new symbol."""
        count = torch.library.get_ctx().new_dynamic_size()
        return x.new_empty(count), x.new_empty(count, dtype=torch.int64)

    def backward(ctx: Any, grad: Tensor, _: Tensor) -> Tensor:
        """Return the gradient of ``select`` for its vector: ``grad`` at the selected indices and zero elsewhere."""
        x, at = ctx.saved_tensors
        return torch.zeros_like(x).index_put((at,), grad)

    def save(ctx: Any, inputs: Any, output: Any) -> None:
        """Save the vector and the selected indices for the backward, and mark the indices as not differentiable."""
        ctx.save_for_backward(inputs[0], output[1])
        ctx.mark_non_differentiable(output[1])

    select.register_autograd(backward, setup_context=save)
    return select
