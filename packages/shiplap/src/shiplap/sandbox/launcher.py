"""The program of the launcher process, which forks the processes for code that is not trusted.

The launcher imports torch and modules of Shiplap, and nothing of the user. A fork of it therefore starts in
milliseconds, and holds no result, no seed and no state of another candidate. It serves requests until the connection
ends, or until its time to rest is over.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import importlib
import importlib.util
import math
import os
import select
import signal
import socket
import struct
import sys
import time

import torch

from shiplap.safe_io.work_folders import remove_folder
from shiplap.sandbox import child, protocol
from shiplap.sandbox.landlock import readable_places
from shiplap.sandbox.proc_filesystem import list_descendants
from shiplap.sandbox.protocol import BrokenMessage, pack_message, receive_message, send_message
from shiplap.sandbox.trusted_code import is_trusted_file
from shiplap.torch_private.dynamo import VECTOR_MODULE, prepare_inductor
from shiplap.torch_private.process_state import counting_by_management, forks_can_use_device
from shiplap.torch_private.triton_internals import prepare_triton

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
CREDENTIALS = struct.Struct("=iII")  # of the other end of a local socket: process, user, group
TRITON_MODULE = "triton"
END_CHILDREN_S = 1.0  # seconds until killed processes must be gone
SERVED = (protocol.Fork, protocol.AwaitExit, protocol.Rest, protocol.ImportModule, protocol.ImportLibraries)


def close_files(first: int) -> None:
    """Close all open file descriptors of this process from number ``first`` on."""
    os.closerange(first, 1 + max(map(int, os.listdir("/proc/self/fd"))))


def main() -> None:
    """Run the launcher. It serves requests on the connection whose descriptor is the first argument of the command."""
    serve_forks(int(sys.argv[1]), os.getcwd())


def serve_forks(handle: int, folder: str = "") -> None:
    """Serve requests to fork sandboxed processes on the connection ``handle`` until it or the supervisor ends.

    ``folder`` is the supervisor's temporary folder, or empty if it is not known yet. This function removes the folder
    if the supervisor is killed.
    """
    child.take_baseline()
    readable_places()  # forks share what has been looked at for it
    forked = set[int]()
    gc.freeze()
    gc.enable()  # ``LAUNCHER_PROGRAM`` switches it off for the import of torch
    connection = socket.socket(fileno=handle)
    supervisor, patience = _open_supervisor(connection), math.inf
    # Processes whose parent has ended become children of this one, where the supervisor finds them.
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    while True:
        try:
            _await_request(connection, supervisor, patience)
            message, files = receive_message(connection, *SERVED, handles=2)
        except (BrokenMessage, OSError):  # the supervisor has ended, or the time to rest is over
            return _end_groups(forked, folder)
        patience = math.inf
        reply: protocol.Reply = protocol.Done()
        if isinstance(message, protocol.AwaitExit):
            reply = protocol.Number(_wait_for_status(message.pid))
            forked.discard(message.pid)
        elif isinstance(message, protocol.Rest):
            os.chdir("/")  # the folder in which it started will be removed
            folder = ""
            reply = protocol.Answer(_all_children_gone())
            forked.clear()
        elif isinstance(message, protocol.ImportModule) and message.module:  # one import here saves one in each fork
            with contextlib.suppress(ImportError):  # whoever needs the module gets the error
                importlib.import_module(message.module)
            child.take_baseline()
        elif isinstance(message, protocol.ImportLibraries):
            folder = os.path.dirname(message.folder)
            reply = protocol.Number(_import_libraries(message))
        elif isinstance(message, protocol.Fork):
            _reap_orphans(forked)
            gc.freeze()  # existing objects are not collected in the forks, so their pages stay shared
            mine = os.getpid()
            pid = os.fork()
            if pid == 0:
                _run_forked_child(message, files, connection, mine)
            forked.add(pid)
            folder = os.path.dirname(message.scratch)
            for file in files:
                os.close(file)
            reply = protocol.Number(pid)
        try:
            send_message(connection, pack_message(reply))
        except OSError:
            return _end_groups(forked, folder)
        if isinstance(message, protocol.Rest):
            patience = message.seconds


def _open_supervisor(connection: socket.socket) -> int:
    """Return a descriptor of the process that has made ``connection``, by which its end is seen. Return -1 if Linux
    gives none.
    """
    peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    try:
        return os.pidfd_open(CREDENTIALS.unpack(peer)[0])
    except OSError:  # an old Linux, or a supervisor that has ended, whose connection tells
        return -1


def _await_request(connection: socket.socket, supervisor: int, seconds: float) -> None:
    """Wait until a request arrives on ``connection``. Raise ``BrokenMessage`` if none arrives within ``seconds``, or if
    the process with the descriptor ``supervisor`` ends.

    The connection alone does not show that end: a process that the supervisor has forked may hold it, too.
    """
    arrived = select.poll()
    for handle in (connection.fileno(), supervisor):
        if handle >= 0:
            arrived.register(handle, select.POLLIN)
    ready = [handle for handle, _ in arrived.poll(seconds * 1e3 if seconds < math.inf else None)]
    if ready != [connection.fileno()]:
        raise BrokenMessage("the supervisor has ended, or has no request")


def _import_libraries(message: protocol.ImportLibraries) -> int:
    """Import those of the modules of ``message`` that exist, and prepare Inductor and Triton if they are among them.
    Return the number of modules, or of those before the first one after whose import forked processes cannot use a GPU.

    Of the modules that this adds, the snapshot of functions gets those of Python's library. In each process, all that
    new modules of the library hold would have to be looked at otherwise. A candidate may change the other ones, since
    it may import them itself.
    """
    known = len(sys.modules)
    try:
        return _import_each(message)
    finally:
        if len(sys.modules) != known:
            child.take_baseline(standard=True)


def _import_each(message: protocol.ImportLibraries) -> int:
    """Import the modules of ``message`` in turn, as ``_import_libraries`` says, and return its value."""
    for number, module in enumerate(message.modules):
        with contextlib.suppress(Exception), counting_by_management():  # whoever needs the module gets the error
            if not _is_installed(module):
                continue
            importlib.import_module(module)
            if module == VECTOR_MODULE:
                prepare_inductor(message.folder)
            if module == TRITON_MODULE:
                prepare_triton(message.folder)
        if not forks_can_use_device():
            return number
    return len(message.modules)


def _is_installed(module: str) -> bool:
    """Return whether the package of ``module`` belongs to Python or lies among installed packages or beside torch. This
    process is not sandboxed, and must not import a file of a candidate that has the same name.
    """
    spec = importlib.util.find_spec(module.partition(".")[0])
    file = (spec.origin or "") if spec is not None else ""
    beside_torch = os.path.join(os.path.dirname(os.path.dirname(os.path.realpath(torch.__file__))), "")
    return bool(file) and (is_trusted_file(file) or os.path.realpath(file).startswith(beside_torch))


def _end_groups(forked: set[int], folder: str) -> None:
    """Kill the sandboxed processes ``forked`` with all their descendants, and remove the supervisor's ``folder``.

    The supervisor, which is the process that uses the sandbox, was killed. No descendant of a process that is locked in
    can leave its group, and Linux ends all of a group at once. Those of other processes are found one by one.
    """
    for pid in forked:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
    with contextlib.suppress(OSError):
        for pid in reversed(list_descendants(os.getpid())):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    if folder:
        _all_children_gone()  # they write until they have ended
        remove_folder(folder, math.inf)


def _wait_for_status(pid: int) -> int:
    """Wait until a process has ended, and return its ``waitpid`` status. If it is not a child of this process, return
    the status of a process that SIGKILL has ended.
    """
    try:
        return os.waitpid(pid, 0)[1]
    except ChildProcessError:
        return int(signal.SIGKILL)


def _reap_orphans(forked: set[int]) -> None:
    """Wait for the ended processes that this one has adopted, that is, for those that are not in ``forked``. They would
    otherwise count as children of a later sandboxed process.
    """
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) and ended.si_pid not in forked:
            os.waitpid(ended.si_pid, 0)


def _all_children_gone() -> bool:
    """Wait at most ``END_CHILDREN_S`` seconds until all children of this process are gone, which were killed before.
    Return whether they are gone.
    """
    ends = time.monotonic() + END_CHILDREN_S
    with contextlib.suppress(ChildProcessError):
        while time.monotonic() < ends:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                time.sleep(0.001)
        return False
    return True


def _run_forked_child(order: protocol.Fork, handles: list[int], connection: socket.socket, launcher: int) -> None:
    """Turn this forked child into a sandboxed process that serves requests as ``order`` says. This function never
    returns.

    ``handles`` are the connection of the child and the file into which it prints. ``launcher`` is the id of the
    launcher's process.
    """
    try:
        # A session and a group of its own, which the supervisor stops and ends as one.
        os.setsid()
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # it must not outlive the launcher
        if os.getppid() != launcher:  # which was killed before that call
            return
        signal.signal(signal.SIGINT, signal.default_int_handler)  # as in any program of Python
        connection.detach()
        nothing = os.open(os.devnull, os.O_RDONLY)
        # Above the numbers that are assigned next.
        handle, output = (os.dup(fcntl.fcntl(h, fcntl.F_DUPFD, 16)) for h in handles)
        for number, target in ((0, nothing), (1, output), (2, output), (3, handle)):
            if target != number:
                os.dup2(target, number, number < 3)
        close_files(4)  # no file of the launcher may be reached from here
        child.serve_requests(socket.socket(fileno=3), order)
    except BaseException as e:
        with contextlib.suppress(Exception):
            sys.stderr.write(f"{type(e).__name__}: {e}\n")
            sys.stderr.flush()
    finally:
        os._exit(1)
