"""Hugging Face transformers: a quantizer that prunes, quantises and packs while a model is loaded.

transformers has no entry point for quantizers: call :func:`register` before ``from_pretrained``, in each process. The
method's name in ``config.json`` says so, since transformers' message about an unknown method contains it.
Importing this module imports transformers and registers nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from transformers.quantizers import auto
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from shiplap import ShiplapError
from shiplap.plugin_api import error
from shiplap_slidesparse.convert import (
    SKIPPED,
    Conversion,
    convert,
    layers_of,
    matches_name,
    replace_module,
    skip_patterns,
)
from shiplap_slidesparse.experts import empty_expert_layer, expert_weights, layer_name, replace_experts, restore_experts
from shiplap_slidesparse.formats import Pattern
from shiplap_slidesparse.linear import Linear
from shiplap_slidesparse.packed import MODES

# transformers prints this text where nobody has registered the method, and no other text of a checkpoint.
METHOD = "slidesparse (of the package shiplap-slidesparse: call shiplap_slidesparse.hf.register() before loading)"


class SlidesparseConfig(QuantizationConfigMixin):
    """The ``quantization_config`` of a transformers model. ``pattern``, ``dtype`` and ``skip`` are those of
    :func:`convert`.

    By default the layers that transformers itself would not convert (the output layer, tied ones) are kept as well.
    ``converted`` lists the exact names of the layers that were converted, or is None before a conversion.
    """

    def __init__(
        self,
        pattern: str = "dense",
        dtype: str = "int8",
        skip: str | Iterable[str] = SKIPPED,
        converted: Iterable[str] | None = None,
        quant_method: str = METHOD,
    ) -> None:
        """Take the settings of a conversion, as ``config.json`` has them. ``converted`` lists the converted layers of a
        checkpoint. Raise ``SL211`` for an unknown dtype or method.
        """
        if dtype not in MODES or quant_method != METHOD:
            raise error(
                "SL211",
                where="slidesparse.hf.SlidesparseConfig",
                got=f"dtype {dtype!r}, method {quant_method!r}",
                expected=f"{', '.join(MODES)}; {METHOD}",
                fix="repair quantization_config in config.json",
            )
        self.quant_method: Any = METHOD
        self.pattern, self.dtype = str(Pattern.parse(pattern)), dtype
        self.skip, self.converted = sorted(skip_patterns(skip)), None if converted is None else sorted(converted)


class SlidesparseQuantizer(HfQuantizer):
    """The quantizer that transformers calls while it loads a model. It converts a model with a dense checkpoint after
    the weights are loaded. If the checkpoint is that of a converted model, it creates the converted layers before the
    weights are loaded, and packs them afterwards.
    """

    requires_calibration = False
    quantization_config: SlidesparseConfig

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> None:
        """Replace the layers that the checkpoint holds in converted form by converted layers on the meta device, into
        which transformers loads. Do nothing for a dense checkpoint. Raise ``SL211`` if the checkpoint's configuration
        does not list its converted layers.
        """
        config = self.quantization_config
        if not self.pre_quantized:
            return
        # Without the list it is unknown which layers have a converted weight in the checkpoint.
        if config.converted is None:
            raise error(
                "SL211",
                where="quantization_config of config.json",
                got="no list 'converted'",
                expected="a model that was saved after conversion",
                fix="convert the model, then save the converted model",
            )
        # A list, since the loop replaces modules.
        for name, module in list(model.named_modules()):
            for part, weight in expert_weights(module).items():
                if _checkpoint_names(model, f"{name}.{layer_name(part)}") & set(config.converted):
                    replace_experts(module, part, empty_expert_layer(module, weight, config.dtype))
            if isinstance(module, nn.Linear) and _checkpoint_names(model, name) & set(config.converted):
                empty = Linear(
                    module.in_features,
                    module.out_features,
                    module.bias is not None,
                    pattern=config.pattern,
                    mode=config.dtype,
                    device="meta",
                    dtype=module.weight.dtype,
                )
                replace_module(model, module, empty.train(module.training))

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        """Pack the converted layers after transformers has loaded the weights, or convert a model whose checkpoint was
        dense. Return the model.
        """
        config = self.quantization_config
        _refuse_shards(model)
        if self.pre_quantized:
            for name, layer in layers_of(model).items():
                _pack_layer(name, layer)
        else:
            convert(model, config.pattern, config.dtype, skip=self._skipped(model))
            # Stored in the checkpoint, so that loading it replaces the same layers.
            config.converted = list(layers_of(model))
        return model

    def _skipped(self, model: Any) -> list[str]:
        """Return the sorted names of the layers of ``model`` that ``convert`` leaves unconverted. They are the names
        that the user gave, or the default names if the user gave none, and the names that transformers excludes.
        Default and excluded names that ``model`` lacks are left out.
        """
        skip, default = self.quantization_config.skip, self.quantization_config.skip == sorted(SKIPPED)
        unasked = self.get_modules_to_not_convert(model, None if default else [], model._keep_in_fp32_modules)
        names = [name for name, _ in model.named_modules(remove_duplicate=False)]
        there = [s for s in {*unasked, *(SKIPPED if default else ())} if any(matches_name(name, s) for name in names)]
        return sorted({*there, *(() if default else skip)})

    def is_serializable(self) -> bool:
        """Return True, since a converted model can be saved."""
        return True

    @property
    def is_trainable(self) -> bool:
        """True, since adapters can be trained on a converted model. Gradients pass to the input, and the weight is
        frozen.
        """
        return True

    @property
    def is_compileable(self) -> bool:
        """True, since a converted model can be compiled."""
        return True

    def _dequantize(self, model: Any, dtype: torch.dtype | None = None) -> Any:
        """Replace the converted layers of ``model`` by dense layers of ``dtype`` (float32 by default) with the same
        values, and return the model.
        """
        for module in model.modules():
            restore_experts(module, dtype or torch.float32)
        for layer in layers_of(model).values():
            weight = layer.as_packed().dequantised(dtype or torch.float32)
            # On meta, so that no weight is drawn only to be replaced.
            dense = nn.Linear(layer.in_features, layer.out_features, layer.bias is not None, device="meta")
            dense.weight = nn.Parameter(weight)
            if layer.bias is not None:
                dense.bias = nn.Parameter(layer.bias.detach().to(weight.dtype))
            replace_module(model, layer, dense.train(layer.training))
        return model


def register() -> None:
    """Register this quantization method with transformers in this process. A second call does nothing."""
    if METHOD not in auto.AUTO_QUANTIZER_MAPPING:
        register_quantization_config(METHOD)(SlidesparseConfig)
        register_quantizer(METHOD)(SlidesparseQuantizer)


def attach(model: Any, conversion: Conversion) -> None:
    """Record ``conversion``, a result of :func:`convert`, in the configuration of a transformers model.
    ``save_pretrained`` then writes it, and the saved model can be loaded again.
    """
    register()
    config = SlidesparseConfig(conversion.pattern, conversion.dtype, converted=layers_of(model))
    model.config.quantization_config = config
    model.hf_quantizer = SlidesparseQuantizer(config, pre_quantized=True)
    model.is_quantized, model.quantization_method = True, METHOD


def _checkpoint_names(model: Any, name: str) -> set[str]:
    """Return the names that the module ``name`` may have in checkpoints, with and without the base model's prefix."""
    home = f"{model.base_model_prefix}."
    return {name, home + name, name.removeprefix(home)}


def _refuse_shards(model: nn.Module) -> None:
    """Raise ``SL211`` if transformers has sharded the weight of a linear layer over ranks, since its shards may split
    groups of the sparsity pattern. The error suggests ``slidesparse.shard``, which cuts between groups after loading.
    """
    for name, m in model.named_modules():
        if not isinstance(m, nn.Linear):
            continue
        if hasattr(m.weight, "placements") or m.weight.shape != (m.out_features, m.in_features):
            raise error(
                "SL211",
                where=f"{name}.weight",
                got="a shard of the weight",
                expected="the whole weight",
                fix="load without tp_plan on each rank, then slidesparse.shard(model)",
            )


def _pack_layer(name: str, layer: Linear) -> None:
    """Pack the loaded weight of ``layer`` for its device. Raise ``SL211``, with the layer's ``name``, if the weight
    does not have the sparsity pattern of ``layer``.
    """
    try:
        layer.pack()
    except ShiplapError as e:
        fix = "load with a device_map that offloads none" if layer.weight.is_meta else "convert the dense model anew"
        raise error(e.id, what=e.what, where=f"{name}.weight", got=e.got, expected=e.expected, fix=fix) from None
