"""Replay of template launches by C++, for calls that differ only in addresses from an earlier call.

Triton launches the first call of each kind, and a recording keeps its functions, grids and arguments. For later calls
one C function allocates scratch memory, reads the current stream and launches. The function is the same for all ops,
and its library is in the cache beside the bindings. Until it is built, Python launches. ``SHIPLAP_REPLAY=0`` disables
replay.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import count
from math import prod
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from shiplap.declare.generated_code import define_function
from shiplap.declare.kernel import Rerun
from shiplap.declare.values import Args, Result
from shiplap.dispatch import Op, registry, tuned_choices
from shiplap.errors import error, notice
from shiplap.kernels.native.build import build_detached
from shiplap.kernels.native.build import build_once as compile_into
from shiplap.kernels.native.build_digest import FLAGS, library_name_digest
from shiplap.kernels.native.build_plan import compile_command, extra_compiler_flags
from shiplap.kernels.native.cache import cache_folder, is_library_present, load_library
from shiplap.kernels.triton.launcher import is_verified
from shiplap.kernels.triton.specialize import why_form_unfit
from shiplap.settings import read_setting, settings

HOT_REPLAYS = 32  # calls that Python launches before a compiled launcher pays
UNBUILT = "its launcher is not built"
REPLAYS_BETWEEN_CHECKS = 64  # calls between two looks whether it has ended
ALIGNMENT = 256  # bytes, of parts of the scratch memory
REPLAY_TENSOR_COUNTS = (4, 8, 16)  # tensors that the C functions take
NUMBER, TENSOR, SCRATCH = range(3)


def _replay_function_source(size: int) -> str:
    """Return the C++ source code of the replay function for ``size`` tensors."""
    names = [f"t{i}" for i in range(size)]
    parameters, given = ", ".join(f"Address {name}" for name in names), ", ".join(names)
    return (
        f'extern "C" SL_EXPORT int shiplap_replay_{size}(void* recording, {parameters}) {{\n'
        f"  return shiplap::replay::replay(recording, {{{given}}});\n}}\n"
    )


REPLAY_SOURCE = """#include "shiplap/replay.h"
using shiplap::replay::Recording;
using Address = const void*;
// What went wrong last on this thread.
extern "C" SL_EXPORT const char* shiplap_message() { return shiplap::replay::message().c_str(); }
extern "C" SL_EXPORT void* shiplap_record(const int64_t* words, uint64_t count) {
  try {
    return new Recording(std::vector<int64_t>(words, words + count));
  } catch (const std::exception& why) {
    shiplap::replay::message() = why.what();
    return nullptr;
  }
}
extern "C" SL_EXPORT void shiplap_forget(void* recording) { delete static_cast<Recording*>(recording); }
""" + "".join(map(_replay_function_source, REPLAY_TENSOR_COUNTS))


class _ReplaySource(Protocol):
    """The interface of the source of a compiled Triton kernel. Only the signature is read."""

    @property
    def signature(self) -> dict[str, str]:
        """The Triton types of the kernel's parameters by name, ``constexpr`` for constants."""


class CompiledTritonKernel(Protocol):
    """The interface of Triton's compiled kernel, of which three attributes are read. ``metadata`` is a named tuple of
    properties.
    """

    metadata: Any

    @property
    def function(self) -> int:
        """The address of the kernel's function on the device."""

    @property
    def src(self) -> _ReplaySource:
        """The source from which Triton compiled the kernel. Only its signature is read."""


@dataclass(frozen=True)
class BroughtTensor:
    """A placeholder among the arguments of a recorded launch. It stands for tensor number ``number`` of the tensors
    that each call passes.

    A recording never compares tensors, since one call may pass a tensor twice and the next call may pass two tensors.
    """

    number: int


