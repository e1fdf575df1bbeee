"""State that outlives a call and that a call changes by its own value, found in a source without running it.

A count is changed so, however it is written: a number, a list that gets longer, a tensor that is added to in place, or
a variable of the environment. A cache is not: what it holds does not depend on what it held before.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator

SHRINKING = {"clear", "pop", "popitem", "popleft", "remove", "discard"}
TAKING = {"pop", "popitem", "popleft"}
GROWING = {"append", "add", "extend", "insert", "appendleft", "update", "setdefault"}
_CONVERSIONS = "to contiguous detach clone cuda cpu float half double bfloat16 long int bool type view reshape"
_CONVERSIONS += " requires_grad_ eval train resize resize_ expand repeat new_zeros new_empty pin_memory"
CONVERSIONS = frozenset(_CONVERSIONS.split())
"""Methods whose result replaces the value itself, as where a buffer is moved to another device."""
_OVERWRITING = "zero_ copy_ requires_grad_ resize_ normal_ uniform_ random_ set_ detach_ share_memory_ t_ fill_"
_OVERWRITING += " bernoulli_ exponential_ log_normal_ cauchy_ geometric_ masked_fill_ index_fill_ index_copy_ constant_"
_OVERWRITING += " ones_ zeros_ eye_ dirac_ orthogonal_ sparse_ trunc_normal_ xavier_uniform_ xavier_normal_"
_OVERWRITING += " kaiming_uniform_ kaiming_normal_ relu_ clamp_ clamp_min_ clamp_max_ abs_"
OVERWRITING = frozenset(_OVERWRITING.split())
"""Methods that change a tensor in place, and not by its own value, or that change nothing a second time."""
_MAKING = "empty zeros ones full rand randn arange tensor eye empty_like zeros_like ones_like full_like rand_like"
_MAKING += " randn_like new_zeros new_empty new_ones new_full len int float"
MAKING = frozenset(_MAKING.split())
"""Functions and methods that make a new value."""
MODULES = frozenset(("nn", "functional", "init", "special", "linalg"))
"""Modules of torch with functions that change their first argument in place."""
_DESCRIBING = "shape dtype device ndim layout is_cuda requires_grad data_ptr numel size stride dim is_contiguous"
_DESCRIBING += " element_size get_device storage_offset untyped_storage nbytes type"
DESCRIBING = frozenset(_DESCRIBING.split())
"""Attributes and methods of a value that do not say what it counts."""
_DECIDING_CALLS = "min max bool range divmod int any all next getattr slice compare gt lt ge le eq ne where"
DECIDING_CALLS = frozenset(_DECIDING_CALLS.split())
"""Functions by whose arguments code decides."""
LIBRARIES = sys.stdlib_module_names | {"torch", "numpy", "triton"}
"""Packages whose functions have names that attributes of candidates have as well, such as ``ones``."""


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
    modules, libraries = _modules_of_torch(tree), imported_libraries(tree)
    return {name for node in ast.walk(tree) for name in _counts_of(node, modules, libraries)} - {""}


def _modules_of_torch(tree: ast.Module) -> set[str]:
    """Return the names to which a module binds ``torch`` or one of its modules, and nothing else."""
    found = {"torch"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {each.asname for each in node.names if each.asname and each.name.split(".")[0] == "torch"}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            found |= {each.asname or each.name for each in node.names if each.name in MODULES}
    assigned = [n for n in ast.walk(tree) if isinstance(n, ast.Assign) and _is_module(n.value, found)]
    aliases = [target for n in assigned for target in n.targets if isinstance(target, ast.Name)]
    stored = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    stored -= {n.id for n in aliases}
    return (found | {n.id for n in aliases}) - stored


def imported_libraries(tree: ast.Module) -> set[str]:
    """Return the names to which a module binds one of ``LIBRARIES`` or a part of one, and which it uses only to read
    attributes of it. Other code could set attributes of it by another name, as after ``t = torch``.
    """
    found = _modules_of_torch(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            of = [(each.asname or each.name.split(".")[0], each.name) for each in node.names]
            found |= {bound for bound, name in of if name.split(".")[0] in LIBRARIES}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in LIBRARIES:
            found |= {each.asname or each.name for each in node.names}
    attributes = [n for n in ast.walk(tree) if isinstance(n, ast.Attribute)]
    changed = {n.value.id for n in attributes if isinstance(n.ctx, ast.Store) and isinstance(n.value, ast.Name)}
    bound = _modules_of_torch(tree)
    bases = {id(n.value) for n in attributes}
    uses = [n for n in ast.walk(tree) if isinstance(n, ast.Name) and id(n) not in bases]
    return found - changed - {n.id for n in uses if isinstance(n.ctx, ast.Load) or n.id not in bound}


def is_of_library(called: ast.expr, libraries: set[str]) -> bool:
    """Return whether an expression is an attribute of one of ``libraries``, the names of imported packages."""
    return isinstance(called, ast.Attribute) and _root(called) in libraries


def _is_module(node: ast.AST, names: set[str]) -> bool:
    """Return whether an expression is a module of torch, one of ``names`` or an attribute such as ``nn.functional``."""
    if isinstance(node, ast.Attribute):
        return node.attr in MODULES and _is_module(node.value, names)
    return isinstance(node, ast.Name) and node.id in names


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


def _counts_of(node: ast.AST, modules: set[str], libraries: set[str]) -> Iterator[str]:
    """Yield the names that a function changes by their own value and that outlive a call: attributes, elements of
    lists and dicts, and those that it declares as global or nonlocal. Functions inside of it are looked at by
    themselves. ``modules`` are the names of modules of torch, and ``libraries`` those of ``imported_libraries``.
    """
    if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return
    inner = list(ast.walk(node))
    outer = {name for each in inner if isinstance(each, (ast.Global, ast.Nonlocal)) for name in each.names}
    stored = {each.id for each in inner if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)}
    renewed = set(_renewed_in(node))
    for each, own in _own_scope(node, (stored | _given(node.args)) - outer):
        for target in _increased_places(each, libraries) if id(each) not in renewed else ():
            name = place_name(target)
            # A list outlives the call if the function neither makes it nor gets it.
            lasts = not isinstance(target, (ast.Name, ast.Attribute)) and name not in own
            if (lasts or name in outer or name.startswith(".")) and not _is_taken_over(node, each, target):
                yield name
        if id(each) not in renewed:
            yield from (name for name in _changed_in_place(each, modules, libraries) if name not in own)


def _own_scope(function: ast.AST, own: set[str]) -> Iterator[tuple[ast.AST, set[str]]]:
    """Yield each syntax node of a function, without those of functions inside of it, and the names that are its own.
    Lambdas belong to the function, and have their arguments as well.
    """
    left = [(each, own) for each in ast.iter_child_nodes(function)]
    while left:
        node, names = left.pop()
        yield node, names
        if isinstance(node, ast.Lambda):
            names = names | _given(node.args)
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            left += [(each, names) for each in ast.iter_child_nodes(node)]


def _given(arguments: ast.arguments) -> set[str]:
    """Return the names of the arguments whose values a function gets in each call. A default other than a constant
    outlives the call.
    """
    placed = [*arguments.posonlyargs, *arguments.args]
    defaults = [*[None] * (len(placed) - len(arguments.defaults)), *arguments.defaults, *arguments.kw_defaults]
    pairs = zip([*placed, *arguments.kwonlyargs], defaults, strict=True)
    named = {each.arg for each, default in pairs if default is None or isinstance(default, ast.Constant)}
    return named | {each.arg for each in (arguments.vararg, arguments.kwarg) if each is not None}


def _renewed_in(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[int]:
    """Yield the numbers (``id``) of syntax nodes that change an attribute which the function has made anew before, by a
    statement of its own body and without a look at what it was.
    """
    stored = {n.id for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    given = _others_given(function) if function.name == "__init__" else set()
    seen: set[str] = set()
    fresh: set[str] = set()
    for statement in function.body:
        for each, _ in _own_scope(ast.Module([statement], []), set()):
            changed = each.func.value if isinstance(each, ast.Call) and isinstance(each.func, ast.Attribute) else None
            places = [changed] if changed is not None else targets_of(each)
            if fresh and places and all(ast.unparse(_without_data(place)) in fresh for place in places):
                yield id(each)
        made = _made_anew(statement, given)
        if made is not None and _root(made) not in stored and place_name(made) not in seen:
            fresh.add(ast.unparse(made))
        left = [n for n in ast.walk(statement) if n is not made]
        seen |= {place_name(n) for n in left} - {""}


def _made_anew(statement: ast.stmt, given: set[str]) -> ast.Attribute | None:
    """Return the attribute that a statement binds to a new value or overwrites with one. Return None for another
    statement. In ``__init__``, what it has ``given`` counts as new.
    """
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
        made, value = statement.targets[0], statement.value
        is_new = _is_new(value) or _root(_converted(value)) in given
    elif isinstance(statement, ast.Expr) and isinstance(call := statement.value, ast.Call):
        if not isinstance(call.func, ast.Attribute) or call.func.attr not in ("zero_", "fill_", "copy_"):
            return None
        made, value, is_new = _without_data(call.func.value), ast.Tuple([*call.args], ast.Load()), True
    else:
        return None
    own = any(place_name(n) == place_name(made) and _root(n) not in given for n in ast.walk(value))
    return made if isinstance(made, ast.Attribute) and _root(made) and is_new and not own else None


def _is_new(value: ast.expr) -> bool:
    """Return whether an expression makes a new value, and does not only name one that may change: a constant, the
    result of arithmetic, or a tensor that a function such as ``torch.empty`` makes.
    """
    if isinstance(value, ast.Call):
        name = getattr(value.func, "attr", getattr(value.func, "id", ""))
        return name in MAKING or (name == "Parameter" and bool(value.args) and _is_new(value.args[0]))
    return isinstance(value, (ast.Constant, ast.BinOp, ast.UnaryOp))


def _root(node: ast.AST) -> str:
    """Return the name at the front of attributes such as ``a.b.c``, and an empty string for another expression."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def _without_data(node: ast.expr) -> ast.expr:
    """Return the tensor of which an expression such as ``w.data`` or ``w.detach()`` is the memory."""
    while True:
        if isinstance(node, ast.Attribute) and node.attr == "data":
            node = node.value
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "detach":
            node = node.func.value
        else:
            return node


