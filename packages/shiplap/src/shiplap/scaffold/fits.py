"""Check a drafted declaration: the schema is the registered one, and every recorded call is admitted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shiplap.declare.binding import declared_output_shape
from shiplap.declare.schema import public_schema
from shiplap.declare.signature import read_spec
from shiplap.dispatch.adopt import AdoptedOp
from shiplap.errors import ShiplapError
from shiplap.scaffold.calls import DispatchedCall, SeenTensor, as_empty_tensors
from shiplap.scaffold.infer import InferredDeclaration
from shiplap.scaffold.module import adopt_keywords, make_drafted_function
from shiplap.scaffold.schema import SchemaForm
from shiplap.torch_private.dispatcher_library import Overload


def why_draft_misfits(
    form: SchemaForm, known: InferredDeclaration, overload: Overload, recorded: Sequence[DispatchedCall]
) -> str:
    """Return the number of the first recorded call that does not fit ``known``, the drafted declaration of the schema
    ``form``, and the reason, as text. The declaration would refuse such a call, or give other result sizes. Return an
    empty string if all calls fit.

    Raises:
        ShiplapError: SL1xx when the declaration itself is refused.
    """
    function = make_drafted_function(form, known)
    op: AdoptedOp[..., Any] = AdoptedOp(read_spec(form.name, function, **adopt_keywords(form, known)), function)
    wanted = str(overload._schema).partition("(")[2].partition(")")[0]
    if known.reference and "*" not in public_schema(op.spec) and len(op.spec.args) != len(form.arguments):
        return f"other arguments than {wanted}"
    for number, call in enumerate(recorded, 1):
        if problem := _why_call_refused(op, call):
            return f"recorded call {number}: {problem}"
    return ""


def _why_call_refused(op: AdoptedOp[..., Any], call: DispatchedCall) -> str:
    """Return the reason why the drafted declaration of ``op`` refuses a recorded call or declares other result sizes.
    Return an empty string if the call fits.
    """
    try:
        bound = op.bind([as_empty_tensors(v, "meta") for v in call.arguments.values()])
        # A traced op takes its sizes from the reference, so none are declared.
        shapes = [] if op.spec.traced else [_known_sizes(o, bound.env, op) for o in op.spec.outputs]
    except ShiplapError as e:
        return f"{e.id} {e.what}: got {e.got}, expected {e.expected}"
    fresh = [
        r
        for r, declared in zip(call.results, op.spec.returns or op.spec.outputs, strict=True)
        if _is_fresh_result(declared)
    ]
    for made, shape in zip(fresh, shapes, strict=False):
        sizes = made.shape if isinstance(made, SeenTensor) else ()
        if len(sizes) != len(shape) or any(s is not None and s != n for s, n in zip(shape, sizes, strict=True)):
            return f"a result of shape {sizes}, declared {shape}"
    return ""


def _is_fresh_result(declared: Any) -> bool:
    """Return whether a declared result is a new tensor and not an alias of an argument."""
    return not getattr(declared, "alias", "")


def _known_sizes(out: Any, env: Any, op: AdoptedOp[..., Any]) -> list[Any]:
    """Return the sizes that the declaration gives for the output ``out`` in a call whose named dims have the sizes
    ``env``. A size that depends on the values of tensors is None.
    """
    # -1 stands for a size that only the data knows, as in recorded calls.
    marked = {**env, **dict.fromkeys(op.spec.dynamic, -1)}
    return [None if n == -1 else n for n in declared_output_shape(out, marked)]
