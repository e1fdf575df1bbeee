"""Operators of torch that torch's own ONNX exporter has no translation for, in ONNX's standard operators."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shiplap.torch_private.aten_operators import UNIQUE_VALUES

DOMAIN = "shiplap"
# The version of the domains of the functions in a model.
VERSION = 1
# The binary search of all numbers at once: after each step ``n`` places are left for each of them.
_SEARCH = """
NAME (keys, wanted) => (found)
{
  zero = Constant <value_int = 0> ()
  one = Constant <value_int = 1> ()
  two = Constant <value_int = 2> ()
  last = Constant <value_ints = [0]> ()
  size = Size (keys)
  typed = CastLike (last, keys)
  padded = Concat <axis = 0> (keys, typed)
  shape = Shape (wanted)
  start = Expand (zero, shape)
  more = Greater (size, one)
  at, rest = Loop ("", more, start, size) <body = step (int64 i, bool go, low, n) => (going, next, left) {
    half = Div (n, two)
    middle = Add (low, half)
    probe = Sub (middle, one)
    key = Gather (padded, probe)
    below = COMPARE (key, wanted)
    next = Where (below, middle, low)
    left = Sub (n, half)
    going = Greater (left, one)
  }>
  key_there = Gather (padded, at)
  behind = COMPARE (key_there, wanted)
  some = Greater (size, zero)
  steps = And (behind, some)
  step_on = Cast <to = 7> (steps)
  found = Add (at, step_on)
}
"""
# ONNX has no assertion. The list has an element 0 and none with the number 1, so a run ends at the named node.
_CHECK = """
NAME (value, holds) => (result)
{
  nothing = Constant <value_ints = [0]> ()
  sure = Cast <to = 9> (holds)
  fails = Not (sure)
  number = Cast <to = 7> (fails)
  [MESSAGE] zero = Gather (nothing, number)
  shape = Shape (value)
  same = Add (shape, zero)
  result = Reshape <allowzero = 1> (value, same)
}
"""


@torch.library.custom_op("shiplap_onnx::checked", mutates_args=())
def checked(value: Tensor, holds: Tensor, message: str) -> Tensor:
    """Return a copy of ``value``. In an exported ONNX model, the operator makes a run fail with ``message`` if
    ``holds`` is false.
    """
    # torch demands that a custom op returns no alias of its argument.
    return value.clone()


@checked.register_fake
def _(value: Tensor, holds: Tensor, message: str) -> Tensor:
    """Return an empty tensor of the shape and dtype of ``value``. This is the fake implementation of ``checked``."""
    return torch.empty_like(value)


class OperatorTable:
    """The functions by which torch's exporter translates PyTorch operators to ONNX for one model. ``translations`` maps
    each operator to its function. ``functions`` maps the name of each ONNX helper function that the model needs to its
    source code.
    """

    def __init__(self) -> None:
        """Set the translations of operators that torch's exporter lacks. No helper function is needed yet."""
        self.functions: dict[str, str] = {}
        aten = torch.ops.aten
        self.translations: dict[Any, Callable[..., Any]] = {
            aten.searchsorted.Tensor: _search(self.functions),
            aten.sort.stable: _sort,
            aten.unique_dim.default: _unique_rows,
            UNIQUE_VALUES: _unique_values,
            aten.any.default: _any,
            aten.any.dim: _any,
            aten.any.dims: _any,
            **dict.fromkeys((aten.__lshift__.Tensor, aten.__lshift__.Scalar), _shift_left),
            **dict.fromkeys((aten.__rshift__.Tensor, aten.__rshift__.Scalar), _shift_right),
            torch.ops.shiplap_onnx.checked.default: _check(self.functions),
        }

    def add_functions(self, model: Any) -> None:
        """Add to ``model``, a model of ``onnx_ir``, the helper functions that the translations have used, such as a
        binary search.
        """
        import onnx.parser
        import onnx_ir

        for text in self.functions.values():
            header = f'<domain: "{DOMAIN}", opset_import: ["" : {model.opset_imports[""]}]>'
            function: Any = onnx_ir.from_proto(onnx.parser.parse_function(header + text))
            model.functions[function.identifier()] = function
            model.opset_imports[DOMAIN] = VERSION


