"""``export_onnx(program, path)``: an ONNX model in which each declared op is a function made from its reference.

A call of an op becomes a node in a domain of the op's namespace. The model has a function for that node, whose body is
the reference in standard operators, so onnxruntime runs the model without torch and without Shiplap. A runtime with a
kernel for the node may use that kernel in place of the body.
"""

from __future__ import annotations

import hashlib
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from shiplap.dispatch import Op, registry
from shiplap.errors import ShiplapError, error, writing
from shiplap.torch_private.graph_nodes import node_value, operator_name
from shiplap.torch_private.symbolic_sizes import distinct_sizes

PACKAGES = ("onnx", "onnxscript", "onnx_ir")
# Example sizes of a function: no two dims agree by accident, and none is 1.
EXAMPLE_SIZES = (7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67)
DOMAIN_VERSION = 1


@dataclass(frozen=True)
class OnnxModel:
    """A model that was written: its path, and the declared ops that it holds as functions."""

    path: Path
    ops: tuple[str, ...]


@dataclass(frozen=True)
class InputNumber:
    """The position of a tensor argument among the inputs of a function."""

    number: int


@dataclass(frozen=True)
class FunctionForm:
    """One form in which a program calls an op.

    Attributes:
        op: the declared op.
        values: the arguments in declared order. A tensor is represented by its position among the inputs.
        inputs: an example of each tensor argument, without memory, and the dims of it that vary.
    """

    op: Op
    values: tuple[Any, ...]
    inputs: tuple[tuple[Tensor, tuple[int, ...]], ...]

    @property
    def name(self) -> str:
        """The name of the function, with a digest of all that its body fixes."""
        sizes = [
            (str(t.dtype), [s if i not in dims else "varies" for i, s in enumerate(t.shape)]) for t, dims in self.inputs
        ]
        digest = hashlib.sha256(repr((self.values, sizes)).encode()).hexdigest()[:8]
        return f"{self.op.spec.stem}_{digest}"


def export_onnx(
    program: torch.export.ExportedProgram, path: str | os.PathLike[str], *, opset: int | None = None
) -> OnnxModel:
    """Write ``program`` as an ONNX model that runs without torch.

    Args:
        program: the result of ``torch.export.export``. Sizes that vary there vary in the model.
        path: the file to write, ``model.onnx``.
        opset: the version of ONNX's standard operators. The default is torch's.

    Returns:
        The path, and the names of the declared ops in the model.

    Raises:
        ShippingError: SL321 if an op has no form in ONNX, SL322 if the packages of ``shiplap[onnx]`` are not installed.
        CommandError: SL602 if ``path`` cannot be written.
    """
    missing = [name for name in PACKAGES if find_spec(name) is None]
    if missing:
        raise error("SL322", where=str(path), got=f"no package {missing[0]}", expected=", ".join(PACKAGES))
    model, ops = _convert_program(program, str(path), opset)
    with writing(Path(path), "the model", "a writable file"):
        model.save(str(path))
    return OnnxModel(Path(path), tuple(sorted(ops)))


def _convert_program(program: torch.export.ExportedProgram, where: str, opset: int | None) -> tuple[Any, set[str]]:
    """Return torch's ONNX program with a function for each form of a declared op, and the names of these ops."""
    forms: dict[str, FunctionForm] = {}
    calls: dict[Any, deque[FunctionForm]] = {}
    for node in program.graph.nodes:
        op = registry.find_declared_op(operator_name(node.target)) if node.op == "call_function" else None
        if op is not None:
            form = _form_of_call(op, node)
            forms.setdefault(form.name, form)
            calls.setdefault(node.target, deque()).append(form)
    table = {target: _translation(queue) for target, queue in calls.items()}
    try:
        model = torch.onnx.export(
            program, dynamo=True, custom_translation_table=table, opset_version=opset, verbose=False, optimize=True
        )
    except ShiplapError:
        raise
    except Exception as e:  # torch has an error of its own for each step
        raise error("SL321", where=where, got=_first_reason(e), expected="operators that ONNX has") from e
    assert model is not None
    for form in forms.values():
        _add_function(model.model, form, opset)
    return model, {form.op.spec.name for form in forms.values()}


def _first_reason(e: BaseException) -> str:
    """Return the innermost cause of torch's error, which is the one that names the operator."""
    while e.__cause__ is not None:
        e = e.__cause__
    lines = [line for line in str(e).splitlines() if line.strip()]
    return f"{type(e).__name__}: {lines[0] if lines else ''}"


