"""The timer that spconv's tensors carry. Nothing is recorded here: ``torch.profiler`` sees each op by its name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["CUDAKernelTimer"]


class CUDAKernelTimer:
    """A timer with the methods of spconv's timer, which measures nothing. The attribute ``enable`` holds the
    constructor's argument.
    """

    def __init__(self, enable: bool = True) -> None:
        """Store ``enable``. No code here reads it, so neither value starts a timer."""
        self.enable = enable

    @contextmanager
    def namespace(self, name: str) -> Iterator[None]:
        """Return a context manager that does nothing. In spconv, ``name`` groups the timed ranges."""
        yield

    @contextmanager
    def record(self, name: str, stream: int = 0) -> Iterator[None]:
        """Return a context manager that does nothing. In spconv, the block inside it is timed under ``name``."""
        yield

    def get_all_pair_time(self) -> dict[str, float]:
        """Return an empty dictionary, since nothing is timed here. In spconv it maps the name of each range to its time
        in ms.
        """
        return {}
