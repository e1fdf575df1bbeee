"""Search of a candidate's source, without running it, for decisions by what differs in later calls and processes.

A candidate is called some thousand times in about a minute, in one process. If it decides by a count of its calls, by a
clock, by chance or by the number of its process, no number of these calls shows that later ones are right.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeGuard

from shiplap.sandbox.kept_counts import (
    DECIDING_CALLS,
    DESCRIBING,
    GROWING,
    SHRINKING,
    changed_container,
    counted_places,
    imported_libraries,
    is_of_library,
    place_name,
    read_places,
    targets_of,
    used_up_places,
)
from shiplap.sandbox.local_aliases import called_name, resolve_aliases, resolve_calls
from shiplap.sandbox.native_counts import JUDGED_CALLS, native_decisions
from shiplap.sandbox.rare_remainders import rare_remainders
from shiplap.sandbox.source_scan import (
    functions_used_by,
    gather_sources,
    live_nodes,
    number_of,
    parse_source,
    read_source,
)

CLOCKS = {"monotonic", "perf_counter", "process_time", "thread_time", "clock_gettime"}
CLOCKS |= {f"{name}_ns" for name in CLOCKS} | {"times", "getrusage", "uptime"}
"""Functions that say how long a machine, a process or a thread runs. Honest candidates measure their time by them."""
CHANCES = {"random", "randint", "randrange", "getrandbits", "uniform", "urandom", "token_bytes", "randbelow", "uuid4"}
CHANCES |= {"choice", "choices", "gauss", "normalvariate", "expovariate", "betavariate", "triangular", "randbytes"}
CHANCES |= {"integers", "random_sample", "standard_normal"}
DRAWS = {"rand", "randn"}  # of torch and numpy, which honest candidates compare elementwise
NUMBERS = DRAWS | {"randint", "randperm", "bernoulli", "multinomial", "poisson", "normal", "empty"}
"""Functions of torch whose results, as one number, are a chance. The content of new memory is one as well."""
ADDRESSED = {"repr", "ascii", "__repr__"}
"""Functions whose text may have the address of an object."""
PROCESSES = {"getpid", "get_ident", "get_native_id", "hash", "__hash__", "id", "getnode"}
IMPORTED_AS = {"__name__", "__file__", "__spec__", "__package__"}
ELSEWHERE = {"isatty", "getloadavg", "gettempdir", "current_thread", "getlogin", "getuser"}
"""Functions that say where code runs."""
CALLERS = {"argv", "orig_argv"}  # of ``sys``: what a program is started with
SHARE_AT = {"dropout": 1, "alpha_dropout": 1, "bernoulli": 0, "Dropout": 0, "bernoulli_": 0}
"""The place of the chance among the arguments of functions that drop or draw elements by it."""
RARE = 0.01  # a chance of one element that the elements of some thousand calls may miss
FAR_NORMAL = 3.0  # normally distributed numbers are larger by such a chance
COUNTS = {"cache_info", "get_count", "get_stats", "getallocatedblocks", "getrefcount", "getsizeof", "active_count"}
COUNTS |= {"getsize", "listdir", "scandir", "tell", "read_text", "read_bytes", "readline", "readlines", "getpos"}
"""Functions whose results grow from call to call, where a candidate makes them grow, as it may the size of a file."""
FILE_FACTS = {"st_size", "st_mtime", "st_mtime_ns", "st_nlink", "st_ino"}
UNSTEADY = CLOCKS | CHANCES | PROCESSES | COUNTS | ADDRESSED | ELSEWHERE | {"data_ptr"}
LONG_ALIGNMENT = 4096  # bytes; an address by a larger number is a chance
MOST_SIDES = 64  # values of one comparison, each of which is compared with all others
TOO_DEEP = "expressions that are nested too deeply to be scanned"
COMPUTED = (ast.BinOp, ast.UnaryOp, ast.Subscript, ast.Attribute, ast.Compare, ast.BoolOp, ast.NamedExpr)
FRESH = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.SetComp, ast.DictComp)  # expressions that make a container
CONTAINERS = {"list", "dict", "set", "deque", "defaultdict", "OrderedDict", "Counter"}  # classes that make one


def find_unsteady_decisions(file: str) -> list[str]:
    """Return a string ``line N: reason`` for each decision in a Python file and the modules beside it by something that
    may differ in later calls or in another process.

    That is a count of calls (see ``find_call_counters``), a clock that is compared with a number, chance, the number of
    a process or of an object, the length of a list that grows, and the next element of an iterator that lasts.
    """
    found = find_call_counters(file)
    for source in gather_sources(file):
        if source.suffix == ".py":
            found += _decisions_in(source, lambda tree: sorted({*_unsteady_decisions(tree), *rare_remainders(tree)}))
        else:
            text = read_source(source).decode(errors="replace")
            found += [f"line {line}: {what}" for line, what in native_decisions(text, 1)]
    return list(dict.fromkeys(found))


def _decisions_in(source: Path, find: Callable[[ast.Module], Iterable[tuple[int, str]]]) -> list[str]:
    """Return a string ``line N: reason`` for each decision that ``find`` returns for the syntax tree of a Python file.

    The list is empty for a file that Python cannot parse, and which no process can import. For one that is nested too
    deeply to be scanned here, it has ``TOO_DEEP``, since a process with another limit may import it.
    """
    try:
        tree = parse_source(read_source(source))
        resolve_aliases(tree)
        return [f"line {line}: {what}" for line, what in find(tree)]
    except (SyntaxError, ValueError):
        return []
    except (RecursionError, MemoryError):
        return [TOO_DEEP]


def _unsteady_decisions(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield (line, reason) for each decision in a module by something that may differ in later calls or processes,
    other than a count that the module changes by constants.
    """
    nodes = list(live_nodes(tree, ()))
    numbers = _constants_by_name(tree)
    held, growing = _unsteady_names(nodes), _growing_names(tree, nodes)
    lasting = {n for n in _outer_names(tree) if n not in numbers}
    shrunk = {changed_container(n, SHRINKING) for n in nodes}
    joined = (n for n in nodes if isinstance(n, (ast.JoinedStr, ast.BinOp, ast.List, ast.Tuple)))
    parts = {id(each) for n in joined for each in ast.iter_child_nodes(n)}
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from native_decisions(node.value, node.lineno, whole=id(node) not in parts)
        if not isinstance(node, (ast.Compare, ast.BinOp)) or not _decides(node):
            continue
        sides = [node.left, *(node.comparators if isinstance(node, ast.Compare) else [node.right])]
        if len(sides) > MOST_SIDES:
            yield node.lineno, f"a comparison of more than {MOST_SIDES} values, which is not scanned"
            continue
        amounts = [_amount(side, numbers) for side in sides]
        for side in sides:
            others = [a for a, other in zip(amounts, sides, strict=True) if other is not side]
            known = isinstance(node, ast.BinOp) or any(a is not None for a in others)
            if (what := _unsteady_source(side, held)) and _matters(what, known, others):
                is_guard = any(isinstance(s, ast.Constant) and s.value == "__main__" for s in sides)
                yield from [] if is_guard else [(node.lineno, what)]
            if (what := _drawn_tensor(side)) and any(_is_rare(what, side, s) for s in sides if s is not side):
                yield node.lineno, f"a chance of one element, by {what}"
            name = _measured_length(side)
            far = any(a is not None and abs(a) >= JUDGED_CALLS for a in others) or isinstance(node, ast.BinOp)
            if name in growing and name not in shrunk and far:
                yield node.lineno, f"the length of {name}, which grows"
            if (name := _next_of(side)) and name in lasting:
                yield node.lineno, f"the next element of {name}"
    yield from ((n.lineno, "a chance of one element") for n in nodes if isinstance(n, ast.Call) and _drops_few(n))
    yield from ((line, f"the elements of {name}, which are used up") for line, name in used_up_places(tree, lasting))
    yield from _elements_that_decide(nodes, lasting, growing - shrunk)
    for test in _truth_tests(tree):
        if (name := _next_of(test)) and name in lasting:
            yield test.lineno, f"the next element of {name}"
        if isinstance(test, ast.Call) and getattr(test.func, "attr", "") in NUMBERS and _drawn_number(test):
            yield test.lineno, f"one number of torch.{getattr(test.func, 'attr', '')}"
        # Whether a folder is empty changes once.
        harmless = (
            CLOCKS
            | DRAWS
            | ADDRESSED
            | {"data_ptr"}
            | ({"listdir", "scandir"} if isinstance(test, ast.Call) else set())
        )
        if (what := _unsteady_source(test, held)) and what not in harmless:
            yield test.lineno, what


