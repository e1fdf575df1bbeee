"""The C prototype of an ``OpSpec``. Only this module fixes the order and types of a C ABI kernel's parameters."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from shiplap.declare.spec import Arg, OpSpec
from shiplap.errors import error

Role = Literal["input", "output", "scalar", "list", "length", "extent"]

# A bool is passed as int32_t because the size of C's own bool is not fixed by the standard.
_SCALAR = {"int": "int64_t", "float": "double", "bool": "int32_t", "str": "const char*"}
_ELEMENT = {"list[int]": "int64_t", "list[float]": "double"}

# What a Python argument may be called and a C or C++ parameter may not.
_WORDS = """
ctx alignas alignof and_eq asm auto bitand bitor bool case catch char char8_t char16_t char32_t co_await co_return
co_yield compl concept const const_cast consteval constexpr constinit decltype default delete do double dynamic_cast
enum explicit export extern false float friend goto inline int long mutable namespace new noexcept not_eq nullptr
operator or_eq private protected public register reinterpret_cast requires restrict short signed sizeof static
static_assert static_cast struct switch template this thread_local throw true typedef typeid typename typeof union
unsigned using virtual void volatile wchar_t xor xor_eq
"""
# Macros of the C library and of compilers, in lower case as argument names are.
_MACROS = """
assert errno i386 linux major minor makedev math_errhandling mips near far offsetof setjmp sgi signal sparc stdin stdout
stderr sun unix va_arg va_copy va_end va_start vax
"""
# An argument may have any of these names in Python, but not in a C or C++ header.
_RESERVED = frozenset((*_WORDS.split(), *_MACROS.split()))


@dataclass(frozen=True)
class CParameter:
    """One parameter of a C function. ``ctype`` is its C type, and ``name`` its name in C.

    ``source`` is the name of the argument, output or dim whose value it passes. ``role`` states what it passes, for
    example ``"length"`` for the length of a list, or ``"extent"`` for a size that the kernel returns.
    """

    ctype: str
    name: str
    role: Role
    source: str

    def __str__(self) -> str:
        """Return the C declaration of the parameter, that is its type and its name."""
        return f"{self.ctype} {self.name}"


def c_prototype(spec: OpSpec) -> tuple[CParameter, ...]:
    """Return the C parameters of a kernel of the op ``spec``, after its first parameter ``ctx``. Raise ``SL404`` if C
    cannot express a type.

    The parameters are the input tensors, the outputs, the scalars, and pointers through which the kernel returns
    data-dependent sizes, in this order.
    """
    if spec.traced:
        raise error(
            "SL404",
            where=spec.name,
            got="results that are lists, scalars or optional, or whose sizes only the reference tells",
            expected="tensors that can be allocated before the call",
            fix="write the kernel as a Python function, which returns them, and call the C function from there",
        )
    # This order is part of the C ABI: compiled libraries rely on it.
    inputs = [CParameter(_tensor_ctype(spec, a), a.name, "input", a.name) for a in spec.tensors]
    outputs = [CParameter("DLTensor*", o.name, "output", o.name) for o in spec.outputs]
    scalars = [p for a in spec.scalars for p in _scalar_parameters(spec, a)]
    # A data-dependent size is known only to the kernel, which writes it through this pointer.
    extents = [CParameter("int64_t*", dim, "extent", dim) for dim in spec.dynamic]
    # Names are reserved in the order of the parameters, so that a header is the same each time it is generated.
    taken = set(_RESERVED)
    return tuple(_rename_reserved(p, taken) for p in (*inputs, *outputs, *scalars, *extents))


def _rename_reserved(p: CParameter, taken: set[str]) -> CParameter:
    """Return ``p`` with underscores appended to its name until the name is not in ``taken``, and add that name to
    ``taken``. ``taken`` holds the keywords of C and C++ and the names of earlier parameters.
    """
    name = p.name
    while name in taken:
        name += "_"
    taken.add(name)
    return replace(p, name=name)


def _tensor_ctype(spec: OpSpec, arg: Arg) -> str:
    """Return ``DLTensor*`` if the kernel writes to the tensor argument ``arg``, and otherwise ``const DLTensor*``.
    Raise ``SL404`` for a list of tensors.
    """
    if arg.many:
        raise error("SL404", where=f"{spec.name}, argument {arg.name!r}", got="a list of tensors", expected="a tensor")
    return "DLTensor*" if arg.mutated else "const DLTensor*"


def _scalar_parameters(spec: OpSpec, arg: Arg) -> list[CParameter]:
    """Return the C parameters of the scalar argument ``arg``. A list has two, a pointer and a length, and any other
    scalar has one. Raise ``SL404`` for an optional scalar, or for a type that C does not have.
    """
    kind = str(arg.scalar)
    # A C scalar has no value for None, other than a number that a caller might also pass.
    if arg.optional or kind not in (*_SCALAR, *_ELEMENT):
        got = f"{arg.kind} | None" if arg.optional else arg.kind
        raise error(
            "SL404",
            where=f"{spec.name}, argument {arg.name!r}",
            got=got,
            expected=f"one of {', '.join((*_SCALAR, *_ELEMENT))}, which C can take",
            fix="write the kernel as a Python function, which takes it, and call the C function from there",
        )
    if kind in _SCALAR:
        return [CParameter(_SCALAR[kind], arg.name, "scalar", arg.name)]
    return [
        CParameter(f"const {_ELEMENT[kind]}*", arg.name, "list", arg.name),
        CParameter("int64_t", f"{arg.name}_len", "length", arg.name),
    ]
