"""Edits that compile versions of a function by the kind of its calls, each of which is compiled for itself."""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Callable, Iterator

from shiplap.doctor.edits import Case, Editor, Edits, Source
from shiplap.doctor.edits_of_calls import is_call_of_torch, with_helper
from shiplap.doctor.edits_of_compilation import find_compile_sites
from shiplap.doctor.edits_of_functions import unused_name
from shiplap.doctor.edits_of_values import enclosing_function

# Helpers that the edits insert into the program. A compiled module stays a module, since the program may read its
# attributes.
VERSIONS = '''
def compile_each(kind, **options):
    """Return a decorator that compiles a function once for each value of ``kind(...)`` of its arguments."""
    import functools

    def decorate(fn):
        versions = {}

        @functools.wraps(fn.forward if isinstance(fn, torch.nn.Module) else fn, updated=())
        def call(*args, **kwargs):
            key = kind(*args, **kwargs)
            if key not in versions:
                versions[key] = torch.compile(fn, isolate_recompiles=True, **options)
            return versions[key](*args, **kwargs)

        if not isinstance(fn, torch.nn.Module):
            return call
        compiled = torch.compile(fn, **options)
        compiled.forward = call
        return compiled

    return decorate
'''


_REPEATED = '''
def compile_repeated(kind, **options):
    """Return a decorator that compiles a function for calls whose ``kind(...)`` has come before."""
    import functools

    def decorate(fn):
        compiled = torch.compile(fn, **options)
        inner = compiled.forward if isinstance(fn, torch.nn.Module) else compiled
        seen = set()

        @functools.wraps(fn.forward if isinstance(fn, torch.nn.Module) else fn, updated=())
        def call(*args, **kwargs):
            key = kind(*args, **kwargs)
            if key in seen:
                return inner(*args, **kwargs)
            seen.add(key)
            with torch.compiler.set_stance("force_eager"):
                return inner(*args, **kwargs)

        if not isinstance(fn, torch.nn.Module):
            return call
        compiled.forward = call
        return compiled

    return decorate
'''

# For each kind of variation the expressions that tell calls apart, in which {name} stands for the value that varied,
# and {dim} for the number of its dim.
_KEYS: dict[str, tuple[str, ...]] = {
    "lazy": ("{name} is None",),
    "optional": ("{name} is None",),
    "value": ("{name}",),
    "dtype": ("{name}.dtype",),
    "rank": ("{name}.dim()",),
    "size": ("{name}.shape",),
    "small": ("{name}.shape[{dim}] < 2", "{name}.shape"),
    "stride": ("{name}.stride()",),
    "device": ("{name}.device", "type({name})"),
    "type": ("type({name})",),
    "identity": ("{name}",),
    "length": ("len({name})", "tuple({name})", "tuple({name}.items())"),
    "grad": ("{name}.requires_grad",),
}
# The expressions for what is no value of an argument; {model} is the compiled module.
_KEYS_OF_MODULE = {
    "grad": "tuple(p.requires_grad for p in {model}.parameters())",
    "mode": "tuple(m.training for m in {model}.modules())",
}

# All attributes of a module and of the modules in it that are numbers or texts.
_ATTRIBUTES = "tuple(v for m in {model}.modules() for v in vars(m).values() if isinstance(v, (bool, int, float, str)))"


# A function that yields expressions which tell calls apart. Its arguments are the recompile, the parameters of the
# compiled function, and the source code of what was compiled.
_Keys = Callable[[Case, str, str], Iterator[str]]


def compile_by_kind(name: str, helper: str, keys: _Keys, more: tuple[str, ...] = ()) -> Editor:
    """Return an editor that inserts the function ``helper``, called ``name``, and compiles with it in place of
    ``torch.compile``. The helper gets a function that tells kinds of calls apart, by the expressions of ``keys``.
    ``more`` has further options of ``torch.compile``.

    An editor is a function that proposes edits for a break or recompile.
    """

    def edit(case: Case) -> Iterator[Edits]:
        """Yield the edits that compile by the helper of the enclosing function. Calls are told apart by the value that
        varied, which is an argument, a global setting, or a state of the compiled module. If the helper is in use for
        an earlier recompile, its kinds are told apart by both values.
        """
        yield from _refined_kinds(case, name, keys)
        for source, node, function in find_compile_sites(case):
            if not is_call_of_torch(node) if function is None else function.name != case.function:
                continue  # the value that varied is one of the parameters of the function of the entry
            keywords = node.keywords if isinstance(node, ast.Call) else []
            keywords = [k for k in keywords if not any(o.startswith(f"{k.arg}=") for o in more)]
            options = [f"{'**' if k.arg is None else f'{k.arg}='}{source.code(k.value)}" for k in keywords]
            options += more
            model = source.code(node.args[0]) if function is None and isinstance(node, ast.Call) else ""
            given, parameters = model, _parameters(case, function)
            # A module that has no name yet gets one, by which its state can be read.
            if model and not re.fullmatch(r"\w+(\.\w+)*", model):
                model = unused_name(source, "module")
                given = f"{model} := {given}"
            for key in keys(case, parameters, model):
                text = f"{name}({', '.join([f'lambda {parameters}: {key}', *options])})"
                named = given if re.search(rf"(?<![\w.]){model}\b", key) else given.rpartition(" := ")[2]
                edit = source.replace(node, text if function is not None else f"{text}({named})")
                yield with_helper([(source, edit)], name, helper)

    return edit


