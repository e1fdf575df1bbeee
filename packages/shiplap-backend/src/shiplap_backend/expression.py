"""The compiler of metadata expressions to C++: Python's syntax over ATen's arguments and vendor functions.

``self * (self > 0)``, ``TopK(self, k, axis=dim, mode='max', sort='none')[1]``, ``a if transposed else b``. A name is an
argument of the overload, an output, or a ``let`` binding. Every call is checked against the vendor's signatures, and
the use of each argument is recorded: a graph input (``inputs``), baked into the graph and so part of the cache key
(``baked``), or neither (``mapping`` then decides whether that is an error).
"""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite

from shiplap.dtypes import in_aten
from shiplap_backend.hidden import constant_condition_reason, unused_operand_reason, written_number
from shiplap_backend.vendor import Functions, VendorFunction, VendorParameter, enum_values

DTYPES = {short: f"at::{row.aten}" for short, row in in_aten().items()}

_BINARY = {
    ast.Add: "+",
    ast.Sub: "-",
    ast.Mult: "*",
    ast.Div: "/",
    ast.Pow: "**",
    ast.Mod: "%",
    ast.FloorDiv: "//",
    ast.BitAnd: "&",
    ast.BitOr: "|",
    ast.BitXor: "^",
    ast.MatMult: "@",
    ast.Eq: "==",
    ast.NotEq: "!=",
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
}

OPERATORS = (
    *_BINARY.values(),
    "unary -",
    "unary not",
    "unary ~",
    "if else",
)  # what a target may give a vendor function


class ExpressionError(ValueError):
    """The error of an expression in the metadata that is invalid.

    Its message is the mistake alone. The code that catches it adds the file and the line.
    """


def suggest_nearest(name: str, names: Sequence[str] | Mapping[str, object]) -> str:
    """Return ``"; did you mean 'x'?"`` for the name in ``names`` that is nearest to ``name``.

    Return an empty string if none is near.
    """
    match = difflib.get_close_matches(name, list(names), 1)
    return f"; did you mean {match[0]!r}?" if match else ""


def _operand_kind(expected: str) -> str:
    """Return the kind to which the operands of an operator are compiled. ``expected`` is the kind of the operator's
    result.

    If ``expected`` is ``node`` (a value in the vendor's graph), ``nodes`` or ``any``, return ``any``. Otherwise return
    ``value``, which stands for any C++ value that is not in the graph.
    """
    return "any" if expected in ("any", "node", "nodes") else "value"


@dataclass(frozen=True)
class TypedExpression:
    """The C++ code of one subexpression, and the kind of its value.

    A kind is ``node`` (a value in the vendor's graph) or that of a C++ value, such as ``tensor``, ``int``, ``ints``,
    ``bool`` or ``dtype``. A kind that ends with ``?`` can be missing. ``length`` is the number of nodes in a list, or 0
    if it is not known. ``given`` is true for an argument that a caller cannot leave out.
    """

    kind: str
    code: str
    length: int = 0  # of nodes, if it is known
    given: bool = False  # whether it is an argument that a caller cannot leave out


@dataclass(frozen=True)
class Vocabulary:
    """The vendor functions, enum values and operators that the expressions of one target, that is, one vendor's
    runtime, may use.

    ``operators`` maps an operator such as ``+`` to a vendor function. ``index_parameters`` are the names of parameters
    that take integer constants of the graph.
    """

    functions: Functions
    enums: Mapping[str, Mapping[str, str]]
    operators: Mapping[str, str]
    index_parameters: frozenset[str]


