"""The plugin of vLLM, on a double of its interface; on the real wheel with ``nox -s vllm``."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shiplap_slidesparse as ss
from shiplap.errors import ShiplapError, ShiplapNotice
from shiplap_testing.forked import python
from shiplap_testing.paths import REPOSITORY
from tests.slidesparse import vllm_double

HOME = "shiplap_slidesparse.vllm"
REAL = os.environ.get("SHIPLAP_TEST_VLLM") == "1"


@pytest.fixture(params=["double", pytest.param("real", marks=pytest.mark.vllm)])
def plugin(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module, imported afresh on the double or on vLLM itself."""
    if request.param == "real" and not REAL:
        pytest.skip("opt-in: nox -s vllm")
    if request.param == "double":
        vllm_double.install(monkeypatch)
    else:  # its parameters ask for their rank, and there are no ranks
        parameter = importlib.import_module("vllm.model_executor.parameter")
        monkeypatch.setattr(parameter, "get_tensor_model_parallel_rank", lambda: 0)
        monkeypatch.setattr(parameter, "get_tensor_model_parallel_world_size", lambda: 1)
    monkeypatch.delitem(sys.modules, HOME, raising=False)
    yield importlib.import_module(HOME)
    sys.modules.pop(HOME, None)


def linear_of(plugin: Any) -> nn.Module:
    layer = plugin.LinearBase.__new__(plugin.LinearBase)  # its constructor asks for a platform
    nn.Module.__init__(layer)
    return layer


