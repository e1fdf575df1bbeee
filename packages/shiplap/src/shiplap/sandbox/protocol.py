"""The protocol between this process and its child processes: typed messages, arguments and locations of results.

A message is its length and a struct in msgpack. A process that is not trusted may send any bytes: they are decoded as
one of the few structs that reply to the pending request, with bounded fields, or the process is ended. Arguments lie in
a file without a name (a memfd), one after the other with gaps of random length, and a message describes their shapes.
Results are never sent: a reply says where in the memory of the process they lie, and this process reads them there.
"""

from __future__ import annotations

import ctypes
import mmap
import socket
import struct
import time
from collections.abc import Sequence
from functools import cache, lru_cache
from operator import getitem
from typing import Annotated, Any, Generic, TypeAlias, TypeVar, Union, get_args

import msgspec
import torch
from msgspec import Meta
from torch import Tensor

from shiplap.sandbox.device_memory import HANDLE_BYTES
from shiplap.sandbox.process_memory import make_sealed_file

MAX_MESSAGE_BYTES = 1 << 20  # the most bytes of a reply
MAX_REQUEST_BYTES = 1 << 26  # bytes
MESSAGE_HEAD = struct.Struct("=I")
NO_ADDRESS = ctypes.c_void_p(-1).value  # the answer of mmap if it fails
_libc = ctypes.CDLL(None)

Size = Annotated[int, Meta(ge=0, lt=1 << 62)]
Sizes = Annotated[list[Size], Meta(max_length=64)]
TypeName = Annotated[str, Meta(max_length=32)]
ReportText = Annotated[str, Meta(max_length=400)]
MOST_OPERATORS = 2000  # different uses of operators in a list
ReportTexts = Annotated[list[ReportText], Meta(max_length=1000)]
Structure = Annotated[str, Meta(max_length=1 << 16)]
Nanoseconds = Annotated[float, Meta(ge=0, lt=1e15)]  # NaN is refused as well


class BrokenMessage(Exception):
    """An error for an invalid message or for a connection that has ended."""


# --- the messages -----------------------------------------------------------------------------------------------------


class Message(msgspec.Struct, frozen=True, tag=True, array_like=True, forbid_unknown_fields=True):
    """The base class of all messages. The name of a class is the tag of its messages."""


class Reply(Message, frozen=True):
    """The base class of all replies."""


ReplyT = TypeVar("ReplyT", bound=Reply)


class Request(Message, Generic[ReplyT], frozen=True):
    """The base class of all requests. Its type parameter is the class of the reply."""


class TensorLocation(Message, frozen=True):
    """The location, dtype, shape, strides and device type of a tensor. On the host, ``at`` is an offset in a file of
    arguments or an address in the memory of a process.

    On a GPU, ``at`` is an offset in the allocation with the handle ``block``. If the handle is empty, it is an offset
    in the block of the arguments.
    """

    dtype: TypeName
    shape: Sizes
    stride: Sizes
    at: Size
    device: TypeName
    block: Annotated[bytes, Meta(max_length=HANDLE_BYTES)] = b""

    def __post_init__(self) -> None:
        """Raise ``ValueError`` unless there is one stride for each dim."""
        if len(self.stride) != len(self.shape):
            raise ValueError("not one stride for each dim")

    @classmethod
    def of(cls, t: Tensor, at: int, block: bytes = b"") -> TensorLocation:
        """Return the location, dtype, shape, strides and device type of the tensor ``t``.

        ``at`` is the address of the tensor, or its offset in a file or block of memory. If the tensor is on a GPU,
        ``block`` is the handle to its allocation. An empty ``block`` stands for the block of the arguments.
        """
        return cls(*_describe_form(t.dtype, t.shape, t.stride()), at, t.device.type, block)


@lru_cache(maxsize=256)  # a batch has many results of one form
def _describe_form(dtype: torch.dtype, shape: torch.Size, stride: tuple[int, ...]) -> tuple[str, list[int], list[int]]:
    """Return the name of a dtype without ``torch.``, and the sizes and the strides of a tensor as lists. The lists are
    cached and must not be changed.
    """
    return str(dtype).removeprefix("torch."), list(shape), list(stride)


