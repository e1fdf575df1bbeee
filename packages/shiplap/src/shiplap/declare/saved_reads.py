"""The attributes of a parameter that a function reads, found in its loaded code and in that of helpers.

The code is walked once with a stack of what is known of each value. A value may be the parameter, a function or
constant whose name is known, or unknown. A read of an attribute is recorded. The parameter may be passed to a function
whose code can be walked in the same way. Any other use of it makes its reads unknown (:class:`UnknownReads`).
"""

from __future__ import annotations

import builtins
import dis
import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType
from typing import Any

from shiplap.declare.code_text import plain_instructions


class UnknownReads(Exception):
    """An error which says that the reads of a parameter cannot be found. Its text has the place and the reason."""


@dataclass(frozen=True, eq=False)
class _KnownValue:
    """A value that exists before the analysed function runs, such as a global. For a bound method, ``owner`` is a tuple
    of its object. It is empty for any other value.
    """

    value: object
    owner: tuple[object, ...] = ()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _KnownValue) or len(self.owner) != len(other.owner):
            return False
        return all(a is b for a, b in zip(self.parts, other.parts, strict=True))

    @property
    def parts(self) -> tuple[object, ...]:
        """The objects that two known values must share to be equal. They are compared by identity, since comparing
        tensors gives tensors.
        """
        return self.value, *self.owner


@dataclass(frozen=True)
class _AnyOf:
    """A value that stands for an iterator over a tuple written in the code, or for one of the tuple's members.
    ``members`` holds the tuple.
    """

    members: tuple[object, ...]


@dataclass(frozen=True)
class _InnerFunction:
    """A function that the analysed code defines itself. ``code`` is its code object."""

    code: CodeType


_PARAMETER = "the parameter"
_HIDDEN = "a variable that a comprehension hides"
_OTHER = None  # any other value
_Value = Any  # one of the six
_Stack = list[_Value]

# Instructions without an effect on the values on the stack.
_QUIET = frozenset(("CACHE", "EXTENDED_ARG", "NOP", "NOT_TAKEN", "PRECALL", "RESUME", "COPY_FREE_VARS", "MAKE_CELL"))
# The ways in which the versions of Python load a variable of a function.
_FAST = ("LOAD_FAST", "LOAD_DEREF", "LOAD_CLASSDEREF")
# In the body of a class from Python 3.12 on: it takes the names of the class from the stack, and looks there first.
_FROM_CLASS_BODY = "LOAD_FROM_DICT_OR_DEREF"
_STORES = ("STORE_FAST", "STORE_DEREF", "STORE_FAST_MAYBE_NULL")
# How many values an instruction takes from the stack. Of any other one it is not known.
_TAKES = {
    **dict.fromkeys(("LOAD_CONST", "PUSH_NULL", "LOAD_CLOSURE", "LOAD_LOCALS"), 0),
    **dict.fromkeys(("LOAD_BUILD_CLASS", "LOAD_ASSERTION_ERROR", "LOAD_COMMON_CONSTANT", "DELETE_FAST"), 0),
    **dict.fromkeys(("POP_TOP", "TO_BOOL", "UNARY_NOT", "UNARY_NEGATIVE", "UNARY_INVERT", "POP_ITER"), 1),
    **dict.fromkeys(("POP_JUMP_IF_TRUE", "POP_JUMP_IF_FALSE", "POP_JUMP_IF_NONE", "POP_JUMP_IF_NOT_NONE"), 1),
    **dict.fromkeys(("POP_JUMP_FORWARD_IF_TRUE", "POP_JUMP_FORWARD_IF_FALSE", "POP_JUMP_FORWARD_IF_NONE"), 1),
    **dict.fromkeys(("POP_JUMP_FORWARD_IF_NOT_NONE", "POP_JUMP_BACKWARD_IF_TRUE", "POP_JUMP_BACKWARD_IF_FALSE"), 1),
    **dict.fromkeys(("POP_JUMP_BACKWARD_IF_NONE", "POP_JUMP_BACKWARD_IF_NOT_NONE"), 1),
    **dict.fromkeys(("JUMP_IF_TRUE_OR_POP", "JUMP_IF_FALSE_OR_POP", "GET_ITER", "UNPACK_SEQUENCE"), 1),
    **dict.fromkeys(("FORMAT_SIMPLE", "CONVERT_VALUE", "LIST_APPEND", "SET_ADD"), 1),
    **dict.fromkeys(
        ("MAP_ADD", "FORMAT_WITH_SPEC", "COMPARE_OP", "IS_OP", "CONTAINS_OP", "BINARY_OP", "BINARY_SUBSCR"), 2
    ),
    **dict.fromkeys(("BINARY_SLICE", "STORE_SUBSCR"), 3),
}
# Functions that show a value, or ask of what kind it is; pytest's show the values of an assertion that fails.
_SHOWING = (callable, format, id, isinstance, print, repr, str, type)
# pytest rewrites assertions such that they pass their operands to functions of its own.
_SHOWING_PACKAGE = "_pytest"
# Instructions after which the parameter is where it was: its truth, its identity, or nothing is asked for.
_KEEPING = ("GET_ITER", "UNPACK_SEQUENCE", "LIST_APPEND", "SET_ADD")
_HARMLESS = frozenset(n for n, takes in _TAKES.items() if takes == 1 and n not in _KEEPING) | {
    "IS_OP",
    "FORMAT_VALUE",
    "FORMAT_WITH_SPEC",
}
# What an instruction does with the parameter, by its name or the first word of it.
_USES = {
    "BINARY": "it is subscripted, or an operand",
    "BUILD": "it is put into a list, tuple, set or dict",
    "GET_ITER": "it is iterated over",
    "MATCH": "it is matched by a pattern",
    "RETURN": "it is returned",
    "STORE": "it is stored",
    "UNPACK": "it is unpacked",
}


