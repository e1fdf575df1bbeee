"""Dynamo and the caches of compiled code: constants of a graph, checkpoints, reuse of caches, packages, CUDA graphs.

The compiler is imported when a function needs it.
"""

from __future__ import annotations

import os
import platform
import sys
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.fx import Node

from shiplap.torch_private import same_storage, triton_internals
from shiplap.torch_private.symbolic_sizes import computed_sizes_unguarded

VECTOR_MODULE = "torch._inductor.cpu_vec_isa"  # finds out which vector instructions Inductor can use
_CACHE_FOLDER = "TORCHINDUCTOR_CACHE_DIR"
Function = TypeVar("Function", bound=Callable[..., object])


def constant_result(function: Function) -> Function:
    """Mark ``function`` as one whose result a graph takes as a constant, and return it.

    This is what ``torch.compiler.assume_constant_result`` does (torch 2.11 to 2.15). That function also imports all of
    Dynamo, which takes as long as the import of torch.
    """
    vars(function)["_dynamo_marked_constant"] = True
    return function


def is_folded(node: Node) -> bool:
    """Return whether Inductor computes the value of ``node`` while it compiles, because it depends on frozen parameters
    alone.

    This is for graphs before autograd, while they are compiled. Freezing must be switched on in Inductor's
    configuration before Dynamo traces the model. With ``options={"freezing": True}`` it is switched on too late, and
    parameters stay inputs of the graph.
    """
    from torch._inductor import config

    # Inductor freezes parameters only for inference.
    if not config.freezing or torch.is_grad_enabled():
        return False
    return node.op == "get_attr" or (node.op.startswith("call") and all(map(is_folded, node.all_input_nodes)))


def buffer_with_values(node: Node) -> Tensor | None:
    """Return the tensor of a module's buffer that is the input ``node`` of a graph that Dynamo compiles right now.
    Return None for any other node. Code that is compiled for the values of the tensor needs the guard of
    ``guard_values``.

    The result is None, too, if the frame has been compiled before. A buffer whose values change between calls thus
    causes one more compilation, and no further ones.
    """
    given = node.meta.get("grapharg") if node.op == "placeholder" else None
    if given is None:
        return None
    from torch._dynamo import config
    from torch._guards import CompileContext, TracingContext
    from torch._inductor import config as inductor

    at = CompileContext.current_compile_id()
    first = at is not None and at.frame_compile_id == 0 and TracingContext.try_get() is not None
    # Guards on values are not saved: not with compiled code, not beside a graph in a cache, and not by an export.
    late = getattr(inductor, "pre_grad_pass_timing", "early") != "early"
    saved = late or config.caching_precompile or torch.compiler.is_exporting()
    # The source is the item of a dict, which is the attribute "_buffers" of a module.
    owner = getattr(getattr(node, "_dynamo_source", None), "base", None)
    if not first or saved or getattr(owner, "member", "") != "_buffers":
        return None
    held = given.example
    # Parameters and subclasses are left out.
    if type(held) is not Tensor or held.layout != torch.strided or held.requires_grad or not _counts_writes(held):
        return None
    others = (n.meta["grapharg"].example for n in node.graph.nodes if "grapharg" in n.meta and n is not node)
    plain = (t for t in others if type(t) is Tensor and t.layout == torch.strided)
    # The graph may write to the buffer through another input.
    return None if any(same_storage(held, t) for t in plain) else held


def guard_values(node: Node) -> None:
    """Make Dynamo compile the frame again if the values of the buffer ``node`` have changed since this compilation.
    ``buffer_with_values`` must return a tensor for ``node``.

    A change is seen if a call writes to the buffer, or if another tensor takes its place. Writes that torch does not
    count are not seen, such as those to ``buffer.data`` and those of kernels that take the address.
    """
    from torch._guards import Guard, TracingContext

    held, source = buffer_with_values(node), getattr(node, "_dynamo_source", None)
    assert held is not None
    assert source is not None
    guards: Any = TracingContext.get().guards_context.dynamo_guards
    # One guard is enough for all layers that share a mask.
    if not any(g.inner_create_fn() is _guard_values and g.originating_source == source for g in guards):
        create = partial(_guard_values, weakref.ref(held), held._version, held.data_ptr())
        guards.add(Guard(source, create))