class Foreign(Message, frozen=True):
    """A result that is neither a strided tensor nor a number. It has a description, such as the name of its class."""

    kind: ReportText


class PackedList(Message, frozen=True):
    """A list of packed arguments. If ``is_tuple`` is true, it stands for a tuple."""

    items: list[Packed]
    is_tuple: bool


class PackedDict(Message, frozen=True):
    """A dict of packed arguments with strings as keys."""

    items: dict[str, Packed]


class PackedText(Message, frozen=True):
    """A value that is sent as a string, with its kind. The kind is ``"dtype"``, ``"device"``, or ``"int"`` for an
    integer of more than 64 bits.
    """

    kind: str
    text: str


Place: TypeAlias = TensorLocation | Foreign | bool | Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)] | float
Packed: TypeAlias = TensorLocation | PackedList | PackedDict | PackedText | bool | int | float | str | None
Places: TypeAlias = Annotated[list[Place], Meta(max_length=10_000)]


class Done(Reply, frozen=True):
    """The reply to a request without a result."""


class Answer(Reply, frozen=True):
    """A reply to a yes-or-no question. ``yes`` is true if the answer is yes."""

    yes: bool


class Number(Reply, frozen=True):
    """A reply with a number, such as the id of a process or its status as ``os.waitpid`` returns it."""

    value: int


class Failed(Reply, frozen=True):
    """A reply to a request that has raised an error, with the text of the error."""

    text: ReportText


class Declined(Reply, frozen=True):
    """A reply with the reason why a callable does not support the arguments of the request."""

    text: ReportText


class Locked(Reply, frozen=True):
    """The first message of a sandboxed process. For each facility of the sandbox, it has the reason why the facility is
    not in force, or an empty string.
    """

    missing: Annotated[dict[ReportText, ReportText], Meta(max_length=20)]


class ResultPlaces(Reply, frozen=True):
    """A reply with the locations of results. ``complete`` is true if all requested results are among them."""

    outs: Places
    complete: bool = True


class Gradients(Reply, frozen=True):
    """A reply with the locations of gradients, and of the ``results`` of the call that was differentiated. ``complete``
    is true if the gradients of all requested parameters are among them.
    """

    outs: Places
    results: Places
    complete: bool = True


class Inspection(Reply, frozen=True):
    """A reply with what the target has done to its process. It lists the names of replaced functions, of the functions
    with which it read frames or objects of other code, and of changed settings. It also has the number of threads that
    run the target's code.
    """

    changed: ReportTexts
    looked: ReportTexts
    left: ReportTexts
    threads: int


class CallTraces(Message, frozen=True):
    """Signs of what a call has left behind. ``raced`` says whether a result was incomplete when the call's own stream
    was done. ``left`` has the names of changed settings, and ``threads`` the number of running threads. ``altered`` has
    the changes of the arguments' tensors beside their values (see ``changed_facts``).
    """

    raced: bool = False
    left: ReportTexts = []
    threads: int = 0
    altered: ReportTexts = []


class CallPlaces(Message, frozen=True):
    """The results of a call: for each, the location of a tensor's data in memory, or the number itself. ``structure``
    describes as a string how tuples, lists and dicts nest them. It is None if the process does not report it.
    """

    outs: Places
    structure: Structure | None = None


class TargetCalled(Reply, frozen=True):
    """A reply with the locations of a call's results, the signs of what it has left behind, and its times in
    nanoseconds. ``spent`` is by the clock of the process and ``device`` by events of the GPU, or None without one.
    ``late`` is the time for which other streams still worked.
    """

    places: CallPlaces
    spent: Nanoseconds
    device: Nanoseconds | None = None
    late: Nanoseconds = 0.0
    traces: CallTraces = CallTraces()


class OperatorUse(Message, frozen=True):
    """The name of a torch operator, the sizes of its arguments (of each tensor in a list), and how often it ran so."""

    name: ReportText
    shapes: Annotated[list[Annotated[list[Size | Sizes], Meta(max_length=1000)]], Meta(max_length=1000)]
    count: Annotated[int, Meta(ge=1, lt=1 << 32)] = 1


