"""The second target: the same templates, other functions. Generated always, compiled as a long test (two minutes)."""

from __future__ import annotations

import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch

import shiplap_backend
from shiplap_backend import BackendError
from shiplap_backend.build import build_extension
from shiplap_backend.coverage import place_overloads
from shiplap_backend.families import FAMILIES
from shiplap_backend.generate import GeneratedWrappers, generate_wrappers
from shiplap_backend.metadata import load_metadata, shipped_metadata
from shiplap_backend.project import create_project, generate_project
from shiplap_backend.runtimes import find_runtime
from shiplap_testing.paths import REPOSITORY

TEMPLATES = Path(shiplap_backend.__file__).with_name("templates")


@cache
def made_of(target: str) -> GeneratedWrappers:
    return generate_wrappers(load_metadata(shipped_metadata(target)), find_runtime(target))


@pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="the table counts torch 2.13's overloads")
@pytest.mark.parametrize(("target", "called"), [("openvino", "OpenVINO 2026.4.1"), ("onednn", "oneDNN 3.2")])
def test_the_docs_say_what_is_native(target: str, called: str) -> None:
    if target == "openvino":
        pytest.importorskip("openvino")
    covered = place_overloads(load_metadata(shipped_metadata(target)), find_runtime(target), made_of(target)).as_json()
    owed = [covered["required"][state] for state in ("native", "expected", "gap")]
    row = f"| {called} | {len(covered['native'])} | {' | '.join(map(str, owed))} |"
    assert row in (REPOSITORY / "docs" / "backend.md").read_text()
    readme = (REPOSITORY / "README.md").read_text()
    promised = re.findall(rf"more than (\d+)(?: overloads)? on {called.split()[0]}", readme)
    assert all(int(number) < len(covered["native"]) for number in promised)


def test_forty_overloads_from_the_same_templates() -> None:
    made = made_of("onednn")
    native = {n for w in made.wrappers for n in (w.declaration.name, *(d.name for d in w.derived))}
    assert len(native) >= 40
    text = "\n".join(made.files.values())
    assert "functions::MatMul(n_self, n_mat2)" in text
    assert "ov::" not in text


def test_the_templates_know_no_vendor() -> None:
    for family in FAMILIES.values():
        text = (TEMPLATES / f"{family.file}.cpp.jinja").read_text() + (TEMPLATES / "parts.jinja").read_text()
        assert not [word for word in ("ov::", "openvino", "dnnl") if word in text.lower()]


def test_both_targets_agree_on_all_but_the_graph() -> None:
    """What is not the vendor's expression is the same C++: gates, shapes, promotion, keys of the call."""
    both = []
    for name in ("openvino", "onednn"):
        if name == "openvino":
            pytest.importorskip("openvino")
        (w,) = [w for w in made_of(name).wrappers if w.declaration.name == "mul.out"]
        both.append((w.keys, w.nodes, w.outputs, w.gated, w.compute, w.decides))
    assert both[0] == both[1]


SCRIPT = """
import sys, torch
sys.path.insert(0, sys.argv[1])
import torch_dnn; torch_dnn.autoload()
torch.manual_seed(0)
def check(f, *a):
    torch.testing.assert_close(f(*(x.to("dnn") for x in a)).cpu(), f(*a))
check(lambda a, b: torch.add(a, b, alpha=2.5), torch.randn(3, 1), torch.randn(2, 3, 5))
check(lambda a, b: (a @ b).relu().softmax(0), torch.randn(3, 5), torch.randn(7, 5).t())
check(torch.mm, torch.randn(3, 9), torch.randn(9, 7))
check(lambda a: a.sum(1) + a.expand(4, 4).mean(), torch.randn(4, 1))
check(torch.gt, torch.randn(5).bfloat16(), torch.randn(5).bfloat16())
check(lambda x, w: torch.nn.functional.conv2d(x, w, padding=1), torch.randn(1, 2, 5, 5), torch.randn(3, 2, 3, 3))
counts = torch.dnn.counters()
assert all(counts["aten::" + n]["native"] for n in ("add.out", "mm.out", "relu", "_softmax.out", "gt.Tensor_out"))
print("right")
"""


def onednn_is_installed() -> bool:
    try:
        return bool(find_runtime("onednn").version())
    except BackendError:
        return False


@pytest.mark.long
@pytest.mark.skipif(not onednn_is_installed(), reason="needs pip install 'shiplap-backend[onednn]'")
def test_values_on_onednn(tmp_path: Path) -> None:
    project = create_project("dnn", "onednn", tmp_path / "p", units=2)
    generate_project(project)
    build_extension(project)
    run = subprocess.run([sys.executable, "-c", SCRIPT, str(project.root)], capture_output=True, text=True, check=False)
    assert run.stdout == "right\n", run.stderr
