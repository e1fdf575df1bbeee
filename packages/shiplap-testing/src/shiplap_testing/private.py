"""What the tests need of torch beyond its public names: all of it is here (tools/check_private_torch.py sees to that).

``shiplap.torch_private`` is no place for it: things are put in the place of Inductor's own, in processes that have
imported nothing of shiplap. For the same reason this file imports only what comes with Python, and can be run by its
path.
"""

from __future__ import annotations

import contextlib
import os
import shlex
from functools import cache
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from typing import Any

VECTORS = "TORCHINDUCTOR_VEC_ISA_OK"  # of torch: whether the best instructions of the CPU work


# What Inductor imports and looks up for the first graph of a process, whatever the graph: digests of the files of torch
# and Triton, the patterns that are replaced. The code generators of devices are not among them: a device that is loaded
# later would have none.
FIRST = (
    ("torch._inductor.codecache", "torch_key"),
    ("torch._inductor.codecache", "CacheBase.get_system"),
    ("torch._inductor.fx_passes.pre_grad", "lazy_init"),
    ("torch._inductor.fx_passes.joint_graph", "lazy_init", "cpu"),
    ("torch._inductor.fx_passes.post_grad", "lazy_init"),
    ("torch._export.utils", "_collect_all_valid_cia_ops_for_aten_namespace"),  # for the first export: 1 s
)
THEN = (
    "torch._dynamo.backends.inductor",
    "torch._functorch._aot_autograd.subclass_codegen",
    "torch._inductor.codegen.memory_planning",
    "torch._inductor.codegen.segmented_tree",
    "torch._subclasses.schema_check_mode",
    "torch.export._trace",
    "torch.utils.cpp_extension",
    "sympy.tensor.tensor",
    # what programs of tests import with shiplap, or with its command line
    "jaxtyping",
    "jinja2",
    "msgspec",
    "platformdirs",
    "typer",
)


def import_compiler() -> None:
    """Import what torch's compiler needs for its first graph on the CPU. Processes forked from this one need not import
    it again.

    This saves each of them 1.1 s of 1.5 s (measured on two shared cores on 2026-11-27).
    """
    import_module("torch._inductor.compile_fx")
    guards = import_module("torch._dynamo.guards")
    # For a log, Dynamo measures how quick the guards of each graph are. It writes 32 MB before that, 0.02 s which empty
    # the caches of other workers too.
    if hasattr(guards, "profile_guard_manager"):
        guards.profile_guard_manager = lambda root, scope, rounds: 0.0
    # While patterns are traced, a progress bar that nobody sees must start no thread, since this process is forked.
    bar = import_module("torch.hub").tqdm
    interval, bar.monitor_interval = getattr(bar, "monitor_interval", 0), 0
    for module, name, *arguments in FIRST:
        with contextlib.suppress(ImportError, AttributeError):  # another release: each process looks it up itself
            attrgetter(name)(import_module(module))(*map(import_module("torch").device, arguments))
    bar.monitor_interval = interval
    for module in THEN:
        with contextlib.suppress(ImportError):
            import_module(module)
    _remember_composite_operators()


def _remember_composite_operators() -> None:
    """Let torch look up the operators with composite implementations once for each export, and only if there are new
    ones. Otherwise torch would look all of them up for each namespace of operators, of which tests declare many.
    """
    utils, registered = import_module("torch._export.utils"), import_module("torch")._C
    users = [utils, *map(import_module, ("torch.export.exported_program", "torch.export.decomp_utils"))]
    if not all(hasattr(module, "_collect_all_valid_cia_ops") for module in users):
        return  # another release
    look_up, collect = utils._materialize_cpp_cia_ops, utils._collect_all_valid_cia_ops
    known, within = set[str](), list[bool]()

    def look_up_new() -> None:
        """Look up all composite operators if there is one that is not in ``known``. Do nothing while ``collect_once``
        runs, which has looked them up already. Both names are variables of ``_remember_composite_operators``.
        """
        if within:
            return
        now = registered._dispatch_get_registrations_for_dispatch_key("CompositeImplicitAutograd")
        if not known.issuperset(now):
            look_up()
            known.update(now)

    def collect_once() -> Any:
        """Return what ``collect`` (variable of ``_remember_composite_operators``) returns, after one look-up of new
        operators.
        """
        look_up_new()
        within.append(True)
        try:
            return collect()
        finally:
            within.pop()

    utils._materialize_cpp_cia_ops = look_up_new
    for module in users:
        module._collect_all_valid_cia_ops = collect_once