class OperatorList(Reply, frozen=True):
    """A reply with the torch operators that a call has run, the locations of its results, and the signs of what it has
    left behind.
    """

    operators: Annotated[list[OperatorUse], Meta(max_length=MOST_OPERATORS)]
    outs: Places
    traces: CallTraces


class BatchCalled(Reply, frozen=True):
    """A reply with the locations of the results of each call of a batch, and the time of all calls together in
    nanoseconds by the clock of the process.
    """

    calls: Annotated[list[CallPlaces], Meta(max_length=1000)]
    spent: Nanoseconds


class Fork(Request[Number], frozen=True):
    """A request to fork a process for code that is not trusted. The process may write to the folder ``scratch``, and
    read ``readable`` but not ``hidden``. If ``locked`` is true, it is locked into the sandbox. If ``device`` is true,
    it may use an accelerator. It has ``threads`` threads of torch and the additional variables in ``environment``.
    ``file_size`` limits the bytes of a file that it writes.
    """

    scratch: str
    readable: list[str]
    hidden: list[str]
    locked: bool
    device: bool
    threads: int
    environment: dict[str, str]
    file_size: int


class AwaitExit(Request[Number], frozen=True):
    """A request to wait for the end of a process that the launcher has forked. The reply is its status from
    ``os.waitpid``.
    """

    pid: int


class Rest(Request[Answer], frozen=True):
    """A request to the launcher to wait at most ``seconds`` for the next request, and to end if none arrives. The reply
    says whether all forked processes are gone.
    """

    seconds: float


class ImportModule(Request[Done], frozen=True):
    """A request to import the named module of Shiplap. All processes that are forked later then have it. If the name is
    empty, nothing is imported.
    """

    module: str = ""


class ImportLibraries(Request[Number], frozen=True):
    """A request to import the ``modules`` of torch and Triton that exist, so that all processes that are forked later
    have them. Files that these need are put into ``folder``. The reply is the number of modules before the first one
    after whose import no forked process can use an accelerator.
    """

    modules: list[str]
    folder: str


class CheckDevice(Request[ResultPlaces], frozen=True):
    """A request to add one to the tensor in the arguments, on an accelerator."""

    args: Packed


class LoadTarget(Request[Done], frozen=True):
    """A request to import a target, which is the code under test or its reference, from the module or file ``home``.
    The target is the first of ``names`` that exists there. A class is constructed from ``init`` after torch was seeded
    with ``seed``, and gets the parameters ``state``. ``path`` is added to ``sys.path``. If ``compile`` is true,
    ``torch.compile`` is applied. If ``thorough`` is true, later changes of torch's operators are detected.
    """

    home: str
    names: list[str]
    kind: str
    path: list[str]
    seed: int
    init: Packed = None
    state: Packed = None
    compile: bool = False
    thorough: bool = False


class LoadParameters(Request[Answer], frozen=True):
    """A request to load values into the parameters and buffers of the target, by name. The reply says whether the
    target has all of the names. If not, nothing is loaded.
    """

    state: Packed


class ReadState(Request[ResultPlaces], frozen=True):
    """A request for the locations of the target module's parameters and buffers with the names in ``names``."""

    names: list[str]


class Inspect(Request[Inspection], frozen=True):
    """A request to compare the interpreter with its state before the target was loaded."""


class CallTarget(Request[TargetCalled], frozen=True):
    """A request to call the target. If ``again`` is true, the call uses the tensors of the last call, into which this
    process has written new values. Otherwise it gets new tensors from ``args``. ``keep`` is the number of earlier calls
    whose results are kept. ``conditions`` names those of the caller in ``call_conditions.CONDITIONS``, or is an empty
    string for the usual ones.
    """

    args: Packed
    again: bool = False
    keep: int = 1 << 30  # earlier calls whose results stay in use
    conditions: TypeName = ""


class ListOperators(Request[OperatorList], frozen=True):
    """A request to call the target on ``args`` and to list the operators of torch that the call runs."""

    args: Packed


