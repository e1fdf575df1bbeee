"""The module ``torch.<device>``: the functions that torch requires of a device module, and the device's own."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.backend_registration import generate_methods_for_privateuse1_backend

from . import _C, _processes  # type: ignore[attr-defined]
from ._inductor import INDUCTOR, inductor, register_interface

NAME = ""  # of the device: `register`
_TYPE = 20  # of PrivateUse1 in c10::DeviceType

Stream = torch.Stream
Event = torch.Event

_initialized = True  # torch's checkpoints save the random state of a device that says so
default_generators: tuple[torch.Generator, ...] = ()  # one for each device: `register`

# What torch or libraries read from some device modules, and why it is not here.
REFUSED = {
    "sparse": "sparse tensors are not supported",
    "set_rng_ctx": "there is one kind of random numbers, those of the CPU",
    "unset_rng_ctx": "there is one kind of random numbers, those of the CPU",
    "memory_snapshot": "the allocator keeps no history",
    "graph": "calls are not captured in graphs",
    "ipc_collect": "memory is not shared between processes: tensors are copied",
    "MemPool": "the allocator has one pool of memory",
    "use_mem_pool": "the allocator has one pool of memory",
    "_lazy_call": "the device is ready when its package is imported",
    "_inductor_backend_init": "Inductor's parts for it are registered when its package is imported",
}


def register(name: str) -> None:
    """Register this module as ``torch.<name>``.

    Tensors and modules get the methods ``<name>()``, and tensors the attribute ``is_<name>``. Generators and process
    groups of the device are registered, too.
    """
    global NAME
    NAME = name
    torch._register_device_module(name, sys.modules[__name__])
    generate_methods_for_privateuse1_backend(for_packed_sequence=True, for_storage=True)
    global default_generators
    default_generators = tuple(_C.default_generator(index) for index in range(device_count()))
    register_interface(name, sys.modules[__name__])
    _processes.register(name)
    atexit.register(_C.settle_autograd)
    if torch.distributed.is_available():
        from . import _group

        _group.register(name)


def __getattr__(name: str) -> Any:
    """Return the attribute ``name`` that Inductor reads from this module.

    It is created at the first access, because importing Inductor takes a second. Raise ``AttributeError`` for another
    name.
    """
    if name in INDUCTOR:
        return inductor(NAME, bool(_C.discrete()))[name]
    if name in REFUSED:
        raise AttributeError(f"torch.{NAME} has no {name!r}: {REFUSED[name]}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


# --- the device --------------------------------------------------------------------------------------------------


def is_available() -> bool:
    """Return whether there is at least one device."""
    return device_count() > 0


def is_initialized() -> bool:
    """Return True, since the device is ready when the package is imported."""
    return True


def init() -> None:
    """Check that this process can use the device.

    Nothing else is done, because loading the library has registered everything. Raise ``RuntimeError`` in a process
    that was forked after the device was used.
    """
    if _is_in_bad_fork():
        raise RuntimeError(
            f"this process was forked from one that had used device {NAME!r}, whose threads it lacks. "
            "Start processes with multiprocessing's 'spawn'."
        )


def _lazy_init() -> None:
    """Do nothing.

    A forked process is not refused here, because it may still read tensors in shared memory.
    """


def _is_compiled() -> bool:
    """Return True, since a package without its compiled library cannot be imported."""
    return True


def _is_in_bad_fork() -> bool:
    """Return whether this process was forked after the vendor had started threads in its parent."""
    return bool(_C.in_bad_fork())


def device_count() -> int:
    """Return the number of devices."""
    return int(_C.device_count())


def current_device() -> int:
    """Return the index of the device that the calling thread uses."""
    return int(torch.accelerator.current_device_index())


def _device_index(which: Any) -> int:
    """Return the index of the device ``which``.

    ``which`` is an index, a string such as ``"name:0"`` or a ``torch.device``. None, -1 and ``"name"`` stand for the
    current device. Raise ``ValueError`` if there is no such device.
    """
    if isinstance(which, str):
        which = torch.device(which)
    if isinstance(which, torch.device):
        if which.type != NAME:
            raise ValueError(f"got device {which}, expected {NAME!r}")
        which = which.index
    index = -1 if which is None else int(which)
    count = device_count()
    if not -1 <= index < count:
        there = f"there is one {NAME!r} device" if count == 1 else f"there are {count} {NAME!r} devices"
        raise ValueError(f"got device index {index}, expected {'0' if count == 1 else f'0 to {count - 1}'}: {there}")
    return current_device() if index < 0 else index


def set_device(device: Any) -> None:
    """Make ``device`` the current device of the calling thread."""
    torch.accelerator.set_device_index(_device_index(device))


class device:
    """A context manager that makes a device current for the calling thread in its block.

    After the block the previous device is current again.
    """

    def __init__(self, device: Any) -> None:
        """Create a context in which ``device`` is current."""
        self._index = _device_index(device)

    def __enter__(self) -> None:
        """Make the device current for the calling thread."""
        self._before = current_device()
        set_device(self._index)

    def __exit__(self, *exc: object) -> None:
        """Make the previous device current again."""
        set_device(self._before)


def get_device_name(device: Any = None) -> str:
    """Return the name of the device type, which is the same for all devices.

    Raise ``ValueError`` if there is no such device.
    """
    _device_index(device)
    return NAME


def get_device_capability(device: Any = None) -> dict[str, Any]:
    """Return the capabilities of the device, such as the dtypes of its tensors.

    The dict has the keys of ``torch.accelerator.get_device_capability``. It is empty if this torch does not have that
    function.
    """
    index = _device_index(device)
    ask = getattr(torch.accelerator, "get_device_capability", None)
    return dict(ask(index)) if ask else {}


@dataclass(frozen=True)
class DeviceProperties:
    """The name of a device, its memory in bytes, and the number of its processors."""

    name: str
    total_memory: int
    multi_processor_count: int


def get_device_properties(device: Any = None) -> DeviceProperties:
    """Return the name of the device, its memory in bytes, and the number of its processors.

    The processors are the host's CPUs.
    """
    return DeviceProperties(NAME, memory_stats(device)["total"], os.cpu_count() or 1)


def _exchange_device(index: int) -> int:
    """Make ``index`` the device of the calling thread, and return the index of the previous device.

    A negative ``index`` changes nothing.
    """
    before = current_device()
    if index >= 0:
        set_device(index)
    return before


_maybe_exchange_device = _exchange_device


def can_device_access_peer(device: Any, peer: Any) -> bool:
    """Return whether ``device`` can read the memory of ``peer`` directly.

    This is true only if they are the same device.
    """
    return _device_index(device) == _device_index(peer)


def synchronize(device: Any = None) -> None:
    """Wait for all streams of the device.

    Raise ``RuntimeError`` with the name of an op that failed in a stream. On a device in the host's memory each op is
    finished when its call returns, and there is nothing to wait for.
    """
    torch.accelerator.synchronize(_device_index(device))


def current_stream(device: Any = None) -> torch.Stream:
    """Return the stream that the calling thread uses on the device."""
    return torch.accelerator.current_stream(_device_index(device))


def default_stream(device: Any = None) -> torch.Stream:
    """Return the stream that a thread uses on the device if it has not chosen another."""
    here = torch.device(NAME, _device_index(device))
    return torch.Stream(stream_id=0, device_index=here.index, device_type=_TYPE)


def set_stream(stream: torch.Stream) -> None:
    """Make ``stream`` the current stream of the calling thread, and its device the current device."""
    torch.accelerator.set_stream(stream)


def _set_stream_by_id(stream_id: int, device_index: int, device_type: int) -> None:
    """Make the stream that these three numbers identify the current stream of the calling thread."""
    set_stream(torch.Stream(stream_id=stream_id, device_index=device_index, device_type=device_type))


@contextmanager
def stream(stream: torch.Stream | None) -> Iterator[None]:
    """Return a context in which ``stream`` is current for the calling thread.

    If ``stream`` is None, nothing changes.
    """
    if stream is None:
        yield
        return
    # Setting a stream changes the current device as well, so both are restored.
    index, before = current_device(), torch.accelerator.current_stream(stream.device)
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)
        torch.accelerator.set_device_index(index)


# --- precision ---------------------------------------------------------------------------------------------------


def get_amp_supported_dtype() -> list[torch.dtype]:
    """Return the dtypes in which ``torch.autocast`` may run operators of the device."""
    return [torch.bfloat16, torch.float16]


def is_bf16_supported(including_emulation: bool = True) -> bool:
    """Return ``including_emulation``, that is, whether emulated support counts.

    The device computes with bfloat16 tensors by emulation, namely in float32.
    """
    return including_emulation


# --- random numbers ----------------------------------------------------------------------------------------------


def manual_seed(seed: int) -> None:
    """Seed the random generator of the current device.

    It draws the numbers that the CPU draws for the same seed.
    """
    _C.manual_seed(-1, int(seed) & 0xFFFF_FFFF_FFFF_FFFF)


def manual_seed_all(seed: int) -> None:
    """Seed the random generator of each device."""
    for index in range(device_count()):
        _C.manual_seed(index, int(seed) & 0xFFFF_FFFF_FFFF_FFFF)


def seed() -> int:
    """Seed the random generator of the current device with a random number, and return that number."""
    return int(_C.seed(-1))


def seed_all() -> int:
    """Seed the random generator of each device with the same random number, and return that number."""
    chosen = seed()
    manual_seed_all(chosen)
    return chosen


def initial_seed() -> int:
    """Return the seed of the current device's random generator."""
    return int(_C.initial_seed(-1))


