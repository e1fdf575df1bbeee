"""A drop-in: programs that import ``spconv`` or ``flex_gemm`` run on shiplap, unedited.

``flex_gemm`` has the functions of FlexGEMM 1.x and of 2.0, and ``torch.ops.flex_gemm`` those of its low-level ops.

In a program, before its first import of either::

    from shiplap_sparse3d.drop_in import drop_in

    drop_in("spconv", "flex_gemm")

For a program that nobody edits: ``python -m shiplap_sparse3d.drop_in train.py --its --arguments``. With
``duplicates=True``, or ``--duplicates`` in front of the program, submanifold layers take voxels that share a cell on a
GPU and in graphs, as they always do on the CPU.

Graphs of ``torch.compile`` take values of ``fractions.Fraction`` as constants meanwhile: TRELLIS.2 keeps the scale of a
tensor in a tuple of them, multiplies it from level to level and looks caches up by its text, which Dynamo cannot write
before torch 2.15 otherwise.
"""

from __future__ import annotations

import importlib
import pkgutil
import runpy
import sys
from collections.abc import Callable, Sequence
from fractions import Fraction
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

from shiplap.plugin_api import error
from shiplap.plugin_api.containers import register_constant
from shiplap_sparse3d.spconv.shared import expect_duplicates

__all__ = ["DropIn", "drop_in"]

FACADES = {
    "spconv": (("spconv", "shiplap_sparse3d.spconv_package"), ("spconv.pytorch", "shiplap_sparse3d.spconv")),
    "flex_gemm": (("flex_gemm", "shiplap_sparse3d.flexgemm"),),
}
_torch_ops: list[Any] = []  # the registration of torch.ops.flex_gemm, which lasts as long as it is held
OF_SPCONV_1 = "conv", "functional", "identity", "modules", "pool", "tables"  # these stood at the top of the package


class DropIn:
    """The modules that :func:`drop_in` has put into ``sys.modules`` under the names of spconv and flex_gemm.
    :meth:`undo` removes them. As a context manager an instance removes them at the end of the block.
    """

    def __init__(self, modules: dict[str, ModuleType], forget: Callable[[], None]) -> None:
        """Store the ``modules`` that were put into ``sys.modules``, by name. Store ``forget``, which :meth:`undo`
        calls.
        """
        self._modules, self._forget = modules, forget

    def undo(self) -> None:
        """Remove the facades from ``sys.modules``, and restore the settings that :func:`drop_in` has changed. Facades
        are modules with another package's names that run on shiplap's layers. Imports of these names then find the real
        packages again.
        """
        for name, module in self._modules.items():
            if sys.modules.get(name) is module:
                del sys.modules[name]
        self._modules = {}
        self._forget()

    def __enter__(self) -> DropIn:
        """Return this object, which the end of the block undoes."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Undo the drop-in."""
        self.undo()


def drop_in(*names: str, duplicates: bool = False) -> DropIn:
    """Make imports of spconv and flex_gemm find shiplap's facades from now on. Facades are modules of the same names
    that run on shiplap's layers. Return an object that ends this by its ``undo()`` or at the end of its ``with`` block.

    ``names`` are ``"spconv"``, ``"flex_gemm"`` or both, and both if there are none. If ``duplicates`` is true,
    submanifold layers accept voxels that share a cell on a GPU and in graphs, too. Otherwise they do so on the CPU
    alone.

    Raises:
        ArgumentError: ``SL208`` for another name, and if the real package is already loaded, since objects of both
            packages would mix.
    """
    placed: dict[str, ModuleType] = {}
    for name in names or tuple(FACADES):
        if name not in FACADES:
            raise error("SL208", where="drop_in", got=repr(name), expected=" or ".join(map(repr, FACADES)))
        placed |= _facade_modules(name)
    for name, module in placed.items():
        # The real package is loaded, and objects of both would mix.
        if sys.modules.get(name, module) is not module:
            raise error(
                "SL208",
                where=f"drop_in, {name}",
                got="a module of that name, imported already",
                expected="a program that has not imported it",
                fix="call drop_in before the first import, or start with python -m shiplap_sparse3d.drop_in",
            )
    new = {name: module for name, module in placed.items() if name not in sys.modules}
    sys.modules.update(new)
    if "flex_gemm" in new:
        _torch_ops.append(placed["flex_gemm"].kernels.cuda.register_torch_ops())
    forget, before = register_constant(Fraction), expect_duplicates() if duplicates else None

    def restore_settings() -> None:
        """Remove what ``drop_in`` has registered with torch, and restore the setting whether submanifold layers accept
        voxels that share a cell.

        ``forget`` (which ends a registration), ``new`` (the placed modules) and ``before`` (the former setting or None)
        are variables of ``drop_in``.
        """
        forget()
        if "flex_gemm" in new:
            _torch_ops.clear()  # which removes torch.ops.flex_gemm
        if before is not None:
            expect_duplicates(before)

    return DropIn(new, restore_settings)


