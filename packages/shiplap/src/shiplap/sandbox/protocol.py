"""The protocol between this process and one that it does not trust: messages, arguments and locations of results.

Arguments lie in a file without a name (a memfd), one after the other with gaps of random length. A message describes
their shapes. Results are never sent: the process reports where in its memory they lie, and this process reads them
there. All other content of a reply is numbers, texts, and lists of those.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import mmap
import os
import random
import secrets
import socket
import struct
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

MAX_MESSAGE_BYTES = 1 << 20  # the most bytes of a message
MESSAGE_HEAD = struct.Struct("=I")
_libc = ctypes.CDLL(None)
_libc.memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
ARENA_GAP = 64  # bytes, as torch's allocators align
Message = dict[str, Any]


class BrokenMessage(Exception):
    """Raised for an invalid message, and for a connection that has ended."""


def pack_message(message: Message) -> bytes:
    """Return a message as bytes: its length, then JSON."""
    body = json.dumps(message).encode()
    return MESSAGE_HEAD.pack(len(body)) + body


def parse_message_length(head: bytes, longest: int = MAX_MESSAGE_BYTES) -> int:
    """Return the length that the head of a message holds. Raises Broken for more than ``longest`` bytes."""
    (length,) = MESSAGE_HEAD.unpack(head)
    if length > longest:
        raise BrokenMessage(f"a message of {length} bytes")
    return int(length)


def parse_message_body(body: bytes) -> Message:
    """Return the message in ``body``. Raises Broken."""
    try:
        message = json.loads(body)
    except (ValueError, RecursionError) as e:
        raise BrokenMessage(f"no message: {e}") from None
    if not isinstance(message, dict):
        raise BrokenMessage("no message")
    return message


def printable_text(text: str) -> str:
    """Return ``text`` with ``?`` in place of characters that are not printable.

    Control characters of a sender that is not trusted could change the terminal or the order of a line.
    """
    return "".join(c if c.isprintable() else "?" for c in text)


def send_message(connection: socket.socket, message: Message, handles: Sequence[int] = ()) -> None:
    """Send one message, and open files with it."""
    data = pack_message(message)
    sent = socket.send_fds(connection, [data], list(handles)) if handles else 0
    connection.sendall(data[sent:])


def receive_message(
    connection: socket.socket, handles: int = 0, longest: int = MAX_MESSAGE_BYTES
) -> tuple[Message, list[int]]:
    """Receive one message, and at most ``handles`` open files. Raises Broken."""
    head, files = _receive_bytes(connection, MESSAGE_HEAD.size, handles)
    body, more = _receive_bytes(connection, parse_message_length(head, longest), 0)
    return parse_message_body(body), files + more


def _receive_bytes(connection: socket.socket, length: int, handles: int) -> tuple[bytes, list[int]]:
    """Receive ``length`` bytes and at most ``handles`` open files."""
    data, files = b"", []
    while len(data) < length:
        if handles:
            part, got, _, _ = socket.recv_fds(connection, length - len(data), handles)
            files += got
        else:
            part = connection.recv(length - len(data))
        if not part:
            raise BrokenMessage("the connection has ended")
        data += part
    return data, files


def strided_extent(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Return the number of elements from the first to the last of a strided tensor."""
    if 0 in shape:
        return 0
    return 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))


def tree_leaves(value: Any) -> list[Any]:
    """Return the tensors and plain values of nested tuples, lists and dicts, in order. Dicts are ordered by key.

    A container is read as it lies in memory. Its own methods, which could compute the values, do not run.
    """
    if isinstance(value, list):
        return [leaf for v in list.__iter__(value) for leaf in tree_leaves(v)]
    if isinstance(value, tuple):
        return [leaf for v in tuple.__iter__(value) for leaf in tree_leaves(v)]
    if isinstance(value, dict):
        return [leaf for _, v in _items_by_name(value) for leaf in tree_leaves(v)]
    return [] if value is None else [value]


def _items_by_name(values: dict[Any, Any]) -> list[tuple[str, Any]]:
    """Return the keys and values of a dict, sorted by key. A key that is no text is replaced by the
    name of its class.
    """
    named = [(k if type(k) is str else type(k).__name__, v) for k, v in dict.items(values)]
    return sorted(named, key=lambda pair: pair[0])


def structure_of(value: Any) -> str:
    """Return the structure of a result as text, such as ``(.,{'a':.},None)``. A list counts as a tuple."""
    if isinstance(value, (list, tuple)):
        held = list.__iter__(value) if isinstance(value, list) else tuple.__iter__(value)
        return f"({','.join(map(structure_of, held))})"
    if isinstance(value, dict):
        return "{" + ",".join(f"{k}:{structure_of(v)}" for k, v in _items_by_name(value)) + "}"
    return "None" if value is None else "."


def elements_overlap(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Return whether two elements of a strided tensor share memory."""
    reach = 0
    for step, size in sorted(zip(stride, shape, strict=True)):
        if size > 1 and step <= reach:
            return 0 not in shape
        reach += (size - 1) * step
    return False


def flatten_results(values: Any) -> list[Any]:
    """Return the leaves of a result, each tensor as a new object without the attributes and hooks of the old one."""
    return [torch.detach(v) if type(v) in (Tensor, torch.nn.Parameter) else v for v in tree_leaves(values)]


def bits_are_equal(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors of one shape and dtype are equal, bit by bit."""
    a, b = a.contiguous(), b.detach().contiguous()
    if not a.numel():
        return True
    if a.device.type == b.device.type == "cpu":  # torch compares bytes one by one, memcmp is faster
        return bool(_libc.memcmp(a.data_ptr(), b.data_ptr(), a.numel() * a.itemsize) == 0)
    return bool(torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8)))