def _search(functions: dict[str, str]) -> Callable[..., Any]:
    """Return the function by which torch's exporter translates ``searchsorted`` to a call of an ONNX helper function.
    The helper bisects in a loop. It is added to ``functions`` when it is used.
    """

    def search(
        keys: Any,
        wanted: Any,
        *,
        out_int32: bool = False,
        right: bool = False,
        side: str | None = None,
        sorter: Any = None,
    ) -> Any:
        """Return the ONNX value of ``torch.searchsorted``, which is for each of ``wanted`` the position in the sorted
        ``keys``.

        If ``right`` is true or ``side`` is ``"right"``, it is the position after equal keys. Otherwise it is the
        position before them. If ``sorter`` is given, it holds the indices that sort ``keys``. The positions are int32
        if ``out_int32`` is true, and otherwise int64. Raise ``NotImplementedError`` unless ``keys`` has one dim.
        """
        op = _operators()

        # The binary search is written for one sorted list.
        if keys.shape is None or len(keys.shape) != 1:
            raise NotImplementedError("searchsorted with more than one axis of keys")
        name = "searchsorted_right" if right or side == "right" else "searchsorted_left"
        functions[name] = _SEARCH.replace("NAME", name).replace(
            "COMPARE", "Less" if name == "searchsorted_left" else "LessOrEqual"
        )
        keys = keys if sorter is None else op.Gather(keys, sorter)
        found = call_node(DOMAIN, name, 2, 1)(keys, wanted)
        # 6 is ONNX's number for int32.
        return op.Cast(found, to=6) if out_int32 else found

    return search


def call_node(domain: str, name: str, inputs: int, outputs: int) -> Any:
    """Return a function that makes an ONNX node ``domain::name``. The node has ``inputs`` inputs and ``outputs``
    outputs of any type.
    """
    from onnx.defs import OpSchema
    from onnxscript.values import Op, Opset

    types = [("T", _TENSOR_TYPES, "any tensor")]
    made = [
        [OpSchema.FormalParameter(f"{kind}_{i}", "T") for i in range(n)]
        for kind, n in (("in", inputs), ("out", outputs))
    ]
    return Op(
        Opset(domain, VERSION),
        name,
        OpSchema(name, domain, VERSION, inputs=made[0], outputs=made[1], type_constraints=types),
    )


_ELEMENTS = "bool uint8 uint16 uint32 uint64 int8 int16 int32 int64 float16 bfloat16 float double complex64 complex128"
_TENSOR_TYPES = [f"tensor({element})" for element in _ELEMENTS.split()]


def _operators() -> Any:
    """Return onnxscript's ONNX operators, typed as ``Any``. Their own types name dtypes, which are not known here."""
    from onnxscript import opset18

    return opset18


def _sort(self: Any, *, stable: bool | None = None, dim: int = -1, descending: bool = False) -> Any:
    """Return the ONNX values of torch's sort along ``dim``, the sorted values and their indices, by ``TopK``.

    If ``descending`` is true, the largest values come first, and otherwise the smallest. ``TopK`` takes equal values in
    the order of their indices. The sort is therefore always stable, and ``stable`` is not read.
    """
    op = _operators()

    # Of equal values TopK takes the one with the lower index first.
    rows = op.Gather(op.Shape(self), op.Constant(value_ints=[dim]))
    return op.TopK(self, rows, axis=dim, largest=int(descending), sorted=1)


def _unique_rows(
    self: Any, dim: int, sorted: bool = True, return_inverse: bool = False, return_counts: bool = False
) -> Any:
    """Return the ONNX values of ``torch.unique`` along the axis ``dim``. They are the sorted unique rows, the inverse
    indices and the counts.

    All three are computed in any case, so ``sorted``, ``return_inverse`` and ``return_counts`` are not read.
    """
    return _unique(self, axis=dim)


def _unique_values(self: Any, sorted: bool = True, return_inverse: bool = False, return_counts: bool = False) -> Any:
    """Return the ONNX values of ``torch.unique`` without an axis. They are the sorted unique values, the inverse
    indices in the shape of ``self``, and the counts.

    All three are computed in any case, so ``sorted``, ``return_inverse`` and ``return_counts`` are not read.
    """
    op = _operators()

    values, inverse, counts = _unique(self)
    return values, op.Reshape(inverse, op.Shape(self), allowzero=1), counts


def _unique(self: Any, **axis: int) -> Any:
    """Return the ONNX values for the sorted unique values of ``self``, the inverse indices and the counts. ``axis`` may
    hold ``axis=``, along which rows are compared. Without it, single elements are compared.
    """
    op = _operators()

    # onnxruntime has Unique for the first three of these, and for no halves, bools or other integers.
    kind = str(self.dtype)
    # 1 and 7 are ONNX's numbers for float32 and int64.
    wide = self if kind in ("INT64", "FLOAT", "DOUBLE") else op.Cast(self, to=1 if "FLOAT" in kind else 7)
    values, _, inverse, counts = op.Unique(wide, sorted=1, **axis)
    return op.CastLike(values, self), inverse, counts


