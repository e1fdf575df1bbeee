"""The attributes of a parameter that a function reads, found in its loaded code and in that of helpers.

The code is walked once with a stack of what is known of each value: that it is the parameter, that it is a function or
constant that can be named now, or nothing. A read of an attribute is noted. Whatever else happens to the parameter, but
for a call of a function whose code can be walked in the same way, makes its reads unknown (:class:`UnknownReads`).
"""

from __future__ import annotations

import builtins
import dis
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any


class UnknownReads(Exception):
    """Raised where the reads of a parameter cannot be found. The text has the place and the reason."""


@dataclass(frozen=True)
class _KnownValue:
    """A value that exists when the function is walked. ``bound``: a method, whose first parameter is given."""

    value: object
    bound: bool = False


@dataclass(frozen=True)
class _InnerFunction:
    """A function that the code itself creates."""

    code: CodeType


_PARAMETER = "the parameter"
_OTHER = None  # any other value
_Value = Any  # one of the four
_Stack = list[_Value]

_QUIET = frozenset(("CACHE", "EXTENDED_ARG", "NOP", "NOT_TAKEN", "PRECALL", "RESUME", "COPY_FREE_VARS", "MAKE_CELL"))
_FAST = ("LOAD_FAST", "LOAD_FAST_CHECK", "LOAD_FAST_BORROW", "LOAD_DEREF", "LOAD_CLASSDEREF")
_STORES = ("STORE_FAST", "STORE_DEREF", "STORE_FAST_MAYBE_NULL")
# How many values an instruction takes from the stack. Of any other one it is not known.
_TAKES = {
    **dict.fromkeys(("LOAD_CONST", "LOAD_SMALL_INT", "PUSH_NULL", "LOAD_CLOSURE", "LOAD_FAST_AND_CLEAR"), 0),
    **dict.fromkeys(("LOAD_BUILD_CLASS", "LOAD_ASSERTION_ERROR", "LOAD_COMMON_CONSTANT", "DELETE_FAST"), 0),
    **dict.fromkeys(("POP_TOP", "TO_BOOL", "UNARY_NOT", "UNARY_NEGATIVE", "UNARY_INVERT", "POP_ITER"), 1),
    **dict.fromkeys(("POP_JUMP_IF_TRUE", "POP_JUMP_IF_FALSE", "POP_JUMP_IF_NONE", "POP_JUMP_IF_NOT_NONE"), 1),
    **dict.fromkeys(("POP_JUMP_FORWARD_IF_TRUE", "POP_JUMP_FORWARD_IF_FALSE", "POP_JUMP_FORWARD_IF_NONE"), 1),
    **dict.fromkeys(("POP_JUMP_FORWARD_IF_NOT_NONE", "POP_JUMP_BACKWARD_IF_TRUE", "POP_JUMP_BACKWARD_IF_FALSE"), 1),
    **dict.fromkeys(("POP_JUMP_BACKWARD_IF_NONE", "POP_JUMP_BACKWARD_IF_NOT_NONE"), 1),
    **dict.fromkeys(("JUMP_IF_TRUE_OR_POP", "JUMP_IF_FALSE_OR_POP", "GET_ITER", "UNPACK_SEQUENCE"), 1),
    **dict.fromkeys(("FORMAT_SIMPLE", "CONVERT_VALUE"), 1),
    **dict.fromkeys(("FORMAT_WITH_SPEC", "COMPARE_OP", "IS_OP", "CONTAINS_OP", "BINARY_OP", "BINARY_SUBSCR"), 2),
    **dict.fromkeys(("BINARY_SLICE", "STORE_SUBSCR"), 3),
}
# Functions that show a value, or ask of what kind it is; pytest's show the values of an assertion that fails.
_SHOWING = (callable, format, id, isinstance, print, repr, str, type)
_SHOWING_PACKAGE = "_pytest"
# Instructions after which the parameter is where it was: its truth, its identity, or nothing is asked for.
_HARMLESS = frozenset(n for n, takes in _TAKES.items() if takes == 1 and n not in ("GET_ITER", "UNPACK_SEQUENCE")) | {
    "IS_OP",
    "FORMAT_VALUE",
    "FORMAT_WITH_SPEC",
}


def attributes_read(fn: Callable[..., object], parameter: int | str) -> frozenset[str]:
    """Return the names of the attributes that ``fn`` and the functions it calls read of ``parameter``, given as a
    position or a name, found in their bytecode.

    Raises:
        UnknownReads: the argument is used otherwise, as in ``getattr(saved, name)``, or reaches code that has no
            Python source of its own.
    """
    walk = _SavedReadsWalk()
    walk.function(fn, parameter)
    return frozenset(walk.reads)