def is_operator_record(told: Any) -> bool:
    """Return whether a reported value is a list of a name, and a name or shapes."""
    if not isinstance(told, list) or len(told) != 2 or not isinstance(told[0], str):
        return False
    return isinstance(told[1], str) or (isinstance(told[1], list) and all(_is_shape_record(s, 2) for s in told[1]))


def _is_shape_record(told: Any, depth: int) -> bool:
    """Return whether a reported value is a list of sizes, or of such lists for an argument that is
    a list of tensors.
    """
    if not isinstance(told, list):
        return False
    return all((type(n) is int and abs(n) < 1 << 62) or (depth > 0 and _is_shape_record(n, depth - 1)) for n in told)


def describe_tensor(t: Tensor) -> Message:
    """Return shape, strides and dtype of a tensor as plain values."""
    return {
        "dtype": str(t.dtype).removeprefix("torch."),
        "shape": list(t.shape),
        "stride": list(t.stride()),
    }


class ArgumentArena:
    """Arguments that are being laid out in a file without a name, for another process."""

    def __init__(self, seed: int | None = None) -> None:
        """Start an empty layout. Two arenas with the same ``seed`` place the same arguments alike."""
        self._gaps = random.Random(secrets.randbits(62) if seed is None else seed)
        self._parts: list[tuple[int, Tensor]] = []
        # Gaps of random length: a write beyond an argument hits no known place.
        self._size = ARENA_GAP * (1 + self._gaps.randrange(64))

    def pack(self, value: Any) -> Any:
        """Return the description of ``value``: a tensor, a plain value, or a list or dict of these."""
        if isinstance(value, Tensor):
            return {"tensor": {**describe_tensor(value), "at": self._place(value), "device": value.device.type}}
        if isinstance(value, (list, tuple)):
            return {"list": [self.pack(v) for v in value], "tuple": isinstance(value, tuple)}
        if isinstance(value, dict):
            return {"dict": [[str(k), self.pack(v)] for k, v in value.items()]}
        if isinstance(value, (torch.dtype, torch.device)):
            return {"torch": str(value).removeprefix("torch."), "kind": type(value).__name__}
        if isinstance(value, float):
            return {"float": value.hex()}
        if value is None or isinstance(value, (bool, int, str)):
            return {"plain": value}
        raise TypeError(f"an argument of type {type(value).__name__}")

    def _place(self, t: Tensor) -> int:
        """Reserve a place for a tensor, and return its offset."""
        length = strided_extent(t.shape, t.stride())
        flat = torch.as_strided(t.detach(), (length,), (1,), t.storage_offset()).cpu()
        at = self._size
        self._parts.append((at, flat))
        self._size = at + -(-length * t.itemsize // ARENA_GAP) * ARENA_GAP + ARENA_GAP * self._gaps.randrange(64)
        return at

    def make(self) -> int:
        """Return a new open file of the right length, filled with zeros, which the caller closes.

        The file is sealed, so that no process can change its length.
        """
        handle = os.memfd_create("arguments", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(handle, max(self._size, mmap.PAGESIZE))
        fcntl.fcntl(handle, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        return handle

    def write(self, handle: int = -1) -> int:
        """Write all tensors into ``handle``, or into a new file, and return the open file."""
        handle = self.make() if handle < 0 else handle
        with mmap.mmap(handle, 0) as memory:
            for at, flat in self._parts:
                if flat.numel():
                    room = torch.frombuffer(memory, dtype=flat.dtype, offset=at, count=flat.numel())
                    room.copy_(flat)
                    del room
        return handle


def packed_offsets(value: Any) -> list[int]:
    """Return the offsets of the tensors of a packed value, in order."""
    if "tensor" in value:
        return [int(value["tensor"]["at"])]
    inner = value["list"] if "list" in value else [v for _, v in value.get("dict", ())]
    return [at for v in inner for at in packed_offsets(v)]


def unpack_arguments(value: Any, memory: Any) -> Any:
    """Return the value of a description, in the process that has mapped the file. The inverse of :meth:`Arena.pack`."""
    if "plain" in value:
        return value["plain"]
    if "float" in value:
        return float.fromhex(value["float"])
    if "torch" in value:
        return getattr(torch, value["torch"]) if value["kind"] == "dtype" else torch.device(value["torch"])
    if "list" in value:
        listed = [unpack_arguments(v, memory) for v in value["list"]]
        return tuple(listed) if value["tuple"] else listed
    if "dict" in value:
        return {k: unpack_arguments(v, memory) for k, v in value["dict"]}
    told = value["tensor"]
    dtype, length = getattr(torch, told["dtype"]), strided_extent(told["shape"], told["stride"])
    if not length:
        return torch.empty_strided(told["shape"], told["stride"], dtype=dtype, device=told["device"])
    flat = torch.frombuffer(memory, dtype=dtype, offset=told["at"], count=length)
    if told["device"] != "cpu":
        flat = flat.to(told["device"])
    return flat.as_strided(told["shape"], told["stride"])
