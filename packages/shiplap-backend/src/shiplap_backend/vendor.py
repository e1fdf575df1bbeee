"""The parser of a vendor's C++ headers: functions with typed parameters, so that metadata is checked before compiling.

The parser reads two forms: constructors of node classes (OpenVINO), and free functions (our helpers, and runtimes
without node classes). A parameter whose type no expression can produce makes that one overload unusable, not the file.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from shiplap.plugin_api import error

# What an expression computes, by the C++ type of a parameter; Shape, Strides and the like are made from integers.
_KINDS = {
    "Output<Node>": "node",
    "Node": "node",
    "OutputVector": "nodes",
    "vector<Node>": "nodes",
    "bool": "bool",
    "int64_t": "int",
    "size_t": "int",
    "int": "int",
    "uint64_t": "int",
    "float": "float",
    "double": "float",
    "Shape": "ints",
    "Strides": "ints",
    "CoordinateDiff": "ints",
    "AxisSet": "ints",
    "vector<int64_t>": "ints",
    "Sizes": "ints",
    "IntArrayRef": "ints",
    "vector<size_t>": "ints",
    "element::Type": "dtype",
    "element::Type_t": "dtype",
    "ScalarType": "dtype",
    "string": "str",
    "string_view": "str",
    "Tensor": "tensor",
    "Scalar": "scalar",
    "OptionalIntArrayRef": "ints?",
    "optional<int64_t>": "int?",
    "optional<double>": "float?",
    "optional<ScalarType>": "dtype?",
    "optional<Scalar>": "scalar?",
    "optional<bool>": "bool?",
    "Graph": "graph",
    "List<optional<Tensor>>": "tensors",
    "ITensorListRef": "tensors",
    "TensorList": "tensors",
    "array<bool,3>": "bools",
    "array<bool,2>": "bools",
}
_NAMESPACES = re.compile(r"\b(?:::)?(?:std|ov|op|at|c10|util)::")


@dataclass(frozen=True)
class VendorParameter:
    """A parameter of a vendor function.

    ``kind`` is the kind of value that an expression gives it, such as ``node`` or ``int``. ``cpp`` is its C++ type
    without ``const`` and reference. ``optional`` is true if it has a default.
    """

    name: str
    kind: str
    cpp: str
    optional: bool


@dataclass(frozen=True)
class VendorFunction:
    """One overload of a vendor function.

    ``call`` is the C++ function that returns its first output, and ``every`` the one that returns all outputs.
    ``returns`` is the kind of the first output. ``header`` declares the function, and ``about`` is the comment above
    the declaration. ``outputs`` is the number of outputs, or the name of the parameter that gives it. ``unusable`` is
    the reason why metadata cannot call it, or an empty string.
    """

    name: str
    call: str
    every: str
    parameters: tuple[VendorParameter, ...]
    returns: str
    header: str = ""
    about: str = ""  # the comment above it
    outputs: int | str = 1  # how many; a text names the parameter that says so
    unusable: str = ""  # why no expression can call it

    def __str__(self) -> str:
        """Return the function with the names of its parameters, such as ``f(a, b = ...)``."""
        parameters = ", ".join(p.name + (" = ..." if p.optional else "") for p in self.parameters)
        return f"{self.name}({parameters})"

    def length(self, call: ast.Call) -> int:
        """Return the number of values in the vendor's graph that ``call``, a call of this function, returns.

        The number is 0 if it is known only when the graph runs.
        """
        if isinstance(self.outputs, int):
            return self.outputs
        given = dict(zip((p.name for p in self.parameters if p.kind != "graph"), call.args, strict=False))
        given |= {k.arg: k.value for k in call.keywords if k.arg}
        match given.get(self.outputs):
            case ast.Constant(value=int(number)):
                return number
            case ast.List(elts=parts):
                return len(parts)
        return 0


Functions = Mapping[str, tuple[VendorFunction, ...]]


def strip_comments(text: str, *, quoted: bool = True) -> str:
    """Return the C++ source code ``text`` without comments.

    If ``quoted`` is false, string literals are removed as well. Line breaks stay, so lines keep their numbers.
    """

    def left(m: re.Match[str]) -> str:
        """Return the string that replaces a comment or a string literal. If ``quoted`` is true, a literal stays as it
        is. Everything else is replaced by its line breaks.
        """
        # A quoted text may contain "//", so quotes are matched before comments. Line breaks stay for line numbers.
        return m[0] if quoted and m[0].startswith('"') else "\n" * m[0].count("\n")

    return re.sub(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|/\*.*?\*/', left, text, flags=re.S)


def split_at_commas(text: str) -> list[str]:
    """Return the parts of the C++ source code ``text`` between its outermost commas. Surrounding spaces and empty parts
    are dropped.
    """
    parts, depth, start = [], 0, 0
    for i, c in enumerate(text):
        # Angle brackets count as well: template arguments contain commas.
        depth += (c in "([{<") - (c in ")]}>")
        if c == "," and depth == 0:
            parts.append(text[start:i])
            start = i + 1
    return [p.strip() for p in (*parts, text[start:]) if p.strip()]


def find_closing_bracket(text: str, at: int, pair: str) -> int:
    """Return the index after the bracket that closes the one at index ``at`` of ``text``.

    ``pair`` has both brackets, such as ``"()"``. Raise ``ValueError`` if the bracket is not closed.
    """
    depth = 0
    for i in range(at, len(text)):
        depth += (text[i] == pair[0]) - (text[i] == pair[1])
        if depth == 0:
            return i + 1
    raise ValueError(f"unbalanced {pair}")


def _parse_parameter(text: str) -> VendorParameter | None:
    """Return the parameter that ``text``, one item of a C++ parameter list, declares.

    Return None if no expression of the metadata can have its type.
    """
    declared, default, _ = text.partition("=")
    m = re.fullmatch(r"(.*?[\w>&*])\s*[&\s]\s*&?\s*(\w+)", declared.strip(), re.S)
    if m is None:
        return None
    plain = re.sub(r"\bconst\b|&", "", m[1]).strip()
    key = _NAMESPACES.sub("", plain).replace(" ", "").removeprefix("::")
    # No expression gives a pointer or an object of the vendor's attribute classes.
    if "Attributes" in key or "*" in key or "shared_ptr" in key:
        return None
    kind = _KINDS.get(key) or (f"enum {key}" if re.fullmatch(r"\w+", key) and key[0].isupper() else "")
    # Types of the vendor's own namespace are written without it inside its headers.
    if kind == "ints" and re.fullmatch(r"[A-Z]\w*", plain) and plain != "Sizes":
        plain = f"ov::{plain}"
    return VendorParameter(m[2], kind, plain, bool(default)) if kind else None


def _parse_parameters(text: str) -> tuple[VendorParameter, ...] | None:
    """Return the parameters that ``text``, a C++ parameter list without its brackets, declares.

    Return None if no expression of the metadata can have the type of one of them.
    """
    parsed = [_parse_parameter(p) for p in split_at_commas(text)]
    return None if None in parsed else tuple(p for p in parsed if p is not None)


def node_classes(
    headers: Path,
    table: Path,
    *,
    make: str = "make",
    every: str = "makes",
    outputs: Mapping[str, int | str] | None = None,
) -> Functions:
    """Return the constructors of a vendor's operation classes as functions, by class name.

    The classes are defined in the headers in the folder ``headers``. The header ``table`` lists them in lines such as
    ``_OPENVINO_OP_REG(Add, ov::op::v1)``. ``outputs`` has the classes with several outputs. Its values are the number
    of outputs, the parameter that sets the number, or 0 if the number varies. ``make`` and ``every`` are the C++
    templates that return the first and all outputs.
    """
    # The table lists the opset. Headers also define classes that are in no opset.
    listed = dict(re.findall(r"^_OPENVINO_OP_REG\((\w+), ([\w:]+)\)", table.read_text(encoding="utf-8"), re.M))
    classes: dict[str, list[VendorFunction]] = {}
    for header in sorted(headers.glob("*.hpp")):
        text = strip_comments(header.read_text(encoding="utf-8"))
        for name, namespace, body in _find_classes(text):
            # Several opsets define classes of one name. Only the listed namespace is in this opset.
            if name not in listed or listed[name].rpartition("::")[2] != namespace:
                continue
            cls = f"{listed[name]}::{name}"
            for parameters in _find_constructors(name, body):
                include = header.relative_to(headers.parents[1]).as_posix()
                many = 0 if outputs is None else outputs.get(name, 1)
                function = VendorFunction(
                    name, f"{make}<{cls}>", f"{every}<{cls}>", parameters, "node", include, outputs=many
                )
                classes.setdefault(name, []).append(function)
    return {name: tuple(functions) for name, functions in sorted(classes.items())}


def _find_classes(text: str) -> Iterator[tuple[str, str, str]]:
    """Yield the name, the innermost namespace and the body of each exported class in ``text``, the source code of a C++
    header.
    """
    for m in re.finditer(r"class \w+_API (\w+)\s*(?:final\s*)?:[^{;]*\{", text):
        yield (
            m[1],
            "::".join(_open_namespaces(text, m.start())).rpartition("::")[2],
            text[m.end() : find_closing_bracket(text, m.end() - 1, "{}")],
        )


def _open_namespaces(text: str, at: int) -> list[str]:
    """Return the names of the namespaces and classes around index ``at`` of the C++ source code ``text``, outermost
    first.
    """
    opened = re.finditer(r"(?:namespace|class \w+_API) ([\w:]+)[^{;()]*\{", text[:at])
    return [m[1] for m in opened if find_closing_bracket(text, m.end() - 1, "{}") > at]


def _find_constructors(name: str, body: str) -> Iterator[tuple[VendorParameter, ...]]:
    """Yield the parameters of each constructor of the class ``name`` that metadata can call.

    ``body`` is the C++ source code of the class. Constructors without parameters are left out.
    """
    for m in re.finditer(rf"(?:^|\s){name}\(", body):
        parameters = _parse_parameters(body[m.end() : find_closing_bracket(body, m.end() - 1, "()") - 1])
        if parameters:
            yield parameters


def free_functions(header: Path, namespace: str, include: str, enums: Collection[str] | None = None) -> Functions:
    """Return the functions that the C++ ``header`` declares ``inline`` or ``extern``, by name.

    Generated code calls them as ``namespace::name`` after it has included ``include``. If ``enums`` is None, a function
    is left out if no expression of the metadata can have the type of a parameter. Otherwise ``enums`` are the names of
    the runtime's enums, and such a function is kept with the reason why it cannot be called.
    """
    by_name: dict[str, list[VendorFunction]] = {}
    written = header.read_text(encoding="utf-8")
    text, about = strip_comments(written), dict(_function_comments(written))
    for m in re.finditer(r"^(?:inline|extern)\s+([\w:<>,\s]+?)\s+(\w+)\(", text, re.M):
        declared = split_at_commas(text[m.end() : find_closing_bracket(text, m.end() - 1, "()") - 1])
        returns = _KINDS.get(re.sub(r"\s", "", _NAMESPACES.sub("", m[1])))
        parsed = [_parse_parameter(p) for p in declared]
        # Kept with ``find_enums``, so that an author who calls the function gets the reason and not "unknown function".
        strange = [d for d, p in zip(declared, parsed, strict=True) if p is None or _is_unknown_enum(p, enums)]
        if returns is not None and (not strange or enums is not None):
            call, line = f"{namespace}::{m[2]}", text.count("\n", 0, m.start(2)) + 1
            why = (
                f"{header}:{line}: metadata cannot call it, since no expression gives {strange[0]!r}" if strange else ""
            )
            parameters = tuple(p for p in parsed if p is not None)
            comment = about.get(m[2], "")
            function = VendorFunction(m[2], call, call, parameters, returns, include, comment, unusable=why)
            by_name.setdefault(m[2], []).append(function)
    return {name: tuple(functions) for name, functions in sorted(by_name.items())}


def check_function_names(header: Path, core: Functions) -> None:
    """Raise ``SL910`` if one call in the metadata could mean two functions of the same name.

    The functions of ``header`` are compared with each other and with those of ``core``. A call takes the first function
    that accepts its arguments. A number is also accepted in place of a value in the vendor's graph.
    """
    text = strip_comments(header.read_text(encoding="utf-8"))
    seen = {name: [("every runtime has the first", _kinds(f.parameters)) for f in fs] for name, fs in core.items()}
    for m in re.finditer(r"^(?:inline|extern)\s+[\w:<>,\s]+?\s+(\w+)\(", text, re.M):
        declared = split_at_commas(text[m.end() : find_closing_bracket(text, m.end() - 1, "()") - 1])
        parameters = [_parse_parameter(p) for p in declared]
        if None in parameters:  # metadata cannot call it
            continue
        line, name = text.count("\n", 0, m.start(1)) + 1, m[1]
        kinds = _kinds([p for p in parameters if p is not None])
        for where, others in seen.get(name, ()):
            if _may_mean(kinds, others):
                raise error(
                    "SL910",
                    where=f"{header}:{line}",
                    got=f"a second function {name!r} for the same arguments; {where}",
                    expected="a name of its own for each function that metadata calls",
                    fix=f"rename {name!r} in line {line}",
                )
        seen.setdefault(name, []).append((f"the first is in line {line}", kinds))


def _kinds(parameters: Sequence[VendorParameter]) -> list[tuple[str, bool]]:
    """Return ``(kind, optional)`` for each of ``parameters`` except the vendor's graph, which no expression gives.
    ``optional`` is true if the parameter may be left out. A ``?`` at the end of a kind is removed.
    """
    return [(p.kind.rstrip("?"), p.optional) for p in parameters if p.kind != "graph"]


def _may_mean(one: Sequence[tuple[str, bool]], other: Sequence[tuple[str, bool]]) -> bool:
    """Return whether a call with the same arguments could mean either of two functions, which have the parameters
    ``one`` and ``other``.

    Both lists are results of ``_kinds``.
    """
    numbers = {"int", "float", "scalar"}
    for (a, _), (b, _) in zip(one, other, strict=False):
        if not (a == b or {a, b} <= {"node", "tensor"} or {a, b} <= {*numbers, "node"}):
            return False
    # A parameter that one has alone tells both apart, unless it may be left out.
    shared = min(len(one), len(other))
    return all(optional for _, optional in (*one[shared:], *other[shared:]))


def _is_unknown_enum(parameter: VendorParameter, enums: Collection[str] | None) -> bool:
    """Return whether the type of ``parameter`` looks like an enum that is not in ``enums``.

    If ``enums`` is None, return False.
    """
    return enums is not None and parameter.kind.startswith("enum ") and parameter.kind[5:] not in enums


def _function_comments(text: str) -> Iterator[tuple[str, str]]:
    """Yield ``(name, comment)`` for each function with a comment above it in ``text``, the source code of a C++ header.
    The lines of the comment are joined by spaces.
    """
    for m in re.finditer(r"^((?://[^\n]*\n)+)(?:inline|extern)\s[^(;]*?(\w+)\(", text, re.M):
        yield m[2], " ".join(line.removeprefix("//").strip() for line in m[1].splitlines())


def find_enums(headers: Path) -> dict[str, dict[str, str]]:
    """Return the ``enum class`` definitions in the headers under ``headers``.

    The keys are the qualified names of the enums. The values map each enumerator to its C++ name.
    """
    by_name: dict[str, dict[str, str]] = {}
    for header in sorted(headers.rglob("*.hpp")):
        text = strip_comments(header.read_text(encoding="utf-8"))
        for m in re.finditer(r"enum class (?:OPENVINO_API )?(\w+)[^{;]*\{([^}]*)\}", text):
            scope = "::".join([*_open_namespaces(text, m.start()), m[1]])
            values = [v.partition("=")[0].strip() for v in m[2].split(",") if v.strip()]
            by_name[scope] = {v: f"{scope}::{v}" for v in values}
    return by_name


def enum_values(enums: Mapping[str, Mapping[str, str]], kind: str, call: str) -> Mapping[str, str]:
    """Return the enumerators of the enum ``kind``, with their C++ names. The result is empty if there is no such enum.

    Several enums may have the name ``kind``. Then the enum whose namespace is nearest to that of the class ``call`` is
    used.
    """
    name = kind.split()[1].rpartition("::")[2]
    around = call.partition("<")[2].rstrip(">")

    def shared(scope: str) -> int:
        """Return the number of leading namespaces that ``scope`` shares with the class that ``call`` constructs."""
        # Enums of one name exist in several classes. The longest common scope is the class's own.
        pairs = zip(scope.split("::"), around.split("::"), strict=False)
        return sum(1 for _ in takewhile(lambda p: p[0] == p[1], pairs))

    candidates = [scope for scope in enums if scope.rpartition("::")[2] == name]
    return enums[max(candidates, key=shared)] if candidates else {}