def attributes_read(fn: Callable[..., object], parameter: int | str) -> frozenset[str]:
    """Return the names of the attributes that ``fn`` and the functions that it calls read from ``parameter``, a
    parameter of ``fn`` given by position or name. The attributes are found in the bytecode.

    Raises:
        UnknownReads: the argument is used in another way, as in ``getattr(saved, name)``, or is passed to code that is
            not written in Python.
    """
    walk = _SavedReadsWalk()
    walk.function(fn, parameter)
    return frozenset(walk.reads)


@dataclass
class _SavedReadsWalk:
    """One search for the attributes that are read from a parameter.

    Attributes:
        reads: the attributes found so far.
        seen: the functions that were walked, with their parameters.
        iterated: the iterator that each comprehension is given.
    """

    reads: set[str] = field(default_factory=set)
    seen: set[tuple[CodeType, frozenset[str], frozenset[tuple[str, int]]]] = field(default_factory=set)
    iterated: dict[CodeType, _Value] = field(default_factory=dict)  # by comprehension, the iterator that it is given

    def function(self, fn: object, position: int | str, owner: tuple[object, ...] = ()) -> None:
        """Collect the attributes that the callable ``fn`` reads from its argument at ``position`` (a number or a name),
        by a walk over its bytecode. For a method, ``owner`` holds its object.
        """
        while True:
            # Wrappers are taken off until the Python function is reached that receives the value.
            if isinstance(fn, functools.partial):
                position = position + len(fn.args) if isinstance(position, int) else position
                fn = fn.func
            elif isinstance(fn, MethodType):
                owner, fn = (fn.__self__,), fn.__func__
            elif isinstance(fn, FunctionType):
                parameters = list(inspect.signature(fn, follow_wrapped=False).parameters.values())
                at = position + len(owner) if isinstance(position, int) else position
                if (name := _receiving_parameter(parameters, at)) is not None:
                    break
                if not isinstance(inner := vars(fn).get("__wrapped__"), FunctionType):
                    raise UnknownReads(f"{fn.__qualname__} takes it in *args or **kwargs")
                fn = inner
            elif isinstance(called := inspect.getattr_static(type(fn), "__call__", None), FunctionType):
                fn, owner = called, (fn,)
            else:
                raise UnknownReads(
                    f"it is passed to {fn.__name__ if isinstance(fn, BuiltinFunctionType) else repr(fn)}"
                )
        cells = dict(zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True))
        closure = {n: _KnownValue(c.cell_contents) for n, c in cells.items() if _is_cell_set(c)}
        closure |= {p.name: _KnownValue(first) for p, first in zip(parameters, owner, strict=False)}
        self.code(fn.__code__, {name}, fn.__globals__, closure)

    def code(self, code: CodeType, names: set[str], world: Mapping[str, object], closure: dict[str, _Value]) -> None:
        """Walk the bytecode ``code`` and the functions defined in it, and collect the attributes that are read from
        ``names``. These are the variables that hold the followed parameter. ``world`` holds the globals, and
        ``closure`` the captured variables.
        """
        known = frozenset((n, id(part)) for n, v in closure.items() if isinstance(v, _KnownValue) for part in v.parts)
        while (key := (code, frozenset(names), known)) not in self.seen:
            self.seen.add(key)
            body = _CodeBodyWalk(self, code, names, world, dict(closure))
            body.walk()
            if body.changing:  # a loop reads what a later line of it assigns
                _CodeBodyWalk(self, code, names, world, {**closure, **dict.fromkeys(body.changing)}).walk()
        inner = [c for c in code.co_consts if isinstance(c, CodeType)]
        for each in inner:
            if shared := names & {*each.co_freevars}:
                self.code(each, {*shared}, world, {**closure, ".0": self.iterated.get(each)})