def remember_onnx_operators() -> None:
    """Let torch list the operators of onnxscript only once in this process, and not for each export to ONNX."""
    with contextlib.suppress(ImportError, AttributeError):
        apis = import_module("torch.onnx._internal.exporter._registration").onnxscript_apis
        apis.get_torchlib_ops = cache(apis.get_torchlib_ops)


def counters() -> Any:
    """Return the counters of compilations that torch keeps in this process, a mapping from subsystem and name to a
    count.
    """
    return import_module("torch._dynamo.utils").counters


def process_group(name: str) -> Any:
    """Return the process group of ``torch.distributed`` that has the name ``name``."""
    return import_module("torch.distributed.distributed_c10d")._resolve_process_group(name)


def compile_headers_singly() -> None:
    """Make Inductor compile the headers of a packaged model together with each of its kernels. To precompile them would
    take longer for a single model.
    """
    _set_for_all_threads("aot_inductor.precompile_headers", False)


def _set_for_all_threads(name: str, value: bool) -> None:
    """Set the boolean option ``name`` of Inductor's configuration to ``value`` for all threads of this process.

    An assignment to the option would count for one thread only, and a graph would have another cache key in each of the
    other threads.
    """
    import_module("torch._inductor.config")._config[name].env_value_default = value


def header_call(header: str) -> list[str]:
    """Return the command by which Inductor precompiles ``header``, a path below torch's ``include``, for its kernels.
    It is a list of words without the option ``-o`` and its value.
    """
    builder, isa = import_module("torch._inductor.cpp_builder"), import_module("torch._inductor.cpu_vec_isa")
    path = Path(str(import_module("torch").__file__)).parent / "include" / header
    options = builder.CppTorchDeviceOptions(vec_isa=isa.pick_vec_isa(), device_type="cpu", precompiling=True)
    call = shlex.split(builder.CppBuilder(name="header", sources=str(path), BuildOption=options).get_command_line())
    place = call.index("-o")
    return call[:place] + call[place + 2 :]


def try_instructions() -> None:
    """Try once, in a forked process, whether the best vector instructions of the CPU compile and run.

    If they do, Inductor uses them in this process and in those forked from it, and skips its own try of 3 s.
    """
    # A process of its own, since Inductor remembers which compiler the try found. Of the sets of a CPU only the best is
    # tried, as Inductor itself takes no other.
    pid = os.fork()
    if not pid:
        os._exit(0 if _best_instructions_work() else 1)
    if os.waitpid(pid, 0)[1] == 0:
        os.environ.setdefault(VECTORS, "1")
        _set_for_all_threads("cpp.vec_isa_ok", True)


def _best_instructions_work() -> bool:
    """Return whether a kernel with the best vector instructions of this CPU compiles, loads and runs. If the try raises
    an exception, return False.
    """
    with contextlib.suppress(Exception):
        isa = import_module("torch._inductor.cpu_vec_isa")
        flags = isa.x86_isa_checker()
        listed = [each for each in isa.supported_vec_isa_list if all(flag in flags for flag in str(each).split())]
        return bool(listed and listed[0]) or bool(next(iter(isa.valid_vec_isa_list()), None))
    return False


def compiled_autograd(backend: str) -> Any:
    """Return a context manager in which each backward pass is compiled by ``backend``, as one graph without graph
    breaks.
    """
    import torch

    return import_module("torch._dynamo.compiled_autograd")._enable(torch.compile(backend=backend, fullgraph=True))


def fake_mode() -> Any:
    """Return a new ``FakeTensorMode``, in which tensors have sizes but no memory. Sizes that depend on data are symbols
    in it.
    """
    shapes = import_module("torch.fx.experimental.symbolic_shapes").ShapeEnv()
    return import_module("torch._subclasses.fake_tensor").FakeTensorMode(shape_env=shapes)
