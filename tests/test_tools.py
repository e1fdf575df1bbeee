"""The repository's own checks flag a planted violation and stay silent on good files."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from shiplap_testing.forked import python

pytestmark = pytest.mark.docs

TOOLS = Path(__file__).resolve().parents[1] / "tools"
BUDGET = "[limits]\nfile = 10\nfunction = 3\n"


def run(tool: str, argument: Path) -> subprocess.CompletedProcess[str]:
    return python(TOOLS / tool, argument)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """An empty repository with a budget of 10 lines a file and 3 a function."""
    (tmp_path / "src").mkdir()
    (tmp_path / "size-budget.toml").write_text(BUDGET)
    return tmp_path


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("import torch._inductor", "torch._inductor"),
        ("import torch._dynamo.config as config", "torch._dynamo.config"),
        ("from torch._subclasses.fake_tensor import FakeTensorMode", "torch._subclasses.fake_tensor"),
        ("from torch import _C", "torch._C"),
        ("import torch\n\ndepth = torch._inductor.config.max_autotune", "torch._inductor"),
        ("import torch as t\n\nt._C._jit_version()", "torch._C"),
        ("def lazy():\n    from torch._higher_order_ops import cond", "torch._higher_order_ops"),
        # What stood in rewrite/graph.py, inductor/select_candidate.py, backend/opinfo.py and rewrite/survey.py.
        ("import torch\n\nplain = not isinstance(node.target, torch._ops.OpOverload)", "torch._ops"),
        ("from torch.utils._pytree import tree_flatten, tree_map", "torch.utils._pytree"),
        ("def lazy():\n    from torch.utils._pytree import tree_leaves", "torch.utils._pytree"),
        # The same by other ways.
        ("import torch.utils._pytree as p", "torch.utils._pytree"),
        ("from torch.utils import _pytree as pytree", "torch.utils._pytree"),
        ("from torch import utils\n\nutils._pytree.tree_map(f, x)", "torch.utils._pytree"),
        ("import torch.fx as fx\n\nfx._symbolic_trace.Tracer()", "torch.fx._symbolic_trace"),
        ("import torch\n\nfx = torch.fx\nfx._symbolic_trace.Tracer()", "torch.fx._symbolic_trace"),
        ("import torch\n\ntorch.ops.aten._to_copy(x)", "torch.ops.aten._to_copy"),
        ("import torch\n\ntorch.cuda.Stream._as_parameter_", "torch.cuda.Stream._as_parameter_"),
        ("import torch\n\ngetattr(torch.utils, '_pytree').tree_map", "torch.utils._pytree"),
        ("import importlib\n\nimportlib.import_module('torch._dynamo')", "torch._dynamo"),
        (
            "from importlib import import_module as load, import_module\n\nimport_module('torch.fx._pytree')",
            "torch.fx._pytree",
        ),
        ("import sys\n\nsys.modules['torch._inductor.config']", "torch._inductor"),
        ("import torch\n\n\ndef f(x: 'torch._ops.OpOverload'): ...", "torch._ops"),
        ("import torch\n\n\ndef f(n, torch=None): return torch._C, n\n\n\ntorch._C", "torch._C"),
    ],
)
def test_private_torch_is_flagged(tmp_path: Path, line: str, what: str) -> None:
    file = tmp_path / "planted.py"
    file.write_text(line + "\n")
    result = run("check_private_torch.py", tmp_path)
    assert result.returncode == 1
    last = len(line.splitlines())
    assert result.stdout == f"{file}:{last}: {what} is private; give torch_private a function for what you need of it\n"


def test_public_torch_and_strings_are_not_flagged(tmp_path: Path) -> None:
    (tmp_path / "good.py").write_text(
        '"""Wraps torch._inductor."""\n'
        "import torch\n"
        "from torch import nn  # not torch._C\n"
        "from torch.library import Library\n"
        "from . import _C\n"
        "\n"
        'NAME = "import torch._dynamo"\n'
        'torch._check(True, lambda: "torch._C")\n'
        "torch._assert(True, torch.__version__)\n"
        "torch._register_device_module(name, module)\n"
        'if name == "torch._dynamo":\n'
        "    node._args, nn.Linear(1, 1)._parameters\n"
        "def f(nn, x: 'n ci'): return nn._inductor\n"
        "nn = shiplap\n"
        "other = nn._inductor\n"
    )
    result = run("check_private_torch.py", tmp_path)
    assert (result.returncode, result.stdout) == (0, "")


def test_torch_private_may_touch_private_torch_and_nothing_else_in_the_packages_does() -> None:
    root = TOOLS.parent
    result = python(TOOLS / "check_private_torch.py")
    assert (result.returncode, result.stdout) == (0, "")
    assert (
        "torch._"
        in (root / "packages" / "shiplap" / "src" / "shiplap" / "torch_private" / "graph_nodes.py").read_text()
    )


def test_size_within_budget_passes(repository: Path) -> None:
    (repository / "src" / "good.py").write_text(
        'def f():\n    """One.\n\n    Two.\n    """\n    # why\n\n    x = 1\n    return x\n'
    )
    (repository / "src" / "good.cpp").write_text("//\n" * 10)
    result = run("size_budget.py", repository)
    assert (result.returncode, result.stdout) == (0, "")


def test_long_files_and_functions_are_flagged(repository: Path) -> None:
    (repository / "src" / "a.py").write_text(
        "class C:\n    def f(self):\n        x = 1\n        x = 2\n        return x\n"
    )
    (repository / "src" / "b.cpp").write_text("//\n" * 11)
    result = run("size_budget.py", repository)
    assert result.returncode == 1
    assert result.stdout == (
        "src/a.py:2: C.f has 4 lines, its budget is 3\nsrc/b.cpp:1: file has 11 lines, its budget is 10\n"
    )


def test_a_signature_counts_one_line_however_many_parameters_it_has(repository: Path) -> None:
    many = "".join(f"    p{i}: int,\n" for i in range(20))
    file = repository / "src" / "a.py"
    (repository / "size-budget.toml").write_text(BUDGET.replace("file = 10", "file = 100"))
    file.write_text(f"@wrap(\n    1,\n)\ndef f(\n{many}) -> int:\n    x = 1\n    return x\n")
    assert run("size_budget.py", repository).returncode == 0
    file.write_text(f"def f(\n{many}) -> int:\n    x = 1\n    y = 2\n    return x\n\n\ndef g(): return 1\n")
    assert run("size_budget.py", repository).stdout == "src/a.py:1: f has 4 lines, its budget is 3\n"


def test_what_a_call_has_between_its_parentheses_counts(repository: Path) -> None:
    (repository / "src" / "a.py").write_text("def f():\n    return g(\n        1,\n        2,\n    )\n")
    assert "f has 5 lines" in run("size_budget.py", repository).stdout


def exempting(root: Path, budget: int, files: dict[str, str]) -> subprocess.CompletedProcess[str]:
    folder = root / "packages" / "one" / "src" / "one"
    folder.mkdir(parents=True, exist_ok=True)
    (root / "size-budget.toml").write_text(f"[limits]\nexemptions = {budget}\n")
    for name, text in files.items():
        (folder / name).write_text(text)
    return run("exemptions.py", root)


def test_exemptions_of_every_kind_are_counted(tmp_path: Path) -> None:
    python = "\n".join(
        [
            "import os  # noqa: F401",
            "x = f()  # type: ignore[misc] # why",
            "# fmt: off",
            "y = 1  # fmt: skip",
            '# mypy: disable-error-code="misc"',
            "# ruff: noqa: E501",
            "z = 1  # pylint: disable=all",
            "# isort: skip_file",
            "w = 1  # pragma: no cover",
        ]
    )
    cpp = "// clang-format off\nint x; // NOLINT(misc)\n"
    files = {"a.py": python, "b.cpp": cpp, "c.triton.jinja": "# clang-format off\n"}
    assert exempting(tmp_path, 12, files).stdout == ""
    done = exempting(tmp_path, 11, files)
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1] == "12 exemptions, the budget is 11"
    assert "packages/one/src/one/b.cpp:2: int x; // NOLINT(misc)" in done.stdout


def test_texts_are_no_exemptions_and_an_exemption_says_of_what(tmp_path: Path) -> None:
    assert exempting(tmp_path, 0, {"a.py": 'LINE = "import x  # noqa: F401"\n# a note on noqas\n'}).returncode == 0
    done = exempting(tmp_path, 9, {"a.py": "import x  # noqa\ny = f()  # type: ignore\n"})
    assert done.returncode == 1
    assert done.stdout == (
        "packages/one/src/one/a.py:1: say what is exempted: # noqa\n"
        "packages/one/src/one/a.py:2: say what is exempted: # type: ignore\n"
    )


def test_an_exception_excuses_what_it_names(repository: Path) -> None:
    (repository / "src" / "b.cpp").write_text("//\n" * 11)
    budget = repository / "size-budget.toml"
    budget.write_text(BUDGET + '[[exception]]\npath = "src/b.cpp"\nlines = 12\nreason = "one table"\n')
    assert run("size_budget.py", repository).returncode == 0

    (repository / "src" / "b.cpp").write_text("//\n")
    result = run("size_budget.py", repository)
    assert result.stdout == "size-budget.toml: the exception for src/b.cpp is not needed\n"


def test_an_exception_needs_a_reason(repository: Path) -> None:
    (repository / "size-budget.toml").write_text(BUDGET + '[[exception]]\npath = "src/b.cpp"\nlines = 12\n')
    result = run("size_budget.py", repository)
    assert result.returncode == 1
    assert "gives no reason" in result.stderr


def package(root: Path, **files: str) -> Path:
    """A package ``p`` below ``root`` with these modules; ``a__b`` is the module ``b`` of its package ``a``."""
    for name, source in {"__init__": "", **files}.items():
        file = root / "p" / f"{name.replace('__', '/') if name != '__init__' else name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.parent != root / "p":
            (file.parent / "__init__.py").touch()
        file.write_text(source)
    return root


@pytest.mark.parametrize(
    ("back", "how"),
    [
        ("from p.a import f\n", ""),
        ("import p.a\n", ""),
        ("from p import a\n", ""),
        ("from .a import f\n", ""),
        ("from . import a\n", ""),
        ("def lazy():\n    from p import a\n", " (lazy)"),
        ("from typing import TYPE_CHECKING\n\nif TYPE_CHECKING:\n    from p.a import f\n", " (typing)"),
        ("import typing\n\nif typing.TYPE_CHECKING:\n    from p.a import f\n", " (typing)"),
        ("from importlib import import_module\n\nimport_module('p.a')\n", ""),
        ("import importlib\n\ndef lazy():\n    return importlib.import_module('.a', __package__)\n", " (lazy)"),
        ("class C:\n    async def lazy(self):\n        import p.a.f\n", " (lazy)"),
    ],
)
def test_a_circle_of_files_is_flagged_however_it_is_imported(tmp_path: Path, back: str, how: str) -> None:
    package(tmp_path, a="from p import b\n\ndef f(): ...\n", b=back)
    result = run("check_circles.py", tmp_path)
    assert result.returncode == 1
    first, forth, repeated = result.stdout.splitlines()
    assert first == "circle of 2 files: p.a, p.b"
    assert forth == f"  {tmp_path}/p/a.py:1: imports p.b"
    assert repeated == f"  {tmp_path}/p/b.py:{len(back.splitlines())}: imports p.a{how}"


def test_a_ring_of_files_is_one_circle_and_what_hangs_on_it_is_not_in_it(tmp_path: Path) -> None:
    ring = {name: f"from p import {to}\n" for name, to in (("a", "b"), ("b", "c"), ("c", "a"), ("d", "a"))}
    package(tmp_path, **ring, e="from p import f\n", f="")
    assert run("check_circles.py", tmp_path).stdout.splitlines()[0] == "circle of 3 files: p.a, p.b, p.c"


def test_packages_are_no_circles_by_themselves(tmp_path: Path) -> None:
    """A module imports a sibling past the package, and the package shows both; a name is not the module it is in."""
    inner = {
        "sub____init__": "from p.sub.x import f\n",
        "sub__x": "from p.sub import y\n\ndef f(): ...\n",
        "sub__y": "",
    }
    files = {**inner, "a": "import p.sub\nfrom p.sub import f\n", "b": "'from p import a'  # import p.a\n"}
    result = run("check_circles.py", package(tmp_path, **files))
    assert (result.returncode, result.stdout) == (0, "")


DISPATCH = Path("packages/shiplap/src/shiplap")


def room(root: Path, source: str, listed: str = "") -> Path:
    """A repository whose room ``op`` has one file, and the list of what is allowed."""
    (root / DISPATCH / "dispatch").mkdir(parents=True)
    (root / DISPATCH / "dispatch" / "a.py").write_text(source)
    (root / "tools").mkdir()
    (root / "tools" / "dispatch.toml").write_text(listed)
    return root


@pytest.mark.parametrize(
    ("source", "what"),
    [
        ("hasattr(run, 'why')", "hasattr(run, 'why')"),
        ("x = getattr(run, 'fn', None)", "getattr(run, 'fn', None)"),
        ("try:\n    f()\nexcept AttributeError:\n    pass", "except AttributeError"),
        ("try:\n    f()\nexcept (KeyError, AttributeError) as e:\n    pass", "except (KeyError, AttributeError)"),
        ("with contextlib.suppress(AttributeError):\n    f()", "contextlib.suppress(AttributeError)"),
    ],
)
def test_dispatch_by_what_an_object_has_is_flagged(tmp_path: Path, source: str, what: str) -> None:
    entry = f'[[use]]\npath = "dispatch/a.py"\nwhat = "{what}"\nreason = "another library\'s"\n'
    result = run("check_dispatch.py", room(tmp_path, source))
    assert result.returncode == 1
    assert result.stdout.endswith(f": {what}: say by a type what the object can do\n")
    (tmp_path / "tools" / "dispatch.toml").write_text(entry)
    assert run("check_dispatch.py", tmp_path).returncode == 0
    (tmp_path / DISPATCH / "dispatch" / "a.py").write_text("dtype = getattr(torch, 'float32')\n")
    result = run("check_dispatch.py", tmp_path)
    assert result.stdout == f"tools/dispatch.toml: the entry for dispatch/a.py: {what} is not needed\n"


def test_an_allowed_dispatch_needs_a_reason(tmp_path: Path) -> None:
    listed = '[[use]]\npath = "dispatch/a.py"\nwhat = "hasattr(x, \'y\')"\nreason = " "\n'
    assert "has no reason" in run("check_dispatch.py", room(tmp_path, "hasattr(x, 'y')", listed)).stderr


def test_schemas_are_counted_by_what_a_declaration_says() -> None:
    text = (
        "f(Tensor(a!) self, int[2] k, *, Tensor?[] xs) -> Tensor(a!)\n"
        "g(Tensor(a -> *) x) -> Tensor(a)[]\n"
        "h(ScalarType d=6) -> (Tensor, SymInt)\n"
        "k(Dict(str, Tensor) d) -> Tensor\n"
    )
    program = (
        "import io, runpy, sys; del sys.argv[0]; sys.stdin = io.StringIO(sys.argv.pop()); "
        "runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    done = python("-c", program, TOOLS / "count_schemas.py", "--text", "--run", "--json", text)
    assert done.returncode == 0, done.stderr
    counted = json.loads(done.stdout)
    assert (counted["total"], counted["expressible"]) == (4, 3), counted
    assert counted["by"] == {"exact": 3, "the type Dict(str, Tensor), which no declaration has": 1}


def test_schemas_of_a_package_are_counted_if_they_run_under_their_fake(tmp_path: Path) -> None:
    source = (
        "import torch\nlib = torch.library.Library('counted_here', 'DEF')\n"
        "lib.define('f(Tensor x, int[2] k) -> Tensor')\nlib.define('g(Tensor x) -> ()')\n"
    )
    (tmp_path / "counted_here.py").write_text(source)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    done = python(TOOLS / "count_schemas.py", "counted_here", "absent-here", "--json", "--minimum", 51, env=env)
    assert done.returncode == 1, done.stderr
    counted = json.loads(done.stdout)
    assert counted["packages"]["counted_here"]["by"] == {
        "exact": 1,
        "no result and nothing written to: torch would remove the call from a graph": 1,
    }
    assert counted["missing"] == {"absent-here": "ModuleNotFoundError: No module named 'absent_here'"}


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("open(path, 'w')", "open"),
        ("path.open(mode='ab')", "open"),
        ("path.write_text(text)", "write_text"),
        ("(folder / name).write_bytes(content)", "write_bytes"),
        ("os.open(path, os.O_WRONLY | os.O_CREAT)", "os.open"),
        ("shutil.copyfile(a, b)", "shutil.copyfile"),
        ("tempfile.TemporaryDirectory()", "TemporaryDirectory"),
        ("mkdtemp(prefix='judge-')", "mkdtemp"),
        ("rich.console.Console(stderr=True)", "Console"),
        ("typer.echo(text)", "typer.echo"),
    ],
)
def test_another_door_is_flagged(tmp_path: Path, source: str, name: str) -> None:
    (tmp_path / DISPATCH / "audit").mkdir(parents=True)
    (tmp_path / DISPATCH / "audit" / "a.py").write_text(source)
    result = run("check_doors.py", tmp_path)
    assert result.returncode == 1
    assert f"audit/a.py:1: {name}: use safe_io for files" in result.stdout


def test_reading_and_the_doors_are_not_flagged(tmp_path: Path) -> None:
    (tmp_path / DISPATCH / "audit").mkdir(parents=True)
    source = "path.open('rb'), open(path), os.open(path, os.O_RDONLY), safe_io.write_text(path, ''), console.echo('')"
    (tmp_path / DISPATCH / "audit" / "a.py").write_text(source)
    assert "audit/a.py" not in run("check_doors.py", tmp_path).stdout
