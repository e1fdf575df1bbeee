"""Suites of problems in the formats of public benchmarks, each as a file of a reference and a file of a candidate.

A format says which files of a folder are a problem. What a problem lacks for a judgement, such as a function that makes
its inputs, is written to a folder for references or to one for candidates, which never holds the reference.
"""

from __future__ import annotations

import ast
import errno
import hashlib
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shiplap import safe_io
from shiplap.sandbox.source_scan import MAX_SOURCE_BYTES, read_source

COMPILED = "torch.compile"  # instead of a folder of candidates
HOST = "cpu"
REFERENCE_HEAD = "# Written by shiplap judge --suite.\nimport torch\n\n"
SAMPLE_LINE = re.compile(r"^\s*-\s*(\{.*\})\s*$", re.MULTILINE)


@dataclass(frozen=True)
class SuiteProblem:
    """One problem of a suite, with the places of its reference and candidate.

    Attributes:
        name: the path of the problem in its suite.
        format: the name of the format.
        reference, candidate: targets of :func:`shiplap.judge.judge`.
        unusable: why the problem cannot be judged. It is empty if the problem can be judged.
        vary_shapes: whether the reference accepts other shapes than those of its inputs.
        compiled: whether the candidate is the compiled reference, which Shiplap has written.
    """

    name: str
    format: str
    reference: str = ""
    candidate: str = ""
    unusable: str = ""
    vary_shapes: bool = True
    compiled: bool = False


@dataclass(frozen=True)
class SuiteFolders:
    """The folders of a suite. They are those of its problems, of its candidates, and of the files that Shiplap writes.
    ``candidates`` is empty if the candidates lie beside the problems, and ``torch.compile`` if the compiled references
    are the candidates. ``device`` is the device of the inputs.
    """

    problems: Path
    candidates: str
    written: Path
    device: str = HOST

    def write(self, role: str, name: str, text: str, extra: Mapping[str, str] | None = None) -> Path:
        """Write the source code ``text`` of a problem's reference or candidate to a file, and return the file's path.
        ``role`` is ``"reference"`` or ``"candidate"``. The files in ``extra``, a mapping from relative path to content,
        are written into the folder of that file. Paths that lead out of the folder are left out.
        """
        folder = self.written / role / re.sub(r"\W+", "_", name)
        folder.mkdir(parents=True, exist_ok=True)
        for path, content in (extra or {}).items():
            # A name from a file of others must not lead out of the folder.
            if (at := (folder / path).resolve()).is_relative_to(folder.resolve()):
                at.parent.mkdir(parents=True, exist_ok=True)
                safe_io.write_text(at, content)
        # A name of its own, since two modules of one name cannot be imported.
        file = folder / f"{re.sub(r'[^a-zA-Z0-9]+', '_', name)}_{role}.py"
        safe_io.write_text(file, text)
        return file

    def find_candidate(self, problem: Path, *names: str) -> Path | None:
        """Return the first existing file with one of ``names`` in the folder of candidates, or None if there is none.
        ``problem`` is the path of the problem's file. The candidate may lie in the folder of candidates itself, or in a
        subfolder with the path or the name of the problem's folder.
        """
        if not self.candidates:
            return None
        home, place = Path(self.candidates), problem.parent.relative_to(self.problems)
        tried = (folder / name for name in names for folder in (home / place, home / problem.parent.name, home))
        return next((file for file in tried if file.is_file() and file.resolve() != problem.resolve()), None)


def find_problems(folders: SuiteFolders) -> list[SuiteProblem]:
    """Return the problems in the folders of a suite, sorted by path, with numbers in natural order. Of several problems
    with one name, only the first is returned.

    The folders may mix all formats that this module reads. A problem that cannot be read is returned as unusable, with
    the reason.
    """
    found: dict[str, SuiteProblem] = {}
    for path in sorted(folders.problems.rglob("*"), key=_natural_order):
        if path.is_relative_to(folders.written) or "__pycache__" in path.parts:
            continue
        for kind, read in FORMATS.items():
            problems: list[SuiteProblem] = []
            try:
                problems.extend(read(path, folders))
            except (AttributeError, LookupError, OSError, TypeError, ValueError) as e:
                name = str(path.relative_to(folders.problems))
                problems.append(_unusable_problem(name, kind, f"it cannot be read: {type(e).__name__}: {e}"[:300]))
            for problem in problems:
                # Two formats may read one folder; the first one counts.
                found.setdefault(problem.name, problem)
    return list(found.values())