@dataclass
class _SavedReadsWalk:
    """One search: the attributes found so far, and the functions walked with their parameters."""

    reads: set[str] = field(default_factory=set)
    seen: set[tuple[CodeType, frozenset[str]]] = field(default_factory=set)

    def function(self, fn: object, position: int | str, bound: bool = False) -> None:
        """Walk the code of the callable ``fn``, of which the argument at ``position`` (a number or a name) is the
        parameter whose reads are collected.
        """
        while True:
            if isinstance(fn, functools.partial):
                position = position + len(fn.args) if isinstance(position, int) else position
                fn = fn.func
            elif isinstance(fn, MethodType):
                fn, bound = fn.__func__, True
            elif isinstance(fn, FunctionType):
                parameters = list(inspect.signature(fn, follow_wrapped=False).parameters.values())
                at = position + bound if isinstance(position, int) else position
                if (name := _receiving_parameter(parameters, at)) is not None:
                    break
                if not isinstance(inner := vars(fn).get("__wrapped__"), FunctionType):
                    raise UnknownReads(f"{fn.__qualname__} takes it in *args or **kwargs")
                fn = inner
            elif isinstance(called := inspect.getattr_static(type(fn), "__call__", None), FunctionType):
                fn, bound = called, True
            else:
                raise UnknownReads(
                    f"it is passed to {fn.__name__ if isinstance(fn, BuiltinFunctionType) else repr(fn)}"
                )
        cells = dict(zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True))
        closure = {n: _KnownValue(c.cell_contents) for n, c in cells.items() if _is_cell_set(c)}
        self.code(fn.__code__, {name}, fn.__globals__, closure)

    def code(self, code: CodeType, names: set[str], world: Mapping[str, object], closure: dict[str, _Value]) -> None:
        """Walk the bytecode ``code`` and the functions defined in it. ``names`` are the variables that hold the
        parameter. Repeated until no more such names are found.
        """
        while (key := (code, frozenset(names))) not in self.seen:
            self.seen.add(key)
            body = _CodeBodyWalk(self, code, names, world, dict(closure))
            body.walk()
        inner = [c for c in code.co_consts if isinstance(c, CodeType)]
        for each in inner:
            if shared := names & {*each.co_freevars}:
                self.code(each, {*shared}, world, closure)