def _elements_that_decide(nodes: list[ast.AST], lasting: set[str], growing: set[str]) -> Iterator[tuple[int, str]]:
    """Yield (line, reason) where code calls the next element of one of the iterators ``lasting`` or indexes by it, or
    reads a far element of one of the containers ``growing``, which is there only after many calls.
    """
    taken = {
        place_name(target): name
        for node in nodes
        if isinstance(node, ast.Assign) and (name := _next_of(node.value)) in lasting
        for target in node.targets
    }
    lists = {changed_container(node, GROWING) for node in nodes}
    for node in nodes:
        used = node.func if isinstance(node, ast.Call) else node.slice if isinstance(node, ast.Subscript) else None
        if used is not None and (name := _next_of(used) or taken.get(place_name(used), "")) in lasting and name:
            yield getattr(node, "lineno", 0), f"the next element of {name}"
        if _is_element(node) and place_name(node) in growing and isinstance(node.ctx, ast.Load):
            # What is held under a key may be a tensor, of which a part is no far element.
            is_part = isinstance(node.slice, ast.Slice) and isinstance(node.value, ast.Subscript)
            if is_part and place_name(node) not in lists:
                continue
            amounts = [_amount(n, {}) for n in ast.walk(node.slice) if isinstance(n, ast.Constant)]
            if any(amount is not None and abs(amount) >= JUDGED_CALLS for amount in amounts):
                yield node.lineno, f"a far element of {place_name(node)}, which grows"


