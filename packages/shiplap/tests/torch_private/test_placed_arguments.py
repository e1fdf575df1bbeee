"""Arguments of a call that Inductor makes as a whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shiplap.torch_private.dispatcher_calls import placed_arguments

SCHEMA = "placed(Tensor x, int size=1, int kernel=2, *, int last=3) -> Tensor"


@pytest.mark.parametrize(
    ("args", "kwargs", "placed", "named"),
    [
        (("x",), {"kernel": 5}, ("x", 1, 5), {}),
        (("x", 4), {"kernel": 5, "last": 6}, ("x", 4, 5), {"last": 6}),
        ((), {"x": "x", "size": 7}, ("x", 7), {}),
        (("x",), {}, ("x",), {}),
    ],
)
def test_an_argument_is_passed_by_position(
    args: tuple[Any, ...], kwargs: dict[str, Any], placed: tuple[Any, ...], named: dict[str, Any]
) -> None:
    """An argument by keyword may have the name of a parameter of torch's own, such as ``kernel``."""
    library = torch.library.Library("placed_arguments", "FRAGMENT")
    library.define(SCHEMA)
    try:
        assert placed_arguments(torch.ops.placed_arguments.placed.default, args, kwargs) == (placed, named)
    finally:
        library._destroy()
