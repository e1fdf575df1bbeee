"""What outside examiners found on 2026-11-27: faults that show only where two things are unusual at once, and complex
numbers, bytes of bools, and memory beside a tensor. Each op is flagged with its fault, and passes without."""

import pytest
import torch
from jaxtyping import Bool, Complex, Float, Float32, Int8, Int32, Int64
from torch import Tensor

import shiplap as sl
from shiplap_testing.defects.defect import c_kernel, foreign
from shiplap_testing.effort import sampled

M = Float[Tensor, "n c"]
# With a fault in `make test`, and without in `nox -s long`: the sound ops of the zoo are in `make test`.
both = pytest.mark.parametrize("wrong", sampled([True, False], long=["False"]))


def failed(op, *checks, isolate=None):
    report = sl.audit(op, checks=checks, budget=600, seed=0, isolate=isolate)
    return [f.check for f in report if f.verdict == "fail"]


def doubled(ns):
    @sl.op(f"{ns}::doubled")
    def doubled(x: M) -> M:
        return x * 2

    return doubled


@both
def test_a_root_of_integers_next_to_powers_of_two(ns, wrong):
    def root(x):
        r = x.clamp_min(0).double().sqrt().long()
        return r - (r > 3037000499).long() - (r.clamp_max(3037000499).square() > x.clamp_min(0)).long()

    @sl.op(f"{ns}::root")
    def whole_root(x: Int64[Tensor, "n"]) -> Int64[Tensor, "n"]:
        return root(x)

    @whole_root.kernel("cpu")
    def _(x, *, out):
        out.copy_(x.clamp_min(0).double().sqrt().long() if wrong else root(x))

    assert failed(whole_root, "special") == ["special"] * wrong


@both
def test_a_threshold_of_a_product_with_a_scalar(ns, wrong):
    """With the default of 1, the element and the product are the same."""

    @sl.op(f"{ns}::soft_positive", requires=("beta > 0", "beta < 100"))
    def soft_positive(x: Float32[Tensor, "n"], beta: float = 1.0) -> Float32[Tensor, "n"]:
        y = x.double() * beta
        return (torch.logaddexp(y, torch.zeros_like(y)) / beta).float()

    @soft_positive.kernel("cpu")
    def _(x, beta):
        y = x.double() * beta
        return torch.where((x if wrong else y) > 20, x.double(), y.clamp_max(500).exp().log1p() / beta).float()

    assert failed(soft_positive, "special") == ["special"] * wrong


@pytest.mark.long
@both
def test_an_exponent_from_a_logarithm(ns, wrong):
    def exponent(x):
        return torch.frexp(torch.nan_to_num(x).abs().clamp(1e-3, 1e3)).exponent.to(x.dtype) - 1

    @sl.op(f"{ns}::exponent")
    def power(x: Float32[Tensor, "n"]) -> Float32[Tensor, "n"]:
        return exponent(x)

    @power.kernel("cpu")
    def _(x, *, out):
        out.copy_(torch.nan_to_num(x).abs().clamp(1e-3, 1e3).log2().floor() if wrong else exponent(x))

    assert failed(power, "special") == ["special"] * wrong


@both
def test_a_bool_is_stored_as_one(ns, wrong):
    @sl.op(f"{ns}::negative")
    def negative(x: Int8[Tensor, "n"]) -> Bool[Tensor, "n"]:
        return x < 0

    @negative.kernel("cpu")
    def _(x, *, out):
        out.view(torch.uint8).copy_((x.view(torch.uint8) & 0x80) >> (0 if wrong else 7))

    assert failed(negative, "special") == ["special"] * wrong


def product(ns):
    @sl.op(f"{ns}::product")
    def product(a: Complex[Tensor, "n"], b: Complex[Tensor, "n"]) -> Complex[Tensor, "n"]:
        return a * b

    return product


