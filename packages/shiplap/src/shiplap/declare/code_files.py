"""Digests of files, for code that cannot be followed, and of the content of data."""

from __future__ import annotations

import ast
import ctypes
import hashlib
import os
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.util import find_spec
from pathlib import Path
from types import CodeType, FunctionType, ModuleType

from torch import Tensor
from torch.nn import Parameter

from shiplap.torch_private.dispatcher_calls import without_modes

# A version stands for the code of these libraries. Keys of choices, proofs and torch's caches name those of the first.
STABLE = frozenset({"builtins", "jaxtyping", "numpy", "shiplap", "shiplap_headers", "torch", "triton"})
_VERSIONED = (
    "beartype cuda cupy cutlass einops functorch hypothesis jinja2 msgspec networkx numba pandas pytest _pytest "
    "pybind11 rich scipy sympy torchaudio torchvision transformers typer typing_extensions "
    "vllm"
)
VERSIONED = frozenset(_VERSIONED.split())
SUFFIXES = (".py", ".pyx", ".c", ".cc", ".cpp", ".cu", ".cuh", ".h", ".hpp", ".jinja", *EXTENSION_SUFFIXES)
MOST_FILES = 2000
STANDARD = tuple(os.path.join(os.path.realpath(sysconfig.get_path(p)), "") for p in ("stdlib", "platstdlib"))
SITES = ("site-packages", "dist-packages")


def top_package(module: str | None) -> str:
    """Return the top-level package of a dotted module name, or an empty string for None."""
    return (module or "").partition(".")[0]


@cache
def version_covers_code(top: str) -> bool:
    """Return whether the version of the package ``top`` identifies its code, so that its files need no digest. This
    holds for Python's standard library, torch and a list of well-known libraries.
    """
    if top in STABLE or top in VERSIONED:
        return True
    if top not in sys.stdlib_module_names:
        return False
    file = _module_file(sys.modules.get(top))  # an author's module may have the name of one of Python's
    return file is None or (os.path.realpath(file).startswith(STANDARD) and not any(s in file for s in SITES))


@cache
def version_text(top: str) -> str:
    """Return ``name version`` for the well-known library ``top``. If its version is not known, return only the name.

    Return only the name also for any other package. For Python and torch, digests include the version elsewhere.
    """
    from importlib.metadata import PackageNotFoundError, version

    if top not in VERSIONED:
        return top
    try:
        return f"{top} {version(top.strip('_'))}"
    except PackageNotFoundError:  # a build for one device may be distributed under another name
        module = sys.modules.get(top)
        return f"{top} {'' if module is None else vars(module).get('__version__', '')}".rstrip()


def file_digest(path: str | Path) -> str:
    """Return a digest of a file's current content as 32 hexadecimal digits, or ``no such file`` if it cannot be read.
    The content is read again only if the file's size, time of change or inode has changed.
    """
    try:
        # Size, time and inode key the cache, so that an unchanged file is read once.
        about = os.stat(path)
        return _file_content_digest(str(path), about.st_size, about.st_mtime_ns, about.st_ino)
    except OSError:
        return "no such file"


@cache
def _file_content_digest(path: str, _size: int, _written: int, _inode: int) -> str:
    """Return a digest of a file's bytes as 32 hexadecimal digits. The other arguments (size, time of change and inode)
    are only keys of the cache.
    """
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        # Compiled libraries may be too large to be read at once.
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()[:32]


def extension_file(module: str | None) -> str | None:
    """Return the path of the file from which a loaded module comes if the file does not end in ``.py``. This is so for
    a compiled extension. Return None for any other module, and for a module that is not loaded.
    """
    file = _module_file(sys.modules.get(module or ""))
    return file if file is not None and not file.endswith(".py") else None


def module_files(module: str) -> list[tuple[str, str]]:
    """Return ``(name, digest)`` of all source files on which a function of ``module`` may depend.

    They are all files of its package. If the module is outside packages, they are its own file and the files in its
    folder that it imports. In that case the list is empty if the file no longer has the loaded code, or if the module
    has no file.
    """
    loaded = sys.modules.get(module)
    package = _regular_package(loaded)
    if package is not None:
        listed = _files_below(package)
        return [(f.relative_to(package.parent).as_posix(), file_digest(f)) for f in listed]
    file = _module_file(loaded)
    # A file that was edited after its import does not describe the loaded code.
    if file is None or not _file_has_function_code(file, loaded):
        return []
    return [(f.name, file_digest(f)) for f in _imported_beside(Path(file))]


def spec_files(name: str) -> list[tuple[str, str]]:
    """Return ``(name, digest)`` of the source files of the module ``name``, which a function imports when it runs. The
    module is found without importing it. If there is none, return ``[(name, "no such module")]``.
    """
    if name in sys.modules and (files := module_files(name)):
        return files
    try:
        about = find_spec(name)
    except (ImportError, ValueError):
        about = None
    # A namespace package has no file of its own.
    if about is None or about.origin is None:
        return [(name, "no such module")]
    path = Path(about.origin)
    if about.submodule_search_locations is not None or "." in name:
        return [(f.relative_to(path.parent).as_posix(), file_digest(f)) for f in _files_below(path.parent)]
    return [(f.name, file_digest(f)) for f in _imported_beside(path)]


