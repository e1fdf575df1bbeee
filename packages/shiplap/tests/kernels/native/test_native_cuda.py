"""The native binding of kernels for CUDA as far as it shows without a GPU: source, build, symbols, attachment."""

import re

import pytest
import torch
from elftools.elf.elffile import ELFFile
from jaxtyping import Float
from torch import Tensor

import shiplap as sl
from shiplap.codegen.native import NativeOp, native_source
from shiplap.declare.dim_expression import Expr
from shiplap.kernels.native import binding
from shiplap_testing.build import compile_c

BODY = """
int step(const sl_context* ctx, const DLTensor* x, DLTensor* out) {
  for (int64_t i = 0; i < x->shape[0]; ++i) ((float*)out->data)[i] = ((float*)x->data)[i] + 1;
  return ctx->stream ? SL_INTERNAL : SL_OK;
}
"""


def declare(name):
    @sl.op(name)
    def step(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
        return x + 1

    return step


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Libraries of the kernels, one for each device type, and a cache: all tests build the same binding, once."""
    folder = tmp_path_factory.mktemp("native_cuda")
    step = declare("native_cuda_test::step")
    for name in ("cpu", "cuda"):
        (folder / name).mkdir()
        compile_c(folder / name, "step", {"step": step}, BODY)
    return folder


@pytest.fixture
def step(home, monkeypatch):
    """An op with a kernel for each device type, each in a library of its own; nothing tells where CUDA might be."""
    for variable in ("CUDA_HOME", "CUDA_PATH", "CPATH", "CPLUS_INCLUDE_PATH"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("SHIPLAP_CACHE_DIR", str(home / "cache"))
    step = declare("native_cuda_test::step")
    for device in ("cpu", "cuda"):
        step.kernel(device, sl.cabi(home / device / "libstep.so", "step"), dtypes="float32")
    return step


def test_one_unit_serves_both_device_types(step):
    spec = step.spec
    text = native_source(
        [NativeOp(spec, "step", (spec.opname,), d, Expr.parse("n", ""), out=True) for d in ("cpu", "cuda")]
    )
    cpu, cuda = text.split("namespace op_1 {")
    assert "guard" not in cpu
    assert "nullptr, scratch, message" in cpu
    order = [
        "type_x = t_x.dtype()",
        "Tensor t_out = empty(",
        "scratch = workspace(needed",
        "const DeviceGuard guard(device);",
        "current_stream(device), scratch",
        "reinterpret_cast<Kernel>(kernels[0].load())(&context",
    ]
    position = 0
    for fragment in order:
        position = cuda.find(fragment, position)
        assert position >= 0, fragment
    assert cuda.count("const DeviceGuard guard(device);") == 2, "the out-variant too"
    assert re.findall(r'Registration registration\("\w+", "(\w+)"', text) == ["CPU", "CUDA"]
    assert len(re.findall(r"\.def\(", text)) == 2, "a schema is defined once"


@pytest.mark.long
def test_it_is_built_without_a_cuda_toolkit(step):
    library = binding.build(step)
    with library.open("rb") as file:
        elf = ELFFile(file)
        needed = [t.needed for t in elf.get_section_by_name(".dynamic").iter_tags() if t.entry.d_tag == "DT_NEEDED"]
        symbols = list(elf.get_section_by_name(".dynsym").iter_symbols())
    missing = {s.name for s in symbols if s["st_shndx"] == "SHN_UNDEF"}
    exported = {s.name for s in symbols if s["st_shndx"] != "SHN_UNDEF" and s.name.startswith("shiplap_")}
    assert exported == {
        "shiplap_attach",
        "shiplap_choose",
        "shiplap_code",
        "shiplap_find",
        "shiplap_lead",
        "shiplap_poison",
        "shiplap_refusal",
        "shiplap_set_error",
    }
    assert {"aoti_torch_create_device_guard", "aoti_torch_get_current_device_index"} <= missing
    assert not [n for n in needed if re.match(r"libcu|libnv|libtorch_cuda", n)], "one binary, with and without CUDA"
    assert not [n for n in missing if n.startswith(("cuda", "cu")) or "cuda_stream" in n]


@pytest.mark.long
def test_each_device_type_is_attached_where_torch_has_it(step, recwarn):
    binding.build(step)
    assert torch.equal(step(torch.ones(3)), torch.full((3,), 2.0))
    messages = [str(w.message) for w in recwarn if issubclass(w.category, sl.ShiplapNotice)]
    if torch.version.cuda:
        assert step.native.devices == ("cpu", "cuda")
        assert not messages
        return
    assert step.native.devices == ("cpu",)
    assert messages == [f"{step.spec.name} on cuda stays with the Python binding: this torch has no CUDA"]
    assert binding.state(step) == ("native", str(step.native.library))
    assert binding.state(step, "cuda") == ("python", "this torch has no CUDA")


def test_redeclaring_drops_both(step):
    binding.build(step)
    attached = step.native
    step.drop_native()
    assert step.native is None
    assert all(entry.form.calls == 0 for entry in attached.parts.values())
    assert torch.equal(step(torch.ones(2)), torch.full((2,), 2.0))
    assert step.native is not None, "attached again at the first call"


@pytest.mark.long
def test_only_cuda(ns, tmp_path, monkeypatch):
    step = declare(f"{ns}::step")
    step.kernel("cuda", sl.cabi(compile_c(tmp_path, "step", {"step": step}, BODY), "step"), dtypes="float32")
    monkeypatch.setenv("SHIPLAP_CACHE_DIR", str(tmp_path / "cache"))
    if torch.version.cuda:
        binding.build(step)
        assert step.native.devices == ("cuda",)
    else:
        with pytest.warns(sl.ShiplapNotice, match="on cuda stays with"), pytest.raises(sl.ShiplapError, match="SL405"):
            binding.build(step)
        assert step.native is None
    assert torch.equal(step(torch.ones(2)), torch.full((2,), 2.0)), "the reference, on the CPU"
