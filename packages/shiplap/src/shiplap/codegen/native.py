"""The C++ source of the native binding of an ``OpSpec``, with checks, allocations and views around one C ABI call.

The checks are those of the call plan, in the same order and words as in Python. Some calls C++ cannot check, such as
those with a dtype that the kernel does not accept, or a mutated tensor that may require a gradient. It passes these to
``<op>__python`` before it has converted any argument. Code that is ``alone``, without Python, refuses such a call by
``SL409``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shiplap import dtypes
from shiplap.cached_property import cached_property
from shiplap.codegen.chosen import NativeChoice, config_rows, config_values, lookup_key
from shiplap.codegen.ctype import CParameter, c_prototype
from shiplap.codegen.environment import render_source
from shiplap.codegen.plan import step_statements
from shiplap.declare.bucket import BucketRule
from shiplap.declare.config import Space
from shiplap.declare.cpp_expression import quote_cpp, to_cpp
from shiplap.declare.dim_expression import Expr
from shiplap.declare.schema import public_schema, schema_text
from shiplap.declare.spec import OpSpec, Output, TensorType
from shiplap.dispatch.out import out_variant_schema, scratch_name
from shiplap.errors import error
from shiplap.plan import CallPlan
from shiplap.plan.build import try_expression
from shiplap.plan.expression import VariableNames
from shiplap.plan.outputs import OutputPlan
from shiplap.plan.packing import packing_steps
from shiplap.plan.rules import size_is_within_bound, undefined_condition
from shiplap.plan.steps import CheckStep, LetStep, PackStep, VariableType
from shiplap.torch_private.dispatcher_library import name_of_edition

SCALAR = {
    "int": "int64_t",
    "float": "double",
    "bool": "bool",
    "str": "std::string",
    "list[int]": "List",
    "list[float]": "std::vector<double>",
}
# The generated code and the header reserve room for the sizes and strides of this many dims.
_MAX_RANK = 8


@dataclass(frozen=True)
class NativeOp:
    """One op that is to be bound in C++, with its declaration and the data of its kernels on ``device``.

    ``kernels`` is empty for an op with one kernel. For an op with several, it has all of them in the order in which a
    call tries them. ``symbol``, ``workspace``, ``dtypes`` and ``space`` are then those of the first. ``rows`` are tuned
    choices for a library without Python. ``rule`` sorts calls into classes that share a choice.

    ``names`` are the torch ops to register. If the op returns arguments, the first of them only writes to them.
    ``dtypes`` are the dtypes that the kernel accepts, and empty if it accepts all declared ones. ``strided`` are the
    arguments that it accepts with any strides. If ``out`` is true, the out-variant is registered, too. ``align`` is the
    alignment in bytes that the kernel needs. ``source`` is the C++ source code of a generated kernel, or empty.
    """

    spec: OpSpec
    symbol: str
    names: tuple[str, ...]
    device: str = "cpu"
    workspace: Expr | None = None
    strided: frozenset[str] = frozenset()
    dtypes: tuple[str, ...] = ()
    out: bool = False
    space: Space | None = None
    rule: BucketRule | None = None
    align: int = 1
    edition: int = 1  # of the schema in this process
    source: str = ""  # the C++ of the kernel's function, where no library has it
    kernels: tuple[NativeChoice, ...] = ()
    rows: tuple[tuple[int, ...], ...] = ()

    @cached_property
    def unfit(self) -> str:
        """The reason why generated C++ code cannot run the calls of the op, so that Python has to. It is an empty
        string if C++ code can run them.
        """
        return _why_unfit(self)

    @cached_property
    def described(self) -> Mapping[str, Any]:
        """The values that the Jinja2 template prints for this op, by the names that the template uses. The id that the
        op has in a library is not among them.
        """
        return _template_values(self)


def native_source(ops: Sequence[NativeOp], *, alone: bool = False) -> str:
    """Return the C++ source code of the native bindings of ``ops`` as one translation unit. A native binding is the
    code that torch calls in place of Python.

    If ``alone`` is true, the code is for processes without Shiplap. Otherwise it is for processes that have imported
    Shiplap. Raise ``SL404`` if generated C++ cannot check the calls of an op.
    """
    return render_source(
        "native.cpp.jinja",
        alone=alone,
        scalar_types=SCALAR,
        schemas=_by_namespace(ops),
        ops=[describe_op(op, f"op_{index}") for index, op in enumerate(ops)],
    )


def _by_namespace(ops: Sequence[NativeOp]) -> list[tuple[str, dict[str, str]]]:
    """Return a pair for each namespace of ``ops``. It holds the name of the namespace and a dict. The keys of the dict
    are the torch schemas to define, as C++ string literals. An op for two devices contributes its schemas once.

    The values of the dict are empty strings, except for the schema of an op that returns its arguments. There the value
    is the C++ namespace that implements the op.
    """
    by_namespace: dict[str, dict[str, str]] = {}
    for index, op in enumerate(ops):
        schemas = by_namespace.setdefault(op.spec.namespace, {})
        if op.spec.returned:  # first: torch forgets overloads in the order in which they were defined
            name = name_of_edition(op.spec.opname, op.edition)
            schemas.setdefault(quote_cpp(public_schema(op.spec, name)), f"op_{index}")
        texts = [schema_text(op.spec, name) for name in op.names]
        texts += [out_variant_schema(op.spec, _helper_op_name(op, "out"))] if op.out else []
        for text in texts:
            schemas.setdefault(quote_cpp(text), "")
    return list(by_namespace.items())


def describe_op(op: NativeOp, id: str) -> dict[str, Any]:
    """Return the values that the Jinja2 template prints for ``op``, by the names that the template uses. ``id`` is the
    C++ namespace of the op in the translation unit.
    """
    return {"id": id, **op.described}


def _template_values(op: NativeOp) -> dict[str, Any]:
    """Return the values from which the Jinja2 template renders the C++ code of ``op``, by the names that the template
    uses. Raise ``SL404`` if generated C++ cannot check the calls of the op.
    """
    spec = op.spec
    parameters = c_prototype(spec)
    if reason := op.unfit:
        raise error(
            "SL404",
            where=spec.name,
            what="generated C++ cannot check calls of this op",
            got=reason,
            expected="sizes and dtypes that generated C++ can check",
            fix="keep the Python binding, which handles this kernel, or declare sizes and dtypes that C++ can check",
        )
    where = f"{spec.name}, kernel {op.symbol}"
    functions = [(name, "call") for name in op.names]  # each torch op with the C++ function behind it
    calls = [{"function": "call", "python": f"{spec.namespace}::{_helper_op_name(op, 'python')}", "out": False}]
    if op.out:
        functions.append((_helper_op_name(op, "out"), "call_out"))
        python = f"{spec.namespace}::{_helper_op_name(op, 'out__python')}"
        calls.append({"function": "call_out", "python": python, "out": True})
    defaults = config_rows(op.kernels) if op.kernels else [config_values(op.space)]
    peek = [("_or_absent" if a.optional else "", i) for i, a in enumerate(spec.args) if a.tensor is not None]
    return {
        "spec": spec,
        "symbols": [k.symbol for k in op.kernels] or [op.symbol],
        "symbol": op.symbol,
        "several": bool(op.kernels),
        "picks": _default_picks(op),
        "rows": [number for row in op.rows for number in row],
        "row_count": len(op.rows),
        "source": op.source,
        "device": op.device,
        "prototype": parameters,
        "entries": ", ".join(f"{{{quote_cpp(name)}, &{f}_entry}}" for name, f in functions),
        "routes": ", ".join(f"{{&{f}, &{f}_target}}" for f in dict.fromkeys(f for _, f in functions)),
        "key": op.device.upper(),
        "calls": calls,
        "scratch": scratch_name(spec),
        "returning": _returning_op(op),
        "where": where,
        **_print_plan_steps(op, CallPlan(spec), where),
        "arguments": [_argument_expression(spec, p) for p in parameters],
        "defaults": defaults,
        "config_size": len(defaults[0]),
        "config_sizes": [len(config_values(k.space)) for k in op.kernels],
        "lookup": lookup_key(spec, op.rule),
        "contiguous": [f"peek_contiguous{suffix}(values[{i}])" for suffix, i in peek],
    }


def _print_plan_steps(op: NativeOp, plan: CallPlan, where: str) -> dict[str, Any]:
    """Return the C++ statements of ``plan``, which are the checks, allocations and copies of a call of ``op``. They are
    lists under the names that the Jinja2 template uses. ``where`` names the op and the kernel in errors.
    """
    spec, outputs = op.spec, plan.outputs
    return {
        "deferrals": list(_input_deferrals(op, plan)),
        "out_deferrals": _out_deferrals(op, plan),
        "checks": step_statements((*plan.arguments, *plan.sharing, *outputs.bounds, *outputs.measured)),
        "fitting": step_statements(outputs.fitting),
        "disjoint": step_statements(outputs.disjoint),
        "scratch_checks": step_statements(outputs.scratch),
        "room_checks": step_statements(outputs.room),
        "within": step_statements(CheckStep(size_is_within_bound(where, d, e.source)) for d, e in spec.bounds),
        "outputs": [_describe_output(spec, outputs, out) for out in spec.outputs],
        "packed": step_statements(packed := packing_steps(spec, op.strided, op.align, native=True)),
        "written_back": [step.at for step in packed if isinstance(step, PackStep) and step.written],
        "allocated": step_statements(outputs.allocated),
        "workspace": _workspace_statements(op, plan.names),
        "widest": _itemsize_dtypes(spec),
    }


def _helper_op_name(op: NativeOp, role: str) -> str:
    """Return the torch name of a helper op of ``op``, such as its Python fallback for ``role="python"``. If this
    process has declared the op's name with several schemas, each has helper ops with names of their own.
    """
    return name_of_edition(f"{op.spec.stem}__{role}", op.edition)


def _returning_op(op: NativeOp) -> dict[str, Any]:
    """Return the values that the Jinja2 template prints for an op that returns arguments to which it writes. Return an
    empty dict for any other op.

    The values are the name and the overload of the helper op that writes, and ``results``, one integer for each result.
    It is the position of the argument that is returned, or -1 for a new tensor.
    """
    if not op.spec.returned:
        return {}
    places = {a.name: i for i, a in enumerate(op.spec.args)}
    name, _, overload = op.names[0].partition(".")
    results = [places[r.alias] if r.alias else -1 for r in op.spec.returns]
    return {"writer": f"{op.spec.namespace}::{name}", "overload": overload, "results": results}


def _why_unfit(op: NativeOp) -> str:
    """Return the reason why generated C++ cannot run the calls of ``op``, such as a tensor whose rank is not fixed.
    Return an empty string if it can.
    """
    spec = op.spec
    # Without a static default config, the kernel has no values to run with before a choice exists.
    spaces = [k.space for k in op.kernels] or [op.space]
    if any(space is not None and space.static is None for space in spaces):
        return "a config that C++ cannot look up"
    if (op.kernels or op.space is not None) and not lookup_key(spec, op.rule):
        return "a config that C++ cannot look up"
    if optional := [a.name for a in spec.args if a.mutated and a.optional]:
        return f"{optional[0]}, which may be absent and is written to"
    tensors = [t for t in (*(a.tensor for a in spec.tensors), *(o.tensor for o in spec.outputs)) if t is not None]
    # The generated code works with a fixed number of dims, for which it reserves memory.
    for kind in tensors:
        if kind.variadic or len(kind.dims) > _MAX_RANK:
            return f"{kind}, whose rank is not fixed" if kind.variadic else f"{kind}, of more than {_MAX_RANK} dims"
        if kind.concrete and dtypes.number(kind.dtypes[0]) < 0:
            return f"{kind.dtypes[0]}, which torch's stable ABI does not name"
    # Division, remainders and calls on floats are not sure to agree in C++ and in Python.
    real = {a.name for a in spec.scalars if "float" in str(a.scalar)}
    exprs = [e for _, e in (*spec.dims, *spec.bounds)] + list(spec.requires) + _workspaces(op)
    for expr in exprs:
        if expr.names & real and any(c in expr.source for c in "/%("):
            return f"{expr}, which is not of integers"
    try:
        # quote() refuses characters that C++ cannot hold in a literal.
        for text in [schema_text(spec), *(str(k) for k in tensors), *(e.source for e in exprs)]:
            quote_cpp(text)
        step_statements(CallPlan(spec).arguments)
    except ValueError as e:
        return str(e)
    return ""


@dataclass(frozen=True)
class Deferral:
    """A C++ condition on arguments under which Python runs the call. It is tested before the arguments are converted.
    ``reason`` states why, as a C++ string literal.
    """

    condition: str
    reason: str


def _input_deferrals(op: NativeOp, plan: CallPlan) -> Iterable[Deferral]:
    """Yield the C++ conditions on the arguments under which a call of ``op`` is passed on to Python. Each has its
    reason.
    """
    classes: set[str] = set()
    if op.spec.dynamic and op.device == "cuda":  # sizes that the host reads
        yield Deferral("is_capturing()", quote_cpp("a call that is captured in a CUDA graph"))
    undecided = [step.rule for step in plan.arguments if isinstance(step, CheckStep)]
    for index, arg in enumerate(op.spec.args):
        kind = arg.tensor
        if kind is None or arg.optional:
            continue
        for rule in undecided:  # None first, of which no other condition can be asked
            if rule.argument == arg.name and rule.deferral:
                yield Deferral(rule.deferral.format(index=index), quote_cpp(f"{rule.undecided}: argument {arg.name!r}"))
        if not kind.concrete and kind.dtype_class not in classes:
            classes.add(kind.dtype_class)
            taken = kind.dtypes or dtypes.DTYPES if op.kernels else op.dtypes or kind.dtypes or dtypes.DTYPES
            reason = f"a dtype that the kernel does not take: argument {arg.name!r}"
            yield Deferral(f"!among(peek_dtype(values[{index}]), {dtypes.mask(taken)})", quote_cpp(reason))

    if op.kernels and all(takes := [_takes_dtypes(op.spec, kernel.dtypes) for kernel in op.kernels]):
        yield Deferral(f"!({' || '.join(takes)})", quote_cpp("dtypes that no kernel takes"))


def _default_picks(op: NativeOp) -> list[str]:
    """Return the C++ statements that set ``config`` to the default config of the first kernel that accepts the dtypes
    of the call. The list is empty if the op has one kernel.
    """
    picks: list[str] = []
    for number, kernel in enumerate(op.kernels):
        takes = _takes_dtypes(op.spec, kernel.dtypes) if number + 1 < len(op.kernels) else ""
        otherwise = "else " if number else ""
        picks.append(f"{otherwise}{f'if ({takes}) ' if takes else ''}config = default_configs[{number}];")
        if not takes:  # the kernels behind it run where they are chosen
            break
    return picks


def _takes_dtypes(spec: OpSpec, taken: tuple[str, ...]) -> str:
    """Return a C++ condition for the dtypes of a call. It is true if a kernel that accepts only the dtypes ``taken``
    accepts them. Return an empty string if ``taken`` is empty or the op has no dtype classes, since the kernel then
    accepts all calls.
    """
    first = {a.tensor.dtype_class: i for i, a in reversed([*enumerate(spec.args)]) if a.tensor and not a.optional}
    peeks = [f"among(peek_dtype(values[{first[c]}]), {dtypes.mask(taken)})" for c in first if c in spec.dtype_classes]
    return f"({' && '.join(peeks)})" if taken and peeks else ""


def _out_deferrals(op: NativeOp, plan: CallPlan) -> list[Deferral]:
    """Return the C++ conditions on the caller's output tensors under which a call of the out-variant is passed on to
    Python. Each has its reason.
    """
    written = [*enumerate((o.name for o in op.spec.outputs), len(op.spec.args))]
    found = [
        Deferral(undefined_condition(index), quote_cpp(f"None for a tensor: output {name!r}"))
        for index, name in written
    ]
    for index, name in written if op.align > 1 else ():
        reason = quote_cpp(f"an address that is no multiple of {op.align} bytes: output {name!r}")
        found.append(Deferral(f"!peek_aligned(values[{index}], {op.align})", reason))
    rule = plan.outputs.no_gradient
    return [*found, Deferral(rule.deferral, quote_cpp(rule.undecided))]


def _workspace_statements(op: NativeOp, names: VariableNames) -> list[str]:
    """Return C++ statements that set ``needed`` to the bytes of scratch memory that the chosen kernel needs. ``names``
    returns the C++ variables of dims and scalars. Return an empty list if no kernel needs any.
    """
    # Kernels with the same expression share one computation.
    several, each = _workspaces(op), [k.workspace for k in op.kernels] or [op.workspace]
    if not several:
        return []

    def computed(workspace: Expr, name: str) -> list[str]:
        """Return the C++ statements that evaluate the size expression ``workspace`` and assign its value to a new
        variable called ``name``.
        """
        steps, term = try_expression(op.spec, names, "v_workspace", VariableType.SIZE, workspace)
        return step_statements((*steps, LetStep(name, VariableType.SIZE, term)))

    if len(several) == 1 and None not in each:
        return computed(several[0], "needed")
    lines = ["int64_t needed = 0;"]
    for number, workspace in enumerate(each):
        if workspace is not None:
            lines += [f"if (config[0] == {number}) {{", *computed(workspace, "own"), "needed = own;", "}"]
    return lines


def _workspaces(op: NativeOp) -> list[Expr]:
    """Return the size expressions of the scratch memory of the op's kernels, in the order of the kernels and without
    duplicates.
    """
    each = [k.workspace for k in op.kernels] or [op.workspace]
    return list({e.source: e for e in each if e is not None}.values())


def _itemsize_dtypes(spec: OpSpec) -> str:
    """Return a C++ initialiser list of the dtypes that the function ``itemsize`` of an expression considers.

    These are the dtypes of the dtype classes, the names in annotations such as ``Float``. If the op has none, they are
    the dtypes of its required tensor arguments.
    """
    always = [f"type_{a.name}" for a in spec.tensors if not a.optional]
    return "{" + ", ".join([f"dtype_{c}" for c in spec.dtype_classes] or always) + "}"


@dataclass(frozen=True)
class _Out:
    """The values that the Jinja2 template prints for one output. They are its name, the C++ initialiser list of its
    shape after the kernel has run, and whether a size of it depends on data.
    """

    name: str
    final_shape: str
    dynamic: bool


def _describe_output(spec: OpSpec, plan: OutputPlan, out: Output) -> _Out:
    """Return the values that the Jinja2 template prints for the output ``out``. They are its name, the C++ initialiser
    list of its shape after the kernel has run, and whether a size of it depends on data.
    """
    kind = out.tensor
    # A size that depends on data is only known after the kernel has run, so the shape is written with its extent.
    used = {d.text for d in kind.dims}.union(*(d.expr.names for d in kind.dims if d.expr))
    final = _shape_expression(kind, lambda n: f"extent_{n}" if n in spec.dynamic else plan.names(n))
    return _Out(out.name, final, bool(used & spec.dynamic.keys()))


def _shape_expression(kind: TensorType, names: Callable[[str], str]) -> str:
    """Return the C++ initialiser list of the sizes of a tensor of the type ``kind``, such as ``{n, int64_t{4}}``.
    ``names`` returns the C++ variable of a dim.
    """
    sizes = [
        to_cpp(d.expr, names) if d.expr else f"int64_t{{{d.size}}}" if d.kind == "fixed" else names(d.text)
        for d in kind.dims
    ]
    return "{" + ", ".join(sizes) + "}"


def _argument_expression(spec: OpSpec, p: CParameter) -> str:
    """Return the C++ expression that the generated code passes to the kernel for the C parameter ``p``."""
    if p.role == "input":
        look = f"look(v_{p.source}, t_{p.source})"
        return f"t_{p.source} ? {look} : nullptr" if spec.arg(p.source).optional else look
    return {
        "output": f"look(v_{p.source}, t_{p.source})",
        "scalar": f"a_{p.source}.c_str()" if "char" in p.ctype else f"a_{p.source}",
        "list": f"a_{p.source}.data()",
        "length": f"static_cast<int64_t>(a_{p.source}.size())",
        "extent": f"&extent_{p.source}",
    }[p.role]