@dataclass
class LaunchRecording:
    """The recorded launches of a call.

    Attributes:
        device: the index of its CUDA device.
        tensors: the number of tensor addresses that each further call passes.
        scratch: the bytes of scratch memory that the launches share.
        words: the launches as integers for the C function.
        launches: the number of launches.
        unfit: the reason why C++ cannot repeat them, or an empty string.
        parts: tensors that are scratch memory, with their offsets in it.
        kept: the compiled kernels, which must live as long as the recording.
    """

    device: int
    tensors: int
    scratch: int = 0
    words: list[int] = field(default_factory=list)
    launches: int = 0
    unfit: str = ""
    parts: list[tuple[Tensor, int]] = field(default_factory=list)
    kept: list[CompiledTritonKernel] = field(default_factory=list)

    def share_scratch(self, tensor: Tensor) -> None:
        """Make ``tensor``, intermediate memory of the recorded launches, a part of the scratch memory. That memory is
        allocated anew for each repetition of the recording.
        """
        self.parts.append((tensor, self._take_scratch(tensor.numel() * tensor.itemsize)))

    def close(self) -> None:
        """Release the tensors of the scratch memory, after the last launch was added."""
        self.parts = []

    def add_launch(self, compiled: CompiledTritonKernel, grid: Sequence[int], given: Sequence[object]) -> None:
        """Add a launch of a compiled kernel to the launches that C++ can repeat. ``given`` are its arguments, including
        constants. If C++ cannot repeat it, set ``unfit`` to the reason.
        """
        if self.unfit:
            return
        try:
            self.words += self._launch(compiled, [*grid, 1, 1][:3], given)
            self.launches += 1
            # The function on the device goes away with the compiled kernel.
            self.kept.append(compiled)
        except (TypeError, ValueError) as e:
            self.unfit = str(e)

    def _launch(self, compiled: CompiledTritonKernel, grid: Sequence[int], given: Sequence[object]) -> list[int]:
        """Return the launch of ``compiled`` with the arguments ``given`` as integers for C++. They are the function's
        address, the grid, the threads, the shared memory in bytes, the number of parameters, and two integers for each
        parameter. Raise ``ValueError`` or ``TypeError`` if C++ cannot make the launch.
        """
        facts = compiled.metadata
        memory = int(facts.global_scratch_size or 0)
        # Global scratch memory is allocated here, so it is no reason against a replay.
        if needed := why_form_unfit(facts._replace(global_scratch_size=0)):
            raise ValueError(f"it needs {needed}")
        types = compiled.src.signature.values()
        parameters = [self._parameter(t, v) for t, v in zip(types, given, strict=True) if t != "constexpr"]
        parameters.append((SCRATCH, self._take_scratch(memory * prod(grid))) if memory else (NUMBER, 0))
        parameters.append((NUMBER, 0))  # the two are Triton's own memories
        head = [int(compiled.function), *grid, 32 * int(facts.num_warps), int(facts.shared), len(parameters)]
        return [*head, *(number for pair in parameters for number in pair)]

    def _parameter(self, type: str, value: object) -> tuple[int, int]:
        """Return a parameter of Triton type ``type`` as its kind and a number. For the kind ``TENSOR`` the number is
        that of a tensor that each call passes. For ``SCRATCH`` it is an offset in the scratch memory, and for
        ``NUMBER`` the integer itself. Raise ``ValueError`` or ``TypeError`` for any other value.
        """
        if isinstance(value, BroughtTensor) and value.number < self.tensors:
            return TENSOR, value.number
        # Its address may be freed before the next call.
        if isinstance(value, Tensor | BroughtTensor):
            for tensor, at in self.parts:
                if tensor is value:
                    return SCRATCH, at
            raise ValueError("a tensor that the call does not bring")
        if isinstance(value, int) and type in ("i32", "i64"):
            return NUMBER, value
        raise TypeError(f"{value!r} as {type}")

    def _take_scratch(self, size: int) -> int:
        """Return the offset, in bytes, of ``size`` more bytes in the scratch memory. The memory grows by ``size``,
        rounded up to a multiple of 256.
        """
        at, self.scratch = self.scratch, self.scratch + -(-size // ALIGNMENT) * ALIGNMENT
        return at


def make_native_rerun(binding: ctypes.CDLL, recording: LaunchRecording, places: Sequence[int], out: Tensor) -> Rerun:
    """Return a function of a call's arguments that repeats the launches in ``recording`` by C++ and returns a new
    output like ``out``. ``places`` are the positions, among the arguments, of the tensors that the launches read. Raise
    ``SL405`` if C++ refuses the recording.
    """
    words = [recording.device, recording.scratch, recording.launches, *recording.words]
    made = binding.shiplap_record((ctypes.c_int64 * len(words))(*words), ctypes.c_uint64(len(words)))
    if not made:
        raise error("SL405", where="shiplap_record", got=_binding_message(binding), expected="a recording")
    owner = _RecordingOwner(binding, made, recording)
    # The C function also takes the output, and None for each tensor that this op has not.
    size = next(n for n in REPLAY_TENSOR_COUNTS if n > len(places))
    addresses = [*(f"args[{i}].data_ptr()" for i in places), "out.data_ptr()", *["None"] * (size - len(places) - 1)]
    scope: dict[str, object] = {
        "replay": _replay_functions(binding)[size],
        "failed": lambda: _replay_error(binding),
        "owner": owner,
        "made": ctypes.c_void_p(made),
        "empty": torch.empty,
        "shape": out.shape,
        "dtype": out.dtype,
        "device": out.device,
    }
    lines = [
        # The default value keeps the recording alive as long as the function.
        "def rerun(args, owner=owner):",
        "    out = empty(shape, dtype=dtype, device=device)",
        f"    if replay(made, {', '.join(addresses)}): failed()",
        "    return out",
    ]
    return define_function("rerun", lines, "replay", scope)


class _RecordingOwner:
    """An object that owns a recording of launches in the C++ library. The recording is freed with this object. The
    Python function that repeats the recording keeps the object alive.
    """

    def __init__(self, binding: ctypes.CDLL, made: int, recording: LaunchRecording) -> None:
        """Set the address ``made`` of a recording in C++, and the kernels that it launches."""
        self.binding, self.made, self.recording = binding, made, recording

    def __del__(self) -> None:
        """Free the recorded launches that the C++ library holds for this object."""
        self.binding.shiplap_forget(ctypes.c_void_p(self.made))


def _replay_error(binding: ctypes.CDLL) -> None:
    """Raise ``RuntimeError`` with the message of the last failed replay on this thread."""
    raise RuntimeError(_binding_message(binding))


def _binding_message(binding: ctypes.CDLL) -> str:
    """Return the message of the last failure in the replay library on this thread."""
    text: bytes = binding.shiplap_message()
    return text.decode(errors="replace")


# --- the library ------------------------------------------------------------------------------------------------------


@dataclass
class _ReplayState:
    """The state of the replay library in this process. ``binding`` is the loaded library, or None. ``why`` is the
    reason why there will be none, or empty. ``builder`` is the running build, or None. ``calls`` counts the calls that
    Python launched.
    """

    binding: ctypes.CDLL | None = None
    why: str = ""
    builder: subprocess.Popen[bytes] | None = None
    calls: Iterator[int] = field(default_factory=count)


_replay_state = _ReplayState()
_lock = threading.RLock()


def _reset_replay_after_fork() -> None:
    """Replace the lock by a new one and forget the builder. This is done in a forked child, which has neither the
    threads nor the child processes of its parent.
    """
    global _lock
    _lock, _replay_state.builder = threading.RLock(), None


os.register_at_fork(after_in_child=_reset_replay_after_fork)


def replay_state_text() -> str:
    """Return ``"native"`` if C++ repeats launches of templates. Otherwise return ``python:`` and the reason."""
    if _replay_state.binding is not None:
        return "native"
    background = f"built in the background from call {HOT_REPLAYS} on" if settings().background_build else UNBUILT
    return f"python: {_replay_state.why or background}"


def is_replay_wanted() -> bool:
    """Return whether C++ may repeat launches. The environment variable ``SHIPLAP_REPLAY`` must not be 0, and this
    version of Triton must be verified.
    """
    return bool(read_setting("replay")) and _is_known_triton()


@cache
def _is_known_triton() -> bool:
    """Return whether the installed version of Triton is one whose launches have been verified."""
    import triton

    return is_verified(triton.__version__)


def choose_rerun(op: Op, plain: Rerun, recording: LaunchRecording, places: Sequence[int], out: Tensor) -> Rerun:
    """Return a function of a call's arguments that repeats the launches in ``recording`` and returns a new output like
    ``out``. ``places`` are the positions of the tensors among the arguments.

    If the replay library is built, C++ repeats the launches. If C++ cannot repeat them, the function is ``plain``,
    which launches from Python. Otherwise, it calls ``plain`` until the library is built.
    """
    if not out.is_cuda or recording.unfit or _replay_state.why or len(places) >= REPLAY_TENSOR_COUNTS[-1]:
        return plain
    if (binding := replay_library(op)) is not None:
        return make_native_rerun(binding, recording, places, out)

    def waiting(args: Args) -> Result:
        """Return the result of the call ``args``, launched by ``plain``. After 32 such calls, look at every 64th call
        whether the library is compiled, and start its build if it is not. If it is, the next call of each kind is
        recorded again.
        """
        number = next(_replay_state.calls)
        if (
            number >= HOT_REPLAYS
            and number % REPLAYS_BETWEEN_CHECKS == HOT_REPLAYS
            and replay_library(op, start=True) is not None
        ):
            # They hold functions that launch from Python.
            tuned_choices.forget_derived_choices()  # the next call of each kind is recorded again
        return plain(args)

    return waiting


def replay_library(op: Op, *, start: bool = False) -> ctypes.CDLL | None:
    """Return the loaded replay library, or None if it is not in the cache or Python is to launch in this process. If
    ``start`` is true and no build is running, start its build or issue a notice of how to build it.
    """
    # No thread waits: another one that holds the lock will find the library.
    if _replay_state.binding is not None or _replay_state.why or not _lock.acquire(blocking=False):
        return _replay_state.binding
    try:
        _advance_replay_build(op, start)
    except Exception as e:  # the call will be served: nothing that goes wrong here may undo that
        _give_up_replay(f"{type(e).__name__}: {e}")
    finally:
        _lock.release()
    return _replay_state.binding


def build_replay_library(op: Op) -> ctypes.CDLL:
    """Return the loaded replay library, which is compiled now if it is not in the cache. Raise ``SL405`` or ``SL406``,
    with the name of ``op``, if it cannot be built.
    """
    with _lock:
        place = _replay_folder(op)
        if problem := "" if is_library_present(place, op.spec.name) else compile_into(*_replay_build_order(op, place)):
            raise error("SL405", where=op.spec.name, got=problem, expected="a library")
        made = _replay_state.binding = _open_replay_library(place, op)
        tuned_choices.forget_derived_choices()
        return made


def _advance_replay_build(op: Op, start: bool) -> None:
    """Open the replay library if it is compiled. Otherwise, if ``start`` is true, start its build if background builds
    are on, or issue a notice of how to build it.
    """
    if not read_setting("native"):
        _replay_state.why = "SHIPLAP_NATIVE=0"
        return
    if _replay_state.builder is not None and _replay_state.builder.poll() is None:
        return
    place = _replay_folder(op)
    if is_library_present(place, op.spec.name):
        _replay_state.binding = _open_replay_library(place, op)
    elif _replay_state.builder is not None:
        assert _replay_state.builder.stdout is not None
        output = _replay_state.builder.stdout.read().decode(errors="replace")
        _give_up_replay(output or f"the builder ended with status {_replay_state.builder.returncode}")
    elif start and not read_setting("background_build"):
        _replay_state.why = UNBUILT
        notice(
            "replay",
            f"templates such as that of {op.spec.name} are launched by Python, and a compiled launcher has "
            "less to do. Build it once: op.build() in Python, or "
            f"'shiplap build {registry.command_target(op.spec.name)}' in a shell. "
            "SHIPLAP_BACKGROUND_BUILD=1 builds in the background",
        )
    elif start:
        _replay_state.builder = build_detached(*_replay_build_order(op, place))


def _give_up_replay(why: str) -> None:
    """Let Python launch templates for the rest of this process, and issue a notice with the reason ``why``."""
    _replay_state.why = why
    notice(f"replay {why}", f"templates stay with launches from Python: {why}")


def _replay_folder(op: Op) -> Path:
    """Return the cache folder of the replay library. It need not exist."""
    return cache_folder(op.spec.name) / library_name_digest(REPLAY_SOURCE, (*FLAGS, *extra_compiler_flags()))


def _replay_build_order(op: Op, place: Path) -> tuple[Path, str, str, list[str]]:
    """Return the arguments of a builder for the replay library. They are the cache folder, the digest, the source code
    and the words of the compiler command.
    """
    return place.parent, place.name, REPLAY_SOURCE, compile_command(op)


def _open_replay_library(place: Path, op: Op) -> ctypes.CDLL:
    """Return the loaded replay library in the folder ``place``, with the types of its functions set. Raise ``SL405`` or
    ``SL406``, with the name of ``op``, if it cannot be loaded.
    """
    binding = load_library(place, op.spec.name)
    binding.shiplap_message.restype = ctypes.c_char_p
    binding.shiplap_record.restype = ctypes.c_void_p
    binding.shiplap_forget.restype = None
    for size, function in _replay_functions(binding).items():
        function.argtypes, function.restype = [ctypes.c_void_p] * (size + 1), ctypes.c_int
    return binding


def _replay_functions(binding: ctypes.CDLL) -> dict[int, ctypes._NamedFuncPointer]:
    """Return a mapping from the number of tensors that a C function of the replay library takes to that function."""
    return dict(
        zip(
            REPLAY_TENSOR_COUNTS,
            (binding.shiplap_replay_4, binding.shiplap_replay_8, binding.shiplap_replay_16),
            strict=True,
        )
    )
