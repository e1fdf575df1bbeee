"""One op with a C kernel, which lies beside this file."""

from pathlib import Path

from jaxtyping import Float
from torch import Tensor

import shiplap as sl


@sl.op("rowscale::scale")
def scale(x: Float[Tensor, "n c"], factor: Float[Tensor, "n"]) -> Float[Tensor, "n c"]:
    """Each row of ``x`` times its factor."""
    return x * factor[:, None]


scale.kernel(
    "cpu",
    sl.cabi(Path(__file__).with_name("librowscale.so"), "rowscale_scale"),
    dtypes="float32",
)