def _is_taken_over(function: ast.FunctionDef | ast.AsyncFunctionDef, node: ast.AST, target: ast.expr) -> bool:
    """Return whether ``__init__`` sets an attribute of the new object, and reads only those of that name that its other
    arguments have, as in ``self.width = config.width * 4``.
    """
    if function.name != "__init__" or not isinstance(node, (ast.Assign, ast.AnnAssign)) or node.value is None:
        return False
    others = _others_given(function)
    if not isinstance(target, ast.Attribute) or _root(target) not in _given(function.args) - others:
        return False
    return all(_root(n) in others for n in ast.walk(node.value) if place_name(n) == place_name(target))


def _others_given(method: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    """Return the names of the arguments of a method that it is given, without the first, which is the object."""
    placed = [*method.args.posonlyargs, *method.args.args]
    return _given(method.args) - {each.arg for each in placed[:1]}


def _increased_places(node: ast.AST, libraries: set[str]) -> list[ast.expr]:
    """Return the variables, attributes and elements that a statement changes by their own value, as ``n += 1``,
    ``n = max(n, 2) + 1`` and ``setattr(x, "n", x.n + 1)`` do. A mere conversion, as in ``b = b.to(d)``, does not count,
    and neither does a mere copy from another object, as in ``a.n = b.n``.
    """
    if isinstance(node, ast.AugAssign):
        return [node.target]
    if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "setattr" and len(node.args) == 3:
        return [node] if place_name(node) in _places_in(node.args[2]) else []
    value = node.value if isinstance(node, (ast.Assign, ast.AnnAssign, ast.NamedExpr)) else None
    if value is None:
        return []
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr in CONVERSIONS:
        return []
    targets = targets_of(node)
    read = read_places(_changing_part(value, {ast.unparse(t) for t in targets}), libraries)
    return [t for t in targets if place_name(t) in read and not _is_copy(value, place_name(t))]


def _changing_part(value: ast.expr, kept: set[str]) -> ast.expr:
    """Return an expression without the cases in which it is one of the expressions ``kept``, and changes nothing there,
    as in ``a if a is not None else b`` and ``a or b``.
    """
    if isinstance(value, ast.IfExp):
        parts = [value.test, value.body, value.orelse]
    elif isinstance(value, ast.BoolOp):
        parts = value.values
    else:
        return value
    return ast.Tuple([part for part in parts if ast.unparse(part) not in kept], ast.Load())


def _is_copy(value: ast.expr, name: str) -> bool:
    """Return whether an expression is an attribute with the name ``name``, or a parameter that is made of one."""
    value = _converted(value)
    return isinstance(value, ast.Attribute) and place_name(value) == name and name not in _places_in(value.value)


def _converted(value: ast.expr) -> ast.expr:
    """Return the expression of which another one is a conversion or makes a parameter, or that one itself."""
    called = getattr(value.func, "attr", getattr(value.func, "id", "")) if isinstance(value, ast.Call) else ""
    if isinstance(value, ast.Call) and called == "Parameter" and value.args:
        value = value.args[0]
    while isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr in CONVERSIONS:
        value = value.func.value
    return _without_data(value)


def _changed_in_place(node: ast.AST, modules: set[str], libraries: set[str]) -> Iterator[str]:
    """Yield the names of the tensors that a syntax node changes in place by their own value, as ``n.add_(1)`` and
    ``torch.exp_(n)`` do, where ``modules`` has the name ``torch``.
    """
    called = node.func if isinstance(node, ast.Call) else None
    if not isinstance(node, ast.Call) or not isinstance(called, ast.Attribute):
        return
    if not called.attr.endswith("_") or called.attr.endswith("__"):
        return
    changed, given = [called.value], [*node.args, *(each.value for each in node.keywords)]
    if _is_module(called.value, modules) and given:
        first, *given = given
        changed = first.elts if isinstance(first, (ast.List, ast.Tuple)) else [first]
    for name in (place_name(_without_data(each)) for each in changed):
        by_itself = any(name in read_places(each, libraries) and not _is_copy(each, name) for each in given)
        if by_itself or called.attr not in OVERWRITING:
            yield name


def _places_in(node: ast.AST) -> set[str]:
    """Return the names of all places in an expression."""
    return {place_name(each) for each in ast.walk(node)} - {""}


def read_places(node: ast.AST, libraries: set[str]) -> set[str]:
    """Return the names of the places whose values an expression reads. A place does not count if the expression reads
    only its shape or another such property, or compares it with None. The name of a function of one of ``libraries``,
    such as that of ``torch.ones``, is no place of an object.
    """
    found: set[str] = set()
    left = [node]
    while left:
        at = left.pop()
        if isinstance(at, ast.Attribute) and at.attr in DESCRIBING:
            continue
        if isinstance(at, ast.Compare) and all(isinstance(op, (ast.Is, ast.IsNot, ast.In, ast.NotIn)) for op in at.ops):
            left += [each for each in (at.left, *at.comparators) if not _is_looked_up(at, each)]
            continue
        found.add(place_name(at))
        if isinstance(at, ast.Call) and is_of_library(at.func, libraries):
            left += [*at.args, *(each.value for each in at.keywords)]
            continue
        left += ast.iter_child_nodes(at)
    return found - {""}


def _is_looked_up(test: ast.Compare, side: ast.expr) -> bool:
    """Return whether a side of a comparison by ``is`` or ``in`` is a value that may be None, or a cache in which a key
    is looked up. A number is no key.
    """
    if isinstance(test.ops[0], (ast.Is, ast.IsNot)):
        return isinstance(side, (ast.Name, ast.Attribute)) and any(
            isinstance(each, ast.Constant) and each.value is None for each in (test.left, *test.comparators)
        )
    keyed = any(isinstance(n, (ast.Name, ast.Call, ast.JoinedStr)) for n in ast.walk(test.left))
    keyed = keyed or (isinstance(test.left, ast.Constant) and isinstance(test.left.value, (str, bytes)))
    return side is not test.left and isinstance(side, (ast.Name, ast.Attribute)) and keyed
