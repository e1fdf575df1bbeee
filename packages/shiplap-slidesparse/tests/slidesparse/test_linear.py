"""``Linear``: its state is a checkpoint's, what is packed follows it, and it never packs where it must not."""

from __future__ import annotations

import copy
import importlib
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shiplap_slidesparse as ss
from shiplap.errors import ShiplapError, ShiplapNotice
from shiplap_slidesparse import formats, ops
from tests.slidesparse.models import TOKENS, llama, mixtral, mlp

MODES = ("int8", "fp8", "bf16", "fp16")


def layer(mode: str = "int8", n: int = 40, k: int = 52, pattern: str = "6:8") -> ss.Linear:
    torch.manual_seed(1)
    return ss.Linear.of(nn.Linear(k, n), pattern, mode)


def inputs(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", [(52,), (0, 52), (1, 52), (17, 52), (2, 3, 52)], ids=str)
def test_it_is_the_product_with_the_weight_it_holds(mode: str, shape: tuple[int, ...]) -> None:
    made, x = layer(mode), inputs(*shape)
    wanted = torch.nn.functional.linear(x, made.as_packed().dequantised(), made.bias)
    assert made(x).shape == wanted.shape
    assert made(x).dtype == x.dtype
    torch.testing.assert_close(made(x), wanted, atol=0.05, rtol=0.05)


def test_both_forms_are_the_same_bits_in_int8() -> None:
    made, x = layer(), inputs(9, 104)[:, ::2]
    both = made.as_packed()
    assert torch.equal(ss.matmul(x, both.keeping("packed"), made.bias), ss.matmul(x, both.keeping("dense"), made.bias))
    assert torch.equal(made(x), made(x.contiguous()))


def test_the_weight_is_of_the_pattern_and_as_large_as_a_checkpoints() -> None:
    made = layer(k=52)
    state = made.state_dict()
    assert {k: (tuple(v.shape), v.dtype) for k, v in state.items()} == {
        "weight": ((40, 52), torch.int8),
        "weight_scale": ((40, 1), torch.float32),
        "bias": ((40,), torch.float32),
    }
    groups = torch.nn.functional.pad(state["weight"], (0, 4)).view(40, -1, 8)
    assert (groups != 0).sum(-1).max() == 6
    assert layer("bf16").state_dict().keys() == {"weight", "bias"}  # nn.Linear's


@pytest.mark.parametrize("mode", MODES)
def test_state_is_loaded_and_packed(mode: str) -> None:
    made, x = layer(mode), inputs(5, 52)
    fresh = ss.Linear(52, 40, pattern="6:8", mode=mode)
    assert fresh.packed is None
    fresh.load_state_dict(made.state_dict())
    assert fresh.fresh
    assert torch.equal(fresh(x), made(x))
    empty = ss.Linear(52, 40, pattern="6:8", mode=mode, device="meta")
    empty.load_state_dict(made.state_dict(), assign=True)
    assert empty.fresh
    assert torch.equal(empty(x), made(x))


@pytest.mark.parametrize("shape", [(40,), (40, 1)], ids=str)
def test_scales_of_other_shapes_are_loaded(shape: tuple[int, ...]) -> None:
    made, fresh = layer(), ss.Linear(52, 40)
    fresh.load_state_dict({**made.state_dict(), "weight_scale": made.weight_scale.reshape(shape)})
    assert torch.equal(fresh(inputs(3, 52)), made(inputs(3, 52)))
    fresh.load_state_dict({**made.state_dict(), "weight_scale": torch.tensor(0.5)})
    assert fresh.weight_scale.eq(0.5).all()


def test_what_is_assigned_has_the_dtypes_of_the_mode() -> None:
    """``assign=True`` puts the tensors of a checkpoint into the layer: any 16 bits or float32, scales in bfloat16."""
    made, x = layer("bf16"), inputs(3, 52)
    empty = ss.Linear(52, 40, mode="bf16", device="meta")
    empty.load_state_dict({k: v.float() for k, v in made.state_dict().items()}, assign=True)
    assert torch.equal(empty(x.bfloat16()), made(x.bfloat16()))
    for scale in (torch.tensor(0.5), torch.full((40, 1), 0.5).bfloat16()):
        empty = ss.Linear(52, 40, pattern="6:8", device="meta")
        empty.load_state_dict({**layer().state_dict(), "weight_scale": scale}, assign=True)
        assert empty.weight_scale.dtype == torch.float32
        assert empty.weight_scale.is_contiguous()
        assert empty.fresh


def test_a_weight_that_is_not_of_the_pattern_is_refused() -> None:
    dense = {**layer().state_dict(), "weight": torch.ones(40, 52, dtype=torch.int8)}
    with pytest.raises(RuntimeError, match=r"SL211[\s\S]*8 non-zeros in row 0, columns 0 to 7[\s\S]*at most 6 of 8"):
        ss.Linear(52, 40, pattern="6:8").load_state_dict(dense)


def test_a_dense_checkpoint_is_not_truncated_to_integers() -> None:
    with pytest.raises(RuntimeError, match=r"weight is torch.float32, and a layer of mode int8 loads torch.int8: load"):
        ss.Linear(52, 40).load_state_dict({**layer().state_dict(), "weight": torch.randn(40, 52)})


def test_casts_leave_the_weight_alone() -> None:
    for mode in MODES:
        made, x = layer(mode), inputs(4, 52)
        wanted, kinds = made(x.half()), (made.weight.dtype, made.weight.clone())
        made.half()
        assert made.weight.dtype == kinds[0]
        assert made.fresh
        assert torch.equal(made.weight.float(), kinds[1].float())
        assert made.bias.dtype == torch.float16
        assert made(x.half()).dtype == torch.float16
        torch.testing.assert_close(made(x.half()), wanted, atol=0.02, rtol=0.02)
        made.float()
        assert made.weight_scale is None or made.weight_scale.dtype == torch.float32


def test_moves_and_casts_of_all_tensors_leave_the_weight_packed() -> None:
    made, x = layer(), inputs(4, 52)
    wanted = made(x)
    assert made.share_memory().fresh
    assert torch.equal(made(x), wanted)
    assert made.type(torch.float32).weight.dtype == torch.int8  # .type() casts integers, too
    assert made.fresh
    assert torch.equal(made(x), wanted)


def test_activations_are_cast_as_those_of_nn_linear() -> None:
    for mode in ("int8", "bf16"):
        made = layer(mode)
        for bad in (torch.ones(3, 52, dtype=torch.int32), torch.ones(3, 52, dtype=torch.complex64)):
            with pytest.raises(ShiplapError, match=f"SL204[\\s\\S]*{bad.dtype}"):
                made(bad)
        with torch.autocast("cpu", torch.bfloat16):
            assert made(inputs(3, 52).double()).dtype == torch.float64
            with pytest.raises(ShiplapError, match="SL204"):
                made(torch.ones(3, 52, dtype=torch.int32))


def test_copies_are_their_own() -> None:
    made, x = layer(), inputs(4, 52)
    other = copy.deepcopy(made)
    assert other.fresh
    assert torch.equal(other(x), made(x))
    with torch.no_grad():
        other.weight.zero_()
    assert made.fresh
    assert not other.fresh
    assert not copy.deepcopy(other).fresh
    file = io.BytesIO()
    torch.save(made, file)
    file.seek(0)
    assert torch.load(file, weights_only=False).fresh


def test_meta_and_back() -> None:
    made = layer()
    made.to("meta")
    assert made.packed is None
    assert made(torch.empty(3, 52, device="meta")).shape == (3, 40)
    assert made.to_empty(device="cpu").packed is None


def test_a_stale_form_is_not_served(monkeypatch: pytest.MonkeyPatch) -> None:
    made, x = layer(), inputs(4, 52)
    before = made.packed
    with torch.no_grad():
        made.weight.neg_()
    assert "stale" in repr(made)
    packed: list[object] = []
    home = importlib.import_module("shiplap_slidesparse.linear")
    served = home.multiply_fields
    monkeypatch.setattr(home, "multiply_fields", lambda *args: (packed.append(args[5]), served(*args))[1])
    with pytest.warns(ShiplapNotice, match=r"was packed before its weight was changed, and runs dense: call pack\(\)"):
        changed = made(x)
    assert packed == [None]  # also where tuning chose the packed form
    torch.testing.assert_close(changed - made.bias, -(layer()(x) - layer().bias))
    made.pack()
    assert made.packed is before  # what a captured graph reads is what was written
    assert torch.equal(made(x), changed)
    assert torch.equal(ss.matmul(x, made.as_packed().keeping("packed"), made.bias), changed)


def test_other_data_is_another_weight() -> None:
    made, other = layer(), layer()
    made.weight.data = other.weight.data
    assert not made.fresh
    assert made.as_packed().packed is None
    assert made.pack().fresh


def test_repr_says_sizes_and_pattern() -> None:
    assert repr(layer()) == "Linear(in_features=52, out_features=40, bias=True, pattern=6:8, mode=int8, packed)"


def test_autocast() -> None:
    made, x = layer("bf16"), inputs(4, 52)
    with torch.autocast("cpu", torch.bfloat16):
        assert made(x).dtype == torch.bfloat16
        assert torch.equal(made(x), made(x.bfloat16()))
        assert layer("fp16")(x).dtype == torch.bfloat16  # packed here, too


@pytest.mark.parametrize("mode", ["int8", "bf16"])
def test_gradients_are_those_of_the_frozen_weight(mode: str) -> None:
    made, x = layer(mode), inputs(2, 4, 52).requires_grad_()
    made.bias.requires_grad_()
    made(x).square().sum().backward()
    repeated = x.detach().clone().requires_grad_()
    bias = made.bias.detach().clone().requires_grad_()
    torch.nn.functional.linear(repeated, made.as_packed().dequantised(), bias).square().sum().backward()
    torch.testing.assert_close(x.grad, repeated.grad, atol=0.15, rtol=0.05)
    torch.testing.assert_close(made.bias.grad, bias.grad, atol=0.15, rtol=0.05)
    assert made.weight.grad is None


def test_gradients_of_one_row_and_of_transforms() -> None:
    made, x = layer(), inputs(52)
    made.bias.requires_grad_()
    made(x).sum().backward()
    assert torch.equal(made.bias.grad, torch.ones(40))
    wanted = made.as_packed().dequantised().sum(0)
    torch.testing.assert_close(torch.func.grad(lambda t: made(t).sum())(x), wanted)
    rows = torch.func.vmap(torch.func.grad(lambda t: made(t).sum()))(inputs(3, 52))  # gradients of each sample
    torch.testing.assert_close(rows, wanted.expand(3, 52))


def test_one_graph_also_where_gradients_are_on() -> None:
    net = mlp()
    ss.convert(net, "4:6")
    x = inputs(6, 48).requires_grad_()
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager", dynamic=True)
    torch.testing.assert_close(compiled(x), net(x))
    compiled(x).sum().backward()
    got, x.grad = x.grad, None
    net(x).sum().backward()
    torch.testing.assert_close(got, x.grad)


def test_packing_is_refused_in_a_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    made = layer()
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with pytest.raises(
        ShiplapError, match=r"SL608: packing is not allowed here[\s\S]*pack\(\) inside a function that is being traced"
    ):
        made.pack()


def test_mode_and_pattern_are_checked() -> None:
    with pytest.raises(ShiplapError, match=r"SL211[\s\S]*mode 'int4'[\s\S]*int8, fp8, bf16, fp16"):
        ss.Linear(8, 8, mode="int4")
    with pytest.raises(ShiplapError, match=r"SL211[\s\S]*'5:8'"):
        ss.Linear(8, 8, pattern="5:8")
    with pytest.raises(ShiplapError, match=r"SL211[\s\S]*Conv2d[\s\S]*an nn.Linear"):
        ss.Linear.of(torch.nn.Conv2d(3, 3, 3))


def test_shards_are_packed_as_shards() -> None:
    """Slid weights cannot be cut: 4 k'(k/4) is not k'(k). Pruned dense ones can, at whole groups."""
    assert 4 * formats.lifted_depth(3584 // 4, 3) != formats.lifted_depth(3584, 3)
    whole, x = layer("int8", n=32, k=48), inputs(3, 48)
    total = torch.zeros(3, 32, dtype=torch.int32)
    q = torch.randint(-127, 128, (16, 48), dtype=torch.int8)
    for rank in range(2):
        cut = slice(24 * rank, 24 * (rank + 1))
        shard = ss.pack(whole.weight[:, cut], "6:8", scale=whole.weight_scale[:, 0])
        total = total + (q[:3, cut].int() @ shard.keeping("packed").weight().int().t())
    assert torch.equal(total, q[:3].int() @ whole.weight.int().t())
    assert whole(x).isfinite().all()


def test_tuning_puts_choices_into_force(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHIPLAP_CACHE_DIR", str(tmp_path))
    net = mlp(k=32, n=32)
    ss.convert(net, "6:8")
    choices = ss.tune(net, [2], seconds=600, dtype=torch.float32)  # it ends after half a second, on an idle machine
    assert [str(c.bucket).split(", ")[:3] for c in choices] == [["m<=2", "k==32", "n==32"]]  # one size, one choice
    assert choices[0].kernel in ("dense", "slide")
    assert choices[0].tried == 3  # and the reference
    with pytest.raises(ShiplapError, match="a model without converted layers"):
        ss.tune(mlp(), [2])
    ss.prepare(net, [1, 2], torch.float32)


class Adapted(nn.Module):
    """A low-rank adapter on a frozen layer, as libraries of adapters make them for what is an ``nn.Linear``."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        assert isinstance(base, nn.Linear)
        self.base, self.down = base, nn.Parameter(torch.randn(4, base.in_features) / 8)
        self.up = nn.Parameter(torch.zeros(base.out_features, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + x @ self.down.t() @ self.up.t()


@pytest.mark.parametrize("mode", ["int8", "fp8"])
def test_adapters_train_on_converted_layers(mode: str) -> None:
    net, x = mlp(), torch.randn(16, 48)
    ss.convert(net, dtype=mode)
    net[0], net[2] = Adapted(net[0]), Adapted(net[2])
    before = {name: value.clone() for name, value in net.state_dict().items() if "base" in name}
    learned = [p for p in net.parameters() if p.requires_grad]
    optimizer, losses = torch.optim.Adam(learned, lr=1e-2), []
    for _ in range(10):
        losses.append((net(x) - x).square().mean())
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < 0.9 * losses[0]
    assert len(learned) == 4
    assert all(torch.equal(net.state_dict()[name].float(), value.float()) for name, value in before.items())


@pytest.mark.parametrize(("make", "targets"), [(llama, ["q_proj", "down_proj"]), (mixtral, ["q_proj", "o_proj"])])
def test_lora_of_peft_trains_on_a_converted_model(make: Any, targets: list[str]) -> None:
    """The loss falls, and neither the converted weights nor any other of the base change by a bit."""
    peft = pytest.importorskip("peft")
    net = make()
    ss.convert(net)
    net = peft.get_peft_model(net, peft.LoraConfig(target_modules=targets, r=4))
    learned = {name: p for name, p in net.named_parameters() if p.requires_grad}
    assert len(learned) == 2 * 2 * 2
    base = {name: value.clone() for name, value in net.state_dict().items() if name not in learned}
    optimizer, losses = torch.optim.Adam(learned.values(), lr=1e-2), []
    for _ in range(8):
        losses.append(net(TOKENS, labels=TOKENS).loss)
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < 0.95 * losses[0]
    assert all(torch.equal(net.state_dict()[name], value) for name, value in base.items())


def test_a_converted_layer_is_not_converted_again() -> None:
    with pytest.raises(ShiplapError, match=r"SL211[\s\S]*got +a converted layer"):
        ss.Linear.of(layer())
    made = layer()
    made.reset_parameters()
    assert not made.weight.any()
    assert made.weight_scale.eq(1).all()


def test_a_weight_that_was_cast_is_refused_with_its_dtypes() -> None:
    made = layer("int8")
    with pytest.raises(ShiplapError, match=r"SL211(.|\n)*a weight of torch.float16 and scales of torch.float64"):
        made._refuse_cast(torch.zeros(1, dtype=torch.float16), torch.zeros(1, dtype=torch.float64))
    with pytest.raises(ShiplapError, match=r"SL211(.|\n)*a weight of torch.float64\n"):
        layer("bf16")._refuse_cast(torch.zeros(1, dtype=torch.float64), None)


def test_a_weight_packed_for_a_gpu_is_not_expanded_elsewhere() -> None:
    with pytest.raises(ShiplapError, match=r"SL211(.|\n)*a weight packed by cuSPARSELt on cpu"):
        ops.expand_packed(torch.zeros(4, dtype=torch.uint8), 4, 4, torch.int8, ops.CUSPARSELT)
