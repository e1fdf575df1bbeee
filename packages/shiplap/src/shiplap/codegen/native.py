"""``OpSpec`` → C++ source of its native binding: the checks, allocations and views around one C ABI call.

The C++ says yes or no as ``op/fast.py`` does; what it cannot decide (a dtype the kernel does not take, a mutated tensor
with gaps) it hands to ``<op>__python`` before it has taken any argument.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from shiplap.codegen.chosen import config_values, lookup_key
from shiplap.codegen.ctype import CParameter, prototype
from shiplap.codegen.environment import render
from shiplap.codegen.expression import quote, to_cpp
from shiplap.errors import error
from shiplap.op import fast
from shiplap.op.bucket import Rule
from shiplap.op.config import Space
from shiplap.op.expr import Expr
from shiplap.op.out import out_name, out_schema, scratch_name
from shiplap.op.schema import schema
from shiplap.op.spec import Arg, Dim, OpSpec, Output, TensorType

__all__ = ["SCALAR", "Native", "describe", "dtype_mask", "native_source", "scalar_type", "unfit"]

# torch.headeronly ScalarType numbers: part of the stable ABI.
_DTYPE = {
    "uint8": 0,
    "int8": 1,
    "int16": 2,
    "int32": 3,
    "int64": 4,
    "float16": 5,
    "float32": 6,
    "float64": 7,
    "complex64": 9,
    "complex128": 10,
    "bool": 11,
    "bfloat16": 15,
    "float8_e5m2": 23,
    "float8_e4m3fn": 24,
    "float8_e5m2fnuz": 25,
    "float8_e4m3fnuz": 26,
}
_FLOATING = {"float16", "float32", "float64", "bfloat16"}
SCALAR = {
    "int": "int64_t",
    "float": "double",
    "bool": "bool",
    "str": "std::string",
    "list[int]": "List",
    "list[float]": "std::vector<double>",
}
_MAX_RANK = 8


@dataclass(frozen=True)
class Native:
    """One op to be bound: its declaration, and what its only kernel on ``device`` says.

    ``names`` are the torch ops to register; ``dtypes`` what the kernel takes, empty for all that are declared. ``out``
    asks for the out-variant too; ``align`` is what the kernel asks of addresses.
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
    rule: Rule | None = None
    align: int = 1


def native_source(ops: Sequence[Native]) -> str:
    """One translation unit for ``ops``; SL404 for a declaration that has to stay with the Python binding."""
    return render(
        "native.cpp.jinja",
        scalar_types=SCALAR,
        schemas=_by_namespace(ops),
        ops=[describe(op, f"op_{index}") for index, op in enumerate(ops)],
    )


def _by_namespace(ops: Sequence[Native]) -> list[tuple[str, list[str]]]:
    """Every schema once, also of an op that is there for two devices."""
    found: dict[str, dict[str, None]] = {}
    for op in ops:
        found.setdefault(op.spec.namespace, {}).update(dict.fromkeys(_schemas(op)))
    return [(namespace, list(schemas)) for namespace, schemas in found.items()]


def describe(op: Native, id: str) -> dict[str, Any]:
    """What the template prints of one op."""
    spec = op.spec
    parameters = prototype(spec)
    if reason := unfit(op):
        raise error(
            "SL404",
            where=spec.name,
            got=reason,
            expected="a declaration whose checks are one straight line",
            fix="none needed: the Python binding serves it",
        )
    names = _Names(spec)
    checks = _Checks(op, names)
    return {
        "id": id,
        "spec": spec,
        "symbol": op.symbol,
        "device": op.device,
        "prototype": parameters,
        "functions": ", ".join(f"{{{quote(name)}, &{f}}}" for name, f in _functions(op)),
        "key": op.device.upper(),
        "calls": [{"function": "call", "python": f"{spec.name}__python", "out": False}, *_out_call(op)],
        "scratch": scratch_name(spec),
        "where": f"{spec.name}, kernel {op.symbol}",
        "abouts": [_about(spec, a) for a in spec.tensors],
        "about_outs": [_about_out(spec, o) for o in spec.outputs],
        "deferrals": list(_deferrals(op)),
        "out_deferrals": list(_misaligned(op, len(spec.args), [False] * len(spec.outputs))),
        "checks": [*checks.lines, *_sharing(spec)],
        "bounds": [{"dim": d, "value": to_cpp(e, names), "text": quote(e.source)} for d, e in spec.bounds],
        "outputs": [_output(spec, out, names) for out in spec.outputs],
        "packed": [a for a in spec.tensors if a.name not in op.strided and not a.mutated],
        "workspace": to_cpp(op.workspace, names) if op.workspace else "",
        "widest": _widest(spec, checks.classes),
        "arguments": [_argument(spec, p) for p in parameters],
        "config": config_values(op.space),
        "lookup": lookup_key(spec, op.rule),
        "contiguous": [_peek_contiguous(i, a) for i, a in enumerate(spec.args) if a.tensor is not None],
    }


def _schemas(op: Native) -> list[str]:
    """Of every torch op that the code implements, for a process without shiplap."""
    return [*(quote(schema(op.spec, name)) for name in op.names), *([quote(out_schema(op.spec))] if op.out else [])]