def _matters(what: str, known: bool, others: list[float | None]) -> bool:
    """Return whether the outcome of a comparison depends on the value that the function ``what`` returns, and not only
    on whether there is one. ``known`` says whether the value is divided, or compared with a number of the code.
    ``others`` holds the numbers that it is compared with, and None for any other expression.
    """
    if what in CLOCKS:  # a time is above zero everywhere
        return any(a is not None and a != 0 for a in others)
    # A thread may be the key of a buffer of its own, and the same thread or not: a call in another one is compared.
    if what in IMPORTED_AS | (ELSEWHERE - {"current_thread"}) or what.startswith("sys."):
        return True
    if what in ADDRESSED:  # a text, which is compared with others
        return any(a is not None and a > 1 for a in others)
    if what == "data_ptr":  # which honest candidates divide by an alignment
        return any(a is not None and a > LONG_ALIGNMENT for a in others)
    if what in ("read_text", "readline"):  # text, which ``%`` formats
        return any(a is not None for a in others)
    if what in PROCESSES and others:  # as in ``threads > 1``
        return any(a is not None and a > 1 for a in others) or (known and not any(a is not None for a in others))
    return known or what in CHANCES


def _constants_by_name(tree: ast.Module) -> dict[str, float]:
    """Return the numbers that the statements of a module bind to names, by name, if a name is bound once only."""
    bound: dict[str, list[ast.expr]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            bound.setdefault(node.id, []).append(node)
    found: dict[str, float] = {}
    for statement in tree.body:
        for target in statement.targets if isinstance(statement, ast.Assign) else ():
            if isinstance(target, ast.Name) and len(bound[target.id]) == 1:
                amount = _amount(statement.value, {}) if isinstance(statement, ast.Assign) else None
                found |= {target.id: amount} if amount is not None else {}
    return found


def _amount(node: ast.expr, numbers: dict[str, float]) -> float | None:
    """Return the largest number in an expression of constants, or that of a name in ``numbers``, and None for another
    expression. Text and bytes, whose order decides as well, count as 1.
    """
    if isinstance(node, ast.Name):
        return numbers.get(node.id)
    if isinstance(node, ast.Constant) and isinstance(node.value, (str, bytes)):
        return 1.0
    if any(
        not isinstance(n, (ast.Constant, ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop)) for n in ast.walk(node)
    ):
        return None
    code = [n.value for n in ast.walk(node) if isinstance(n, ast.Constant)]
    values = [float(min(abs(v), sys.float_info.max)) for v in code if isinstance(v, (int, float))]
    return max(values) if values and len(values) == len(code) else None


def _unsteady_names(nodes: list[ast.AST]) -> dict[str, str]:
    """Return the names that are bound to a value of an unsteady function, directly or through other names, with the
    name of that function. Draws of tensors are left out, since honest candidates hold some.
    """
    held: dict[str, str] = {}
    for _ in range(3):
        for node in nodes:
            if not isinstance(node, (ast.Assign, ast.AnnAssign, ast.NamedExpr, ast.AugAssign)) or node.value is None:
                continue
            what = _unsteady_source(node.value, held)
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if what and what not in DRAWS:
                held |= {name: what for name in map(place_name, targets) if name}
    return held


def _unsteady_source(node: ast.AST, held: dict[str, str]) -> str:
    """Return the name of the unsteady function whose value an expression is or is computed from, or an empty string.
    ``held`` are the names that hold such values. Elements of displays and arguments of other calls do not count.
    """
    left = [node]  # no recursion: a sum of a thousand terms is nested as deeply
    while left:
        at = left.pop()
        inner: list[ast.expr] = []
        if isinstance(at, ast.Call):
            name = getattr(at.func, "attr", getattr(at.func, "id", ""))
            if name in ("item", "tolist") and (what := _drawn_number(at)):
                return what
            drawn = name in DRAWS or (name in CHANCES and place_name(getattr(at.func, "value", at)) == "torch")
            if _is_one_number(at) if drawn else name in UNSTEADY:
                return str(name)
            inner = [*at.args] if name in ("int", "float", "abs", "round", "str", "bool", "len") else []
            inner += [at.func.value] if isinstance(at.func, ast.Attribute) else []
        elif isinstance(at, ast.Attribute) and at.attr in FILE_FACTS:
            return at.attr
        elif isinstance(at, ast.Attribute) and at.attr in CALLERS and place_name(at.value) == "sys":
            return f"sys.{at.attr}"
        elif isinstance(at, ast.Name) and at.id in IMPORTED_AS:
            return at.id
        elif isinstance(at, (ast.Name, ast.Attribute)) and (what := held.get(place_name(at), "")):
            return what
        elif isinstance(at, COMPUTED):
            inner = [each for each in ast.iter_child_nodes(at) if isinstance(each, ast.expr)]
        left += reversed(inner)
    return ""


def _drawn_tensor(node: ast.AST) -> str:
    """Return the name of a function that draws the numbers of a tensor or an array, if an expression is a call of it
    for more than one number, and an empty string for another expression.
    """
    name = getattr(node.func, "attr", getattr(node.func, "id", "")) if isinstance(node, ast.Call) else ""
    drawn = name in DRAWS | {"rand_like", "randn_like", "randint", "random", "integers"}
    given = isinstance(node, ast.Call) and bool(node.args or node.keywords)
    return name if drawn and given and not (isinstance(node, ast.Call) and _is_one_number(node)) else ""


def _is_rare(drawn: str, call: ast.AST, other: ast.AST) -> bool:
    """Return whether few of the numbers that ``call``, of a function called ``drawn``, draws are on the other side of
    the number ``other``, or equal to it.
    """
    number = number_of(other)
    if not isinstance(number, (int, float)):
        return False
    if drawn in ("randint", "integers"):
        ends = [number_of(n) for n in call.args[:2]] if isinstance(call, ast.Call) else []
        return any(isinstance(end, (int, float)) and abs(end) >= JUDGED_CALLS for end in ends)
    return abs(number) >= FAR_NORMAL if "randn" in drawn else not RARE <= number <= 1 - RARE


def _drops_few(node: ast.Call) -> bool:
    """Return whether a call drops or draws few elements by chance, as ``dropout(x, 1e-7)`` does."""
    name = getattr(node.func, "attr", getattr(node.func, "id", ""))
    if name not in SHARE_AT:
        return False
    most = 2 if name == "bernoulli" else 1  # the function takes a tensor of chances, the method and the form a number
    given = [*node.args[SHARE_AT[name] :][:most], *(k.value for k in node.keywords if k.arg == "p")]
    filled = [n for n in given if isinstance(n, ast.Call) and getattr(n.func, "attr", "").startswith("full")]
    given += [each for n in filled for each in n.args[1:2]]
    return any(isinstance(p, float) and 0 < min(p, 1 - p) < RARE for p in map(number_of, given))


def _drawn_number(node: ast.Call) -> str:
    """Return the name of a function of torch that draws numbers, or makes memory with any content, of whose result a
    call takes one number, as ``torch.rand(2).max().item()`` does. Return an empty string for another call.
    """
    called = [n.func for n in ast.walk(node) if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute)]
    return next((f.attr for f in called if f.attr in NUMBERS and place_name(f.value) == "torch"), "")


