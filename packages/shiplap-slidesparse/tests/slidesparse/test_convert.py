"""``convert``: what is replaced, what is kept and why; nothing is touched where something is wrong."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

import shiplap_slidesparse as ss
from shiplap.errors import ShiplapError
from shiplap_testing.effort import sampled
from tests.slidesparse.models import TOKENS, llama, mlp


@pytest.mark.parametrize("dtype", sampled(["int8", "fp8", "bf16", "fp16"], 2))
def test_a_llama(dtype: str) -> None:
    net = llama()
    with torch.no_grad():
        before = net(TOKENS).logits
        done = ss.convert(net, "6:8", dtype)
        after = net(TOKENS).logits
    assert len(done.converted) == 14
    table = "model.embed_tokens.weight", "a table, which is read and not multiplied"
    assert [(s.name, s.reason) for s in done.skipped] == [("lm_head", "skip='lm_head'"), table]
    assert type(net.lm_head) is nn.Linear
    assert 0.05 < max(c.error for c in done.converted) < 0.3
    assert 0 < (before - after).abs().max() < 0.3
    assert str(done).startswith(f"14 layers, 85% of the parameters → 6:8 {dtype}, outputs off by at most 1")
    assert "kept lm_head: skip='lm_head'" in str(done)


@pytest.mark.parametrize(("dtype", "most"), [("int8", 0.02), ("fp8", 0.05)])
def test_dense_is_the_default_and_prunes_nothing(dtype: str, most: float, recwarn: pytest.WarningsRecorder) -> None:
    net, x = mlp(), torch.randn(6, 48)
    weight, wanted = net[0].weight.detach().clone(), net(x)
    done = ss.convert(net, dtype=dtype)
    assert done.pattern == "dense"
    assert torch.equal(net[0].weight != 0, net[0].weight.to(torch.float32).ne(0))
    assert (net[0].as_packed().dequantised() - weight).norm() < most * weight.norm()
    assert 0 < (net(x) - wanted).norm() < 2 * most * wanted.norm()
    assert all(0 < c.error < c.output_error < most for c in done.converted)
    assert (net[0].packed, done.large) == (None, ())
    assert not [w for w in recwarn if "slidesparse.convert" in str(w.message)]
    assert "pattern=dense, mode=" in str(net[0])
    assert ss.tune(net, [2]) == []  # one form of a weight


def test_large_output_errors_are_named_and_warned_of() -> None:
    net = mlp(k=56)
    with pytest.warns(UserWarning, match=r"2 of 2 layers are off by more than 5%, at most by \d\d.\d% \([02]\)"):
        done = ss.convert(net, "2:4")
    assert [c.name for c in done.large] == [c.name for c in sorted(done.converted, key=lambda c: -c.output_error)]
    assert f"off by {done.large[0].output_error:.1%}: {done.large[0].name}" in str(done)


def test_output_errors_of_an_example_are_those_of_the_own_activations() -> None:
    """One channel that is a hundred times larger takes the steps of the others, which random rows do not show."""
    example = torch.randn(2, 4, 48)
    example[..., 0] *= 1000
    drawn = ss.convert(mlp()).converted[0].output_error
    nets = mlp(), mlp(), mlp()
    nets[0][0].weight.data[:, 0] = nets[1][0].weight.data[:, 0] = nets[2][0].weight.data[:, 0] = 0
    errors = [
        ss.convert(net, example=given).converted[0].output_error
        for net, given in zip(nets, (example, (example,), {"input": example}), strict=True)
    ]
    assert errors[0] == errors[1] == errors[2] > 10 * drawn
    assert not nets[0][0]._forward_pre_hooks


def test_16_bits_without_a_pattern_convert_nothing() -> None:
    with pytest.raises(ShiplapError, match=r"SL211[\s\S]*dense weights in bf16[\s\S]*model.to\(torch.bfloat16\)"):
        ss.convert(mlp(), dtype="bf16")


def test_a_pruned_weight_loses_nothing_in_16_bits() -> None:
    net = nn.Sequential(nn.Linear(16, 8).bfloat16())
    with torch.no_grad():
        net[0].weight.copy_(ss.prune(net[0].weight, "2:4"))
    x, before = torch.randn(3, 16).bfloat16(), net[0].weight.clone()
    wanted = net(x)
    assert ss.convert(net, "2:4", "bf16").converted[0].error == 0
    assert torch.equal(net[0].weight, before)
    torch.testing.assert_close(net(x), wanted)


def test_what_is_kept_says_why() -> None:
    class Own(nn.Linear):
        pass

    net = nn.ModuleDict(
        {
            "plain": nn.Linear(16, 16),
            "own": Own(16, 16),
            "tied": nn.Linear(16, 16),
            "table": nn.Embedding(16, 16),
            "hooked": nn.Linear(16, 16),
            "named": nn.Linear(16, 16),
            "empty": nn.Linear(0, 4),
            "shared": nn.Linear(16, 16),
            "watched": nn.Linear(16, 16),
            "patched": nn.Linear(16, 16),
            "adapted": nn.Linear(16, 16),
            "eight": nn.Linear(16, 16).to(torch.float8_e4m3fn),
        }
    )
    net["table"].weight = net["tied"].weight
    net["hooked"].register_forward_hook(lambda *a: None)
    net["watched"].register_full_backward_hook(lambda *a: None)
    net["patched"].forward = lambda x: x
    net["adapted"].register_buffer("mask", torch.ones(16))
    net["again"] = net["shared"]
    done = ss.convert(net, skip=["nam*"])
    assert {s.name: s.reason for s in done.skipped} == {
        "own": "Own does more than nn.Linear",
        "tied": "its weight is another module's, too",
        "hooked": "it has hooks",
        "named": "skip='nam*'",
        "empty": "its weight is torch.float32 (4, 0)",
        "watched": "it has hooks",
        "patched": "its forward was replaced",
        "adapted": "it holds other tensors or modules",
        "eight": "its weight is torch.float8_e4m3fn (16, 16)",
        "table.weight": "a table, which is read and not multiplied",
    }
    assert [c.name for c in done.converted] == ["plain", "shared"]
    assert net["again"] is net["shared"]
    assert isinstance(net["shared"], ss.Linear)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda net: net[2].weight.data[1, 1].fill_(torch.nan), r"convert: 2.weight[\s\S]*NaN or an infinity"),
        (lambda net: net[2].to("meta"), r"a weight on the meta device[\s\S]*load the weights first"),
    ],
)
def test_nothing_is_converted_where_something_is_wrong(change: object, text: str) -> None:
    net = mlp()
    change(net)  # type: ignore[operator]
    with pytest.raises(ShiplapError, match=f"SL211[\\s\\S]*{text}"):
        ss.convert(net)
    assert type(net[0]) is nn.Linear


def test_layers_whose_weights_somebody_else_reads_are_kept() -> None:
    """In inference nn.TransformerEncoderLayer hands the tensors of its layers to one fused operator."""
    encoder = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    net = nn.Sequential(encoder, nn.Linear(16, 16)).eval()
    done = ss.convert(net)
    assert [c.name for c in done.converted] == ["1"]
    assert {s.name: s.reason for s in done.skipped}[
        "0.linear1"
    ] == "nn.TransformerEncoderLayer reads its weight past it"
    with torch.no_grad():
        assert net(torch.ones(1, 4, 16)).shape == (1, 4, 16)


def test_a_weight_beyond_float16_is_found_before_anything_is_replaced() -> None:
    net = mlp()
    net[2].weight.data[1, 1] = 1e6
    with pytest.raises(ShiplapError, match=r"SL211[\s\S]*convert: 2.weight[\s\S]*infinity as torch.float16"):
        ss.convert(net, "6:8", dtype="fp16")
    assert type(net[0]) is nn.Linear
    ss.convert(net, "6:8", dtype="bf16")


def test_what_is_too_deep_for_int8_is_kept() -> None:
    net = nn.Sequential(nn.Linear(65544, 8), nn.Linear(8, 4))
    done = ss.convert(net, "2:4")
    assert {s.name: s.reason for s in done.skipped} == {"0": "int8 sums no more than 65536 columns exactly"}
    assert net(torch.ones(1, 65544)).shape == (1, 4)
    with pytest.raises(ShiplapError, match=r"SL211[\s\S]*65544 columns in mode 'int8'[\s\S]*at most 65536"):
        ss.pack(torch.zeros(1, 65544), "2:4")
    ss.convert(net, "2:4", "fp8")
    assert net(torch.ones(1, 65544)).shape == (1, 4)


def test_the_fix_of_a_model_without_linear_layers_fits_what_it_has() -> None:
    """GPT-2's Conv1D layers hold all its weights, and its head has that of the embedding."""
    transformers = pytest.importorskip("transformers")
    config = {"vocab_size": 32, "n_embd": 16, "n_layer": 1, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**config))
    words = r"its weight is another module's, too; Conv1D is no layer that convert knows[\s\S]*in place of the modules"
    with pytest.raises(ShiplapError, match=words):
        ss.convert(model, skip=())
    tied = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8, bias=False))
    tied[1].weight = tied[0].weight
    with pytest.raises(ShiplapError, match=r"layer.weight = nn.Parameter\(layer.weight.clone\(\)\)"):
        ss.convert(tied)
    tied[1].weight = nn.Parameter(tied[1].weight.clone())
    assert len(ss.convert(tied).converted) == 1, "the fix works"


