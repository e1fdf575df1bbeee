"""``TARGET`` → declared ops: ``module[:op]``, ``path/to/file.py[:op]`` or ``namespace::name``."""

from __future__ import annotations

import contextlib
import difflib
import glob
import importlib
import importlib.util
import inspect
import os
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from shiplap import safe_io
from shiplap.cli.families import load_families
from shiplap.errors import ShiplapError, error, notice
from shiplap.safe_io.module_path import OWNED_FOLDER, append_module_folder

if TYPE_CHECKING:
    from shiplap.dispatch import Op

# A name may be qualified itself, as in file.py:namespace::name.
_FORM = re.compile(r"^(?P<home>[^:]+)(?::(?P<name>[^:]+(?:::[^:]+)?))?$")
# Modules made from files get this prefix where their own name is not free.
OWN_NAME = "shiplap_target_"
# An op that is declared already, or that an installed family declares.
_QUALIFIED = re.compile(r"^\w+::\w+$")


def split_target(target: str) -> tuple[str, str]:
    """Return ``(home, name)`` of a target, a string such as ``module:op``. ``home`` is the module or file, and ``name``
    the op in it. Each of them is empty if the target lacks it.

    Raise ``SL501`` if the string has another form.
    """
    if _QUALIFIED.match(target):
        return "", target
    # A name may contain "::", so a plain split at the colon would cut it.
    match = _FORM.match(target)
    if match is None:
        raise error(
            "SL501",
            where=target,
            what="the target cannot be understood",
            got=target,
            expected="module:op, path/to/file.py[:op] or namespace::name",
        )
    return match["home"], match["name"] or ""


def resolve_targets(targets: Iterable[str]) -> list[Op]:
    """Return the ops that ``targets`` name, in order and without repetitions. Targets are strings such as ``module``,
    ``file.py:op`` or ``namespace::name``.

    Raise ``SL501``, with a suggestion, for a target without an op.
    """
    ops: dict[str, Op] = {}
    for target in targets:
        for op in _resolve_target(target):
            ops.setdefault(op.spec.name, op)
    return list(ops.values())


def _resolve_target(target: str) -> list[Op]:
    """Return the ops of one target, a string such as ``module`` or ``file.py:op``. They are all ops of the module, or
    the one op that is named. Raise ``SL501`` if there are none.
    """
    home, name = split_target(target)
    if not home:
        return [_find_registered_op(name)]
    module = import_home(home)
    declared = ops_of(module)
    if name:
        return [_find_op_in_module(target, module, name, declared)]
    if not declared:
        # A draft looks like a declaration, and has an error of its own.
        _refuse_drafts(vars(module).values())
        raise error(
            "SL501",
            where=target,
            what="the target declares no op",
            got=f"{module.__name__} declares none",
            expected="a module that uses sl.op or sl.adopt",
        )
    return declared


def _find_registered_op(name: str) -> Op:
    """Return the op with the qualified name ``namespace::name``. If it is not declared yet, the installed families
    (packages of ops) are imported. Raise ``SL501`` if there is no such op.
    """
    from shiplap.dispatch import registry

    # Importing all families takes time, so they are imported only for a name that is not declared yet.
    if registry.find_declared_op(name) is None:
        load_families()
    op = registry.find_declared_op(name)
    if op is not None:
        return op
    names = [o.spec.name for o in registry.declared_op_list()]
    raise unknown_name("an op", name, names, where=name, fix=f"pass the module that declares it as well: module:{name}")


def _find_op_in_module(target: str, module: ModuleType, name: str, declared: Sequence[Op]) -> Op:
    """Return the op ``name`` of ``module``. ``name`` is the name of a variable in it, or the own name of one of the ops
    ``declared``. Raise ``SL501``, with the existing names, if there is no such op. The error names ``target``.
    """
    from shiplap.dispatch import Op

    value = getattr(module, name, None)
    if isinstance(value, Op):
        return value
    _refuse_drafts([value])
    for op in declared:
        if name in (op.spec.opname, op.spec.name):
            return op
    raise unknown_name("an op", name, [op.spec.opname for op in declared], where=target, value=value)


def _refuse_drafts(values: Iterable[Any]) -> None:
    """Raise ``SL113`` if one of ``values`` is an unfinished draft that ``shiplap init`` wrote."""
    from shiplap.scaffold import UnfinishedOp

    for value in values:
        if isinstance(value, UnfinishedOp):
            raise error("SL113", where=value.name, got="a draft of 'shiplap init'", expected="a finished declaration")


