"""``sl.cabi(..., align=)``: a view may begin anywhere; the kernel gets a copy, or the caller an error."""

import pytest
import torch
from jaxtyping import Float
from torch import Tensor

import shiplap as sl
from shiplap.kernels.native import binding
from shiplap_testing.build import compile_c
from shiplap_testing.support import fails

ALIGN = 32
BODY = """#include <stdint.h>
static int off(const DLTensor* t) { return t && ((uintptr_t)t->data + t->byte_offset) % 32 != 0; }
int placed(const sl_context* ctx, const DLTensor* x, const DLTensor* bias, DLTensor* out) {
  if (off(x) || off(bias) || off(out)) return SL_INTERNAL;
  const float *in = x->data, *more = bias ? bias->data : 0;
  for (int64_t i = 0; i < x->shape[0]; ++i) ((float*)out->data)[i] = in[i] + (more ? more[i] : 1);
  return SL_OK;
}
int grow(const sl_context* ctx, DLTensor* table, const DLTensor* by) {
  if (off(table) || off(by)) return SL_INTERNAL;
  for (int64_t i = 0; i < table->shape[0]; ++i) ((float*)table->data)[i] += ((float*)by->data)[i];
  return SL_OK;
}"""


def declare(ns):
    @sl.op(f"{ns}::placed")
    def placed(x: Float[Tensor, "n"], bias: Float[Tensor, "n"] | None = None) -> Float[Tensor, "n"]:
        return x + (1 if bias is None else bias)

    @sl.op(f"{ns}::grow_", mutates=["table"])
    def grow_(table: Float[Tensor, "n"], by: Float[Tensor, "n"]) -> None:
        table += by

    return placed, grow_


def bind(ops, folder, align=ALIGN):
    library = compile_c(folder, "placed", {"placed": ops[0], "grow": ops[1]}, BODY)
    for op, symbol in zip(ops, ("placed", "grow"), strict=True):
        op.kernel("cpu", sl.cabi(library, symbol, align=align), dtypes="float32")


@pytest.fixture(scope="module", params=["python", "native"])
def ops(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("align")
    folder.chmod(0o700)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHIPLAP_CACHE_DIR", str(folder))
        patch.setenv("SHIPLAP_NATIVE", "1" if request.param == "native" else "0")
        op = declare(f"align_{request.param}")
        bind(op, folder)
        if request.param == "native":
            binding.build(op[0])
        yield op
        assert (op[0].native is not None) == (request.param == "native"), "it is this binding that was tried"


def views(n):
    """Views of the same values: where an allocator puts them, and at every other place of 32 bytes."""
    values = torch.randn(n)
    for shift in range(ALIGN // 4):
        base = torch.empty(n + ALIGN // 4)
        base[shift : shift + n] = values
        yield shift, base[shift : shift + n]


@pytest.mark.parametrize("n", [0, 1, 5])
def test_arguments_are_copied_to_where_the_kernel_takes_them(ops, n):
    placed, _ = ops
    for shift, x in views(n):
        assert shift == 0 or n == 0 or x.data_ptr() % ALIGN, "a case that is none"
        assert torch.equal(placed(x), x + 1)
        for _, bias in views(n):
            assert torch.equal(placed(x, bias), x + bias)
    assert torch.equal(placed(torch.randn(2 * n)[::2].fill_(3)), torch.full((n,), 4.0))


def test_what_is_mutated_is_written_back(ops):
    _, grow = ops
    for shift, by in views(4):
        base = torch.zeros(16)
        with torch.no_grad():
            grow(base[shift : shift + 4], by)
        assert torch.equal(base[shift : shift + 4], by)
        assert not base[:shift].any()
        assert not base[shift + 4 :].any(), "and nothing beside it"


def test_an_output_of_the_caller_has_to_lie_right(ops):
    placed, _ = ops
    x, room = torch.randn(4), torch.zeros(16)
    with torch.no_grad():
        placed.out(x, out=room[:4])
        assert torch.equal(room[:4], x + 1)
        with fails("SL212", got="an address that is no multiple of 32 bytes"):
            placed.out(x, out=room[5:9])
    assert not room[4:].any()


def test_without_it_the_kernel_gets_what_the_caller_has(ns, tmp_path, monkeypatch):
    monkeypatch.setenv("SHIPLAP_NATIVE", "0")
    ops = declare(ns)
    bind(ops, tmp_path, align=1)
    with fails("SL305"):
        ops[0](torch.randn(8)[1:])


@pytest.mark.long
def test_tvm_ffi_copies_nothing_and_says_so(ns, tmp_path, monkeypatch):
    pytest.importorskip("tvm_ffi")
    from shiplap.kernels.native import tvm_ffi

    tmp_path.chmod(0o700)
    monkeypatch.setenv("SHIPLAP_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("SHIPLAP_NATIVE", "0")
    placed, grow = declare(ns)
    bind((placed, grow), tmp_path)
    exported, x, out = tvm_ffi.export(placed), torch.randn(9), torch.zeros(16)
    exported(x[:8], None, out[:8])
    assert torch.equal(out[:8], x[:8] + 1)
    for arguments in ((x[1:], None, out[:8]), (x[:8], None, out[1:9]), (x[:8], x[1:], out[:8])):
        with pytest.raises(RuntimeError, match=r"SL207(.|\n)*modulo 32|SL212(.|\n)*multiple of 32"):
            exported(*arguments)


@pytest.mark.parametrize("align", [0, 3, -16])
def test_an_alignment_is_a_power_of_two(align):
    with fails("SL404", got=f"align={align}"):
        sl.cabi("nowhere.so", "f", align=align)