def _functions(op: Native) -> list[tuple[str, str]]:
    """Each torch op and the C++ function behind it."""
    return [*((name, "call") for name in op.names), *([(out_name(op.spec), "call_out")] if op.out else [])]


def _out_call(op: Native) -> list[dict[str, Any]]:
    python = f"{op.spec.namespace}::{out_name(op.spec)}__python"
    return [{"function": "call_out", "python": python, "out": True}] if op.out else []


def unfit(op: Native) -> str:
    """Why Python has to serve this op, or empty."""
    spec = op.spec
    if op.space is not None and (op.space.static is None or not lookup_key(spec, op.rule)):
        return "a config that C++ cannot look up"
    if not fast.source(spec):
        return "sizes or dtypes that are only known after a later argument"
    tensors = [t for t in (*(a.tensor for a in spec.tensors), *(o.tensor for o in spec.outputs)) if t is not None]
    for kind in tensors:
        if kind.variadic or len(kind.dims) > _MAX_RANK:
            return f"{kind}, whose rank is not fixed" if kind.variadic else f"{kind}, of more than {_MAX_RANK} dims"
        if kind.concrete and kind.dtypes[0] not in _DTYPE:
            return f"{kind.dtypes[0]}, which torch's stable ABI does not name"
    real = {a.name for a in spec.scalars if "float" in str(a.scalar)}
    exprs = [e for _, e in (*spec.dims, *spec.bounds)] + list(spec.requires) + ([op.workspace] if op.workspace else [])
    for expr in exprs:
        if expr.names & real and any(c in expr.source for c in "/%("):
            return f"{expr}, which is not of integers"
    try:
        for text in [schema(spec), *(str(k) for k in tensors), *(e.source for e in exprs)]:
            quote(text)
    except ValueError as e:
        return str(e)
    return ""


class _Names:
    """C++ names: ``a_`` scalar arguments, ``d_`` dims, ``w_`` what only workspace expressions may use."""

    def __init__(self, spec: OpSpec) -> None:
        self.scalars = {a.name for a in spec.scalars}

    def __call__(self, name: str) -> str:
        prefix = "a_" if name in self.scalars else "w_" if name in ("threads", "itemsize") else "d_"
        return prefix + name


def _about(spec: OpSpec, arg: Arg) -> dict[str, str]:
    fields = quote(spec.name), quote(arg.name), quote(str(arg.tensor))
    return {"name": arg.name, "text": "{" + ", ".join(fields) + "}"}


def _about_out(spec: OpSpec, out: Output) -> dict[str, str]:
    fields = quote(spec.name), quote(out.name), quote(str(out.tensor))
    return {"name": out.name, "text": "{" + ", ".join(fields) + "}"}


def _deferrals(op: Native) -> Iterable[str]:
    """Conditions on arguments not yet taken under which Python serves the call."""
    classes: set[str] = set()
    for index, arg in enumerate(op.spec.args):
        kind = arg.tensor
        if kind is None:
            continue
        yield from _misaligned(op, index, [arg.optional])
        if arg.optional:
            continue
        if not kind.concrete and kind.dtype_class not in classes:
            classes.add(kind.dtype_class)
            taken = set(op.dtypes or kind.dtypes or _DTYPE) & _DTYPE.keys()
            yield f"!carried(peek_dtype(values[{index}]), {dtype_mask(taken)})"
        if arg.mutated:
            yield f"!peek_contiguous(values[{index}])"
            if not kind.dtypes or set(kind.dtypes) & _FLOATING:
                yield "aoti_torch_grad_mode_is_enabled()"


def _misaligned(op: Native, first: int, optional: Sequence[bool]) -> Iterable[str]:
    """Conditions on the tensors from number ``first`` on under which one lies where the kernel does not take it."""
    for index, may_be_absent in enumerate(optional, first) if op.align > 1 else ():
        yield f"!peek_aligned{'_or_absent' if may_be_absent else ''}(values[{index}], {op.align})"


def _peek_contiguous(index: int, arg: Arg) -> str:
    return f"peek_contiguous{'_or_absent' if arg.optional else ''}(values[{index}])"


def _sharing(spec: OpSpec) -> Iterable[str]:
    for arg in spec.args:
        if arg.mutated:
            for other in spec.tensors:
                if other is not arg:
                    yield f'about_{arg.name}.unshared(t_{arg.name}, t_{other.name}, "{other.name}");'


