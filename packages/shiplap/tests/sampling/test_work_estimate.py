"""How much a sample costs, and what is left on one thread."""

import torch

from shiplap.sampling.work_estimate import on_one_thread


def test_comparisons_run_on_one_thread():
    torch.set_num_threads(2)
    with on_one_thread():
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 2
