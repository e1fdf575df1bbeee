"""The description of one table's sort in a launch program: names of its values, and places of its memory."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["TableSort"]


class TableSort(NamedTuple):
    """The sort of one neighbour table in a launch program, a sequence of kernel launches. The names of the program's
    values for it begin with ``prefix``.

    Attributes:
        rows, parts: expressions for the numbers of rows and of parts (groups of columns that are sorted separately).
            The table has ``k`` columns.
        table: the name of a tensor, or the dtype and the workspace offset of the table.
        scratch: the workspace offset of the memory of the sort.
        outputs: the suffix of the names of the outputs.
        tableless: an expression that is 1 if there is no table. A ranked sort then ends with the order of the rows.
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
        """The expression of the workspace offset at which torch's sort writes the row numbers."""
        return f"{self.prefix}keys + 16 * {self.parts} * {self.rows}"

    @property
    def given(self) -> dict[str, str]:
        """The kernel argument ``table`` as a dictionary. It is empty unless the table is a tensor of the call."""
        return {"table": self.table} if isinstance(self.table, str) else {}

    @property
    def placed(self) -> dict[str, tuple[str, str]]:
        """The scratch argument ``table`` with its dtype and workspace offset, as a dictionary. It is empty if the table
        is a tensor of the call.
        """
        return {} if isinstance(self.table, str) else {"table": self.table}
