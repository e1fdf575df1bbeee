"""Questions that calls ask of torch directly have the answers of its public settings."""

import pytest
import torch

from shiplap.plugin_api.compiling import allows_tf32, reset_compiler

CUBLAS = torch.backends.cuda.matmul


@pytest.fixture(autouse=True)
def restored():
    before = CUBLAS.allow_tf32
    yield
    CUBLAS.allow_tf32 = before


@pytest.mark.parametrize("allowed", [True, False])
def test_tf32_is_what_was_set(allowed):
    CUBLAS.allow_tf32 = allowed
    assert allows_tf32() is allowed


def test_a_graph_is_made_anew_when_tf32_was_set_otherwise():
    @torch.compile(backend="eager", fullgraph=True)
    def chosen(x):
        return x + 1 if allows_tf32() else x - 1

    reset_compiler()
    for allowed, wanted in ((True, 1.0), (False, -1.0)):
        CUBLAS.allow_tf32 = allowed
        assert chosen(torch.zeros(1)).item() == wanted