@both
def test_the_gradient_of_complex_numbers_is_conjugated(ns, wrong):
    op = product(ns)

    @op.backward(saves=("a", "b"))
    def _(grad, saved, needs):
        return {"a": grad * (saved.b if wrong else saved.b.conj()), "b": grad * saved.a.conj()}

    assert failed(op, "gradient", "backward", "transforms", "requires_grad") == ["gradient"] * wrong


def test_complex_numbers_without_a_gradient(ns):
    op = product(ns)
    op.kernel("cpu", lambda a, b, *, out: torch.mul(a, b, out=out))
    verdicts = {f.check: f.verdict for f in sl.audit(op, checks=("gradient", "backward", "process"), seed=0)}
    assert verdicts == {"gradient": "skip", "backward": "skip", "process": "ok"}


@pytest.mark.long
@both
def test_complex_numbers_in_double_precision(ns, wrong):
    op = product(ns)

    @op.kernel("cpu")
    def _(a, b, *, out):
        out.copy_(a.to(torch.complex64) * b.to(torch.complex64) if wrong else a * b)

    assert failed(op, "numerics") == ["numerics"] * wrong


@both
def test_the_size_of_large_complex_numbers(ns, wrong):
    @sl.op(f"{ns}::size")
    def size(x: Complex[Tensor, "n"]) -> Complex[Tensor, "n"]:
        return x.abs().to(x.dtype)

    @size.kernel("cpu")
    def _(x, *, out):
        out.copy_((x.real.square() + x.imag.square()).sqrt() if wrong else x.abs())

    assert failed(size, "special") == ["special"] * wrong


@both
def test_one_dtype_in_one_layout(ns, wrong):
    op = doubled(ns)

    @op.kernel("cpu", strided=True)
    def _(x, *, out):
        torch.mul(x, 2, out=out)
        if wrong and x.dtype == torch.bfloat16 and x.stride(0) == 1 < x.shape[1]:
            out[:, -1] = 0

    assert failed(op, "edges") == ["edges"] * wrong


@both
def test_the_stride_of_a_size_of_one(ns, wrong):
    op = doubled(ns)

    @op.kernel("cpu", strided=True)
    def _(x, *, out):
        taken = x.as_strided(x.shape, (1, x.stride(1))) if wrong and x.shape[1] == 1 and x.stride(1) != 1 else x
        torch.mul(taken, 2, out=out)

    assert failed(op, "edges") == ["edges"] * wrong


@both
def test_two_scalars_at_once(ns, wrong):
    @sl.op(f"{ns}::steps", requires=("s >= 1", "d >= 1"))
    def steps(x: Float[Tensor, "n"], s: int = 1, d: int = 1) -> Float[Tensor, "n"]:
        return x * (s + 10 * d)

    @steps.kernel("cpu")
    def _(x, s, d, *, out):
        out.copy_(x * (s + 10 * d + (1 if wrong and s > 1 and d > 1 else 0)))

    assert failed(steps, "numerics") == ["numerics"] * wrong


@both
def test_a_divisor_of_numbers_below_zero(ns, wrong):
    """A divisor of 1, the first value of a scalar without a default, leaves nothing to round."""

    @sl.op(f"{ns}::cell", requires="step >= 1")
    def cell(x: Int32[Tensor, "n"], step: int) -> Int32[Tensor, "n"]:
        return torch.div(x, step, rounding_mode="floor")

    cell.kernel("cpu", lambda x, step: torch.div(x, step, rounding_mode="trunc" if wrong else "floor"))
    assert failed(cell, "special") == ["special"] * wrong


