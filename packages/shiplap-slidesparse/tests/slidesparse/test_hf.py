"""The quantizer of Hugging Face transformers: convert at load, save, reload elsewhere, the same bits."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers")

import shiplap_slidesparse as ss  # noqa: E402
from shiplap.errors import ShiplapError  # noqa: E402
from shiplap_slidesparse import hf  # noqa: E402
from shiplap_slidesparse.convert import layers_of  # noqa: E402
from shiplap_testing.forked import WITH_FAMILIES, python  # noqa: E402
from tests.slidesparse.models import TOKENS, llama, mixtral  # noqa: E402


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dense checkpoint, and of each dtype one that was converted while it was loaded, with its logits."""
    hf.register()
    hf.register()  # twice: nothing happens
    folder = tmp_path_factory.mktemp("models")
    llama().save_pretrained(folder / "dense")
    for dtype in ("int8", "fp8", "bf16"):
        model = load(folder / "dense", quantization_config=hf.SlidesparseConfig("6:8", dtype))
        model.save_pretrained(folder / dtype)
        torch.save(logits(model), folder / f"{dtype}.pt")
    return folder


def load(folder: Path, cls: str = "AutoModelForCausalLM", **more: Any) -> Any:
    return getattr(transformers, cls).from_pretrained(folder, **more).eval()


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(TOKENS).logits


@pytest.mark.long
def test_reloaded_in_a_new_process_the_logits_are_the_same_bits(saved: Path) -> None:
    folders = [saved / dtype for dtype in ("int8", "fp8", "bf16")]
    done = python("-m", "tests.slidesparse.hf_reload", *folders, imported=WITH_FAMILIES)
    assert done.returncode == 0, done.stderr
    assert (
        done.stdout.split() == ["False"] * 4
    )  # no transformers, Triton or library with slidesparse; hf registers nothing
    dense = logits(load(saved / "dense"))
    for folder in folders:
        wanted = torch.load(saved / f"{folder.name}.pt")
        assert torch.equal(torch.load(folder / "logits.pt"), wanted)
        assert not torch.equal(wanted, dense)


def test_what_was_saved_is_a_checkpoint_of_pruned_dense_weights(saved: Path) -> None:
    from safetensors.torch import load_file

    state = load_file(saved / "int8" / "model.safetensors")
    assert state["model.layers.0.mlp.down_proj.weight"].shape == (48, 80)
    assert state["model.layers.0.mlp.down_proj.weight"].dtype == torch.int8
    assert state["model.layers.0.mlp.down_proj.weight_scale"].shape == (48, 1)
    assert not any("packed" in name for name in state)
    config = json.loads((saved / "int8" / "config.json").read_text())["quantization_config"]
    converted = config.pop("converted")
    assert config == {"dtype": "int8", "pattern": "6:8", "quant_method": hf.METHOD, "skip": ["lm_head"]}
    assert len(converted) == 14
    assert "model.layers.1.self_attn.o_proj" in converted


def test_a_reloaded_model_is_packed_and_keeps_its_dtypes(saved: Path) -> None:
    model = load(saved / "fp8", dtype=torch.bfloat16)
    made = model.model.layers[1].self_attn.q_proj
    assert made.fresh
    assert (made.weight.dtype, made.weight_scale.dtype) == (torch.float8_e4m3fn, torch.float32)
    assert type(model.lm_head) is nn.Linear
    assert model.lm_head.weight.dtype == torch.bfloat16
    assert model.generate(TOKENS, max_new_tokens=2, do_sample=False).shape == (1, TOKENS.shape[1] + 2)


def test_a_model_that_convert_changed_is_saved(tmp_path: Path) -> None:
    model = llama(tie_word_embeddings=True)
    hf.attach(model, ss.convert(model, "4:6", "int8", skip=["lm_head", "model.layers.0.*"]))
    model.save_pretrained(tmp_path)
    repeated = load(tmp_path)
    assert torch.equal(logits(repeated), logits(model))
    assert type(repeated.model.layers[0].mlp.up_proj) is nn.Linear
    assert str(repeated.model.layers[1].mlp.up_proj.pattern) == "4:6"
    base = transformers.AutoModel.from_pretrained(tmp_path).eval()  # its modules have no "model." in front
    with torch.no_grad():
        assert torch.equal(base(TOKENS)[0], model.model(TOKENS)[0])
    base.save_pretrained(tmp_path / "base")
    headed = load(tmp_path / "base", cls="AutoModelForSequenceClassification")
    assert type(headed.score) is nn.Linear  # it is new, and trained from random numbers
    with torch.no_grad():
        assert torch.equal(headed.model(TOKENS)[0], base(TOKENS)[0])