@dataclass
class _CodeBodyWalk:
    """A walk through one code object. ``names`` are the variables that hold the followed parameter. Variables to which
    the code assigns that parameter are added during the walk.

    ``source`` is the code object, and ``world`` holds the globals. ``variables`` holds the known values of variables.
    ``stack`` models the stack of the interpreter.
    """

    walk_of: _SavedReadsWalk
    source: CodeType
    names: set[str]
    world: Mapping[str, object]
    variables: dict[str, _Value]
    stack: _Stack = field(default_factory=list)
    changing: set[str] = field(default_factory=set)  # the variables that have held different values
    keywords: tuple[str, ...] = ()
    line: int = 0

    def walk(self) -> None:
        """Follow the instructions of one code object with a symbolic stack. Collect the attributes that are read from
        the followed parameter, such as ``saved`` of a gradient.
        """
        arrivals: dict[int, _Stack] = {
            e.target: [_OTHER] * (e.depth + e.lasti + 1) for e in vars(dis.Bytecode(self.source))["exception_entries"]
        }
        handlers, reached, cleans_up = {*arrivals}, True, False
        for ins in plain_instructions(self.source):
            name = ins.opname
            if ins.offset in handlers:  # the compiler's own handlers only restore variables
                cleans_up = name != "PUSH_EXC_INFO"
            if cleans_up:
                cleans_up = name != "RERAISE"
                continue
            self.line = ins.positions.lineno or self.line if ins.positions else self.line
            if (waiting := arrivals.get(ins.offset)) is not None:
                self.stack, reached = _merged_stack(self.stack if reached else waiting, waiting), True
            if name in _QUIET:
                continue
            before = list(self.stack)
            jumps = ins.opcode in dis.hasjrel  # since Python 3.11 all jumps are
            if name.startswith("JUMP_") and not name.endswith("OR_POP"):
                arrivals[ins.argval] = _merged_stack(arrivals.get(ins.argval, before), before)
                reached = False
                continue
            self.step(ins, name, ins.argval)
            if jumps:
                effect = dis.stack_effect(ins.opcode, ins.arg, jump=True)
                kept = before[: len(before) + effect] if effect < 0 else before
                there = [*kept, *[_OTHER] * effect]
                arrivals[ins.argval] = _merged_stack(arrivals.get(ins.argval, there), there)
            if name in ("RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS", "RERAISE"):
                reached = False

    # --- the instructions ---------------------------------------------------------------------------------------------

    def step(self, ins: dis.Instruction, name: str, value: Any) -> None:
        """Change the symbolic stack as the instruction ``ins`` does. ``name`` is that of the instruction, and ``value``
        is its argument. Record the effect on the followed parameter, such as ``saved`` of a gradient.
        """
        if name in _FAST or name == _FROM_CLASS_BODY:
            if name == _FROM_CLASS_BODY:
                self.pop()
            self.push(_PARAMETER if value in self.names else self.variables.get(value))
        elif name in _STORES:
            self.store(value, self.pop())
        elif name in ("LOAD_GLOBAL", "LOAD_NAME"):
            self.load_global(ins, value)
        elif name in ("LOAD_ATTR", "LOAD_METHOD"):
            self.load_attribute(ins, name, value)
        elif name == "STORE_ATTR":
            # The object lies above the value that is stored in it.
            self.pop()
            self.keep_out(self.pop(), "it is stored in an object")
        elif name == "KW_NAMES":
            # Python 3.11 and 3.12 name the keywords of a call in this instruction, later versions by a tuple on the
            # stack.
            self.keywords = self.source.co_consts[ins.arg or 0]
        elif name in ("CALL", "CALL_KW"):
            self.call(ins.arg or 0, by_name=name == "CALL_KW")
        elif name == "MAKE_FUNCTION":
            self.make_function(ins.arg or 0)
        elif name == "SET_FUNCTION_ATTRIBUTE":
            made = self.pop()
            self.keep_out(self.pop(), "it is a default of a function")
            self.push(made)
        elif name in ("GET_ITER", "FOR_ITER"):
            self.iterate(name)
        elif name == "LOAD_FAST_AND_CLEAR":
            # Python 3.12 runs comprehensions inline, and sets their variables aside by this instruction.
            self.variables.pop(value, None)
            self.push(_HIDDEN)
        elif name == "COPY":
            # The operand counts from 1, which is the top of the stack.
            self.push(self.stack[-(ins.arg or 1)])
        elif name == "SWAP":
            self.stack[-1], self.stack[-(ins.arg or 1)] = self.stack[-(ins.arg or 1)], self.stack[-1]
        elif name == "LOAD_CONST":
            self.push(_InnerFunction(value) if isinstance(value, CodeType) else _KnownValue(value))
        elif name == "END_FOR":
            self.other(ins, name, -dis.stack_effect(ins.opcode))
        elif name == "FORMAT_VALUE":
            # The flag 4 means that a format specification lies on the stack, too.
            self.other(ins, name, 1 + bool((ins.arg or 0) & 4))
        elif name.startswith("BUILD_") or name in ("CALL_INTRINSIC_1", "CALL_FUNCTION_EX"):
            self.other(ins, name, len(self.stack) if name == "CALL_FUNCTION_EX" else None)
        else:
            self.other(ins, name, _TAKES.get(name))

    def other(self, ins: dis.Instruction, name: str, takes: int | None) -> None:
        """Change the symbolic stack for the instruction ``ins``, called ``name``, that makes an untracked value from
        ``takes`` operands. If ``takes`` is None, assume as many as possible.

        Raise ``UnknownReads`` if the followed parameter is among them, unless the instruction is one that reads no
        attribute (``_HARMLESS``).
        """
        effect = dis.stack_effect(ins.opcode, ins.arg if ins.opcode >= dis.HAVE_ARGUMENT else None, jump=False)
        if takes is None:  # at least what it makes less; any other depth is possible
            takes = max(-effect + 1, 0) if name.startswith("BUILD_") else len(self.stack)
        used = self.stack[len(self.stack) - takes :] if takes else []
        if name not in _HARMLESS and any(v is _PARAMETER for v in used):
            self.fail(_USES.get(name, _USES.get(name.partition("_")[0], f"it is used by {name}")))
        depth = max(len(self.stack) + effect, 0)
        kept = self.stack[: len(self.stack) - takes] if takes else self.stack
        self.stack = [*kept, *[_OTHER] * (depth - len(kept))][:depth] if depth >= len(kept) else kept[:depth]

    def iterate(self, name: str) -> None:
        """Replace the value on top of the symbolic stack by an iterator over it if ``name``, an instruction, is
        ``GET_ITER``. For ``FOR_ITER``, keep the iterator and push what it yields.
        """
        value = self.pop()
        self.keep_out(value, _USES["GET_ITER"])
        if name == "FOR_ITER":
            self.push(value)
        elif isinstance(value, _KnownValue):
            value = _AnyOf(value.value) if isinstance(value.value, tuple) else _OTHER
        self.push(value if isinstance(value, _AnyOf) else _OTHER)

    def load_global(self, ins: dis.Instruction, name: str) -> None:
        """Push a global or built-in name on the symbolic stack, with its value if a scope has it. Otherwise push an
        unknown value.
        """
        known = _OTHER
        for scope in (self.world, vars(builtins)):
            if name in scope:
                known = _KnownValue(scope[name])
                break
        extra = dis.stack_effect(ins.opcode, ins.arg, jump=False) - 1
        self.stack += [_OTHER] * extra  # a NULL goes before or behind it: a call looks at both places
        self.push(known)

    def load_attribute(self, ins: dis.Instruction, name: str, attribute: str) -> None:
        """Replace the object on top of the symbolic stack by its attribute. An attribute of the followed parameter is
        collected as read. Raise ``UnknownReads`` if its name begins with two underscores.
        """
        owner = self.pop()
        known: _Value = _OTHER
        if owner is _PARAMETER:
            if attribute.startswith("__"):
                # Such an attribute, ``__dict__`` for example, may give access to all others.
                self.fail(f".{attribute} of it is read")
            self.walk_of.reads.add(attribute)
        elif isinstance(owner, _KnownValue):
            known = _static_attribute(owner.value, attribute)
        self.push(known)
        # The instruction pushes two values if the attribute is called next.
        if name == "LOAD_METHOD" or dis.stack_effect(ins.opcode, ins.arg, jump=False) == 1:
            self.push(_OTHER)

    def make_function(self, flags: int) -> None:
        """Handle the instruction that creates a function with ``flags``. The code of the function stays on the symbolic
        stack. Raise ``UnknownReads`` if the followed parameter is among its defaults.
        """
        code = self.pop()
        for _ in range(flags.bit_count() if "SET_FUNCTION_ATTRIBUTE" not in dis.opmap else 0):  # since Python 3.13
            self.keep_out(self.pop(), "it is a default of a function")
        self.push(code)

    def call(self, count: int, *, by_name: bool) -> None:
        """Handle a call with ``count`` arguments. If the followed parameter is among them, continue the walk in the
        called function. ``by_name`` is true if a tuple of keyword names is on the stack.
        """
        keywords, self.keywords = self.keywords, ()
        if by_name:
            given = self.pop()
            keywords = given.value if isinstance(given, _KnownValue) and isinstance(given.value, tuple) else ()
        args = [self.pop() for _ in range(count)][::-1]
        pair = [self.pop(), self.pop()]
        self.push(_OTHER)
        # The function stands before or behind a NULL, as the version of Python has it.
        called = next((v for v in pair if isinstance(v, (_KnownValue, _InnerFunction))), _OTHER)
        if any(v is _PARAMETER for v in pair):
            self.fail("it is called")
        if isinstance(called, _InnerFunction):
            self.walk_of.iterated[called.code] = next((v for v in (*args, *pair) if isinstance(v, _AnyOf)), _OTHER)
        plain = count - len(keywords)
        for i, value in enumerate(args):
            if value is _PARAMETER:
                self.passed(called, i if i < plain else keywords[i - plain], args)

    def passed(self, called: _Value, position: int | str, args: list[_Value]) -> None:
        """Continue the walk in ``called``, which receives the followed parameter as the argument ``position`` of
        ``args``. Raise ``UnknownReads`` if that code cannot be followed.
        """
        if isinstance(called, _InnerFunction):
            parameters = called.code.co_varnames[: called.code.co_argcount + called.code.co_kwonlyargcount]
            name = position if isinstance(position, str) else "".join(parameters[position : position + 1])
            if name not in parameters:
                self.fail("it is passed to a function within that takes *args")
            free = {n: v for n, v in self.variables.items() if n in called.code.co_freevars}
            self.walk_of.code(called.code, {name, *(self.names & {*called.code.co_freevars})}, self.world, free)
        elif isinstance(called, _KnownValue) and (called.value is getattr or called.value is hasattr):
            given = args[1] if len(args) > 1 else _OTHER
            names = given.members if isinstance(given, _AnyOf) else [given.value] if given is not _OTHER else [_OTHER]
            if not all(isinstance(each, str) for each in names):
                self.fail(f"{called.value.__name__} of it takes a name that is not written out")
            self.walk_of.reads.update(map(str, names))
        elif isinstance(called, _KnownValue) and _only_shows_values(called.value):
            return
        elif isinstance(called, _KnownValue):
            try:
                self.walk_of.function(called.value, position, called.owner)
            except UnknownReads as e:
                self.fail(str(e))
        else:
            self.fail("it is passed to something that cannot be looked into")

    def store(self, name: str, value: _Value) -> None:
        """Assign ``value`` to the variable ``name``. If it is the followed parameter, ``name`` becomes another name of
        that parameter. Otherwise a variable that is assigned two different values becomes unknown.
        """
        if value is _PARAMETER:
            self.names.add(name)
        elif value is _HIDDEN:
            # The end of an inline comprehension restores the variable that was set aside.
            return
        elif name in self.variables and self.variables[name] != value:
            self.variables[name] = _OTHER
            self.changing.add(name)
        else:
            self.variables[name] = value

    def keep_out(self, value: _Value, what: str) -> None:
        """Raise ``UnknownReads``, with the reason ``what``, if ``value`` is the parameter whose reads are collected."""
        if value is _PARAMETER:
            self.fail(what)

    def fail(self, what: str) -> None:
        """Raise ``UnknownReads`` with the reason ``what``. Unless ``what`` names a line, the line of the current
        instruction is added.
        """
        raise UnknownReads(f"{what} (line {self.line} of {self.source.co_qualname})" if "(line " not in what else what)

    def push(self, value: _Value) -> None:
        """Push a value on the symbolic stack."""
        self.stack.append(value)

    def pop(self) -> _Value:
        """Remove the top of the symbolic stack and return it, or an unknown value if the stack is empty."""
        return self.stack.pop() if self.stack else _OTHER


