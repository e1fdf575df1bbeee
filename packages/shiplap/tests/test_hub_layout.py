"""Packages in the layout of Hugging Face's kernels: two versions of one package of declared ops in one process."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from shiplap.audit import audit
from shiplap_testing.forked import python

OPS = """
NAMESPACE = "{namespace}"

def add_op_namespace_prefix(name):
    return f"{{NAMESPACE}}::{{name}}"
"""
PACKAGE = """
import shiplap as sl
from jaxtyping import Float32
from torch import Tensor

from ._ops import add_op_namespace_prefix

@sl.op(add_op_namespace_prefix("scaled"))
def scaled(x: Float32[Tensor, "n"]) -> Float32[Tensor, "n"]:
    return x * {factor}

scaled.kernel("cpu", sl.source("scaled.c", "scaled"))

@scaled.backward
def _(grad, saved, needs):
    return {{"x": scaled(grad)}}
"""
C = """
int scaled(const sl_context* ctx, const DLTensor* x, DLTensor* out) {{
  for (int64_t i = 0; i < x->shape[0]; ++i) ((float*)out->data)[i] = ((const float*)x->data)[i] * {factor};
  return SL_OK;
}}
"""
pytestmark = pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")


def write_version(folder: Path, namespace: str, factor: int) -> Path:
    """Write a version of the package, whose op multiplies by ``factor``, and return the path of its module."""
    build = folder / "build" / "torch-cpu"
    build.mkdir(parents=True)
    (build / "_ops.py").write_text(OPS.format(namespace=namespace))
    (build / "scaled.c").write_text(C.format(factor=factor))
    (build / "__init__.py").write_text(PACKAGE.format(factor=factor))
    return build / "__init__.py"


def load(path: Path, name: str) -> ModuleType:
    """Import the file as the package ``kernels`` does, under a name that no other version has."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def versions(tmp_path: Path, ns: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[ModuleType]]:
    monkeypatch.setenv("SHIPLAP_CACHE_DIR", str(tmp_path / "cache"))
    names = [f"_{ns}_cpu_{digest}" for digest in ("1a2b3c", "4d5e6f")]
    yield [
        load(write_version(tmp_path / f"v{factor}", name, factor), name)
        for name, factor in zip(names, (2, 3), strict=True)
    ]
    for name in [n for n in sys.modules if n.startswith(tuple(names))]:
        del sys.modules[name]


def test_two_versions_of_a_package_side_by_side(versions: list[ModuleType]) -> None:
    two, three = (module.scaled for module in versions)
    for op in (two, three):
        op.build()
    x = torch.randn(5, requires_grad=True)
    torch.testing.assert_close(three(two(x)), 6 * x)
    assert two.native is not None
    assert three.native is not None
    both = torch.compile(lambda x: (two(x), three(x)), fullgraph=True, backend="aot_eager")(x)
    torch.testing.assert_close(both, (2 * x, 3 * x))
    three(two(x)).sum().backward()
    torch.testing.assert_close(x.grad, torch.full((5,), 6.0))


@pytest.mark.long
def test_each_of_two_versions_passes_its_audit(versions: list[ModuleType]) -> None:
    for op in (module.scaled for module in versions):
        op.build()
        report = audit(op, checks=["numerics", "kernels", "gradient", "fake", "stateless"], seed=0)
        assert report.proven, str(report)


def test_kernels_loads_a_package_of_declared_ops(tmp_path: Path) -> None:
    """With Hugging Face's own package, if it is installed."""
    pytest.importorskip("kernels")
    module = write_version(tmp_path / "v2", "_scaled_cpu_1a2b3c", 2)
    (module.parent / "metadata.json").write_text(
        '{"id": "_scaled_cpu_1a2b3c", "name": "scaled", "version": 1, "license": "Apache-2.0", '
        '"python-depends": [], "backend": {"type": "cpu"}}'
    )
    program = (
        "import torch\nfrom pathlib import Path\nfrom kernels import get_local_kernel\n"
        f"op = get_local_kernel(Path({str(tmp_path / 'v2')!r})).scaled\nop.build()\n"
        "assert op(torch.ones(2)).tolist() == [2, 2]\nassert op.native is not None"
    )
    done = python("-c", program)
    assert done.returncode == 0, done.stderr
