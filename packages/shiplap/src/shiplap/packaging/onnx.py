"""``export_onnx(program, path)``: an ONNX model in which each declared op is a function made from its reference.

A call of an op becomes a node in a domain of the op's namespace. The model has a function for that node, whose body is
the reference in standard operators, so onnxruntime runs the model without torch and without Shiplap. A runtime with a
kernel for the node may use that kernel in place of the body.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from shiplap.dispatch import Op, registry
from shiplap.errors import ShiplapError, error, first_line, writing
from shiplap.packaging.fixed_floats import refuse_fixed_floats
from shiplap.packaging.onnx_operators import (
    VERSION,
    OperatorTable,
    branch_function,
    call_node,
    checked,
    function_of_graph,
)
from shiplap.packaging.onnx_reference import (
    Branch,
    PathFinder,
    Raised,
    Returned,
    UntraceableReference,
    condition_tensor,
    with_checks,
)
from shiplap.packaging.onnx_reference import (
    Path as ReferencePath,
)
from shiplap.torch_private.graph_nodes import asserting_results, node_value, operator_name
from shiplap.torch_private.process_state import shared_onnx_registry
from shiplap.torch_private.symbolic_sizes import distinct_sizes, dtype_of_number, forgotten_sizes, number_of_tensor

# The packages of ``shiplap[onnx]``.
PACKAGES = ("onnx", "onnxscript", "onnx_ir")
# Example sizes of a function: no two dims agree by accident, and none is 1.
EXAMPLE_SIZES = (7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67)
_converting = threading.RLock()  # a conversion patches functions of torch, which two threads would not restore


@dataclass(frozen=True)
class OnnxModel:
    """An ONNX model that was written to a file. It holds the path, and the names of the declared ops that are functions
    of the model.
    """

    path: Path
    ops: tuple[str, ...]


@dataclass(frozen=True)
class InputNumber:
    """The position of an argument among the inputs of an ONNX function. ``is_number`` states whether the argument is a
    number that the model computes, not a tensor.
    """

    number: int
    is_number: bool = False


@dataclass(frozen=True)
class FunctionForm:
    """A kind of call of an op, for which the model gets one ONNX function. Calls of one kind have equal scalars, dtypes
    and fixed sizes.

    Attributes:
        op: the declared op.
        values: the arguments in declared order. A tensor is represented by its position among the inputs.
        inputs: an example of each tensor argument, without memory, and the dims of it that vary.
        results: for each result, or each item of a list, whether the call returns it. An optional result may be absent.
        returns_one: whether the call returns a single value, and neither a tuple nor a list.
    """

    op: Op
    values: tuple[Any, ...]
    inputs: tuple[tuple[Tensor, tuple[int, ...]], ...]
    results: tuple[bool, ...]
    returns_one: bool

    @property
    def name(self) -> str:
        """The name of the ONNX function for calls of this kind. It is the op's name with a digest of everything that
        the function's body fixes.
        """
        sizes = [
            (str(t.dtype), [s if i not in dims else "varies" for i, s in enumerate(t.shape)]) for t, dims in self.inputs
        ]
        # Calls of one form share a function, and two forms never do.
        digest = hashlib.sha256(repr((self.values, sizes)).encode()).hexdigest()[:8]
        return f"{self.op.spec.stem}_{digest}"

    @property
    def any_size(self) -> FunctionForm:
        """A copy of this kind of call in which every size of a tensor may vary. Ranks, dtypes and scalars are equal."""
        return replace(self, inputs=tuple([(tensor, tuple(range(tensor.dim()))) for tensor, _ in self.inputs]))

    def call_reference(self, *tensors: Tensor) -> Any:
        """Return the result of the op's reference for ``tensors`` as the tensor inputs, without results that are
        absent. All other arguments have the values that are fixed for this kind of call.
        """

        def filled(value: Any) -> Any:
            """Return ``value``, an argument, with each ``InputNumber`` (position of an input) replaced by the tensor at
            that position. If the argument is a number, it is replaced by the number in that tensor. Lists are converted
            item by item.
            """
            if isinstance(value, tuple):
                return [filled(v) for v in value]
            if not isinstance(value, InputNumber):
                return value
            return number_of_tensor(tensors[value.number]) if value.is_number else tensors[value.number]

        positional, named = self.op.spec.split([filled(v) for v in self.values])
        made = self.op.reference(*positional, **named)
        return made if self.returns_one else [result for result in made if result is not None]


def export_onnx(
    program: torch.export.ExportedProgram,
    path: str | os.PathLike[str],
    *,
    opset: int | None = None,
    checks: bool = True,
) -> OnnxModel:
    """Write ``program`` as an ONNX model that runs without torch.

    Args:
        program: the result of ``torch.export.export``. Sizes that vary there vary in the model.
        path: the file to write, ``model.onnx``.
        opset: the version of ONNX's standard operators. The default is torch's.
        checks: whether the model checks data as the references do. A run then fails at a node named after the error.

    Returns:
        The path, and the names of the declared ops in the model.

    Raises:
        ShippingError: ``SL321`` if ONNX cannot express an op. ``SL322`` if a package of ``shiplap[onnx]`` is not
            installed. ``SL324`` if a float that follows from a size that varies is fixed in the program.
        CommandError: ``SL602`` if ``path`` cannot be written.
    """
    missing = [name for name in PACKAGES if find_spec(name) is None]
    if missing:
        raise error("SL322", where=str(path), got=f"no package {missing[0]}", expected=", ".join(PACKAGES))
    refuse_fixed_floats(program, str(path))
    converter = _Converter(opset, checks)
    with _converting, shared_onnx_registry(), forgotten_sizes(program):
        model = converter.convert(program, str(path))
    model.model.functions.update(converter.functions)
    # The model's own versions of the domains take precedence.
    model.model.opset_imports.update(converter.imports | model.model.opset_imports)
    converter.operators.add_functions(model.model)
    with writing(Path(path), "the model", "a writable file"):
        model.save(str(path))
    return OnnxModel(Path(path), tuple(sorted(converter.ops)))


class _Converter:
    """A converter of one model to ONNX, with the references of the model's ops. It holds what the conversions of model
    and references share.

    Attributes:
        functions: the ONNX functions of the ops, and those that they call.
        imports: the versions of the domains of these functions.
        names: the name of the function for each kind of call, by the name of the kind.
        ops: the names of the ops that have functions.
    """

    def __init__(self, opset: int | None, checks: bool) -> None:
        """Start a model without functions. ``opset`` is the version of the operators. ``checks`` says whether the
        references' checks of data are kept.
        """
        self.opset, self.checks = opset, checks
        self.operators = OperatorTable()
        self.functions: dict[Any, Any] = {}
        self.imports: dict[str, int] = {}
        self.names: dict[str, str] = {}
        self.ops: set[str] = set()

    def convert(self, program: torch.export.ExportedProgram, where: str, *, optimize: bool = True) -> Any:
        """Return torch's ONNX program of ``program``, in which each call of a declared op is a separate node. The
        functions of the nodes are added to ``functions``. If ``optimize`` is true, torch optimizes the program.

        Raise ``SL321`` if ONNX cannot express an operator.
        """
        calls: dict[Any, deque[FunctionForm]] = {}
        forms: list[FunctionForm] = []
        for node in program.graph.nodes:
            op = registry.find_declared_op(operator_name(node.target)) if node.op == "call_function" else None
            if op is not None:
                forms.append(_form_of_call(op, node))
                calls.setdefault(node.target, deque()).append(forms[-1])
        # Before the export, whose translation of a call needs the name of its function.
        self._add_forms(forms)
        table = {**self.operators.translations, **{op: _translation(queue, self.names) for op, queue in calls.items()}}
        try:
            with asserting_results(program, checked) if self.checks else nullcontext():
                model = torch.onnx.export(
                    program,
                    dynamo=True,
                    custom_translation_table=table,
                    opset_version=self.opset,
                    verbose=False,
                    optimize=optimize,
                )
        except ShiplapError:
            raise
        except Exception as e:  # torch has an error of its own for each step
            raise error("SL321", where=where, got=_first_reason(e), expected="operators that ONNX has") from e
        assert model is not None
        return model

    def _add_forms(self, forms: Iterable[FunctionForm]) -> None:
        """Make an ONNX function for each of ``forms`` that has none yet. Each of them is an op called with certain
        scalars, dtypes and sizes.

        Raise ``SL321``, which names all ops for which none can be made.
        """
        alike: dict[str, list[FunctionForm]] = {}
        for form in forms:
            if form.name not in self.names:
                alike.setdefault(form.any_size.name, []).append(form)
        refused: dict[str, ShiplapError] = {}
        for several in alike.values():
            distinct = {form.name: form for form in several}
            # One function for all sizes takes the place of many. Not every reference can be traced for that.
            if len(distinct) > 1 and self._make_general(list(distinct.values())):
                continue
            for name, form in distinct.items():
                try:
                    self._make_functions(form)
                    self.names[name] = name
                except ShiplapError as e:
                    refused.setdefault(e.where, e)
        if len(refused) > 1:
            got = "; ".join(f"{where}: {failure.got}" for where, failure in refused.items())
            raise error("SL321", where=", ".join(refused), got=got, expected=next(iter(refused.values())).expected)
        for failure in refused.values():
            raise failure

    def _make_general(self, forms: Sequence[FunctionForm]) -> bool:
        """Make one ONNX function for all of ``forms``, which are calls of one op that differ only in sizes. The sizes
        vary in the function.

        Return whether the op's reference could be traced for that.
        """
        # torch.export treats sizes of 0 and 1 as special cases.
        like = next((f for f in forms if all(size > 1 for tensor, _ in f.inputs for size in tensor.shape)), None)
        if like is None or any(form.results != like.results for form in forms):
            return False
        general = like.any_size
        if general.name not in self.names:
            before = dict(self.functions)
            try:
                self._make_functions(general)
            except ShiplapError:
                # A failed attempt leaves no functions behind.
                self.functions = before
                return False
        self.names.update(dict.fromkeys([general.name, *(form.name for form in forms)], general.name))
        return True

    def _make_functions(self, form: FunctionForm) -> None:
        """Make the ONNX function for calls of ``form``, an op with certain scalars, dtypes and sizes. Functions that
        its body calls are made, too.

        Raise ``SL321`` if the op's reference cannot be traced.
        """
        # Zeros are valid numbers for any dtype; the values are not part of the trace.
        examples = tuple([torch.zeros(t.shape, dtype=t.dtype) for t, _ in form.inputs])
        varying = tuple([dict.fromkeys(dims, torch.export.Dim.DYNAMIC) for _, dims in form.inputs])
        finder = PathFinder(form.call_reference, examples, varying)
        try:
            path = finder.find()
            if isinstance(path, Raised):
                raise UntraceableReference(f"it always raises: {path.message}")
            self._add_path(form, form.name, finder, path)
        except Exception as e:
            if isinstance(e, ShiplapError) and e.id == "SL321":
                raise
            raise _no_form(form.op, _first_reason(e), "a reference that torch.export takes at every size") from e
        self.ops.add(form.op.spec.name)

    def _add_path(self, form: FunctionForm, name: str, finder: PathFinder, path: ReferencePath) -> None:
        """Add the ONNX function ``name`` for ``path``, the part of the traced reference that follows one series of
        answers to its conditions on data.

        If no further condition follows, the function has a single body. Otherwise it calls one function for the
        condition and one for each answer. These are added, too.
        """
        if isinstance(path, Returned):
            self._add_function(form, name, finder.program(path.answers, with_checks(path)))
            return
        assert isinstance(path, Branch)
        end: ReferencePath = path
        while isinstance(end, Branch):  # other answers may make the reference raise behind the condition
            end = end.if_false
        assert isinstance(end, Returned)
        condition = finder.program(end.answers, lambda _, asked: condition_tensor(asked[path.number]))
        self._add_function(form, f"{name}_if", condition)
        for way, further in ((0, path.if_false), (1, path.if_true)):
            self._add_path(form, f"{name}_{way}", finder, further)
        sizes = len(form.inputs), sum(form.results)
        function = branch_function(form.op.spec.namespace, name, *sizes, self.imports[""])
        self.functions[function.identifier()] = function

    def _add_function(self, form: FunctionForm, name: str, body: torch.export.ExportedProgram) -> None:
        """Add the ONNX function ``name`` for calls of ``form``. Its body is the traced program ``body``."""
        # Optimization is the runtime's task, which inlines the function first.
        inner = self.convert(body, form.op.spec.name, optimize=False).model
        function = function_of_graph(form.op.spec.namespace, name, inner.graph)
        self.functions[function.identifier()] = function
        self.imports.update(inner.opset_imports)
        self.imports[form.op.spec.namespace] = VERSION


def _first_reason(e: BaseException) -> str:
    """Return the first line of the innermost cause of torch's error. The innermost cause names the operator."""
    while e.__cause__ is not None:
        e = e.__cause__
    return first_line(e)


