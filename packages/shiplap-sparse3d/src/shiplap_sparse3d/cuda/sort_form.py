"""The description of one table's sort in a launch program: names of its values, and places of its memory."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["TableSort"]


class TableSort(NamedTuple):
    """The sort of one table in a launch program, whose values about it have names with a prefix.

    Attributes:
        rows, parts: as expressions. The table has ``k`` taps.
        table: a tensor, or the offset of the table in the workspace.
        scratch: where in the workspace the sort has its memory.
        outputs: the suffix of the names of the outputs.
        tableless: whether there is no table, so that what is ranked ends with its order, as an expression.
    """

    prefix: str
    rows: str
    parts: str
    table: str | tuple[str, str]
    scratch: str
    outputs: str = ""
    tableless: str = "0"

    @property
    def origins(self) -> str:
        """Return the expression of the workspace offset at which torch's sort writes the row numbers."""
        return f"{self.prefix}keys + 16 * {self.parts} * {self.rows}"

    @property
    def given(self) -> dict[str, str]:
        """Return the kernel argument ``table`` as a dictionary, which is empty unless the table is a tensor of the
        call.
        """
        return {"table": self.table} if isinstance(self.table, str) else {}

    @property
    def placed(self) -> dict[str, tuple[str, str]]:
        """Return the scratch argument ``table`` with its type and workspace offset, or an empty dictionary if the table
        is a tensor of the call.
        """
        return {} if isinstance(self.table, str) else {"table": self.table}
