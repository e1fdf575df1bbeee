"""``c_abi``: a C ABI kernel returns a status for wrong values. No exception leaves it, it does not crash, and it leaks
nothing.

An exception that leaves an ``extern "C"`` function ends the process, so the calls are made in a process of their own
(see ``c_child_process``), on the C function itself. The dispatcher or a native binding would hide faults by catching
them.

The values are NaN and infinity in floating-point tensors and scalars, -1 in scalars, the borders of 32 and 64 bits in
int arguments and integer tensors, and an empty and a long text. Values that the declaration refuses are left out, such
as those that ``requires=`` excludes, because no call of the op passes them.
"""

from __future__ import annotations

import base64
import json
import math
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shiplap.audit import c_child_process
from shiplap.audit.check import Check, Observation
from shiplap.declare.binding import Binding, declared_output_shape
from shiplap.dispatch import Op
from shiplap.dispatch.launch import allocate_workspace
from shiplap.dtypes import of
from shiplap.errors import LibraryError
from shiplap.kernels.c.declaration import CKernel
from shiplap.kernels.c.library import locate_library
from shiplap.sampling.case import SampleCase, arguments_by_name
from shiplap.sampling.samples import Samples

# The time for which one call is repeated, the limit of a process, and the deaths after which no process is started.
SECONDS, TIMEOUT_S, DEATHS = 0.01, 30, 8
LARGEST_TENSOR_BYTES = 1 << 22  # bytes of one tensor
HEAP, RESIDENT, FILES = 8, 512, 0.5  # per call: less is the noise of two rounds
# The messages with which libstdc++ and libc++ end a process.
THROWN_TYPE = re.compile(r"(?:instance of '([^']+)'|uncaught exception of type (\S+))")
# The text of the exception, which libstdc++ prints on a line of its own.
WHAT_TEXT = re.compile(r"what\(\):\s*(.*)")

CATCH_FIX = 'catch everything inside the extern "C" function, write what() to ctx->error and return SL_INVALID_ARGUMENT'
CHECK_VALUES_FIX = "check values before they are used as addresses, and return SL_INVALID_ARGUMENT"
RELEASE_FIX = "release on every path: RAII (std::vector, std::unique_ptr), or take scratch memory from ctx->workspace"


@dataclass(frozen=True)
class CCallAttempt:
    """A call of a C function to make in a child process. ``what`` describes its arguments in reports, and ``spec``
    describes them for the process.

    If ``lax`` is true, the declaration's checks would have refused the arguments, so a crash proves nothing.
    """

    what: str
    spec: dict[str, Any]
    lax: bool = False


@dataclass(frozen=True)
class ProcessDeath:
    """The end of a child process during a call of the C function. ``call`` is the index of the call, ``status`` the
    exit status of the process, and ``stderr`` what it wrote to stderr.
    """

    call: int
    status: int
    stderr: str

    def __str__(self) -> str:
        """Return a message that says how the process ended. It names the exception that left the C function, or else
        the signal or the exit status.
        """
        name = signal.Signals(-self.status).name if self.status < 0 else f"status {self.status}"
        if thrown := THROWN_TYPE.search(self.stderr):
            what = WHAT_TEXT.search(self.stderr)
            return f"{thrown[1] or thrown[2]} leaves the C function ({what[1] if what else name})"
        return f"the process dies of {name}"

    @property
    def thrown(self) -> bool:
        """Whether the process ended because a C++ exception left the C function."""
        return bool(THROWN_TYPE.search(self.stderr))


def _c_kernels_for_cpu(op: Op) -> list[CKernel]:
    """Return the C ABI kernels of the op for the CPU."""
    return [k for k in op.kernels.get("cpu", ()) if isinstance(k, CKernel)]


def why_skip_c_abi(op: Op) -> str:
    """Return why the check ``c_abi`` does not apply to the op, or an empty string if it does. It does not apply if the
    op has no C ABI kernel for the CPU.
    """
    return "" if _c_kernels_for_cpu(op) else "no C ABI kernel for the CPU"


