"""Loads of an epilogue that depend on one index are not spread over the tile."""

from __future__ import annotations

from shiplap.torch_private.inductor_triton_template import narrow_loads

TILE = "[BLOCK_M, BLOCK_N]"
COLUMN = f"tmp1 = tl.load(in_ptr3 + (tl.broadcast_to(col, {TILE})), mask, eviction_policy='evict_last')"
ELEMENT = f"tmp2 = tl.load(in_ptr4 + (tl.broadcast_to(col + 64*row, {TILE})), mask, eviction_policy='evict_last')"


def test_a_bounded_index_is_left_as_it_is():
    code = narrow_loads(f"{COLUMN}\n{ELEMENT}", frozenset({"col"}))
    assert code == f"tmp1 = tl.load(in_ptr3 + (col), col_mask, eviction_policy='evict_last')\n{ELEMENT}"


def test_an_index_that_nothing_bounds_is_spread_as_before():
    assert narrow_loads(COLUMN, frozenset({"row"})) == COLUMN
