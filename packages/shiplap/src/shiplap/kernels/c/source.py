"""``sl.source(files, symbol)``, a C, C++ or CUDA C++ function as a kernel, compiled with the declaration's header.

The library is named by the content of the sources, of the headers that they include and of the flags. An edited source
is therefore another kernel for the caches of torch. ``op.build()``, ``shiplap build`` and ``shiplap package`` compile
it. A call never does.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal, get_args

from shiplap.declare.code_parts import AnyValue
from shiplap.declare.kernel import Implementation, KernelTerms, read_strided
from shiplap.declare.keyword_values import with_checked_arguments
from shiplap.declare.spec import OpSpec
from shiplap.errors import error
from shiplap.kernels.c.declaration import CAbiImplementation, CKernel, cabi, check_c_function
from shiplap.kernels.c.header import header_text
from shiplap.kernels.c.library import source_libraries
from shiplap.kernels.native.source_library import CompileRequest, SourceLibrary, SourceText, source_texts

Language = Literal["c", "c++", "cuda"]
SUFFIX_LANGUAGES: dict[str, Language] = {
    ".c": "c",
    ".cc": "c++",
    ".cpp": "c++",
    ".cxx": "c++",
    ".cu": "cuda",
}
# As nvcc names a compute capability (90a), as the option -arch does (sm_90a), and as torch does (9.0a, 9.0+PTX).
ARCHITECTURE = re.compile(r"(?:sm_|compute_)?(\d{1,2})\.?(\d[af]?)(\+PTX)?")


class SourceImplementation(Implementation):
    """A kernel given as source code, which is not yet bound to an op. It holds the sources, the compiler's options, and
    the C function that they define.
    """

    native_configs = True

    def __init__(self, texts: Sequence[SourceText], request: CompileRequest, function: CAbiImplementation) -> None:
        """Set the sources, the compiler's options, and the function with its flags. Nothing is compiled."""
        self.texts, self.request, self.function = tuple(texts), request, function

    @property
    def name(self) -> str:
        """The name of the C function. Reports and stored tuning choices name the kernel by it."""
        return self.function.symbol

    def code_parts(self) -> Iterator[tuple[str, AnyValue]]:
        """Yield pairs of a string and None, from which the key of the kernel in caches is computed. The strings hold
        the function's name, strided arguments and alignment, the compiler's options, and the content of each source and
        header.
        """
        yield from self.function.code_parts()
        yield f"source {self.request}", None
        for text in self.texts:
            yield f"{text.language} {text.name}\n{text.content}", None

    def bind(self, spec: OpSpec, terms: KernelTerms) -> CKernel:
        """Return the kernel for the op declared as ``spec``. Its library is identified by a digest of sources and
        options. Nothing is compiled, and no library is opened. Raise ``SL122`` if a name in ``strided`` is no tensor
        argument, or for CUDA C++ as a kernel of the CPU.
        """
        symbol = self.function.symbol
        if terms.device == "cpu" and any(text.language == "cuda" for text in self.texts):
            where, expected = f"{spec.name}, kernel {symbol}", "C or C++ for the CPU"
            fix = 'bind it with op.kernel("cuda", ...), or write the kernel of the CPU in C or C++'
            raise error("SL122", where=where, got="CUDA C++", expected=expected, fix=fix)
        read_strided(spec, f"sl.source(..., {symbol!r})", self.function.strided)
        configs = {symbol: terms.space.names} if terms.space is not None else None
        header = header_text({symbol: spec}, symbol, configs)
        library = SourceLibrary(**vars(self.request), op=spec.name, symbol=symbol, header=header, texts=self.texts)
        # The path is not a file yet: a call looks here how to find or report the library.
        source_libraries[library.path] = library
        bound = CAbiImplementation(library.path, symbol, self.function.strided, self.function.align)
        return CKernel(spec, terms, bound)


