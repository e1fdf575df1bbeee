"""The error catalogue: every failure has a stable id, and says what, got, expected, where, and one fix.

``CATALOGUE`` is the only list; the documentation page and the tests are generated from it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

__all__ = ["CATALOGUE", "Entry", "ShiplapError", "ShiplapNotice", "error", "notice", "unfinished"]


class ShiplapError(Exception):
    """Base of all errors of the catalogue.

    Attributes: ``id`` (``"SL202"``), ``what``, ``got``, ``expected``, ``where`` (op, argument or file), ``fix``.
    """

    def __init__(self, id: str, *, what: str, got: str, expected: str, where: str, fix: str) -> None:
        self.id, self.what, self.got, self.expected, self.where, self.fix = id, what, got, expected, where, fix
        super().__init__(str(self))

    def __str__(self) -> str:
        rows = [("where", self.where), ("got", self.got), ("expected", self.expected), ("fix", self.fix)]
        return "\n".join([f"{self.id}: {self.what}", *(f"  {k:<9}{v}" for k, v in rows if v)])

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.id, self.what, self.got, self.expected, self.where, self.fix)


def _rebuild(
    cls: type[ShiplapError], id: str, what: str, got: str, expected: str, where: str, fix: str
) -> ShiplapError:
    return cls(id, what=what, got=got, expected=expected, where=where, fix=fix)


class DeclarationError(ShiplapError, TypeError):
    """A declaration that no torch op can carry out (SL1xx)."""


class ArgumentError(ShiplapError, ValueError):
    """A call that does not fit the declaration (SL2xx)."""


class KernelError(ShiplapError, RuntimeError):
    """A kernel, reference or backward that broke its side of the declaration (SL3xx)."""


class LibraryError(ShiplapError, RuntimeError):
    """A kernel library that cannot be found, loaded or trusted (SL4xx)."""


class AuditError(ShiplapError, ValueError):
    """An audit that cannot be run as asked (SL5xx)."""


class CommandError(ShiplapError, RuntimeError):
    """A command that cannot be carried out as asked (SL6xx)."""


class DoctorError(ShiplapError, RuntimeError):
    """A program that cannot be examined as asked (SL7xx)."""


class BackendError(ShiplapError, RuntimeError):
    """A generated backend that cannot be described, generated, built or loaded (SL9xx)."""


class RewriteError(ShiplapError, ValueError):
    """A rewrite that cannot be put into force (SL8xx)."""


class ShiplapNotice(UserWarning):
    """Said once per process and reason: a slower or narrower path is in force."""


@dataclass(frozen=True)
class Entry:
    """One catalogue line: what it means, why it is an error, and the usual fix."""

    id: str
    kind: type[ShiplapError]
    title: str
    why: str
    fix: str


def _entries(kind: type[ShiplapError], rows: list[tuple[str, str, str, str]]) -> dict[str, Entry]:
    return {id: Entry(id, kind, title, why, fix) for id, title, why, fix in rows}


CATALOGUE: dict[str, Entry] = {
    **_entries(
        DeclarationError,
        [
            (
                "SL101",
                "op name",
                "Torch ops live in a namespace; both parts must be identifiers.",
                'write @sl.op("namespace::name")',
            ),
            (
                "SL102",
                "unannotated argument",
                "The schema, checks and fake are derived from annotations.",
                'annotate it, for example x: Float[Tensor, "n c"] or stride: int = 1',
            ),
            (
                "SL103",
                "type that a torch schema cannot express",
                "An op's arguments cross the dispatcher as tensors, ints, floats, bools, strings and lists of them.",
                "split it: pass its fields as separate int, float, bool, str, list or tensor arguments",
            ),
            (
                "SL104",
                "output dim that nothing determines",
                "A fake tensor needs the size of every output.",
                'give dims={"m": "<expression>"} if it is computable, bounds={"m": "<expression>"} if data decide it',
            ),
            (
                "SL105",
                "dim expression",
                "Expressions are evaluated on symbolic sizes, so the language is small.",
                "use names of dims and int arguments with + - * // %, comparisons, len prod min max cdiv gcd pow2ceil",
            ),
            (
                "SL106",
                "output dtype that nothing determines",
                "A dtype class such as Float takes its dtype from an input.",
                "use a concrete class (Float32, Int64, ...) or one that an input also uses",
            ),
            (
                "SL107",
                "mutated argument",
                "mutates= lists tensor arguments by name; such an op returns fresh tensors only.",
                "name a tensor argument of the signature",
            ),
            (
                "SL108",
                "op name already taken",
                "Two different functions declare the same op.",
                "rename one of them; re-running the same definition is fine",
            ),
            (
                "SL109",
                "return annotation",
                "Outputs are allocated from it.",
                'annotate "-> Float[Tensor, \\"n co\\"]", a tuple of those, or "-> None" with mutates=',
            ),
            (
                "SL110",
                "backward",
                "The gradient's contract names arguments of the op.",
                "return a dict {argument name: gradient}; saves= lists names of arguments or outputs",
            ),
            (
                "SL111",
                "no tensor argument",
                "The device of the outputs is taken from an input.",
                "add a tensor argument",
            ),
            (
                "SL112",
                "autocast rule",
                "A rule says which dtype the floating inputs get under torch.autocast.",
                "use 'widest', 'autocast', 'float32' or None",
            ),
            (
                "SL113",
                "declaration not finished",
                "A draft of 'shiplap init' knows names and types, not sizes or writes.",
                "work through the lines marked FILL, then write sl.op (or sl.adopt) in place of unfinished",
            ),
            (
                "SL115",
                "bucket rule",
                "Calls of one bucket share a tuned choice; a rule names dims and scalars of the op.",
                'call op.buckets("pow2", k="exact") with names of its free dims and scalars',
            ),
            (
                "SL116",
                "kernel config",
                "A config gives a value to each compile-time parameter of a kernel.",
                'give configs=[{"BLOCK": 64}, ...] with names that are keywords of the kernel',
            ),
            (
                "SL117",
                "dim along which calls are joined",
                "Calls are joined by concatenating what has that dim.",
                "name a dim that arguments and all outputs have as one of their sizes",
            ),
            (
                "SL118",
                "tolerance without a reason",
                "A kernel that may differ from its reference by more than rounding does so for a stated reason.",
                'give tolerance=(1e-3, "tanh stands for erf")',
            ),
            (
                "SL114",
                "template cannot be used",
                "Inductor fills one output of a kernel source with fused neighbours.",
                "correct the template's declaration",
            ),
        ],
    ),
    **_entries(
        ArgumentError,
        [
            ("SL201", "wrong number of dims", "The declaration fixes the rank.", "reshape or unsqueeze it"),
            ("SL202", "sizes disagree", "A dim met twice has one size.", "pass tensors whose named dims agree"),
            ("SL203", "fixed size", "The declaration fixes this size.", "pass a tensor of that size"),
            ("SL204", "dtype not accepted", "The declaration lists the dtypes.", "convert the tensor with .to(dtype)"),
            ("SL205", "dtypes disagree", "One dtype class, one dtype.", "convert one of them with .to(dtype)"),
            ("SL206", "devices disagree", "An op runs on one device.", "move the tensor with .to(device)"),
            ("SL207", "layout", "The op requires this memory layout.", "call .contiguous() first"),
            ("SL208", "precondition", "The declaration requires it.", "pass values that fulfil the condition"),
            ("SL209", "wrong kind of argument", "The schema fixes what each argument is.", "pass the declared type"),
            (
                "SL210",
                "mutated tensor overlaps itself",
                "Two of its elements share memory, so writing it is ambiguous.",
                "pass .clone()",
            ),
            (
                "SL211",
                "values not accepted",
                "The op is not defined for these values; it says which.",
                "correct the values that the message names",
            ),
            (
                "SL212",
                "given output does not fit",
                "An out-variant fills contiguous tensors of declared shape and dtype.",
                "pass torch.empty of the expected shape and dtype",
            ),
            (
                "SL213",
                "given workspace does not fit",
                "The kernel relies on its size and alignment.",
                "pass torch.empty(op.workspace_bytes(...), dtype=torch.uint8, device=...)",
            ),
        ],
    ),
    **_entries(
        KernelError,
        [
            (
                "SL301",
                "output does not fit the declaration",
                "The fake promised another tensor.",
                "correct the kernel, or the declaration if the kernel is right",
            ),
            (
                "SL302",
                "data-dependent size exceeds its bound",
                "Compiled code and capacity forms rely on the bound.",
                "correct bounds= in the declaration, or the kernel",
            ),
            (
                "SL303",
                "gradient does not fit its argument",
                "A gradient has the shape of its argument.",
                "return a tensor of the argument's shape, or None",
            ),
            (
                "SL304",
                "no backward",
                "The op declares no gradient, and one was asked for.",
                "declare one with @op.backward, or call .detach() on the inputs",
            ),
            (
                "SL305",
                "kernel refused its arguments",
                "The kernel returned a status other than SL_OK with this message.",
                "see the message",
            ),
            (
                "SL306",
                "no kernel for this device",
                "SHIPLAP_STRICT=1 forbids running the reference instead.",
                'add a kernel with @op.kernel("<device>"), or unset SHIPLAP_STRICT',
            ),
            (
                "SL307",
                "op cannot be packaged for this device",
                "An AOTInductor package runs without Python.",
                "compute what the op returns outside and pass it to the program, or package it for the CPU",
            ),
        ],
    ),
    **_entries(
        LibraryError,
        [
            (
                "SL401",
                "kernel library not found",
                "The C ABI kernel is bound by path.",
                "build it (make install), or set SHIPLAP_LIBRARY_PATH to its directory",
            ),
            ("SL402", "symbol not in the library", "Library and declaration differ in age.", "rebuild the library"),
            (
                "SL403",
                "library built for another declaration",
                "Calling it would misread arguments.",
                "regenerate the header with 'shiplap header', then rebuild the library",
            ),
            (
                "SL404",
                "declaration has no C form",
                "The C ABI carries tensors, optional tensors and scalars.",
                "split the argument, or bind a Python launcher instead",
            ),
            (
                "SL405",
                "no native binding",
                "It is compiled on your machine; until it is there the Python binding serves.",
                "install a C++20 compiler or set CXX; SHIPLAP_NATIVE=0 asks for none",
            ),
            (
                "SL406",
                "cache directory that is not private",
                "What lies in it is loaded as code.",
                "chmod 700 the directory, or set SHIPLAP_CACHE_DIR to one of your own",
            ),
            (
                "SL407",
                "no tvm-ffi",
                "Exporting a kernel through tvm-ffi needs its headers and its library.",
                "pip install 'shiplap[tvm-ffi]'",
            ),
        ],
    ),
    **_entries(
        AuditError,
        [
            (
                "SL501",
                "nothing to audit",
                "The target names no declared op.",
                "pass module:op, a file that declares ops, or namespace::name of a declared op",
            ),
            (
                "SL502",
                "no samples can be generated",
                "Sizes or values could not be derived from the declaration.",
                "declare a builder with @op.samples: fn(rng, sizes, dtype, device) -> all arguments",
            ),
            (
                "SL503",
                "no such check",
                "Checks are named by their file in shiplap/audit/checks.",
                "use names that shiplap.audit.CHECKS lists",
            ),
        ],
    ),
    **_entries(
        CommandError,
        [
            (
                "SL601",
                "target cannot be imported",
                "Ops exist once the module that declares them has been imported.",
                "correct the error it raises, or pass another target",
            ),
            ("SL602", "file cannot be used", "The command reads or writes this file.", "pass another path"),
            (
                "SL603",
                "optional packages are missing",
                "This command needs more than shiplap itself.",
                'pip install "shiplap[demo]"',
            ),
            (
                "SL604",
                "signature cannot be read",
                "'shiplap init' drafts from annotations, a docstring or a torch schema.",
                "annotate the function, or write its signature as the first line of its docstring",
            ),
            ("SL605", "device not available", "The command runs where it is told to.", "see 'shiplap env' for devices"),
            (
                "SL606",
                "nothing valid to tune on",
                "A kernel that reads through an index is right, or fast, by accident on values that mean nothing.",
                "declare a builder with @op.samples: fn(rng, sizes, dtype, device) -> all arguments",
            ),
            (
                "SL607",
                "no frozen choice",
                "SHIPLAP_STRICT=1 forbids running the declared default instead.",
                "tune this call and freeze again, or unset SHIPLAP_STRICT",
            ),
            (
                "SL608",
                "no tuning here",
                "A measurement takes seconds, and disturbs what surrounds it.",
                "tune before the model runs: shiplap tune, or sl.tune(op) at start-up",
            ),
            (
                "SL609",
                "table of choices not accepted",
                "A damaged or edited table is not believed.",
                "write it again with 'shiplap freeze' or 'shiplap cache export'",
            ),
            (
                "SL610",
                "sample of another bucket",
                "A choice is made on arguments like those that it is made for.",
                "let the builder declared with @op.samples return the sizes that it is asked for",
            ),
            (
                "SL611",
                "tuning process lost",
                "Candidates run in a process of their own, which has to import the op.",
                "make the module that declares the op importable, or tune with isolate=False",
            ),
            (
                "SL612",
                "budget",
                "Tuning ends after a time that you give.",
                "pass seconds, or text such as 90s, 5m or 1h",
            ),
            (
                "SL613",
                "arguments do not fit",
                "The command needs to know what to work on.",
                "see 'shiplap VERB --help'",
            ),
        ],
    ),
    **_entries(
        DoctorError,
        [
            (
                "SL701",
                "program cannot be started",
                "The doctor runs it as the shell would.",
                "check the path: shiplap doctor -- python script.py",
            ),
            (
                "SL702",
                "nothing was compiled",
                "Graph breaks are seen while torch compiles a function that is called.",
                "call the torch.compile'd function in the program; unset TORCH_COMPILE_DISABLE and TORCHDYNAMO_DISABLE",
            ),
        ],
    ),
    **_entries(
        RewriteError,
        [
            (
                "SL801",
                "rewrite refused by its proof",
                "What a pattern is replaced by computes the same, in every respect.",
                "correct the replacement; rewrite.findings shows each difference",
            ),
            (
                "SL802",
                "declaration of a rewrite",
                "Pattern and replacement are two functions of the same arguments.",
                "give both functions the same parameters, annotated in the pattern",
            ),
            (
                "SL803",
                "guard",
                "A guard is evaluated on what a match is bound to, and shown when it does not hold.",
                "compare x.dtype, x.shape[-1], x.ndim, x.device.type, dims, numbers, strings; and, or, not are allowed",
            ),
            (
                "SL804",
                "pattern that is no graph",
                "A pattern is compared with graphs, node by node.",
                "write it as one function of tensors, without branches on values, writes or randomness",
            ),
            (
                "SL805",
                "rewrite without a proof",
                "Nothing is put into models that was not compared with what it replaces.",
                "annotate the pattern's arguments, or give samples=",
            ),
            (
                "SL806",
                "nothing to rewrite",
                "Rewrites act while a function is compiled.",
                "pass a file or module with a function and its example_inputs()",
            ),
        ],
    ),
    **_entries(
        BackendError,
        [
            (
                "SL901",
                "metadata of a backend",
                "Wrappers are generated from it; a typo must not become a missing operator.",
                "correct the line",
            ),
            (
                "SL902",
                "vendor expression",
                "It is checked against the functions that the vendor's headers declare.",
                "correct the expression; 'shiplap backend functions RUNTIME' lists the signatures",
            ),
            (
                "SL903",
                "argument without a fate",
                "An argument of an ATen overload is mapped, guarded or shape only; a dropped one gives wrong values.",
                "use it in 'graph', or add it to 'guard' or 'shape_only'",
            ),
            (
                "SL904",
                "torch has drifted from the schema lock",
                "Wrappers were checked against these schemas; others may mean other arguments.",
                "review the difference, then run 'shiplap backend gen --accept-drift'",
            ),
            (
                "SL905",
                "backend project",
                "A project is a directory that 'shiplap backend new' wrote.",
                "name the directory that holds backend.toml",
            ),
            (
                "SL906",
                "backend cannot be built",
                "The compiler or linker refused the generated project.",
                "read the first error of the compiler",
            ),
            (
                "SL907",
                "runtime not available",
                "The vendor's headers and libraries come from its own packages.",
                "install them: pip install 'shiplap[openvino]' or 'shiplap[onednn]'",
            ),
            (
                "SL908",
                "hand-written body has another signature",
                "The generated wrapper calls it: another would not link, or would take one argument for another.",
                "write the signature that generated/bodies.h declares",
            ),
        ],
    ),
}


def error(
    id: str, *, where: str, got: object = "", expected: object = "", what: str = "", fix: str = ""
) -> ShiplapError:
    """The catalogue error ``id`` with its particulars; ``what`` and ``fix`` default to the entry's own."""
    entry = CATALOGUE[id]
    return entry.kind(
        id, what=what or entry.title, got=str(got), expected=str(expected), where=where, fix=fix or entry.fix
    )


