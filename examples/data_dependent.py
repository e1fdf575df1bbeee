"""An output whose size depends on the data, compiled once.

Run: python examples/data_dependent.py
"""

# --8<-- [start:declare]
import torch
from jaxtyping import Int64
from torch import Tensor

import shiplap as sl


@sl.op("data_dependent::distinct", bounds={"m": "n"}, outputs=("values", "counts"))
def distinct(x: Int64[Tensor, "n"]) -> tuple[Int64[Tensor, "m"], Int64[Tensor, "m"]]:
    """Distinct values in ascending order, and how often each occurs."""
    values, counts = torch.unique(x, return_counts=True)
    return values, counts


# --8<-- [end:declare]


def main() -> None:
    # --8<-- [start:compile]
    @torch.compile(fullgraph=True, dynamic=True)
    def most_common(x: Tensor) -> Tensor:
        values, counts = distinct(x)
        return torch.where(counts == counts.amax(), values, 0).sum()

    # three sizes in, three sizes out, one graph
    for data in ([3, 1, 3], [5, 5, 2, 2, 2, 9], [7]):
        print(f"most common of {data}: {most_common(torch.tensor(data)).item()}")
    # --8<-- [end:compile]

    # --8<-- [start:bound]
    @distinct.kernel("cpu", name="broken")
    def _(x):
        return torch.arange(2 * len(x)), torch.ones(2 * len(x), dtype=torch.int64)

    try:
        distinct(torch.tensor([1, 2]))
    except sl.ShiplapError as e:
        print(e)  # SL302: the kernel returned more than the declaration allows
    # --8<-- [end:bound]


if __name__ == "__main__":
    main()