class Differentiate(Request[Gradients], frozen=True):
    """A request to compute the gradients of the arguments and of the parameters named in ``parameters``. ``seeds`` are
    the gradients of the floating-point results. ``wanted`` has a flag for each floating-point argument, which says
    whether it requires a gradient.
    """

    args: Packed
    seeds: Packed
    parameters: list[str]
    wanted: list[bool]


class SetEvaluation(Request[Answer], frozen=True):
    """A request to set the target module to evaluation if ``on`` is true, and otherwise back to its own modes. The
    reply says whether the target is a module.
    """

    on: bool


class PrepareBatch(Request[Done], frozen=True):
    """A request to prepare a batch of calls, one for each set of arguments in ``sets``. The values of the arguments may
    be replaced before the calls run.

    ``index`` is the number of a candidate of the task. If it is -1, the calls bind the arguments and compute nothing.
    ``poison`` is a byte that fills the memory which a call allocates, or None to leave that memory as it is. Batches
    whose numbers are not in ``kept`` are released.
    """

    batch: int
    kept: list[int]
    index: int
    poison: int | None
    sets: list[Packed]


class ReleaseBatches(Request[Done], frozen=True):
    """A request to release the memory of the batches whose numbers are not in ``kept``."""

    kept: list[int]


class RunBatch(Request[BatchCalled], frozen=True):
    """A request to run each prepared call of a batch once. If ``repeats`` is not 0, the first call is run that many
    times instead, and its results are not reported.

    If ``gated`` is true, the calls are queued on a GPU. Their stream waits for the gate, a word in the block of the
    arguments, until this process writes it.
    """

    batch: int
    repeats: int = 0
    gated: bool = False


# --- the framing ------------------------------------------------------------------------------------------------------


def pack_message(message: Message) -> bytes:
    """Return a message as bytes for the connection. They are the length of its body, then the body in msgpack."""
    body = msgspec.msgpack.encode(message)
    return MESSAGE_HEAD.pack(len(body)) + body


def parse_message_length(head: bytes, longest: int = MAX_MESSAGE_BYTES) -> int:
    """Return the length in bytes of the body of a message, of which ``head`` has the first bytes. Raise
    ``BrokenMessage`` if it is more than ``longest``.
    """
    (length,) = MESSAGE_HEAD.unpack(head)
    if length > longest:
        raise BrokenMessage(f"a message of {length} bytes")
    return int(length)


@cache
def decoder_of(kinds: tuple[type[Message], ...]) -> msgspec.msgpack.Decoder[Any]:
    """Return the msgpack decoder for messages of the classes ``kinds``. The decoder is cached."""
    return msgspec.msgpack.Decoder(getitem(Union, kinds))  # a class since Python 3.14


@cache
def reply_of(request: type[Request[ReplyT]]) -> type[ReplyT]:
    """Return the class of the reply to requests of the class ``request``. It is the type argument with which
    ``request`` is derived from ``Request``.
    """
    reply: type[ReplyT] = get_args(vars(request)["__orig_bases__"][0])[0]
    return reply


def parse_message(body: bytes, *kinds: type[Message]) -> Any:
    """Return the message in the bytes ``body``, an instance of one of the classes ``kinds``. Raise ``BrokenMessage``
    for anything else.
    """
    try:
        return decoder_of(kinds).decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as e:
        raise BrokenMessage(f"no valid message: {printable_text(str(e))[:200]}") from None


def printable_text(text: str) -> str:
    """Return ``text`` with ``?`` in place of characters that are not printable. Control characters in a text of the
    sandboxed code could change the user's terminal.
    """
    return "".join(c if c.isprintable() else "?" for c in text)


def send_message(connection: socket.socket, data: bytes, handles: Sequence[int] = ()) -> None:
    """Send the packed message ``data`` on the connection, together with the open file descriptors ``handles``."""
    sent = socket.send_fds(connection, [data], list(handles)) if handles else 0
    connection.sendall(data[sent:])


