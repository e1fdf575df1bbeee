"""Importing shiplap does nothing: it is quick, opens no device, writes no file, loads only what each program needs."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

import shiplap
import shiplap.kernels.triton
import shiplap.tuning
from shiplap_testing import forked
from shiplap_testing.effort import sampled

LAZY = ("rich", "typer", "jinja2", "msgspec", "platformdirs", "triton", "torch._inductor", "torch._dynamo")


def python(*arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=True, env=env)


DECLARATION = """
import shiplap as sl
import torch
from jaxtyping import Float
from torch import Tensor

@sl.op("quick::add")
def add(x: Float[Tensor, "n c"], y: Float[Tensor, "n c"]) -> Float[Tensor, "n c"]:
    return x + y

"""
KERNELS = {
    "Python": """
@add.kernel("cpu")
def _(x, y, *, out):
    torch.add(x, y, out=out)
""",
    "C": """
add.kernel("cpu", sl.cabi("quick.so", "quick_add"))
""",
}
CALLS = {"Python": "declares.add(torch.ones(2, 3), torch.ones(2, 3))"}  # the other has no library
# rooms of the core that every program needs
NEEDED = {
    "cached_property",
    "declare",
    "dispatch",
    "dtypes",
    "errors",
    "hooks",
    "lazy_imports",
    "plan",
    "settings",
    "torch_private",
    "tuning",
}
OF_A_C_KERNEL = {"kernels", "codegen", "safe_io"}


@dataclass(frozen=True)
class Declared:
    """What a process has seen of its import of shiplap, of its first declaration, with a kernel, and of a call.

    Attributes:
        collections: how often the collector looked at objects during the import.
        collects: whether the collector is on afterwards.
        modules: those of shiplap, by their names below it.
    """

    collections: int
    collects: bool
    modules: list[str]

    @property
    def rooms(self) -> set[str]:
        return {name.partition(".")[0] for name in self.modules}


def declared(folder: Path, kernel: str) -> Declared:
    """Of a new process. Its modules are compiled, as those of an installed package are: the first process does so."""
    (folder / "declares.py").write_text(DECLARATION + KERNELS[kernel])
    program = f"""
import gc, sys, torch
sys.path.append({str(folder)!r})
seen = []
gc.callbacks.append(lambda phase, about: seen.append(phase))
import shiplap
collections = seen.count("stop")
import declares
{CALLS.get(kernel, "")}
modules = [name.removeprefix("shiplap.") for name in sys.modules if name.startswith("shiplap.")]
print(collections, gc.isenabled(), *modules)
"""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    collections, collects, *modules = python("-c", program, env=environment).stdout.split()
    return Declared(int(collections), collects == "True", modules)


@pytest.fixture(scope="module", params=sampled(KERNELS, 1))
def first(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, Declared]:
    """A folder, a kind of kernel, and what a process that declares one has seen."""
    folder = tmp_path_factory.mktemp("declares")
    return folder, request.param, declared(folder, request.param)


def test_an_import_goes_through_no_objects_that_torch_has_made(first: tuple[Path, str, Declared]) -> None:
    """One look at all of them takes as long as the import. One that falls due before the first line is not ours."""
    _, _, once = first
    assert once.collections <= 1
    assert once.collects


def test_no_room_is_loaded_that_the_kind_of_kernel_does_not_need(
    first: tuple[Path, str, Declared],
) -> None:
    """No verb, audit, doctor or backend; of the room that binds kernels what one in C needs, not what Triton needs."""
    _, kernel, once = first
    assert once.rooms == (NEEDED | OF_A_C_KERNEL if kernel == "C" else NEEDED)
    later = (
        "codegen.launcher",
        "codegen.triton",
        *(f"kernels.triton.{n}" for n in ("kernel", "declaration", "replay")),
    )
    assert not set(later) & set(once.modules)


def test_the_import_touches_no_device_and_no_file_and_loads_only_what_every_program_needs():
    program = f"""
import sys, torch
def forbidden(*a, **k): raise AssertionError("device query at import")
torch.cuda._lazy_init = torch.cuda.is_available = torch.cuda.device_count = forbidden
def hook(event, args):
    writes = event == "open" and isinstance(args[1], str) and set(args[1]) & set("wax+")
    if writes or event in ("os.mkdir", "os.putenv", "subprocess.Popen", "os.system", "socket.connect"):
        raise AssertionError(f"{{event}} {{args}}")
