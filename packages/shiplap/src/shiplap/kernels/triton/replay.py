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

from shiplap.declare.kernel import Rerun
from shiplap.declare.values import Args, Result
from shiplap.dispatch import Op, tuned_choices
from shiplap.errors import error, notice
from shiplap.kernels.native.build import build as compile_into
from shiplap.kernels.native.build import detached
from shiplap.kernels.native.build_digest import FLAGS, digest
from shiplap.kernels.native.build_plan import command, extra_flags
from shiplap.kernels.native.cache import folder, load, present
from shiplap.kernels.triton.launcher import is_verified
from shiplap.kernels.triton.specialize import unfit
from shiplap.settings import settings

HOT = 32  # calls that Python launches before a compiled launcher pays
UNBUILT = "python: its launcher is not built"
ASK = 64  # calls between two looks whether it has ended
ALIGNMENT = 256  # bytes, of parts of the scratch memory
SIZES = (4, 8, 16)  # tensors that the C functions take
NUMBER, TENSOR, SCRATCH = range(3)


def _function(size: int) -> str:
    """Return the text of the C function for ``size`` tensors."""
    names = [f"t{i}" for i in range(size)]
    parameters, given = ", ".join(f"Address {name}" for name in names), ", ".join(names)
    return (
        f'extern "C" SL_EXPORT int shiplap_replay_{size}(void* recording, {parameters}) {{\n'
        f"  return shiplap::replay::replay(recording, {{{given}}});\n}}\n"
    )


SOURCE = """#include "shiplap/replay.h"
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
""" + "".join(map(_function, SIZES))


class _Source(Protocol):
    @property
    def signature(self) -> dict[str, str]: ...


class Compiled(Protocol):
    """The part of Triton's compiled kernel that is used here. ``metadata`` is a named tuple of facts."""

    metadata: Any

    @property
    def function(self) -> int: ...

    @property
    def src(self) -> _Source: ...


@dataclass(frozen=True)
class Brought:
    """A placeholder for a tensor among the arguments of a launch: the ``number``-th tensor that each call passes.

    A call may bring one tensor twice, and the next call two, so a recording never looks at which tensors they are.
    """

    number: int