def unknown_name(
    kind: str, name: str, names: Sequence[str], *, where: str, value: object = None, got: str = "", fix: str = ""
) -> ShiplapError:
    """Return the error ``SL501`` for the name ``name``, which does not exist, with a suggestion from ``names``, the
    existing names. ``got`` and ``fix`` replace those of the error if they are not empty.

    ``kind`` is the kind of the wanted object, with an article, such as ``"an op"``. ``where`` is the place where it was
    searched for. ``value`` is an object of another kind that has the name, or None.
    """
    return error(
        "SL501",
        where=where,
        # ``kind`` without its article.
        what=f"no {kind.partition(' ')[2]} has this name",
        got=got or (name if value is None else f"{name} is {type(value).__name__}"),
        expected=near_miss(name, names, kind),
        fix=fix,
    )


def near_miss(wanted: str, names: Sequence[str], kind: str = "an op") -> str:
    """Return a phrase with the name among ``names`` that ``wanted`` probably means. If no name is similar, the phrase
    lists all names. ``kind`` is the kind of the named object, with an article, such as ``"an op"``.
    """
    close = difflib.get_close_matches(wanted, names, n=1, cutoff=0.6)
    if close:
        return f"did you mean {close[0]!r}?"
    return f"one of {', '.join(names)}" if names else f"{kind}; none is declared here"


def ops_of(module: ModuleType) -> list[Op]:
    """Return the ops that ``module`` or its imported submodules declare, sorted by the module and the line of their
    declaration. Ops imported from elsewhere are left out.
    """
    from shiplap.dispatch import Op, registry

    # Only modules that are imported are searched: an import of every submodule could have side effects.
    inside = [
        m for n, m in sorted(sys.modules.items()) if _is_in_package(n, module.__name__) and isinstance(m, ModuleType)
    ]
    attributes = (v for m in inside for v in list(vars(m).values()) if isinstance(v, Op))
    ops = {
        op.spec.name: op
        for op in (*attributes, *registry.declared_op_list())
        if _is_in_package(op.__module__, module.__name__)
    }
    return sorted(ops.values(), key=_declaration_position)


def _declaration_position(op: Op) -> tuple[str, int]:
    """Return the module name and the line of the declaration of ``op``, as a sort key. The line is 0 if it is not
    known.
    """
    code = getattr(inspect.unwrap(op.reference), "__code__", None)
    return op.__module__, code.co_firstlineno if code else 0


def _is_in_package(name: str, package: str) -> bool:
    """Return whether the module ``name`` is the package ``package`` or a module inside of it."""
    return name == package or name.startswith(package + ".")


def import_home(home: str) -> ModuleType:
    """Import and return the module ``home``, which is a dotted name or the path of a ``.py`` file. Raise ``SL501`` if
    it does not exist, and ``SL601`` if the import raises.
    """
    if home.endswith(".py"):
        return _import_file(Path(home))
    if home.startswith(".") or os.sep in home:  # importlib takes a name such as "." for a relative one
        what = "the file holds no Python" if Path(home).is_file() else "the path is not a file"
        expected = "a file whose name ends in .py, or the dotted name of a module"
        raise error("SL501", where=home, what=what, got=home, expected=expected)
    find_in_current_folder(home)
    return _import_module(home)


def find_in_current_folder(name: str) -> None:
    """Append the current folder to the module search path if the module ``name`` is found only there. Raise ``SL501``
    if other users can write to that folder.
    """
    package, here = name.split(".")[0], Path.cwd()
    # find_spec raises ValueError for a loaded module without a spec, such as __main__.
    with contextlib.suppress(ImportError, ValueError):
        if importlib.util.find_spec(package) is not None:
            return
    # A module is a folder, or a file with a suffix such as .py or .so.
    if "/" in package or not ((here / package).is_dir() or any(here.glob(f"{glob.escape(package)}.*"))):
        return
    if refused := append_module_folder(here, OWNED_FOLDER):
        raise error(
            "SL501",
            where=name,
            what="modules of the current folder are not imported, as another user could have written them",
            got=refused,
            expected="an installed module, or a folder that only you can write",
            fix="name the file of the module, as in ./ops.py, or install its package",
        )