def shard(plugin: Any, config: Any, weight: torch.Tensor, scale: torch.Tensor | None, whole_k: int) -> Any:
    """A layer as vLLM makes one: weights created, loaded and processed."""
    layer, method = linear_of(plugin), plugin.SlidesparseLinearMethod(config)
    n, k = weight.shape
    loader = lambda *args: None  # noqa: E731
    method.create_weights(layer, k, [n // 2, n // 2], whole_k, n, torch.bfloat16, weight_loader=loader)
    assert (layer.weight.input_dim, layer.weight.output_dim) == (1, 0)
    layer.weight.data.copy_(weight)
    if scale is not None:
        layer.weight_scale.data.copy_(scale)
    method.process_weights_after_loading(layer)
    return layer, method


def test_the_entry_point_is_declared_and_registers_once(plugin: Any) -> None:
    project = tomllib.loads((REPOSITORY / "packages/shiplap-slidesparse/pyproject.toml").read_text())["project"]
    declared = project["entry-points"]["vllm.general_plugins"]
    assert declared == {"slidesparse": f"{HOME}:register"}
    plugin.register()
    plugin.register()
    assert plugin.QUANTIZATION_METHODS.count("slidesparse") == 1


@pytest.mark.parametrize("dtype", ["int8", "fp8", "bf16"])
def test_a_layer_gives_what_our_own_gives(plugin: Any, dtype: str) -> None:
    torch.manual_seed(0)
    own = ss.Linear.of(nn.Linear(64, 32), "6:8", dtype)
    config = plugin.SlidesparseVllmConfig("6:8", dtype)
    layer, method = shard(plugin, config, own.weight, own.weight_scale, 64)
    x, bias = torch.randn(3, 64).bfloat16(), own.bias.bfloat16()
    assert layer.slidesparse.fresh
    assert torch.equal(method.apply(layer, x, bias), own.multiply(x, bias))
    assert torch.equal(method.dequantize_weight(layer), own.as_packed().dequantised())


def test_ranks_cut_the_depth(plugin: Any) -> None:
    """Whole groups are packed; a shard that cuts a group runs dense, says so, and is as right."""
    torch.manual_seed(0)
    for k, packed in ((64, True), (72, False)):
        own = ss.Linear.of(nn.Linear(k, 32, bias=False), "6:8", "bf16")
        x = torch.randn(3, k).bfloat16()
        config, total, half = plugin.SlidesparseVllmConfig("6:8", "bf16"), torch.zeros(3, 32), k // 2
        for cut in (slice(0, half), slice(half, k)):
            if packed:
                layer, method = shard(plugin, config, own.weight[:, cut], None, k)
            else:
                with (
                    pytest.warns(ShiplapNotice, match="runs shards of depth 36 dense: they cut groups of 8")
                    if (cut.start == 0)
                    else pytest.MonkeyPatch.context()
                ):
                    layer, method = shard(plugin, config, own.weight[:, cut], None, k)
            assert layer.slidesparse.fresh is packed
            total += method.apply(layer, x[:, cut]).float()
        torch.testing.assert_close(total, own(x).float(), atol=0.02, rtol=0.02)


def test_configurations_of_both_kinds(plugin: Any) -> None:
    ours = {"quant_method": "slidesparse", "pattern": "4:6", "dtype": "fp8", "converted": ["a.q_proj"], "skip": []}
    made = plugin.SlidesparseVllmConfig.from_config(ours)
    assert repr(made) == "SlidesparseVllmConfig(pattern=4:6, dtype=fp8, 1 layers)"
    assert not made._keeps("a.q_proj")
    assert made._keeps("a.gate")  # linear to vLLM, while transformers may hold a parameter of its own
    made = plugin.SlidesparseVllmConfig.from_config({k: v for k, v in ours.items() if k not in ("converted", "skip")})
    assert repr(made) == "SlidesparseVllmConfig(pattern=4:6, dtype=fp8, all but ['lm_head'])"
    theirs = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "ignore": ["lm_head", "re:.*gate$"],
        "slidesparse": {"pattern": "6:8"},
    }
    made = plugin.SlidesparseVllmConfig.from_config(theirs)
    assert (str(made.pattern), made.dtype) == ("6:8", "int8")
    assert made._keeps("model.mlp.gate")
    assert not made._keeps("model.mlp.gate_proj")
    override = plugin.SlidesparseVllmConfig.override_quantization_method
    assert (override(theirs, None), override(ours, None)) == ("slidesparse", None)
    assert made.get_name() == "slidesparse"
    assert made.get_min_capability() == 80
    assert made.get_supported_act_dtypes() == [torch.bfloat16, torch.float16]
    assert plugin.SlidesparseVllmConfig("6:8", "bf16").get_supported_act_dtypes() == [torch.bfloat16]
    assert made.get_config_filenames() == []
    weights, inputs = {"strategy": "channel", "symmetric": True}, {"strategy": "token", "dynamic": True}
    group = {"weights": weights, "input_activations": inputs}
    assert plugin.SlidesparseVllmConfig.from_config({**theirs, "config_groups": {"group_0": group}}).dtype == "int8"
    for other in (
        {"input_activations": None},
        {"input_activations": {"dynamic": False}},
        {"weights": {**weights, "symmetric": False}},
        {"weights": {**weights, "strategy": "group"}},
    ):
        with pytest.raises(ShiplapError, match=r"SL211[\s\S]*group_0[\s\S]*symmetric per channel, dynamic activations"):
            plugin.SlidesparseVllmConfig.from_config({**theirs, "config_groups": {"group_0": group | other}})
    with pytest.raises(ShiplapError, match=r"SL211[\s\S]*'7:9'"):
        plugin.SlidesparseVllmConfig.from_config({**theirs, "slidesparse": "7:9"})
    with pytest.raises(ShiplapError, match=r"SL211[\s\S]*dtype ''"):
        plugin.SlidesparseVllmConfig.from_config({**theirs, "format": "pack-quantized"})


def test_which_layers_are_ours(plugin: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "UnquantizedLinearMethod", lambda: "dense")
    config = plugin.SlidesparseVllmConfig("6:8", "int8", converted=["a.o_proj", "b.k_proj", "b.v_proj"])
    config.packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
    layer = linear_of(plugin)
    assert config.get_quant_method(nn.Identity(), "x") is None
    assert isinstance(config.get_quant_method(layer, "a.o_proj"), plugin.SlidesparseLinearMethod)
    assert config.get_quant_method(layer, "a.qkv_proj") == "dense"
    assert config.get_quant_method(layer, "lm_head") == "dense"
    with pytest.raises(ShiplapError, match=r"kept as it was: b.q_proj[\s\S]*all or none of b.q_proj, b.k_proj"):
        config.get_quant_method(layer, "b.qkv_proj")


@pytest.mark.vllm
@pytest.mark.skipif(not REAL, reason="opt-in: nox -s vllm")
def test_a_converted_model_generates_in_vllm_what_it_generates_in_transformers(tmp_path: Path) -> None:
    done = python("-m", "tests.slidesparse.vllm_generate", tmp_path)
    assert done.stdout.splitlines()[-1:] == ["equal"], done.stdout[-2000:] + done.stderr[-2000:]