def _is_one_number(node: ast.Call) -> bool:
    """Return whether a call that draws a tensor draws one number, which is no data: its shape is empty, or has ones, or
    it has none, as that of numpy may.
    """
    given = [k.value for k in node.keywords if k.arg in ("size", None)]  # None: ``**keywords``, which may hold one
    shapes = [a for a in (*node.args, *given) if isinstance(a, (ast.Tuple, ast.List))]
    sizes = [size for shape in shapes for size in shape.elts]
    if not shapes:
        if getattr(node.func, "attr", getattr(node.func, "id", "")) not in DRAWS:
            return False
        sizes = [*node.args, *given]
    return all(isinstance(s, ast.Constant) and s.value == 1 for s in sizes)


def _growing_names(tree: ast.Module, nodes: list[ast.AST]) -> set[str]:
    """Return the names of containers to which some of ``nodes``, code of the module ``tree``, adds elements by a method
    or under a key, and which outlive the call that does so. A list that a function makes and fills is new in each call.
    """
    named = [(_filled_container(n), n) for n in nodes]
    lasting = _outer_names(tree)
    filled = {name for name, n in named if isinstance(n, ast.Call) or name in lasting}
    made = {id(n) for f in ast.walk(tree) for n in _fillings_of_own(f, filled)}
    return {name for name, n in named if id(n) not in made} - {""}


