"""A linear layer with 6:8 weights and 8-bit products: python examples/slidesparse.py"""

import torch

import shiplap as sl

# --8<-- [start:parts]
import shiplap_slidesparse as slidesparse

torch.manual_seed(0)
weight, x = torch.randn(256, 320), torch.randn(7, 320)

# two of each eight neighbours are zero: this is what a checkpoint holds
pruned = slidesparse.prune(weight, "6:8")
# quantised per row, packed for the device it is on
packed = slidesparse.pack(pruned, "6:8", "int8")
y = slidesparse.matmul(x, packed)
# --8<-- [end:parts]

exact = x @ pruned.t()
error = float((y - exact).norm() / exact.norm())
kept = float(pruned.norm() / weight.norm())
print(
    f"{packed.pattern} keeps {kept:.3f} of the weight's norm; "
    f"int8 adds an error of {error:.4f}"
)

# --8<-- [start:exact]
sparse = slidesparse.matmul(x, packed.keeping("packed"))
dense = slidesparse.matmul(x, packed.keeping("dense"))
# integers: which form of the weight is read does not change a bit
assert torch.equal(sparse, dense)
# --8<-- [end:exact]
print("the packed weight gives the bits of the dense one")

# --8<-- [start:tune]
from shiplap_slidesparse import layers

arguments = (
    x,
    packed.scale,
    packed.dense,
    packed.packed,
    None,
    packed.pairs,
    packed.layout,
)
(choice,) = sl.tune(layers.linear_int8, [arguments], budget=60, isolate=False)
print(f"for {x.shape[0]} rows {choice.kernel} is the fastest that is right")
# --8<-- [end:tune]

# --8<-- [start:compile]
layer = torch.compile(
    lambda x: slidesparse.matmul(x, packed), fullgraph=True, dynamic=True
)
assert torch.equal(layer(x), y)
# --8<-- [end:compile]
print("compiled into one graph")
