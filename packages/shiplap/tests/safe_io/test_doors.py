"""One exception through every door: the same class and id before and after native code is attached, and detached."""

from __future__ import annotations

import pytest
import torch
from jaxtyping import Float
from torch import Tensor

import shiplap as sl
from shiplap.errors import ArgumentError
from shiplap.kernels.native import binding
from shiplap_testing.build import compile_c
from shiplap_testing.effort import sampled

BODY = """
int product(const sl_context* ctx, const DLTensor* x, const DLTensor* y, DLTensor* out, int64_t k) {
  if (k == 13) { snprintf(ctx->error, ctx->error_size, "k is unlucky"); return SL_INVALID_ARGUMENT; }
  memset(out->data, 0, sizeof(float) * out->shape[0] * out->shape[1]);
  return SL_OK;
}
"""
X, Y = torch.ones(2, 3), torch.ones(3, 2)
REFUSED = {
    "SL201": (X[0], Y),
    "SL202": (X, X),
    "SL204": (X.int(), Y.int()),
    "SL205": (X, Y.double()),
    "SL206": (X, Y.to("meta")),
    "SL208": (X, Y, -1),
    "SL209": (X, None),  # the dispatcher takes None for any tensor
}


@pytest.fixture(scope="module", params=["python", "native", "detached"])
def op(request, tmp_path_factory):
    """A product of zeros, served as the parameter says."""
    folder, name = tmp_path_factory.mktemp("doors"), f"doors_{request.param}"
    (folder / "cache").mkdir(mode=0o700)

    @sl.op(f"{name}::product", requires=["k >= 0", "4 * k <= 400"])
    def product(x: Float[Tensor, "n c"], y: Float[Tensor, "c m"], k: int = 1) -> Float[Tensor, "n m"]:
        return 0 * k * (x @ y)

    product.kernel("cpu", sl.cabi(compile_c(folder, name, {"product": product}, BODY), "product"), dtypes="float32")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHIPLAP_CACHE_DIR", str(folder / "cache"))
        patch.setenv("SHIPLAP_NATIVE", "0" if request.param == "python" else "1")
        if request.param != "python":
            binding.build(product)
        if request.param == "detached":
            patch.setenv("SHIPLAP_NATIVE", "0")
            product.drop_native()
        yield product
        assert (product.native is not None) == (request.param == "native")


def doors(op):
    """Every way to call an eager op."""
    registered = getattr(torch.ops, op.spec.namespace)
    return {
        "op": op,
        "torch.ops": registered.product,
        "default": registered.product.default,
        "below autograd": op.below_autograd,
        "out": lambda *args: op.out(*args, out=torch.empty(2, 2)),
        "torch.ops, out": lambda *args: registered.product__out(*args, out=torch.empty(2, 2)),
    }


@pytest.mark.parametrize("id", sampled(REFUSED, 3))
def test_a_refused_call_is_the_same_error_through_every_door(op, id):
    texts = set()
    with torch.no_grad():
        for door, call in doors(op).items():
            with pytest.raises(ArgumentError) as caught:
                call(*REFUSED[id])
            assert caught.value.id == id, door
            texts.add(str(caught.value))
    assert len(texts) == 1


@pytest.mark.parametrize("at", [0, 1])
def test_nothing_in_place_of_a_tensor_is_named_before_anything_else(op, at):
    """Also where other rules of an argument are broken with it: nothing can be asked of a tensor that is not there."""
    args = [X.int(), Y.int()]
    args[at] = None
    for door, call in doors(op).items():
        with torch.no_grad(), pytest.raises(ArgumentError) as caught:
            call(*args)
        assert (caught.value.id, caught.value.got) == (("SL209", "None") if at == 0 else ("SL204", "torch.int32")), door


NO_TENSORS = {
    "none": None,
    "number": 3,
    "text": "out",
    "endless": iter(int, 1),
    "array": X.numpy(),
    "sparse": torch.ones(2, 2).to_sparse(),
    "nested": torch.nested.nested_tensor([X[0], X[0]]),
    "jagged": torch.nested.nested_tensor([X[0], X[0]], layout=torch.jagged),
}


