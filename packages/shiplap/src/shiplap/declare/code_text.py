"""The meaning of a code object as text, and the names that its instructions use.

Comments, positions, docstrings and annotations leave no trace in the text. It is made of what Python has loaded, so
that a file edited after the import cannot lend its new text to the old code.
"""

from __future__ import annotations

import ast
import dis
import hashlib
import re
import textwrap
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from types import CodeType, EllipsisType, NoneType, NotImplementedType
from typing import TypeAlias

PLAIN = (bool, int, float, complex, str, bytes, NoneType, EllipsisType, NotImplementedType)
PlainValue: TypeAlias = bool | int | float | complex | str | bytes | None
Instructions: TypeAlias = Sequence[dis.Instruction]

# Code that calls these with a computed name may use any attribute.
LOOKUPS = frozenset({"getattr", "setattr", "hasattr", "delattr", "attrgetter", "methodcaller"})
# What hides which code runs. Functions of Python, and attributes of ``importlib`` and ``sys``.
HIDING = frozenset({"eval", "exec", "compile", "__import__", "globals", "locals", "vars"})
HIDING_ATTRIBUTES = frozenset({"import_module", "modules", "__dict__", "__globals__", "load_module", "exec_module"})
# Code that names these depends on environment variables.
ENVIRONMENT = frozenset({"environ", "getenv", "environb"})
# Methods that change their object in place, which makes it state of the program.
_MUTATORS = "add append appendleft clear discard extend insert move_to_end pop popitem remove setdefault update"
MUTATORS = frozenset(_MUTATORS.split())
# Of the body of a class inside a function: where it stands, not what it does.
_PLACES = "__classdictcell__ __doc__ __firstlineno__ __module__ __qualname__ __static_attributes__"
PLACES = frozenset(_PLACES.split())
GLOBAL_LOADS = frozenset({"LOAD_FROM_DICT_OR_GLOBALS", "LOAD_GLOBAL", "LOAD_NAME"})
STORES = frozenset({"DELETE_ATTR", "DELETE_GLOBAL", "STORE_ATTR", "STORE_GLOBAL"})
# Instructions that put one value on the stack and take none from it.
SIMPLE = frozenset({"LOAD_CONST", "LOAD_DEREF", "LOAD_FAST", "LOAD_GLOBAL", "LOAD_NAME"})
AS_WRITTEN = frozenset({"LOAD_FAST_AND_CLEAR", "STORE_FAST_MAYBE_NULL"})
FLAGS = 0x3AC  # how arguments are passed, and whether the function is a generator or a coroutine


@dataclass
class CodeUse:
    """A digest of what one code object does, including the code objects inside it, and the names that it uses.

    Attributes:
        text: the digest of the instructions, with their constants and names.
        constants: numbers, strings and other constants, without docstrings.
        globals: names that are looked up in the module of the function.
        names: names of globals, attributes and methods. If the code calls a function such as ``getattr``, also string
            constants that may be names of attributes.
        stored: globals, attributes and captured variables that the code assigns to or changes in place.
        imports: ``(level, module, names)`` of import statements.
        operators: ``(module, namespace::name)`` of operators reached through ``module.ops``, such as ``torch.ops``.
        hiding: a name that hides which code runs, such as ``eval``, or an empty string.
    """

    text: str = ""
    constants: list[object] = field(default_factory=list)
    globals: set[str] = field(default_factory=set)
    names: set[str] = field(default_factory=set)
    stored: set[str] = field(default_factory=set)
    imports: list[tuple[int, str, tuple[str, ...]]] = field(default_factory=list)
    operators: set[tuple[str, str]] = field(default_factory=set)
    hiding: str = ""


_known: dict[int, tuple[CodeType, CodeUse]] = {}  # by id, which lasts while the code object is held
_MOST = 1 << 14


def code_use(code: CodeType) -> CodeUse:
    """Return a ``CodeUse`` with the digest of the instructions of ``code``, without line numbers, and the names that it
    reads, stores and imports. The result is cached.
    """
    # The code object is held beside the result, so that its id is not given to another one.
    held = _known.get(id(code))
    if held is None:
        if len(_known) >= _MOST:
            _known.clear()
        held = _known[id(code)] = code, _read_code(code)
    return held[1]


def plain_text(value: PlainValue | EllipsisType) -> str:
    """Return the type name and the ``repr`` of a constant, such as ``int 1``. ``1``, ``True`` and ``1.0`` therefore
    have different texts.
    """
    return f"{type(value).__name__} {value!r}"


