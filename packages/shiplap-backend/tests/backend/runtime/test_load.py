"""A package built for another torch is not loaded: its calls into torch's C++ would crash or compute nonsense."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import torch

from shiplap_backend.project import Project, create_project, generate_project
from shiplap_backend.runtimes import runtime_names
from shiplap_testing.forked import python


def test_another_torch_is_refused_readably(project: Project, tmp_path: Path) -> None:
    package = tmp_path / project.package.name
    shutil.copytree(project.package, package)
    manifest = json.loads((package / "_manifest.json").read_text())
    name = next(iter(manifest["schemas"]))
    manifest |= {"torch": "2.10.0", "schemas": {**manifest["schemas"], "gone_op.out": "0" * 12, name: "1" * 12}}
    (package / "_manifest.json").write_text(json.dumps(manifest))
    result = python("-c", f"import {package.name}; {package.name}.autoload()", cwd=tmp_path)
    assert result.returncode == 1  # an exception, not an abort
    last = result.stderr[result.stderr.index("ImportError") :]
    assert "was built for torch 2.10.0, installed is torch" in last
    assert "gone_op.out" in last
    assert "shiplap backend build" in last
    manifest["torch"] = torch.__version__.partition("+")[0]
    (package / "_manifest.json").write_text(json.dumps(manifest))
    (package / "_C.so").write_bytes(b"of another vendor release")
    result = python("-c", f"import {package.name}; {package.name}.autoload()", cwd=tmp_path)
    assert f"ImportError: {package.name} cannot load its library: " in result.stderr
    assert f"it was built with {project.runtime.name} {manifest['vendor']}" in result.stderr


def test_what_is_generated_but_not_built_is_not_loaded(project: Project, tmp_path: Path) -> None:
    """Generating for another torch says nothing of the library that is there: its manifest comes with the build."""
    runtime = project.runtime
    made = create_project(
        "unbuilt", runtime.name if runtime.name in runtime_names() else str(runtime.directory), tmp_path / "p"
    )
    (made.root / "ops.yaml").write_text(f"extends: {runtime.name}\nonly: [add.out]\nops: {{}}\n")
    generate_project(made)
    assert not (made.package / "_manifest.json").exists()
    assert json.loads((made.generated / "manifest.json").read_text())["device"] == "unbuilt"
    assert json.loads((project.package / "_manifest.json").read_text())["device"] == project.device
    result = python("-c", "import torch_unbuilt; torch_unbuilt.autoload()", cwd=made.root)
    assert "ImportError: torch_unbuilt is not built" in result.stderr
    assert "shiplap backend build DIR" in result.stderr


def test_autoload_twice_is_once(project: Project) -> None:
    name = project.package.name
    result = python(
        "-c",
        f"import {name}; {name}.autoload(); {name}.autoload(); import torch\n"
        f"print(torch.ones(2, device='{project.device}'))",
        cwd=project.root,
    )
    assert result.stdout.strip() == f"tensor([1., 1.], device='{project.device}:0')"


LATE = """
import os, sys, threading, torch
def grad(device):
    x = torch.ones(2, device=device, requires_grad=True)
    (x * x).sum().backward()
    return x.grad.tolist()
grad("cpu")  # autograd counts the devices now, and this one is not there yet
import {name}; {name}.autoload()
main, seen = threading.get_ident(), []
class Where(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x): return x * 2
    @staticmethod
    def backward(ctx, g): seen.append(threading.get_ident()); return g * 2
y = torch.ones(2, device="{device}", requires_grad=True)
Where.apply(y).sum().backward()
assert seen and seen[0] != main, "the device has a thread of its own, as one that was there first"
pid = os.fork()
if pid == 0:
    os._exit(0 if grad("cpu") == [2.0, 2.0] else 1)
assert os.waitpid(pid, 0)[1] == 0, "a child computes on the CPU"
print(y.grad.tolist(), grad("{device}"), grad("cpu"))
"""


def test_a_device_may_come_after_the_first_backward(project: Project) -> None:
    """Torch's engine gives no thread to a device that comes later, and its assertion names neither cause nor fix."""
    code = LATE.format(name=project.package.name, device=project.device)
    # Not a fork: autograd of torch 2.15 for CUDA fails in children of a process that imported the compiler before it.
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, cwd=project.root, capture_output=True, text=True, check=False)
    assert result.stdout.strip() == "[2.0, 2.0] [2.0, 2.0] [2.0, 2.0]", result.stderr
