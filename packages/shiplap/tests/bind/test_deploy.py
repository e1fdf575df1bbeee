"""Ops as one library: a packaged model runs without shiplap, and without Python."""

import subprocess
from pathlib import Path

import pytest
import torch
from jaxtyping import Float
from torch import Tensor

import shiplap as sl
from shiplap.bind.deploy import NAME, deploy
from shiplap.errors import ShiplapError
from shiplap_testing import forked
from shiplap_testing.build import compile_c
from shiplap_testing.paths import REPOSITORY
from shiplap_testing.support import fails

BODY = """int {name}(const sl_context* ctx, const DLTensor* x, DLTensor* out) {{
  for (int64_t i = 0; i < x->shape[0]; ++i) ((float*)out->data)[i] = ((float*)x->data)[i] + 1;
  return SL_OK;
}}"""


def declared(ns, name, folder, library="step"):
    """An op with a C kernel of its own library."""

    @sl.op(f"{ns}::{name}")
    def step(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
        return x + 1

    folder.mkdir(exist_ok=True)
    library = compile_c(folder, library, {name: step}, BODY.format(name=name))
    step.kernel("cpu", sl.cabi(library, name), dtypes="float32")
    return step


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A packaged model of two ops, whose libraries lie in two places, and the folder of what they were deployed to."""
    home = tmp_path_factory.mktemp("deploy")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHIPLAP_CACHE_DIR", str(home / "cache"))
        step, back = (declared("deploy_test", name, home / name, name) for name in ("step", "back"))

        class Model(torch.nn.Module):
            def forward(self, x):
                return back(step(x)) - 1

        program = torch.export.export(Model(), (torch.randn(6),))
        torch._inductor.aoti_compile_and_package(program, package_path=str(home / "model.pt2"))
        assert deploy([step, back], home / "made") == home / "made" / NAME
    (home / "made").rename(home / "deployed")  # it can be moved
    for name in ("step", "back"):
        (home / name / f"lib{name}.so").unlink()
    return home


WITHOUT_SHIPLAP = """
import sys, torch
torch.ops.load_library(sys.argv[1])
model = torch._inductor.aoti_load_package(sys.argv[2])
x = torch.arange(6.0)
assert torch.equal(model(x), x + 1)
try:
    torch.ops.deploy_test.step(x[None])
except RuntimeError as e:
    assert "SL201" in str(e), e
else:
    raise AssertionError
assert "shiplap" not in sys.modules
"""


@pytest.mark.long
def test_a_packaged_model_runs_without_shiplap(home, tmp_path):
    (tmp_path / "alone.py").write_text(WITHOUT_SHIPLAP)
    done = forked.python(tmp_path / "alone.py", home / "deployed" / NAME, home / "model.pt2")
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in (home / "deployed").iterdir()) == ["libback.so", NAME, "libstep.so"]


def test_a_packaged_model_runs_without_python(home, tmp_path):
    torch_home, program = Path(torch.__file__).parent, tmp_path / "deploy"
    include = ["-isystem", torch_home / "include", "-isystem", torch_home / "include/torch/csrc/api/include"]
    lib = torch_home / "lib"
    libraries = [f"-L{lib}", f"-Wl,-rpath,{lib}", "-Wl,--no-as-needed", "-ltorch", "-ltorch_cpu", "-lc10", "-ldl"]
    source = REPOSITORY / "examples" / "deploy.cpp"
    done = subprocess.run(
        ["c++", "-std=c++20", "-O0", *include, "-o", program, source, *libraries],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    command = [program, home / "deployed" / NAME, home / "model.pt2"]
    done = subprocess.run(command, env={"PATH": "/nonexistent"}, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "equal\n"), done.stderr
    linked = subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout
    assert "libpython" not in linked


def test_what_cannot_be_deployed_is_refused(ns, tmp_path):
    with fails("SL308", got="no op"):
        deploy([], tmp_path)
    one, other = declared(ns, "one", tmp_path / "a"), declared(ns, "other", tmp_path / "b")
    first, second = (tmp_path / folder / "libstep.so" for folder in ("a", "b"))
    with fails("SL308", got=f"{first} and {second}"):
        deploy([one, other], tmp_path / "deployed")
    one.kernel("cpu", lambda x: x + 1, name="by_hand")
    with pytest.raises(ShiplapError, match="SL404"):
        deploy([one], tmp_path / "deployed")