def receive_message(
    connection: socket.socket, *kinds: type[Message], handles: int = 0, longest: int = MAX_MESSAGE_BYTES
) -> tuple[Any, list[int]]:
    """Receive one message and at most ``handles`` file descriptors. Return the message, an instance of one of
    ``kinds``, and the descriptors.

    Raise ``BrokenMessage`` if the message is invalid or longer than ``longest`` bytes, or if the connection has ended.
    """
    head, files = _receive_bytes(connection, MESSAGE_HEAD.size, handles)
    body, more = _receive_bytes(connection, parse_message_length(head, longest), 0)
    return parse_message(body, *kinds), files + more


def _receive_bytes(connection: socket.socket, length: int, handles: int) -> tuple[bytes, list[int]]:
    """Receive ``length`` bytes and at most ``handles`` file descriptors, and return both. Raise ``BrokenMessage`` if
    the connection ends before.
    """
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


class Heartbeat:
    """Memory that two processes share, by which one of them sees how long a run of the other takes. It holds the number
    of the run in progress (-1 if there is none) and the time of its start.
    """

    FORM = struct.Struct("=qd")

    def __init__(self, handle: int = -1) -> None:
        """Map the shared memory with the descriptor ``handle``. If it is -1, make new shared memory, whose descriptor
        becomes ``self.handle``.
        """
        self.handle = handle if handle >= 0 else make_sealed_file("heartbeat", self.FORM.size)
        self._memory = mmap.mmap(self.handle, self.FORM.size)

    def begin_run(self, index: int) -> None:
        """Write ``index``, the number of the run that begins or -1 for none, and the present time into the shared
        memory. The other process can then see how long the run takes.
        """
        self.FORM.pack_into(self._memory, 0, index, time.monotonic())

    def read_run(self) -> tuple[int, float]:
        """Return the number of the run in progress, or -1 if there is none, and the monotonic time of its start. The
        running process writes both into the shared memory.
        """
        index, since = self.FORM.unpack_from(self._memory, 0)
        return index, since


# --- arguments and results --------------------------------------------------------------------------------------------


def strided_extent(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Return the number of elements of memory from the first to the last element of a tensor with the sizes ``shape``
    and the strides ``stride``. It is 0 for an empty tensor.
    """
    if 0 in shape:
        return 0
    return 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))


def tree_leaves(value: Any) -> list[Any]:
    """Return the values inside nested tuples, lists and dicts that are no containers themselves, in order. Dicts are
    ordered by key, and None is left out. Methods of a subclass of a container, which could compute the values, are not
    called.
    """
    if isinstance(value, list):
        return [leaf for v in list.__iter__(value) for leaf in tree_leaves(v)]
    if isinstance(value, tuple):
        return [leaf for v in tuple.__iter__(value) for leaf in tree_leaves(v)]
    if isinstance(value, dict):
        return [leaf for _, v in _items_by_name(value) for leaf in tree_leaves(v)]
    return [] if value is None else [value]


def _items_by_name(values: dict[Any, Any]) -> list[tuple[str, Any]]:
    """Return the (key, value) pairs of a dict sorted by key. A key that is not a string is replaced by the name of its
    class.
    """
    # A subclass of str could bring a comparison of its own.
    named = [(k if type(k) is str else type(k).__name__, v) for k, v in dict.items(values)]
    return sorted(named, key=lambda pair: pair[0])


def structure_of(value: Any) -> str:
    """Return the nesting of tuples, lists and dicts in a result as a string such as ``(.,{'a':.},None)``. A list counts
    as a tuple.
    """
    if isinstance(value, (list, tuple)):
        held = list.__iter__(value) if isinstance(value, list) else tuple.__iter__(value)
        return f"({','.join(map(structure_of, held))})"
    if isinstance(value, dict):
        return "{" + ",".join(f"{k}:{structure_of(v)}" for k, v in _items_by_name(value)) + "}"
    return "None" if value is None else "."


def flatten_results(values: Any) -> list[Any]:
    """Return the values inside the nested containers of the result ``values`` as a flat list without None. Each tensor
    is detached, as a new object without the attributes and hooks of the old one.
    """
    return [torch.detach(v) if type(v) in (Tensor, torch.nn.Parameter) else v for v in tree_leaves(values)]
