"""What the tests need of torch beyond its public names: all of it is here (tools/check_private_torch.py sees to that).

``shiplap.compat`` is no place for it: things are put in the place of Inductor's own, in processes that have imported
nothing of shiplap. For the same reason this file imports only what comes with Python, and can be run by its path.
"""

from __future__ import annotations

import contextlib
import os
import shlex
from importlib import import_module
from pathlib import Path
from typing import Any

__all__ = [
    "VECTORS",
    "compile_headers_singly",
    "counters",
    "header_call",
    "import_compiler",
    "process_group",
    "try_instructions",
]

VECTORS = "TORCHINDUCTOR_VEC_ISA_OK"  # of torch: whether the best instructions of the CPU work


def import_compiler() -> None:
    """Import what a process imports before it compiles its first graph."""
    import_module("torch._inductor.compile_fx")


def counters() -> Any:
    """What was compiled in this process, counted by torch."""
    return import_module("torch._dynamo.utils").counters


def process_group(name: str) -> Any:
    """The group of ranks that torch knows by this name."""
    return import_module("torch.distributed.distributed_c10d")._resolve_process_group(name)


def compile_headers_singly() -> None:
    """Have each kernel of a package read its headers: for one model they would be precompiled longer than that."""
    import_module("torch._inductor.config").aot_inductor.precompile_headers = False


def header_call(header: str) -> list[str]:
    """How Inductor calls the compiler to precompile ``header`` of torch for its kernels, without ``-o``."""
    builder, isa = import_module("torch._inductor.cpp_builder"), import_module("torch._inductor.cpu_vec_isa")
    path = Path(str(import_module("torch").__file__)).parent / "include" / header
    options = builder.CppTorchDeviceOptions(vec_isa=isa.pick_vec_isa(), device_type="cpu", precompiling=True)
    call = shlex.split(builder.CppBuilder(name="header", sources=str(path), BuildOption=options).get_command_line())
    place = call.index("-o")
    return call[:place] + call[place + 2 :]


def try_instructions() -> None:
    """Have Inductor use the best vector instructions of the CPU without a try, where they compile, load and run.

    Inductor tries it in each process, and without a cache from the past that is 3 s. Of the sets of a CPU the best is
    tried, as Inductor itself takes no other. Where it works, this process and those forked from it do not try again.
    They find nothing else of it: the try is a process of its own, since Inductor remembers which compiler it found.
    """
    pid = os.fork()
    if not pid:
        os._exit(0 if _best_instructions_work() else 1)
    if os.waitpid(pid, 0)[1] == 0:
        os.environ.setdefault(VECTORS, "1")
        # What is assigned counts for one thread; this is what the variable does in a process that starts with it.
        import_module("torch._inductor.config")._config["cpp.vec_isa_ok"].env_value_default = True


def _best_instructions_work() -> bool:
    """Whether they do; on x86 no others are tried after these."""
    with contextlib.suppress(Exception):
        isa = import_module("torch._inductor.cpu_vec_isa")
        flags = isa.x86_isa_checker()
        listed = [each for each in isa.supported_vec_isa_list if all(flag in flags for flag in str(each).split())]
        return bool(listed and listed[0]) or bool(next(iter(isa.valid_vec_isa_list()), None))
    return False