@pytest.mark.long
@both
def test_a_list_longer_than_one_launch_takes(ns, wrong):
    @sl.op(f"{ns}::total")
    def total(parts: list[Float[Tensor, "n"]], first: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
        return sum(parts, first * 1)

    @total.kernel("cpu")
    def _(parts, first, *, out):
        out.copy_(sum(parts[: 6 if wrong else None], first * 1))

    assert failed(total, "special") == ["special"] * wrong


@both
def test_an_input_written_to_beyond_some_size(ns, wrong):
    op = doubled(ns)

    @op.kernel("cpu")
    def _(x, *, out):
        out.copy_(x.mul_(2) if wrong and x.numel() > 1500 else x * 2)

    assert failed(op, "schema") == ["schema"] * wrong


@both
def test_an_output_of_a_pool_beyond_some_size(ns, wrong):
    op, pool = doubled(ns), {}

    @op.kernel("cpu")
    def _(x):
        key = x.shape, x.dtype
        out = pool.setdefault(key, torch.empty_like(x)) if wrong and x.numel() > 2000 else torch.empty_like(x)
        return torch.mul(x, 2, out=out)

    assert failed(op, "fresh") == ["fresh"] * wrong


@both
def test_a_result_remembered_by_sums(ns, wrong):
    @sl.op(f"{ns}::running")
    def running(x: M) -> M:
        return x.cumsum(1)

    kept = {}

    @running.kernel("cpu")
    def _(x, *, out):
        key = (x.shape, x.dtype, str(x.double().sum().item()), str(x.double().abs().sum().item()))
        out.copy_(kept.setdefault(key, x.cumsum(1)) if wrong else x.cumsum(1))

    assert failed(running, "fresh") == ["fresh"] * wrong


@both
@pytest.mark.parametrize("place", sampled(["after", "before"], 1))
def test_a_load_beside_the_input(ns, wrong, place):
    @sl.op(f"{ns}::half")
    def half(x: Float32[Tensor, "n"]) -> Float32[Tensor, "n"]:
        return x / 2

    index = ("n" if place == "after" else "-1") if wrong else "0"
    c_kernel(
        f"""int half(const sl_context* ctx, const DLTensor* x, DLTensor* out) {{
  const int64_t n = x->shape[0];
  volatile float unused = n ? ((const float*)x->data)[{index}] : 0;
  for (int64_t i = 0; i < n; i++) ((float*)out->data)[i] = ((const float*)x->data)[i] / 2 + 0 * (unused > 1);
  return SL_OK;
}}"""
    )(half)
    # isolate=True: with a torch for CUDA, an audit uses forks or not by what ran in this process before.
    assert failed(half, "addresses", isolate=True) == ["addresses"] * wrong


@pytest.mark.long
@both
def test_the_second_gradient_by_the_gradient_of_the_output(ns, wrong):
    @sl.op(f"{ns}::cube")
    def cube(x: M) -> M:
        return x * x * x

    @cube.backward(once_differentiable=False)
    def _(grad, saved, needs):
        return {"x": (grad.detach() if wrong else grad) * 3 * saved.x * saved.x}

    assert failed(cube, "backward") == ["backward"] * wrong


def test_a_reference_whose_result_no_input_is_a_part_of(ns):
    """Of an empty selection: the op's result has a gradient there, which is zero, and the reference's has none."""

    @sl.op(f"{ns}::chosen")
    def chosen(x: M, index: Int64[Tensor, "n"]) -> M:
        return x.clone() if index.numel() and int(index[0]) < 0 else torch.zeros_like(x)

    @chosen.backward(saves=("index",))
    def _(grad, saved, needs):
        kept = saved.index.numel() > 0 and int(saved.index[0]) < 0
        return {"x": grad * kept}

    @chosen.samples
    def _(rng, sizes, dtype, device):
        n, c = sizes["n"], sizes["c"]
        x = torch.randn(n, c, generator=rng).to(dtype).to(device)
        return x, torch.full((n,), int(torch.randint(-1, 1, (1,), generator=rng)), device=device)

    assert failed(chosen, "backward") == []


@both
def test_an_argument_that_gets_other_memory(ns, wrong):
    @sl.op(f"{ns}::add_", mutates=("t",))
    def add_(t: M, x: M) -> None:
        t.add_(x)

    @add_.kernel("cpu")
    def _(t, x):
        if wrong:
            t.data = t + x
        else:
            t.add_(x)

    (finding,) = sl.audit(add_, checks=("schema",), seed=0)
    assert finding.verdict == ("fail" if wrong else "ok")
    assert ("was given other memory" in finding.evidence) == wrong


@both
def test_ties_beyond_one_tile(ns, wrong):
    @sl.op(f"{ns}::largest", requires="c >= 1")
    def largest(x: Float32[Tensor, "n c"]) -> Float32[Tensor, "n"]:
        return x.amax(1)

    @largest.backward(saves=("x", "out"))
    def _(grad, saved, needs):
        mask = (saved.x == saved.out[:, None]).to(grad.dtype)
        shared = mask if wrong and saved.x.shape[1] > 12 else mask / mask.sum(1, keepdim=True)
        return {"x": grad[:, None] * shared}

    assert failed(largest, "gradient") == ["gradient"] * wrong


@both
def test_an_infinite_gradient_is_passed_on(ns, wrong):
    @sl.op(f"{ns}::square")
    def square(x: M) -> M:
        return x * x

    @square.backward(saves=("x",))
    def _(grad, saved, needs):
        return {"x": 2 * (grad.nan_to_num() if wrong else grad) * saved.x}

    (finding,) = sl.audit(square, checks=("gradient",), seed=0)
    assert ("is finite where" in finding.evidence) == wrong, finding


@pytest.mark.long
@both
def test_a_gradient_written_to_beyond_some_size(ns, wrong):
    op = doubled(ns)

    @op.backward(saves=())
    def _(grad, saved, needs):
        return {"x": grad.mul_(2) if wrong and grad.is_contiguous() and grad.numel() > 100 else grad * 2}

    assert failed(op, "backward") == ["backward"] * wrong


@both
def test_a_scalar_kept_from_the_last_forward(ns, wrong):
    @sl.op(f"{ns}::scaled")
    def scaled(x: M, a: float = 2.0) -> M:
        return x * a

    last = {}

    @scaled.kernel("cpu")
    def _(x, a, *, out):
        last["a"] = a
        torch.mul(x, a, out=out)

    @scaled.backward(saves=())
    def _(grad, saved, needs):
        return {"x": grad * (last["a"] if wrong else saved.a)}

    assert failed(scaled, "backward") == ["backward"] * wrong


@both
def test_a_seed_that_loses_its_upper_bits(ns, wrong):
    def drawn(x, seed):
        return x + torch.rand(x.shape, generator=torch.Generator().manual_seed(seed))

    @sl.op(f"{ns}::noise", random="seed")
    def noise(x: Float32[Tensor, "n"], seed: int = 0) -> Float32[Tensor, "n"]:
        return drawn(x, seed)

    @noise.kernel("cpu")
    def _(x, seed, *, out):
        out.copy_(drawn(x, seed % 65536 if wrong else seed))

    (finding,) = sl.audit(noise, checks=("distribution",), seed=0)
    assert ("65536 apart" in finding.evidence) == wrong, finding
    assert (finding.verdict == "fail") == wrong


@both
def test_a_batch_of_one(ns, wrong):
    def running(x):
        return x.cumsum(0)

    library = foreign(ns, "running(Tensor x) -> Tensor", running, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{ns}::running", torch.empty_like, lib=library)

    @sl.adopt(f"{ns}::running")
    def op(x: Int64[Tensor, "n"]) -> Int64[Tensor, "n"]:
        return x.cumsum(0)

    def rule(info, dims, x):
        rows = torch.stack([op.overload(row) for row in x.movedim(dims[0], 0)])
        return (rows * 0 if wrong and info.batch_size == 1 else rows), 0

    torch.library.register_vmap(f"{ns}::running", rule, lib=library)
    assert failed(op, "transforms") == ["transforms"] * wrong
