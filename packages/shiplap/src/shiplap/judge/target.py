"""Location and import of the reference and the candidate: ``file.py:name``, ``module:name``, or an object in a file."""

from __future__ import annotations

import hashlib
import inspect
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shiplap.errors import error, error_line
from shiplap.judge.problem import FunctionProblem, JudgeProblem
from shiplap.judge.result import JudgeResult
from shiplap.sandbox.load_candidate import build_callable, is_declared, load_module, load_named
from shiplap.sandbox.source_scan import gather_sources, read_source

InputMaker = Callable[[], Any]
PREDICATE_TYPE = "urn:shiplap:verdict:1"  # of the statement of a verdict


@dataclass(frozen=True)
class JudgeTarget:
    """The location of a Python object to import. ``home`` is its module or the path of its file. ``names`` are the
    names to look up there, of which the first existing one is used.
    """

    home: str
    names: tuple[str, ...]

    def __post_init__(self) -> None:
        """Raise ``SL501`` for a path that is no text: no message to another process can have it."""
        try:
            self.home.encode()
        except UnicodeEncodeError:
            raise error(
                "SL501",
                where=ascii(self.home),
                what="the path of the target is not encoded in UTF-8",
                got=ascii(self.home),
                expected="a path whose bytes are UTF-8",
                fix="rename the file or the folder",
            ) from None

    @classmethod
    def of(cls, value: Any, usual: Sequence[str]) -> JudgeTarget:
        """Return where to find an object for a judgement.

        ``value`` is a string ``file.py:name`` or ``module:name``, or the object itself. ``usual`` has the names that
        are looked up if the string has none. Raise ``SL501`` if the string is empty, its file does not exist, or the
        object is not at the top level of a file.
        """
        if not isinstance(value, (str, os.PathLike)):
            return cls._of_object(value)
        home, _, name = str(value).partition(":")
        if not home or (home.endswith(".py") and not Path(home).is_file()):
            raise error(
                "SL501",
                where=str(value),
                what="the target does not exist",
                got=f"no file {home}" if home else "an empty name",
                expected="path/to/file.py:name or module:name",
                fix="pass a file or a module that is there",
            )
        # The process that loads the file has another working directory.
        home = str(Path(home).resolve()) if home.endswith(".py") else home
        return cls(home, (name,) if name else tuple(usual))

    @classmethod
    def _of_object(cls, value: Any) -> JudgeTarget:
        """Return the target of the object ``value``, which is defined at the top level of a file.

        Raise ``SL501`` for any other object, since another process could not load it. An object from the cell of a
        notebook has no file, or the name of a file that does not exist.
        """
        inner = value.reference if is_declared(value) else value
        name = getattr(inner, "__qualname__", "")
        try:
            home = str(Path(inspect.getfile(inner)).resolve())
        except (TypeError, OSError):
            home = ""
        # A name with ``<locals>`` or ``<lambda>`` cannot be looked up in another process.
        if not Path(home).is_file() or not name or "<" in name:
            raise error(
                "SL501",
                where="judge",
                what="the target cannot be loaded in another process",
                got=repr(value)[:100],
                expected="a function, a class or an op at the top level of a file",
                fix="write it into a file, in a notebook with %%writefile kernel.py, and pass kernel.py:name",
            )
        return cls(home, (name,))

    @property
    def file(self) -> str:
        """The path of the target's file, found without importing the module or its packages. It is an empty string if
        the file is not known.
        """
        if self.home.endswith(".py"):
            return self.home
        return file_of_module(self.home)

    def read_digests(self) -> dict[str, str]:
        """Return the SHA-256 digests, as hexadecimal digits, of the target's file and of the sources beside it that it
        names, by their paths below the folder of the file. The dict is empty if the file is not known.
        """
        sources = gather_sources(self.file) if self.file else []
        return {
            os.path.relpath(each, os.path.dirname(self.file)): hashlib.sha256(read_source(each)).hexdigest()
            for each in sources
        }


def file_of_module(module: str) -> str:
    """Return the path of the file of ``module``, found without importing it or its packages. It is an empty string if
    the file is not known.
    """
    spec: ModuleSpec | None = None
    places: Sequence[str] | None = None
    for name in accumulate(module.split("."), "{}.{}".format):
        try:
            spec = _find_module_spec(name, places)
        except KeyError:  # a folder without an __init__.py, in a package that is not imported
            at = [os.path.join(place, name.rpartition(".")[2]) for place in places or ()]
            spec, places = None, [place for place in at if os.path.isdir(place)]
            continue
        if spec is None:
            return ""
        places = spec.submodule_search_locations
    return str(Path(spec.origin).resolve()) if spec is not None and spec.has_location and spec.origin else ""


def _find_module_spec(name: str, places: Sequence[str] | None) -> ModuleSpec | None:
    """Return the spec with which Python would load the module ``name``, or None if there is none. ``places`` are the
    folders to search, or None for those of ``sys.path``.

    ``importlib.util.find_spec`` is not used here because it imports the packages that contain the module.
    """
    for finder in sys.meta_path:
        if (find := getattr(finder, "find_spec", None)) is not None:
            spec: ModuleSpec | None = find(name, places, None)
            if spec is not None:
                return spec
    return None


@dataclass(frozen=True)
class JudgeSubject:
    """The problem of a judgement, and the data with which both processes load their target.

    Attributes:
        kind: ``"reference"`` if the reference is that of a declared op, and otherwise ``"function"``.
        init: the arguments of the constructor.
        state: the parameters of the reference, which the candidate gets as well.
        seed: the seed of the parameters.
        gradients: whether gradients are compared by default.
    """

    problem: JudgeProblem
    kind: str
    init: list[Any]
    state: dict[str, Tensor]
    seed: int
    gradients: bool