def constant_text(value: object) -> str:
    """Return a constant of a code object as text with its type. A nested code object is represented by its digest.

    The members of a set are sorted, since their order depends on the seed of hashes.
    """
    if isinstance(value, tuple):
        return f"({', '.join(map(constant_text, value))})"
    if isinstance(value, frozenset):
        return f"{{{', '.join(sorted(map(constant_text, value)))}}}"
    return code_use(value).text if isinstance(value, CodeType) else f"{type(value).__name__} {value!r}"


def _read_code(code: CodeType) -> CodeUse:
    """Return a ``CodeUse`` with the digest of a code object's instructions, and the names and constants that the code
    uses. Line numbers and annotations do not change the digest.
    """
    use = CodeUse()
    instructions = _without_annotations(_without_class_places(plain_instructions(code)))
    arguments = code.co_argcount + code.co_kwonlyargcount
    head = code.co_varnames[:arguments], code.co_argcount, code.co_posonlyargcount, code.co_flags & FLAGS
    lines = [f"{head} {code.co_exceptiontable.hex()}"]
    offsets = [each.offset for each in instructions]
    for at, each in enumerate(instructions):
        lines.append(_instruction_text(each, offsets))
        _read_instruction(use, code, instructions, at, each)
    # Functions such as getattr name attributes by constants, which then count as names.
    if use.names & LOOKUPS:
        use.names.update(c for c in use.constants if isinstance(c, str) and c.replace(".", "_").isidentifier())
    use.text = hashlib.sha256("\n".join(lines).encode()).hexdigest()[:32]
    return use


def _instruction_text(each: dis.Instruction, offsets: Sequence[int]) -> str:
    """Return the bytecode instruction ``each`` as text. The target of a jump is written as its index in ``offsets``,
    the offsets of the instructions in the digest. Instructions that were left out therefore do not change the text.
    """
    if each.opcode in dis.hasconst:
        return f"{each.opname} {constant_text(each.argval)}"
    if each.opcode in dis.hasjrel:  # since Python 3.11 all jumps are
        return f"{each.opname} {bisect_left(offsets, each.argval)}"
    # Local variables are written as numbers, so that a renamed one changes no digest.
    argument = each.arg if each.opcode in dis.haslocal else each.argval
    return f"{each.opname} {argument!r}" if not isinstance(argument, CodeType) else each.opname


def _read_instruction(use: CodeUse, code: CodeType, listed: Instructions, at: int, each: dis.Instruction) -> None:
    """Add the names, constants and imports of the bytecode instruction ``each`` to ``use``. ``at`` is its position in
    ``listed``.
    """
    name, value = each.opname, each.argval
    if each.opcode in dis.hasconst:
        for inner in _flat_constants(value):
            if isinstance(inner, CodeType):
                _join_code_use(use, code_use(inner))
            else:
                use.constants.append(inner)
        return
    if each.opcode in dis.hasname:
        use.names.add(value)
    if name in GLOBAL_LOADS:
        use.globals.add(value)
        if value in HIDING or (value in LOOKUPS and not _is_lookup_of_constant(listed, at)):
            use.hiding = use.hiding or value
    elif name in STORES or (name == "STORE_DEREF" and value in code.co_freevars):
        use.stored.add(value)
    # The owner lies below the key on the stack, so its instruction stands before the key's.
    elif name in ("STORE_SUBSCR", "DELETE_SUBSCR"):
        key = expression_start(listed, at - 1)
        use.stored.update(_loaded_holder_name(listed, key - 1) if key else ())
    elif name == "IMPORT_NAME":
        # The two instructions before load the level and the imported names.
        level, names = (listed[at - 2].argval, listed[at - 1].argval) if at > 1 else (0, None)
        use.imports.append((level if isinstance(level, int) else 0, value, tuple(names or ())))
    elif name in ("LOAD_ATTR", "LOAD_METHOD"):
        _read_attribute(use, listed, at, value)


