"""How much Python a call runs, and a wrong one between the caller and the exception."""

from __future__ import annotations

import sys
from types import FrameType

import pytest
import torch
from jaxtyping import Float, Int32
from torch import Tensor

import shiplap as sl
from shiplap.kernels.native import binding
from shiplap_testing.build import compile_c

LIMIT = 36  # frames

BODY = """int conv(const sl_context* ctx, const DLTensor* feats, const DLTensor* weight, const DLTensor* table,
         DLTensor* out, const int64_t* kernel, int64_t count, int64_t groups) {
  if (groups == 7) { snprintf(ctx->error, ctx->error_size, "seven is unlucky"); return SL_INVALID_ARGUMENT; }
  return SL_OK;
}"""


def declare(ns):
    @sl.op(f"{ns}::conv", dims={"k": "prod(kernel)"}, requires=("min(kernel) >= 1",))
    def conv(
        feats: Float[Tensor, "n ci"],
        weight: Float[Tensor, "co k ci"],
        table: Int32[Tensor, "n k"],
        kernel: list[int],
        groups: int = 1,
    ) -> Float[Tensor, "n co"]:
        return feats.new_zeros(len(feats), len(weight))

    return conv


@pytest.fixture(scope="module", params=["reference", "python", pytest.param("native", marks=pytest.mark.long)])
def conv(request, tmp_path_factory):
    """The op under each binding, after one good call: it has been compiled, and nothing of it has failed yet."""
    folder = tmp_path_factory.mktemp("frames")
    folder.chmod(0o700)
    op = declare(f"frames_{request.param}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHIPLAP_CACHE_DIR", str(folder))
        patch.setenv("SHIPLAP_NATIVE", "1" if request.param == "native" else "0")
        if request.param != "reference":
            op.kernel("cpu", sl.cabi(compile_c(folder, "conv", {"conv": op}, BODY), "conv"), dtypes="float32")
        if request.param == "native":
            binding.build(op)
        op(**GOOD)
        yield op


GOOD = {
    "feats": torch.zeros(5, 4),
    "weight": torch.zeros(6, 9, 4),
    "table": torch.zeros(5, 9, dtype=torch.int32),
    "kernel": [3, 3],
    "groups": 1,
}
WRONG = {
    "rank": ({"feats": torch.zeros(5)}, "SL201"),
    "size": ({"table": torch.zeros(7, 9, dtype=torch.int32)}, "SL202"),
    "relation": ({"kernel": [3, 3, 3]}, "SL202"),
    "dtype": ({"table": torch.zeros(5, 9)}, "SL204"),
    "dtypes": ({"weight": torch.zeros(6, 9, 4).double()}, "SL205"),
    "precondition": ({"kernel": [-3, -3]}, "SL208"),
    "kind of the first": ({"feats": "x"}, "SL209"),
    "kind of the last": ({"groups": 1.5}, "SL209"),
    "one too many": ({"more": 1}, "SL209"),
}


def frames(call) -> tuple[Exception, list[str]]:
    """What ``call`` raised, and the functions that were entered until then."""
    names: list[str] = []

    def entered(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            names.append(frame.f_code.co_qualname)

    previous = sys.getprofile()
    sys.setprofile(entered)
    try:
        call()
    except Exception as e:
        sys.setprofile(previous)
        return e, names
    finally:
        sys.setprofile(previous)
    raise AssertionError("the call was accepted")


@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_call_takes_few_frames(conv, case, by_name):
    changed, id = WRONG[case]
    args = {**GOOD, **changed}
    error, entered = frames((lambda: conv(**args)) if by_name or "more" in args else lambda: conv(*args.values()))
    assert isinstance(error, sl.ShiplapError)
    assert type(error).__name__ == "ArgumentError", "the same class under every binding"
    assert error.id == id
    assert len(entered) < LIMIT, entered


def test_what_native_code_refuses_is_not_looked_at_again(conv):
    if conv.native is not None:
        error, entered = frames(lambda: conv(**{**GOOD, "groups": 7}))
        assert (error.id, error.got) == ("SL211", "seven is unlucky")
        assert len(entered) < LIMIT, entered
        error, entered = frames(lambda: conv(*{**GOOD, "feats": torch.zeros(5)}.values()))
        assert "bind" not in entered, "Python's checks"


STEPS = [  # as the module dispatch/op.py tells them: what was compiled from the declaration has no class
    "DirectCall.__call__",
    "is_dynamo_compiling",
    "Executor.execute",
    "Executor.execute_anew",
    "bind",
    "Binding.__init__",
    "Executor.pick_kernel",
    "OpState.eager_kernels",
    "Kernel.variant_for_call",
    "Kernel.why_refused",
    "Executor.run_bound_call",
    "PythonKernel.run_call",
    "empty_outputs",
    "allocate",
    "PythonKernel._call",
    "launch",
    "kernel",
]


def test_a_plain_call_of_a_python_kernel_is_these_steps(ns):
    """Whoever adds a frame to every eager call of every op says so here."""

    @sl.op(f"{ns}::twice")
    def twice(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
        return x * 2

    entered: list[str] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            name = frame.f_code.co_qualname
            entered.append("Binding.__init__" if "__create_fn__" in name else name.rpartition("<locals>.")[2])

    @twice.kernel("cpu")
    def kernel(x, *, out):
        sys.setprofile(None)
        torch.mul(x, 2, out=out)

    x = torch.ones(3)
    twice.kernels["cpu"][0].unchanged.left = 0  # the first calls are looked at more closely
    for _ in range(2):  # at the first call functions are compiled and the environment is read
        entered.clear()
        previous = sys.getprofile()
        sys.setprofile(note)
        try:
            assert torch.equal(twice(x), x * 2)
        finally:
            sys.setprofile(previous)
    assert entered == STEPS
