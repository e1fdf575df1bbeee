"""Which kernels a compilation asks for ahead, and which it proves: prints both as JSON. Triton is interpreted."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import torch
import torch._inductor.graph as inductor
from torch import nn

import shiplap_sparse3d.geometry as geometry
import shiplap_sparse3d.spconv as sp
from shiplap.inductor import fusion_choices, prove_candidate
from shiplap.inductor.template_candidate import TemplateCandidate
from shiplap.torch_private import inductor_choices_ahead
from shiplap_sparse3d import ops
from shiplap_sparse3d.cuda import conv as cuda
from shiplap_testing import interpreted as interpreted  # it says that Triton is interpreted
from tests.sparse3d.scenes import scene

ops.conv.templates["cpu"] = []
cuda.attach_templates("cpu")
geometry.wants_sorted = lambda tensor: True  # as on a GPU
inductor.should_assume_input_aligned = lambda example: True  # type: ignore[attr-defined]
ahead: list[str] = []
proven: list[str] = []
inductor_choices_ahead.compile_apart = lambda choice: bool(ahead.append(choice.bmreq.module_path))
remember = prove_candidate.remember_verdict


def noted(candidate: TemplateCandidate, verdict: Any) -> None:
    proven.append(candidate.render().bmreq.module_path)
    remember(candidate, verdict)


prove_candidate.remember_verdict = noted


def layer(conv: nn.Module, channels: int) -> Any:
    return sp.SparseSequential(conv, nn.BatchNorm1d(channels), nn.ReLU())


def main() -> None:
    torch.manual_seed(0)
    net = sp.SparseSequential(
        layer(sp.SubMConv3d(4, 16, 3, indice_key="a"), 16),
        layer(sp.SubMConv3d(16, 16, 3, indice_key="a"), 16),
        layer(sp.SubMConv3d(16, 16, 3, indice_key="a"), 16),
        layer(sp.SparseConv3d(16, 16, 2, 2, indice_key="d"), 16),
        layer(sp.SubMConv3d(16, 16, 3, indice_key="b"), 16),
        layer(sp.SubMConv3d(16, 16, 3, indice_key="b"), 16),
        layer(sp.SparseInverseConv3d(16, 16, 2, indice_key="d"), 16),
    ).eval()
    cells = scene(60, (8, 8, 8), 4, dtype=torch.float32)

    def run(feats: torch.Tensor, coords: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = net(sp.SparseConvTensor(feats, coords, [8, 8, 8], 2)).features
        return out

    with torch.no_grad():
        want = run(cells.feats, cells.coords)
        got = torch.compile(run, fullgraph=True, dynamic=True)(cells.feats, cells.coords)
    error = float((got - want).norm() / want.norm())
    chosen = [c.chosen for c in fusion_choices("sparse3d::conv")]
    print(json.dumps({"ahead": ahead, "proven": proven, "chosen": chosen, "error": error}))


main()
