"""Local names that stand for what outlives a call, such as ``state`` after ``state = STATE``, in the source of a
candidate.
"""

from __future__ import annotations

import ast
import builtins
from collections import Counter
from collections.abc import Callable, Mapping
from copy import deepcopy

CONTAINERS = (ast.List, ast.Dict, ast.Set)
_METHODS = "append extend insert add update setdefault get keys values items pop popitem clear remove"
METHODS = frozenset(_METHODS.split())
FUNCTIONS = frozenset(name for name in dir(builtins) if name.islower())
"""The methods of containers, and the functions of Python, that code calls on counts and what holds them."""
MOST_LINKS = 8  # names that stand for one another in turn
MOST_COPIED = 100_000  # syntax nodes that names of one module may stand for, all together


Function = ast.FunctionDef | ast.AsyncFunctionDef
SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def resolve_aliases(tree: ast.Module) -> None:
    """Replace in ``tree`` each local name that a function binds once, to a variable, an attribute or an element, by
    that expression. Code that counts by ``state["n"]`` is then found as if it counted by ``STATE["n"]``.

    An argument is replaced by a list or dict of the module with which the module calls the function. ``MemoryError`` is
    raised if the names stand for more than ``MOST_COPIED`` nodes.
    """
    copied = [0]
    definitions = {each.name: each for each in tree.body if isinstance(each, ast.FunctionDef)}
    bindings = (each for each in tree.body if isinstance(each, ast.Assign) and isinstance(each.value, CONTAINERS))
    containers = {target.id for each in bindings for target in each.targets if isinstance(target, ast.Name)}
    hidden = _names_hidden_at(tree, containers)
    for call in [each for each in ast.walk(tree) if isinstance(each, ast.Call) and isinstance(each.func, ast.Name)]:
        function = definitions.get(getattr(call.func, "id", ""))
        pairs = zip(function.args.args, call.args, strict=False) if function is not None else ()
        shared = {a.arg: v for a, v in pairs if isinstance(v, ast.Name) and v.id in containers - hidden.get(v, set())}
        if function is not None and shared:
            bound = _bound_names(function)
            _replace_names(function, {name: value for name, value in shared.items() if bound[name] == 1}, copied)
    for each in ast.walk(tree):
        if isinstance(each, Function) and (aliases := _aliases_in(each, copied)):
            _replace_names(each, aliases, copied)


def _names_hidden_at(tree: ast.Module, names: set[str]) -> dict[ast.AST, set[str]]:
    """Return the nodes of ``tree`` that are inside of functions with variables of their own that have some of
    ``names``, with these names.
    """
    hidden: dict[ast.AST, set[str]] = {}
    for each in ast.walk(tree):
        if isinstance(each, Function) and (own := names & _own_names(each)):
            for at in ast.walk(each):
                hidden.setdefault(at, set()).update(own)
    return hidden


def _own_names(function: Function) -> set[str]:
    """Return the names of the variables of ``function``, without those of functions and comprehensions inside of it."""
    left: list[ast.AST] = [*function.body]
    own = {n.arg for n in ast.walk(function.args) if isinstance(n, ast.arg)}
    shared = set[str]()
    while left:
        node = left.pop()
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            own.add(node.id)
        elif isinstance(node, (ast.Global, ast.Nonlocal)):
            shared.update(node.names)
        elif not isinstance(node, (*SCOPES, ast.ClassDef, ast.Lambda)):
            left += ast.iter_child_nodes(node)
    return own - shared


def resolve_calls(tree: ast.Module, counts: Callable[[ast.Call], bool]) -> None:
    """Replace in ``tree`` each local name that a function binds once, to a call for which ``counts`` returns True, by a
    call of what has its name, without its arguments.
    """
    copied = [0]
    for each in ast.walk(tree):
        if isinstance(each, Function):
            values = _bound_once(each)
            called = {n: called_name(v) for n, v in values.items() if isinstance(v, ast.Call) and counts(v)}
            calls = {n: ast.Call(ast.Name(name, ast.Load()), [], []) for n, name in called.items()}
            _replace_names(each, calls, copied)


def called_name(call: ast.Call) -> str:
    """Return the name of the function or method that a syntax node calls, or an empty string if it has none."""
    return str(getattr(call.func, "attr", getattr(call.func, "id", "")))


def _bound_names(function: Function) -> Counter[str]:
    """Return the names that ``function`` and those inside of it bind, with the number of places where they do so."""
    inner = list(ast.walk(function))
    bound = Counter(n.id for n in inner if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load))
    bound.update(n.arg for n in inner if isinstance(n, ast.arg))
    bound.update(name for n in inner if isinstance(n, (ast.Global, ast.Nonlocal)) for name in n.names)
    return bound


