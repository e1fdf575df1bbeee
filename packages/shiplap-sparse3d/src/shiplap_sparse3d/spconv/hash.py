"""``HashTable``: spconv's map from integers to numbers, with sorted keys here, so without probing and races."""

from __future__ import annotations

import torch
from torch import Tensor

from shiplap.plugin_api import error

__all__ = ["HashTable"]

KEYS, VALUES = (torch.int32, torch.int64), (torch.int32, torch.int64, torch.float32, torch.float64)


class HashTable:
    """A map from int32 or int64 keys to values of 32 or 64 bits, which are integers or floats.

    Args:
        device: where keys and values are.
        key_dtype: int32 or int64.
        value_dtype: int32, int64, float32 or float64.
        max_size: most keys the table may hold, or -1 for no limit. It is needed on CUDA.

    Keys lie in ascending order. If a key is inserted twice, it has the value inserted last.
    """

    def __init__(
        self, device: torch.device, key_dtype: torch.dtype, value_dtype: torch.dtype, max_size: int = -1
    ) -> None:
        """Create an empty table. Raise ``SL204`` if spconv has no table of these dtypes. Raise ``SL208`` if the device
        is not the CPU and ``max_size`` is not given.
        """
        where, device = "HashTable", torch.device(device)
        for what, dtype, allowed in (("key_dtype", key_dtype, KEYS), ("value_dtype", value_dtype, VALUES)):
            if dtype not in allowed:
                raise error("SL204", where=f"{where}, {what}", got=dtype, expected=", ".join(map(str, allowed)))
        # spconv's tables on a GPU have a fixed size, and programs pass it.
        if device.type != "cpu" and max_size <= 0:
            raise error("SL208", where=where, got=f"max_size={max_size} on {device}", expected="1 or more")
        self.is_cpu, self.key_dtype, self.value_dtype, self.max_size = (
            device.type == "cpu",
            key_dtype,
            value_dtype,
            max_size,
        )
        self._keys = torch.empty(0, dtype=key_dtype, device=device)
        self._values = torch.empty(0, dtype=value_dtype, device=device)

    def insert(self, keys: Tensor, values: Tensor | None = None) -> None:
        """Set the value of each of ``keys [n]`` to the number at the same position in ``values``, or to 0 if ``values``
        is None. Of equal keys the last one counts.

        Raise ``SL211`` if there are then more than ``max_size`` distinct keys.
        """
        values = torch.zeros_like(keys, dtype=self.value_dtype) if values is None else values
        self._check(keys, values)
        all_keys, all_values = torch.cat([self._keys, keys]), torch.cat([self._values, values])
        # Stable, so that of equal keys the one inserted last is the last.
        order = all_keys.argsort(stable=True)
        ordered = all_keys[order]
        last = torch.ones_like(ordered, dtype=torch.bool)
        last[:-1] = ordered[1:] != ordered[:-1]
        kept = ordered[last]
        if 0 < self.max_size < kept.shape[0]:
            raise error(
                "SL211",
                where="HashTable.insert",
                got=f"{kept.shape[0]} distinct keys",
                expected=f"at most max_size = {self.max_size}",
            )
        self._keys, self._values = kept, all_values[order[last]]

    def query(self, keys: Tensor, values: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the values under ``keys [n]``, and a mask ``bool [n]`` that is true for missing keys.

        If ``values`` is given, the values are written into it, and its elements for missing keys stay as they are.
        Otherwise missing keys have the value 0.
        """
        self._check(keys)
        at, present = self._find(keys)
        if values is None:
            values = torch.zeros_like(keys, dtype=self.value_dtype)
        # An empty table has no row to read, not even for a missing key.
        if self._keys.numel():
            values.copy_(torch.where(present, self._values[at], values))
        return values, ~present

    def insert_exist_keys(self, keys: Tensor, values: Tensor) -> Tensor:
        """Set the values of those of ``keys`` that exist in the table to the numbers at the same positions in
        ``values``. Return ``uint8 [n]``, which is 1 for each missing key.
        """
        self._check(keys, values)
        at, present = self._find(keys)
        self._values[at[present]] = values[present]
        return (~present).to(torch.uint8)

    def assign_arange_(self) -> Tensor:
        """Set the value of each key to its position in the ascending order of the keys. Return the number of keys,
        ``int64 [1]``.
        """
        self._values = torch.arange(self._keys.shape[0], dtype=self.value_dtype, device=self._keys.device)
        return self._count()

    def items(self, max_size: int = -1) -> tuple[Tensor, Tensor, Tensor]:
        """Return copies of the keys, ascending, and of their values, and the number of all keys, ``int64 [1]``. If
        ``max_size`` is not negative, at most that many keys and values are copied.
        """
        stop = self._keys.shape[0] if max_size < 0 else max_size
        return self._keys[:stop].clone(), self._values[:stop].clone(), self._count()

    def _count(self) -> Tensor:
        """Return the number of keys, ``int64 [1]`` on the table's device."""
        return torch.tensor([self._keys.shape[0]], dtype=torch.int64, device=self._keys.device)

    def _find(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Return the position of each of ``keys [n]`` in the table, ``int64 [n]``, and a mask ``bool [n]`` of the keys
        that exist. The position of a missing key is valid but means nothing.
        """
        # A key beyond the last one gets a valid place, and the comparison rejects it.
        at = torch.searchsorted(self._keys, keys).clamp_max(max(self._keys.shape[0] - 1, 0))
        present = self._keys[at] == keys if self._keys.numel() else torch.zeros_like(keys, dtype=torch.bool)
        return at, present

    def _check(self, keys: Tensor, values: Tensor | None = None) -> None:
        """Raise ``SL208`` unless keys and values have the dtypes of the table and equal lengths. If ``values`` is None,
        only the keys are checked.
        """
        for what, tensor, dtype in (("keys", keys, self.key_dtype), ("values", values, self.value_dtype)):
            if tensor is not None and (tensor.dtype != dtype or tensor.shape != (keys.shape[0],)):
                raise error(
                    "SL208",
                    where=f"HashTable, {what}",
                    got=f"{tensor.dtype} {tuple(tensor.shape)}",
                    expected=f"{dtype} [{keys.shape[0]}]",
                )
