"""One defective op with its sound twin, and what files of defects are written with.

Nothing is declared when a file of defects is imported: ``make_bad`` and ``make_good`` declare their op in a namespace
that nobody has used, each time they are called.
"""

import itertools
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

import shiplap as sl
from shiplap_testing.folder import temporary

Make = Callable[[], sl.Op]
Part = Callable[[sl.Op], object]
CAUSES = (
    "size",
    "values",
    "scalars",
    "gradient",
    "layout",
    "aliasing",
    "state",
    "transforms",
    "lists",
    "outputs",
    "promotion",
    "process",
)
DEFECTS: dict[str, "Defect"] = {}
# Each op gets a namespace of its own, so that a process can declare a defect several times.
_numbers = itertools.count()
# An operator vanishes with the library object that defined it.
_libraries: list[torch.library.Library] = []


@dataclass(frozen=True)
class Defect:
    """A defect planted on purpose, with one function that declares an op with it and one that declares the same op
    without it.

    Attributes:
        name: The name of the defect.
        cause: The kind of the defect, which is one of ``CAUSES``.
        make_bad: A function that declares the op with the defect in a new namespace and returns it.
        make_good: A function that declares the same op without the defect in a new namespace and returns it.
        why: A description of the defect and of the inputs on which it shows.
        right: A function that returns whether an op is right on an input that shows the defect.
        needs: A set with ``compiler`` for kernels in C, and ``triton`` for kernels that Triton must interpret in a
            process with ``TRITON_INTERPRET=1``.
        breaks: Whether the op with the defect may end, hang or corrupt the process that calls it, or use up its memory.
        later: Whether the defect was written after the checks had been repaired for all others.
    """

    name: str
    cause: str
    make_bad: Make
    make_good: Make
    why: str
    right: Callable[[sl.Op], bool]
    needs: frozenset[str] = frozenset()
    breaks: bool = False
    later: bool = False

    def __str__(self) -> str:
        """Return the name of the defect."""
        return self.name

    @property
    def half(self) -> str:
        """The part of the benchmark of planted defects to which this defect belongs.

        It is ``later`` if the defect was written after the checks of the audit had been improved on all others. Other
        defects are ``seen`` or ``held_out``, by a hash of their name. Authors of checks may look at those that are
        ``seen``, but not at those that are ``held_out``.
        """
        if self.later:
            return "later"
        # A hash, so that nobody chooses the half and a new defect does not move the others.
        return "seen" if sha256(self.name.encode()).digest()[0] % 2 else "held_out"


def add(
    cause: str,
    name: str,
    why: str,
    bad: Callable[[str], sl.Op],
    good: Callable[[str], sl.Op],
    right: Callable[[sl.Op], bool],
    *,
    needs: Iterable[str] = (),
    breaks: bool = False,
    later: bool = False,
) -> None:
    """Register the planted defect ``name`` in ``DEFECTS``. Raise ``ValueError`` for an unknown ``cause`` or a name that
    is registered already.

    ``bad`` and ``good`` declare, in a given namespace, the defective op and the same op without the defect. ``right``
    returns whether an op is right on an input that shows the defect, without the audit. The other arguments are fields
    of :class:`Defect`.
    """
    if cause not in CAUSES or name in DEFECTS:
        raise ValueError(f"{name}: an unknown cause or a name that is taken")
    DEFECTS[name] = Defect(
        name, cause, lambda: bad(_fresh()), lambda: good(_fresh()), why, right, frozenset(needs), breaks, later
    )


def _fresh() -> str:
    """Return the name of a namespace that no op of this process has used."""
    return f"defect{next(_numbers)}"


def of(declare: Callable[[str], sl.Op], *parts: Part) -> Callable[[str], sl.Op]:
    """Return a function that declares an op with ``declare`` in a given namespace, calls each of ``parts`` with the op,
    and returns the op. The parts add kernels and gradients to the op.
    """

    def make(namespace: str) -> sl.Op:
        """Declare the op in ``namespace``, call each of ``parts`` (argument of ``of``) with it, and return the op."""
        op = declare(namespace)
        for part in parts:
            part(op)
        return op

    return make


def kernel(fn: Callable[..., Any], **declaration: Any) -> Part:
    """Return a function that registers ``fn`` as a CPU kernel of the op that is passed to it. The keyword arguments
    ``declaration`` are passed to ``op.kernel``. Unless they set ``strided``, the kernel gets tensors of any strides.
    """
    return lambda op: op.kernel("cpu", fn, **{"strided": True, **declaration})


def backward(
    fn: Callable[..., Any], saves: Iterable[str] | None = None, *, once_differentiable: bool | None = None
) -> Part:
    """Return a function that registers ``fn`` with a given op as its gradient, for tensors of any strides. ``saves``
    and ``once_differentiable`` are passed to ``op.backward``. If ``once_differentiable`` is False, autograd
    differentiates ``fn`` for second derivatives without a check. If ``saves`` or ``once_differentiable`` is None, it
    has the default of ``op.backward``.
    """
    return lambda op: op.backward(fn, saves=saves, strided=True, once_differentiable=once_differentiable)


def c_kernel(body: str, strided: Iterable[str] = ()) -> Part:
    """Return a function that compiles the C source code ``body`` and registers its function as a CPU kernel of the op
    that is passed to it. The C function must have the name of the op. ``strided`` names the arguments that may have any
    strides.
    """

    def bind(op: sl.Op) -> None:
        """Compile the C source ``body`` (argument of ``c_kernel``) for ``op``, and register its function as a CPU
        kernel.

        The function has the name of the op. The files are written to a new folder.
        """
        # Only defects in C need a compiler, and the others must run without one.
        from shiplap_testing.build import compile_c

        symbol = op.spec.opname
        folder = Path(tempfile.mkdtemp(dir=_folder()))
        library = compile_c(folder, symbol, {symbol: op}, "#include <stdlib.h>\n" + body)
        op.kernel("cpu", sl.cabi(library, symbol, strided=strided))

    return bind


@cache
def _folder() -> Path:
    """Return the temporary folder of this process for compiled kernels. It is created by the first call and removed
    when the process ends normally.
    """
    return temporary("defects")


def foreign(
    namespace: str, schema: str, fn: Callable[..., Any], key: str = "CompositeImplicitAutograd"
) -> torch.library.Library:
    """Define an operator with the torch schema ``schema`` and the implementation ``fn`` in ``namespace``, as another
    library would. Return the library object, which this module also keeps alive.

    With the default ``key``, torch differentiates and traces the operations of ``fn``. For another ``key`` the caller
    must also register an implementation for fake tensors.
    """
    library = torch.library.Library(namespace, "FRAGMENT")
    # Torch removes the operators of a library object to which nothing refers any more.
    _libraries.append(library)
    library.define(schema)
    library.impl(schema.partition("(")[0], fn, key)
    return library