def observe_c_abi(op: Op, case: SampleCase) -> Observation:
    """Call each C function of the op with wrong values in a child process. The returned observation has a problem if a
    function throws an exception, crashes or leaks.
    """
    if case.device != "cpu":
        return Observation(skip="C functions are called on the CPU: audit with device='cpu'")
    notes = []
    for kernel in _c_kernels_for_cpu(op):
        try:
            library = locate_library(kernel.native.library)
        # The library of another device's kernels is usually not on this machine.
        except LibraryError as e:
            return Observation(skip=f"{kernel.native.library.name}: {e.what}")
        observation = _observe_kernel(kernel, library, list(_make_attempts(op, kernel, case)))
        if observation.problem:
            return observation
        notes.append(observation.note)
    return Observation(note="; ".join(notes))


def _observe_kernel(kernel: CKernel, library: Path, attempts: list[CCallAttempt]) -> Observation:
    """Call the C function of ``kernel`` in ``library`` with all ``attempts``. The returned observation has the problem
    of the first call that throws, crashes or leaks. If there is none, it has a note with a summary.
    """
    results, deaths = _run_attempts(library, kernel.native.symbol, attempts)
    for death in deaths:
        attempt = attempts[death.call]
        # A kernel may rely on what the declaration guarantees, but an exception must never leave C code.
        if death.thrown or not attempt.lax:
            fix = CATCH_FIX if death.thrown or death.status == -signal.SIGABRT else CHECK_VALUES_FIX
            return Observation(f"{kernel.native.symbol} called with {attempt.what}: {death}", fix=fix)
    for index, result in results.items():
        if left := _describe_leak(result):
            outcome = f"returns status {result['status']}" if result["status"] else "succeeds"
            return Observation(
                f"{kernel.native.symbol} called with {attempts[index].what} {outcome} and leaves {left} "
                f"behind per call ({2 * result['calls']} calls)",
                fix=RELEASE_FIX,
            )
    refused = sum(bool(r["status"]) for r in results.values())
    trusted = f", {len(deaths)} that the declaration refuses crash it" if deaths else ""
    return Observation(note=f"{kernel.native.symbol}: {len(results)} kinds of calls, {refused} refused{trusted}")


def _describe_leak(result: dict[str, Any]) -> str:
    """Return a message that says what a call leaves behind, such as ``64 bytes and an open file``, or an empty string
    if nothing is left. ``result`` has the growth of memory and of open files, as ``measure_leaks`` returns it.
    """
    left = [f"{result['heap']:.0f} bytes"] if result["heap"] >= HEAP else []
    if not left and result["resident"] >= RESIDENT:
        left = [f"{result['resident']:.0f} bytes of resident memory"]
    return " and ".join(left + ["an open file"] * (result["files"] >= FILES))


def _run_attempts(
    library: Path, symbol: str, attempts: list[CCallAttempt]
) -> tuple[dict[int, dict[str, Any]], list[ProcessDeath]]:
    """Make the calls ``attempts`` of the C function ``symbol`` in child processes. Return a dict from the index of an
    attempt to its measured results, and a list of the deaths of these processes. After a death, a new process continues
    with the next attempt. After eight deaths, the remaining attempts are not made.
    """
    results: dict[int, dict[str, Any]] = {}
    deaths: list[ProcessDeath] = []
    first = 0
    while first < len(attempts) and len(deaths) < DEATHS:
        calls = [(i, attempts[i].spec) for i in range(first, len(attempts))]
        task = {"library": str(library), "symbol": symbol, "seconds": SECONDS, "calls": calls}
        status, out, err = _run_child_process(json.dumps(task))
        lines = [json.loads(line) for line in out.splitlines() if line.endswith("}")]
        results |= {line["call"]: line for line in lines if "status" in line}
        begun = max((line["call"] for line in lines), default=None)
        # A process that dies before its first call cannot load the library at all.
        if status == 0 or begun is None:
            if status:
                raise RuntimeError(f"{library.name} cannot be called in a process of its own: {err.strip()[-300:]}")
            break
        deaths.append(ProcessDeath(begun, status, err))
        first = begun + 1
    return results, deaths


