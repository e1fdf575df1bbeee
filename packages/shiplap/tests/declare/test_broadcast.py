"""``#n``: a size that is 1 or n, in Python and native checks, under fakes, compiled, differentiated and audited."""

import pytest
import torch
from jaxtyping import Float, Float32
from torch import Tensor

import shiplap as sl
from shiplap.kernels.c.header import header_text
from shiplap.kernels.native import binding
from shiplap.rewrite import Match, rewrite
from shiplap.sampling.recipe import SampleRecipe
from shiplap.sampling.samples import Samples
from shiplap.tuning.inputs import recipe_of
from shiplap_testing.build import compile_c
from shiplap_testing.support import fails
from tests.rewrite.specimens import near, outcomes

RIGHT = "mask->shape[0] == 1 ? 0 : mask->strides[0]"
BODY = """
int masked(const sl_context* ctx, const DLTensor* x, const DLTensor* mask, DLTensor* out) {{
  const float *a = x->data, *m = mask->data;
  const int64_t row = {row}, column = mask->shape[1] == 1 ? 0 : mask->strides[1];
  for (int64_t i = 0; i < x->shape[0]; ++i)
    for (int64_t j = 0; j < x->shape[1]; ++j)
      ((float*)out->data)[i * x->shape[1] + j] = a[i * x->shape[1] + j] * m[i * row + j * column];
  return SL_OK;
}}"""


def declare_masked(ns):
    @sl.op(f"{ns}::masked")
    def masked(x: Float32[Tensor, "b n"], mask: Float32[Tensor, "#b #n"]) -> Float32[Tensor, "b n"]:
        return x * mask

    @masked.backward(saves=("x", "mask"))
    def _(grad, saved, needs):
        return {"x": grad * saved.mask, "mask": (grad * saved.x).sum_to_size(saved.mask.shape)}

    return masked


def declare_both(ns):
    @sl.op(f"{ns}::both")
    def both(x: Float[Tensor, "#n c"], y: Float[Tensor, "#n c"]) -> Float[Tensor, "n c"]:
        return x + 2 * y

    @both.backward(saves=("x", "y"))
    def _(grad, saved, needs):
        return {"x": grad.sum_to_size(saved.x.shape), "y": 2 * grad.sum_to_size(saved.y.shape)}

    return both


def test_a_repeated_size_is_one_or_the_other(ns):
    masked, both = declare_masked(ns), declare_both(ns)
    assert masked.spec.broadcasts == {"mask_b": "b", "mask_n": "n"}
    x = torch.randn(4, 3)
    for shape in ((4, 3), (1, 3), (4, 1), (1, 1)):
        mask = torch.randn(shape)
        assert torch.equal(masked(x, mask), x * mask)
    with fails("SL202", where=f"{ns}::masked, argument 'mask', dim 'b' (axis 0)", expected="1, or b = 4, in 'x'"):
        masked(x, torch.randn(2, 3))
    for a, b, n in ((4, 1, 4), (1, 4, 4), (1, 1, 1), (0, 1, 0), (1, 0, 0)):
        assert both(torch.randn(a, 3), torch.randn(b, 3)).shape == (n, 3)
    with fails("SL202", "1, or n = 4", got="n = 5"):
        both(torch.randn(4, 3), torch.randn(5, 3))


