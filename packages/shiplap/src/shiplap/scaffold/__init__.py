"""Draft the source of a declaration from the description that an existing function carries. Shared by init and
doctor.
"""

from shiplap.scaffold.unfinished import UnfinishedOp, unfinished

__all__ = ["UnfinishedOp", "unfinished"]