_said: set[str] = set()


def notice(key: str, message: str) -> None:
    """Warn once per process about ``key``: every slow or narrow path says so, none repeats itself."""
    if key not in _said:
        _said.add(key)
        warnings.warn(message, ShiplapNotice, stacklevel=3)


def unfinished(name: str, **declaration: object) -> Callable[[Callable[..., Any]], Unfinished]:
    """Stands where ``sl.op`` or ``sl.adopt`` will stand: the decorated draft of ``name`` raises SL113 when called."""
    return lambda fn: Unfinished(name, fn)


class Unfinished:
    """A drafted declaration. Nothing is registered, so nothing can rely on what has not been filled in."""

    def __init__(self, name: str, draft: Callable[..., Any]) -> None:
        self.name, self.__doc__, self.__module__ = name, draft.__doc__, draft.__module__

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise error("SL113", where=self.name, got="lines marked FILL", expected="a finished declaration")

    def kernel(self, device: str, implementation: Any = None, **keywords: Any) -> Any:
        """As ``Op.kernel``, without binding anything."""
        return (lambda fn: fn) if implementation is None else implementation

    def backward(self, fn: Any = None, **keywords: Any) -> Any:
        """As ``Op.backward``, without declaring anything."""
        return (lambda f: f) if fn is None else fn

    def samples(self, fn: Any) -> Any:
        """As ``Op.samples``, without declaring anything."""
        return fn
