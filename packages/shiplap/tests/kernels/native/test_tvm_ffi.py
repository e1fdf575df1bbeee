"""``tvm_ffi.export``: the C ABI kernels of ``test_native`` as tvm-ffi functions, against the ops themselves."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from jaxtyping import Float
from torch import Tensor

import shiplap as sl
from shiplap.kernels.native import build_plan
from shiplap.kernels.native import tvm_ffi as ffi
from shiplap_testing.build import compile_c, settled
from shiplap_testing.support import fails
from tests.kernels.native.test_binding import BODY, SYMBOLS, Ops, declare_bump, declare_keep, declare_mix, declare_total

EXPORTED = ("mix", "keep", "bump")  # each is compiled by itself
ARGUMENTS = (3, True, [1, 2], [0.5], 2.0, "abc")  # of mix, after the tensors


@pytest.fixture(scope="module")
def ops(tmp_path_factory):
    pytest.importorskip("tvm_ffi")
    folder, ops = tmp_path_factory.mktemp("tvm_ffi"), Ops()
    ops.mix, ops.keep, ops.bump, ops.total = declare_mix(), declare_keep(), declare_bump(), declare_total()
    library = settled(compile_c(folder, "native", {name: getattr(ops, name) for name in SYMBOLS}, BODY))
    ops.mix.kernel("cpu", sl.cabi(library, "mix", strided=["x"]), workspace="n * c * itemsize")
    ops.keep.kernel("cpu", sl.cabi(library, "keep"), dtypes="float32")
    ops.bump.kernel("cpu", sl.cabi(library, "bump"))
    ops.total.kernel("cpu", sl.cabi(library, "total"))
    cache = folder / "cache"
    cache.mkdir(mode=0o700)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHIPLAP_CACHE_DIR", str(cache))
        patch.setenv("SHIPLAP_NATIVE", "0")  # the Python binding is what we compare with
        ops.exported = {name: ffi.export(getattr(ops, name)) for name in EXPORTED}
        yield ops


def outputs(rows, columns, dtype=torch.float32):
    return torch.full((rows, columns), float("nan"), dtype=dtype), torch.full((4,), -7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("bias", [True, False])
def test_values_are_those_of_the_op(ops, dtype, bias):
    x = torch.randn(5, 3, dtype=dtype).t()  # strided, which mix takes
    b = torch.randn(5, dtype=dtype) if bias else None
    y, info = outputs(3, 5, dtype)
    k, flag, ks, ps, p, mode = ARGUMENTS
    assert ops.exported["mix"](x, b, *ARGUMENTS, y, info) is None
    want, facts = ops.mix(x, b, k, flag, ks, ps, p=p, mode=mode)
    assert torch.equal(y, want)
    assert info[:3].tolist() == facts[:3].tolist() == [3, 2, 15 * dtype.itemsize]


def test_a_data_dependent_size_is_returned(ops):
    x = torch.tensor([1.0, -1.0, 2.0, -3.0])
    out = torch.zeros(4)
    assert ops.exported["keep"](x, 0, out) == 2
    assert torch.equal(out[:2], ops.keep(x))
    with pytest.raises(RuntimeError, match="SL302: a data-dependent size exceeds its bound"):
        ops.exported["keep"](x, 9, out)


def test_an_argument_is_mutated(ops):
    table = torch.ones(3)
    ops.exported["bump"](table, torch.arange(3.0))
    assert table.tolist() == [1.0, 2.0, 3.0]


@pytest.mark.long
def test_scalars_have_no_dims(ops):
    out = torch.zeros(())
    ffi.export(ops.total)(torch.tensor(2.0), out)
    assert out.item() == 3.0


def test_anything_that_speaks_dlpack_will_do(ops):
    import tvm_ffi

    x, out = np.array([4.0, -4.0], np.float32), np.zeros(2, np.float32)
    assert ops.exported["keep"](tvm_ffi.from_dlpack(x), 0, tvm_ffi.from_dlpack(out)) == 1
    assert out.tolist() == [4.0, 0.0]


def calls(ops):
    """Calls that are refused: the function, its arguments, what the text says."""
    x, (y, info), v = torch.randn(2, 3), outputs(2, 3), torch.ones(4)
    mix, keep, bump = ops.exported["mix"], ops.exported["keep"], ops.exported["bump"]
    k = ARGUMENTS
    return {
        "rank": (mix, (v, None, *k, y, info), "SL201: a tensor has the wrong number of dims"),
        "size": (mix, (x, v, *k, y, info), r"SL202: sizes disagree\n  where    native_test::mix, argument 'bias'"),
        "dtype": (mix, (x.to(torch.int32), None, *k, y, info), "SL204: the dtype is not accepted"),
        "dtype of the kernel": (keep, (v.double(), 0, v.double()), "SL204: the dtype is not accepted"),
        "dtypes": (mix, (x, v[:3].double(), *k, y, info), "SL205: dtypes disagree"),
        "layout": (keep, (torch.ones(8)[::2], 0, torch.ones(4)), "SL207: the memory layout is not supported"),
        "precondition": (mix, (x, None, 99, *k[1:], y, info), r"SL208: a precondition does not hold(.|\n)*k != 99"),
        "count": (keep, (v, 0), "SL209: an argument has the wrong type(.|\n)*2 arguments"),
        "kind": (keep, ("v", 0, v), "SL209: an argument has the wrong type(.|\n)*argument 'x'"),
        "none": (keep, (None, 0, v), "SL209: an argument has the wrong type(.|\n)*argument 'x'"),
        "kind of number": (keep, (v, "0", v), "SL209: an argument has the wrong type(.|\n)*argument 'extra'"),
        "kind of list": (
            mix,
            (x, None, 3, True, ["a"], [], 1.0, "", y, info),
            "SL209: an argument has the wrong type(.|\n)*'ks'",
        ),
        "shared": (bump, (v, v), "SL210: a mutated tensor is another argument too"),
        "output over input": (keep, (v, 0, v), "SL210: an output overlaps another tensor"),
        "value": (mix, (x, None, 13, *k[1:], y, info), "SL211: the op does not accept these values(.|\n)*k is unlucky"),
        "status": (mix, (x, None, 14, *k[1:], y, info), "SL305: the kernel refused its arguments(.|\n)*status 77"),
        "shape of an output": (mix, (x, None, *k, y[:1], info), "SL212: the given output does not fit"),
        "dtype of an output": (mix, (x, None, *k, y.double(), info), "SL212: the given output does not fit"),
        "layout of an output": (keep, (v, 0, torch.ones(8)[::2]), "SL212: the given output does not fit"),
        "not the CPU": (keep, (torch.ones(4, device="meta"), 0, v), "."),
    }


CALLS = (
    "rank",
    "size",
    "dtype",
    "dtype of the kernel",
    "dtypes",
    "layout",
    "precondition",
    "count",
    "kind",
    "none",
    "kind of number",
    "kind of list",
    "shared",
    "output over input",
    "value",
    "status",
    "shape of an output",
    "dtype of an output",
    "layout of an output",
    "not the CPU",
)


@pytest.mark.parametrize("name", CALLS)
def test_what_the_declaration_refuses_is_refused(ops, name):
    function, arguments, text = calls(ops)[name]
    with pytest.raises((RuntimeError, TypeError, BufferError), match=text):
        function(*arguments)


def test_every_refusal_is_tested(ops):
    assert set(calls(ops)) == set(CALLS)


@pytest.mark.long
def test_the_library_serves_a_process_without_shiplap(ops, tmp_path):
    script = tmp_path / "use.py"
    script.write_text(
        "import sys, numpy, tvm_ffi\n"
        "x, out = numpy.ones(3, numpy.float32), numpy.zeros(3, numpy.float32)\n"
        f"keep = tvm_ffi.load_module({str(ffi.build_tvm_library(ops.keep))!r}).keep\n"
        "print(keep(tvm_ffi.from_dlpack(x), 0, tvm_ffi.from_dlpack(out)), out.sum(), 'shiplap' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["3", "3.0", "False"]


def test_a_second_export_compiles_nothing(ops, monkeypatch):
    built = ffi.build_tvm_library(ops.keep)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("compiled again"))
    assert ffi.build_tvm_library(ops.keep) == built


def test_the_threads_are_those_of_torch(ops, monkeypatch):
    told = []

    class Module:
        def get_function(self, name):
            return told.append if name == "set_num_threads" else name

    import tvm_ffi

    monkeypatch.setattr(tvm_ffi, "load_module", lambda path: Module())
    monkeypatch.setattr(torch, "get_num_threads", lambda: 5)
    assert ffi.export(ops.keep) == "keep"
    assert told == [5]


def test_without_the_package_the_error_says_what_to_install(ns, monkeypatch):
    @sl.op(f"{ns}::f")
    def f(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
        return x + 1

    monkeypatch.setitem(sys.modules, "tvm_ffi", None)
    with fails("SL407", "apache-tvm-ffi", fix="install it: pip install 'shiplap[tvm-ffi]'", where=f"{ns}::f"):
        ffi.export(f)


def test_an_op_without_one_c_kernel_is_refused(ns):
    pytest.importorskip("tvm_ffi")

    @sl.op(f"{ns}::f")
    def f(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
        return x + 1

    with fails("SL404", "no kernel on the CPU", 'f.kernel("cpu", sl.cabi(...))', where=f"{ns}::f"):
        ffi.export(f)


def test_a_compiler_that_fails_is_quoted(ops, monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", "false")
    monkeypatch.setenv("SHIPLAP_CACHE_DIR", str(tmp_path))  # what another compiler has built there would be taken
    with fails("SL405", "false failed with status 1"):
        ffi.export(ops.total)
    assert build_plan.compiler_command(ops.total.spec.name)[0].endswith("false")
