"""Asynchronous errors of CUDA kernels. A kernel that meets a bad value writes one word, and the next call raises the
error.

A synchronisation in every call would cost more time than most kernels do. The word lies in pinned host memory. A kernel
reaches it by its address, and the host reads it without a request to the device. Nothing is written unless there is an
error. A captured graph writes the same word, so that errors of replays are raised as well.
"""

from __future__ import annotations

import ctypes
import hashlib

import torch
from torch import Tensor

from shiplap.errors import error
from shiplap.torch_private.dispatcher_calls import outside_modes

ROW_BITS = 40  # of the word: the number of what is wrong. The code of the message lies above


class LateErrors:
    """The messages of errors that kernels report after their launch, and an error word for each device. An error word
    is an integer in pinned host memory, which is 0 until a kernel reports an error.

    Every launcher calls :meth:`word` first, which raises an error that an earlier kernel wrote. A kernel gets the
    address of the word and the codes of its messages as integers. To report an error, it stores ``code << 40 | row`` in
    the word.

    Example:
        >>> errors = LateErrors()
        >>> errors.code("mylib::take", "index {row} is outside the table")
        7709519
    """

    def __init__(self) -> None:
        """Start without messages and without error words."""
        self._messages: dict[int, tuple[str, str]] = {}
        self._codes: dict[tuple[str, str], int] = {}
        self._words: dict[torch.device, tuple[Tensor, ctypes.c_int64]] = {}

    def code(self, op: str, message: str) -> int:
        """Return the integer by which a kernel of ``op`` reports the error ``message``. ``{row}`` in the message stands
        for the row that the kernel stores together with the integer. The integer comes from a hash, so it is the same
        in every process unless two messages have the same hash.
        """
        known = self._codes.get((op, message))
        return known if known is not None else self._register(op, message)

    def _register(self, op: str, message: str) -> int:
        """Register a new message of ``op`` and return its number. The number is a hash of both, or the next free one if
        another message has that hash.
        """
        digest = hashlib.sha256(f"{op}\0{message}".encode()).digest()
        code = int.from_bytes(digest[:3], "little") & 0x7FFFFF or 1
        # Two messages with one hash: the next free number is taken.
        while self._messages.setdefault(code, (op, message)) != (op, message):
            code = code % 0x7FFFFF + 1
        self._codes[op, message] = code
        return code

    def message(self, code: int) -> tuple[str, str]:
        """Return the op and the message of the number ``code``. For an unknown number, return ``"a kernel"`` and a
        message that contains the number.
        """
        return self._messages.get(code, ("a kernel", f"code {code}, row {{row}}"))

    def word(self, device: torch.device) -> int:
        """Return the address of the error word of ``device``, for a launch. The word is an integer in host memory to
        which kernels write errors. If an earlier kernel has written an error there, raise ``SL211`` with its message.
        """
        memory, value = self._words.get(device) or self._allocate_word(device)
        # A plain read of host memory: the device is not waited for.
        if value.value:
            self.poll(device)
        return memory.data_ptr()

    def address(self, device: torch.device) -> int:
        """Return the address of the error word of ``device`` without reading the word. The word is an integer in host
        memory to which kernels write errors.
        """
        memory, _ = self._words.get(device) or self._allocate_word(device)
        return memory.data_ptr()

    def _allocate_word(self, device: torch.device) -> tuple[Tensor, ctypes.c_int64]:
        """Return the error word of ``device``, an integer in host memory to which kernels write errors. Return it as a
        tensor and as a ctypes view of the tensor's memory. The memory is allocated at the first request.
        """
        with outside_modes():
            memory = self.memory(device)
        return self._words.setdefault(device, (memory, ctypes.c_int64.from_address(memory.data_ptr())))

    def memory(self, device: torch.device) -> Tensor:
        """Return a tensor of one int64 with value 0 in pinned host memory. Kernels of ``device`` can write to its
        address.
        """
        # Pinned memory is mapped into the device's addresses and never moves.
        return torch.zeros(1, dtype=torch.int64, pin_memory=device.type == "cuda")

    def poll(self, device: torch.device) -> None:
        """Raise ``SL211`` if a kernel that has ended wrote an error into the error word of ``device``. Each error is
        raised once. The error word is an integer in host memory that holds the code of a message and a row.
        """
        _, value = self._words.get(device) or self._allocate_word(device)
        told = value.value
        if told:
            # Cleared first, so that the error is raised once.
            value.value = 0
            op, message = self.message(told >> ROW_BITS)
            raise error("SL211", where=op, got=message.format(row=told & ((1 << ROW_BITS) - 1)))
