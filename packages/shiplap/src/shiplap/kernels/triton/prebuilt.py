"""The compiled forms of Triton kernels that came with an installed package, found by a digest of their code.

``shiplap package`` puts them into the folder ``_shiplap/cubins`` of the package that declares the op. A form is
identified by the digest of the input of Triton's compiler. The digest covers the text of the kernel and of the
functions and constants that it uses, without comments and blanks. It also covers the types, constants and options of
the call, and the architecture. It covers no version of Python or of Triton, since a cubin needs neither. Code that was
edited later has another digest, and is compiled on this machine.
"""

from __future__ import annotations

import hashlib
import inspect
import io
import json
import textwrap
import tokenize
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FunctionType
from typing import Any

import torch

from shiplap import safe_io
from shiplap.codegen.launcher import Cubin
from shiplap.declare.code_walk import is_followed, values_used
from shiplap.dispatch import Op
from shiplap.dispatch.package_folder import package_folders
from shiplap.errors import error, notice
from shiplap.kernels.triton.specialize import Key, SpecializedForm, compile_options

FOLDER, INDEX, FORMAT = "cubins", "index.json", "shiplap-cubins/1"
LIMIT = 1 << 26  # bytes of one cubin
INDEX_LIMIT = 1 << 24
_BLANK = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.ENCODING, tokenize.ENDMARKER)
_SHAPE = {tokenize.INDENT: "{", tokenize.DEDENT: "}"}


@dataclass(frozen=True)
class PrebuiltRow:
    """A row of the index of prebuilt kernels.

    Attributes:
        identity: the digest of the input of Triton's compiler, which is also the name of the file.
        kernel: the name of the Python function.
        architecture: the GPU architecture.
        name: the name of the kernel in the cubin.
        threads: the number of threads per block.
        shared: the bytes of shared memory.
        sha256: the checksum of the file.
    """

    identity: str
    kernel: str
    architecture: int
    name: str
    threads: int
    shared: int
    sha256: str


def prebuilt_form_digest(kernel: Any, form: SpecializedForm, architecture: int) -> str:
    """Return a digest, 32 hexadecimal digits, of the input of Triton's compiler for ``form`` of ``kernel`` on
    ``architecture``. A form holds types, constants and options of the arguments. Return an empty string if the kernel's
    source is unknown.
    """
    try:
        lines = list(_kernel_source_parts(kernel, set()))
    except (OSError, TypeError, SyntaxError, tokenize.TokenError):
        return ""
    # Not sorted: the order of the parameters is that of a launch.
    lines += [f"{name}: {kind}" for name, kind in form.signature.items()]
    lines += [f"{place}={_stable_value_text(value)}" for place, value in sorted(form.constants.items())]
    lines += [f"{place} {value}" for place, value in sorted(form.attributes.items())]
    lines += [f"{name}={_stable_value_text(value)}" for name, value in sorted(compile_options(kernel, form).items())]
    return hashlib.sha256("\n".join([*lines, f"sm_{architecture}"]).encode()).hexdigest()[:32]


def _kernel_source_parts(kernel: Any, seen: set[int]) -> Iterator[str]:
    """Yield the strings on which a kernel depends. They are its source code, its globals and captured values, and the
    source code of the functions of its package that it uses. A function whose id is in ``seen`` is left out, and each
    further one is added there.
    """
    compiled = isinstance(kernel, _jit_function_type())
    function = kernel.fn if compiled else kernel
    # Kernels may call each other.
    if id(function) in seen:
        return
    seen.add(id(function))
    if not isinstance(function, FunctionType):
        yield _stable_value_text(kernel)
        return
    # Of a kernel, the text as it was when it was decorated, whatever the file says by now.
    yield " ".join(_source_tokens(kernel.src if compiled else inspect.getsource(function)))
    yield _stable_value_text([function.__defaults__, function.__kwdefaults__])
    for name, value in values_used(function):
        yield f"{name}={_stable_value_text(value)}"
        yield from (
            _kernel_source_parts(value, seen)
            if (callable(value) and is_followed(value)) or _is_jit_function(value)
            else ()
        )


def _jit_function_type() -> type[Any]:
    """Import Triton and return the class of the functions that its decorator ``triton.jit`` makes."""
    from triton.runtime.jit import JITCallable

    kind: type[Any] = JITCallable
    return kind


def _is_jit_function(value: object) -> bool:
    """Return whether Triton compiles ``value``, a decorated function, along with the kernel that uses it. This is not
    so for functions of Triton's own package.
    """
    return isinstance(value, _jit_function_type()) and not str(value.__module__).startswith("triton.")


def _source_tokens(text: str) -> Iterator[str]:
    """Yield the tokens of the Python source code ``text`` as strings, without comments and empty lines. The end of a
    line is ``;``, and indentation of any width becomes a brace.
    """
    for token in tokenize.generate_tokens(io.StringIO(textwrap.dedent(text)).readline):
        if token.type not in _BLANK:
            yield _SHAPE.get(token.type, token.string)
        elif token.type == tokenize.NEWLINE:
            yield ";"


