"""What a call asks of the CUDA runtime, read from traces as torch's profiler writes them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from shiplap.audit.capture import CopyNode, GraphRecording
from shiplap.audit.checks import cuda_graph, cudagraph_trees
from shiplap_testing.zoo import good
from tests.audit.common import look
from tests.audit.test_memory import double


def event(name, ts, cat="cuda_runtime", correlation=0, dur=1, **args):
    return {"ph": "X", "name": name, "ts": ts, "dur": dur, "cat": cat, "args": {"correlation": correlation, **args}}


MARK = event(cuda_graph.PROFILER_MARK, 100, "user_annotation", dur=100)


def test_calls_within_the_mark_are_counted_by_kind():
    counts = cuda_graph.parse_chrome_trace(
        {
            "traceEvents": [
                event("cudaMalloc", 50),
                MARK,
                event("cudaLaunchKernel", 110, correlation=1),
                event("cuLaunchKernelEx", 111, "cuda_driver", 2),
                event("cudaMalloc", 112),
                event("cudaMallocAsync", 113),
                event("cudaFree", 114),
                event("cudaStreamSynchronize", 115),
                event("cudaMemcpy", 116),
                event("cudaMemcpyAsync", 117),
                event("cudaLaunchHostFunc", 118),
                event("cuModuleLoadData", 119, "cuda_driver"),
                event("cudaLibraryLoadData", 120),
                event("cudaDeviceSynchronize", 250),
                event("twice", 130, "kernel", 1, stream=7),
                event("other", 131, "kernel", 2, stream=13),
                event("earlier", 90, "kernel", 99, stream=20),
                {"ph": "M", "name": "process_name"},
            ]
        }
    )
    assert counts.calls == {
        "launch": 2,
        "raw allocation": 2,
        "raw release": 1,
        "synchronisation": 2,
        "host callback": 1,
        "module load": 2,
    }
    assert counts.streams == {7, 13}
    assert str(counts) == (
        "2 launches on 2 streams, 2 raw allocations, 2 synchronisations, 1 host callbacks, 2 module loads"
    )


def test_nothing_seen_is_not_nothing_done():
    assert str(cuda_graph.parse_chrome_trace({})) == "not counted (the profiler lost its mark)"
    assert "saw no call of the CUDA runtime" in str(
        cuda_graph.parse_chrome_trace({"traceEvents": [MARK, event("cudaMalloc", 50)]})
    )


def test_without_cupti_the_reason_is_said(monkeypatch):
    monkeypatch.setattr(torch.profiler, "supported_activities", lambda: {torch.profiler.ProfilerActivity.CPU})
    assert (
        str(cuda_graph.count_cuda_calls(lambda: pytest.fail("no need to run it")))
        == "not counted (this torch has no CUPTI)"
    )


def recording(arg, out, *copies):
    return GraphRecording(SimpleNamespace(), SimpleNamespace(), (arg,), (out,), {}, copies, 0)


def test_a_copy_into_a_buffer_that_the_op_keeps_is_named():
    x, out, buffer = torch.ones(5), torch.ones(5), torch.ones(5)
    start, size = x.data_ptr(), x.nbytes
    problem = cudagraph_trees.find_staged_input(double, recording(x, out, CopyNode(start, buffer.data_ptr(), size)), [])
    assert problem == "every replay copies 20 bytes of x into a buffer that the op keeps"
    for copy in (CopyNode(start, out.data_ptr(), size), CopyNode(buffer.data_ptr(), out.data_ptr(), size)):
        assert cudagraph_trees.find_staged_input(double, recording(x, out, copy), []) == ""
    inside = CopyNode(start, buffer.data_ptr(), size)
    pool = [(buffer.data_ptr(), buffer.data_ptr() + size)]
    assert cudagraph_trees.find_staged_input(double, recording(x, out, inside), pool) == ""  # a temporary of the call


def test_cudagraph_trees_is_skipped_elsewhere_and_says_so():
    finding = look(double, "cudagraph_trees")
    assert (finding.verdict, "device='cuda'" in finding.evidence) == ("skip", True)


def test_a_module_holds_every_tensor_but_one():
    """The harness itself, without graphs: what a model would own is a buffer, the rest is an input."""
    from shiplap.sampling.run import reference_effects
    from shiplap.sampling.samples import Samples

    case = Samples(good.affine, 1).build(Samples(good.affine, 1).base)
    holder = cudagraph_trees._ArgumentHolder(good.affine, case)
    assert [name for name, _ in holder.named_buffers()] == ["held1", "held2"]
    with torch.no_grad():
        torch.testing.assert_close(holder(case.args[0]), reference_effects(good.affine, case.args))
