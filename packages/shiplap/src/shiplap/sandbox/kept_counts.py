"""State that outlives a call and that a call changes by its own value, found in a source without running it.

A count is changed so, however it is written: a number, a list that gets longer, a tensor that is added to in place, or
a variable of the environment. A cache is not: what it holds does not depend on what it held before.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

SHRINKING = {"clear", "pop", "popitem", "popleft", "remove", "discard"}
TAKING = {"pop", "popitem", "popleft"}
GROWING = {"append", "add", "extend", "insert", "appendleft", "update", "setdefault"}
_CONVERSIONS = "to contiguous detach clone cuda cpu float half double bfloat16 long int bool type view reshape"
_CONVERSIONS += " requires_grad_ eval train resize resize_ expand repeat new_zeros new_empty pin_memory"
CONVERSIONS = frozenset(_CONVERSIONS.split())
"""Methods whose result replaces the value itself, as where a buffer is moved to another device."""
_OVERWRITING = "zero_ copy_ requires_grad_ resize_ normal_ uniform_ random_ set_ detach_ share_memory_ t_"
OVERWRITING = frozenset(_OVERWRITING.split())
"""Methods that change a tensor in place, and not by its own value."""
_DESCRIBING = "shape dtype device ndim layout is_cuda requires_grad data_ptr numel size stride dim is_contiguous"
_DESCRIBING += " element_size get_device storage_offset untyped_storage nbytes type keys get items values"
DESCRIBING = frozenset(_DESCRIBING.split())
"""Attributes and methods of a value that do not say what it counts."""
_DECIDING_CALLS = "min max bool range divmod int any all next getattr slice compare gt lt ge le eq ne where"
DECIDING_CALLS = frozenset(_DECIDING_CALLS.split())
"""Functions by whose arguments code decides."""


def place_name(node: ast.AST) -> str:
    """Return the name of a variable, or an attribute with a dot before it. For an element such as ``n[0]``, return the
    name of the container, and for one of ``globals()`` or of ``vars(x)`` that of the variable or attribute. Return an
    empty string for another node.
    """
    key = ""
    while isinstance(node, ast.Subscript):
        held = node.slice
        key = held.value if isinstance(held, ast.Constant) and isinstance(held.value, str) else ""
        node = node.value
    called = getattr(getattr(node, "func", None), "id", "")
    if key and (called in ("globals", "locals") or (called == "vars" and isinstance(node, ast.Call) and not node.args)):
        return key
    if key and (called == "vars" or getattr(node, "attr", "") == "__dict__"):
        return f".{key}"
    if isinstance(node, ast.Call) and called in ("getattr", "setattr") and len(node.args) > 1:
        name = node.args[1].value if isinstance(node.args[1], ast.Constant) else None
        return f".{name}" if isinstance(name, str) else ""
    return f".{node.attr}" if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def counted_places(tree: ast.Module) -> set[str]:
    """Return the names of the places that outlive a call, and that functions of a module change by their own value.
    Attributes have a dot before their names.
    """
    return {name for node in ast.walk(tree) for name in _counts_of(node)} - {""}


def used_up_places(tree: ast.Module, lasting: set[str]) -> Iterator[tuple[int, str]]:
    """Yield (line, name) where a function takes an element out of one of the containers ``lasting``, which outlive a
    call and to which no function adds any.
    """
    bodies = [f for f in ast.walk(tree) if isinstance(f, (ast.FunctionDef, ast.AsyncFunctionDef))]
    inner = [node for body in bodies for node in ast.walk(body)]
    filled = {changed_container(node, GROWING) for node in inner}
    filled |= {place_name(t) for node in inner for t in targets_of(node)}
    for node in inner:
        if (name := changed_container(node, TAKING)) and name in lasting and name not in filled:
            yield getattr(node, "lineno", 0), name


def changed_container(node: ast.AST, names: set[str]) -> str:
    """Return the name of the container of which a syntax node calls a method with one of ``names``, or an empty string
    for another node.
    """
    called = node.func if isinstance(node, ast.Call) else None
    return place_name(called.value) if isinstance(called, ast.Attribute) and called.attr in names else ""


def targets_of(node: ast.AST) -> list[ast.expr]:
    """Return the expressions to which a syntax node assigns, without the tuples and lists around them."""
    left: list[ast.expr] = []
    if isinstance(node, ast.Assign):
        left = [*node.targets]
    elif isinstance(node, (ast.AugAssign, ast.AnnAssign, ast.NamedExpr)):
        left = [node.target]
    flat: list[ast.expr] = []
    while left:
        at = left.pop(0)
        left += at.elts if isinstance(at, (ast.Tuple, ast.List)) else []
        flat += [] if isinstance(at, (ast.Tuple, ast.List)) else [at]
    return flat


def _counts_of(node: ast.AST) -> Iterator[str]:
    """Yield the names that a syntax node changes by their own value and that outlive a call: attributes, elements of
    lists and dicts, and in a function those that it declares as global or nonlocal.
    """
    if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return
    inner = list(ast.walk(node))
    outer = {name for each in inner if isinstance(each, (ast.Global, ast.Nonlocal)) for name in each.names}
    stored = {each.id for each in inner if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)}
    given = [*node.args.posonlyargs, *node.args.args]
    given = given[: len(given) - len(node.args.defaults)]
    own = (stored | {each.arg for each in given}) - outer
    for each in inner:
        for target in _increased_places(each):
            name = place_name(target)
            # A list outlives the call if the function neither makes it nor gets it.
            lasts = not isinstance(target, (ast.Name, ast.Attribute)) and name not in own
            if lasts or name in outer or name.startswith("."):
                yield name
        if (name := _changed_in_place(each)) and name not in own:
            yield name


def _increased_places(node: ast.AST) -> list[ast.expr]:
    """Return the variables, attributes and elements that a statement changes by their own value, as ``n += 1``,
    ``n = max(n, 2) + 1`` and ``setattr(x, "n", x.n + 1)`` do. A mere conversion, as in ``b = b.to(d)``, does not count.
    """
    if isinstance(node, ast.AugAssign):
        return [node.target]
    if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "setattr" and len(node.args) == 3:
        return [node] if place_name(node) in _places_in(node.args[2]) else []
    value = node.value if isinstance(node, (ast.Assign, ast.AnnAssign, ast.NamedExpr)) else None
    if value is None:
        return []
    is_method = isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute)
    if is_method and isinstance(value, ast.Call) and getattr(value.func, "attr", "") in CONVERSIONS:
        return []
    read = read_places(value)
    return [target for target in targets_of(node) if place_name(target) in read]


def _changed_in_place(node: ast.AST) -> str:
    """Return the name of the tensor that a syntax node changes in place by its own value, as ``n.add_(1)`` does, or an
    empty string for another node.
    """
    called = node.func if isinstance(node, ast.Call) else None
    if not isinstance(called, ast.Attribute) or not called.attr.endswith("_") or called.attr.endswith("__"):
        return ""
    name = place_name(called.value)
    by_itself = called.attr not in OVERWRITING
    if not by_itself and called.attr == "copy_" and isinstance(node, ast.Call):
        by_itself = any(name in _places_in(arg) for arg in node.args)
    return name if by_itself else ""


def _places_in(node: ast.AST) -> set[str]:
    """Return the names of all places in an expression."""
    return {place_name(each) for each in ast.walk(node)} - {""}


def read_places(node: ast.AST) -> set[str]:
    """Return the names of the places whose values an expression reads. One of which it only reads the shape or another
    such property, or that it compares with None, does not count.
    """
    found: set[str] = set()
    left = [node]
    while left:
        at = left.pop()
        if isinstance(at, ast.Attribute) and at.attr in DESCRIBING:
            continue
        if isinstance(at, ast.Compare) and all(isinstance(op, (ast.Is, ast.IsNot, ast.In, ast.NotIn)) for op in at.ops):
            left += [at.left]  # a key that is looked up in a cache, or a value that may be None
            continue
        found.add(place_name(at))
        left += ast.iter_child_nodes(at)
    return found - {""}
