"""Self-attention between voxels that lie near each other on a space-filling curve."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from shiplap.plugin_api import error
from shiplap_sparse3d.coords import other_channels
from shiplap_sparse3d.nn.module import SparseModule
from shiplap_sparse3d.serialize import encode_seq
from shiplap_sparse3d.tensor import SparseTensor


class SparseAttention(SparseModule):
    """Multi-head self-attention within patches of voxels (Wu et al., Point Transformer V3, CVPR 2024).

    The voxels of each scene are sorted along a space-filling curve and cut into patches of ``patch_size``, of which the
    last may be shorter. A voxel attends to the voxels of its patch. All sizes follow from the numbers of rows and of
    scenes. So the host does not wait for a device, and a graph has no size that depends on data.

    Args:
        channels: the number of channels of the input and of the output.
        num_heads: the number of heads, a divisor of ``channels``.
        patch_size: the number of voxels of a patch.
        order: the curve, ``"z_order"`` or ``"hilbert"``.
        bias: whether the two linear layers have a bias.

    Shape: ``feats [n, channels] -> [n, channels]`` on the same voxels. Rows of padding become zeros.
    """

    def __init__(
        self,
        channels: int,
        num_heads: int = 1,
        patch_size: int = 1024,
        order: Literal["z_order", "hilbert"] = "z_order",
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        **others: Any,
    ) -> None:
        """Create the two linear layers, with biases if ``bias`` is true, and without them otherwise. Raise ``SL208``
        unless ``num_heads`` divides ``channels`` and ``order`` is known, and ``SL209`` for unknown arguments.
        """
        super().__init__()
        self._refuse_arguments(others)
        self.channels, self.num_heads = (
            self._whole_number(channels, "channels", 1),
            self._whole_number(num_heads, "num_heads", 1),
        )
        self.patch_size, self.order = self._whole_number(patch_size, "patch_size", 1), order
        if channels % num_heads:
            got, where = f"{num_heads} heads of {channels} channels", "SparseAttention, argument 'num_heads'"
            raise error("SL208", where=where, got=got, expected="a divisor of the channels")
        if order not in ("z_order", "hilbert"):
            expected = "'z_order' or 'hilbert'"
            raise error("SL208", where="SparseAttention, argument 'order'", got=repr(order), expected=expected)
        self.qkv = nn.Linear(channels, 3 * channels, bias, device, dtype)
        self.proj = nn.Linear(channels, channels, bias, device, dtype)

    def forward(self, x: SparseTensor) -> SparseTensor:
        """Return the self-attention of ``x``, in which each voxel attends to the voxels of its patch, as a sparse
        tensor on the same voxels. A patch is ``patch_size`` consecutive voxels along a space-filling curve. Rows of
        padding become zeros. Raise ``SL202`` for another number of channels.
        """
        self._check_axes(x, x.geometry.ndim)
        if x.feats.size(1) != self.channels:
            raise other_channels("SparseAttention", x.feats, self.channels, "channels")
        slots, patches = self._slots(x)
        size, heads = self.patch_size, self.num_heads
        # By patch and place: of a view of all places a graph does not know that the patches divide their number.
        place = slots // size, slots % size
        made = self.qkv(x.feats)
        rows = made.new_zeros(patches, size, made.shape[1]).index_put(place, made)
        held = torch.zeros(patches, size, dtype=torch.bool, device=slots.device)
        held = held.index_put(place, torch.ones((), dtype=torch.bool, device=slots.device))[:, None, None]
        # An empty patch attends to its zeros: a softmax over nothing would be NaN.
        mask = held | ~held.any(3, keepdim=True)
        q, k, v = rows.unflatten(2, (3, heads, self.channels // heads)).permute(2, 0, 3, 1, 4).unbind(0)
        out = scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2).flatten(0, 1)
        return x.replace(torch.where(x.is_voxel, self.proj(out.index_select(0, slots)), 0))

    def _slots(self, x: SparseTensor) -> tuple[Tensor, int]:
        """Return the position of each row in the patches, ``int64 [n]``, and an upper bound of the number of patches
        that does not depend on data.

        A patch is a group of ``patch_size`` positions whose rows attend to each other. Patches are filled along a
        space-filling curve, and each scene begins a new patch.
        """
        coords, scenes, size = x.geometry.coords, x.batch_size, self.patch_size
        codes = encode_seq(coords, (scenes, 1, *x.geometry.spatial_shape), self.order)
        order = codes.argsort(stable=True)
        scene = (coords[:, 0].long() + 1).index_select(0, order)  # padding comes first
        count = torch.zeros(scenes + 1, dtype=torch.int64, device=scene.device).scatter_add(
            0, scene, torch.ones_like(scene)
        )
        patches_of = (count + size - 1) // size
        begin, start = count.cumsum(0) - count, (patches_of.cumsum(0) - patches_of) * size
        place = torch.arange(scene.shape[0], device=scene.device) - begin.index_select(0, scene)
        slots = torch.empty_like(order).scatter(0, order, start.index_select(0, scene) + place)
        # A bound that no data decides: each scene, and the padding, may leave a patch incomplete.
        return slots, (scene.shape[0] + size - 1) // size + scenes + 1

    def extra_repr(self) -> str:
        """Return the number of channels, the heads, the patch size and the order as a string, for the module's
        ``repr``.
        """
        return f"{self.channels}, num_heads={self.num_heads}, patch_size={self.patch_size}, order={self.order!r}"
