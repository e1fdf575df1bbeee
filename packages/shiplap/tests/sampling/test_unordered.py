"""Results that are sets of rows."""

import torch
from jaxtyping import Int64
from torch import Tensor

import shiplap as sl
from shiplap.sampling.unordered import match_unordered_rows, sort_unordered_rows


def test_integers_that_differ_in_their_last_bit_are_different_rows(ns):
    @sl.op(f"{ns}::distinct", bounds={"m": "n"}, unordered="out")
    def distinct(x: Int64[Tensor, "n"]) -> Int64[Tensor, "m"]:
        return torch.unique(x)

    most = torch.iinfo(torch.int64).max
    ordered = torch.tensor([-most - 1, -most, -1, 0, most - 1, most])
    for seed in range(4):
        mixed = ordered[torch.randperm(6, generator=torch.Generator().manual_seed(seed))]
        (own,) = sort_unordered_rows(distinct.spec, (mixed,))
        assert torch.equal(own, ordered)
        assert torch.equal(match_unordered_rows(distinct.spec, (mixed,), (ordered,))[0], ordered)
