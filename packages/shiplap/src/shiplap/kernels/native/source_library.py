"""The library of one ``sl.source`` kernel, with its digest, its place in the cache and the command that compiles it."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from shiplap import safe_io
from shiplap.cached_property import cached_property
from shiplap.dispatch import registry
from shiplap.dispatch.package_folder import package_folders
from shiplap.errors import ShiplapError, error
from shiplap.kernels.native.build import LIBRARY, SOURCE_FOLDER, build_once
from shiplap.kernels.native.build_digest import INCLUDE, library_name_digest
from shiplap.kernels.native.build_plan import requested_compiler
from shiplap.kernels.native.cache import cache_folder, cache_root, evict_artefacts, is_library_present

HEADER = "declaration.h"
_AS_CUDA = (
    'compile the source as CUDA C++: name the file .cu, or pass language="cuda" beside code=, and bind it to "cuda"'
)
INCLUDES = re.compile(r'^[ \t]*#[ \t]*include[ \t]*[<"]([^">\n]+)[">]', re.MULTILINE)
MOST_HEADERS = 2000
HOST_FLAGS = ("-O3", "-fPIC", "-shared", "-fvisibility=hidden")
# C takes a function that nothing declares for one that returns an int, so that its result may be wrong. A flag of the
# command would be one of C++, too, since the header is compiled as C++ as well.
C_RULES = """
#if !defined(__cplusplus) && defined(__GNUC__)
#pragma GCC diagnostic error "-Wimplicit-function-declaration"
#endif
"""
STANDARD = {"c": (), "c++": ("-std=c++20",), "cuda": ("-std=c++17",)}
SUFFIX = {"c": ".c", "c++": ".cpp", "cuda": ".cu"}


@dataclass(frozen=True)
class SourceText:
    """One source file or header of a kernel.

    Attributes:
        name: its name in messages.
        language: its language, or an empty string for a header.
        content: its content as a string.
        path: its file, or None for a source that was given as a string.
    """

    name: str
    language: str
    content: str
    path: Path | None = None


def source_texts(sources: Iterable[SourceText], include_dirs: Sequence[Path]) -> list[SourceText]:
    """Return ``sources``, followed by every header that they include from the author's folders, transitively and
    without duplicates.

    A header is searched for beside the file that includes it and in ``include_dirs``. Headers of the compiler and of
    the system are therefore left out. Preprocessor conditions are not evaluated, so a header that is included only on
    another platform is returned, too.
    """
    found, queue = list(sources), list(sources)
    seen = {text.path for text in found}
    while queue and len(found) < MOST_HEADERS:
        text = queue.pop()
        folders = ([text.path.parent] if text.path is not None else []) + list(include_dirs)
        for name in INCLUDES.findall(text.content):
            # The including file's own folder comes first, as for the compiler.
            path = next((p.resolve() for folder in folders if (p := folder / name).is_file()), None)
            if path is not None and path not in seen:
                seen.add(path)
                header = SourceText(name, "", path.read_text(errors="replace"), path)
                found.append(header)
                queue.append(header)
    return found


def link_named(path: Path) -> None:
    """Make ``path`` a hard link to the library ``binding.so`` in the same folder, whose seals were checked before.
    Replace a file of other content at ``path``. Do nothing if ``path`` already has the library's content.
    """
    built = path.with_name(LIBRARY)
    for _ in range(2):
        try:
            os.link(built, path)
        except FileExistsError:
            if path.samefile(built) or path.read_bytes() == built.read_bytes():  # an unpacked wheel has no links
                return
            path.unlink()
        else:
            return


def gencode_flag(architecture: str) -> str:
    """Return nvcc's option that compiles for ``architecture``, such as ``"90a"``. For one that ends in ``"+PTX"``, the
    library also gets the intermediate code, which the driver of a newer GPU compiles.
    """
    number = architecture.removesuffix("+PTX")
    code = f"sm_{number}" if number == architecture else f"[compute_{number},sm_{number}]"
    return f"-gencode=arch=compute_{number},code={code}"


@dataclass(frozen=True)
class CompileRequest:
    """The options of ``sl.source`` for the compiler, which are flags, folders of headers, libraries to link, and CUDA
    architectures.
    """

    flags: tuple[str, ...]
    include_dirs: tuple[Path, ...]
    libraries: tuple[str, ...]
    architectures: tuple[str, ...]


@dataclass(frozen=True)
class SourceLibrary(CompileRequest):
    """A kernel library that is compiled from the author's sources and the header of one declaration.

    Attributes:
        op: the qualified name of the op.
        symbol: the name of the C function.
        header: the function's prototype and signature, in C.
        texts: the sources and the headers that they include.
    """

    op: str
    symbol: str
    header: str
    texts: tuple[SourceText, ...]

    @property
    def path(self) -> Path:
        """The library's file in the cache. It need not exist."""
        return cache_root() / self.digest / self.file_name

    @property
    def file_name(self) -> str:
        """The library's file name. It contains the symbol and a digest, because a deployed folder holds several
        libraries.
        """
        return f"lib{self.symbol}-{self.digest[:12]}.so"

    @cached_property
    def digest(self) -> str:
        """A digest that names the library, as 32 hexadecimal digits. It covers the sources and headers, the generated
        header, the compiler's options and the machine type.
        """
        # By name and content, not by path: the same sources elsewhere are the same library.
        texts = [f"{t.language} {t.name}\n{t.content}" for t in self.texts]
        options = (*self.flags, *self.libraries, *self.architectures)
        return library_name_digest("\0".join([self._included(), *texts]), options, "source")

    @property
    def prototype(self) -> str:
        """The declared prototype of the function on one line, without the attribute that exports it."""
        start = self.header.index(f"SL_EXPORT int {self.symbol}(") + len("SL_EXPORT ")
        return " ".join(self.header[start : self.header.index(";", start)].split())

    @property
    def is_cuda(self) -> bool:
        """Whether a source is CUDA C++, which requires nvcc."""
        return any(text.language == "cuda" for text in self.texts)

    def locate(self) -> Path:
        """Return the compiled library in the package of the op, or else in the cache. Raise ``SL420`` if neither has
        it, or ``SL406`` if another user could have written it.
        """
        op = registry.find_declared_op(self.op)
        rules = dict.fromkeys(package_folders(op) if op is not None else (), safe_io.NAMED)
        for folder, rule in (rules | {cache_root(): safe_io.CODE}).items():
            path = folder / self.digest / self.file_name
            if is_library_present(path.parent, self.op, rule):
                link_named(path)
                return path
        target = registry.command_target(self.op)
        raise error(
            "SL420",
            where=f"{self.op}, kernel {self.symbol}",
            got="its sources are not compiled",
            expected=f"the library of {', '.join(t.name for t in self.texts if t.language)}",
            fix=f"call op.build() in Python, or run 'shiplap build {target}' in a shell",
        )

    def compile(self) -> Path:
        """Compile the library, unless it is compiled already, and return its file. Raise ``SL421``, ``SL422`` or
        ``SL423`` if it cannot be compiled.
        """
        try:
            return self.locate()
        except ShiplapError as e:
            # Any other error says that a compiled library cannot be used.
            if e.id != "SL420":
                raise
        root = cache_folder(self.op)
        command = self._compile_command()
        problem = build_once(root, self.digest, self._unit(), command, self._files())
        if problem:
            raise self._compiler_error(problem)
        evict_artefacts(root)
        return self.locate()

    def _unit(self) -> str:
        """Return the C source that is compiled into the library in addition to the author's sources. It has functions
        that return the signature of the declaration. When the library is loaded, Shiplap compares that signature with
        the declaration's.
        """
        # C linkage: the loader looks the function up by its plain name.
        return f'#include "{HEADER}"\nextern "C" {{\nSL_SIGNATURES\n}}\n'

    def _included(self) -> str:
        """Return the text that is included in front of each source."""
        return self.header + (C_RULES if any(text.language == "c" for text in self.texts) else "")

    def _files(self) -> dict[str, str]:
        """Return a mapping from file name to content of the files in the folder of the build. They are the generated
        header, and sources given as strings.
        """
        files = {HEADER: self._included()}
        for text in self.texts:
            if text.path is None:
                # #line: messages of the compiler name the place that the author knows.
                files[f"code{SUFFIX[text.language]}"] = f'#line 1 "{text.name}"\n{text.content}'
        return files

    def _compile_command(self) -> list[str]:
        """Return the words of the compiler's command without output. In its paths, ``SOURCE_FOLDER`` stands for the
        folder of the build.
        """
        include = [f"-I{INCLUDE}", *(f"-I{folder}" for folder in self.include_dirs)]
        link = [f"-l{name}" for name in self.libraries]
        # The first source of the command is the unit with the signatures, which both languages accept.
        sources: list[str] = []
        for text in self.texts:
            if not text.language:
                continue
            path = str(text.path) if text.path is not None else f"{SOURCE_FOLDER}/code{SUFFIX[text.language]}"
            sources += [path] if self.is_cuda or text.language == "c++" else ["-x", "c", path, "-x", "none"]
        if not self.is_cuda:
            standard = STANDARD["c++"] if any(t.language == "c++" for t in self.texts) else ()
            command = [*self._host_compiler(), *HOST_FLAGS, *standard, "-include", f"{SOURCE_FOLDER}/{HEADER}"]
            return [*command, *include, *self.flags, *sources, *link]
        # nvcc hands these on to the host's compiler.
        host = [word for flag in HOST_FLAGS[1:] if flag != "-shared" for word in ("-Xcompiler", flag)]
        command = [str(self._find_nvcc()), "-O3", "-shared", *host, *STANDARD["cuda"], *self._architecture_flags()]
        return [*command, "-include", f"{SOURCE_FOLDER}/{HEADER}", *include, *self.flags, *sources, *link]

    def _architecture_flags(self) -> list[str]:
        """Return nvcc's flags for the requested architectures. If none were requested, the flags are for the GPUs of
        this machine, or for all major architectures if there is no GPU.
        """
        # A wheel is built for GPUs that the building machine need not have.
        names = list(self.architectures)
        if not names and torch.cuda.is_available():
            found = {torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())}
            names = [f"{major}{minor}" for major, minor in sorted(found)]
        return [gencode_flag(name) for name in names] or ["-arch=all-major"]

    def _host_compiler(self) -> list[str]:
        """Return the words of the command of the host's C++ compiler, with the flags in the environment variable
        ``CXX``. Raise ``SL423`` if the compiler is not on the ``PATH``.
        """
        programs, flags = requested_compiler()
        paths = [shutil.which(program) for program in programs]
        if not paths or None in paths:
            got = f"no {' '.join(programs) or 'c++'} on the PATH"
            raise error("SL423", where=self.op, got=got, expected="a C++ compiler")
        return [*map(str, paths), *flags]

    def _find_nvcc(self) -> Path:
        """Return the path of the first nvcc that is found. The environment variable ``CUDACXX`` is tried first, then
        the ``PATH``, the folders that ``CUDA_HOME`` and ``CUDA_PATH`` name, and ``/usr/local/cuda``. Raise ``SL423`` if
        there is none.
        """
        named = os.environ.get("CUDACXX", "")
        folders = [os.environ.get(name, "") for name in ("CUDA_HOME", "CUDA_PATH")] + ["/usr/local/cuda"]
        places = [named, shutil.which("nvcc") or "", *(f"{folder}/bin/nvcc" for folder in folders if folder)]
        for place in places:
            # For a path, ``which`` tests that the file may be executed.
            if place and (found := shutil.which(place)):
                return Path(found)
        raise error(
            "SL423",
            where=self.op,
            got="no nvcc: CUDACXX, the PATH, CUDA_HOME and /usr/local/cuda were searched",
            expected="nvcc, the compiler of CUDA C++",
            fix="install the CUDA toolkit, or set CUDACXX to the path of nvcc",
        )

    def _compiler_error(self, problem: str) -> ShiplapError:
        """Return the catalogue error for a compiler's output ``problem``. It is ``SL422`` for an unknown GPU
        architecture, and otherwise ``SL421``. For a missing header, the error's fix is to name its folder in
        ``include_dirs``.
        """
        where, names = f"{self.op}, kernel {self.symbol}", ", ".join(t.name for t in self.texts if t.language)
        unsupported = re.search(r"nsupported gpu architecture '?([\w-]+)'?", problem)
        if unsupported is not None:
            return error("SL422", where=where, got=unsupported[1], expected="an architecture that this nvcc knows")
        # As GCC and nvcc say it, and Clang.
        missing = re.search(r"fatal error: (?:([^:\n]+): No such file|'([^'\n]+)' file not found)", problem)
        if missing is not None:
            header = (missing[1] or missing[2]).strip()
            fix = self._fix_of_missing_header(header)
            return error("SL421", where=where, got=problem, expected=f"the header {header}", fix=fix)
        expected = f"{names} without an error of the compiler"
        return error("SL421", where=where, got=problem, expected=expected, fix=self._fix_of_error(problem))

    def _fix_of_missing_header(self, header: str) -> str:
        """Return the advice of the error for a ``header`` that the compiler does not find."""
        languages = {t.language for t in self.texts}
        if header.startswith(("torch/", "ATen/", "c10/", "pybind11/")):
            return (
                f"write {self.symbol} without tensors of torch: it takes the parameters that shiplap header prints, "
                "and data, shape and strides are fields of DLTensor. An extension of torch that is built already is "
                "declared with sl.adopt"
            )
        if "cuda" not in languages and header.startswith(("cuda", "cub/", "thrust/", "cooperative_groups")):
            return _AS_CUDA
        if "c++" not in languages and "cuda" not in languages and "." not in header:
            return 'compile the source as C++: name the file .cpp, or pass language="c++" beside code='
        return f'pass the folder of {header}, as in include_dirs=["/that/folder"]'

    def _has_words_of_cuda(self, problem: str) -> bool:
        """Return whether a compiler of C or C++ was given CUDA, from its output ``problem``, in which it may name a
        word of CUDA, and from the sources, since GCC may take ``__global__`` for a type of C.
        """
        if any(t.language == "cuda" for t in self.texts):
            return False
        if re.search(r"['‘]__(?:global|device|host|shared)__['’]", problem):
            return True
        kernels = (t.content for t in self.texts if t.language and "__CUDACC__" not in t.content)
        return any(re.search(r"^__global__ ", content, re.MULTILINE) for content in kernels)

    def _fix_of_error(self, problem: str) -> str:
        """Return the advice of the error for a compiler's output ``problem``. There is some for a name that nothing
        declares, a library that is not found, and a kernel that is not as its declaration. For other errors, return an
        empty string.
        """
        if absent := re.search(r"(?:cannot find|unable to find library) -l([\w.+-]+)", problem):
            plain = re.sub(r"^lib|\.(so|a)[.\d]*$", "", absent[1])
            if plain != absent[1]:
                return f'write libraries=["{plain}"], without "lib" in front and without the suffix'
            return (
                f"correct {absent[1]!r} in libraries=, or pass the folder of lib{absent[1]}.so or lib{absent[1]}.a as "
                'flags=["-L/that/folder"]'
            )
        # As GCC, and as Clang and nvcc say it. In a note or a warning an option is not the cause.
        option = re.search(r"error: unrecognized command[- ]line option ['‘\"](\S+?)['’\"]", problem)
        option = option or re.search(r"(?:error|fatal) *: [Uu]nknown (?:option|argument):? ['‘]?([^\s'’]+)", problem)
        if option is not None:
            return f"correct or remove {option[1]} in flags="
        if self._has_words_of_cuda(problem):
            return _AS_CUDA
        # A warning that stands beside the error has no part in it.
        problem = "\n".join(line for line in problem.splitlines() if "warning:" not in line)
        # As GCC says it for C++ and for C, and as nvcc and Clang do.
        unknown = re.search(
            r"['‘](\w+)['’] (?:was not declared|undeclared)|implicit declaration of function ['‘](\w+)|"
            r'call to undeclared (?:library )?function [\'‘](\w+)|identifier "(\w+)" is undefined|'
            r"use of undeclared identifier ['‘](\w+)",
            problem,
        )
        if unknown is not None:
            name = next(filter(None, unknown.groups()))
            # A note names the header of a function of the C library, and there may be such notes of other names.
            hint = re.search(
                rf"['‘]{name}['’] is defined in header ['‘](<[\w.]+>)|"
                rf"include (?:the header )?['‘]?(<[\w.]+>)[^\n]*['‘]{name}['’]",
                problem,
            )
            library = "<stdio.h>" if {t.language for t in self.texts} <= {"c", ""} else "<cstdio>"
            known = hint[1] or hint[2] if hint else library if name in ("snprintf", "printf", "fprintf") else ""
            example = f", which is {known}" if known else ""
            return f"write the #include of the header that declares {name}{example}, or correct the name"
        if re.search(
            rf"static declaration of ['‘]{self.symbol}\b|['‘]?{self.symbol}\b.* was declared [^\n]*static", problem
        ):
            return f"write {self.symbol} without static, which hides a function from other files"
        other = rf"(?:conflicting (?:types for|declaration)|ambiguating new declaration of)[^\n]*\b{self.symbol}\b"
        if re.search(rf"{other}|only in linkage|distinguished by return type|only in their return type", problem):
            return (
                f"give {self.symbol} the parameters and the result that shiplap header prints. If {self.symbol} is a "
                "function that is to stay as it is, add an adapter to the sources: a function of another name with "
                f"those parameters, which calls {self.symbol}. Pass its name as symbol= of sl.source"
            )
        member = re.search(r"['‘\"](?:const )?(?:struct )?DLTensor['’\"] has no member[^\n]*['‘\"](\w+)", problem)
        if member := member or re.search(r"no member named '(\w+)' in '(?:struct )?DLTensor'", problem):  # Clang
            in_c = {t.language for t in self.texts} <= {"c", ""}
            cast = "(const float*)x->data" if in_c else "static_cast<const float*>(x->data)"
            return (
                f"read a field of DLTensor in place of {member[1]}: data (cast it, as in {cast}), shape[i], "
                "strides[i], ndim, or dtype"
            )
        return ""
