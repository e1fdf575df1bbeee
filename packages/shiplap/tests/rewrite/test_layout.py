"""Layouts of results: which strides count, which tensors share memory, and copies in the order of another tensor."""

from __future__ import annotations

import torch

from shiplap.rewrite.layout import dims_by_stride, restore_layouts, same_strides, shares_storage


def test_strides_of_dims_with_one_element_do_not_count_and_of_two_they_do() -> None:
    for size, same in ((1, True), (0, True), (2, False), (4, False)):
        new, old = torch.empty_strided((3, size), (1, 3)), torch.empty_strided((3, size), (1, 7))
        assert same_strides(new, old) is same, size
    assert not same_strides(torch.empty(3, 2), torch.empty(2, 3).t())


def test_views_share_memory_and_copies_do_not() -> None:
    x = torch.zeros(2, 3)
    assert shares_storage((torch.zeros(1), x.t()), [x])
    assert not shares_storage([x.clone(), None], [x, 3])
    assert not shares_storage(x.to_sparse(), [x])


def test_results_are_copied_to_the_order_of_the_old_dims() -> None:
    old = torch.empty(4, 2, 3).permute(1, 2, 0)
    assert dims_by_stride(old) == [2, 0, 1]
    assert dims_by_stride(torch.empty(1, 5).expand(3, 5)) == [1, 0]
    new = torch.arange(24.0).view(2, 3, 4)
    made, kept, number = restore_layouts(lambda: (new, new, 7), [old, None, old])()
    assert torch.equal(made, new)
    assert made.stride() == old.stride()
    assert kept is new
    assert number == 7