def _form_of_call(op: Op, node: Node) -> FunctionForm:
    """Return the kind of call that a node of an exported graph makes of ``op``. It holds the scalars, and an example of
    each tensor with the dims that vary.

    Raise ``SL321`` if no ONNX function can express the call.
    """
    spec = op.spec
    # ONNX functions have no writes.
    if any(arg.mutated for arg in spec.args):
        raise _no_form(op, "it writes to an argument", "an op that returns its results")
    given: tuple[Any, Any] = node.args, node.kwargs
    values = op.spec.complete(*given)
    fakes: list[Any] = []

    def numbered(value: Any) -> Any:
        """Return ``value``, an argument of the call, with an ``InputNumber`` (position among the inputs) in place of
        each tensor or computed number. Their fake values are appended to ``fakes``.
        """
        if isinstance(value, (list, tuple)):
            return tuple([numbered(v) for v in value])
        held = node_value(value) if isinstance(value, Node) else value
        if isinstance(held, Tensor) or isinstance(value, Node):
            fakes.append(held)
            return InputNumber(len(fakes) - 1, not isinstance(held, Tensor))
        return held

    form = tuple([numbered(value) for value in values])
    dims = [tuple([i for i, size in enumerate(getattr(f, "shape", ())) if not isinstance(size, int)]) for f in fakes]
    numbers = [torch.empty((), dtype=dtype_of_number(f), device="meta") if dtype_of_number(f) else f for f in fakes]
    try:
        examples = distinct_sizes(numbers, EXAMPLE_SIZES)
    except ValueError as e:
        raise _no_form(op, str(e), f"at most {len(EXAMPLE_SIZES)} sizes that vary") from None
    made = node_value(node)
    several = made if isinstance(made, (list, tuple)) else (made,)
    if any(isinstance(value, (list, tuple)) for value in several):
        raise _no_form(op, "a list is one of several results", "tensors, or one list of tensors")
    results = tuple([value is not None for value in several])
    return FunctionForm(op, form, tuple(zip(examples, dims, strict=True)), results, made is not several)


