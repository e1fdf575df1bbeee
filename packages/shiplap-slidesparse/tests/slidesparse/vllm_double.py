"""As much of vLLM's interface as a quantization method meets (0.33), without its behaviour on devices."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn


class Base(ABC):
    def __init__(self) -> None:
        self.packed_modules_mapping: dict[str, list[str]] = {}

    @abstractmethod
    def get_name(self) -> str: ...
    @abstractmethod
    def get_supported_act_dtypes(self) -> list[torch.dtype]: ...
    @classmethod
    @abstractmethod
    def get_min_capability(cls) -> int: ...
    @staticmethod
    @abstractmethod
    def get_config_filenames() -> list[str]: ...
    @classmethod
    @abstractmethod
    def from_config(cls, config: dict[str, Any]) -> Base: ...
    @abstractmethod
    def get_quant_method(self, layer: nn.Module, prefix: str) -> Any: ...


class Method(ABC):
    @abstractmethod
    def create_weights(self, layer: nn.Module, *args: Any, **kwargs: Any) -> None: ...
    @abstractmethod
    def apply(self, layer: nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor: ...


class Unquantized(Method):
    def create_weights(self, layer: nn.Module, *args: Any, **kwargs: Any) -> None: ...

    def apply(self, layer: nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
        raise NotImplementedError


class LinearBase(nn.Module):
    pass


class ScaleParameter(nn.Parameter):
    """A parameter that knows how it is cut between ranks."""

    def __new__(cls, data: torch.Tensor, **kwargs: Any) -> Any:
        return super().__new__(cls, data=data, requires_grad=False)

    def __init__(self, data: torch.Tensor, output_dim: int, weight_loader: Any) -> None:
        self.output_dim, self.weight_loader = output_dim, weight_loader


class WeightParameter(ScaleParameter):
    def __init__(self, data: torch.Tensor, input_dim: int, output_dim: int, weight_loader: Any) -> None:
        super().__init__(data, output_dim, weight_loader)
        self.input_dim = input_dim


def install(monkeypatch: pytest.MonkeyPatch) -> dict[str, type]:
    """Put the modules where ``import vllm`` finds them; returns what is registered, by name."""
    methods: list[str] = []
    registered: dict[str, type] = {}

    def register(name: str) -> Any:
        def taken(cls: type) -> type:
            assert issubclass(cls, Base)
            methods.append(name)
            registered[name] = cls
            return cls

        return taken

    layers = "vllm.model_executor.layers"
    for name, values in {
        "vllm": {},
        "vllm.model_executor": {},
        layers: {},
        f"{layers}.linear": {
            "LinearBase": LinearBase,
            "LinearMethodBase": Method,
            "UnquantizedLinearMethod": Unquantized,
        },
        f"{layers}.quantization": {"QUANTIZATION_METHODS": methods, "register_quantization_config": register},
        f"{layers}.quantization.base_config": {"QuantizationConfig": Base},
        "vllm.model_executor.parameter": {
            "ModelWeightParameter": WeightParameter,
            "ChannelQuantScaleParameter": ScaleParameter,
        },
    }.items():
        module = ModuleType(name)
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, name, module)
    return registered