@dataclass
class Recording:
    """The recorded launches of a call.

    Attributes:
        device: the index of its CUDA device.
        tensors: how many addresses another call brings.
        scratch: bytes that the launches share.
        words: the launches as the C function reads them.
        unfit: why C++ cannot make them, or empty.
        parts: tensors that are scratch memory, with their places there.
        kept: the compiled kernels, which have to live as long as the recording.
    """

    device: int
    tensors: int
    scratch: int = 0
    words: list[int] = field(default_factory=list)
    launches: int = 0
    unfit: str = ""
    parts: list[tuple[Tensor, int]] = field(default_factory=list)
    kept: list[Compiled] = field(default_factory=list)

    def share(self, tensor: Tensor) -> None:
        """Make ``tensor`` a part of the scratch memory of each call."""
        self.parts.append((tensor, self._room(tensor.numel() * tensor.itemsize)))

    def close(self) -> None:
        """Release the tensors after the last launch was added."""
        self.parts = []

    def add(self, compiled: Compiled, grid: Sequence[int], given: Sequence[object]) -> None:
        """Add a launch of a compiled kernel with these arguments, which include constants."""
        if self.unfit:
            return
        try:
            self.words += self._launch(compiled, [*grid, 1, 1][:3], given)
            self.launches += 1
            self.kept.append(compiled)
        except (TypeError, ValueError) as e:
            self.unfit = str(e)

    def _launch(self, compiled: Compiled, grid: Sequence[int], given: Sequence[object]) -> list[int]:
        facts = compiled.metadata
        memory = int(facts.global_scratch_size or 0)
        if needed := unfit(facts._replace(global_scratch_size=0)):
            raise ValueError(f"it needs {needed}")
        types = compiled.src.signature.values()
        parameters = [self._parameter(t, v) for t, v in zip(types, given, strict=True) if t != "constexpr"]
        parameters.append((SCRATCH, self._room(memory * prod(grid))) if memory else (NUMBER, 0))
        parameters.append((NUMBER, 0))  # the two are Triton's own memories
        head = [int(compiled.function), *grid, 32 * int(facts.num_warps), int(facts.shared), len(parameters)]
        return [*head, *(number for pair in parameters for number in pair)]

    def _parameter(self, type: str, value: object) -> tuple[int, int]:
        if isinstance(value, Brought) and value.number < self.tensors:
            return TENSOR, value.number
        if isinstance(value, Tensor | Brought):
            for tensor, at in self.parts:
                if tensor is value:
                    return SCRATCH, at
            raise ValueError("a tensor that the call does not bring")
        if isinstance(value, int) and type in ("i32", "i64"):
            return NUMBER, value
        raise TypeError(f"{value!r} as {type}")

    def _room(self, size: int) -> int:
        at, self.scratch = self.scratch, self.scratch + -(-size // ALIGNMENT) * ALIGNMENT
        return at


def rerun_by(binding: ctypes.CDLL, recording: Recording, places: Sequence[int], out: Tensor) -> Rerun:
    """Return a function that repeats ``recording`` by C++. ``places`` are its tensors' positions in the arguments."""
    words = [recording.device, recording.scratch, recording.launches, *recording.words]
    made = binding.shiplap_record((ctypes.c_int64 * len(words))(*words), ctypes.c_uint64(len(words)))
    if not made:
        raise error("SL405", where="shiplap_record", got=_message(binding), expected="a recording")
    owner = _Owner(binding, made, recording)
    size = next(n for n in SIZES if n > len(places))
    addresses = [*(f"args[{i}].data_ptr()" for i in places), "out.data_ptr()", *["None"] * (size - len(places) - 1)]
    scope: dict[str, object] = {
        "replay": _functions(binding)[size],
        "failed": lambda: _failed(binding),
        "owner": owner,
        "made": ctypes.c_void_p(made),
        "empty": torch.empty,
        "shape": out.shape,
        "dtype": out.dtype,
        "device": out.device,
    }
    lines = [
        "def rerun(args, owner=owner):",
        "    out = empty(shape, dtype=dtype, device=device)",
        f"    if replay(made, {', '.join(addresses)}): failed()",
        "    return out",
    ]
    exec(compile("\n".join(lines), "<replay>", "exec"), scope)
    rerun = scope["rerun"]
    assert callable(rerun)
    return rerun


class _Owner:
    """The owner of a recording in C++, which frees it together with the function that holds the owner."""

    def __init__(self, binding: ctypes.CDLL, made: int, recording: Recording) -> None:
        self.binding, self.made, self.recording = binding, made, recording

    def __del__(self) -> None:
        self.binding.shiplap_forget(ctypes.c_void_p(self.made))


def _failed(binding: ctypes.CDLL) -> None:
    raise RuntimeError(_message(binding))


def _message(binding: ctypes.CDLL) -> str:
    text: bytes = binding.shiplap_message()
    return text.decode(errors="replace")


# --- the library ------------------------------------------------------------------------------------------------------


@dataclass
class _State:
    binding: ctypes.CDLL | None = None
    why: str = ""
    builder: subprocess.Popen[bytes] | None = None
    calls: Iterator[int] = field(default_factory=count)


_now = _State()
_lock = threading.RLock()


def _after_fork() -> None:
    """Reset lock and builder in a forked child, which has neither the threads nor the children of its parent."""
    global _lock
    _lock, _now.builder = threading.RLock(), None


os.register_at_fork(after_in_child=_after_fork)


def state() -> str:
    """Return ``"native"`` if C++ repeats launches of templates, else the reason why Python does."""
    if _now.binding is not None:
        return "native"
    background = f"python: built in the background from call {HOT} on" if settings().background_build else UNBUILT
    return _now.why or background


def wanted() -> bool:
    """Whether C++ may repeat launches: ``SHIPLAP_REPLAY`` is not 0 and this release of Triton is verified."""
    return settings().replay and _known()


@cache
def _known() -> bool:
    import triton

    return is_verified(triton.__version__)


def served(op: Op, plain: Rerun, recording: Recording, places: Sequence[int], out: Tensor) -> Rerun:
    """Return a function that repeats ``recording``: by C++ if its library is there, else by ``plain`` until it is."""
    if not out.is_cuda or recording.unfit or _now.why or len(places) >= SIZES[-1]:
        return plain
    if (binding := library(op)) is not None:
        return rerun_by(binding, recording, places, out)

    def waiting(args: Args) -> Result:
        number = next(_now.calls)
        if number >= HOT and number % ASK == HOT and library(op, start=True) is not None:
            tuned_choices.forget()  # the next call of each kind is recorded again
        return plain(args)

    return waiting


def library(op: Op, *, start: bool = False) -> ctypes.CDLL | None:
    """Return the library if it is in the cache. ``start`` starts its compiler otherwise, if none is running."""
    if _now.binding is not None or _now.why or not _lock.acquire(blocking=False):
        return _now.binding
    try:
        _advance(op, start)
    except Exception as e:  # the call will be served: nothing that goes wrong here may undo that
        _give_up(f"{type(e).__name__}: {e}")
    finally:
        _lock.release()
    return _now.binding


def build(op: Op) -> ctypes.CDLL:
    """Build or find the library now. Raise SL405 or SL406, with the name of ``op``, when it cannot be built."""
    with _lock:
        place = _place(op)
        if problem := "" if present(place, op.spec.name) else compile_into(*_order(op, place)):
            raise error("SL405", where=op.spec.name, got=problem, expected="a library")
        made = _now.binding = _opened(place, op)
        tuned_choices.forget()
        return made


def _advance(op: Op, start: bool) -> None:
    if not settings().native:
        _now.why = "SHIPLAP_NATIVE=0"
        return
    if _now.builder is not None and _now.builder.poll() is None:
        return
    place = _place(op)
    if present(place, op.spec.name):
        _now.binding = _opened(place, op)
    elif _now.builder is not None:
        assert _now.builder.stdout is not None
        output = _now.builder.stdout.read().decode(errors="replace")
        _give_up(output or f"the builder ended with status {_now.builder.returncode}")
    elif start and not settings().background_build:
        _now.why = UNBUILT
        notice(
            "replay",
            f"templates such as that of {op.spec.name} are launched by Python, and a compiled launcher has "
            "less to do. Build it once: op.build() in Python, or 'shiplap build TARGET' in a shell. "
            "SHIPLAP_BACKGROUND_BUILD=1 builds in the background",
        )
    elif start:
        _now.builder = detached(*_order(op, place))


def _give_up(why: str) -> None:
    _now.why = why
    notice(f"replay {why}", f"templates stay with launches from Python: {why}")


def _place(op: Op) -> Path:
    return folder(op.spec.name) / digest(SOURCE, (*FLAGS, *extra_flags()))


def _order(op: Op, place: Path) -> tuple[Path, str, str, list[str]]:
    return place.parent, place.name, SOURCE, command(op)


def _opened(place: Path, op: Op) -> ctypes.CDLL:
    binding = load(place, op.spec.name)
    binding.shiplap_message.restype = ctypes.c_char_p
    binding.shiplap_record.restype = ctypes.c_void_p
    binding.shiplap_forget.restype = None
    for size, function in _functions(binding).items():
        function.argtypes, function.restype = [ctypes.c_void_p] * (size + 1), ctypes.c_int
    return binding


def _functions(binding: ctypes.CDLL) -> dict[int, ctypes._NamedFuncPointer]:
    """Return the C functions by the number of tensors that they take."""
    return dict(
        zip(SIZES, (binding.shiplap_replay_4, binding.shiplap_replay_8, binding.shiplap_replay_16), strict=True)
    )
