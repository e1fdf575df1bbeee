"""A stand-in for ``spconv.pytorch`` on dense volumes: what the facade is compared with, written apart from it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class SparseConvTensor:
    def __init__(
        self,
        features: Tensor,
        indices: Tensor,
        spatial_shape: Any,
        batch_size: Any,
        grid: Any = None,
        voxel_num: Any = None,
        indice_dict: dict[str, Any] | None = None,
    ) -> None:
        self._features, self.indices = features, indices
        self.spatial_shape, self.batch_size = [int(v) for v in spatial_shape], int(batch_size)
        self.grid, self.voxel_num = grid, voxel_num
        self.indice_dict = {} if indice_dict is None else indice_dict
        self.benchmark, self.benchmark_record, self.thrust_allocator = False, {}, None
        self._timer = self.force_algo = self.int8_scale = None

    @property
    def features(self) -> Tensor:
        return self._features

    @features.setter
    def features(self, features: Tensor) -> None:
        self._features = features

    def __iadd__(self, other: SparseConvTensor) -> SparseConvTensor:
        return self.replace_feature(self.features + other.features)

    @classmethod
    def from_dense(cls, x: Tensor) -> SparseConvTensor:
        where = (x != 0).any(-1).nonzero()
        return cls(x[tuple(where.unbind(1))], where.int(), x.shape[1:-1], x.shape[0])

    def replace_feature(self, features: Tensor) -> SparseConvTensor:
        return SparseConvTensor(
            features, self.indices, self.spatial_shape, self.batch_size, indice_dict=self.indice_dict
        )

    def volume(self, features: Tensor) -> Tensor:
        out = features.new_zeros(self.batch_size, *self.spatial_shape, features.shape[1])
        return out.index_put(tuple(self.indices.long().unbind(1)), features).movedim(-1, 1)

    def dense(self) -> Tensor:
        return self.volume(self.features)

    def at(self, volume: Tensor) -> Tensor:
        return volume.movedim(1, -1)[tuple(self.indices.long().unbind(1))]


class SparseModule(nn.Module):
    pass


class _Conv(SparseModule):
    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Any,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
        bias: bool = True,
        indice_key: str | None = None,
        algo: Any = None,
    ) -> None:
        super().__init__()
        each = [v if isinstance(v, (tuple, list)) else (v,) * self.ndim for v in (kernel_size, stride, padding)]
        self.kernel, self.stride, self.padding = (list(v) for v in each)
        self.key, self.out_channels = indice_key, out_channels
        self.weight = nn.Parameter(torch.zeros(out_channels, *self.kernel, in_channels))
        self.bias = nn.Parameter(torch.zeros(out_channels)) if bias else None

    ndim = 3

    @property
    def dense_weight(self) -> Tensor:
        return self.weight.movedim(-1, 1)

    def plus(self, features: Tensor) -> Tensor:
        return features if self.bias is None else features + self.bias

    def conv(self, *arguments: Any, **options: Any) -> Tensor:
        return (F.conv1d, F.conv2d, F.conv3d)[self.ndim - 1](*arguments, **options)


class SubMConv3d(_Conv):
    def forward(self, x: SparseConvTensor) -> SparseConvTensor:
        if all(k == 1 for k in self.kernel):  # spconv reads the memory of this weight as [in, out]
            matrix = self.weight.reshape(self.weight.shape[-1], self.out_channels)
            return x.replace_feature(self.plus(x.features @ matrix))
        return x.replace_feature(
            self.plus(x.at(self.conv(x.dense(), self.dense_weight, padding=[k // 2 for k in self.kernel])))
        )


def _onto(x: SparseConvTensor, features: Tensor, reached: Tensor, key: str | None, layer: Any) -> SparseConvTensor:
    there = reached.nonzero()[:, [0, *range(2, reached.ndim)]].int()
    y = SparseConvTensor(features[:0], there, reached.shape[2:], x.batch_size, indice_dict=dict(x.indice_dict))
    if key is not None:
        y.indice_dict[key] = x, layer
    return y.replace_feature(y.at(features))


class SparseConv3d(_Conv):
    def forward(self, x: SparseConvTensor) -> SparseConvTensor:
        window = {"stride": self.stride, "padding": self.padding}
        taken = x.volume(torch.ones_like(x.features[:, :1]))
        reached = self.conv(taken, taken.new_ones(1, 1, *self.kernel), **window) > 0.5
        y = _onto(x, self.conv(x.dense(), self.dense_weight, **window), reached, self.key, self)
        return y.replace_feature(self.plus(y.features))


class SparseInverseConv3d(_Conv):
    def __init__(
        self, in_channels: int, out_channels: int, kernel_size: Any, indice_key: str, bias: bool = True
    ) -> None:
        super().__init__(in_channels, out_channels, kernel_size, indice_key=indice_key, bias=bias)

    def forward(self, x: SparseConvTensor) -> SparseConvTensor:
        before, layer = x.indice_dict[self.key]
        volume = F.conv_transpose3d(x.dense(), self.weight.permute(4, 0, 1, 2, 3), stride=layer.stride)
        room = [
            max(0, w + p - have)
            for w, p, have in zip(before.spatial_shape, layer.padding, volume.shape[2:], strict=True)
        ]
        volume = F.pad(volume, [v for r in reversed(room) for v in (0, r)])
        cut = tuple(slice(p, p + w) for p, w in zip(layer.padding, before.spatial_shape, strict=True))
        y = before.replace_feature(self.plus(before.at(volume[(slice(None), slice(None), *cut)])))
        y.indice_dict = x.indice_dict
        return y


class SparseMaxPool3d(SparseModule):
    ndim = 3

    def __init__(self, kernel_size: int, stride: int | None = None, padding: int = 0, indice_key: Any = None) -> None:
        super().__init__()
        self.window, self.key = (kernel_size, stride or kernel_size, padding), indice_key

    def forward(self, x: SparseConvTensor) -> SparseConvTensor:
        pool = (F.max_pool1d, F.max_pool2d, F.max_pool3d)[self.ndim - 1]
        reached = pool(x.volume(torch.ones_like(x.features[:, :1])), *self.window) > 0.5
        return _onto(x, pool(x.dense(), *self.window).clamp_min(0), reached, self.key, self)  # from zero, as spconv


class SubMConv2d(SubMConv3d):
    ndim = 2


class SparseConv2d(SparseConv3d):
    ndim = 2


class SparseMaxPool2d(SparseMaxPool3d):
    ndim = 2


class SparseSequential(SparseModule):
    def __init__(self, *members: nn.Module) -> None:
        super().__init__()
        for i, member in enumerate(members):
            self.add_module(str(i), member)

    def forward(self, x: Any) -> Any:
        for member in self.children():
            if isinstance(member, SparseModule) or not isinstance(x, SparseConvTensor):
                x = member(x)
            else:
                x = x.replace_feature(member(x.features))
        return x


class ToDense(SparseModule):
    def forward(self, x: SparseConvTensor) -> Tensor:
        return x.dense()