def _import_module(name: str) -> ModuleType:
    """Import and return the module ``name``. Raise ``SL501`` if there is none, and ``SL601`` if its import raises."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as e:
        # A module that exists may import another one that does not. That is an error of the module, not of the target.
        if e.name is None or not _is_in_package(name, e.name):
            raise _not_imported(name, e) from None
        if Path(name).is_file():
            what, expected = "the file holds no Python", "a file whose name ends in .py"
            raise error("SL501", where=name, what=what, got=name, expected=expected) from None
        raise error(
            "SL501",
            where=name,
            what="the module does not exist",
            got=f"no module named {e.name!r}",
            expected="an installed module, or one in the current directory",
        ) from None
    except (ShiplapError, KeyboardInterrupt):
        raise
    except BaseException as e:  # a module may even exit
        raise _not_imported(name, e) from e


def _import_file(path: Path) -> ModuleType:
    """Run the Python file ``path`` as a module and return the module. Raise ``SL501`` if the file is missing or other
    users can write it, and ``SL601`` if running it raises.
    """
    if not path.is_file():
        siblings = [p.name for p in path.parent.glob("*.py")] if path.parent.is_dir() else []
        close = difflib.get_close_matches(path.name, siblings, n=1)
        expected = f"did you mean {str(path.parent / close[0])!r}?" if close else "a Python file"
        raise error("SL501", where=str(path), what="the file does not exist", got=str(path), expected=expected)
    try:
        os.close(safe_io.open_file(path, safe_io.NAMED))
    except safe_io.Distrusted as e:
        what, expected = "another user could have written the file", "a file that only you or its owner can write"
        fix = "copy it to a folder of your own, after you have read it"
        raise error(
            "SL501", where=str(path), what=what, got=safe_io.unsafe_reason(e), expected=expected, fix=fix
        ) from None
    name, spec = _module_of(path.resolve())
    if spec is None:
        return _import_module(name)
    # The module is entered before it runs, as dataclasses and pickle look their module up by name.
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException as e:
        # A second import would otherwise find the half-initialised module.
        del sys.modules[name]
        if isinstance(e, (ShiplapError, KeyboardInterrupt)):
            raise
        raise _not_imported(str(path), e) from e
    return module


def _module_of(path: Path) -> tuple[str, Any]:
    """Return ``(name, spec)`` for the import of the file ``path``. If an ``import`` statement finds the file, they are
    its module name and None. Otherwise they are a name with the prefix ``OWN_NAME`` and a spec that loads the file.
    """
    parts, root = [path.stem], path.parent
    while (root / "__init__.py").is_file():
        parts.insert(0, root.name)
        root = root.parent
    known = [Path(entry) for entry in sys.path if Path(entry).is_absolute() and root.is_relative_to(entry)]
    if known:  # a part of a namespace package, unless the root itself is looked in
        outer = max(known, key=lambda entry: len(entry.parts))
        parts[:0] = root.relative_to(outer).parts
    elif refused := append_module_folder(root):
        notice(f"folder {root}", f"modules beside {path.name} are not imported: {refused}")
    name = ".".join(parts)
    # The directory may be new in `sys.path`, or the file newer than Python's cache of the directory.
    importlib.invalidate_caches()
    try:
        spec = importlib.util.find_spec(name)
    except Exception:  # a parent package that raises, or a __main__ without a spec: then the file alone
        spec = None
    if spec is not None and spec.origin is not None and Path(spec.origin).resolve() == path:
        return name, None
    own = OWN_NAME + path.stem
    return own, importlib.util.spec_from_file_location(own, path)


def _not_imported(where: str, e: BaseException) -> ShiplapError:
    """Return the error ``SL601`` for an import of ``where``, a module or file, that failed with ``e``. The error names
    the innermost line of the user's code.
    """
    frames = _user_frames(e)
    at = f" ({frames[-1]})" if frames else ""
    return error("SL601", where=where, got=f"{type(e).__name__}: {e}{at}", expected="a module that imports")


def _user_frames(e: BaseException) -> list[str]:
    """Return ``file:line`` of those frames in the traceback of ``e`` that are in the user's code. The innermost frame
    is the last one.
    """
    import traceback

    # Frames of the import system and of this file say nothing about the user's module.
    ours = (importlib.__file__, __file__)
    return [
        f"{f.filename}:{f.lineno}"
        for f in traceback.extract_tb(e.__traceback__)
        if f.filename not in ours and not f.filename.startswith("<")
    ]