def _refined_kinds(case: Case, name: str, keys: _Keys) -> Iterator[Edits]:
    """Yield the edits that let a call of the inserted helper ``name`` tell kinds of calls apart by an expression of
    ``keys``, in addition to the expression by which it does already.
    """
    for source in case.sources():
        for node, parent in source.parents().items():
            if not isinstance(node, ast.Call) or ast.unparse(node.func) != name or not node.args:
                continue
            kind, model = node.args[0], ""
            if isinstance(parent, ast.Call) and parent.func is node:
                given = parent.args[0]
                model = given.target.id if isinstance(given, ast.NamedExpr) else source.code(given)
            if isinstance(kind, ast.Lambda):
                for key in keys(case, ast.unparse(kind.args), model):
                    yield (source.replace(kind.body, f"({source.code(kind.body)}, {key})"),)


def _parameters(case: Case, function: ast.FunctionDef | None) -> str:
    """Return the source code of the parameters of ``function``, without annotations. If it is None, the function of the
    recompile is looked for in the program, and its ``self`` is left out. Without one, the code is ``*args, **kwargs``.
    """
    if function is None:
        sources = sorted(case.sources(), key=lambda s: s.file != case.file)
        named = [n for s in sources for n in ast.walk(s.tree) if isinstance(n, ast.FunctionDef)]
        known = [n for n in named if n.name == case.function]
        around = [n for n in known if n.lineno <= case.line <= (n.end_lineno or n.lineno)]
        if not known:
            return "*args, **kwargs"
        function = copy.deepcopy((around or known)[0])
        if function.args.args and function.args.args[0].arg == "self":
            function.args.args.pop(0)
    given = copy.deepcopy(function.args)
    for each in ast.walk(given):
        if isinstance(each, ast.arg):
            each.annotation = None
    return ast.unparse(given)


def _keys_of(case: Case, parameters: str, model: str) -> Iterator[str]:
    """Yield expressions that tell the calls of a compiled function with these ``parameters`` apart. ``model`` is the
    source code of what was compiled, or an empty string for a decorated function.
    """
    subject, _, dim = case.subject.partition(", dim ")
    # Of a function that is passed torch compares the code, which a builtin does not have.
    subject = subject.removesuffix(".__code__")
    root = re.match(r"\w*", subject)
    if "global setting" in subject or "grad mode" in subject:
        yield "(torch.is_grad_enabled(), *(torch.is_autocast_enabled(kind) for kind in ('cpu', 'cuda')))"
        return
    known = root is not None and re.search(rf"(^|\W){root[0]}(\W|$)", parameters)
    if known and re.fullmatch(r"[\w.\[\]']+(\.item\(\))?", subject):
        keys = _KEYS.get(case.cause, ())
        yield from (key.replace("{name}", subject).replace("{dim}", dim or "0") for key in keys)
    elif re.fullmatch(r"[A-Za-z_]\w*(\.\w+)*", model) and case.cause in ("attribute", "length"):
        if value := _value_of_object(subject, model):
            yield value if case.cause == "attribute" else f"len({value})"
            # Torch names one attribute of several that are set together.
            if case.cause == "attribute" and "fn.__self__." not in subject:
                yield _ATTRIBUTES.replace("{model}", model)
    elif model.isidentifier() and case.cause in _KEYS_OF_MODULE:
        yield _KEYS_OF_MODULE[case.cause].replace("{model}", model)


def _value_of_object(subject: str, model: str) -> str:
    """Return the source code of the attribute ``subject`` of the compiled object, as it is read outside of the compiled
    function. ``model`` is the source code of what was compiled, a name with attributes. Return an empty string if
    ``subject`` is no such attribute.
    """
    # Torch names the compiled object fn, self or, for a method, fn.__self__, and the members of a list by numbers.
    owner = model.rpartition(".")[0] if "fn.__self__." in subject else model
    named = re.fullmatch(r"(?:self|fn\.__self__|fn)((?:\.\w+)+)", subject)
    return owner + re.sub(r"\.(\d+)", r"[\1]", named[1]) if named and owner else ""