def _facade_modules(name: str) -> dict[str, ModuleType]:
    """Return the modules of the facade of the package ``name``, by the names under which programs import them, such as
    ``spconv.pytorch``. A facade has another package's names and runs on shiplap's layers.
    """
    modules: dict[str, ModuleType] = {}
    for alias, source in FACADES[name]:
        package = importlib.import_module(source)
        modules[alias] = package
        for inner in pkgutil.walk_packages(package.__path__, f"{source}."):
            modules[alias + inner.name.removeprefix(source)] = importlib.import_module(inner.name)
    if name == "spconv":
        modules |= {f"spconv.{inner}": modules[f"spconv.pytorch.{inner}"] for inner in OF_SPCONV_1}
    # The real cumm, if installed, serves as well.
    if name == "spconv" and "cumm" not in sys.modules and find_spec("cumm") is None:
        view = importlib.import_module("shiplap_sparse3d.spconv.tensorview")
        cumm = ModuleType("cumm", "What callers of spconv's voxelisation use of cumm: ``tensorview``.")
        cumm.tensorview = view  # type: ignore[attr-defined]
        modules |= {"cumm": cumm, "cumm.tensorview": view}
    return modules


def _drop_in_error(got: str) -> int:
    """Print the error ``SL613`` for a command line without a program to stderr, and return the exit status 2. ``got``
    says what is missing.
    """
    words = {"where": "python -m shiplap_sparse3d.drop_in", "got": got, "expected": "a program to run"}
    print(error("SL613", **words, fix="pass the path of a script, or -m and the name of a module"), file=sys.stderr)
    return 2


def main(arguments: Sequence[str]) -> None:
    """Run the program that the command line ``arguments`` name, with imports of spconv and flex_gemm that find
    shiplap's layers.

    The arguments are ``[--duplicates] script.py [argument ...]`` or ``[--duplicates] -m module [argument ...]``.
    ``--duplicates`` lets submanifold layers accept voxels that share a cell. Exit with status 2 if there is no program,
    and with status 0 after ``-h`` or ``--help``.
    """
    duplicates = [*arguments[:1]] == ["--duplicates"]
    arguments = arguments[1:] if duplicates else arguments
    if not arguments or arguments[0] in ("-h", "--help"):
        print("usage: python -m shiplap_sparse3d.drop_in [--duplicates] (SCRIPT | -m MODULE) [ARGUMENT ...]")
        raise SystemExit(0 if arguments else 2)
    if arguments[0] == "-m" and len(arguments) == 1:
        raise SystemExit(_drop_in_error("no module after -m"))
    if arguments[0] != "-m" and not Path(arguments[0]).exists():
        raise SystemExit(_drop_in_error(f"no file {arguments[0]}"))
    with drop_in(duplicates=duplicates):
        if arguments[0] == "-m":
            sys.argv = list(arguments[1:])
            # As Python does for ``-m``, whose imports find modules of the current folder.
            sys.path[0] = str(Path.cwd())
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = list(arguments)
            # As Python does for a script: imports find the modules next to it.
            sys.path[0] = str(Path(arguments[0]).resolve().parent)
            runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