def test_an_argument_that_may_be_absent_broadcasts(ns):
    @sl.op(f"{ns}::biased")
    def biased(bias: Float[Tensor, "#n"] | None, x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
        return x.clone() if bias is None else x + bias

    x = torch.randn(3)
    assert torch.equal(biased(None, x), x)
    assert torch.equal(biased(torch.ones(1), x), x + 1)
    with fails("SL202", expected="1, or n = 3, in 'x'"):
        biased(torch.ones(2), x)


def test_compiled_code_keeps_sizes_symbolic_and_has_a_graph_for_one(ns):
    both, frames = declare_both(ns), []

    def backend(graph, inputs):
        frames.append(graph)
        return graph.forward

    compiled = torch.compile(lambda x, y: both(x * 2, y) + 1, fullgraph=True, backend=backend, dynamic=True)
    for a, b, graphs in ((4, 4, 1), (7, 7, 1), (1, 6, 2), (1, 9, 2), (9, 1, 3), (5, 1, 3)):
        x, y = torch.randn(a, 3), torch.randn(b, 3)
        assert torch.equal(compiled(x, y), both(x * 2, y) + 1)
        assert len(frames) == graphs
    with pytest.raises(Exception, match=r"n = s.*1, or n = s"):
        compiled(torch.randn(4, 3), torch.randn(5, 3))


def test_a_size_that_only_data_knows_is_held_to_it_when_the_graph_runs(ns):
    masked = declare_masked(ns)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def program(x, keep):
        return masked(x, keep.nonzero().float())

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        assert program(torch.ones(3, 2), torch.tensor([0, 1, 1, 1])).shape == (3, 2)
        assert program(torch.ones(3, 2), torch.tensor([0, 0, 0, 1])).tolist() == [[3.0] * 2] * 3
        with pytest.raises(RuntimeError):
            program(torch.ones(3, 2), torch.tensor([0, 0, 1, 1]))


def test_gradients_vmap_and_export(ns):
    masked = declare_masked(ns)
    x, mask = torch.randn(4, 3, requires_grad=True), torch.randn(1, 3, requires_grad=True)
    got = torch.autograd.grad(masked(x, mask).sum(), (x, mask))
    for g, want in zip(got, torch.autograd.grad((x * mask).sum(), (x, mask)), strict=True):
        torch.testing.assert_close(g, want)
    many = torch.randn(2, 1, 3)
    torch.testing.assert_close(torch.vmap(masked, (None, 0))(x, many), x * many)

    class Model(torch.nn.Module):
        def forward(self, x, mask):
            return masked(x, mask)

    rows = torch.export.Dim("rows", min=2)
    exported = torch.export.export(Model(), (x.detach(), mask.detach()), dynamic_shapes=({0: rows}, None))
    assert exported.module()(torch.ones(7, 3), torch.ones(1, 3)).shape == (7, 3)


def test_samples_have_both_sizes_and_say_so(ns):
    masked, both = declare_masked(ns), declare_both(ns)
    shapes = {tuple(c.args[1].shape) for c in Samples(masked, 0).optionals()}
    (b, n) = Samples(masked, 0).build(Samples(masked, 0).base).args[0].shape
    assert shapes == {(1, n), (b, 1), (1, 1)}
    for case in Samples(both, 0).optionals():
        assert SampleRecipe.parse(case.label.partition(" @")[0]) == case.recipe or "x_n" in case.label
    assert {tuple(t.shape[0] for t in c.args) for c in Samples(both, 0).optionals()} == {(1, 5), (5, 1), (1, 1)}
    grown = next(Samples(masked, 0).grown(1)).args
    assert grown[0].shape == grown[1].shape


def test_a_call_with_ones_is_tuned_as_such(ns):
    masked = declare_masked(ns)
    recipe = recipe_of(masked, (torch.randn(4, 3), torch.randn(1, 3)))
    assert dict(recipe.sizes) == {"b": 4, "n": 3, "mask_b": 1}
    assert Samples(masked, 0).build(recipe).args[1].shape == (1, 3)
    assert dict(recipe_of(masked, (torch.randn(4, 3), torch.randn(4, 3))).sizes) == {"b": 4, "n": 3}


CHECKS = ("numerics", "kernels", "arguments", "gradient", "fake")


@pytest.mark.long
@pytest.mark.parametrize(
    "checks", [CHECKS, pytest.param(("sharding", "transforms", "opcheck"), marks=pytest.mark.long)]
)
def test_the_audit_proves_a_right_kernel(ns, tmp_path, checks):
    assert {f.verdict for f in audited(ns, tmp_path, RIGHT, checks)} == {"ok"}


def test_the_audit_fails_a_kernel_that_knows_no_ones(ns, tmp_path):
    (finding,) = audited(ns, tmp_path, "mask->strides[0]", ("numerics",))
    assert finding.verdict == "fail"
    assert "mask_b=1" in finding.input


def audited(ns, folder, row, checks):
    """Findings on the kernel that finds a row of the mask by ``row``."""
    masked = declare_masked(ns)
    masked.kernel("cpu", sl.cabi(compile_c(folder, "masked", {"masked": masked}, BODY.format(row=row)), "masked"))
    return sl.audit(masked, checks=checks, seed=0)


def test_the_native_binding_checks_the_same(ns, tmp_path, monkeypatch):
    monkeypatch.setenv("SHIPLAP_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("SHIPLAP_NATIVE", "1")
    tmp_path.chmod(0o700)

    @sl.op(f"{ns}::masked")
    def masked(x: Float32[Tensor, "#b n"], mask: Float32[Tensor, "#b #n"]) -> Float32[Tensor, "b n"]:
        return x * mask

    library = compile_c(tmp_path, "wide", {"masked": masked}, WIDE)
    masked.kernel("cpu", sl.cabi(library, "masked"))
    x, mask = torch.randn(4, 3), torch.randn(1, 3)

    def refusal():
        with pytest.raises(sl.ShiplapError) as caught:
            masked(x, torch.randn(2, 3))
        return str(caught.value)

    in_python = refusal()
    binding.build(masked)
    assert torch.equal(masked(x, mask), x * mask)
    assert torch.equal(masked(mask, x[:, :1]), mask * x[:, :1])
    assert refusal() == in_python


WIDE = """
int masked(const sl_context* ctx, const DLTensor* x, const DLTensor* mask, DLTensor* out) {
  const float *a = x->data, *m = mask->data;
  const int64_t n = x->shape[1], step = x->shape[0] == 1 ? 0 : n;
  const int64_t row = mask->shape[0] == 1 ? 0 : mask->strides[0], column = mask->shape[1] == 1 ? 0 : 1;
  for (int64_t i = 0; i < out->shape[0]; ++i)
    for (int64_t j = 0; j < n; ++j) ((float*)out->data)[i * n + j] = a[i * step + j] * m[i * row + j * column];
  return SL_OK;
}"""


def test_the_header_says_it(ns):
    assert 'mask: Float32[Tensor, "#b #n"]' in header_text({"masked": declare_masked(ns).spec}, "here")


def test_a_pattern_matches_both(ns):
    def pattern(x: Float[Tensor, "b n"], mask: Float[Tensor, "#b n"]):
        return (x * mask).exp()

    made = rewrite(pattern, lambda x, mask: (mask * x).exp(), name="masked")
    assert {f.verdict for f in made.findings} == {"ok"}
    for shape in ((4, 3), (1, 3)):
        (outcome,) = outcomes(made, lambda x, m: (x * m).exp(), torch.randn(4, 3), torch.randn(shape))
        assert isinstance(outcome, Match)
    assert near(made, lambda x, m: (x * m).exp(), torch.randn(4, 3), torch.randn(4, 1)).obstacle == "shape"


def test_what_cannot_broadcast_is_refused(ns):
    def result(x: Float[Tensor, "#n"]) -> Float[Tensor, "#n"]: ...

    def listed(x: Float[Tensor, "n"], ys: list[Float[Tensor, "#n"]]) -> Float[Tensor, "n"]: ...

    def unknown(
        x: Float[Tensor, "n"] | None, y: Float[Tensor, "m"], z: Float[Tensor, "#n"] | None
    ) -> Float[Tensor, "m"]: ...

    def several(x: Float[Tensor, "*n"], y: Float[Tensor, "*#n"]) -> Float[Tensor, "*n"]: ...

    with fails("SL104", got="#n", fix="write n, the size that all together have"):
        sl.op(f"{ns}::a")(result)
    with fails("SL105", got="#n in a list"):
        sl.op(f"{ns}::b")(listed)
    with fails("SL105", got="#n", expected="a size among ['m']"):
        sl.op(f"{ns}::c")(unknown)
    with fails("SL105", got="*#n", expected="# and the name of one dim"):
        sl.op(f"{ns}::e")(several)

    def clash(x: Float[Tensor, "n y_n"], y: Float[Tensor, "#n"]) -> Float[Tensor, "n"]: ...

    with fails("SL105", got="#n, whose size is 'y_n' as another is"):
        sl.op(f"{ns}::g")(clash)
    with fails("SL117", "'n' in 'y'"):

        @sl.op(f"{ns}::h")
        def joined(x: Float[Tensor, "n"], y: Float[Tensor, "#n"]) -> Float[Tensor, "n"]:
            return x + y

        joined.batches("n")