def _counts_writes(tensor: Tensor) -> bool:
    """Return whether torch counts the usual writes to ``tensor``. It counts none to inference tensors, none through
    NumPy, whose memory cannot be resized, and none of collectives. ``DistributedDataParallel`` sends buffers by these.
    """
    grouped = torch.distributed.is_available() and torch.distributed.is_initialized()
    return not (tensor.is_inference() or grouped) and tensor.untyped_storage().resizable()


def _guard_values(kept: Callable[[], Tensor | None], version: int, address: int, builder: Any, guard: Any) -> None:
    """Add guards with Dynamo's ``builder``. They hold while the source of ``guard`` is the tensor ``kept()``, at the
    address ``address``, and torch's counter of writes to the tensor is at ``version``.
    """
    held = kept()
    if held is None or builder.save_guards:
        from torch._dynamo.exc import PackageError

        raise PackageError(f"a guard on the values of {guard.name} cannot be saved")

    def unchanged(_: object) -> bool:
        """Return whether the tensor is alive, nothing was written to it, and torch still counts writes to it."""
        now = kept()
        if now is None or now._version != version or now.data_ptr() != address:
            return False
        return _counts_writes(now)

    text = [f"{guard.name} has the values that it had when this was compiled"]
    builder.get_guard_manager(guard).add_id_match_guard(id(held), text, guard.user_stack)
    # At the root, since Dynamo skips guards of tensors while the dicts that hold these are unchanged.
    builder.guard_manager.root.add_lambda_guard(unchanged, text, guard.user_stack)


_KEEPS_OBJECTS = (2, 13)  # since then Dynamo makes outputs of the tensors in an object that a checkpoint returns


@constant_result
def checkpoints_keep_objects() -> bool:
    """Return whether a function in ``torch.utils.checkpoint`` may return its own objects that hold tensors, in a
    compiled graph.

    The result is a constant of the graph. Before torch 2.13 this needs
    ``torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint``, and without it the graph does not run.
    """
    import torch._dynamo

    major, minor = torch.__version__.split(".")[:2]
    allowed = getattr(torch._dynamo.config, "skip_fwd_side_effects_in_bwd_under_checkpoint", False)
    return bool(allowed) or (int(major), int(minor)) >= _KEEPS_OBJECTS


def cudagraph_skips() -> int:
    """Return how many times Inductor has run a region without the requested CUDA graph since ``reset_compiler``."""
    from torch._dynamo.utils import counters

    return int(counters["inductor"].get("cudagraph_skips", 0))


def cudagraph_inputs() -> int:
    """Return the number of inputs that Inductor's CUDA graphs copy before each replay, as recorded since
    ``reset_compiler``. It is 0 if no graph was recorded.

    The number is only meaningful for a function with at least one input that is neither a parameter nor a buffer.
    """
    from torch._dynamo.utils import counters

    return int(counters["inductor"].get("cudagraph_recorded_non_static_inputs", 0))


_CHECK = "torch._check"
_CACHES_CHECKS = (2, 13)  # since then a graph that asserts something with torch._check is cached as it is


def prepare_cache_keys() -> None:
    """Make this process compute the same keys for cached graphs and kernels as other processes do. Call this function
    before compile caches are read.

    Triton's key contains the version of the assembler. Inductor selects torch's own assembler only when it compiles a
    kernel in this process instead of a worker process. This depends on the contents of the caches, so the key would,
    too. The assembler is therefore always selected here.
    """
    from torch._inductor import config

    _name_unsafe_folder()
    triton_internals.use_torch_assembler()
    marked = config.unsafe_marked_cacheable_functions
    major, minor = torch.__version__.split(".")[:2]
    # Torch leaves out of its cache each graph with a function that it does not know to be safe.
    if _CHECK not in marked and (int(major), int(minor)) < _CACHES_CHECKS:
        config.unsafe_marked_cacheable_functions = {**marked, _CHECK: torch.__version__}


def _name_unsafe_folder() -> None:
    """Issue a notice if another user could have written Inductor's cache folder. The folder holds pickles and compiled
    code.
    """
    from torch._inductor.runtime import cache_dir_utils

    from shiplap import safe_io
    from shiplap.errors import notice

    folder = os.environ.get(_CACHE_FOLDER) or cache_dir_utils.default_cache_dir()
    try:
        os.close(safe_io.open_folder(folder, safe_io.OwnershipRule(group=True)))
    except safe_io.Distrusted as e:
        found = f"torch.compile loads code from {folder}, which another user could have written"
        fix = "Set TORCHINDUCTOR_CACHE_DIR to a folder that only you can write"
        notice(f"inductor cache {folder}", f"{found}: {safe_io.unsafe_reason(e)}. {fix}")
    except OSError:  # not there yet, or torch says what is wrong with it
        return