def _natural_order(path: Path) -> list[Any]:
    """Return a sort key of a path in which digits count as numbers, so that ``2_x.py`` comes before ``10_x.py``."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", str(path))]


def _unusable_problem(name: str, kind: str, why: str) -> SuiteProblem:
    """Return the problem ``name`` of the format ``kind``, marked as unusable for the reason ``why``."""
    return SuiteProblem(name, kind, unusable=why)


def _compiled_candidate(name: str, source: str, folders: SuiteFolders) -> Path:
    """Write a candidate for the problem ``name`` in KernelBench's format, and return the path of its file. The
    candidate is the model in the reference's ``source``, with its ``forward`` under ``torch.compile``.
    """
    text = source + "\n\nclass ModelNew(Model):\n    forward = torch.compile(Model.forward)\n"
    return folders.write("candidate", name, text)


def _read_kernelbench(path: Path, folders: SuiteFolders) -> Iterator[SuiteProblem]:
    """Yield the KernelBench problem at ``path``. Yield nothing if ``path`` is no such problem.

    A problem is a file with ``Model`` and ``get_inputs``. Its candidate is a file with ``ModelNew``. The candidate's
    file has the name of the problem, or the name that KernelBench gives to samples of a run.
    """
    # ``func_forward.py`` is a task of robust-kbench, which has a ``Model``, too.
    if path.suffix != ".py" or path.name == "func_forward.py" or not path.is_file():
        return
    source = _read_text(path)
    if not re.search(r"^class Model\(", source, re.M) or not re.search(r"^def get_inputs\(", source, re.M):
        return
    # This file is a candidate.
    if re.search(r"^class ModelNew\(", source, re.M):
        return
    name = str(path.relative_to(folders.problems).with_suffix(""))
    if folders.candidates == COMPILED:
        found: Path | None = _compiled_candidate(name, source, folders)
    else:
        level, number = re.search(r"level_?(\d+)", str(path)), re.match(r"(\d+)_", path.name)
        run = f"level_{level[1]}_problem_{number[1]}_sample_0_kernel.py" if level and number else path.name
        found = folders.find_candidate(path, path.name, f"{path.stem}_new.py", run)
        beside = path.with_name(f"{path.stem}_new.py")
        found = found or (beside if not folders.candidates and beside.is_file() else None)
    if found is None:
        yield _unusable_problem(name, "KernelBench", "no candidate")
    else:
        compiled = folders.candidates == COMPILED
        yield SuiteProblem(name, "KernelBench", f"{path}:Model", str(found), compiled=compiled)


def _read_robust_kbench(path: Path, folders: SuiteFolders) -> Iterator[SuiteProblem]:
    """Yield the robust-kbench task at ``path``. Yield nothing if ``path`` is no such task.

    A task is a file ``func_forward.py``, whose model takes the kernel as ``fn``. Its settings lie beside it. A file for
    the reference and one for the candidate are written.
    """
    if path.name != "func_forward.py":
        return
    name, source = str(path.parent.relative_to(folders.problems)), _read_text(path)
    settings = _read_json(path.with_name("config_forward.json")) or {}
    inputs, init = (_first_config(settings, key) for key in ("input", "init"))
    shared = _first_config(settings, "shared")
    # The space separates the braces, which would stand for one literal brace otherwise.
    sizes = f"**{ {**shared, **inputs}!r}"
    tail = (
        f"\n\n_make_inputs = get_inputs\n\n\ndef get_inputs():\n    return _make_inputs({sizes})\n"
        f"\n\nclass Reference(Model):\n    def __init__(self):\n        super().__init__(**{ {**shared, **init}!r})\n"
    )
    reference = folders.write("reference", name, source + tail)
    kernel = folders.find_candidate(path, "forward.py", "forward.cu", f"{path.parent.name}.py")
    if kernel is None and not folders.candidates and path.with_name("forward.cu").is_file():
        kernel = path.with_name("forward.cu")
    if folders.candidates == COMPILED:
        loaded = "kernel = torch.compile(forward_fn)"
    elif kernel is None:
        yield _unusable_problem(name, "robust-kbench", "no candidate")
        return
    elif kernel.suffix == ".cu" and folders.device == HOST:
        yield _unusable_problem(name, "robust-kbench", "the candidate is CUDA C++, and the device is the CPU")
        return
    elif kernel.suffix == ".cu":
        loaded = "from torch.utils.cpp_extension import load\nfrom pathlib import Path\n"
        loaded += "kernel = load('forward_kernel', [str(Path(__file__).with_name('forward.cu'))]).forward"
    else:
        loaded = f"from {kernel.stem}_kernel import forward_fn as kernel"
    extra = {} if kernel is None else {_kernel_file(kernel): _read_text(kernel)}
    tail += f"\n{loaded}\n\n\nclass ModelNew(Reference):\n    def forward(self, *args):\n"
    tail += "        return super().forward(*args, fn=kernel)\n"
    candidate = folders.write("candidate", name, source + tail, extra)
    compiled = folders.candidates == COMPILED
    yield SuiteProblem(name, "robust-kbench", f"{reference}:Reference", f"{candidate}:ModelNew", compiled=compiled)


def _kernel_file(kernel: Path) -> str:
    """Return the name under which a kernel of robust-kbench is copied beside its candidate. ``kernel`` is the kernel's
    original path.
    """
    return "forward.cu" if kernel.suffix == ".cu" else f"{kernel.stem}_kernel.py"


def _first_config(settings: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Return the first config of a kind in the settings of a robust-kbench task, as a dict such as the sizes of inputs.
    ``kind`` is ``input``, ``init`` or ``shared``. The dict is empty if there is none.
    """
    listed = settings.get(f"single_{kind}_configs") or [{}]
    return dict(listed[0]) if isinstance(listed[0], dict) else {}


