"""schema, fresh, workspace, determinism, threads: what an op may do to memory and state."""

from __future__ import annotations

import threading
import time

import torch
from jaxtyping import Float, Int32
from torch import Tensor

import shiplap as sl
from tests.audit.common import look, register


@sl.op("audit_memory::double")
def double(x: Float[Tensor, "n c"]) -> Float[Tensor, "n c"]:
    return x * 2


@double.kernel("cpu")
def _(x, *, out):
    torch.mul(x, 2, out=out)


@sl.op("audit_memory::increment", mutates=("x",))
def increment(x: Float[Tensor, "n c"]) -> None:
    x += 1


# schema


# --8<-- [start:schema]
@sl.op("audit_memory::sorts_its_input")
def sorts_its_input(x: Int32[Tensor, "n"]) -> Int32[Tensor, "n"]:
    return x.sort().values


@sorts_its_input.kernel("cpu")
def _(x):
    x.copy_(x.sort().values)
    return x.clone()


# --8<-- [end:schema]


@sl.op("audit_memory::writes_the_gaps", mutates=("x",))
def writes_the_gaps(x: Float[Tensor, "n c"]) -> None:
    x += 1


@writes_the_gaps.kernel("cpu")
def _(x):
    torch.empty(0, dtype=x.dtype).set_(x.untyped_storage()).add_(1)


def test_schema_fires_on_a_hidden_write():
    finding = look(sorts_its_input, "schema")
    assert finding.verdict == "fail"
    assert "x was changed" in finding.evidence


def test_schema_fires_on_a_write_between_the_rows_of_a_slice():
    finding = look(writes_the_gaps, "schema")
    assert finding.verdict == "fail"
    assert "outside of the view" in finding.evidence


def test_schema_compares_an_adopted_ops_schema_with_the_declaration():
    register("audit_memory::foreign_inc", "(Tensor x) -> ()", lambda x: x.add_(1) and None, lambda x: None)

    @sl.adopt("audit_memory::foreign_inc", mutates=("x",))
    def foreign_inc(x: Float[Tensor, "n"]) -> None:
        x += 1

    assert "x is not mutated" in look(foreign_inc, "schema").evidence


def test_schema_is_silent():
    assert look(double, "schema").verdict == "ok"
    assert look(increment, "schema").verdict == "ok"


# fresh

# --8<-- [start:fresh]
_buffer: dict[tuple[int, ...], Tensor] = {}
_by_address: dict[int, Tensor] = {}


@sl.op("audit_memory::cached_buffer")
def cached_buffer(x: Float[Tensor, "n c"]) -> Float[Tensor, "n c"]:
    return x * 2


@cached_buffer.kernel("cpu")
def _(x):
    out = _buffer.setdefault(tuple(x.shape), torch.empty(x.shape, dtype=x.dtype))
    return torch.mul(x, 2, out=out)


# --8<-- [end:fresh]


@sl.op("audit_memory::cached_by_address")
def cached_by_address(x: Float[Tensor, "n c"]) -> Float[Tensor, "n c"]:
    return x * 2


@cached_by_address.kernel("cpu")
def _(x):
    return _by_address.setdefault(id(x.untyped_storage()) ^ x.data_ptr(), x * 2).clone()


def test_fresh_fires_on_a_cached_buffer():
    finding = look(cached_buffer, "fresh")
    assert finding.verdict == "fail"
    assert "shares memory with the next call's output" in finding.evidence


