"""The module ``torch.<device>``: what torch asks of a device in Python, and what this one tells of itself."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.backend_registration import generate_methods_for_privateuse1_backend

from . import _C  # type: ignore[attr-defined]
from ._inductor import INDUCTOR, inductor

__all__ = [
    "Event",
    "Stream",
    "allowed_fallbacks",
    "cache_clear",
    "cache_info",
    "cache_resize",
    "counters",
    "current_device",
    "current_stream",
    "default_stream",
    "device",
    "device_count",
    "empty_cache",
    "fallback_policy",
    "get_amp_supported_dtype",
    "get_device_capability",
    "get_device_name",
    "get_rng_state",
    "get_rng_state_all",
    "initial_seed",
    "is_available",
    "is_bf16_supported",
    "is_initialized",
    "manual_seed",
    "manual_seed_all",
    "max_memory_allocated",
    "mem_get_info",
    "memory_allocated",
    "memory_stats",
    "reset_counters",
    "reset_peak_memory_stats",
    "seed",
    "seed_all",
    "set_device",
    "set_memory_limit",
    "set_rng_state",
    "set_rng_state_all",
    "stream",
    "synchronize",
]

NAME = ""  # of the device: `register`

Stream = torch.Stream
Event = torch.Event


def register(name: str) -> None:
    """Make this module ``torch.<name>``, with ``tensor.<name>()``, ``module.<name>()`` and ``tensor.is_<name>``."""
    global NAME
    NAME = name
    torch._register_device_module(name, sys.modules[__name__])
    generate_methods_for_privateuse1_backend(for_packed_sequence=True, for_storage=True)


def __getattr__(name: str) -> Any:
    """What Inductor asks for, made when it asks: importing Inductor takes a second."""
    if name in INDUCTOR:
        return inductor(NAME)[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


# --- the device --------------------------------------------------------------------------------------------------


def is_available() -> bool:
    """Whether the device can be used: it is the host's memory and processor, so always."""
    return True


def is_initialized() -> bool:
    """Whether the device is ready. It is from the start."""
    return True


def _lazy_init() -> None:
    """Nothing to do: loading ``_C`` registered everything."""


def _is_in_bad_fork() -> bool:
    """Whether the process was forked after the vendor's threads were started in its parent."""
    return bool(_C.in_bad_fork())


def device_count() -> int:
    """One."""
    return 1


def current_device() -> int:
    """Index 0."""
    return 0


def _index(which: Any) -> int:
    """Index of ``which`` (None, an index, ``"name:0"`` or a ``torch.device``). ValueError for any but this one."""
    if isinstance(which, str):
        which = torch.device(which)
    if isinstance(which, torch.device):
        if which.type != NAME:
            raise ValueError(f"got device {which}, expected {NAME!r}")
        which = which.index
    index = 0 if which is None else int(which)
    if index not in (-1, 0):  # -1: torch's "no device"
        raise ValueError(f"got device index {index}, expected 0: there is one {NAME!r} device")
    return index


def set_device(device: Any) -> None:
    """Accept the one device there is."""
    _index(device)


class device:
    """``with torch.<device>.device(0):``"""

    def __init__(self, device: Any) -> None:
        _index(device)

    def __enter__(self) -> None:
        return None

    def __exit__(self, *exc: object) -> None:
        return None


def get_device_name(device: Any = None) -> str:
    """The device's name."""
    _index(device)
    return NAME


def get_device_capability(device: Any = None) -> dict[str, Any]:
    """Empty: torch has no common vocabulary for it."""
    _index(device)
    return {}


def synchronize(device: Any = None) -> None:
    """Return at once: every op is done when its call returns."""
    _index(device)


def current_stream(device: Any = None) -> torch.Stream:
    """The one stream."""
    _index(device)
    return torch.Stream(torch.device(NAME, 0))


default_stream = current_stream


@contextmanager
def stream(stream: torch.Stream | None) -> Iterator[None]:
    """Run in ``stream``: there is one, so this orders nothing."""
    yield


# --- precision ---------------------------------------------------------------------------------------------------


def get_amp_supported_dtype() -> list[torch.dtype]:
    """The dtypes that ``torch.autocast`` may lower to."""
    return [torch.bfloat16, torch.float16]


def is_bf16_supported(including_emulation: bool = True) -> bool:
    """Whether bfloat16 tensors can be computed with. Without a unit for it the library computes them in float32."""
    return including_emulation


# --- random numbers ----------------------------------------------------------------------------------------------


def manual_seed(seed: int) -> None:
    """Seed the device's generator. Its numbers are those of the CPU for the same seed."""
    _C.manual_seed(int(seed) & 0xFFFF_FFFF_FFFF_FFFF)