OPINFO_INPUTS = """
from shiplap.torch_private.aten_operators import op_infos

OVERLOAD = torch.ops.aten.{name}
NAMES = [a.name for a in OVERLOAD._schema.arguments]
USUAL = {{a.name: a.default_value for a in OVERLOAD._schema.arguments}}


def _arguments(sample):
    given = dict(zip(NAMES, (sample.input, *sample.args))) | sample.kwargs
    return [given.get(n, USUAL[n]) for n in NAMES]


def _call(*args):
    schema = OVERLOAD._schema.arguments
    first = [v for a, v in zip(schema, args) if not a.kwarg_only]
    return OVERLOAD(*first, **{{a.name: v for a, v in zip(schema, args) if a.kwarg_only and v is not None}})


def _usable():
    for info in op_infos().values():
        if info.name.split(".")[-1].rstrip("_") != OVERLOAD._schema.name.split("::")[1].rstrip("_"):
            continue
        for number, sample in enumerate(info.sample_inputs("{device}", torch.float32)):
            try:
                args = _arguments(sample)
                if args[0].numel() > 1:
                    _call(*args)
                    yield info, number
            except Exception:
                continue


FOUND = next(_usable(), None)


def get_inputs():
    if FOUND is None:
        raise LookupError("OpInfo has no sample of this overload")
    info, number = FOUND
    return _arguments(list(info.sample_inputs("{device}", torch.float32))[number])


def reference(*args):
    return _call(*args)
"""


def _read_backendbench(path: Path, folders: SuiteFolders) -> Iterator[SuiteProblem]:
    """Yield the BackendBench operator at ``path``. Yield nothing if ``path`` is not its implementation.

    The implementation is the first file like ``add__Tensor/add__Tensor_implementation*.py`` of its folder. The
    reference is the operator of torch, called on the first usable sample of its OpInfo.
    """
    folder = path.parent.name
    if "__" not in folder or not path.name.startswith(f"{folder}_implementation") or path.suffix != ".py":
        return
    if path != sorted(path.parent.glob(f"{folder}_implementation*.py"))[0]:
        return
    name, (op, _, overload) = str(path.parent.relative_to(folders.problems)), folder.rpartition("__")
    if not (op.isidentifier() and overload.isidentifier()):
        return
    inputs = OPINFO_INPUTS.format(name=f"{op}.{overload}", device=folders.device)
    reference = folders.write("reference", name, REFERENCE_HEAD + inputs)
    call = f"\n\nSCHEMA = torch.ops.aten.{op}.{overload}._schema.arguments\n\n\ndef candidate(*args):\n"
    call += "    first = [v for a, v in zip(SCHEMA, args) if not a.kwarg_only]\n"
    call += "    named = {a.name: v for a, v in zip(SCHEMA, args) if a.kwarg_only and v is not None}\n"
    call += f"    return {folder}_kernel_impl(*first, **named)\n"
    source = _read_text(path)
    # An import from __future__ must stay the first statement.
    head = "" if re.search(r"^from __future__ ", source, re.M) else "import torch\n"
    candidate = folders.write("candidate", name, f"{head}{source}\n\nimport torch{call}")
    yield SuiteProblem(name, "BackendBench", f"{reference}:reference", f"{candidate}:candidate")


