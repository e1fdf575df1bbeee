"""Models of `timm`, `torchvision`, `diffusers` and `torch_geometric`: unmodified, with random weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from shiplap_backend.models.case import CaseMaker, ModelCase


def _timm_case(name: str, pixels: int = 64, **options: Any) -> CaseMaker:
    """Return a function without parameters that creates the test case of the timm model ``name``. ``options`` are
    passed to ``timm.create_model``.

    Its inputs are random images of ``pixels`` x ``pixels``.
    """

    def make() -> ModelCase:
        """Return the test case with a new model and random images."""
        import timm

        return ModelCase(timm.create_model(name, num_classes=5, **options), (torch.randn(2, 3, pixels, pixels),))

    return make


def _lraspp_case() -> ModelCase:
    """Return the test case of the segmentation model LR-ASPP."""
    from torchvision.models.segmentation import lraspp_mobilenet_v3_large

    model = lraspp_mobilenet_v3_large(weights=None, weights_backbone=None, num_classes=4)
    return ModelCase(model, (torch.randn(2, 3, 64, 64),))


class Detector(nn.Module):
    """Torchvision's Faster R-CNN, which is called with tensors and passes them on as the lists that it needs."""

    def __init__(self) -> None:
        """Create Faster R-CNN for small images, with few proposals."""
        from torchvision.models.detection import fasterrcnn_mobilenet_v3_large_320_fpn

        super().__init__()
        options: dict[str, Any] = {"weights": None, "weights_backbone": None, "num_classes": 3, "box_score_thresh": 0.0}
        sizes = {"min_size": 64, "max_size": 64, "box_detections_per_img": 10}
        # Few proposals keep the model fast. They would not change which operators run.
        proposals = {f"rpn_{w}_nms_top_n_{m}": n for w, n in (("pre", 30), ("post", 12)) for m in ("train", "test")}
        self.detector = fasterrcnn_mobilenet_v3_large_320_fpn(**options, **sizes, **proposals)

    def forward(self, images: Tensor, boxes: Tensor, labels: Tensor) -> Any:
        """Return the detections in ``images`` as a list of dicts. In training, return the losses for ``boxes`` and
        ``labels`` as a dict.

        In training torch is seeded, because the model draws its proposals at random.
        """
        if not self.training:
            return self.detector(list(images))
        torch.manual_seed(0)  # it samples its proposals
        return self.detector(
            list(images), [{"boxes": box, "labels": label} for box, label in zip(boxes, labels, strict=True)]
        )


def _detector_case() -> ModelCase:
    """Return the test case of Faster R-CNN with one box in each image."""
    boxes = torch.tensor([[[4.0, 4.0, 30.0, 40.0]], [[10.0, 8.0, 60.0, 50.0]]])
    args = (torch.rand(2, 3, 64, 64), boxes, torch.tensor([[1], [2]]))
    return ModelCase(Detector(), args, loss=lambda losses: torch.stack(list(losses.values())).sum())


def _unet_case() -> ModelCase:
    """Return the test case of a small UNet of diffusers."""
    from diffusers import UNet2DModel

    model = UNet2DModel(
        sample_size=16,
        in_channels=3,
        out_channels=3,
        layers_per_block=1,
        block_out_channels=(16, 32),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=4,
        attention_head_dim=8,
    )
    return ModelCase(
        model, (torch.randn(2, 3, 16, 16), torch.tensor([3, 7])), loss=lambda out: out.sample.square().mean()
    )


class GraphNetwork(nn.Module):
    """Convolutions over a graph, and attention over its edges."""

    def __init__(self) -> None:
        """Create a graph convolution and a graph attention layer."""
        from torch_geometric.nn import GATConv, GCNConv

        super().__init__()
        self.first, self.second = GCNConv(4, 8), GATConv(8, 3, heads=2)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        """Return the features of the nodes ``x`` after both layers along ``edges``."""
        result: Tensor = self.second(self.first(x, edges).relu(), edges)
        return result


TIMM: dict[str, CaseMaker] = {
    "vit-tiny": _timm_case("vit_tiny_patch16_224", 32, img_size=32, depth=2),
    "convnext-atto": _timm_case("convnext_atto"),
    "mobilenetv3": _timm_case("mobilenetv3_small_100"),
    "efficientnet-b0": _timm_case("efficientnet_b0"),
    "swin-tiny": _timm_case(
        "swin_tiny_patch4_window7_224", 56, img_size=56, depths=(2, 2), num_heads=(2, 4), embed_dim=32
    ),
    "resnet50d": _timm_case("resnet50d"),
}
TORCHVISION: dict[str, CaseMaker] = {"lr-aspp": _lraspp_case, "faster-rcnn": _detector_case}
DIFFUSERS: dict[str, CaseMaker] = {"unet2d": _unet_case}
GEOMETRIC: dict[str, CaseMaker] = {
    "gcn-gat": lambda: ModelCase(GraphNetwork(), (torch.randn(6, 4), torch.randint(6, (2, 14))))
}
