"""Whole models for ``shiplap backend audit --models``: small, with random weights, by the package they come from."""

from __future__ import annotations

from shiplap_backend.models.blocks import MODELS as BLOCKS
from shiplap_backend.models.case import CaseMaker, ModelCase
from shiplap_backend.models.language import MODELS as TRANSFORMERS
from shiplap_backend.models.plain import MODELS as PLAIN
from shiplap_backend.models.vision import DIFFUSERS, GEOMETRIC, TIMM, TORCHVISION

__all__ = ["MODELS", "CaseMaker", "ModelCase"]

# name -> the package that it needs besides torch (empty: none), and what makes it. No package is imported before.
MODELS: dict[str, tuple[str, CaseMaker]] = {
    name: (package, make)
    for package, makers in (
        ("", PLAIN),
        ("", BLOCKS),
        ("transformers", TRANSFORMERS),
        ("timm", TIMM),
        ("torchvision", TORCHVISION),
        ("diffusers", DIFFUSERS),
        ("torch_geometric", GEOMETRIC),
    )
    for name, make in makers.items()
}