manual_seed_all = manual_seed


def seed() -> int:
    """Seed with a random number and return it."""
    return int(_C.seed())


seed_all = seed


def initial_seed() -> int:
    """The seed in force."""
    return int(_C.initial_seed())


def get_rng_state(device: Any = None) -> torch.Tensor:
    """State of the generator, a CPU tensor of bytes."""
    _index(device)
    return torch.frombuffer(bytearray(_C.rng_state()), dtype=torch.uint8)


def set_rng_state(state: torch.Tensor, device: Any = None) -> None:
    """Restore a state of ``get_rng_state``. ValueError if it is not as long as one."""
    _index(device)
    _C.set_rng_state(state.cpu().contiguous().numpy().tobytes())


def get_rng_state_all() -> list[torch.Tensor]:
    """The state of each device."""
    return [get_rng_state()]


def set_rng_state_all(states: Iterable[torch.Tensor]) -> None:
    """Restore the state of each device."""
    for state in states:
        set_rng_state(state)


# --- memory ------------------------------------------------------------------------------------------------------


def memory_stats(device: Any = None) -> dict[str, int]:
    """``allocated``, ``peak`` and ``limit`` in bytes (limit 0: none), ``allocations`` so far."""
    _index(device)
    return dict(_C.memory_stats())


def memory_allocated(device: Any = None) -> int:
    """Bytes that tensors of the device hold."""
    return memory_stats(device)["allocated"]


def max_memory_allocated(device: Any = None) -> int:
    """The most bytes held since the start or ``reset_peak_memory_stats``."""
    return memory_stats(device)["peak"]


def reset_peak_memory_stats(device: Any = None) -> None:
    """Let the peak start again from what is held now."""
    _index(device)
    _C.reset_peak_memory()


def set_memory_limit(limit: int | None) -> None:
    """Bytes that tensors may hold together, or None; beyond, an allocation raises ``torch.OutOfMemoryError``."""
    if limit is not None and limit <= 0:
        raise ValueError(f"got a memory limit of {limit} bytes, expected a positive number, or None for no limit")
    _C.set_memory_limit(limit or 0)


def mem_get_info(device: Any = None) -> tuple[int, int]:
    """Free and total bytes: of the limit if there is one, else of the host."""
    import os

    stats = memory_stats(device)
    if stats["limit"]:
        return stats["limit"] - stats["allocated"], stats["limit"]
    page = os.sysconf("SC_PAGE_SIZE")
    return os.sysconf("SC_AVPHYS_PAGES") * page, os.sysconf("SC_PHYS_PAGES") * page


def empty_cache() -> None:
    """Nothing to release: memory goes back to the host when a tensor dies."""


# --- what ran where ----------------------------------------------------------------------------------------------


def counters() -> dict[str, dict[str, Any]]:
    """``{"aten::add.out": {"native": 3, "fallback": {"dtype: self is Double": 1}}}`` since ``reset_counters``."""
    return dict(_C.counters())


def reset_counters() -> None:
    """Count from zero."""
    _C.reset_counters()


class fallback_policy:
    """What a CPU fallback does: ``"count"``, ``"warn"`` (once for each op and reason) or ``"error"``.

    In force at once, for all threads; as a context manager it ends with the block. ``allow`` names ops that may fall
    back under ``"error"``, with or without overload. ``fallback_policy.current()`` tells the policy in force.

    >>> with torch.openvino.fallback_policy("error", allow=["aten::normal_"]):
    ...     model(x)
    """

    def __init__(self, policy: str, allow: Iterable[str] = ()) -> None:
        self._before = (_C.fallback_policy(), _C.allowed_fallbacks())
        _C.set_fallback_policy(policy, list(allow))

    @staticmethod
    def current() -> str:
        return str(_C.fallback_policy())

    def __enter__(self) -> fallback_policy:
        return self

    def __exit__(self, *exc: object) -> None:
        _C.set_fallback_policy(*self._before)


def allowed_fallbacks() -> list[str]:
    """The ops that may fall back under ``"error"``."""
    return list(_C.allowed_fallbacks())


def cache_info() -> dict[str, float]:
    """Of the compiled graphs: ``entries``, ``capacity``, ``hits``, ``misses``, ``evictions``, ``compile_seconds``."""
    return dict(_C.cache_info())


def cache_clear() -> None:
    """Forget all compiled graphs and the statistics."""
    _C.cache_clear()


def cache_resize(capacity: int) -> None:
    """Keep at most ``capacity`` graphs, those used last."""
    if capacity < 1:
        raise ValueError(f"got a capacity of {capacity} graphs, expected at least 1")
    _C.cache_resize(capacity)
