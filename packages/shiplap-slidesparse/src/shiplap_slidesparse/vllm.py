"""vLLM: a quantization method for checkpoints of pruned dense weights, packed by each rank for its shard.

vLLM calls :func:`register` in every process, through the entry point group ``vllm.general_plugins``. Checkpoints are
those that ``hf.py`` writes, or W8A8 ones of compressed-tensors whose ``quantization_config`` has a ``slidesparse`` key
with a ``pattern``, which every other program reads as the dense 8-bit model that it is. Importing this imports vLLM.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.linear import LinearBase, LinearMethodBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS, register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.parameter import ChannelQuantScaleParameter, ModelWeightParameter

from shiplap.plugin_api import error, notice
from shiplap_slidesparse.convert import SKIPPED, matches_name
from shiplap_slidesparse.formats import Pattern
from shiplap_slidesparse.linear import Linear
from shiplap_slidesparse.packed import MODES, Packed

__all__ = ["METHOD", "SlidesparseLinearMethod", "SlidesparseVllmConfig", "register"]

METHOD = "slidesparse"
FORMATS = {"int-quantized": "int8", "float-quantized": "fp8", "dense": "bf16"}  # of compressed-tensors
CAPABILITY = 80  # the first with sparse tensor cores


class SlidesparseVllmConfig(QuantizationConfig):
    """The ``quantization_config`` of a checkpoint in vLLM. ``pattern``, ``dtype`` and ``skip`` are those of
    ``convert``. ``converted`` holds the exact names of the converted layers, or is None if every layer is converted
    that ``skip`` does not name.
    """

    def __init__(
        self, pattern: str, dtype: str, converted: Iterable[str] | None = None, skip: Iterable[str] = ()
    ) -> None:
        """Take the settings of a checkpoint. They are the pattern, the dtype, and the names of the converted or of the
        kept layers. If ``converted`` is None, all layers but those in ``skip`` are converted. Raise ``SL211`` for an
        unknown dtype.
        """
        super().__init__()
        if dtype not in MODES:
            raise error(
                "SL211",
                where="quantization_config of config.json",
                got=f"dtype {dtype!r}",
                expected=", ".join(MODES),
                fix="convert the model anew",
            )
        self.pattern, self.dtype, self.skip = Pattern.parse(pattern), dtype, tuple(skip)
        self.converted = None if converted is None else frozenset(converted)

    def __repr__(self) -> str:
        """Return the settings as text."""
        layers = f"all but {list(self.skip)}" if self.converted is None else f"{len(self.converted)} layers"
        return f"SlidesparseVllmConfig(pattern={self.pattern}, dtype={self.dtype}, {layers})"

    def get_name(self) -> str:
        """Return the name of the quantization method."""
        return METHOD

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """Return the dtypes of activations that the method accepts. For 16-bit weights it is the weight's dtype."""
        return {"bf16": [torch.bfloat16], "fp16": [torch.float16]}.get(self.dtype, [torch.bfloat16, torch.float16])

    @classmethod
    def get_min_capability(cls) -> int:
        """Return the lowest compute capability of a GPU that this method needs, as a number in vLLM's form (80 for
        8.0).
        """
        return CAPABILITY

    @staticmethod
    def get_config_filenames() -> list[str]:
        """Return an empty list, since all settings are in ``config.json``."""
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> SlidesparseVllmConfig:
        """Return the settings in ``config``, the quantization configuration of a checkpoint. It is in our own format or
        in that of compressed-tensors. Raise ``SL211`` for a scheme of compressed-tensors that would give wrong results.
        """
        if "slidesparse" not in config:
            converted = config.get("converted")
            return cls(
                config.get("pattern", ""),
                config.get("dtype", ""),
                converted,
                config.get("skip", SKIPPED) if converted is None else (),
            )
        dtype, ours = FORMATS.get(config.get("format", ""), ""), config["slidesparse"]
        if MODES.get(dtype, torch.bfloat16).itemsize == 1:
            _check_groups(config.get("config_groups") or {})
        return cls(ours.get("pattern", "") if isinstance(ours, dict) else ours, dtype, skip=config.get("ignore") or ())

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: dict[str, Any], user_quant: str | None, hf_config: Any = None
    ) -> str | None:
        """Return our method's name for checkpoints of our quantizer and for compressed-tensors checkpoints with a
        pattern. Return None for others. ``user_quant`` and ``hf_config`` are not read.
        """
        ours = bool(hf_quant_cfg) and str(hf_quant_cfg.get("quant_method", "")).startswith(f"{METHOD} (")
        return METHOD if ours or (hf_quant_cfg and "slidesparse" in hf_quant_cfg) else None

    def get_quant_method(self, layer: nn.Module, prefix: str) -> Any:
        """Return the quantization method of the layer ``prefix``. It is vLLM's method for unquantized layers if the
        checkpoint holds the layer unconverted. Return None for a layer that is not linear.
        """
        if not isinstance(layer, LinearBase):
            return None
        return UnquantizedLinearMethod() if self._keeps(prefix) else SlidesparseLinearMethod(self)

    def _keeps(self, prefix: str) -> bool:
        """Return whether the checkpoint holds the layer ``prefix`` unconverted. vLLM fuses several layers of a
        checkpoint into one. Raise ``SL211`` if only some of these are converted.
        """
        home, _, name = prefix.rpartition(".")
        mapping: Mapping[str, list[str]] = self.packed_modules_mapping
        parts = [f"{home}.{part}" if home else part for part in mapping.get(name, [name])]
        listed = self.converted
        # A layer that vLLM fuses has several names in the checkpoint.
        kept = {
            p for p in parts if (listed is not None and p not in listed) or any(_is_ignored(s, p) for s in self.skip)
        }
        if kept and len(kept) < len(parts):
            raise error(
                "SL211",
                where=prefix,
                got=f"kept as it was: {', '.join(sorted(kept))}",
                expected=f"all or none of {', '.join(parts)}, which vLLM runs as one layer",
                fix="convert the model anew, with skip= for all of them",
            )
        return bool(kept)