def _bound_once(function: Function) -> dict[str, ast.expr]:
    """Return the names that ``function`` binds once, by a statement, with the values that they get there."""
    bound, values = _bound_names(function), dict[str, ast.expr]()
    for node in ast.walk(function):
        target = node.targets[0] if isinstance(node, ast.Assign) and len(node.targets) == 1 else None
        if isinstance(node, ast.Assign) and isinstance(target, ast.Name) and bound[target.id] == 1:
            values[target.id] = node.value
    return values


def _aliases_in(function: Function, copied: list[int]) -> dict[str, ast.expr]:
    """Return the names that ``function`` binds once, with the variable, attribute or element that each stands for."""
    bound, tensors = _bound_names(function), _likely_tensors(function)
    once = _bound_once(function)
    values = {name: value for name, value in once.items() if _root(value) is not None and name not in tensors}
    resolved = {name: _resolved(value, values, copied) for name, value in values.items()}
    # What a function has made itself ends with its call.
    own = bound.keys() - {n.arg for n in ast.walk(function.args) if isinstance(n, ast.arg)}
    return {name: value for name, value in resolved.items() if (root := _root(value)) and root.id not in own}


def _likely_tensors(function: Function) -> set[str]:
    """Return the names that a function passes to other functions than those of Python, multiplies as matrices or cuts
    into parts, or of which it calls another method than those of containers. They hold tensors rather than counts, as a
    room does that is used again in each call. What has an element under a text is no tensor.
    """
    found, keyed = set[str](), set[str]()
    for node in ast.walk(function):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
            found |= {each.id for each in (node.left, node.right) if isinstance(each, ast.Name)}
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name):
            parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
            constants = [each.value for each in parts if isinstance(each, ast.Constant)]
            if Ellipsis in constants or any(isinstance(each, ast.Slice) for each in parts):
                found.add(node.value.id)
            if any(isinstance(each, str) for each in constants):
                keyed.add(node.value.id)
        if not isinstance(node, ast.Call):
            continue
        if (
            isinstance(node.func, ast.Attribute)
            and node.func.attr not in METHODS
            and isinstance(node.func.value, ast.Name)
        ):
            found.add(node.func.value.id)
        if not isinstance(node.func, ast.Name) or node.func.id not in FUNCTIONS:
            given = [*node.args, *(each.value for each in node.keywords)]
            found |= {each.id for each in given if isinstance(each, ast.Name)}
    return found - keyed


def _root(value: ast.expr) -> ast.Name | None:
    """Return the variable in which a chain of attributes and elements begins, or None for another expression."""
    while isinstance(value, (ast.Attribute, ast.Subscript)):
        value = value.value
    return value if isinstance(value, ast.Name) else None


def _resolved(value: ast.expr, values: dict[str, ast.expr], copied: list[int]) -> ast.expr:
    """Return a copy of the chain ``value`` that begins in no name of ``values``, unless these stand for one another.
    ``copied`` counts the nodes.
    """
    _count_copied(value, copied)
    value = deepcopy(value)
    for _ in range(MOST_LINKS):
        root = _root(value)
        if root is None or root.id not in values:
            break
        holder = ast.Expression(value)
        _replace_names(holder, {root.id: values[root.id]}, copied)
        value = holder.body
    return value


def _count_copied(node: ast.AST, copied: list[int]) -> None:
    """Add the number of the nodes of ``node``, which is about to be copied, to the one that ``copied`` holds. Raise
    ``MemoryError`` if that gets more than ``MOST_COPIED``: the names of a few lines can stand for millions of nodes.
    """
    copied[0] += sum(1 for _ in ast.walk(node))
    if copied[0] > MOST_COPIED:
        raise MemoryError("names that stand for too much")


def _replace_names(tree: ast.AST, values: Mapping[str, ast.expr], copied: list[int]) -> None:
    """Replace in ``tree`` each use of a name in ``values`` by a copy of its value, which gets the line of the use.
    ``copied`` counts the nodes.

    The function is not recursive, since a sum of a thousand terms is nested as deeply.
    """

    def replaced(node: object) -> object:
        """Return a copy of the value if ``node`` reads a name in ``values``, and otherwise ``node`` itself."""
        if not (isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in values):
            return node
        _count_copied(values[node.id], copied)
        made = deepcopy(values[node.id])
        for part in ast.walk(made):
            ast.copy_location(part, node)
        return made

    for parent in list(ast.walk(tree)):
        for name, field in ast.iter_fields(parent):
            setattr(parent, name, [*map(replaced, field)] if isinstance(field, list) else replaced(field))