def _read_sol_execbench(path: Path, folders: SuiteFolders) -> Iterator[SuiteProblem]:
    """Yield a problem for each solution of a SOL-ExecBench definition, if ``path`` is one. Otherwise yield nothing.

    The reference gets the inputs of the first workload of the definition. The candidate is the solution.
    """
    if path.name != "definition.json" or not isinstance(definition := _read_json(path), dict):
        return
    name = str(path.parent.relative_to(folders.problems))
    load = _read_first_line(path.with_name("workload.jsonl"))
    if not isinstance(load, dict) or not isinstance(definition.get("reference"), str):
        yield _unusable_problem(name, "SOL-ExecBench", "no workload or no reference")
        return
    made = _workload_inputs(definition, load, folders.device)
    if made.startswith("!"):
        yield _unusable_problem(name, "SOL-ExecBench", made[1:])
        return
    reference = folders.write("reference", name, f"{definition['reference']}\n\n{made}")
    homes = [path.parent] if not folders.candidates else [Path(folders.candidates) / name, Path(folders.candidates)]
    solutions = [f for home in homes if home.is_dir() for f in sorted(home.glob("solution*.json"))]
    if not solutions:
        yield _unusable_problem(name, "SOL-ExecBench", "no candidate")
    for file in solutions:
        yield _solution_problem(f"{name}/{file.stem}", reference, _read_json(file), definition, folders)


def _workload_inputs(definition: Mapping[str, Any], load: Mapping[str, Any], device: str) -> str:
    """Return the Python source code of a function ``get_inputs``, which makes the inputs of the workload ``load`` of
    SOL-ExecBench. If it cannot be written, return ``!`` followed by the reason.
    """
    constants = {n: a["value"] for n, a in definition["axes"].items() if a.get("type") == "const"}
    sizes, lines = {**constants, **load["axes"]}, []
    for name, about in definition["inputs"].items():
        kind = load["inputs"].get(name, {}).get("type", "random")
        if kind == "scalar":
            lines.append(repr(load["inputs"][name]["value"]))
        elif kind != "random" or about.get("shape") is None:
            return f"!the input {name} is of kind {kind}"
        else:
            shape = [sizes[d] if isinstance(d, str) else d for d in about["shape"]]
            lines.append(_random_input(shape, about["dtype"], device))
    return f"def get_inputs():\n    return [{', '.join(lines)}]\n"


def _random_input(shape: list[int], dtype: str, device: str) -> str:
    """Return a Python expression for a random tensor of the shape ``shape`` and the dtype ``dtype`` on ``device``."""
    if dtype == "bool":
        return f"torch.rand({shape}, device={device!r}) < 0.5"
    if "int" in dtype:
        return f"torch.randint(0, 2, {shape}, dtype=torch.{dtype}, device={device!r})"
    # ``randn`` makes no float8 numbers, so the numbers are converted afterwards.
    return f"torch.randn({shape}, device={device!r}).to(torch.{dtype})"


def _solution_problem(
    name: str, reference: Path, solution: Any, definition: Mapping[str, Any], folders: SuiteFolders
) -> SuiteProblem:
    """Return the problem of one solution of SOL-ExecBench, whose source files are written as a candidate. If it cannot
    be judged, return the problem marked as unusable, with the reason.
    """
    spec = solution.get("spec", {}) if isinstance(solution, dict) else {}
    file, _, function = str(spec.get("entry_point", "")).partition("::")
    if not file.endswith(".py") or not function.isidentifier():
        return _unusable_problem(name, "SOL-ExecBench", f"the entry point {file or 'none'} is no Python file")
    if spec.get("destination_passing_style"):
        return _unusable_problem(name, "SOL-ExecBench", "the solution writes to outputs that it is given")
    sources = {s["path"]: s["content"] for s in solution["sources"]}
    module = Path(file).with_suffix("").as_posix().replace("/", ".")
    text = f"from {module} import {function} as candidate\n"
    candidate = folders.write("candidate", name, text, sources)
    return SuiteProblem(name, "SOL-ExecBench", f"{reference}:run", f"{candidate}:candidate")