sys.dont_write_bytecode = True
sys.addaudithook(hook)
before = set(sys.modules)
import shiplap
print(torch.cuda.is_initialized(), [m for m in {LAZY} if m in set(sys.modules) - before])
shiplap.op("a::b")
"""
    assert python("-c", program).stdout == "False []\n"


@pytest.mark.parametrize("first", ["shiplap.dispatch.registry", "shiplap.declare.kernel", "shiplap.plugin_api"])
def test_hooks_of_ops_are_installed_once_whatever_is_imported_first(first: str) -> None:
    """Without them, an op could be declared whose templates, bindings and DTensors are unknown."""
    done = forked.python(
        "-c",
        f"import {first}, shiplap as sl; sl.op; from shiplap import hooks; from shiplap.declare.kernel import "
        "template_kernel_makers as makers; from shiplap.dispatch.op import builders; from shiplap.tuning import "
        "compiled_templates; from shiplap.declare.sharding_rule import failure_hooks; import shiplap.hooks; "
        "assert builders == [hooks._build_op] and makers == {'triton': hooks._kernel_of_template}; "
        "assert compiled_templates.template_tuners == [hooks._tune_templates]; "
        "assert failure_hooks == [hooks._explain_sharding]; assert sl.tuning.freeze is sl.freeze and sl.errors",
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", shiplap.__all__)
def test_public_names(name: str) -> None:
    assert hasattr(shiplap, name)
    assert name in dir(shiplap)


# A function of the public surface and a package have one name; the package is imported at some time, for some reason.
SHARED = {"audit": "report", "doctor": "diagnosis", "rewrite": "match"}


PROGRAMS = [
    "import shiplap as sl; f = sl.{0}",
    "from shiplap import {0} as f",
    "from shiplap.{0} import {0} as f",
    "import shiplap.{0}; f = shiplap.{0}",
    "import shiplap as sl; f = sl.{0}; import shiplap.{0}; assert sl.{0} is f; f = shiplap.{0}",
    "import shiplap.{0}.{1}; f = shiplap.{0}",
    "from importlib import import_module; import_module('shiplap.{0}.{1}'); from shiplap import {0} as f",
    "import sys, importlib, shiplap; importlib.reload(importlib.import_module('shiplap.{0}')); f = shiplap.{0}",
    "from shiplap import *; f = {0}",
]


@pytest.mark.parametrize(
    ("program", "name", "module"),
    sampled([pytest.param(program, *shared) for program in PROGRAMS for shared in SHARED.items()], 2),
)
def test_a_function_keeps_its_name_whatever_is_imported(program: str, name: str, module: str) -> None:
    check = f"import sys; assert type(f).__name__ == 'function' and f.__name__ == {name!r}, f"
    check += (
        f"; import pickle; assert pickle.loads(pickle.dumps(f)) is f; assert sys.modules['shiplap.{name}'].{name} is f"
    )
    done = forked.python("-c", f"{program.format(name, module)}\n{check}")
    assert done.returncode == 0, done.stderr


def test_a_late_name_is_an_attribute_like_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shiplap, "audit", print)
    assert shiplap.audit is print
    monkeypatch.undo()
    assert shiplap.audit.__name__ == "audit"
    assert shiplap.audit.__module__.startswith("shiplap.audit")
    vars(shiplap).pop("Finding", None)
    assert shiplap.Finding is vars(shiplap)["Finding"]  # looked up once
    with pytest.raises(AttributeError, match="module 'shiplap' has no attribute 'nothing'"):
        _ = shiplap.nothing


@pytest.mark.parametrize(
    "package", [shiplap, shiplap.kernels.triton, shiplap.tuning], ids=lambda package: package.__name__
)
def test_type_checkers_are_told_the_late_names_from_the_same_places(package: ModuleType) -> None:
    tree = ast.parse(Path(str(package.__file__)).read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    told = {a.name: node.module for node in block.body if isinstance(node, ast.ImportFrom) for a in node.names}
    assert told == package._LATE
    assert set(told) <= set(package.__all__)
    for name in told:
        assert getattr(package, name) is vars(import_module(told[name]))[name]


THREADS = """
import threading
import shiplap
names = ["op", "tune", "ShiplapError", "adopt", "freeze", "Op", "OpSpec", "Opaque"] * 3
together, failed = threading.Barrier(len(names)), []
def first_use(name):
    together.wait()
    try:
        getattr(shiplap, name)
    except BaseException as e:
        failed.append(repr(e))
threads = [threading.Thread(target=first_use, args=(name,)) for name in names]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
from shiplap.declare.kernel import template_kernel_makers
from shiplap.dispatch.op import builders
print(failed, len(builders), *template_kernel_makers)
"""


@pytest.mark.long
def test_names_can_be_used_first_by_many_threads() -> None:
    """Each is imported at its first use, from packages that import each other's modules."""
    done = subprocess.run([sys.executable, "-c", THREADS], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("[] 1 triton\n", "")


@pytest.mark.long
def test_the_hooks_can_be_imported_first() -> None:
    program = "import shiplap.hooks; from shiplap.dispatch.op import builders; print(len(builders))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("1\n", "")