@pytest.mark.parametrize("kind", NO_TENSORS)
@pytest.mark.parametrize("graded", [False, True])
def test_what_a_kernel_cannot_write_to_is_refused_by_name(op, kind, graded):
    given, registered = NO_TENSORS[kind], getattr(torch.ops, op.spec.namespace).product__out
    with torch.set_grad_enabled(graded):
        with pytest.raises(ArgumentError, match="SL212"):
            op.out(X, Y, out=given)
        if given is not None:
            with pytest.raises(ArgumentError, match="SL213"):
                op.out(X, Y, out=torch.empty(2, 2), workspace=given)
        else:
            with pytest.raises(ArgumentError, match="SL212"):
                registered(X, Y, out=None)


@pytest.mark.parametrize("called_before", [False, True])
def test_of_two_faults_the_same_one_is_named(op, called_before):
    """Also by the code of a call that has succeeded before, which looks at addresses first."""
    if called_before:
        op(X, Y)
    with torch.no_grad():
        for door, call in doors(op).items():
            with pytest.raises(ArgumentError) as caught:
                call(X[0], Y.to_sparse())
            assert caught.value.id == "SL201", door


def test_a_number_that_needs_more_than_64_bits_keeps_no_precondition(op):
    """4 * 2**62 is 0 for a processor."""
    with torch.no_grad():
        for door, call in doors(op).items():
            with pytest.raises(ArgumentError) as caught:
                call(X, Y, 2**62)
            assert caught.value.id == "SL208", door


@pytest.mark.parametrize("kind", ["sparse", "nested", "jagged"])
def test_a_tensor_without_strides_is_one_of_the_wrong_layout(op, kind):
    for call in (op, lambda *args: op.out(*args, out=torch.empty(2, 2))):
        with pytest.raises(ArgumentError, match=r"SL207: .*\n.*argument 'y'"):
            call(X, NO_TENSORS[kind])


def test_an_error_of_the_kernel_is_the_same_through_every_door(op):
    raised = set()
    with torch.no_grad():
        for call in doors(op).values():
            with pytest.raises(ArgumentError, match="SL211") as caught:
                call(X, Y, 13)
            raised.add((type(caught.value), caught.value.id))
    assert len(raised) == 1


@pytest.mark.parametrize(
    ("call", "backend"),
    [
        ("op", "aot_eager"),
        ("torch.ops", "inductor"),
        pytest.param("op", "inductor", marks=pytest.mark.long),
        pytest.param("torch.ops", "aot_eager", marks=pytest.mark.long),
    ],
)
def test_compiled_code_raises_it_at_run_time(op, call, backend, fresh_compiler):
    compiled = torch.compile(lambda x, y: doors(op)[call](x, y, 13), backend=backend, fullgraph=True)
    with pytest.raises(ArgumentError, match="SL211"), torch.no_grad():
        compiled(X, Y)


@pytest.mark.parametrize("id", [id for id in REFUSED if id != "SL206"])
def test_a_trace_quotes_it_and_has_it_in_its_chain(op, id, fresh_compiler):
    """Dynamo wraps whatever a fake raises in an exception of its own."""
    tensors, rest = REFUSED[id][:2], REFUSED[id][2:]
    compiled = torch.compile(lambda x, y: op(x, y, *rest), backend="eager")
    with pytest.raises(torch._dynamo.exc.TorchRuntimeError, match=id) as caught:
        compiled(*tensors)
    chain, e = [], caught.value
    while e is not None:
        chain.append(e)
        e = e.__cause__ or e.__context__
    assert [e.id for e in chain if isinstance(e, ArgumentError)] == [id]


def test_a_missing_argument_has_one_error_at_both_doors(op):
    for door in ("op", "torch.ops"):
        with pytest.raises(ArgumentError, match=r"SL209(.|\n)*missing a required argument: 'y'"):
            doors(op)[door](X)


def test_what_torch_keys_by_the_op_is_found_after_attaching(op):
    registered = doors(op)["default"]
    assert {registered: 1}[getattr(torch.ops, op.spec.namespace).product.default] == 1