def _read_gpu_mode(path: Path, folders: SuiteFolders) -> Iterator[SuiteProblem]:
    """Yield the problem of gpu-mode's reference kernels at ``path``, if it is a ``task.yml``. Otherwise yield nothing.

    ``reference.py`` lies in its folder, and the first test of the task gives the sizes. The candidate is
    ``submission.py``. The suite's device replaces CUDA in the source code of both.
    """
    home = path.parent
    if path.name != "task.yml" or not (home / "reference.py").is_file():
        return
    name = str(home.relative_to(folders.problems))
    text = _read_text(path)
    tests = text[text.find("\ntests:") :] if "\ntests:" in text else ""
    sample = next((ast.literal_eval(m) for m in SAMPLE_LINE.findall(tests) if _is_literal(m)), None)
    found = folders.find_candidate(path, "submission.py", f"{home.name}.py")
    found = found or (home / "submission.py" if not folders.candidates else None)
    if sample is None or found is None or not found.is_file():
        yield _unusable_problem(name, "gpu-mode", "no test with its sizes" if sample is None else "no candidate")
        return

    own = hashlib.sha256(name.encode()).hexdigest()[:8]  # two problems of one process have helpers of the same names

    def read(file: Path) -> str:
        """Return the source code in ``file`` with the suite's device in place of CUDA. Imports of the helpers ``task``
        and ``utils`` are changed to module names that only this problem has.
        """
        text = re.sub(r"""(["'])cuda(:0)?\1""", f'"{folders.device}"', _read_text(file))
        text = re.sub(r"^(\s*)from (task|utils) import", rf"\1from \2_{own} import", text, flags=re.M)
        return re.sub(r"^(\s*)import (task|utils)$", rf"\1import \2_{own} as \2", text, flags=re.M)

    beside = [f for place in (home.parent, home) for f in place.glob("*.py") if f.stem in ("task", "utils")]
    helpers = {f"{f.stem}_{own}.py": read(f) for f in beside}
    # The seed is drawn anew in each call, or all inputs would be alike.
    sizes = ", ".join(f"{k}={v!r}" for k, v in sample.items() if k != "seed")
    seed = ", seed=int(torch.randint(1 << 30, ()))" if "seed" in sample else ""
    inputs = f"\n\ndef get_inputs():\n    return [generate_input({sizes}{seed})]\n"
    body = read(home / "reference.py")
    reference = folders.write("reference", name, f"import torch\n{body}{inputs}", helpers)
    candidate = folders.write("candidate", name, read(found), helpers)
    yield SuiteProblem(name, "gpu-mode", f"{reference}:ref_kernel", f"{candidate}:custom_kernel")


def _is_literal(text: str) -> bool:
    """Return whether ``text`` is a Python literal of a dict, such as ``{"m": 64}``."""
    try:
        return isinstance(ast.literal_eval(text), dict)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return False


def _read_text(file: Path) -> str:
    """Return the text of a file of a suite, cut off after ``MAX_SOURCE_BYTES``, since its author is not trusted. Raise
    ``OSError`` if it cannot be read.
    """
    if not os.access(file, os.R_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(file))
    return read_source(file)[:MAX_SOURCE_BYTES].decode(errors="replace")


def _read_json(file: Path) -> Any:
    """Return the value in a JSON file, or None if it is not valid JSON."""
    try:
        return safe_io.parse_json(read_source(file))
    except ValueError:
        return None


def _read_first_line(file: Path) -> Any:
    """Return the value in the first non-empty line of a file of JSON lines, or None if that line is not valid JSON."""
    try:
        return safe_io.parse_json(next(filter(None, map(bytes.strip, read_source(file).splitlines())), b""))
    except ValueError:
        return None


FORMATS: dict[str, Callable[[Path, SuiteFolders], Iterator[SuiteProblem]]] = {
    "KernelBench": _read_kernelbench,
    "robust-kbench": _read_robust_kbench,
    "BackendBench": _read_backendbench,
    "SOL-ExecBench": _read_sol_execbench,
    "gpu-mode": _read_gpu_mode,
}
"""Format → the function that reads the problem, if any, which a path belongs to."""