def _any(self: Any, dim: Any = None, keepdim: bool = False) -> Any:
    """Return the ONNX value of ``torch.any`` over ``dim``, which is a dim, several dims or None for all. It compares a
    sum with 0, so the result for no elements is false. If ``keepdim`` is true, the dims are kept with size 1.
    """
    op = _operators()

    # torch's translation takes a maximum, which of no elements is not 0.
    counted = op.Cast(op.Cast(self, to=9), to=7)
    axes = [] if dim is None else [op.Constant(value_ints=[dim] if isinstance(dim, int) else list(dim))]
    return op.Greater(op.ReduceSum(counted, *axes, keepdims=int(keepdim)), op.Constant(value_int=0))


def _shift_left(self: Any, other: Any) -> Any:
    """Return the ONNX value of integers shifted to the left, as a product. ONNX shifts only unsigned integers."""
    return _operators().Mul(*_with_power(self, other))


def _shift_right(self: Any, other: Any) -> Any:
    """Return the ONNX value of integers shifted to the right, as a quotient that is rounded down. It keeps the sign."""
    op, (value, power) = _operators(), _with_power(self, other)
    return op.Div(op.Sub(value, op.Mod(value, power)), power)  # ONNX rounds a quotient towards 0


def _with_power(self: Any, other: Any) -> tuple[Any, Any]:
    """Return the ONNX values of ``self`` in the dtype of the result, and of two to the power of ``other``."""
    op = _operators()

    if isinstance(other, int):
        return self, op.CastLike(op.Constant(value_int=1 << other), self)
    power = op.Pow(op.Constant(value_int=2), op.Cast(other, to=7))
    wide = op.CastLike(self, other) if other.shape and other.dtype.itemsize > self.dtype.itemsize else self
    return wide, op.CastLike(power, wide)


def _check(functions: dict[str, str]) -> Callable[..., Any]:
    """Return the function by which torch's exporter translates the operator ``checked`` to a call of an ONNX helper
    function. The helper makes a run of the model fail with the message if the condition is false. It is added to
    ``functions`` when it is used.
    """

    def check(value: Any, holds: Any, message: str) -> Any:
        """Return the ONNX value of ``value`` after a check that ``holds`` is true. If it is not, the run of the model
        fails with ``message``.
        """
        name = f"check_{hashlib.sha256(message.encode()).hexdigest()[:8]}"
        functions[name] = _CHECK.replace("NAME", name).replace("MESSAGE", json.dumps(message, ensure_ascii=False))
        return call_node(DOMAIN, name, 2, 1)(value, holds)

    return check


# --- functions --------------------------------------------------------------------------------------------------------


def function_of_graph(domain: str, name: str, graph: Any) -> Any:
    """Return an ``onnx_ir`` function ``domain::name`` with ``graph`` as its body. Initializers of the graph become
    constants.
    """
    import onnx_ir

    for i, value in enumerate(graph.outputs):
        if any(value is given for given in graph.inputs):  # a function does not return an input as it is
            same = onnx_ir.Node("", "Identity", [value])
            graph.append(same)
            same.outputs[0].name = f"same_{i}"
            graph.outputs[i] = same.outputs[0]
    first = next(iter(graph), None)
    for value in [graph.initializers.pop(name) for name in list(graph.initializers)]:
        constant = onnx_ir.Node("", "Constant", [], [onnx_ir.AttrTensor("value", value.const_value)])
        onnx_ir.convenience.replace_all_uses_with(value, constant.outputs[0], replace_graph_outputs=True)
        # An empty graph has no node to insert before.
        if first is None:
            graph.append(constant)
        else:
            graph.insert_before(first, constant)
    return onnx_ir.Function(domain, name, graph=graph, attributes=[])


def branch_function(domain: str, name: str, inputs: int, outputs: int, opset: int) -> Any:
    """Return an ``onnx_ir`` function ``name`` that calls ``<name>_if`` on its inputs. It then calls ``<name>_1`` if
    that returned true, and otherwise ``<name>_0``.

    ``inputs`` and ``outputs`` are numbers of values, and ``opset`` is the version of ONNX's operators.
    """
    import onnx.parser
    import onnx_ir

    given, made = (", ".join(f"{kind}{i}" for i in range(n)) for kind, n in (("in", inputs), ("out", outputs)))
    ways = [
        f"{branch} = {branch}_graph () => ({made.replace('out', f'{branch}_')}) "
        f"{{ {made.replace('out', f'{branch}_')} = {domain}.{name}_{way} ({given}) }}"
        for branch, way in (("then_branch", 1), ("else_branch", 0))
    ]
    text = f"""<domain: "{domain}", opset_import: ["" : {opset}, "{domain}" : {VERSION}]>
    {name} ({given}) => ({made}) {{
      chosen = {domain}.{name}_if ({given})
      {made} = If (chosen) <{", ".join(ways)}>
    }}"""
    return onnx_ir.from_proto(onnx.parser.parse_function(text))