class SlidesparseLinearMethod(LinearMethodBase):
    """The method by which vLLM loads and computes a converted linear layer. The layer holds the checkpoint's weight
    until loading is complete, and this rank's packed shard afterwards.
    """

    def __init__(self, config: SlidesparseVllmConfig) -> None:
        """Store ``config``, the settings of a checkpoint."""
        self.config = config

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Register the weight as a parameter of ``layer``, and for 8 bits also its scale, both zeros. vLLM loads this
        rank's shard of the layer into them. ``input_size_per_partition`` and ``output_partition_sizes`` are the sizes
        of the shard, and ``input_size`` is that of the whole layer. ``weight_loader`` is the only further attribute
        that is read.
        """
        dtype, n = MODES[self.config.dtype], sum(output_partition_sizes)
        loader = extra_weight_attrs.get("weight_loader")
        weight = torch.zeros(n, input_size_per_partition, dtype=dtype)
        layer.register_parameter(
            "weight", ModelWeightParameter(data=weight, input_dim=1, output_dim=0, weight_loader=loader)
        )
        if dtype.itemsize == 1:
            scale = torch.zeros(n, 1, dtype=torch.float32)
            layer.register_parameter(
                "weight_scale", ChannelQuantScaleParameter(data=scale, output_dim=0, weight_loader=loader)
            )
        # A shard whose border lies inside of a group has other windows than the pruned weight.
        layer.whole_groups = input_size_per_partition == input_size or (
            input_size_per_partition % self.config.pattern.size == 0
        )

    def process_weights_after_loading(self, layer: Any) -> None:
        """Make a ``Linear`` from the loaded weight of ``layer``, pack it, and store it as ``layer.slidesparse``. If
        this rank's shard cuts through groups of the pattern, the weight is not packed and a notice is issued.
        """
        weight, scale = layer.weight.data, layer.weight_scale.data[:, 0] if hasattr(layer, "weight_scale") else None
        n, k = weight.shape
        made = Linear.from_weight(
            Packed.unchecked(self.config.dtype, self.config.pattern.pairs, n, k, weight.contiguous(), None, scale)
        )
        if layer.whole_groups:
            made.pack()
        else:
            notice(
                f"slidesparse/shard/{k}",
                f"slidesparse runs shards of depth {k} dense: they cut groups of {self.config.pattern.size}",
            )
        # vLLM reads the parameters of its own layer object.
        layer.weight, layer.weight_scale, layer.slidesparse = made.weight, made.weight_scale, made

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return the result of the layer on ``x``. If ``bias`` is None, no bias is added."""
        return layer.slidesparse.multiply(x, bias)

    def dequantize_weight(self, layer: Any) -> Tensor:
        """Return the weight as a float32 matrix with its scales applied, so that vLLM can quantise it otherwise."""
        return layer.slidesparse.as_packed().dequantised()


def _check_groups(groups: Mapping[str, Any]) -> None:
    """Raise ``SL211`` unless each scheme of compressed-tensors in ``groups`` has symmetric weights with a scale per
    channel. The scales of its activations must be computed in each call. Checkpoints of other schemes would load and
    give wrong results.
    """
    for name, group in groups.items():
        weights, inputs = (group.get(part) or {} for part in ("weights", "input_activations"))
        scheme = weights.get("strategy", "channel"), weights.get("symmetric", True), inputs.get("dynamic", False)
        if scheme != ("channel", True, True):
            raise error(
                "SL211",
                where=f"config_groups of config.json: {name}",
                got="weights per {}, symmetric={}; activations dynamic={}".format(*scheme),
                expected="weights symmetric per channel, dynamic activations of 8 bits",
                fix='quantise to such a scheme, or leave "slidesparse" out',
            )


def _is_ignored(wanted: str, name: str) -> bool:
    """Return whether ``wanted`` matches the layer ``name``. ``wanted`` is written as in compressed-tensors. After the
    prefix ``re:`` it is a regular expression, and otherwise a name as in ``matches_name``.
    """
    return bool(re.match(wanted[3:], name)) if wanted.startswith("re:") else matches_name(name, wanted)


def register() -> None:
    """Register the quantization method with vLLM. A second call does nothing."""
    if METHOD not in QUANTIZATION_METHODS:
        register_quantization_config(METHOD)(SlidesparseVllmConfig)