def _read_attribute(use: CodeUse, listed: Instructions, at: int, name: str) -> None:
    """Add to ``use`` what follows from reading the attribute ``name``. ``at`` is the position of the instruction in
    ``listed``.

    A method such as ``append`` marks its owner as changed. ``torch.ops`` adds an operator. An attribute such as
    ``__dict__`` is recorded as hiding which code runs.
    """
    # A method of torch whose name ends with an underscore writes to its tensor.
    if name in MUTATORS or (name.endswith("_") and not name.endswith("__")):
        use.stored.update(_loaded_holder_name(listed, at - 1))
    if name in HIDING_ATTRIBUTES:
        use.hiding = use.hiding or name
    if name == "ops" and at and listed[at - 1].opname in ("LOAD_GLOBAL", "LOAD_FAST", "LOAD_DEREF"):
        after = [e.argval for e in listed[at + 1 : at + 3] if e.opname in ("LOAD_ATTR", "LOAD_METHOD")]
        use.operators.add((listed[at - 1].argval, "::".join(map(str, after))))


def _join_code_use(use: CodeUse, inner: CodeUse) -> None:
    """Add to ``use`` the names, constants and imports in ``inner``, which describes a code object inside the one
    that ``use`` describes.
    """
    use.constants += inner.constants
    use.imports += inner.imports
    use.globals |= inner.globals
    use.names |= inner.names
    use.stored |= inner.stored
    use.operators |= inner.operators
    use.hiding = use.hiding or inner.hiding


def _flat_constants(value: object) -> Iterator[object]:
    """Yield the constants in nested tuples and frozen sets. Yield the value itself if it is neither."""
    if isinstance(value, (tuple, frozenset)):
        for each in value:
            yield from _flat_constants(each)
    else:
        yield value


def _loaded_holder_name(listed: Instructions, at: int) -> list[str]:
    """Return, in a list, the name of the global, captured variable or attribute that instruction ``at`` loads. For a
    local variable, return the names of all values of these kinds that are assigned to it. The list is empty for any
    other instruction.
    """
    if at < 0:
        return []
    each = listed[at]
    if each.opname in ("LOAD_GLOBAL", "LOAD_DEREF", "LOAD_ATTR"):
        return [each.argval]
    if each.opname == "LOAD_FAST":  # a local may be another name of one
        kept = [i for i, e in enumerate(listed[:at]) if e.opname == "STORE_FAST" and e.argval == each.argval]
        return [
            name for i in kept for name in _loaded_holder_name(listed, i - 1) if listed[i - 1].opname != "LOAD_FAST"
        ]
    return []


def _is_lookup_of_constant(listed: Instructions, at: int) -> bool:
    """Return whether ``getattr`` or a similar function, loaded by instruction ``at``, is called with a string constant
    as the attribute's name.
    """
    # These instructions load no value, and their places differ between versions of Python.
    following: Instructions = [e for e in listed[at + 1 :] if e.opname not in ("PUSH_NULL", "RESUME", "NOP")]
    if listed[at].argval not in ("attrgetter", "methodcaller"):
        following = _instructions_after_value(following)
    if not following or following[0].opname != "LOAD_CONST" or not isinstance(following[0].argval, str):
        return False
    rest = following[1:]
    return _is_call_instruction(rest) or _is_call_instruction(_instructions_after_value(rest))


def _instructions_after_value(following: Instructions) -> Instructions:
    """Return the instructions after those that load the first expression, a name or constant with any attribute
    accesses. The list is empty if ``following`` begins with another expression.
    """
    if not following or following[0].opname not in SIMPLE:
        return []
    attributes = 1
    while attributes < len(following) and following[attributes].opname == "LOAD_ATTR":
        attributes += 1
    return following[attributes:]


def _is_call_instruction(following: Instructions) -> bool:
    """Return whether the first instruction in ``following`` is a call. Return False if there is none."""
    return bool(following) and following[0].opname in ("CALL", "PRECALL")


def expression_start(listed: Instructions, end: int) -> int | None:
    """Return the position of the first instruction of the expression whose value instruction ``end`` leaves on the
    stack. Return None if the expression contains a jump, or if its first instruction cannot be found.
    """
    left = 1
    for at in range(end, -1, -1):
        each = listed[at]
        # Behind a jump, the instructions before it need not have run.
        if each.opcode in dis.hasjrel:  # since Python 3.11 all jumps are
            return None
        left -= dis.stack_effect(each.opcode, each.arg, jump=False)
        if left <= 0:
            return at if left == 0 else None
    return None


