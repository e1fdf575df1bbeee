"""Masks in buffers of modules: their values are known to a compilation, until a call writes to the buffer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._inductor import config
from torch.fx import GraphModule
from torch.nn import functional as F

from shiplap.rewrite.base import Rewrite
from shiplap.rewrite.match import Match
from shiplap.rewrite.shipped.attention import AttentionRewrite
from shiplap.rewrite.shipped.attention_mask import AttentionMaskRewrite
from shiplap.rewrite.shipped.constant_masks import constant_buffers, hidden_part_of_step
from shiplap.rewrite.shipped.scores import ScoreStep
from shiplap.torch_private.inductor_passes import EARLY

Attend = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def written_out(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return F.softmax((q @ k.mT * 0.3).masked_fill(mask == 0, -torch.inf), -1) @ v


def added(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return F.softmax(q @ k.mT * 0.3 + (1 - mask) * -1e9, -1) @ v


def fused(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask == 1)


class Decoder(nn.Module):
    """A table of the longest text, of which a forward reads the part for its tokens."""

    mask: Tensor

    def __init__(self, attend: Attend, table: Tensor | None = None) -> None:
        super().__init__()
        self.attend = attend
        self.register_buffer("mask", torch.ones(16, 16).tril() if table is None else table)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.attend(q, k, v, self.mask[: q.shape[2], : q.shape[2]])


class Compiled:
    """A compiled module, and for each compilation the calls of attention with their masks."""

    def __init__(self, module: nn.Module, rewrite: Rewrite) -> None:
        self.module, self.rewrite, self.calls, self.names = module, rewrite, list[list[dict[str, Any]]](), set[str]()
        torch._dynamo.reset()
        self.compiled = torch.compile(module, backend=self._backend)

    def _backend(self, gm: GraphModule, _: Any) -> Any:
        placed = list(self.rewrite.apply(gm.graph))
        assert all(isinstance(o, Match) for o in placed), placed
        gm.recompile()
        self.names |= {getattr(n.target, "__name__", str(n.target)) for n in gm.graph.nodes}
        called = gm.graph.find_nodes(op="call_function", target=F.scaled_dot_product_attention)
        self.calls.append([{k: v for k, v in n.kwargs.items() if k in ("attn_mask", "is_causal")} for n in called])
        return gm.forward

    def check(self) -> None:
        """Compare one call with eager mode."""
        g = torch.Generator().manual_seed(0)
        args = [torch.randn(2, 3, 8, 4, generator=g) for _ in "qkv"]
        with torch.no_grad():
            torch.testing.assert_close(self.compiled(*args), self.module(*args))

    @property
    def causal(self) -> list[bool]:
        """For each compilation whether the attention needs no mask."""
        return [call.get("is_causal", False) and call["attn_mask"] is None for (call,) in self.calls]


@pytest.fixture(autouse=True)
def _ahead_of_caches() -> Iterator[None]:
    with config.patch(EARLY):
        yield


BUFFERS = AttentionRewrite(always=True, constant_buffers=True)
HOW = [(written_out, BUFFERS), (added, BUFFERS), (fused, AttentionMaskRewrite(constant_buffers=True))]


@pytest.mark.parametrize(("attend", "rewrite"), HOW)
def test_a_buffer_that_is_written_to_is_read_again(attend: Attend, rewrite: Rewrite) -> None:
    decoder = Decoder(attend)
    run = Compiled(decoder, rewrite)
    run.check()
    run.check()
    assert run.causal == [True]
    decoder.mask[3, 1:3] = 0
    run.check()
    # A buffer that changes often costs one more compilation, not one for each change.
    decoder.mask[4, 1:3] = 0
    run.check()
    assert run.causal[1:] == [False]


def test_a_buffer_is_read_in_each_call_unless_an_option_says_otherwise() -> None:
    decoder = Decoder(written_out)
    run = Compiled(decoder, AttentionRewrite(always=True))
    run.check()
    assert run.causal == [False]
    decoder.mask.data[3, 1:3] = 0  # torch does not count this write
    run.check()


def test_the_option_of_one_rewrite_is_none_of_another_one() -> None:
    """What is known of a mask is kept with its node, which both rewrites of a graph look at."""
    found = list[str]()

    def backend(gm: GraphModule, _: Any) -> Any:
        (fill,) = gm.graph.find_nodes(op="call_method", target="masked_fill")
        for wanted in (True, False, True):
            with constant_buffers(wanted):
                found.append(hidden_part_of_step(ScoreStep("fill", fill.args[1], number=-torch.inf)))
        return gm.forward

    torch._dynamo.reset()
    torch.compile(Decoder(written_out), backend=backend)(*torch.randn(3, 2, 3, 8, 4))
    assert found == ["later", "", "later"]


def test_a_buffer_that_is_replaced_is_read_again() -> None:
    decoder = Decoder(written_out)
    run = Compiled(decoder, BUFFERS)
    run.check()
    decoder.mask = torch.ones(16, 16)
    run.check()
    assert run.causal == [True, False]


def test_a_buffer_in_memory_of_numpy_is_read_in_each_call() -> None:
    array = np.tril(np.ones((16, 16), np.float32))
    run = Compiled(Decoder(written_out, torch.from_numpy(array)), BUFFERS)
    run.check()
    assert run.causal == [False]
    array[3, 1:3] = 0
    run.check()


def test_a_buffer_whose_memory_is_given_to_numpy_is_read_again() -> None:
    decoder = Decoder(written_out)
    run = Compiled(decoder, BUFFERS)
    run.check()
    decoder.mask.numpy()[3, 1:3] = 0
    run.check()
    assert run.causal == [True, False]


def test_a_buffer_that_collectives_may_write_to_is_read_again() -> None:
    run = Compiled(Decoder(written_out), BUFFERS)
    run.check()
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        run.check()
    finally:
        torch.distributed.destroy_process_group()
    assert run.causal == [True, False]


def test_a_window_hides_no_row() -> None:
    near = torch.arange(16)[:, None] - torch.arange(16)
    run = Compiled(Decoder(written_out, (near.abs() < 3).float()), BUFFERS)
    run.check()
    # Nothing looks for hidden rows.
    assert "scaled_dot_product_attention" in run.names
    assert "amax" not in run.names


def test_rows_that_a_buffer_hides_are_those_of_eager_mode() -> None:
    table = torch.ones(16, 16).tril()
    table[2] = 0
    for attend in (written_out, added):
        run = Compiled(Decoder(attend, table), BUFFERS)
        g = torch.Generator().manual_seed(0)
        args = [torch.randn(2, 3, 8, 4, generator=g) for _ in "qkv"]
        with torch.no_grad():
            torch.testing.assert_close(run.compiled(*args), run.module(*args), equal_nan=True)
        assert run.causal == [False]


def test_a_graph_that_writes_to_its_buffer_reads_it() -> None:
    class Writes(Decoder):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self.mask[:4].narrow(1, 0, 2).fill_(1)
            return super().forward(q, k, v)

    run = Compiled(Writes(written_out), BUFFERS)
    run.check()
    assert run.causal == [False]


@pytest.mark.skipif(not EARLY, reason="before torch 2.13 such a pass always runs ahead of the caches")
def test_code_from_a_cache_relies_on_no_buffer() -> None:
    """A key has no values: a pass that runs behind the look-up must not read any."""
    with config.patch(pre_grad_pass_timing="late"):
        run = Compiled(Decoder(written_out), BUFFERS)
        run.check()
    assert run.causal == [False]


def test_a_buffer_without_values_stays() -> None:
    run = Compiled(Decoder(written_out).to("meta"), BUFFERS)
    assert run.compiled(*(torch.empty(2, 3, 8, 4, device="meta") for _ in "qkv")).is_meta
    assert run.causal == [False]


def test_an_argument_is_no_buffer() -> None:
    class Given(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return written_out(q, k, v, q[0, 0, :, :1].abs() < 9)

    run = Compiled(Given(), BUFFERS)
    run.check()
    assert run.causal == [False]