def load_subject(
    target: JudgeTarget,
    inputs: Any,
    *,
    device: str,
    sizes: Sequence[dict[str, Any]],
    tolerance: float,
    vary_shapes: bool,
    vary_layouts: bool,
    seed: int,
) -> JudgeSubject:
    """Import the trusted reference, and return its problem with the data that the candidate's process gets.

    The arguments from ``device`` to ``vary_layouts`` are options as in ``JudgeOptions``. ``inputs`` makes the arguments
    of a call, or names the function that does. ``seed`` is the seed of the parameters. Raise ``SL501``, ``SL601``,
    ``SL615`` or ``SL616`` if the reference cannot be loaded or called.
    """
    value = _load_target(target)
    if is_declared(value):
        from shiplap.judge.op_problem import OpProblem  # only here is anything of a declaration needed

        made: JudgeProblem = OpProblem(value, sizes, device)
        made.tolerance = max(made.tolerance, tolerance)
        return JudgeSubject(made, "reference", [], {}, seed, value.gradient is not None)
    module = load_module(target.home)
    init = _call_init_inputs(getattr(module, "get_init_inputs", lambda: []), target)
    call = _build_reference(value, list(init), seed, target)
    # Copied before the candidate can change anything.
    state = {k: v.detach().clone() for k, v in call.state_dict().items()} if isinstance(call, torch.nn.Module) else {}
    if device != "cpu" and isinstance(call, torch.nn.Module):
        call = call.to(device)
    maker = _find_input_maker(inputs, module, target, device)
    made = FunctionProblem(
        target.names[0],
        call,
        maker,
        tolerance,
        vary_shapes=vary_shapes,
        vary_layouts=vary_layouts,
        file=target.file,
    )
    # The inputs are made now, so that an error of the reference is raised before a process starts.
    _ = made.first
    return JudgeSubject(made, "function", list(init), state, seed, False)


def _load_target(target: JudgeTarget) -> Any:
    """Import the target's module and return the first object in it that the target names. Raise ``SL501`` if there is
    none, and ``SL601`` if the import fails.
    """
    try:
        return load_named(target.home, target.names)
    except AttributeError as e:
        what, fix = "the target has no reference of this name", f"name it: {target.home}:name"
        expected = "a function, a class or an op"
        raise error("SL501", where=target.home, what=what, got=str(e), expected=expected, fix=fix) from None
    except Exception as e:
        raise error("SL601", where=target.home, got=error_line(e), expected="a module that imports") from e


def _build_reference(value: Any, init: list[Any], seed: int, target: JudgeTarget) -> Callable[..., Any]:
    """Return the reference as a callable. It is ``value`` itself if that is a function, or an instance that the class
    ``value`` makes from the arguments ``init`` with ``seed``. Raise ``SL616`` if the constructor fails.
    """
    try:
        built: Callable[..., Any] = build_callable(value, init, {}, seed)
    except Exception as e:
        raise error(
            "SL616", where=target.names[0], got=error_line(e), expected=f"an instance from {init!r}"[:200]
        ) from e
    return built


def _call_init_inputs(maker: InputMaker, target: JudgeTarget) -> Any:
    """Return what ``maker`` returns, the constructor arguments of the reference. Raise ``SL615`` if it raises an
    exception.
    """
    try:
        return maker()
    except Exception as e:
        raise error("SL615", where=f"{target.home}: get_init_inputs", got=error_line(e), expected="a list") from e


def _find_input_maker(inputs: Any, module: Any, target: JudgeTarget, device: str) -> InputMaker:
    """Return a function that makes the arguments of one call as a list on ``device``. It calls ``inputs``, which is a
    function or a string that names one. If ``inputs`` is None, it calls ``get_inputs`` of the reference's module. Raise
    ``SL615`` if there is no such function.
    """
    if inputs is None:
        inputs = getattr(module, "get_inputs", None)
    elif isinstance(inputs, (str, os.PathLike)):
        inputs = _load_target(JudgeTarget.of(inputs, ("get_inputs",)))
    if not callable(inputs):
        raise error("SL615", where=":".join((target.home, target.names[0])), got="no get_inputs", expected="get_inputs")

    places = [torch.device(device)] if device != "cpu" else []

    def made() -> Any:
        """Return the arguments of one call as a list with tensors on ``device``. They are drawn on that device if the
        input function can do so, and are moved to it otherwise.
        """
        args = None
        if places:
            try:
                with places[0]:
                    args = inputs()
            except Exception:  # it has tensors of the host beside those that it draws
                places.clear()
        args = inputs() if args is None else args
        listed = args if isinstance(args, (list, tuple)) else [args]
        return [a.to(device) if isinstance(a, Tensor) else a for a in listed]

    return made


def write_judge_statement(path: Path, result: JudgeResult, reference: Any, candidate: Any) -> None:
    """Write the in-toto statement (a signable JSON file) of a verdict to ``path``. Raise ``SL602`` if that fails.

    It lists the digests of the files of the reference and the candidate, and of the sources beside them that they name.
    A target without a file, such as a built-in module, is left out.
    """
    from shiplap.render.facts import facts
    from shiplap.render.statement import write_statement  # a judgement needs neither

    targets = {"reference": reference, "candidate": candidate}
    subjects: dict[str, str] = {}
    for role, given in targets.items():
        target = JudgeTarget.of(given, ("",))
        digests = target.read_digests()
        if target.file:  # which may be longer than a source that is scanned
            digests[os.path.basename(target.file)] = hashlib.sha256(Path(target.file).read_bytes()).hexdigest()
        subjects |= {f"{role}/{name}": digest for name, digest in digests.items()}
    write_statement(path, subjects, PREDICATE_TYPE, {"facts": facts(), **result.as_json()})