def get_rng_state(device: Any = None) -> torch.Tensor:
    """Return the state of the device's random generator as a uint8 tensor on the CPU."""
    return torch.frombuffer(bytearray(_C.rng_state(_device_index(device))), dtype=torch.uint8)


def _get_generator(device: torch.device) -> torch.Generator:
    """Return the device's default generator, which its operators use if they are given none."""
    return default_generators[_device_index(device)]


def set_rng_state(state: torch.Tensor, device: Any = None) -> None:
    """Restore a state of the device's random generator that ``get_rng_state`` returned.

    Raise ``ValueError`` if ``state`` has another length than such a state.
    """
    _C.set_rng_state(_device_index(device), state.cpu().contiguous().numpy().tobytes())


def get_rng_state_all() -> list[torch.Tensor]:
    """Return the state of the random generator of each device, in order."""
    return [get_rng_state(index) for index in range(device_count())]


def set_rng_state_all(states: Iterable[torch.Tensor]) -> None:
    """Restore the states of the random generators of all devices, in order."""
    for index, state in enumerate(states):
        set_rng_state(state, index)


# --- memory ------------------------------------------------------------------------------------------------------


def memory_stats(device: Any = None) -> dict[str, int]:
    """Return figures of the device's memory by name.

    ``allocated`` are the bytes that tensors hold, and ``peak`` is the largest such number. ``reserved`` includes the
    bytes that are kept for later tensors. ``limit`` is the limit of ``allocated``, or 0 if there is none. ``free`` and
    ``total`` are the bytes of the device's memory. ``allocations`` counts the allocations so far. The figures of
    ``torch.accelerator.memory_stats`` are included under their names, such as ``allocated_bytes.all.peak``.
    """
    index = _device_index(device)
    return {**torch.accelerator.memory_stats(index), **_C.memory_stats(index)}