def _filled_container(node: ast.AST) -> str:
    """Return the name of the container to which a syntax node adds an element, by a method or under a key, or an empty
    string for another node.
    """
    if isinstance(node, ast.Subscript):
        return place_name(node) if isinstance(node.ctx, ast.Store) and _is_element(node) else ""
    return changed_container(node, GROWING)


def _is_element(node: ast.AST) -> TypeGuard[ast.Subscript]:
    """Return whether a syntax node is an element of a container. A part of a tensor, such as ``x[:, :9]``, is none."""
    parts = node.slice.elts if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Tuple) else []
    return isinstance(node, ast.Subscript) and not any(isinstance(each, ast.Slice) for each in parts)


def _fillings_of_own(node: ast.AST, filled: set[str]) -> Iterator[ast.AST]:
    """Yield the syntax nodes in a function that add elements to a container that it has made itself. Yield nothing for
    another syntax node. Functions inside of the function are left out: they may outlive the call. What is made or
    filled from another container among ``filled`` may be as long as that one, and is left out as well.
    """
    if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
        return
    inner = list(_scope_of(node))
    outer = {name for n in inner if isinstance(n, (ast.Global, ast.Nonlocal)) for name in n.names}
    outer |= {n.arg for n in ast.walk(node.args) if isinstance(n, ast.arg)}
    fresh = {id(t) for n in inner for t, value in _bindings_of(n) if _makes_container(value, filled)}
    stored = [n for n in inner if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
    own = {n.id for n in stored} - {n.id for n in stored if id(n) not in fresh} - outer
    for n in inner:
        at = n.value if isinstance(n, ast.Subscript) else getattr(n.func, "value", n) if isinstance(n, ast.Call) else n
        added = [n.slice] if isinstance(n, ast.Subscript) else n.args if isinstance(n, ast.Call) else []
        # An element of the container, such as ``made[0]``, may be another one that outlives the call.
        if isinstance(at, ast.Name) and _filled_container(n) in own and not _names_in(added) & filled:
            yield n


def _bindings_of(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Yield (target, value) for each target to which a statement or a named expression binds a value as a whole."""
    if isinstance(node, ast.Assign):
        yield from ((target, node.value) for target in node.targets)
    elif isinstance(node, (ast.AnnAssign, ast.NamedExpr)) and node.value is not None:
        yield node.target, node.value


def _names_in(values: list[ast.expr]) -> set[str]:
    """Return the names of all variables and attributes in some expressions."""
    return {place_name(n) for value in values for n in ast.walk(value)} - {""}


def _scope_of(function: ast.AST) -> Iterator[ast.AST]:
    """Yield the syntax nodes of a function without those of functions and classes inside of it."""
    left = list(ast.iter_child_nodes(function))
    while left:
        node = left.pop()
        yield node
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
            left += ast.iter_child_nodes(node)


def _makes_container(value: ast.expr, filled: set[str]) -> bool:
    """Return whether an expression makes a new list, dict, set or a like container each time, from no container among
    ``filled``.
    """
    called = getattr(value.func, "attr", getattr(value.func, "id", "")) if isinstance(value, ast.Call) else ""
    return (isinstance(value, FRESH) or called in CONTAINERS) and not _names_in([value]) & filled


def _outer_names(tree: ast.Module) -> set[str]:
    """Return the names that outlive a call: those that statements of a module bind, and attributes."""
    stored = [n for n in ast.walk(tree) if isinstance(getattr(n, "ctx", None), ast.Store)]
    outside = {n for statement in tree.body if not _is_definition(statement) for n in ast.walk(statement)}
    shared = {n for each in ast.walk(tree) if isinstance(each, (ast.Global, ast.Nonlocal)) for n in each.names}
    held = {n.id for n in stored if isinstance(n, ast.Name) and (n in outside or n.id in shared)}
    return held | {f".{n.attr}" for n in stored if isinstance(n, ast.Attribute)}


def _is_definition(node: ast.AST) -> bool:
    """Return whether a statement defines a function or a class."""
    return isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))


def _measured_length(node: ast.AST) -> str:
    """Return the name of the container whose length an expression is, or a sum or count of whose elements it is, or an
    empty string.
    """
    if not isinstance(node, ast.Call):
        return ""
    if isinstance(node.func, ast.Attribute):
        return place_name(node.func.value) if node.func.attr in ("__len__", "count", "bit_length", "index") else ""
    is_length = getattr(node.func, "id", "") in ("len", "sum", "max", "min") and len(node.args) == 1
    return place_name(node.args[0]) if is_length else ""


def _next_of(node: ast.AST) -> str:
    """Return the name of the iterator whose next element an expression is, or an empty string."""
    if not isinstance(node, ast.Call):
        return ""
    if isinstance(node.func, ast.Name) and node.func.id == "next" and node.args:
        return place_name(node.args[0])
    return place_name(node.func.value) if isinstance(node.func, ast.Attribute) and node.func.attr == "__next__" else ""


def _truth_tests(tree: ast.AST) -> Iterator[ast.expr]:
    """Yield the expressions by whose truth a module branches, without the comparisons and ``not`` around them."""
    for node in ast.walk(tree):
        left: list[ast.expr] = [node.test] if isinstance(node, (ast.If, ast.IfExp, ast.While, ast.Assert)) else []
        while left:
            at = left.pop()
            if isinstance(at, ast.BoolOp):
                left += at.values
            elif isinstance(at, ast.UnaryOp):
                left.append(at.operand)
            elif not isinstance(at, ast.Compare):
                yield at


def find_call_counters(file: str) -> list[str]:
    """Return a string ``line N: NAME`` for each decision in a Python file and the modules beside it that depends on a
    count which code of the file changes, such as the number of calls so far.

    Global names, names of an enclosing function and attributes count. No number of calls shows that a candidate with
    such a decision is right in all later ones.
    """
    sources = (s for s in gather_sources(file) if s.suffix == ".py")
    return [found for source in sources for found in _decisions_in(source, _call_counters)]


def _call_counters(tree: ast.Module) -> list[tuple[int, str]]:
    """Return (line, name) for each decision in a module by a count that its code changes, in the order of lines."""
    counted = counted_places(tree)
    if not counted:
        return []
    libraries = imported_libraries(tree)
    counting = _counting_functions(tree, counted, libraries)
    resolve_calls(tree, lambda call: bool(_counting_calls(call, counting, libraries)))
    shrunk = {changed_container(n, SHRINKING) for n in ast.walk(tree)}
    updates: dict[int, str] = {}
    for statement in ast.walk(tree):  # a named expression comes after what it is in
        updates |= {id(each): name for each, name in _updates_of(statement)}
    used: set[tuple[int, str]] = set()
    for node in ast.walk(tree):
        for part in _deciding_parts(node):
            names = (read_places(part, libraries) & counted) - {updates.get(id(node), "")}
            names |= _counting_calls(part, counting, libraries)
            # A container that is emptied holds what the last calls have left, and counts none.
            names -= shrunk & {_measured_length(n) for n in ast.walk(part)}
            used |= {(node.lineno, name) for name in names if hasattr(node, "lineno")}
    for test in _truth_tests(tree):
        names = (read_places(test, libraries) & counted - shrunk) | _counting_calls(test, counting, libraries)
        used |= {(test.lineno, name) for name in names}
    return sorted(used)


def _counting_calls(node: ast.AST, counting: set[str], libraries: set[str]) -> set[str]:
    """Return the names of the functions ``counting`` that an expression calls. Functions of ``libraries`` and methods
    that tell a shape, such as ``torch.add`` and ``x.size(0)``, may only have such a name.
    """
    calls = [n for n in ast.walk(node) if isinstance(n, ast.Call) and not is_of_library(n.func, libraries)]
    return {called_name(n) for n in calls if getattr(n.func, "attr", "") not in DESCRIBING} & counting


def _counting_functions(tree: ast.Module, counted: set[str], libraries: set[str]) -> set[str]:
    """Return the names of the functions of a module that return one of the places ``counted``, and the names to which
    such a function or a method is bound.
    """
    definitions = [n for n in ast.walk(tree) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))]
    returned = ((d, n.value) for d in definitions for n in _scope_of(d) if isinstance(n, ast.Return) and n.value)
    found = {d.name for d, value in returned if read_places(value, libraries) & counted}
    bound = (n for n in ast.walk(tree) if isinstance(n, ast.Assign) and place_name(n.value).lstrip(".") in found)
    return found | {place_name(target).lstrip(".") for n in bound for target in n.targets} - {""}


def _updates_of(node: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    """Yield each syntax node, with the name of the target, of the value of an assignment in which a count is changed by
    its own value and decides nothing yet. Comparisons decide, and the value may read no other element of the target.
    """
    value = node.value if isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.NamedExpr)) else None
    pairs = [] if value is None else [(target, value) for target in targets_of(node)]
    if len(pairs) != 1:
        sides = value.elts if isinstance(value, (ast.Tuple, ast.List)) else []
        pairs = [(pair[0], side) for pair, side in zip(pairs, sides, strict=True)] if len(sides) == len(pairs) else []
    for target, side in pairs:
        name, inner = place_name(target), list(ast.walk(side))
        named = [n for n in inner if place_name(n) == name] if name else []
        same = sum(isinstance(n, type(target)) and ast.unparse(n) == ast.unparse(target) for n in named)
        if len(named) == same * sum(place_name(n) == name for n in ast.walk(target)):
            yield from ((n, name) for n in inner if not isinstance(n, ast.Compare))


def _deciding_parts(node: ast.AST) -> list[ast.expr]:
    """Return the parts of a syntax node by whose value code decides or computes: the sides of a comparison and of an
    operator, an index, and the arguments of functions such as ``min`` and ``range``.
    """
    if isinstance(node, ast.Compare):
        return [node] if len(node.ops) == 1 else [node.left, *node.comparators]
    if isinstance(node, ast.BinOp):
        return [node.left, node.right] if _decides(node) or not isinstance(node.op, ast.Mod) else []
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
        return [node.slice]
    if isinstance(node, ast.Call):
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        return [*node.args] if name in DECIDING_CALLS else []
    return [node.subject] if isinstance(node, ast.Match) else []


def unsteady_decisions_of_function(fn: Any) -> list[str]:
    """Return a string ``line N: reason`` for each decision, as of ``find_unsteady_decisions``, in the function ``fn``
    and in the functions of its module that it uses. The list is empty if their source cannot be read.
    """
    used = list(functions_used_by(fn))
    if not used:
        return []
    first = {at.__code__.co_firstlineno for at in used}
    try:
        tree = parse_source(read_source(used[0].__code__.co_filename))
        resolve_aliases(tree)
        return _decisions_in_part(tree, first)
    except (SyntaxError, ValueError):
        return []
    except (RecursionError, MemoryError):
        return [TOO_DEEP]


def _decisions_in_part(tree: ast.Module, first: set[int]) -> list[str]:
    """Return a string ``line N: reason`` for each decision in the functions of a module that begin in the lines
    ``first``.
    """
    definitions = [node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    own = [d for d in definitions if first.intersection([d.lineno, *(each.lineno for each in d.decorator_list)])]
    # What names of the module hold decides as well, and other code of the module does not.
    part = ast.Module([*(each for each in tree.body if not _is_definition(each)), *own], [])
    found = [*_call_counters(part), *sorted({*_unsteady_decisions(part)})]
    return [f"line {n}: {what}" for n, what in found if any(d.lineno <= n <= (d.end_lineno or n) for d in own)]


def _decides(node: ast.Compare | ast.BinOp) -> bool:
    """Return whether an expression is a comparison or the remainder of a division, by which code decides. A string
    that is formatted with ``%`` is none.
    """
    if isinstance(node, ast.Compare):
        return True
    is_text = isinstance(node.left, ast.Constant) and isinstance(node.left.value, (str, bytes))
    return isinstance(node.op, ast.Mod) and not is_text