def _form_of_call(op: Op, node: Node) -> FunctionForm:
    spec = op.spec
    if any(arg.mutated for arg in spec.args):
        raise _no_form(op, "it writes to an argument", "an op that returns its results")
    values = _bind_arguments(op, node.args, node.kwargs)
    fakes: list[Tensor] = []

    def numbered(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return tuple([numbered(v) for v in value])
        held = node_value(value) if isinstance(value, Node) else value
        if isinstance(held, Tensor):
            fakes.append(held)
            return InputNumber(len(fakes) - 1)
        if isinstance(value, Node):
            raise _no_form(op, "a number that the program computes", "numbers that are known when it is exported")
        return held

    form = tuple([numbered(value) for value in values])
    try:
        examples = distinct_sizes(fakes, EXAMPLE_SIZES)
    except ValueError as e:
        raise _no_form(op, str(e), f"at most {len(EXAMPLE_SIZES)} sizes that vary") from None
    dims = [tuple([i for i, size in enumerate(fake.shape) if not isinstance(size, int)]) for fake in fakes]
    return FunctionForm(op, form, tuple(zip(examples, dims, strict=True)))


def _bind_arguments(op: Op, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return the values of a call in declared order, with defaults for what is left out."""
    given = dict(kwargs) | dict(zip([a.name for a in op.spec.args], args, strict=False))
    return [given.get(a.name, None if a.default is ... else a.default) for a in op.spec.args]


def _flat_inputs(values: Sequence[Any], form: Sequence[Any]) -> Iterator[Any]:
    """Yield the values at the places where ``form`` has a tensor."""
    for value, place in zip(values, form, strict=True):
        if isinstance(place, InputNumber):
            yield value
        elif isinstance(place, tuple) and isinstance(value, (list, tuple)):
            yield from _flat_inputs(value, place)


def _translation(queue: deque[FunctionForm]) -> Callable[..., Any]:
    """Return the function that the exporter calls for each call of one op, in the order of the graph."""
    from onnx.defs import OpSchema
    from onnxscript.values import Op as NodeMaker
    from onnxscript.values import Opset

    def translate(*args: Any, **kwargs: Any) -> Any:
        form = queue.popleft()
        op = form.op
        inputs = list(_flat_inputs(_bind_arguments(op, args, kwargs), form.values))
        parameters = [OpSchema.FormalParameter(f"input_{i}", "T") for i in range(len(inputs))]
        results = [OpSchema.FormalParameter(f"output_{i}", "T") for i in range(len(op.spec.outputs))]
        schema = OpSchema(
            form.name,
            op.spec.namespace,
            DOMAIN_VERSION,
            inputs=parameters,
            outputs=results,
            type_constraints=[("T", list(OpSchema.all_tensor_types()), "any tensor")]
            if hasattr(OpSchema, "all_tensor_types")
            else [("T", _TENSOR_TYPES, "any tensor")],
        )
        return NodeMaker(Opset(op.spec.namespace, DOMAIN_VERSION), form.name, schema)(*inputs)

    return translate


_ELEMENTS = "bool uint8 uint16 uint32 uint64 int8 int16 int32 int64 float16 bfloat16 float double complex64 complex128"
_TENSOR_TYPES = [f"tensor({element})" for element in _ELEMENTS.split()]


class _Reference(torch.nn.Module):
    """The reference of an op as a module whose inputs are the tensors of one form."""

    def __init__(self, form: FunctionForm) -> None:
        super().__init__()
        self.form = form

    def forward(self, *tensors: Tensor) -> Any:
        def filled(value: Any) -> Any:
            if isinstance(value, tuple):
                return [filled(v) for v in value]
            return tensors[value.number] if isinstance(value, InputNumber) else value

        named = {a.name: filled(v) for a, v in zip(self.form.op.spec.args, self.form.values, strict=True)}
        positional = [named.pop(a.name) for a in self.form.op.spec.args if not a.keyword_only]
        return self.form.op.reference(*positional, **named)


def _add_function(model: Any, form: FunctionForm, opset: int | None) -> None:
    """Add the function of ``form`` to the model, with the functions that its body calls."""
    import onnx_ir

    examples = tuple([torch.zeros(t.shape, dtype=t.dtype) for t, _ in form.inputs])
    varying = tuple([dict.fromkeys(dims, torch.export.Dim.DYNAMIC) for _, dims in form.inputs])
    where = form.op.spec.name
    try:
        body = torch.export.export(_Reference(form), examples, dynamic_shapes=(varying,), strict=False)
    except Exception as e:
        raise _no_form(form.op, _first_reason(e), "a reference that torch.export takes at every size") from e
    inner, _ = _convert_program(body, where, opset)
    graph = inner.model.graph
    first = next(iter(graph), None)
    for name in list(graph.initializers):  # a function has no initializers
        value = graph.initializers.pop(name)
        constant = onnx_ir.Node("", "Constant", [], [onnx_ir.AttrTensor("value", value.const_value)])
        onnx_ir.convenience.replace_all_uses_with(value, constant.outputs[0], replace_graph_outputs=True)
        if first is None:
            graph.append(constant)
        else:
            graph.insert_before(first, constant)
    function = onnx_ir.Function(form.op.spec.namespace, form.name, graph=graph, attributes=[])
    model.functions.update(inner.model.functions)
    model.functions[function.identifier()] = function
    model.opset_imports[form.op.spec.namespace] = DOMAIN_VERSION


def _no_form(op: Op, got: str, expected: str) -> ShiplapError:
    return error("SL321", where=op.spec.name, got=got, expected=expected)
