"""The fake implementation, which is derived from the declaration. It has the same checks and shapes, and no data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch

from shiplap.declare.binding import Binding
from shiplap.declare.opaque import traced_arguments
from shiplap.declare.spec import OpSpec
from shiplap.declare.values import Args, Result, Returned, Value
from shiplap.dispatch import compile_cache_key
from shiplap.dispatch.autocast import explain_autocast
from shiplap.dispatch.outputs import check_results, empty_outputs, result_of_outputs, tensors_in_arguments
from shiplap.dispatch.state import OpState
from shiplap.errors import ShiplapError, error
from shiplap.plan.expression import TensorPlace
from shiplap.plan.rules import members_are_distinct, shares_no_memory
from shiplap.plan.sharing import fakes_share_memory
from shiplap.torch_private import dynamo, symbolic_sizes

VALUE_FIX = "replace a branch on a value by torch.where, and a slice by a value by a mask"
BOUND_FIX = (
    'if a size of the result depends on data, remove fake="reference", and bound the size: '
    '@sl.op(..., bounds={"m": "n"}). In all other cases, ' + VALUE_FIX
)


def make_fake(op: OpState) -> Callable[..., Result]:
    """Return the fake implementation of the op for ``torch.library.register_fake``. It checks the arguments like a real
    call and returns outputs without data.

    Its outputs are contiguous tensors of the declared sizes. A data-dependent dim becomes an unbacked size, whose bound
    is asserted in the graph.
    """
    spec = op.spec
    unwritable = _why_not_functionalizable(spec)

    def fake(*args: Value, **kwargs: Value) -> Result:
        """Return outputs without data for a call that is traced or run on fake tensors. Raise the same catalogue errors
        as a real call.
        """
        compile_cache_key.ensure_cache_keys()
        if unwritable and symbolic_sizes.in_trace():
            wrong = error("SL137", where=spec.name, got=unwritable, expected="tensors, and other names")
            raise symbolic_sizes.unknown_size_error()(None, str(wrong))  # at which a graph may break
        try:
            call = op.bind(spec.complete(args, kwargs))  # the dispatcher may have stripped defaults
        except ShiplapError as e:  # which Op.explain does not see where a graph is traced
            if (explained := explain_autocast(args, kwargs, e)) is not None:
                raise explained from None
            raise
        if spec.mutated:
            refuse_shared_memory(spec, call.args)
        if dynamo.is_packaging() and not op.templates.get(call.device.type):  # those refuse where they are lowered
            refuse_python_in_package(op, call)
        if spec.traced:
            result: Any = result_of_outputs(
                check_results(spec, call, _reference_on_fakes(op, traced_arguments(spec, call.args)))
            )
            return cast("Result", symbolic_sizes.in_graph(result)) if type(result) is int else cast("Result", result)
        for dim, bound in spec.bounds:
            # The size is unknown while tracing, so that its bound becomes an assertion in the graph.
            size = symbolic_sizes.new_size()
            call.env[dim] = size
            limit = bound(call.env)
            symbolic_sizes.check_condition(
                size <= limit, partial("SL302: {}: {} <= {} does not hold".format, spec.name, dim, bound)
            )
        return result_of_outputs(empty_outputs(spec, call))

    return fake


def refuse_shared_memory(spec: OpSpec, args: Args) -> None:
    """Raise ``SL210`` if a tensor that is written to shares memory with another tensor, as the check of real tensors
    does.

    A graph may copy the tensors that are written to before each call. The check in the real call would then not find
    the overlap.
    """
    given = dict(zip((a.name for a in spec.args), args, strict=True))
    members = {a.name: list(tensors_in_arguments((given[a.name],))) for a in spec.tensors}
    for index, name in enumerate(spec.mutated):
        # Each pair of mutated arguments is compared once.
        written, others = members[name], [n for n in members if n not in spec.mutated[: index + 1]]
        if any(fakes_share_memory(a, b) for i, a in enumerate(written) for b in written[:i]):
            raise members_are_distinct(spec.name, name).make_error({})
        for other in others:
            if any(fakes_share_memory(a, b) for a in written for b in members[other]):
                places = TensorPlace(spec.name, name), TensorPlace(spec.name, other)
                raise shares_no_memory(*places, both=other in spec.mutated).make_error({})


def _why_not_functionalizable(spec: OpSpec) -> str:
    """Return the reason why torch cannot replace the op in a graph by one that writes to no argument (functionalize
    it). Return an empty string if it can.
    """
    if not spec.mutated or spec.view:
        return ""
    if any(a.name == "mode" for a in spec.args):  # the first parameter of functions of torch that get ours by name
        return "an argument called mode"
    others = [r.name for r in spec.made if r.tensor is None or r.many or r.optional] if spec.traced else []
    return f"the result {others[0]!r}, which is no single tensor" if others else ""


def _reference_on_fakes(op: OpState, args: Args) -> Returned:
    """Return the result of the reference on the fake arguments ``args``, for an op whose result sizes only the
    reference determines.

    If the reference needs a value of the data, in a float or bool result, a branch or a size, raise torch's exception
    for unknown sizes with the text of ``SL133``. A graph may break at that exception.
    """
    spec, got = op.spec, "a branch on data"
    # An int can stay symbolic in a graph, a float or a bool cannot.
    kinds = [r.scalar for r in spec.made if r.scalar not in (None, "int")]
    try:
        result = op.run_reference(args)
        for value in result if isinstance(result, tuple) else (result,):
            if isinstance(value, (torch.SymFloat, torch.SymBool)):  # which the dispatcher turns into a number
                got = f"a {'float' if isinstance(value, torch.SymFloat) else 'bool'} that depends on data"
                bool(value if isinstance(value, torch.SymBool) else value == 0)
        return result
    except RuntimeError as e:
        if not isinstance(e, symbolic_sizes.unknown_size_error()):
            raise
        if kinds:
            wrong = error("SL133", where=f"{spec.name}, result", got=got, expected="an int, or a tensor without dims")
        else:
            wrong = error(
                "SL133",
                what="the reference reads a value while a graph is traced",
                where=f"{spec.name}, reference",
                got="a branch or a size that depends on data",
                expected="operations on tensors alone",
                fix=BOUND_FIX if all(r.tensor and not r.many for r in spec.made) else VALUE_FIX,
            )
        raise symbolic_sizes.unknown_size_error()(None, str(wrong)) from e


def refuse_python_in_package(op: OpState, call: Binding, *, templates: Sequence[str] = (), fix: str = "") -> None:
    """Raise ``SL307`` if this call, compiled into a package (a ``.pt2`` file), would have to run Python there. A
    package holds only native code.

    ``templates`` says why each template of the op is not used. ``fix``, if it is not empty, is the action of the error
    that makes a template usable.
    """
    device = call.device.type
    kernels, native = op.native_kernels(device), op.native_choices(device)
    got = "" if kernels else f"the reference, run by Python on {device}"
    for kernel in kernels:  # in the order in which a call tries them
        got = kernel.why_not_packaged(call)
        if not got and kernel not in native:
            got = f"{kernel.name}, which Python picks on {device}: it is of another library than the kernels before it"
        if not got or kernel not in native:
            break
    if got:
        more = {"fix": fix} if fix else {}
        raise error(
            "SL307",
            where=op.spec.name,
            got="; ".join([got, *templates]),
            expected="a template or a C ABI kernel",
            **more,
        )
