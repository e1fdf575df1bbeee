"""The timer that spconv's tensors carry. Nothing is recorded here: ``torch.profiler`` sees each op by its name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["CUDAKernelTimer"]


class CUDAKernelTimer:
    """A timer that accepts the calls of models and measures nothing. Only ``enable`` is kept."""

    def __init__(self, enable: bool = True) -> None:
        """Store ``enable``. No code here reads it, so neither value starts a timer."""
        self.enable = enable

    @contextmanager
    def namespace(self, name: str) -> Iterator[None]:
        """Run the block of a context manager. In spconv, ``name`` groups timed ranges, but here nothing is timed."""
        yield

    @contextmanager
    def record(self, name: str, stream: int = 0) -> Iterator[None]:
        """Run the block of a context manager. In spconv it is timed under ``name``, but here nothing is timed."""
        yield

    def get_all_pair_time(self) -> dict[str, float]:
        """Return an empty dictionary, since nothing is timed here. In spconv it holds the time of each range in ms."""
        return {}
