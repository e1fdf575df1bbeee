"""The kernels of sparse3d for CUDA, in Triton. A module with Triton code is imported when its first kernel runs."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from shiplap_sparse3d import bounded, ops, planning, pooling
from shiplap_sparse3d.cuda.late import late
from shiplap_sparse3d.cuda.status import synchronize

__all__ = ["synchronize"]

HASH = "40 * max(2 * n, 64)"  # bytes of hash.SLOT_BYTES * hash.slots_for(n)
SORT = "(parts * (20 * {} + 8192) + 7) // 8 * 8"  # bytes of sort.scratch_bytes


@ops.unique_coords.kernel("cuda", name="triton")
def _(coords: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    outputs: tuple[Tensor, Tensor, Tensor] = late("unique", "unique_coords")(coords)
    return outputs


@ops.segment_mean.kernel("cuda", name="triton")
def _(*args: Any, out: Tensor) -> None:
    late("unique", "segment_mean")(*args, out=out)


@ops.subm_table.kernel("cuda", name="triton", workspace=HASH)
def _(*args: Any, out: Tensor, workspace: Tensor) -> None:
    late("tables", "subm_table")(*args, out=out, workspace=workspace)


@ops.conv_table.kernel("cuda", name="triton", workspace=HASH)
def _(*args: Any, out: Tensor, workspace: Tensor) -> None:
    late("tables", "conv_table")(*args, out=out, workspace=workspace)


@ops.transpose_table.kernel("cuda", name="triton")
def _(table: Tensor, rows: int, *, out: Tensor) -> None:
    late("tables", "transpose_table")(table, rows, out=out)


@ops.out_coords.kernel("cuda", name="triton")
def _(*args: Any) -> Tensor:
    return late("coords", "out_coords")(*args)


@ops.sort_table.kernel("cuda", name="triton", workspace=SORT.format("m"))
def _(*args: Any, columns: Tensor, order: Tensor, masks: Tensor, workspace: Tensor) -> None:
    late("sort", "sort_table")(*args, columns=columns, order=order, masks=masks, workspace=workspace)


@ops.tap_blocks.kernel("cuda", name="triton")
def _(masks: Tensor, taps: int, *, blocks: Tensor, counts: Tensor) -> None:
    late("sort", "tap_blocks")(masks, taps, blocks=blocks, counts=counts)


@planning.subm_plan.kernel("cuda", name="triton", workspace=f"{HASH} + {SORT.format('n')} + 4 * n * k")
def _(*args: Any, columns: Tensor, order: Tensor, masks: Tensor, workspace: Tensor) -> None:
    late("tables", "subm_plan")(*args, columns=columns, order=order, masks=masks, workspace=workspace)


SORT_BACK = SORT.format("n").replace("parts", "parts_t")
PLAN = f"{HASH} + {SORT.format('m')} + {SORT_BACK} + 4 * k * (m + n * min(parts_t, 1))"


@planning.conv_plan.kernel("cuda", name="triton", workspace=PLAN)
def _(
    *args: Any,
    columns: Tensor,
    order: Tensor,
    masks: Tensor,
    columns_t: Tensor,
    order_t: Tensor,
    masks_t: Tensor,
    workspace: Tensor,
) -> None:
    late("tables", "conv_plan")(
        *args,
        columns=columns,
        order=order,
        masks=masks,
        columns_t=columns_t,
        order_t=order_t,
        masks_t=masks_t,
        workspace=workspace,
    )


@bounded.out_coords_bounded.kernel("cuda", name="triton")
def _(*args: Any, reached: Tensor, count: Tensor) -> None:
    late("coords", "out_coords_bounded")(*args, reached=reached, count=count)


# --- pooling ----------------------------------------------------------------------------------------------------------


@pooling.max_pool_with_taps.kernel("cuda", name="triton")
def _(*args: Any, out: Tensor, taps: Tensor) -> None:
    late("pool", "max_pool_with_taps")(*args, out=out, taps=taps)


@pooling.max_pool_grad.kernel("cuda", name="triton")
def _(*args: Any, out: Tensor) -> None:
    late("pool", "max_pool_grad")(*args, out=out)


@pooling.sum_pool.kernel("cuda", name="triton")
def _(*args: Any, out: Tensor) -> None:
    late("pool", "sum_pool")(*args, out=out)


_PARTS = "min(cdiv(n, 2048), 256) * batch_size"  # as many as scenes.PART and scenes.PARTS make, for each scene


@pooling.global_max_pool.kernel("cuda", name="triton", workspace=f"{_PARTS} * 4 * c")
def _(*args: Any, out: Tensor, rows: Tensor, workspace: Tensor) -> None:
    late("scenes", "global_max_pool")(*args, out=out, rows=rows, workspace=workspace)


@pooling.global_sum_pool.kernel("cuda", name="triton", workspace=f"{_PARTS} * (8 * c + 8)")
def _(*args: Any, out: Tensor, workspace: Tensor) -> None:
    late("scenes", "global_sum_pool")(*args, out=out, workspace=workspace)