@with_checked_arguments
def source(
    files: str | os.PathLike[str] | Iterable[str | os.PathLike[str]] = (),
    symbol: str = "",
    *,
    code: str = "",
    language: Language | None = None,
    flags: Iterable[str] = (),
    include_dirs: Iterable[str | os.PathLike[str]] = (),
    libraries: Iterable[str] = (),
    architectures: Iterable[str | float] = (),
    strided: Iterable[str] = (),
    align: int = 1,
) -> SourceImplementation:
    """Return a kernel that Shiplap compiles from C, C++ or CUDA C++. Pass the result to ``op.kernel(device, ...)``.

    Each source is compiled with the header of the declaration in front, so it defines the function of that prototype
    without an include. ``op.build()``, ``shiplap build`` and ``shiplap package`` compile the sources. A call does not.

    Args:
        files: the source files (``.c``, ``.cc``, ``.cpp``, ``.cxx``, ``.cu``), relative to the calling file.
        symbol: the C function, with the prototype that ``shiplap header`` prints.
        code: a source as a string, in addition to ``files`` or in place of them.
        language: the language of ``code``, which is ``"c"``, ``"c++"`` or ``"cuda"``.
        flags: options for the compiler. They follow Shiplap's own, ``-O3`` and ``-std=c++20`` (``-std=c++17`` for
            CUDA).
        include_dirs: folders of headers, relative to the calling file. If a header changes, the library is compiled
            again.
        libraries: libraries to link, such as ``"cublas"``.
        architectures: the CUDA architectures to compile for, such as ``"90a"``. ``"90+PTX"`` adds code that newer GPUs
            compile when they load it. The default is those of the GPUs of this machine, or all major ones that nvcc
            supports if there is no GPU.
        strided: the tensor arguments that the kernel accepts with any strides, as for ``sl.cabi``.
        align: the alignment, in bytes, of every tensor's address, as for ``sl.cabi``.

    Raises:
        LibraryError: ``SL401`` for a missing file, ``SL402`` if ``symbol`` is no C name, ``SL404`` for an invalid
            alignment or a source without a language, ``SL422`` for an invalid architecture. A call raises ``SL420`` if
            the library is not built. ``op.build()`` raises ``SL421`` with the compiler's message, or ``SL423`` if there
            is no compiler.
    """
    # Paths are relative to the file that calls, as those of an import are.
    base = Path(sys._getframe(2).f_code.co_filename).resolve().parent  # behind the check of the arguments
    paths = _as_list(files)
    where = f"sl.source(..., {symbol!r})"
    check_c_function(where, symbol, align)
    function = cabi("source", symbol, strided=strided, align=align)
    texts = [_read_source(base / path, where) for path in paths]
    if code:
        if language is None or language not in get_args(Language):
            raise error(
                "SL404",
                what="a source has no language",
                where=where,
                got=f"language={language!r}",
                expected=" or ".join(map(repr, get_args(Language))),
                fix='pass language="c", "c++" or "cuda" beside code=',
            )
        texts.append(SourceText(f"code of {symbol}", language, code))
    if not texts:
        raise error(
            "SL404",
            what="a source is empty",
            where=where,
            got="neither files nor code",
            expected="at least one source",
            fix="pass the path of a source file, or code= with language=",
        )
    request = CompileRequest(
        _read_flags(flags, where),
        tuple([(base / folder).resolve() for folder in _as_list(include_dirs)]),
        tuple(_as_list(libraries)),
        tuple([_read_architecture(a, where) for a in _as_list(architectures)]),
    )
    return SourceImplementation(source_texts(texts, request.include_dirs), request, function)


def _read_flags(flags: Iterable[str], where: str) -> tuple[str, ...]:
    """Return the compiler's options, split as in a shell if they are one text. Raise ``SL404`` for a quote in the text
    that is not closed. ``where`` is the place in errors.
    """
    try:
        return tuple(shlex.split(flags) if isinstance(flags, str) else flags)
    except ValueError as e:
        raise error(
            "SL404",
            what="the flags cannot be split",
            where=where,
            got=f"flags={flags!r}: {e}",
            expected="a list of flags, or one text whose quotes match",
            fix='pass a list, such as flags=["-O2", "-DNAME=1"], whose items need no quotes',
        ) from None


def _as_list(given: AnyValue) -> list[AnyValue]:
    """Return ``given``, one text, path or number or an iterable of them, as a list. A text alone is one item."""
    return list(given) if isinstance(given, Iterable) and not isinstance(given, str) else [given]


def _read_source(path: Path, where: str) -> SourceText:
    """Return the content of the source file ``path``, with its language, which follows from the file's suffix. Raise
    ``SL404`` for an unknown suffix, or ``SL401`` if the file cannot be read. ``where`` is the place in errors.
    """
    language = SUFFIX_LANGUAGES.get(path.suffix)
    if language is None:
        raise error(
            "SL404",
            what="the language of a source file is unknown",
            where=where,
            got=path.name,
            expected=f"a file that ends in {', '.join(SUFFIX_LANGUAGES)}",
            fix="rename the file, or pass its text as code= with language=",
        )
    try:
        return SourceText(path.name, language, path.read_text(), path.resolve())
    except OSError as e:
        raise error(
            "SL401",
            what="a source file cannot be read",
            where=where,
            got=f"{path}: {e.strerror}",
            expected="a source file, relative to the file that calls sl.source",
            fix="correct the path",
        ) from None


def _read_architecture(value: str | float, where: str) -> str:
    """Return the compute capability ``value`` as nvcc names it, without a prefix and without a point, such as
    ``"90a"``. ``"+PTX"`` stays at its end. Raise ``SL422`` if ``value`` is no compute capability.
    """
    match = ARCHITECTURE.fullmatch(str(value))
    if match is None:
        raise error("SL422", where=where, got=repr(value), expected='a compute capability such as "80" or "90a"')
    return match[1] + match[2] + (match[3] or "")