def test_fresh_fires_on_an_output_that_is_its_input():
    register("audit_memory::identity", "(Tensor x) -> Tensor", lambda x: x, lambda x: torch.empty_like(x))

    @sl.adopt("audit_memory::identity")
    def identity(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
        return x.clone()

    assert "shares memory with input 0" in look(identity, "fresh").evidence


def test_fresh_is_silent():
    assert look(double, "fresh").verdict == "ok"
    assert look(increment, "fresh").verdict == "ok"


# workspace


@sl.op("audit_memory::dirty_workspace")
def dirty_workspace(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
    return x * 2


@dirty_workspace.kernel("cpu", workspace="8")
def _(x, *, out, workspace):
    torch.mul(x, 2, out=out)
    if workspace[0] == 0x7F:
        out.add_(1)


# --8<-- [start:workspace]
@sl.op("audit_memory::half_written")
def half_written(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
    return x * 2


@half_written.kernel("cpu")
def _(x, *, out):
    torch.mul(x[:-1], 2, out=out[:-1])


# --8<-- [end:workspace]


@sl.op("audit_memory::clean_workspace")
def clean_workspace(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
    return x * 2


@clean_workspace.kernel("cpu", workspace="n * itemsize")
def _(x, *, out, workspace):
    scratch = workspace.view(x.dtype).copy_(x)
    torch.mul(scratch, 2, out=out)


def test_workspace_fires_on_scratch_that_is_read_first():
    finding = look(dirty_workspace, "workspace")
    assert finding.verdict == "fail"
    assert "0x7F" in finding.evidence


def test_workspace_fires_on_an_output_that_is_not_written():
    finding = look(half_written, "workspace")
    assert finding.verdict == "fail"


@sl.op("audit_memory::other_algorithm")
def other_algorithm(x: Float[Tensor, "n c"]) -> Float[Tensor, "n"]:
    return x.sum(1)


@other_algorithm.kernel("cpu")
def _(x, *, out):
    """Adds the columns in another order where torch is to be deterministic, as sums by index do on a GPU."""
    columns = x.flip(1) if torch.are_deterministic_algorithms_enabled() else x
    out.zero_()
    for column in columns.unbind(1):
        out += column


def test_workspace_is_silent_where_torch_has_another_algorithm_for_deterministic_calls():
    assert look(other_algorithm, "workspace").verdict == "ok"


def test_workspace_is_silent():
    finding = look(clean_workspace, "workspace")
    assert finding.verdict == "ok"
    assert "declares a workspace" not in finding.evidence
    assert "no kernel declares a workspace" in look(double, "workspace").evidence


# determinism

# --8<-- [start:determinism]
_calls = [0]


@sl.op("audit_memory::counts_calls")
def counts_calls(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
    return x.clone()


@counts_calls.kernel("cpu")
def _(x):
    _calls[0] += 1
    return x + _calls[0] * 1e-6


# --8<-- [end:determinism]


@sl.op("audit_memory::draws")
def draws(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
    return x + torch.rand_like(x)


_last: list[Tensor] = []


@sl.op("audit_memory::remembers")
def remembers(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
    return x.clone()


@remembers.kernel("cpu")
def _(x):
    same = bool(_last) and _last[0].shape == x.shape and torch.equal(_last[0], x)
    _last[:] = [x.clone()]
    return x.clone() if same or len(_last) == 0 else x + 1


def test_determinism_fires():
    assert "the same call again" in look(counts_calls, "determinism").evidence
    assert look(draws, "determinism").verdict == "fail"
    assert look(remembers, "determinism").verdict == "fail"


def test_determinism_is_silent():
    assert look(double, "determinism").verdict == "ok"


# threads

_owner = threading.get_ident()


@sl.op("audit_memory::main_thread_only")
def main_thread_only(x: Float[Tensor, "n c"]) -> Float[Tensor, "n c"]:
    return x * 2


@main_thread_only.kernel("cpu")
def _(x):
    return x * 2 if threading.get_ident() == _owner else x * 0


# --8<-- [start:threads]
_scratch = torch.zeros(64, 64)


@sl.op("audit_memory::global_scratch")
def global_scratch(x: Float[Tensor, "n c"]) -> Float[Tensor, "n c"]:
    return x * 2


@global_scratch.kernel("cpu")
def _(x):
    room = _scratch[: x.shape[0], : x.shape[1]]
    room.copy_(x)
    time.sleep(0.002)  # where a longer kernel would be preempted
    return room * 2


# --8<-- [end:threads]


def test_threads_fires():
    assert "on another thread" in look(main_thread_only, "threads").evidence
    assert "concurrent callers" in look(global_scratch, "threads").evidence


def test_threads_is_silent_and_restores_the_thread_count():
    before = torch.get_num_threads()
    assert look(double, "threads").verdict == "ok"
    assert torch.get_num_threads() == before
