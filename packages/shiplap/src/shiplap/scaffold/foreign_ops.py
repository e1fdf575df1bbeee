"""The ops that modules of other distributions register while a package is imported."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType, TracebackType
from typing import Any

from shiplap.torch_private.dispatcher_library import registered_names


class ForeignOps(MetaPathFinder):
    """A context in which modules of other distributions than that of ``package`` are noticed when they are imported.
    ``names`` are the names of the ops that they have registered.

    A package imports others, and torch itself registers some of its ops only when a module of it is imported. Whether a
    module belongs to another distribution follows from the metadata of the installed ones. A module without metadata
    counts as the package's own.
    """

    def __init__(self, package: str) -> None:
        """Store which modules belong to other distributions than that of ``package``."""
        owners = importlib.metadata.packages_distributions()
        own = set(owners.get(package.partition(".")[0], ()))
        self.others = {top for top, names in owners.items() if not own & set(names)}
        self.names: set[str] = set()
        self._inside = False

    def __enter__(self) -> ForeignOps:
        """Notice imports from now on."""
        sys.meta_path.insert(0, self)
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, t: TracebackType | None) -> None:
        """Notice no more imports."""
        sys.meta_path.remove(self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a module of another distribution, with a loader that notices what it registers. Return
        None for a module of the package, and for one that is imported by a module of another distribution.
        """
        if self._inside or fullname.partition(".")[0] not in self.others:
            return None
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)  # finders of old packages have none
            spec: ModuleSpec | None = None if finder is self or find is None else find(fullname, path, target)
            if spec is not None:
                if spec.loader is not None and hasattr(spec.loader, "exec_module"):
                    spec.loader = _NoticingLoader(spec.loader, self)
                return spec
        return None

    def run(self, loader: Any, module: ModuleType) -> None:
        """Run the code of ``module`` with its own ``loader``, and add the ops that it registers to ``names``. Modules
        that it imports are not looked at on their own.
        """
        before, self._inside = registered_names(), True
        try:
            loader.exec_module(module)
        finally:
            self._inside = False
            self.names |= registered_names() - before


class _NoticingLoader(Loader):
    """A loader that runs a module by its own loader, and lets ``ForeignOps`` notice what the module registers."""

    def __init__(self, loader: Any, noticing: ForeignOps) -> None:
        """Store the module's own ``loader``, and the context ``noticing``."""
        self.loader, self.noticing = loader, noticing

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Return the new module that the own loader makes, or None for an ordinary one."""
        made: ModuleType | None = self.loader.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        """Run the module. It has its own loader again before, since a module may read its files by it."""
        with suppress(AttributeError):
            module.__loader__ = self.loader
        if module.__spec__ is not None:
            module.__spec__.loader = self.loader
        self.noticing.run(self.loader, module)