def _outcomes_of(case: Case, parameters: str, model: str) -> Iterator[str]:
    """Yield the expression that computes, in front of a call, all conditions which the function around the line of the
    recompile asks about the number that varied. Yield nothing if one of them depends on more than numbers of the module
    level and attributes of the compiled object, or if the function changes the number other than by adding to it.

    The number is a variable of the module level or an attribute of the compiled object, whose source code is ``model``.
    ``parameters`` are those of the compiled function, which may hide a variable.
    """
    source = case.own
    node = source.statement(case.line) if source is not None else None
    function = enclosing_function(source, node) if source is not None and node is not None else None
    if source is None or function is None:
        return
    owner, _, attribute = case.subject.rpartition(".")
    value, read = case.subject, case.subject
    if owner:
        value, read = _value_of_object(case.subject, model), f"self.{attribute}"
    elif value not in source.assigned_names() or re.search(rf"\b{value}\b", parameters):
        return
    asked = [n.test for n in ast.walk(function) if isinstance(n, ast.If | ast.IfExp | ast.While | ast.Assert)]
    asked = [test for test in asked if read in {ast.unparse(n) for n in ast.walk(test)}]
    this, found = value.rpartition(".")[0], list[str]()
    for test in asked:
        added = _added_before(source, function, read, test)
        numbers = [n for n in ast.walk(test) if isinstance(n, ast.Name | ast.Attribute | ast.Call | ast.Subscript)]
        local = {a.arg for a in ast.walk(function.args) if isinstance(a, ast.arg)}
        plain = all(_is_number_outside(source, n, this, local) for n in numbers)
        others = {ast.unparse(n) for n in numbers} - {read}
        changed = any(_added_before(source, function, other, test) != "" for other in others)
        if not value or added is None or not plain or changed:
            return
        found.append(ast.unparse(_Advanced(read, value, added, this).visit(copy.deepcopy(test))))
    if found:
        yield found[0] if len(found) == 1 else f"({', '.join(dict.fromkeys(found))},)"


def _added_before(source: Source, function: ast.FunctionDef, read: str, test: ast.expr) -> str | None:
    """Return the source code that adds what ``function`` has added to the number ``read`` when it evaluates ``test``,
    such as ``" + 1"``. Return None if it may have changed the number otherwise.
    """
    added = ""
    for n in ast.walk(function):
        targets = n.targets if isinstance(n, ast.Assign) else [getattr(n, "target", None)]
        if all(t is None or ast.unparse(t) != read for t in targets) or getattr(n, "lineno", 0) > test.lineno:
            continue
        if not isinstance(n, ast.AugAssign) or source.parents().get(n) is not function:
            return None
        if not isinstance(n.op, ast.Add) or not isinstance(n.value, ast.Constant):
            return None
        added += f" + {source.code(n.value)}"
    return added


def _is_number_outside(source: Source, node: ast.expr, this: str, local: set[str]) -> bool:
    """Return whether ``node`` of a condition has the same value outside of the function: it is a variable of the module
    level that is not hidden by one of ``local``, the function's parameters, or ``self`` or an attribute of it where
    ``this`` is the source code of that object.
    """
    if isinstance(node, ast.Name):
        return bool(this) if node.id == "self" else node.id in source.assigned_names() - local
    return isinstance(node, ast.Attribute) and bool(this) and ast.unparse(node.value) == "self"


class _Advanced(ast.NodeTransformer):
    """A converter of a condition in which a number has the value that it gets later, and ``self`` its name outside."""

    def __init__(self, read: str, value: str, added: str, this: str) -> None:
        """Store the source code of the number in the function (``read``) and outside (``value``), of what is added to
        it (``added``), and of the object outside (``this``).
        """
        self.read, self.this = read, this
        self.number = ast.parse(f"({value}{added})", mode="eval").body

    def visit_Name(self, node: ast.Name) -> ast.AST:
        """Return the number where ``node`` is its variable, the object for ``self``, and else ``node``."""
        if node.id == self.read:
            return self.number
        return ast.parse(self.this, mode="eval").body if node.id == "self" and self.this else node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        """Return the number where ``node`` is its attribute, and else ``node`` with the object for ``self``."""
        return self.number if ast.unparse(node) == self.read else self.generic_visit(node)


compile_versions = compile_by_kind("compile_each", VERSIONS, _keys_of)
compile_repeated = compile_by_kind("compile_repeated", _REPEATED, _keys_of)
compile_outcomes = compile_by_kind("compile_each", VERSIONS, _outcomes_of)