@dataclass
class ExpressionCompiler:
    """The compiler of the expressions of one overload.

    ``nodes`` has the C++ of the arguments that can be inputs of the vendor's graph. ``values`` has all arguments as C++
    values, and ``lets`` has the names under ``let``. The other fields record what the compiled expressions use.
    ``used`` are the arguments that they read, ``inputs`` those that become inputs of the graph, and ``baked`` those
    whose values are built into the graph. ``conditions`` are the C++ conditions that are evaluated while the graph is
    built. ``headers`` declare the vendor functions.
    """

    vocabulary: Vocabulary
    nodes: Mapping[str, str]
    values: Mapping[str, TypedExpression]
    lets: dict[str, TypedExpression] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)
    baked: set[str] = field(default_factory=set)
    inputs: set[str] = field(default_factory=set)
    headers: set[str] = field(default_factory=set)
    conditions: dict[str, None] = field(default_factory=dict)
    constants: list[float] = field(default_factory=list)  # numbers that become nodes of the graph
    narrow: bool = False  # whether the graph may be computed in a dtype that holds fewer numbers than the CPU's
    rounds: bool = False  # whether a number becomes a node that such a dtype may not hold
    scopes: list[str] = field(default_factory=list)  # the vendor functions around the current argument

    def compile(self, source: str, expected: str = "node") -> TypedExpression:
        """Return the C++ code of ``source``, an expression of the metadata, as a value of the kind ``expected``.

        The kind ``node`` is a value in the vendor's graph. Others, such as ``int``, are plain C++ values. Raise
        ``ExpressionError`` with the mistake if ``source`` is invalid.
        """
        try:
            tree = ast.parse(source.strip(), mode="eval").body
            # Visiting gives the natural kind of the expression. The place may need a conversion.
            return self._convert_value(self._visit(tree, expected), expected, tree)
        except SyntaxError as e:
            raise ExpressionError(f"not an expression: {e.msg}") from None
        # MemoryError is what Python's parser raises when its own stack overflows.
        except (RecursionError, MemoryError):
            raise ExpressionError(f"{source.strip()[:40]!r}...: nested too deeply") from None

    def _visit(self, tree: ast.expr, expected: str) -> TypedExpression:
        """Return the C++ code and the kind of the expression ``tree``.

        ``expected`` is the kind that the surrounding code needs. The result may have another kind, which the caller
        converts. Raise ``ExpressionError`` if the expression is invalid.
        """
        if why := constant_condition_reason(tree):
            raise ExpressionError(why)
        sides = [ast.unparse(side) for side in (tree.left, *tree.comparators)] if isinstance(tree, ast.Compare) else []
        if "nan" in sides and "nan" not in self.values:  # an argument may be called so
            raise ExpressionError(f"{ast.unparse(tree)!r} has one outcome, whatever the arguments are")
        match tree:
            case ast.Constant():
                return self._constant(tree.value)
            case ast.Name():
                return self._name(tree.id, expected)
            case ast.Call(func=ast.Name()):
                return self._call(tree, expected)
            case ast.Subscript():
                return self._subscript(tree)
            case ast.BinOp():
                return self._operator(_BINARY.get(type(tree.op), ""), [tree.left, tree.right], _operand_kind(expected))
            case ast.Compare(ops=[ast.Is() | ast.IsNot()]):
                return self._presence(tree)
            case ast.Compare(ops=[op]):
                return self._operator(
                    _BINARY.get(type(op), ""), [tree.left, tree.comparators[0]], _operand_kind(expected)
                )
            case ast.Compare():  # 0 < alpha < 1
                operands = [tree.left, *tree.comparators]
                pairs = zip(operands[:-1], tree.ops, operands[1:], strict=True)
                links: list[ast.expr] = [ast.Compare(left, [op], [right]) for left, op, right in pairs]
                return self._visit(ast.BoolOp(ast.And(), links), expected)
            case ast.UnaryOp():
                return self._unary(tree, expected)
            case ast.BoolOp():
                parts = [self._convert_value(self._visit(v, "bool"), "bool", v).code for v in tree.values]
                return TypedExpression(
                    "bool", "(" + (" && " if isinstance(tree.op, ast.And) else " || ").join(parts) + ")"
                )
            case ast.IfExp():
                return self._choice(tree, expected)
            case ast.List():
                return self._list(tree, expected)
        raise ExpressionError(f"{ast.unparse(tree)!r} is not part of the language")

    def _constant(self, value: object) -> TypedExpression:
        """Return ``value``, a literal of Python, as C++ with its kind.

        Raise ``ExpressionError`` for a value that C++ does not have.
        """
        if value is None:
            return TypedExpression("none", "::std::nullopt")
        # Before int, of which bool is a subclass.
        if isinstance(value, bool):
            return TypedExpression("bool", str(value).lower())
        if isinstance(value, int) and abs(value) < 2**63:
            return TypedExpression("int", f"INT64_C({value})")
        if isinstance(value, float) and isfinite(value):
            return TypedExpression("float", repr(value))
        if isinstance(value, str) and re.fullmatch(r"\w*", value):
            return TypedExpression("literal", value)
        raise ExpressionError(f"{value!r} is not a number that C++ has, a word, bool or None")

    def _name(self, name: str, expected: str) -> TypedExpression:
        """Return the C++ of ``name``, which is an argument, an output, a name under ``let``, ``inf``, ``nan`` or
        ``compute`` (the dtype of the computation).

        The use of an argument or output is recorded. If ``expected`` is a kind of node, an argument that can be one
        becomes an input of the vendor's graph. Any other use of an argument that is no tensor makes its value a part of
        the graph's cache key. Raise ``ExpressionError`` for an unknown name.
        """
        if name in self.lets:
            return self.lets[name]
        if name in ("inf", "nan") and name not in self.values:
            limit = {"inf": "infinity", "nan": "quiet_NaN"}[name]
            return TypedExpression("float", f"::std::numeric_limits<double>::{limit}()")
        if name == "compute":
            return TypedExpression("dtype", "compute")
        if name not in self.values:
            known = {**self.values, **self.lets}
            raise ExpressionError(f"{name!r} is no argument, output or binding{suggest_nearest(name, known)}")
        self.used.add(name)
        value = self.values[name]
        # A number is a graph input unless the place it stands in takes a plain value.
        wanted = expected in ("node", "nodes", "any")
        if wanted and name in self.nodes:
            self.inputs.add(name)
            return TypedExpression("nodes" if value.kind == "tensors" else "node", self.nodes[name])
        if value.kind not in ("tensor", "tensors"):
            self.baked.add(name)
        return value

    def _choice(self, tree: ast.IfExp, expected: str) -> TypedExpression:
        """Return the C++ of ``tree``, an expression ``a if test else b`` of the kind ``expected``.

        If the test is computed in the vendor's graph, the result is an operation of the graph. Otherwise a C++
        conditional selects one side while the graph is built. Raise ``ExpressionError`` if the sides have different
        kinds.
        """
        if self._is_node(tree.test):
            return self._operator("if else", [tree.test, tree.body, tree.orelse])
        condition = self._condition(tree.test)
        one, other = self._visit(tree.body, expected), self._visit(tree.orelse, expected)
        if expected.startswith("enum") or expected in ("str", "dtype", "node"):
            one, other = (
                self._convert_value(one, expected, tree.body),
                self._convert_value(other, expected, tree.orelse),
            )
        # C++'s conditional operator needs one type on both sides.
        if {one.kind, other.kind} <= {"float", "int", "scalar", "scalar?"} and one.kind != other.kind:
            one, other = self._convert_value(one, "float", tree.body), self._convert_value(other, "float", tree.orelse)
        if one.kind != other.kind:
            raise ExpressionError(f"{ast.unparse(tree)!r} is a {one.kind} or a {other.kind}")
        return TypedExpression(one.kind, f"({condition} ? {one.code} : {other.code})")

    def _is_node(self, tree: ast.expr) -> bool:
        """Return whether the expression ``tree`` is computed in the vendor's graph.

        Tests of scalars and tests with ``is None`` are not, since C++ evaluates them before the graph is built.
        """
        names = [n.id for n in ast.walk(tree) if isinstance(n, ast.Name)]
        # A comparison of scalars alone, `beta == 0`, is decided by C++ before the graph is built.
        if names and all(n in self.values and self.values[n].kind in ("scalar", "scalar?") for n in names):
            return False
        # The visit only finds the kind. Its records are undone, because the caller compiles the tree again.
        before = set(self.used), set(self.baked), set(self.inputs), set(self.headers), dict(self.conditions)
        kind = self._visit(tree, "any").kind
        self.used, self.baked, self.inputs, self.headers, self.conditions = before
        return kind == "node"

    def _condition(self, tree: ast.expr) -> str:
        """Return the C++ of the condition ``tree``, which is evaluated while the vendor's graph is built.

        Record its outcome as a part of the graph's cache key. The compared values are no part of the key.
        """
        # Arguments of the test must not be recorded: their values would become part of the key.
        baked, inputs = set(self.baked), set(self.inputs)
        code = self._convert_value(self._visit(tree, "value"), "bool", tree).code
        self.baked, self.inputs = baked, inputs
        self.conditions[code] = None
        return code

    def _presence(self, tree: ast.Compare) -> TypedExpression:
        """Return the C++ of ``tree``, a test ``argument is None`` or ``argument is not None``.

        Raise ``ExpressionError`` for another use of ``is``, and for an argument that is never None.
        """
        if not (isinstance(tree.left, ast.Name) and ast.unparse(tree.comparators[0]) == "None"):
            raise ExpressionError(f"{ast.unparse(tree)!r}: 'is' compares an argument with None")
        value = self._name(tree.left.id, "value")
        if value.given:
            raise ExpressionError(f"{ast.unparse(tree)!r}: {tree.left.id!r} is never None")
        code = f"has({value.code})"
        return TypedExpression("bool", code if isinstance(tree.ops[0], ast.IsNot) else f"!{code}")

    def _unary(self, tree: ast.UnaryOp, expected: str) -> TypedExpression:
        """Return the C++ of ``tree``, a unary operator with its operand.

        ``expected`` is the kind that the surrounding code needs. If the operand is a value in the vendor's graph, so is
        the result. Otherwise it is a plain C++ value. Raise ``ExpressionError`` if the operand's kind has no such
        operator.
        """
        sign = {ast.USub: "-", ast.Not: "not", ast.Invert: "~"}.get(type(tree.op), "")
        operand = self._visit(
            tree.operand, "value" if sign == "not" and expected == "bool" else _operand_kind(expected)
        )
        if operand.kind == "node":
            return self._operator(f"unary {sign}", [tree.operand])
        operand = self._plain(operand)
        if sign == "not":
            return TypedExpression("bool", f"!({self._convert_value(operand, 'bool', tree.operand).code})")
        if sign == "-" and operand.kind in ("int", "float"):
            return TypedExpression(operand.kind, f"-({operand.code})")
        raise ExpressionError(f"{ast.unparse(tree)!r}: no {sign!r} of a {operand.kind}")

    def _operator(self, symbol: str, operands: list[ast.expr], expected: str = "any") -> TypedExpression:
        """Return the C++ of the operator ``symbol`` with the expressions ``operands``.

        The operands are compiled as the kind ``expected``. If one of them is a value in the vendor's graph, so is the
        result. Otherwise the result is a plain C++ value. Raise ``ExpressionError`` if the kinds of the operands have
        no such operator, or if an operand cannot change the result.
        """
        values = [self._visit(o, expected) for o in operands]
        numbers = [name for name, value in self.values.items() if value.kind not in ("tensor", "tensors")]
        if why := unused_operand_reason(symbol, operands, numbers):
            raise ExpressionError(why)
        if symbol == "@" and any(isinstance(o, ast.Constant) or ast.unparse(o) in numbers for o in operands):
            raise ExpressionError(f"a product of {' and '.join(repr(ast.unparse(o)) for o in operands)}, a number")
        if any(v.kind == "node" for v in values):
            function = self.vocabulary.operators.get(symbol)
            if function is None:
                raise ExpressionError(f"operator {symbol!r} has no vendor function under 'operators'")
            codes = [self._convert_value(v, "node", o).code for v, o in zip(values, operands, strict=True)]
            return TypedExpression("node", f"{self._function(function, len(codes)).call}({', '.join(codes)})")
        # Such a comparison has the same outcome for all arguments, which would only seem to be used.
        if len(operands) == 2 and ast.dump(operands[0]) == ast.dump(operands[1]):
            raise ExpressionError(f"{ast.unparse(operands[0])!r} is compared or combined with itself")
        values = [self._plain(v) for v in values]
        kinds = {v.kind for v in values}
        comparison = symbol in ("==", "!=", "<", "<=", ">", ">=")
        if "literal" in kinds and symbol in ("==", "!="):
            codes = [self._convert_value(v, "str", o).code for v, o in zip(values, operands, strict=True)]
            return TypedExpression("bool", f"({codes[0]} {symbol} {codes[1]})")
        if len(kinds - {"int", "float"}) > (comparison and len(kinds) == 1) or symbol not in "+-*/%==!=<=>=":
            raise ExpressionError(f"operator {symbol!r} between {' and '.join(v.kind for v in values)}")
        kind = "bool" if comparison else "float" if "float" in kinds else "int"
        return TypedExpression(kind, f"({values[0].code} {symbol} {values[1].code})")

    def _plain(self, value: TypedExpression) -> TypedExpression:
        """Return ``value`` as a plain C++ value.

        A C++ ``optional`` is unwrapped, since the metadata must have tested it with ``is None``. An ``at::Scalar`` is
        converted to ``double``. Other values are returned as they are.
        """
        if value.kind in ("scalar?", "int?", "float?", "bool?", "str?", "dtype?"):
            value = TypedExpression(value.kind[:-1], f"{value.code}.value()")
        return TypedExpression("float", f"{value.code}.toDouble()") if value.kind == "scalar" else value

    def _function(self, name: str, arguments: int) -> VendorFunction:
        """Return the first overload of the vendor function ``name`` that can be called with ``arguments`` arguments by
        position. If there is none, return the first of all overloads.

        In both cases, record the C++ header that declares the function. Raise ``ExpressionError`` if there is no
        function of this name.
        """
        overloads = self.vocabulary.functions.get(name)
        if not overloads:
            raise ExpressionError(f"{name!r} is no vendor function{suggest_nearest(name, self.vocabulary.functions)}")
        # Operators pass their operands by position, so the number of parameters decides.
        fitting = [f for f in overloads if sum(not p.optional for p in f.parameters) <= arguments <= len(f.parameters)]
        self.headers.add((fitting or overloads)[0].header)
        return (fitting or overloads)[0]

    def _subscript(self, tree: ast.Subscript) -> TypedExpression:
        """Return the C++ of ``tree``, an element of a list.

        Raise ``ExpressionError`` if the index is negative or beyond a known length, or if the value has no elements.
        Raise it also for an argument that is a list of tensors, because the other tensors would be ignored.
        """
        value = self._visit(tree.value, "nodes")
        index = self._convert_value(self._visit(tree.slice, "int"), "int", tree.slice).code
        # C++ has no negative indices: -1 would read beyond the vector.
        if index.startswith("-"):
            raise ExpressionError(f"{ast.unparse(tree)!r}: elements are counted from 0")
        element = {"nodes": "node", "ints": "int", "bools": "bool", "tensors": "tensor"}.get(value.kind)
        if value.kind == "nodes" and value.code in self.nodes.values():  # an argument that is a list of tensors
            raise ExpressionError(f"{ast.unparse(tree)!r} leaves out the other tensors")
        if element is None:
            raise ExpressionError(f"{ast.unparse(tree.value)!r} is a {value.kind} and has no element {index}")
        if value.length and isinstance(tree.slice, ast.Constant) and int(str(tree.slice.value)) >= value.length:
            raise ExpressionError(f"{ast.unparse(tree)!r}: the last output is number {value.length - 1}")
        return TypedExpression(element, f"{value.code}.at({index})" if element == "node" else f"{value.code}[{index}]")

    def _list(self, tree: ast.List, expected: str) -> TypedExpression:
        """Return the C++ of the list ``tree`` as a ``std::vector``.

        Its elements are values in the vendor's graph if ``expected`` is ``nodes``, else integers.
        """
        element = "node" if expected == "nodes" else "int"
        items = [self._convert_value(self._visit(e, element), element, e).code for e in tree.elts]
        cpp = "Node" if element == "node" else "int64_t"
        return TypedExpression(element + "s", f"std::vector<{cpp}>{{{', '.join(items)}}}")

    def _call(self, tree: ast.Call, expected: str) -> TypedExpression:
        """Return the C++ of ``tree``, a call of a vendor function.

        The first overload that accepts the arguments is called. ``expected`` is the kind of value that the surrounding
        code needs. If no overload accepts the arguments, raise ``ExpressionError`` with the problem of each overload.
        """
        name = tree.func.id  # type: ignore[attr-defined]  # matched as Name
        overloads = self.vocabulary.functions.get(name)
        if not overloads:
            raise ExpressionError(f"{name!r} is no vendor function{suggest_nearest(name, self.vocabulary.functions)}")
        # Overloads are tried in order, as in C++. The error at the end has the problems of each.
        problems = [f.unusable for f in overloads if f.unusable]
        for function in (f for f in overloads if not f.unusable):
            before = set(self.used), set(self.baked), set(self.inputs)
            depth = len(self.scopes)
            try:
                arguments = self._arguments(function, tree)
            except ExpressionError as e:
                problems.append(str(e))
                # What the failed attempt has recorded is taken back.
                del self.scopes[depth:]
                self.used, self.baked, self.inputs = before
                continue
            self.headers.add(function.header)
            if function.returns == "node" and expected == "nodes" and function.every != function.call:
                return TypedExpression("nodes", f"{function.every}({arguments})", function.length(tree))
            return TypedExpression(function.returns, f"{function.call}({arguments})")
        raise ExpressionError("; ".join(dict.fromkeys(problems)))

    def _arguments(self, function: VendorFunction, tree: ast.Call) -> str:
        """Return the C++ arguments of a call of ``function``, separated by commas.

        Raise ``ExpressionError`` if the arguments of the call ``tree`` do not fit the parameters of ``function``.
        """
        given: dict[str, ast.expr] = {}
        # Generated code passes the graph itself, so that no expression names it.
        parameters = [p for p in function.parameters if p.kind != "graph"]
        if len(tree.args) > len(parameters):
            raise ExpressionError(f"{function} takes at most {len(parameters)} arguments, got {len(tree.args)}")
        given.update({p.name: a for p, a in zip(parameters, tree.args, strict=False)})
        for keyword in tree.keywords:
            if keyword.arg not in {p.name for p in parameters}:
                hint = suggest_nearest(keyword.arg or "", [p.name for p in parameters])
                raise ExpressionError(f"{function} has no parameter {keyword.arg!r}{hint}")
            if keyword.arg in given:
                raise ExpressionError(f"{function}: {keyword.arg!r} is given twice")
            given[keyword.arg] = keyword.value
        missing = [p.name for p in parameters if not p.optional and p.name not in given]
        if missing:
            raise ExpressionError(f"{function} needs {', '.join(missing)}")
        return self._emit(function, given)

    def _emit(self, function: VendorFunction, given: dict[str, ast.expr]) -> str:
        """Return the C++ arguments of a call of ``function``, separated by commas, up to the last one in ``given``.

        ``given`` has the expressions by parameter. C++ passes arguments by position only. So raise ``ExpressionError``
        if ``given`` lacks a parameter before its last one.
        """
        codes = []
        # Parameters after the last given one keep their defaults in C++.
        last = max((i for i, p in enumerate(function.parameters) if p.name in given), default=-1)
        for parameter in function.parameters[: last + 1]:
            if parameter.kind == "graph":
                codes.append("g")
            elif parameter.name not in given:
                raise ExpressionError(f"{function}: give {parameter.name!r} too, C++ takes arguments by position")
            else:
                codes.append(self._argument(function, parameter, given[parameter.name]))
        return ", ".join(codes)

    def _argument(self, function: VendorFunction, parameter: VendorParameter, tree: ast.expr) -> str:
        """Return the C++ of the argument ``tree`` of a call of ``function``.

        It is converted to the kind of ``parameter``. Raise ``ExpressionError`` if that is not possible.
        """
        # The function around an argument tells apart enums of the same name.
        self.scopes.append(function.call)
        value = self._visit(tree, parameter.kind)
        self.scopes.pop()
        try:
            if parameter.kind == "node" and parameter.name in self.vocabulary.index_parameters:
                return value.code if value.kind == "node" else f"constant({self._index(value, tree)})"
            self.scopes.append(function.call)
            code = self._convert_value(value, parameter.kind, tree).code
            self.scopes.pop()
        except ExpressionError as e:
            raise ExpressionError(f"{function}, {parameter.name}: {e}") from None
        if parameter.kind == "ints" and not parameter.cpp.startswith("at::"):
            return f"to<{parameter.cpp}>({code})"
        if parameter.kind == "dtype" and "element" in parameter.cpp:
            return f"vendor_type({code})"
        return code

    def _enum(self, call: str, expected: str, value: TypedExpression) -> TypedExpression:
        """Return the C++ enumerator that ``value`` names, of the vendor's enum ``expected``.

        Several enums may have the name ``expected``. Then the enum whose namespace is nearest to that of the class
        ``call`` is used. Raise ``ExpressionError`` for an unknown enumerator.
        """
        values = enum_values(self.vocabulary.enums, expected, call)
        if value.code not in values:
            raise ExpressionError(f"{value.code!r} is no {expected}{suggest_nearest(value.code, values)}")
        return TypedExpression(expected, values[value.code])

    def _index(self, value: TypedExpression, tree: ast.expr) -> str:
        """Return the C++ arguments that create a constant of the vendor's graph from ``value``.

        They are an integer with its dtype, or a list of integers. Raise ``ExpressionError`` for another kind of value.
        ``tree`` is the expression of ``value``, for the error.
        """
        if value.kind in ("int", "ints"):
            return f"at::Scalar({value.code}), at::kLong" if value.kind == "int" else value.code
        raise ExpressionError(f"{ast.unparse(tree)!r} is a {value.kind}, not an integer or a list of them")

    def _convert_value(self, value: TypedExpression, expected: str, tree: ast.expr) -> TypedExpression:
        """Return ``value`` converted to the kind ``expected``, such as an integer to a value in the vendor's graph.

        ``tree`` is the expression of ``value``. Raise ``ExpressionError`` if there is no conversion between the two
        kinds.
        """
        kind = value.kind
        if expected in ("any", kind, "value"):
            return value
        if expected == "node" and kind in ("int", "float", "bool", "scalar"):
            written = written_number(tree)  # the generator compares it with the dtypes, and the wrapper all others
            self.constants += written
            self.rounds |= self.narrow and not written
            number = f"at::Scalar({value.code})"
            number = f"held({number}, compute)" if self.narrow and not written else number
            return TypedExpression("node", f"constant({number}, compute)")
        if expected == "dtype" and kind == "literal" and value.code in DTYPES:
            return TypedExpression("dtype", DTYPES[value.code])
        if expected.startswith("enum ") and kind == "literal":
            return self._enum(self.scopes[-1], expected, value)
        if expected == "str" and kind == "literal":
            return TypedExpression("str", f'"{value.code}"')
        if expected == "float" and kind in ("int", "scalar", "scalar?"):
            access = {"int": f"double({value.code})", "scalar": f"{value.code}.toDouble()"}
            return TypedExpression("float", access.get(kind, f"{value.code}->toDouble()"))
        if expected.endswith("?") and kind in ("none", expected[:-1]):
            return value
        if kind == expected + "?":  # the overload guards presence with `is None`
            return TypedExpression(expected, f"{value.code}.value()")
        if expected == "scalar" and kind in ("int", "float", "bool"):
            return TypedExpression("scalar", f"at::Scalar({value.code})")
        raise ExpressionError(f"{ast.unparse(tree)!r} is a {kind}, expected a {expected}")
