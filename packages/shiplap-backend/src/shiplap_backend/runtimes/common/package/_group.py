"""Collectives between processes through the host: Gloo works on copies in host memory, which are copied back."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


def register(name: str) -> None:
    """Register the device's backend of ``torch.distributed``, for ``init_process_group("<name>")``.

    It takes tensors of the device and of the CPU.
    """

    def made(store: Any, rank: int, size: int, timeout: timedelta) -> HostGroup:
        """Return the ``HostGroup`` of the rank ``rank`` among ``size`` ranks. The ranks find each other by ``store``.
        ``timeout`` is that of Gloo, which runs the collectives.
        """
        return HostGroup(name, store, rank, size, timeout)

    dist.Backend.register_backend(name, made, devices=[name, "cpu"])


class HostWork(dist.Work):
    """A collective that Gloo runs on copies of the tensors in host memory.

    When ``wait`` returns, the results are in the caller's tensors.
    """

    def __init__(self, work: Any, results: Any, copies: Any) -> None:
        """Create the record of ``work``, which Gloo runs on ``copies``.

        ``wait`` copies their values into ``results``.
        """
        super().__init__()
        self._work, self._results, self._copies = work, results, copies

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait for Gloo, copy its results into the caller's tensors, and return True.

        If ``timeout`` is zero, Gloo's default applies.
        """
        if self._copies is not None:
            self._work.wait(timeout) if timeout else self._work.wait()
            # Cleared first, so that a second call does not copy again.
            copies, self._copies = self._copies, None
            with torch.no_grad():
                for result, copy in zip(_nested_tensors(self._results), _nested_tensors(copies), strict=True):
                    if result is not copy:
                        result.copy_(copy)
        return True

    def is_completed(self) -> bool:
        """Return whether Gloo has finished the work."""
        return bool(self._copies is None or self._work.is_completed())

    def is_success(self) -> bool:
        """Return whether the results are in the caller's tensors."""
        return self._copies is None

    def get_future(self) -> torch.futures.Future[Any]:
        """Wait for the results, and return them as a future that is already done.

        Work that follows in the current stream can thus use them.
        """
        self.wait()
        results = _nested_tensors(self._results)
        # Futures must name their devices. Those of the CPU are not named.
        places: list[int | str | torch.device] = list({t.device for t in results if t.device.type != "cpu"})
        future: torch.futures.Future[Any] = torch.futures.Future(devices=places)
        future.set_result(results)
        return future

    def _source_rank(self) -> int:
        """Return the rank from which a message was received."""
        return int(self._work._source_rank())


class HostGroup(dist.ProcessGroup):
    """A process group of the device.

    Its collectives are those of Gloo, which run on copies of the tensors in host memory.
    """

    def __init__(self, name: str, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        """Create the group of the backend ``name`` for the rank ``rank`` among ``size`` ranks, with a group of Gloo.

        The ranks find each other by ``store``. ``timeout`` is that of Gloo.
        """
        place: list[Any] = [rank, size]  # torch's stub has another signature, of what no class in Python derives from
        super().__init__(*place)
        self._backend, self._called, self._described = name, "", ""
        self._host = dist.distributed_c10d.ProcessGroupGloo(store, rank, size, timeout=timeout)

    def getBackendName(self) -> str:
        """Return the backend's name, by which ``init_process_group`` selects it."""
        return self._backend

    def _get_backend(self, device: torch.device) -> Any:
        """Return the group of Gloo, from which torch reads what this group can do, such as sending messages as one."""
        return self._host

    def setGroupName(self, name: str) -> None:
        """Store the name that torch gives the group."""
        self._called = name

    def getGroupName(self) -> str:
        """Return the name that torch gave the group."""
        return self._called

    def setGroupDesc(self, text: str) -> None:
        """Store torch's description of the group."""
        self._described = text

    def getGroupDesc(self) -> str:
        """Return torch's description of the group."""
        return self._described


def _nested_tensors(value: Any) -> list[torch.Tensor]:
    """Return the tensors in ``value``, a tensor or nested lists and tuples, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    return [t for item in value for t in _nested_tensors(item)] if isinstance(value, (list, tuple)) else []


def _on_host(value: Any) -> Any:
    """Return ``value``, a tensor or nested lists, with each tensor replaced by a contiguous copy in host memory. Tuples
    become lists.
    """
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().contiguous()
    return [_on_host(v) for v in value] if isinstance(value, (list, tuple)) else value


# Releases of torch call these by one name or by the other, in the group and in Gloo.
_RENAMED = {
    "_allgather_base": "all_gather_single",
    "allgather_into_tensor_coalesced": "all_gather_single_coalesced",
    "_reduce_scatter_base": "reduce_scatter_single",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_single_coalesced",
    "alltoall_base": "all_to_all_single",
}
_WRITES = (  # their first argument
    "allreduce",
    "allreduce_coalesced",
    "reduce",
    "broadcast",
    "allgather",
    "allgather_coalesced",
    "gather",
    "scatter",
    "reduce_scatter",
    "alltoall",
    "recv",
    "recv_anysource",
    *_RENAMED,
)


def _make_collective(name: str, writes: bool) -> Callable[..., HostWork]:
    """Return the method ``name`` of ``HostGroup``, which runs Gloo's collective on copies in host memory.

    If ``writes`` is true, the collective writes to its first argument, which is copied back from the host. Otherwise
    nothing is copied back.
    """

    def called(self: HostGroup, *args: Any, **kwargs: Any) -> HostWork:
        """Start Gloo's collective ``name`` on copies of the arguments, and return the work."""
        copies = [_on_host(value) for value in args]
        # Torch renamed some collectives, so the group and Gloo may know different names.
        host = getattr(self._host, name, None) or getattr(self._host, _RENAMED.get(name, name))
        work = host(*copies, **kwargs)
        # Only written tensors are copied back to the device.
        return HostWork(work, args[0] if writes else [], copies[0] if writes else [])

    called.__name__, called.__doc__ = name, f"Gloo's ``{name}`` on copies in host memory."
    return called


for _name in _WRITES:
    setattr(HostGroup, _name, _make_collective(_name, writes=True))
    if _name in _RENAMED:
        setattr(HostGroup, _RENAMED[_name], getattr(HostGroup, _name))
for _name in ("send", "barrier", "monitored_barrier"):
    setattr(HostGroup, _name, _make_collective(_name, writes=False))
