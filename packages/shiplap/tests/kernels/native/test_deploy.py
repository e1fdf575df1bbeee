"""Ops as one library: a packaged model runs without shiplap, and without Python."""

import shutil
import subprocess
import zipfile

import pytest
import torch
from jaxtyping import Float
from torch import Tensor

import shiplap as sl
from shiplap.codegen.environment import render_source
from shiplap.errors import ShiplapError
from shiplap.kernels.native.deploy import DEPLOYED_LIBRARY_NAME, deploy
from shiplap.packaging import model, package_model
from shiplap.torch_private.symbolic_sizes import sizes_from_zero
from shiplap_headers import cmake_dir
from shiplap_testing import forked
from shiplap_testing.build import compile_c
from shiplap_testing.paths import REPOSITORY
from shiplap_testing.support import fails

BODY = """int {name}(const sl_context* ctx, const DLTensor* x, DLTensor* out) {{
  for (int64_t i = 0; i < x->shape[0]; ++i) ((float*)out->data)[i] = ((float*)x->data)[i] + 1;
  return SL_OK;
}}"""


def declared(ns, name, folder, stem="step"):
    """An op with a C kernel of its own library."""

    @sl.op(f"{ns}::{name}")
    def step(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
        return x + 1

    folder.mkdir(exist_ok=True)
    library = compile_c(folder, stem, {name: step}, BODY.format(name=name))
    step.kernel("cpu", sl.cabi(library, name), dtypes="float32")
    return step


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder for a model of two ops, whose libraries lie in two places."""
    home = tmp_path_factory.mktemp("deploy")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHIPLAP_CACHE_DIR", str(home / "cache"))
        yield home


@pytest.fixture(scope="module")
def ops(home):
    return [declared("deploy_test", name, home / name, name) for name in ("step", "back")]


@pytest.fixture(scope="module")
def program(ops):
    step, back = ops

    class Model(torch.nn.Module):
        def forward(self, x):
            return back(step(x)) - 1

    return torch.export.export(Model(), (torch.randn(6),))


WITHOUT_SHIPLAP = """
import sys, torch
torch.ops.load_library(sys.argv[1])
model = torch._inductor.aoti_load_package(sys.argv[2])
x = torch.arange(6.0)
assert torch.equal(model(x), x + 1)
assert "shiplap" not in sys.modules
"""


@pytest.mark.long
def test_a_packaged_model_runs_with_a_library_of_its_ops(home, ops, program, tmp_path):
    """Before ``packed`` takes the libraries away."""
    torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "plain.pt2"))
    assert deploy(ops, tmp_path / "made") == tmp_path / "made" / DEPLOYED_LIBRARY_NAME
    (tmp_path / "made").rename(tmp_path / "deployed")  # it can be moved
    (tmp_path / "alone.py").write_text(WITHOUT_SHIPLAP)
    done = forked.python(tmp_path / "alone.py", tmp_path / "deployed" / DEPLOYED_LIBRARY_NAME, tmp_path / "plain.pt2")
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in (tmp_path / "deployed").iterdir()) == [
        "libback.so",
        DEPLOYED_LIBRARY_NAME,
        "libstep.so",
    ]


@pytest.fixture(scope="module")
def packed(home, program):
    """The model as one file that was moved, and nothing left of what it was made from but the declarations."""
    made = package_model(program, home / "made.pt2")
    assert made.ops == ("deploy_test::back", "deploy_test::step")
    made.path.rename(home / "model.pt2")
    for name in ("step", "back"):
        (home / name / f"lib{name}.so").rename(home / f"{name}.kept")
    shutil.rmtree(home / "cache")
    yield home / "model.pt2"
    for name in ("step", "back"):
        (home / f"{name}.kept").rename(home / name / f"lib{name}.so")


ONE_CALL = """
import gc, sys, torch
x = torch.arange(6.0)
for _ in range(2):  # the second time the ops are there
    model, other = (torch._inductor.aoti_load_package(sys.argv[1]) for _ in range(2))
    assert torch.equal(model(x), x + 1)
    assert torch.equal(other(x), x + 1)
    del model, other
    gc.collect()
assert torch.equal(torch.ops.deploy_test.step(x), x + 1), "they outlive the models"
try:
    torch.ops.deploy_test.step(x[None])
except RuntimeError as e:
    assert "SL201" in str(e), e
else:
    raise AssertionError
assert "shiplap" not in sys.modules
"""


def test_one_file_is_loaded_by_one_call_without_shiplap(packed, tmp_path):
    (tmp_path / "alone.py").write_text(ONE_CALL)
    done = forked.python(tmp_path / "alone.py", packed)
    assert done.returncode == 0, done.stderr
    assert "shiplap:" not in done.stderr


@pytest.mark.long  # headers of ATen: ten seconds of a compiler
def test_the_example_project_builds_a_program_that_loads_one_file_without_python(packed, tmp_path):
    """``find_package(Torch)`` and the CMake module of shiplap-headers, as docs/ship.md has them."""
    words = [f"-DCMAKE_PREFIX_PATH={torch.utils.cmake_prefix_path}", f"-DCMAKE_MODULE_PATH={cmake_dir()}"]
    words += [f"-DSHIPLAP_TORCH_VERSION={torch.__version__.partition('+')[0]}", "-DCMAKE_BUILD_TYPE=Debug"]
    build = tmp_path / "build"
    for command in (
        ["cmake", "-S", REPOSITORY / "examples" / "deploy", "-B", build, *words],
        ["cmake", "--build", build, "--target", "deploy"],
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    program = build / "deploy"
    done = subprocess.run([program, packed], env={"PATH": "/nonexistent"}, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "equal\n"), done.stderr
    linked = subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout
    assert "libpython" not in linked


HOSTILE = """
import json, sys, torch
model = torch._inductor.aoti_load_package(sys.argv[1])
about = model.loader.get_metadata()
assert about["SHIPLAP_TORCH"] == torch.__version__, about
assert json.loads(about["SHIPLAP_INPUTS"]) == {"x": "float32 [6]"}, about
x, more = torch.arange(6.0), torch.arange(12.0)
for wrong in ((x.long(),), (x.double(),), (more[:7],), (more[::2],), (x[None],), (x[0],), (), (x, x)):
    try:
        model.loader.run(list(wrong))
    except RuntimeError as e:
        print(str(e).splitlines()[0][:200], file=sys.stderr)
    else:
        raise AssertionError(wrong)
    assert torch.equal(model(torch.arange(6.0)), torch.arange(6.0) + 1), "the program goes on"
"""


def test_a_package_says_what_it_is_and_refuses_other_inputs(packed, tmp_path):
    (tmp_path / "hostile.py").write_text(HOSTILE)
    done = forked.python(tmp_path / "hostile.py", packed)
    assert done.returncode == 0, done.stderr


def test_the_front_of_a_package_refuses_another_release_and_another_processor(monkeypatch, tmp_path):
    """By its text: neither is at hand in a test."""
    words = {"ops": "libops.so", "model": "m.so", "functions": [], "inputs": None}
    text = render_source("package.cpp.jinja", **words, features=("avx2",), checks=False)
    assert '__builtin_cpu_supports("avx2")' in text
    assert "aoti_torch_abi_version() " not in text.partition("bool fits_here")[0]
    assert "setenv" not in text
    assert "setenv" in render_source("package.cpp.jinja", **words, features=(), checks=True)
    plain = render_source("package.cpp.jinja", **{**words, "ops": ""}, features=("avx2",), checks=False)
    assert "if (fits_here()) handle" in plain
    assert "load_ops" not in plain
    assert "void* opened(" in plain, "the model is opened without ops as well"


@pytest.mark.long  # a package is compiled
def test_a_package_without_ops_has_the_same_checks(tmp_path):
    """A library in front, which refuses another release, and inputs of other dtypes and sizes."""

    class AddOne(torch.nn.Module):
        def forward(self, x):
            return x + 1

    made = package_model(torch.export.export(AddOne(), (torch.arange(6.0),)), tmp_path / "plain.pt2")
    assert (made.ops, made.size) == ((), 0)
    with zipfile.ZipFile(made.path) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".so")]
        assert f"{name}.model" in archive.namelist()
        assert b"the model was made for torch" in archive.read(name)
    (tmp_path / "hostile.py").write_text(HOSTILE)
    done = forked.python(tmp_path / "hostile.py", made.path)
    assert done.returncode == 0, done.stderr


@pytest.mark.long  # a package is compiled
def test_a_package_takes_an_input_without_elements(tmp_path):
    """Its strides are no product of its sizes: those of ``torch.empty(2, 0, 3)`` are 3, 3 and 1."""

    class AddOne(torch.nn.Module):
        def forward(self, x):
            return x + 1

    rows = ({1: torch.export.Dim("rows", min=0, max=64)},)
    with sizes_from_zero():  # torch takes two rows for the fewest otherwise, and the model itself refuses none
        program = torch.export.export(AddOne(), (torch.ones(2, 5, 3),), dynamic_shapes=rows)
    model = torch._inductor.aoti_load_package(str(package_model(program, tmp_path / "rows.pt2").path))
    for x in (torch.ones(2, 4, 3), torch.empty(2, 0, 3), torch.ones(2, 4, 3)[:, :0]):
        assert torch.equal(model(x), x + 1)
    with pytest.raises(RuntimeError):
        model(torch.ones(2, 8, 3)[:, ::2])


@pytest.mark.parametrize(
    ("flags", "code", "refused"),
    [
        (["-static-libstdc++"], "import os; os.kill(os.getpid(), 11)", True),
        (["-static-libstdc++"], "1 / 0", False),
        ([], "import os; os.kill(os.getpid(), 11)", False),
    ],
)
def test_a_library_with_a_runtime_of_its_own_that_ends_the_process_is_refused(
    flags, code, refused, tmp_path, monkeypatch
):
    """Another failure to load is not the compiler's, and what shares torch's runtime is not loaded at all."""
    source, library, package = tmp_path / "m.cpp", tmp_path / "m.so", tmp_path / "m.pt2"
    source.write_text("#include <string>\nextern \"C\" int f() { return std::stoi(std::string(3, '1')); }\n")
    subprocess.run(["g++", "-shared", "-fPIC", "-o", library, source, *flags], check=True)
    with zipfile.ZipFile(package, "w") as archive:
        archive.write(library, "m/data/aotinductor/model/m.so")
    monkeypatch.setattr(model, "_LOAD", code)
    monkeypatch.setenv("CXX", "/some/g++")
    if not refused:
        model._refuse_broken(package, package)
        return
    with fails("SL408", "/some/g++ has linked the C++ runtime; SIGSEGV ends", "CXX=/usr/bin/g++"):
        model._refuse_broken(package, package)


def test_where_the_ops_are_declared_those_serve_the_package(packed, ops, monkeypatch):
    """No definition meets another: the model is loaded beside the declarations, and calls them."""
    seen = []
    model = torch._inductor.aoti_load_package(str(packed))
    monkeypatch.setattr(type(ops[0]), "pick_kernel", lambda self, call: seen.append(self.spec.name))
    x = torch.arange(6.0)
    assert torch.equal(model(x), x + 1)
    assert seen == ["deploy_test::step", "deploy_test::back"], "the reference, by Python"


def test_what_only_python_can_run_is_refused_by_name_before_anything_is_compiled(ns, tmp_path, monkeypatch):
    @sl.op(f"{ns}::halved")
    def halved(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
        return x / 2

    def compiled(*args):
        raise AssertionError("something is compiled")

    monkeypatch.setattr(model, "compile_package", compiled)
    for kernel, got in (
        (None, "the reference, run by Python on cpu"),
        (lambda x: x / 2, "by_hand, launched by Python on cpu"),
    ):
        if kernel is not None:
            halved.kernel("cpu", kernel, name="by_hand")

        class Model(torch.nn.Module):
            def forward(self, x):
                return halved(x) + 1

        program = torch.export.export(Model(), (torch.randn(6),))
        with fails("SL307", where=halved.spec.name, got=got):
            package_model(program, tmp_path / "model.pt2")
    assert not list(tmp_path.iterdir())


def test_launches_that_nobody_compiled_stay_behind_where_only_their_library_is_wanted(ns, tmp_path):
    """As those of gradients, which share a kernel library with the ops of a model that does not train."""
    pytest.importorskip("triton")
    from tests.kernels.triton.test_kernel import copied

    @sl.op(f"{ns}::wanted")
    def wanted(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
        return x + 1

    @sl.op(f"{ns}::other")
    def other(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
        return x + 1

    both = {"wanted": wanted, "other": other}
    library = compile_c(tmp_path, "both", both, "".join(BODY.format(name=name) for name in both))
    for name, op in both.items():
        op.kernel("cpu", sl.cabi(library, name), dtypes="float32")
    other.kernel("cuda", sl.triton(copied, grid="n", arguments={"skip": 1}, constants={"BLOCK": 32}))
    assert deploy([wanted], tmp_path / "made").is_file()
    with fails("SL620", f"{ns}::other", "no cubin"):
        deploy([wanted, other], tmp_path / "made")


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