def _merged_stack(first: _Stack, second: _Stack) -> _Stack:
    """Return the symbolic stack where two paths of the code, with the stacks ``first`` and ``second``, meet. A value
    that may be the followed parameter on one of them counts as the parameter.
    """
    pairs = zip(first, second, strict=False)  # of two depths, one way was never taken
    return [a if a is b or a == b else _PARAMETER if _PARAMETER in (a, b) else _OTHER for a, b in pairs]


def _receiving_parameter(parameters: list[inspect.Parameter], position: int | str) -> str | None:
    """Return the name of the parameter that receives the argument ``position`` (a number or a name) of a call. Return
    None if ``*args`` or ``**kwargs`` collects it.
    """
    single = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if isinstance(position, str):
        return next((p.name for p in single if p.name == position), None)
    by_position = [p.name for p in single if p.kind is not p.KEYWORD_ONLY]
    return by_position[position] if position < len(by_position) else None


def _static_attribute(owner: object, name: str) -> _KnownValue | None:
    """Return the attribute ``name`` of ``owner``, found without running code. It is any value of a module or an
    instance's own attribute, and otherwise a method. Return None for any other attribute.
    """
    if name in getattr(owner, "__dict__", ()) and not isinstance(owner, type):
        return _KnownValue(vars(owner)[name])
    method = inspect.getattr_static(owner, name, None)
    cls = owner if isinstance(owner, type) else type(owner)
    if isinstance(method, (staticmethod, classmethod)):
        return _KnownValue(method.__func__, (cls,) if isinstance(method, classmethod) else ())
    return _KnownValue(method, () if owner is cls else (owner,)) if isinstance(method, FunctionType) else None


def _only_shows_values(fn: object) -> bool:
    """Return whether ``fn`` only prints or logs its arguments. Passing the followed parameter to it then reads no
    attribute.
    """
    return (
        any(fn is each for each in _SHOWING)
        or ((isinstance(fn, FunctionType) and fn.__module__) or "").partition(".")[0] == _SHOWING_PACKAGE
    )


def _is_cell_set(cell: Any) -> bool:
    """Return whether the cell of a closure has a value."""
    try:
        return cell.cell_contents is not cell
    except ValueError:  # not assigned yet
        return False