def keep_calls_apart(overload: Any) -> None:
    """Make the partitioner of training graphs keep two equal calls of the random op ``overload`` as two calls.

    Up to torch 2.13 at least, the partitioner merges equal calls of an operator unless the operator is in its list of
    random ones. Tags of the operator are not considered. This function adds the op to the list.
    """
    from torch._functorch import compile_utils

    known, packet = getattr(compile_utils, "rand_ops", []), overload.overloadpacket
    known += [packet] if packet not in known else []


def is_packaging() -> bool:
    """Return whether an AOTInductor package is being compiled right now. Nothing is imported."""
    inductor = sys.modules.get("torch._inductor.virtualized")
    return inductor is not None and bool(inductor.V.aot_compilation)


def compile_package(program: torch.export.ExportedProgram, path: Path, options: Mapping[str, object]) -> None:
    """Compile an exported program into an AOTInductor package at ``path``, with these options of Inductor. Computed
    sizes may be 1.
    """
    import torch._inductor as inductor

    with computed_sizes_unguarded():
        inductor.aoti_compile_and_package(program, package_path=str(path), inductor_configs=dict(options))


def processor_features() -> tuple[str, ...]:
    """Return the vector features of the processor for which Inductor compiles on this machine. They are named as
    options of C compilers, such as ``avx2`` and ``fma``. Return an empty tuple for a processor without AVX2.
    """
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    names = str(pick_vec_isa()).lower()
    if "avx512" in names:
        return "avx2", "fma", "avx512f", "avx512dq", "avx512vl", "avx512bw"
    return ("avx2", "fma") if "avx2" in names else ()


def use_temporary_folder() -> None:
    """Make Inductor, if it is imported, put precompiled headers into the temporary folder that this process has now.
    Inductor chooses a folder when it is imported, which the parent of a forked process may have done.
    """
    inductor: Any = sys.modules.get("torch._inductor.codecache")
    if hasattr(inductor, "_HEADER_DIR"):
        inductor._HEADER_DIR = os.path.join(inductor.default_cache_dir(), "precompiled_headers")
        inductor._HEADER_LOCK_DIR = os.path.join(inductor._HEADER_DIR, "locks")


def prepare_inductor(folder: str) -> None:
    """Let Inductor find out which vector instructions it can use on this CPU, and compile the header of its kernels,
    for this process and those that it forks. Forked processes have to be able to read ``folder``, in which the compiled
    header lies.

    Each process would otherwise take some 20 s of processor time for that when it first compiles for the CPU (torch
    2.13, two cores at 2.5 GHz, 2026-11-30).
    """
    threads = torch.get_num_threads()
    with triton_internals.files_in(folder, _CACHE_FOLDER):
        use_temporary_folder()
        torch.set_num_threads(1)  # a pool of threads would not survive a fork
        try:
            try_best_instructions()
            torch.compile(lambda x: x + 1)(torch.zeros(1))
        finally:
            torch.set_num_threads(threads)


def try_best_instructions() -> bool:
    """Try once whether the best vector instructions of this CPU compile and run, and return whether they do. If they
    do, Inductor compiles for them in this process and tries no others.

    Without this call, the first graph of a process with an empty cache waits while Inductor tries each set of
    instructions of the CPU, although it takes only the best. Where the environment or Inductor's configuration names a
    set, or on other machines than x86-64 Linux, nothing is tried and the result is False.
    """
    from torch._inductor import config, cpu_vec_isa

    here = sys.platform == "linux" and platform.machine() == "x86_64"
    if not here or config.cpp.simdlen is not None or "ATEN_CPU_CAPABILITY" in os.environ:
        return False
    features, known = cpu_vec_isa.x86_isa_checker(), cpu_vec_isa.supported_vec_isa_list
    sets = [each for each in known if all(name in features for name in str(each).split())]
    # Inductor keeps the list of the sets that it has tried, and takes the first. Each try imports torch in a process of
    # its own, some of them several times (torch 2.11).
    cpu_vec_isa.supported_vec_isa_list = sets[:1]
    try:
        works = bool(cpu_vec_isa.valid_vec_isa_list())
    finally:
        cpu_vec_isa.supported_vec_isa_list = known
    if not works:
        cpu_vec_isa.valid_vec_isa_list.cache_clear()
    return works