def test_skip_is_what_convert_takes(saved: Path) -> None:
    """What is kept unasked is by default; a name is looked for, as a typing error would convert what was to be kept."""
    every = load(saved / "dense", quantization_config=hf.SlidesparseConfig(skip=()))
    assert isinstance(every.lm_head, ss.Linear)
    with pytest.raises(ShiplapError, match="skip='lm_haed', which names no module"):
        load(saved / "dense", quantization_config=hf.SlidesparseConfig(skip=["lm_haed"]))
    encoder = load(saved / "dense", cls="AutoModel", quantization_config=hf.SlidesparseConfig())  # has no lm_head
    assert isinstance(encoder.layers[1].mlp.up_proj, ss.Linear)


def test_dequantised_it_is_a_dense_model(saved: Path) -> None:
    model = load(saved / "int8")
    wanted = logits(model)
    model = model.dequantize()
    assert type(model.model.layers[0].mlp.up_proj) is nn.Linear
    torch.testing.assert_close(logits(model), wanted, atol=0.02, rtol=0)  # activations are not rounded any more


def test_a_checkpoint_that_breaks_its_pattern_is_refused(saved: Path, tmp_path: Path) -> None:
    model = load(saved / "int8")
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.fill_(1)
    model.save_pretrained(tmp_path)
    with pytest.raises(ShiplapError, match=r"SL211[\s\S]*model.layers.1.mlp.up_proj.weight[\s\S]*8 non-zeros in row 0"):
        load(tmp_path)


def test_configurations_are_checked() -> None:
    with pytest.raises(ShiplapError, match=r"SL211[\s\S]*dtype 'int4'"):
        hf.SlidesparseConfig(dtype="int4")
    with pytest.raises(ShiplapError, match=r"SL211[\s\S]*'7:9'"):
        hf.SlidesparseConfig("7:9")


def test_weights_that_are_not_in_memory_are_refused() -> None:
    model, config = llama(), hf.SlidesparseConfig()
    done = ss.convert(model)
    model.model.layers[1].mlp.up_proj.to("meta")  # as device_map leaves what it offloads
    hf.attach(model, done)
    with pytest.raises(ShiplapError, match=r"layers.1.mlp.up_proj.weight[\s\S]*meta[\s\S]*a device_map that offloads"):
        model.hf_quantizer._process_model_after_weight_loading(model)
    model = llama()
    model.model.layers[1].mlp.up_proj.to("meta")
    with pytest.raises(ShiplapError, match=r"layers.1.mlp.up_proj.weight[\s\S]*meta[\s\S]*offload none"):
        hf.SlidesparseQuantizer(config, pre_quantized=False)._process_model_after_weight_loading(model)


def test_weights_that_were_cut_while_they_were_loaded_are_refused() -> None:
    model, quantizer = llama(), hf.SlidesparseQuantizer(hf.SlidesparseConfig(), pre_quantized=False)
    assert quantizer.is_trainable, "adapters can be trained on it"
    cut = model.model.layers[1].mlp.down_proj
    cut.weight = nn.Parameter(cut.weight.detach()[:, :36])
    with pytest.raises(ShiplapError, match=r"SL211(.|\n)*layers.1.mlp.down_proj.weight(.|\n)*slidesparse.shard"):
        quantizer._process_model_after_weight_loading(model)


def test_a_mixture_is_saved_and_loaded(tmp_path: Path) -> None:
    net = mixtral()
    hf.attach(net, ss.convert(net))
    net.save_pretrained(tmp_path)
    again = load(tmp_path)
    assert again.model.layers[0].mlp.experts.down_layer.weight.dtype == torch.int8
    with torch.no_grad():
        assert torch.equal(again(TOKENS).logits, net(TOKENS).logits)
    dense = again.dequantize()
    assert type(dense.model.layers[0].mlp.experts).__name__ == "MixtralExperts"
    assert not list(layers_of(dense))
    with torch.no_grad():
        torch.testing.assert_close(dense(TOKENS).logits, net(TOKENS).logits, rtol=0.1, atol=0.01)


def test_a_process_without_the_registration_is_told_what_to_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    net, said = llama(), list[str]()
    hf.attach(net, ss.convert(net))
    net.save_pretrained(tmp_path)
    for known in (hf.auto.AUTO_QUANTIZER_MAPPING, hf.auto.AUTO_QUANTIZATION_CONFIG_MAPPING):
        monkeypatch.delitem(known, hf.METHOD)
    monkeypatch.setattr(hf.auto.logger, "warning", said.append)
    with contextlib.suppress(RuntimeError, ValueError):  # transformers goes on, with weights of other sizes
        load(tmp_path)
    assert "Unknown quantization type, got slidesparse (of the package shiplap-slidesparse: call" in said[0]
    assert "shiplap_slidesparse.hf.register() before loading" in said[0]
