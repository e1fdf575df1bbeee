"""Record the calls that a program makes, one JSON line per op, sizes, dtypes and layout, and tune for them later.

Each new call is appended to the file in one write. Several processes may therefore share a file, and a killed process
has recorded its calls up to that time. The counts of calls follow at the end, as separate lines.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shiplap import safe_io
from shiplap.declare.binding import Binding
from shiplap.declare.native_interface import NativeForm
from shiplap.dispatch import registry, tuned_choices
from shiplap.dispatch.state import OpState
from shiplap.errors import error, notice
from shiplap.sampling.recipe import SampleRecipe
from shiplap.tuning.inputs import recipe_of

LIMIT = 1 << 24  # bytes of a profile


@dataclass(frozen=True)
class RecordedCall:
    """One line of a profile, which is a file of recorded calls. It holds the name of an op, the device, the label of
    the recipe of the arguments, the module and file that declare the op, and the number of such calls.
    """

    op: str
    device: str
    recipe: str
    module: str = ""
    file: str = ""
    count: int = 1

    @property
    def parsed(self) -> SampleRecipe:
        """The recipe of the recorded call, parsed from its label. It holds sizes, scalars, dtypes and layouts, but no
        values of tensors.
        """
        return SampleRecipe.parse(self.recipe)


class CallRecorder:
    """The recorder of all calls of ops in this process. The dispatcher calls it, as ``tuned_choices.observer``, when it
    has checked the arguments of a call.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Make a recorder that appends calls to the file ``path``."""
        self.path = Path(path)
        self._seen: dict[tuple[Any, ...], RecordedCall] = {}
        self._counts: dict[tuple[Any, ...], int] = {}
        self._lock = threading.Lock()
        self._held: list[NativeForm] = []

    def __call__(self, op: OpState, call: Binding) -> None:
        """Count a call of an op. Append the call to the file if it is the first one with its device, sizes, dtypes and
        layout.
        """
        # Building a recipe takes longer than a small call, so it is done once for each new key.
        key = (op.spec.name, str(call.device), op.rule.key(call), tuple(call.env.items()).__repr__())
        with self._lock:
            self._counts[key] = self._counts.get(key, 0) + 1
            if key not in self._seen:
                made = RecordedCall(
                    op.spec.name,
                    str(call.device),
                    str(recipe_of(op, call.args)),
                    op.reference.__module__,
                    op.file,
                )
                self._seen[key] = made
                self._append([made])
        self._stop_native_binding(op)

    def _stop_native_binding(self, op: OpState) -> None:
        """Keep the kernels of an op from getting a native binding while calls are recorded.

        A kernel gets one after a number of calls. The native binding then takes later calls without Python, so they
        could not be recorded.
        """
        for kernel in (k for kernels in op.kernels.values() for k in kernels):
            form = kernel.native
            if form is not None and form.counting:
                form.settle()
                self._held.append(form)

    def close(self) -> None:
        """Append the counts of calls that were made more than once to the file. Allow native bindings again."""
        with self._lock:
            many = [(self._seen[k], n) for k, n in self._counts.items() if n > 1]
            self._append([replace(c, count=n) for c, n in many])
        for form in self._held:
            form.resume()

    def _append(self, calls: list[RecordedCall]) -> None:
        """Append calls to the file as lines of JSON, one for each call. Issue a notice if the file cannot be
        written.
        """
        text = "".join(json.dumps(vars(c)) + "\n" for c in calls)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            handle = safe_io.open_for_writing(self.path, append=True)
            try:
                if not stat.S_ISREG(os.fstat(handle).st_mode):
                    raise OSError(errno.EINVAL, "it is no regular file")
                _append_whole(handle, text.encode())
            finally:
                os.close(handle)
        except OSError as e:
            notice(f"record {self.path}", f"calls cannot be recorded in {self.path}: {e.strerror or e}")


def _append_whole(handle: int, content: bytes) -> None:
    """Write all of ``content`` to the file ``handle``. If that fails, remove the written part and raise ``OSError``,
    since half a line would spoil the next one.
    """
    start, written = os.fstat(handle).st_size, 0
    try:
        while written < len(content):
            written += os.write(handle, content[written:])
    except OSError:
        if os.fstat(handle).st_size == start + written:  # no other process has appended since
            os.ftruncate(handle, start)
        raise


_current: CallRecorder | None = None


def _after_fork() -> None:
    """Replace the recorder's lock in a forked child process. The thread that may hold the old lock does not exist
    there.
    """
    if _current is not None:
        _current._lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)


def start_recording(path: str | os.PathLike[str]) -> None:
    """Record the calls of declared ops in the file ``path`` from now on, until :func:`stop_recording` is called or the
    process ends. An earlier recording ends now.
    """
    global _current
    stop_recording()
    _current = CallRecorder(path)
    for op in registry.declared_op_list():
        # A native binding that is already in use would hide its calls from the recorder.
        op.drop_native()
        _current._stop_native_binding(op)
    tuned_choices.observer = _current
    tuned_choices.refresh_active()


def stop_recording() -> None:
    """Stop recording calls and write their counts to the file. Do nothing if no recording runs."""
    global _current
    recorder, _current = _current, None
    tuned_choices.observer = None
    tuned_choices.refresh_active()
    if recorder is not None:
        recorder.close()


@contextlib.contextmanager
def record(path: str | os.PathLike[str]) -> Iterator[None]:
    """Return a context manager that records the calls of declared ops in its body in the file ``path``, as lines of
    JSON. ``shiplap tune --profile`` reads the file.

    Calls of ops in compiled graphs are recorded, too. An op that Inductor compiles from a template is recorded once,
    when the graph is compiled.
    """
    start_recording(path)
    try:
        yield
    finally:
        stop_recording()


def read_calls(path: str | os.PathLike[str]) -> list[RecordedCall]:
    """Return the calls in the file ``path`` of a recording, without repetitions and with their counts. The most
    frequent call comes first. A last line that was cut off is left out.

    Raises:
        CommandError: ``SL602`` if the file cannot be read, ``SL609`` if a line is not a call.
    """
    import msgspec

    try:
        lines = safe_io.read_file(path, LIMIT, safe_io.NAMED).decode().split("\n")
    except (OSError, UnicodeDecodeError) as e:
        raise error(
            "SL602",
            where=str(path),
            what="the file cannot be read",
            got=(isinstance(e, OSError) and e.strerror) or e,
            expected="a profile written by shiplap.tuning.record",
        ) from None
    counts: dict[RecordedCall, int] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip() or number == len(lines):  # a line without a newline was cut short
            continue
        try:
            call = msgspec.json.decode(line, type=RecordedCall)
            # Parsed here, so that an error names the line.
            _ = call.parsed
        except Exception as e:
            raise error(
                "SL609",
                where=f"{path}:{number}",
                what="a line of the profile cannot be read",
                got=str(e).splitlines()[0],
                expected="a line written by shiplap.tuning.record",
                fix="delete the line, or record again",
            ) from None
        key = replace(call, count=1)
        # The line with the count repeats a line that was written at the first call, so counts are not added.
        counts[key] = max(counts.get(key, 0), call.count)
    ranked = sorted(counts.items(), key=lambda pair: -pair[1])
    return [replace(key, count=n) for key, n in ranked]