def _flat_inputs(values: Sequence[Any], form: Sequence[Any]) -> Iterator[Any]:
    """Yield the tensors and computed numbers among ``values``, the arguments of a call, and in the lists among them.
    ``form`` is a sequence like ``values`` that has an ``InputNumber`` at their positions.
    """
    for value, place in zip(values, form, strict=True):
        if isinstance(place, InputNumber):
            yield value
        elif isinstance(place, tuple) and isinstance(value, (list, tuple)):
            yield from _flat_inputs(value, place)


def _translation(queue: deque[FunctionForm], names: Mapping[str, str]) -> Callable[..., Any]:
    """Return the function that torch's exporter calls at each call of one op. It takes the exporter's values of the
    arguments and returns the ONNX node that calls the op's ONNX function. ``queue`` holds the kinds of these calls in
    the order of the graph. ``names`` maps the name of each kind to that of its ONNX function.
    """
    import onnx_ir

    def translate(*args: Any, **kwargs: Any) -> Any:
        """Return the ONNX node for the next call of the op in the graph. The arguments are the exporter's values."""
        # The exporter translates the calls in the order of the graph, in which the forms are queued.
        form = queue.popleft()
        op = form.op
        inputs = list(_flat_inputs(op.spec.complete(args, kwargs), form.values))
        made = call_node(op.spec.namespace, names[form.name], len(inputs), sum(form.results))(*inputs)
        if form.returns_one:
            return made
        present = iter(made if isinstance(made, Sequence) else [made])
        # torch's exporter names every result, also one that is absent.
        return tuple([next(present) if there else onnx_ir.Value() for there in form.results])

    return translate


def _no_form(op: Op, got: str, expected: str) -> ShiplapError:
    """Return the error ``SL321`` of an op that ONNX cannot express, with what was found and what is expected."""
    return error("SL321", where=op.spec.name, got=got, expected=expected)