def memory_allocated(device: Any = None) -> int:
    """Return the number of bytes that tensors of the device hold."""
    return memory_stats(device)["allocated"]


def max_memory_allocated(device: Any = None) -> int:
    """Return the largest number of bytes that tensors held since the start or since the last call of
    ``reset_peak_memory_stats``. ``device`` is the device, by default the current one.
    """
    return memory_stats(device)["peak"]


def memory_reserved(device: Any = None) -> int:
    """Return the number of bytes that tensors hold or that are kept for later tensors. ``device`` is the device, by
    default the current one.
    """
    return memory_stats(device)["reserved"]


def max_memory_reserved(device: Any = None) -> int:
    """Return the largest number of bytes that were held by tensors or kept for later ones, since the start or since the
    last call of ``reset_peak_memory_stats``. ``device`` is the device, by default the current one.
    """
    return int(torch.accelerator.max_memory_reserved(_device_index(device)))


def memory_summary(device: Any = None) -> str:
    """Return the figures of the device's memory as a string, with one name and number in each line."""
    lines = (f"{name:<12}{value:>20,}" for name, value in _C.memory_stats(_device_index(device)).items())
    return "\n".join((f"memory of {NAME}:{_device_index(device)}", *lines))


def reset_peak_memory_stats(device: Any = None) -> None:
    """Set the recorded peak of the held bytes of ``device``, by default the current one, to the bytes that are held
    now.
    """
    _C.reset_peak_memory(_device_index(device))


def reset_accumulated_memory_stats(device: Any = None) -> None:
    """Set the figures of ``device`` that only grow, such as the number of bytes allocated so far, to zero. If it is
    None, the current device is meant.
    """
    torch.accelerator.reset_accumulated_memory_stats(_device_index(device))


