"""Deliberate crashes that leave neither a traceback in the log nor a core file."""

from __future__ import annotations

import ctypes
import faulthandler
import resource


def read_unmapped(address: int = 0) -> None:
    """End this process with SIGSEGV by reading a byte at ``address``, which must not be mapped. No traceback is
    printed, and no core file is written.
    """
    faulthandler.disable()  # pytest has enabled it, and a fork inherits that
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    print(ctypes.c_byte.from_address(address).value)