def plain_instructions(code: CodeType) -> list[dis.Instruction]:
    """Return the instructions of ``code`` in the form that Python 3.11 has, whatever version compiled it.

    Python 3.13 loads or stores two variables by one instruction, and loads a cell as if it were a variable. Python 3.14
    also has instructions for small integers, and for loads that do not count a reference.
    """
    cells = {*code.co_cellvars, *code.co_freevars}
    plain: list[dis.Instruction] = []
    for each in dis.get_instructions(code):
        if each.opname == "LOAD_SMALL_INT":
            plain.append(_renamed(each, "LOAD_CONST"))
        elif each.opname in AS_WRITTEN or not each.opname.startswith(("LOAD_FAST", "STORE_FAST")):
            plain.append(each)
        elif isinstance(each.argval, tuple):
            # A jump leads to the first of the two, so the second has an offset of its own, which is odd.
            kinds, both = re.findall("LOAD_FAST|STORE_FAST", each.opname), each.arg or 0
            for i, (kind, arg) in enumerate(zip(kinds, (both >> 4, both & 15), strict=True)):
                part = each._replace(arg=arg, argval=each.argval[i], offset=each.offset + i)
                plain.append(_variable_instruction(part, kind, cells))
        else:
            plain.append(_variable_instruction(each, each.opname[: each.opname.index("_FAST") + 5], cells))
    return plain


def _variable_instruction(each: dis.Instruction, name: str, cells: set[str]) -> dis.Instruction:
    """Return an instruction on one variable under the name ``name``, or ``LOAD_CLOSURE`` if it loads a cell instead of
    the value in it.
    """
    if name != "LOAD_FAST" or each.argval not in cells:
        return _renamed(each, name)
    # By the code of an instruction on cells, whose text names the variable.
    return _renamed(each, "LOAD_DEREF")._replace(opname="LOAD_CLOSURE")


def _renamed(each: dis.Instruction, name: str) -> dis.Instruction:
    """Return the instruction ``each`` with another name, and the number that belongs to it."""
    return each._replace(opname=name, opcode=dis.opmap[name])


def _without_class_places(listed: Instructions) -> list[dis.Instruction]:
    """Return the instructions of a class body without those that store its docstring, its name and its line number.
    Python 3.14 also keeps the names of the body for annotations. None of these change behaviour.
    """
    kept: list[dis.Instruction] = []
    for each in listed:
        if each.opname == "STORE_NAME" and each.argval in PLACES:
            # The instruction before it loads the value that is stored.
            kept.pop()
        elif each.opname == "STORE_DEREF" and each.argval == "__classdict__":
            kept.pop()
        elif each.opname != "MAKE_CELL" or each.argval != "__classdict__":
            kept.append(each)
    return kept


def _without_annotations(listed: list[dis.Instruction]) -> list[dis.Instruction]:
    """Return the instructions without those that compute annotations of inner functions. Annotations do not change what
    a function does.

    Python 3.11 and 3.12 name the annotations by a flag of ``MAKE_FUNCTION``. Later versions attach them, and Python
    3.14 the function that computes them, by an instruction of its own.
    """
    kept, at = list(listed), len(listed)
    # From the end, so that a deletion does not move the positions that are still to come.
    while at > 0:
        at -= 1
        each, flags = kept[at], kept[at].arg or 0
        span: tuple[int, int] | None = None
        if each.opname == "MAKE_FUNCTION" and flags & 4:
            # The code object comes last, and before it the captured variables.
            span = _operand_span(kept, at - 2, 1 if flags & 8 else 0)
            if span is not None:
                kept[at] = each._replace(arg=flags & ~4, argval=flags & ~4)
        elif each.opname == "SET_FUNCTION_ATTRIBUTE" and flags in (4, 16):
            made = at - 1
            while made > 0 and kept[made].opname == "SET_FUNCTION_ATTRIBUTE":
                made -= 1
            span = _operand_span(kept, made - 2, at - 1 - made)
            if span is not None:
                del kept[at]
        if span is not None:
            at = span[0]
            del kept[slice(*span)]
    return kept


def _operand_span(listed: Instructions, end: int, skipped: int) -> tuple[int, int] | None:
    """Return the first position of an operand and the position behind it. The operand lies on the stack below
    ``skipped`` others, and instruction ``end`` leaves the highest of them. Return None if it cannot be found.
    """
    for _ in range(skipped):
        above = expression_start(listed, end) if end >= 0 else None
        end = above - 1 if above is not None else -1
    start = expression_start(listed, end) if end >= 0 else None
    return None if start is None else (start, end + 1)


@cache
def syntax_digest(source: str) -> str:
    """Return a digest of a function's syntax tree, with annotations and without docstrings. This is the part of a
    kernel that Triton reads.
    """
    tree = ast.parse(textwrap.dedent(source))
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest()
