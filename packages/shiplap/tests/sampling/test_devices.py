"""What a locked process may do besides, where it is to use a device: what CUDA's driver needs to start, and no more."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from shiplap.sandbox.landlock import SandboxPolicy, lock_process


def inside(scratch: Path, act: Callable[[], object], *, device: bool) -> str:
    """What ``act`` gives, or the name of its error, in a process that is locked in."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        missing = lock_process(SandboxPolicy(str(scratch), device=device))
        if missing["files"] or missing["system calls"]:
            os.write(write, json.dumps(["missing", missing]).encode())
            os._exit(0)
        try:
            output = ["done", repr(act())]
        except OSError as e:
            output = [type(e).__name__, str(e)]
        os.write(write, json.dumps(output).encode())
        os._exit(0)
    os.close(write)
    with open(read, "rb") as stream:
        word, more = json.loads(stream.read())
    os.waitpid(child, 0)
    if word == "missing":
        pytest.skip(f"this machine cannot lock a process in: {more}")
    return str(word)


def listen() -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as made:
        made.bind(f"\0shiplap-{os.getpid()}")
        made.listen()


def names_itself() -> int:
    return Path("/proc/self/task", str(os.getpid()), "comm").write_text("named")


def connects() -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as made:
        made.connect("\0shiplap-nobody")


def of_the_network() -> None:
    socket.socket(socket.AF_INET, socket.SOCK_STREAM).close()


def without_connection() -> None:
    socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).close()


def setting() -> None:
    os.close(os.open("/proc/sys/kernel/core_pattern", os.O_WRONLY))


def of_another() -> None:
    os.close(os.open(f"/proc/{os.getppid()}/comm", os.O_WRONLY))


def test_the_driver_can_start(tmp_path):
    assert inside(tmp_path, listen, device=True) == "done"
    assert inside(tmp_path, names_itself, device=True) == "done"


@pytest.mark.parametrize("act", [connects, of_the_network, without_connection, setting, of_another])
def test_nothing_else_is_reached(tmp_path, act):
    assert inside(tmp_path, act, device=True) == "PermissionError"


@pytest.mark.parametrize("act", [listen, names_itself, connects])
def test_without_a_device_nothing_is_added(tmp_path, act):
    assert inside(tmp_path, act, device=False) == "PermissionError"