@dataclass
class _CodeBodyWalk:
    """The walk through one code object. ``names`` grows where the parameter gets another name."""

    walk_of: _SavedReadsWalk
    source: CodeType
    names: set[str]
    world: Mapping[str, object]
    variables: dict[str, _Value]
    stack: _Stack = field(default_factory=list)
    keywords: tuple[str, ...] = ()
    line: int = 0

    def walk(self) -> None:
        """Follow the instructions with a symbolic stack, and collect the attributes that are read of the parameter."""
        arrivals: dict[int, _Stack] = {
            e.target: [_OTHER] * (e.depth + e.lasti + 1) for e in vars(dis.Bytecode(self.source))["exception_entries"]
        }
        reached = True
        for ins, name, value in _plain_instructions(self.source):
            self.line = ins.positions.lineno or self.line if ins.positions else self.line
            if (waiting := arrivals.get(ins.offset)) is not None and not reached:
                self.stack, reached = list(waiting), True
            if name in _QUIET:
                continue
            before = list(self.stack)
            jumps = ins.opcode in dis.hasjrel or ins.opcode in dis.hasjabs
            if name.startswith("JUMP_") and not name.endswith("OR_POP"):
                arrivals.setdefault(ins.argval, before)
                reached = False
                continue
            self.step(ins, name, value)
            if jumps:
                effect = dis.stack_effect(ins.opcode, ins.arg, jump=True)
                kept = before[: len(before) + effect] if effect < 0 else before
                arrivals.setdefault(ins.argval, [*kept, *[_OTHER] * effect])
            if name in ("RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS", "RERAISE"):
                reached = False

    # --- the instructions ---------------------------------------------------------------------------------------------

    def step(self, ins: dis.Instruction, name: str, value: Any) -> None:
        """Change the symbolic stack as one instruction does, and note what the instruction does to the parameter."""
        if name in _FAST:
            self.push(_PARAMETER if value in self.names else self.variables.get(value))
        elif name in _STORES:
            self.store(value, self.pop())
        elif name in ("LOAD_GLOBAL", "LOAD_NAME"):
            self.load_global(ins, value)
        elif name in ("LOAD_ATTR", "LOAD_METHOD"):
            self.load_attribute(ins, name, value)
        elif name == "STORE_ATTR":
            self.pop()
            self.keep_out(self.pop(), "it is stored in an object")
        elif name == "KW_NAMES":
            self.keywords = self.source.co_consts[ins.arg or 0]
        elif name in ("CALL", "CALL_KW"):
            self.call(ins.arg or 0, by_name=name == "CALL_KW")
        elif name == "MAKE_FUNCTION":
            self.make_function(ins.arg or 0)
        elif name == "SET_FUNCTION_ATTRIBUTE":
            made = self.pop()
            self.keep_out(self.pop(), "it is a default of a function")
            self.push(made)
        elif name == "LOAD_CONST":
            self.push(_InnerFunction(value) if isinstance(value, CodeType) else _KnownValue(value))
        elif name == "FORMAT_VALUE":
            self.other(ins, name, 1 + bool((ins.arg or 0) & 4))
        elif name.startswith("BUILD_") or name in ("CALL_INTRINSIC_1", "CALL_FUNCTION_EX"):
            self.other(ins, name, len(self.stack) if name == "CALL_FUNCTION_EX" else None)
        else:
            self.other(ins, name, _TAKES.get(name))

    def other(self, ins: dis.Instruction, name: str, takes: int | None) -> None:
        """Change the stack for an instruction that makes another value of its operands. The parameter may not be among
        them, unless the instruction is harmless.
        """
        effect = dis.stack_effect(ins.opcode, ins.arg if ins.opcode >= dis.HAVE_ARGUMENT else None, jump=False)
        if takes is None:  # at least what it makes less; any other depth is possible
            takes = max(-effect + 1, 0) if name.startswith("BUILD_") else len(self.stack)
        used = self.stack[len(self.stack) - takes :] if takes else []
        if name not in _HARMLESS and any(v is _PARAMETER for v in used):
            self.fail(f"it is used by {name}")
        depth = max(len(self.stack) + effect, 0)
        kept = self.stack[: len(self.stack) - takes] if takes else self.stack
        self.stack = [*kept, *[_OTHER] * (depth - len(kept))][:depth] if depth >= len(kept) else kept[:depth]

    def load_global(self, ins: dis.Instruction, name: str) -> None:
        """Push a global or built-in name, with its value where it is known."""
        known = _OTHER
        for scope in (self.world, vars(builtins)):
            if name in scope:
                known = _KnownValue(scope[name])
                break
        extra = dis.stack_effect(ins.opcode, ins.arg, jump=False) - 1
        self.stack += [_OTHER] * extra  # a NULL goes before or behind it: a call looks at both places
        self.push(known)

    def load_attribute(self, ins: dis.Instruction, name: str, attribute: str) -> None:
        """Replace the object on the stack by its attribute. An attribute of the parameter is collected as read."""
        owner = self.pop()
        known: _Value = _OTHER
        if owner is _PARAMETER:
            if attribute.startswith("__"):
                self.fail(f".{attribute} of it is read")
            self.walk_of.reads.add(attribute)
        elif isinstance(owner, _KnownValue):
            known = _static_attribute(owner.value, attribute)
        self.push(known)
        if name == "LOAD_METHOD" or dis.stack_effect(ins.opcode, ins.arg, jump=False) == 1:
            self.push(_OTHER)

    def make_function(self, flags: int) -> None:
        """Handle the creation of a function: its code stays on the stack, and the parameter may not be among its
        defaults.
        """
        code = self.pop()
        for _ in range(flags.bit_count() if "SET_FUNCTION_ATTRIBUTE" not in dis.opmap else 0):  # since Python 3.13
            self.keep_out(self.pop(), "it is a default of a function")
        self.push(code)

    def call(self, count: int, *, by_name: bool) -> None:
        """Handle a call, and follow the parameter into the called function if it is among the arguments."""
        keywords, self.keywords = self.keywords, ()
        if by_name:
            given = self.pop()
            keywords = given.value if isinstance(given, _KnownValue) and isinstance(given.value, tuple) else ()
        args = [self.pop() for _ in range(count)][::-1]
        pair = [self.pop(), self.pop()]
        self.push(_OTHER)
        called = next((v for v in pair if isinstance(v, (_KnownValue, _InnerFunction))), _OTHER)
        if any(v is _PARAMETER for v in pair):
            self.fail("it is called")
        plain = count - len(keywords)
        for i, value in enumerate(args):
            if value is _PARAMETER:
                self.passed(called, i if i < plain else keywords[i - plain], args)

    def passed(self, called: _Value, position: int | str, args: list[_Value]) -> None:
        """Follow the parameter into a call of ``called``, where it is the argument ``position``. Raises UnknownReads if
        that code cannot be followed.
        """
        if isinstance(called, _InnerFunction):
            parameters = called.code.co_varnames[: called.code.co_argcount + called.code.co_kwonlyargcount]
            name = position if isinstance(position, str) else "".join(parameters[position : position + 1])
            if name not in parameters:
                self.fail("it is passed to a function within that takes *args")
            free = {n: v for n, v in self.variables.items() if n in called.code.co_freevars}
            self.walk_of.code(called.code, {name, *(self.names & {*called.code.co_freevars})}, self.world, free)
        elif isinstance(called, _KnownValue) and (called.value is getattr or called.value is hasattr):
            attribute = args[1].value if len(args) > 1 and isinstance(args[1], _KnownValue) else None
            if not isinstance(attribute, str):
                self.fail(f"{called.value.__name__} of it takes a name that is not written out")
            self.walk_of.reads.add(str(attribute))
        elif isinstance(called, _KnownValue) and _only_shows_values(called.value):
            return
        elif isinstance(called, _KnownValue):
            try:
                self.walk_of.function(called.value, position, called.bound)
            except UnknownReads as e:
                self.fail(str(e))
        else:
            self.fail("it is passed to something that cannot be looked into")

    def store(self, name: str, value: _Value) -> None:
        """Assign ``value`` to a variable. A variable that is assigned two different values becomes unknown."""
        if value is _PARAMETER:
            self.names.add(name)
        elif name in self.variables and self.variables[name] != value:
            self.variables[name] = _OTHER
        else:
            self.variables[name] = value

    def keep_out(self, value: _Value, what: str) -> None:
        """Raise UnknownReads, with the reason ``what``, if ``value`` is the parameter."""
        if value is _PARAMETER:
            self.fail(what)

    def fail(self, what: str) -> None:
        """Raise UnknownReads with the reason ``what``, and the current line if none is named yet."""
        raise UnknownReads(f"{what} (line {self.line} of {self.source.co_qualname})" if "(line " not in what else what)

    def push(self, value: _Value) -> None:
        """Push a value on the symbolic stack."""
        self.stack.append(value)

    def pop(self) -> _Value:
        """Remove the top of the symbolic stack and return it, or an unknown value if the stack is empty."""
        return self.stack.pop() if self.stack else _OTHER