def test_a_lazy_module_is_converted_after_its_first_call() -> None:
    net = nn.Sequential(nn.Linear(8, 8), nn.LazyLinear(4))
    with pytest.raises(ShiplapError, match=r"SL211[\s\S]*1.weight[\s\S]*call the model once"):
        ss.convert(net)
    assert type(net[0]) is nn.Linear
    net(torch.ones(1, 8))
    assert len(ss.convert(net).converted) == 2


def test_bad_arguments() -> None:
    with pytest.raises(ShiplapError, match="skip='head', which names no module"):
        ss.convert(mlp(), skip=["head"])
    with pytest.raises(ShiplapError, match=r"dtype 'int4'[\s\S]*int8, fp8, bf16, fp16"):
        ss.convert(mlp(), dtype="int4")
    with pytest.raises(ShiplapError, match="no linear layer to convert, 0 to keep"):
        ss.convert(nn.Sequential(nn.GELU()))
    with pytest.raises(ShiplapError, match=r"3 to keep; skip='out_proj'; nn\.TransformerEncoderLayer reads its"):
        ss.convert(nn.TransformerEncoderLayer(16, 2, 32), skip="out_proj")
    with pytest.raises(ShiplapError, match=r"slidesparse.Linear.of\(linear\)"):
        ss.convert(nn.Linear(8, 8))
    net = mlp()
    ss.convert(net)
    with pytest.raises(ShiplapError, match=r"0 to keep, 2 converted already[\s\S]*load the model again"):
        ss.convert(net)
    net = mlp()
    with pytest.raises(ShiplapError, match=r"2 to keep; skip='\*'[\s\S]*remove names from skip="):
        ss.convert(net, skip="*")
    ss.convert(net, skip=())
    for rows in ((), (-1, 4)):
        with pytest.raises(ShiplapError, match=r"SL211[\s\S]*slidesparse.prepare[\s\S]*numbers of rows"):
            ss.prepare(net, rows)
        with pytest.raises(ShiplapError, match=r"SL211[\s\S]*slidesparse.tune[\s\S]*numbers of rows"):
            ss.tune(net, rows)


def test_one_name_to_keep_is_no_list_of_letters() -> None:
    net = mlp()
    assert [s.name for s in ss.convert(net, skip="2").skipped] == ["2"]
    assert [c.name for c in ss.convert(mlp(), skip="lm_head").converted] == ["0", "2"]


def test_progress_is_said_layer_by_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    messages: list[object] = []

    @contextlib.contextmanager
    def shown(wanted: bool | None) -> Iterator[Callable[..., None]]:
        messages.append(wanted)
        yield lambda *report: messages.append(report)

    monkeypatch.setattr(importlib.import_module("shiplap_slidesparse.convert"), "progress_bar", shown)
    ss.convert(mlp(), progress=True)
    assert messages == [True, ("convert 0", 0, 2), ("convert 2", 1, 2)]