def _stable_value_text(value: object) -> str:
    """Return ``value`` as a string without addresses. The string is the same for every version of Python and in every
    process. A function, class or other object is represented by its qualified name or that of its class.
    """
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(map(_stable_value_text, value))}]"
    if isinstance(value, Mapping):
        return _stable_value_text([[k, v] for k, v in value.items()])
    if value is None or isinstance(value, (bool, int, float, str, bytes)):
        return repr(value)
    if isinstance(value, torch.dtype) or type(value).__name__ in ("dtype", "constexpr"):  # of torch, and of Triton
        return str(value)
    # Its text is in the digest apart, as far as it belongs to the package.
    return value.__qualname__ if isinstance(value, (FunctionType, type)) else type(value).__qualname__


# --- at the user's ----------------------------------------------------------------------------------------------------


def find_prebuilt_form(
    op: Op, kernel: Any, form: SpecializedForm, number: int, key: Key, architecture: int
) -> Cubin | None:
    """Return the compiled kernel for ``form`` of launch ``number`` from the package of ``op``, or None if there is
    none. A form holds types, constants and options of the arguments, and ``key`` is the form as integers. Issue a
    notice if a file is damaged.
    """
    for folder in package_folders(op):
        rows = _read_index_rows(folder / FOLDER)
        row = rows.get(prebuilt_form_digest(kernel, form, architecture)) if rows else None
        if row is None:
            continue
        path = folder / FOLDER / f"{row.identity}.cubin"
        try:
            image = safe_io.read_file(path, LIMIT, safe_io.NAMED)
            # A damaged cubin would fail in the driver, or compute something else.
            if hashlib.sha256(image).hexdigest() != row.sha256:
                raise ValueError("its checksum does not fit: it was changed or cut short")
        except (OSError, ValueError) as e:
            notice(
                f"cubin {path}",
                f"{op.spec.name} compiles a kernel that its package has: {path}: {safe_io.unsafe_reason(e)}",
            )
            continue
        return Cubin(number, architecture, key, image, row.name, row.threads, row.shared)
    return None


@cache
def _read_index_rows(folder: Path) -> dict[str, PrebuiltRow]:
    """Return the rows of the index of prebuilt kernels in ``folder`` by their digests. The dict is empty if there is no
    index. It is also empty if the index cannot be read, for which a notice is issued.
    """
    if not (folder / INDEX).is_file():
        return {}
    try:
        about = safe_io.parse_json(safe_io.read_file(folder / INDEX, INDEX_LIMIT, safe_io.NAMED))
        listed = about.get("cubins") if isinstance(about, dict) and about.get("format") == FORMAT else None
        if not isinstance(listed, list):
            raise ValueError(f"not of format {FORMAT}")
        return {row.identity: row for row in map(_parse_index_row, listed)}
    except (OSError, ValueError) as e:
        notice(f"cubins {folder}", f"{folder / INDEX} cannot be used, kernels are compiled: {safe_io.unsafe_reason(e)}")
        return {}


def _parse_index_row(content: object) -> PrebuiltRow:
    """Return a row of the index from ``content``, a parsed JSON value. Raise ``ValueError`` if the value is no such
    row.
    """
    import msgspec

    try:
        row = msgspec.convert(content, PrebuiltRow)
    except msgspec.ValidationError as e:
        raise ValueError(str(e)) from None
    # The identity becomes part of a path.
    if not row.identity.isalnum() or row.threads <= 0 or row.shared < 0:
        raise ValueError(f"no identity, threads or shared memory: {row.identity[:40]!r}")
    return row


# --- where a package is made ------------------------------------------------------------------------------------------


def write_cubins(folder: Path, forms: Iterable[tuple[Any, SpecializedForm, Cubin]]) -> list[PrebuiltRow]:
    """Write compiled kernels with an index to ``folder/cubins``, and return the rows of the index. Each of ``forms`` is
    a tuple of a Triton kernel, a form and a cubin. A form holds types, constants and options of a launch's arguments.

    Raises:
        ShippingError: ``SL308`` if the source of a kernel is unknown, for example because it was typed into an
            interpreter.
    """
    rows: dict[str, PrebuiltRow] = {}
    for kernel, form, cubin in forms:
        known = prebuilt_form_digest(kernel, form, cubin.architecture)
        if not known:
            raise error(
                "SL308",
                where=f"Triton kernel {cubin.name}",
                got="its source text cannot be read",
                expected="a function in a file of the package",
                fix="define the kernel in a module of the package",
            )
        digest = hashlib.sha256(cubin.image).hexdigest()
        rows[known] = PrebuiltRow(
            known, kernel.fn.__name__, cubin.architecture, cubin.name, cubin.threads, cubin.shared, digest
        )
        (folder / FOLDER).mkdir(parents=True, exist_ok=True)
        safe_io.write_bytes(folder / FOLDER / f"{known}.cubin", cubin.image)
    # Sorted, so that the same package has the same bytes.
    listed = [rows[known] for known in sorted(rows)]
    if listed:
        about = {"format": FORMAT, "cubins": [vars(row) for row in listed]}
        safe_io.write_text(folder / FOLDER / INDEX, json.dumps(about, indent=1) + "\n")
    return listed