def _plain_instructions(code: CodeType) -> Iterator[tuple[dis.Instruction, str, Any]]:
    """Yield ``(instruction, name, argument)`` of the bytecode of ``code``. A combined instruction is yielded as its two
    parts.
    """
    for ins in dis.get_instructions(code):
        parts = ins.argval if isinstance(ins.argval, tuple) else None
        name = ins.opname
        if parts is not None and name.startswith(("LOAD_FAST", "STORE_FAST")) and len(parts) == 2:
            first, second = ("LOAD_FAST", "LOAD_FAST") if name.startswith("LOAD") else ("STORE_FAST", "STORE_FAST")
            second = "LOAD_FAST" if name == "STORE_FAST_LOAD_FAST" else second
            yield ins, first, parts[0]
            yield ins, second, parts[1]
        elif name == "LOAD_FAST" and ins.argval in (*code.co_cellvars, *code.co_freevars):
            yield ins, "LOAD_CLOSURE", ins.argval  # the cell, not what is in it
        else:
            yield ins, name, ins.argval


def _receiving_parameter(parameters: list[inspect.Parameter], position: int | str) -> str | None:
    """Return the name of the parameter that receives the argument ``position`` (a number or a name), or None if
    ``*args`` or ``**kwargs`` collects it.
    """
    single = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if isinstance(position, str):
        return next((p.name for p in single if p.name == position), None)
    by_position = [p.name for p in single if p.kind is not p.KEYWORD_ONLY]
    return by_position[position] if position < len(by_position) else None


def _static_attribute(owner: object, name: str) -> _KnownValue | None:
    """Return the value of an attribute of a module, or the method of a class or object, without running code. None if
    it cannot be known.
    """
    if isinstance(owner, ModuleType):
        return _KnownValue(vars(owner)[name]) if name in vars(owner) else None
    method = inspect.getattr_static(owner, name, None)
    if isinstance(method, (staticmethod, classmethod)):
        return _KnownValue(method.__func__, bound=isinstance(method, classmethod))
    return _KnownValue(method, bound=not isinstance(owner, type)) if isinstance(method, FunctionType) else None


def _only_shows_values(fn: object) -> bool:
    """Whether the function only prints or logs its arguments, so that passing the parameter to it reads nothing."""
    return (
        any(fn is each for each in _SHOWING)
        or (fn.__module__ if isinstance(fn, FunctionType) else "").partition(".")[0] == _SHOWING_PACKAGE
    )


def _is_cell_set(cell: Any) -> bool:
    """Whether the cell of a closure has a value."""
    try:
        return cell.cell_contents is not cell
    except ValueError:  # not assigned yet
        return False