def _module_file(module: ModuleType | None) -> str | None:
    """Return the file from which a module was loaded. Return None if ``module`` is None or has no file."""
    file = vars(module).get("__file__") if module is not None else None
    return file if isinstance(file, str) else None


def _regular_package(module: ModuleType | None) -> Path | None:
    """Return the folder of the outermost package around ``module`` that has an ``__init__`` file. Return None if there
    is no such package.
    """
    name = vars(module).get("__package__") if module is not None else None
    outermost = None
    while isinstance(name, str) and name:
        file = _module_file(sys.modules.get(name))
        if file is None:
            break
        if Path(file).name.startswith("__init__."):
            outermost = Path(file).parent
        name = name.rpartition(".")[0]
    return outermost


def _files_below(folder: Path) -> list[Path]:
    """Return the source files in ``folder`` and below, sorted, without caches such as ``__pycache__``. At most
    ``MOST_FILES`` are returned.
    """
    listed = (p for p in folder.rglob("*") if p.name.endswith(SUFFIXES) and "__pycache__" not in p.parts)
    # The order in which a folder lists its files differs between machines.
    return sorted(listed)[:MOST_FILES]


def _file_has_function_code(file: str, module: ModuleType | None) -> bool:
    """Return whether the current content of ``file`` contains the code of every function that the loaded ``module`` has
    from that file. Return False if the file cannot be read or compiled.
    """
    try:
        held = set(_code_objects_within(compile(Path(file).read_bytes(), file, "exec", dont_inherit=True)))
    except (OSError, SyntaxError, ValueError):
        return False
    functions = [v for v in (vars(module) if module is not None else {}).values() if isinstance(v, FunctionType)]
    return all(f.__code__ in held for f in functions if f.__code__.co_filename == file)


def _code_objects_within(code: CodeType) -> Iterator[CodeType]:
    """Yield a code object and the code objects of all functions and classes defined within it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _code_objects_within(constant)


def _imported_beside(first: Path) -> list[Path]:
    """Return the file ``first`` and the Python files in its folder that it imports, directly or through each other. For
    an imported package, all its source files are returned. The search ends when it has found ``MOST_FILES`` files.
    """
    known: dict[Path, None] = {}
    left = [first]
    while left and len(known) < MOST_FILES:
        at = left.pop(0)
        if at in known or not at.is_file():
            continue
        known[at] = None
        # A file beside may be a module or a package, and only those that exist are kept.
        for name in _imports_in_file(at):
            package = first.parent / name
            left.append(first.parent / f"{name}.py")
            left += _files_below(package) if (package / "__init__.py").is_file() else ()
    return list(known)


def _imports_in_file(path: Path) -> Iterable[str]:
    """Return the top-level names that a Python file imports, without duplicates. The result is empty if the file cannot
    be parsed or does not end in ``.py``.
    """
    if path.suffix != ".py":
        return ()
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return ()
    names: dict[str, None] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= dict.fromkeys(top_package(alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names |= dict.fromkeys([top_package(node.module)] if node.module else [a.name for a in node.names])
    return names


@cache
def shiplap_digest() -> str:
    """Return a digest of all of Shiplap's own source files as 32 hexadecimal digits. It is used in place of a walk over
    the code of one of Shiplap's functions.
    """
    digest = hashlib.sha256()
    for file in sorted(Path(__file__).parents[1].rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:32]


# --- data -------------------------------------------------------------------------------------------------------------

_tensors: dict[int, tuple[Tensor, tuple[int, ...], str]] = {}  # by id, which lasts while the tensor is held
_MOST_TENSORS = 64


def tensor_text(value: Tensor) -> tuple[str, bool]:
    """Return ``(text, readable)`` for a tensor. ``text`` holds its class, dtype, device type, shape and a digest of its
    values.

    If the values cannot be read, as during a capture or for a tensor subclass, ``text`` lacks the digest and
    ``readable`` is false. A tensor on the device ``meta`` has no values and counts as readable.
    """
    form = f"{type(value).__name__} {value.dtype} {value.device.type} {tuple(value.shape)}"
    if value.layout.__repr__() != "torch.strided" or type(value) not in (Tensor, Parameter):
        return f"{form} {value.layout}", False
    if value.device.type == "meta":
        return form, True
    # Inference tensors have no version.
    state = value._version if not value.is_inference() else 0, value.data_ptr(), value.numel()
    # The tensor is held beside its digest, so that its id is not given to another one.
    held = _tensors.get(id(value))
    if held is None or held[1] != state:
        try:
            digest = _tensor_values_text(value)
        except RuntimeError:  # a device that cannot be read now, as during a capture
            return form, False
        if len(_tensors) >= _MOST_TENSORS:
            _tensors.clear()
        held = _tensors[id(value)] = value, state, digest
    return f"{form} {held[2]}", True


def _tensor_values_text(value: Tensor) -> str:
    """Return a digest of a tensor's values as 32 hexadecimal digits. The values are read through the CPU, outside
    all torch modes.
    """
    # Under a fake mode, for example, the copy would have no values.
    with without_modes():
        plain = value.detach().cpu().contiguous()
        size = plain.numel() * plain.element_size()
        content = ctypes.string_at(plain.data_ptr(), size) if size else b""
    return hashlib.sha256(content).hexdigest()[:32]