def set_memory_limit(limit: int | None, device: Any = None) -> None:
    """Limit the number of bytes that all tensors of the device hold.

    If ``limit`` is None, the limit is removed. An allocation beyond it raises ``OutOfMemoryError``. Raise
    ``ValueError`` if ``limit`` is not positive.
    """
    if limit is not None and limit <= 0:
        raise ValueError(f"got a memory limit of {limit} bytes, expected a positive number, or None for no limit")
    _C.set_memory_limit(_device_index(device), limit or 0)


def mem_get_info(device: Any = None) -> tuple[int, int]:
    """Return the free and the total number of bytes.

    They refer to the memory limit if one is set, else to the device's memory.
    """
    stats = memory_stats(device)
    if stats["limit"]:
        return stats["limit"] - stats["allocated"], stats["limit"]
    return stats["free"], stats["total"]


def empty_cache() -> None:
    """Release the memory that is kept for later tensors.

    A device in the host's memory keeps none.
    """
    _C.empty_cache()


# --- what ran where ----------------------------------------------------------------------------------------------


def counters() -> dict[str, dict[str, Any]]:
    """Return the counted calls of each operator since ``reset_counters``.

    Native calls ran on the device, and fallbacks on the CPU. An example is ``{"aten::add.out": {"native": 3,
    "fallback": {"dtype": 1}}}``, in which ``dtype`` is the reason for the fallback.
    """
    return dict(_C.counters())


def reset_counters() -> None:
    """Set the counters of all operators to zero."""
    _C.reset_counters()


class fallback_policy:
    """The policy for fallbacks, that is, for calls that run on the CPU because the device has no kernel for them.

    The policy is ``"count"``, ``"warn"`` (once for each op and reason) or ``"error"``. It holds at once and for all
    threads. If the object is used as a context manager, the previous policy holds again after the block. ``allow``
    names ops, with or without overload, that may fall back under ``"error"``. ``fallback_policy.current()`` returns the
    policy that holds.

    >>> with torch.openvino.fallback_policy("error", allow=["aten::normal_"]):
    ...     model(x)
    """

    def __init__(self, policy: str, allow: Iterable[str] = ()) -> None:
        """Set the policy, and the operators ``allow`` that may fall back to the CPU under ``"error"``."""
        self._before = (_C.fallback_policy(), _C.allowed_fallbacks())
        _C.set_fallback_policy(policy, list(allow))

    @staticmethod
    def current() -> str:
        """Return the policy for fallbacks to the CPU that holds at present."""
        return str(_C.fallback_policy())

    def __enter__(self) -> fallback_policy:
        """Return this object. Its policy has been in force since it was created."""
        return self

    def __exit__(self, *exc: object) -> None:
        """Restore the previous policy and the previously allowed fallbacks."""
        _C.set_fallback_policy(*self._before)


def allowed_fallbacks() -> list[str]:
    """Return the operators that may fall back to the CPU under the policy ``"error"``."""
    return list(_C.allowed_fallbacks())


def cache_info() -> dict[str, float]:
    """Return statistics of the cache of compiled graphs by name.

    ``entries`` counts the graphs, of which at most ``capacity`` are kept. ``bytes`` is their size, which is at most
    ``limit``. ``hits``, ``misses`` and ``evictions`` count events, and ``compile_seconds`` is the time of all
    compilations. The size of a graph is the growth of the process's heap while it was compiled and ran for the first
    time.
    """
    return dict(_C.cache_info())


def cache_clear() -> None:
    """Remove all compiled graphs and their statistics, and return their memory to the system."""
    _C.cache_clear()


def cache_resize(capacity: int, bytes: int | None = None) -> None:
    """Keep at most ``capacity`` compiled graphs, namely the most recently used ones.

    Raise ``ValueError`` if ``capacity`` or ``bytes`` is below 1.

    Args:
        capacity: The largest number of graphs.
        bytes: The largest size of all graphs. By default it is 48 MiB, and doubles up to 1 GiB each time a graph that
            was removed is needed again. A model that repeats its graphs thus gets enough room, while a model whose
            sizes never repeat does not need it.
    """
    if capacity < 1 or (bytes is not None and bytes < 1):
        raise ValueError(f"got a capacity of {capacity} graphs and {bytes} bytes, expected at least 1 of each")
    _C.cache_resize(capacity, bytes or 0)