class _Checks:
    """The argument checks in the order of the declaration, and which dims and dtype classes they have bound."""

    def __init__(self, op: Native, names: _Names) -> None:
        self.spec, self.names = op.spec, names
        self.lines: list[str] = []
        self.bound: set[str] = set(names.scalars)
        self.loose = fast.loose(op.spec)  # dims that may be absent: -1 until an argument has them
        self.classes: list[str] = []
        self.lines += [f"int64_t d_{name} = -1;" for name in sorted(self.loose)]
        for arg in self.spec.tensors:
            body = list(self.tensor(arg))
            self.lines += [f"if (t_{arg.name}) {{", *(f"  {line}" for line in body), "}"] if arg.optional else body
        for name, expr in self.spec.dims:
            self.relation(name, expr)
        for expr in self.spec.requires:
            self.lines.append(f'require({to_cpp(expr, names)}, "{self.spec.name}", {quote(expr.source)});')

    def tensor(self, arg: Arg) -> Iterable[str]:
        kind, tensor, about = arg.tensor, f"t_{arg.name}", f"about_{arg.name}"
        assert kind is not None
        yield f"{about}.rank({tensor}, {len(kind.dims)});"
        if kind.dtypes:
            yield f"{about}.dtype({tensor}.dtype(), {dtype_mask(kind.dtypes)});"
        if not kind.concrete and kind.dtype_class in self.classes:
            yield f"{about}.same_dtype({tensor}.dtype(), dtype_{kind.dtype_class});"
        elif not kind.concrete:
            self.classes.append(kind.dtype_class)
            yield f"[[maybe_unused]] const int32_t dtype_{kind.dtype_class} = {tensor}.dtype();"
        first = arg is self.spec.tensors[0]
        yield f"const Device device = device_of({tensor});" if first else f"{about}.device({tensor}, device);"
        if kind.dims:
            yield f"[[maybe_unused]] const int64_t* size_{arg.name} = {tensor}.sizes();"
        for axis, dim in enumerate(kind.dims):
            yield from self.dim(arg, axis, dim)
        if arg.contiguous:
            yield f"{about}.contiguous({tensor});"

    def dim(self, arg: Arg, axis: int, dim: Dim) -> Iterable[str]:
        size = f"size_{arg.name}[{axis}]"
        if dim.kind == "any":
            return
        if dim.kind == "fixed":
            yield f"about_{arg.name}.fixed({axis}, {size}, {dim.size});"
        elif dim.kind == "name" and dim.text in self.loose:
            yield f"if (d_{dim.text} < 0) d_{dim.text} = {size};"
            yield f"about_{arg.name}.size({quote(dim.text)}, {axis}, {size}, d_{dim.text});"
        elif dim.kind == "name" and dim.text not in self.bound:
            self.bound.add(dim.text)
            yield f"[[maybe_unused]] const int64_t d_{dim.text} = {size};"
        else:
            want = to_cpp(dim.expr, self.names) if dim.expr else self.names(dim.text)
            yield f"about_{arg.name}.size({quote(dim.text)}, {axis}, {size}, {want});"

    def relation(self, name: str, expr: Expr) -> None:
        value = to_cpp(expr, self.names)
        if name in self.bound:
            self.lines.append(f'agree("{self.spec.name}", "{name}", {self.names(name)}, {value});')
        else:
            self.bound.add(name)
            self.lines.append(f"[[maybe_unused]] const int64_t d_{name} = {value};")


def scalar_type(dtype: str) -> int:
    """ScalarType number of a torch name; -1 for what the stable ABI does not name."""
    return _DTYPE.get(dtype, -1)


def dtype_mask(dtypes: Iterable[str]) -> str:
    """Dtypes as a bit set over ScalarType numbers."""
    return f"uint64_t{{{sum(1 << _DTYPE[d] for d in dtypes if d in _DTYPE)}}}"


def _widest(spec: OpSpec, classes: Sequence[str]) -> str:
    """The dtypes among which ``itemsize`` looks: those of the classes, else of the tensors that are there."""
    always = [f"t_{a.name}.dtype()" for a in spec.tensors if not a.optional]
    return "{" + ", ".join([f"dtype_{c}" for c in classes] or always) + "}"


@dataclass(frozen=True)
class _Out:
    name: str
    shape: str
    final_shape: str
    dtype: str
    dynamic: bool


def _output(spec: OpSpec, out: Output, names: _Names) -> _Out:
    kind = out.tensor
    dtype = str(_DTYPE[kind.dtypes[0]]) if kind.concrete else f"dtype_{kind.dtype_class}"
    used = {d.text for d in kind.dims}.union(*(d.expr.names for d in kind.dims if d.expr))
    final = _shape(kind, lambda n: f"extent_{n}" if n in spec.dynamic else names(n))
    return _Out(out.name, _shape(kind, names), final, dtype, bool(used & spec.dynamic.keys()))


def _shape(kind: TensorType, names: Callable[[str], str]) -> str:
    sizes = [
        to_cpp(d.expr, names) if d.expr else f"int64_t{{{d.size}}}" if d.kind == "fixed" else names(d.text)
        for d in kind.dims
    ]
    return "{" + ", ".join(sizes) + "}"


def _argument(spec: OpSpec, p: CParameter) -> str:
    if p.role == "input":
        look = f"look(v_{p.source}, t_{p.source})"
        return f"t_{p.source} ? {look} : nullptr" if spec.arg(p.source).optional else look
    return {
        "output": f"look(v_{p.source}, o_{p.source})",
        "scalar": f"a_{p.source}.c_str()" if "char" in p.ctype else f"a_{p.source}",
        "list": f"a_{p.source}.data()",
        "length": f"static_cast<int64_t>(a_{p.source}.size())",
        "extent": f"&extent_{p.source}",
    }[p.role]