def _run_child_process(task: str) -> tuple[int, str, str]:
    """Return ``(status, stdout, stderr)`` of one child process that gets the JSON ``task`` on its stdin. A process that
    is killed after the time limit has the negative number of that signal as status.
    """
    command = [sys.executable, "-I", c_child_process.__file__]
    try:
        done = subprocess.run(command, input=task.encode(), capture_output=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as e:
        return -signal.SIGKILL, (e.stdout or b"").decode(), f"no answer within {TIMEOUT_S} s"
    return done.returncode, done.stdout.decode(), done.stderr.decode(errors="replace")


def _make_attempts(op: Op, kernel: CKernel, case: SampleCase) -> Iterator[CCallAttempt]:
    """Yield the calls of the C function to attempt. The first has the arguments of the sample. Calls with wrong values
    follow, then calls with tensors that are described with a wrong rank or dtype.
    """
    plain = _make_attempt(op, kernel, "its plain sample", case.args)
    assert plain is not None
    # The plain sample is first: if it leaks or dies, wrong values are no evidence.
    yield plain
    for what, args in _wrong_values(op, case):
        if (attempt := _make_attempt(op, kernel, what, args)) is not None:
            yield attempt
    yield from _misdescribed_tensors(plain)


def _make_attempt(op: Op, kernel: CKernel, what: str, args: tuple[Any, ...]) -> CCallAttempt | None:
    """Return a call of the C kernel with ``args`` for a child process to make. ``what`` describes the arguments in
    findings.

    Return None if the declaration refuses the arguments, if they cannot be described, or if an output would be too
    large.
    """
    try:
        call = op.bind(args)
        spec = _spec_of_call(op, kernel, call)
    except Exception:
        return None
    return CCallAttempt(what, spec) if spec is not None else None


def _spec_of_call(op: Op, kernel: CKernel, call: Binding) -> dict[str, Any] | None:
    """Return a dict of JSON values that describes the call for ``c_child_process``. It has the size of the workspace
    (scratch memory), the arguments in the order of the C function, and the config (values of tuning parameters). Return
    None if an output would be too large.
    """
    env = {**call.env, **{dim: bound(call.env) for dim, bound in op.spec.bounds}}
    given = arguments_by_name(op, call.args)
    arguments: list[dict[str, Any]] = []
    for p in kernel.parameters:
        if p.role == "output":
            out = next(o for o in op.spec.outputs if o.name == p.source)
            shape, dtype = [int(n) for n in declared_output_shape(out, env)], call.dtype_of(out.tensor)
            # Huge values of size arguments may ask for outputs that do not fit into memory.
            if math.prod(shape) * dtype.itemsize > LARGEST_TENSOR_BYTES:
                return None
            arguments.append(_spec_of_tensor(torch.zeros(shape, dtype=dtype)))
        elif p.role == "input":
            value = given[p.source]
            arguments.append(_spec_of_tensor(value) if isinstance(value, Tensor) else {"kind": "null"})
        else:
            arguments.append(_spec_of_scalar(p.role, p.ctype, env.get(p.source)))
    scratch = allocate_workspace(kernel.workspace, call) if kernel.workspace is not None else None
    config = kernel.space.default(env).items if kernel.space is not None else ()
    size = 0 if scratch is None else scratch.numel()
    return {"workspace": size, "arguments": arguments, "config": [int(v) for _, v in config]}


def _spec_of_tensor(t: Tensor) -> dict[str, Any]:
    """Return a dict of JSON values that describes a tensor for ``c_child_process``. It has the data in base64, the
    shape, the strides and the DLPack dtype.
    """
    t = t.detach().contiguous()
    code, bits, lanes = of(t.dtype, "the audit").dlpack
    data = base64.b64encode(t.reshape(-1).view(torch.uint8).numpy().tobytes()).decode()
    return {
        "kind": "tensor",
        "data": data,
        "shape": list(t.shape),
        "strides": list(t.stride()),
        "ndim": t.dim(),
        "code": code,
        "bits": bits,
        "lanes": lanes,
    }


def _spec_of_scalar(role: str, ctype: str, value: Any) -> dict[str, Any]:
    """Return a dict of JSON values that describes a scalar argument for ``c_child_process``. ``role`` says whether the
    argument is a value, a list, the length of a list, or a pointer to a size. ``ctype`` is its type in C.
    """
    if role == "extent":
        return {"kind": "int64s", "value": [0]}
    if role == "length":
        return {"kind": "int64", "value": len(value)}
    if role == "list":
        return {"kind": "doubles" if "double" in ctype else "int64s", "value": list(value)}
    kinds = {"int64_t": "int64", "double": "double", "int32_t": "int32", "const char*": "string"}
    return {"kind": kinds[ctype], "value": int(value) if isinstance(value, bool) else value}


def _wrong_values(op: Op, case: SampleCase) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Yield ``(description, arguments)`` with values that the types admit but no generated sample has. Examples are
    NaN, huge sizes and long strings.
    """
    for position, arg in enumerate(op.spec.args):
        value = case.args[position]

        def swap(wrong: Any, position: int = position) -> tuple[Any, ...]:
            """Return the sample's arguments as a tuple with ``wrong`` at ``position``."""
            return (*case.args[:position], wrong, *case.args[position + 1 :])

        if isinstance(value, Tensor) and value.numel():
            yield from (
                (f"{arg.name} full of {name}", swap(torch.full_like(value, w))) for name, w in _extreme_values(value)
            )
        elif arg.scalar in ("int", "list[int]"):
            # The borders of 32 and 64 bits, where size arithmetic overflows.
            for wrong in (-1, 0, 1 << 31, (1 << 63) - 1, -(1 << 63)):
                yield f"{arg.name}={wrong}", swap([wrong] * len(value) if isinstance(value, list) else wrong)
        elif arg.scalar == "float":
            yield from ((f"{arg.name}={wrong}", swap(wrong)) for wrong in (float("nan"), float("inf"), -1.0))
        elif arg.scalar == "str":
            yield from ((f"{arg.name} of {len(wrong)} letters", swap(wrong)) for wrong in ("", "x" * 5000))


def _extreme_values(t: Tensor) -> list[tuple[str, Any]]:
    """Return pairs ``(name, value)`` of extreme values of the tensor's dtype. The list is empty for bool and complex
    dtypes.
    """
    if t.is_floating_point():
        widest = float("inf") if t.itemsize > 1 else torch.finfo(t.dtype).max  # not every float8 has infinities
        return [("NaN", float("nan")), (str(widest), widest)]
    if t.dtype == torch.bool or t.is_complex():
        return []
    info = torch.iinfo(t.dtype)
    return [(str(v), v) for v in (-1, 1 << 20, info.max, info.min) if info.min <= v <= info.max]


def _misdescribed_tensors(plain: CCallAttempt) -> Iterator[CCallAttempt]:
    """Yield calls like ``plain`` in which one tensor is described with a wrong rank or dtype. The declaration would
    refuse such a tensor. The kernel may return an error, but must not throw or leak.
    """
    for index, argument in enumerate(plain.spec["arguments"]):
        if argument["kind"] != "tensor":
            continue
        wrong = [("rank", {"ndim": argument["ndim"] + 1}), ("dtype", {"code": 1, "bits": 8})]
        for what, change in wrong:
            arguments = [*plain.spec["arguments"]]
            arguments[index] = {**argument, **change}
            yield CCallAttempt(f"another {what} of tensor {index}", {**plain.spec, "arguments": arguments}, lax=True)


CHECK = Check(
    "c_abi",
    order=260,
    observes="the C function, in a process of its own, answers wrong values with a status, throws nothing and keeps "
    "neither memory nor files",
    observe=observe_c_abi,
    cases=Samples.plain,
    obligations=(),
    fix=CATCH_FIX,
    skips=why_skip_c_abi,
)
