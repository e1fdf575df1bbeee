"""The lookup tables of eager templates, built on the host and kept on the device for calls of equal sizes."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping

import torch
from torch import Tensor

from shiplap.declare.values import Env, EnvValue
from shiplap.errors import error
from shiplap.torch_private.dispatcher_calls import outside_modes

LIMIT = 256  # tables kept: a model has a few sizes


class DeviceTable:
    """A cache of lookup tables, which are tensors on a device. ``build`` makes a table from the sizes and scalars of a
    call.

    The key of a table consists of the sizes and scalars that ``build`` reads. For example, all batch sizes then use one
    table of filter taps.
    """

    def __init__(self, where: str, build: Callable[..., Tensor]) -> None:
        """Set ``build``, which makes a table from sizes, and ``where``, its place in errors. No table is made yet."""
        self.where, self.build = where, build
        self.looked_at: tuple[str, ...] = ()
        self.tables: dict[Hashable, Tensor] = {}
        self.captured: dict[int, Tensor] = {}  # CUDA graphs hold their addresses: never freed

    def __call__(self, env: Env, device: torch.device) -> Tensor:
        """Return the table for these sizes on ``device``, made at the first call. Raise ``SL305`` if it is missing
        while a CUDA graph is captured.
        """
        key = self._key(env, device)
        capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        table = self.tables.get(key)
        if table is None:
            if capturing:
                raise error(
                    "SL305",
                    where=self.where,
                    got="sizes that it has not been called with",
                    expected="one call before the capture",
                    what="a table of the kernel is not on the device yet",
                    fix="call the op once with tensors of these sizes, then capture",
                )
            table = self._build_table(env, device)
        if capturing:
            # Each replay of the graph reads the memory of the table, also after newer tables have replaced it.
            self.captured.setdefault(id(table), table)
        return table

    def _build_table(self, env: Env, device: torch.device) -> Tensor:
        """Build the table of the sizes ``env``, store it and return it. Drop all earlier tables if ``build`` has read a
        size that it did not read before, or if 256 tables are stored.
        """
        seen = _TrackedSizes(env)
        # Kept beyond this call, so it must be no inference tensor and no fake.
        with outside_modes():
            table = self.build(seen).to(device)
        looked_at = tuple(sorted({*self.looked_at, *seen.names}))
        if looked_at != self.looked_at or len(self.tables) >= LIMIT:
            if device.type == "cuda":
                torch.cuda.synchronize(device)  # a kernel on another stream may still read what is dropped now
            self.looked_at, self.tables = looked_at, {}
        self.tables[self._key(env, device)] = table
        return table

    def _key(self, env: Env, device: torch.device) -> Hashable:
        """Return the key of the table for ``env`` on ``device``. It consists of the device, the default dtype, and the
        sizes and scalars that ``build`` reads. A table made without a dtype depends on the default dtype.
        """
        return (device, torch.get_default_dtype(), *[_plain_table_key(env[name]) for name in self.looked_at])


class _TrackedSizes(Mapping[str, EnvValue]):
    """The sizes of a call, as a mapping that records the names that are read."""

    def __init__(self, env: Env) -> None:
        """Set the sizes by name. None has been read."""
        self.env, self.names = env, set[str]()

    def __getitem__(self, name: str) -> EnvValue:
        """Return the size or scalar ``name``, with a list as a tuple. Record in ``names`` that it was read."""
        value = self.env[name]
        self.names.add(name)
        return _plain_table_key(value)

    def __iter__(self) -> Iterator[str]:
        """Return an iterator over all names, and record that all were read."""
        # A loop over the names may depend on all of them.
        self.names.update(self.env)
        return iter(self.env)

    def __len__(self) -> int:
        """Return the number of all sizes, read or not."""
        return len(self.env)


def _plain_table_key(value: EnvValue) -> EnvValue:
    """Return a size or scalar in the form that a key can hold. A list becomes a tuple, which can be hashed."""
    return tuple(value) if isinstance(value, list) else value
