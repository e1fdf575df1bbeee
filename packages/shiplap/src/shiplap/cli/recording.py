"""Run a user's script, or a module such as pytest, while the calls of ops are recorded."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from shiplap.safe_io.module_path import append_module_folder


def run_recorded(script: Path, arguments: Sequence[str], recording: AbstractContextManager[Any]) -> str:
    """Run ``script`` with ``arguments`` as Python would, inside the context ``recording``, which records calls. Return
    a text that says how the script failed, or an empty string if it did not fail.

    If ``script`` is not a file, as in ``pytest``, it is the name of a module. The module runs as with ``python -m``.
    """
    with _as_main(script, arguments):
        try:
            with recording:
                if script.exists() or script.suffix == ".py":
                    runpy.run_path(str(script), run_name="__main__")
                else:
                    runpy.run_module(str(script), run_name="__main__", alter_sys=True)
        # Scripts commonly end by sys.exit(main()), which is no failure if the status is 0 or None.
        except SystemExit as e:
            return "" if e.code in (None, 0) else f"it exited with {e.code}"
        except KeyboardInterrupt:
            return "it was interrupted"
        except BaseException as e:  # the user's program may raise anything
            # The innermost frame of the script is the line that its author can correct.
            last = e.__traceback__
            while last is not None and last.tb_next is not None and script.name not in last.tb_frame.f_code.co_filename:
                last = last.tb_next
            line = f" (line {last.tb_lineno})" if last is not None else ""
            return f"{type(e).__name__}: {e}{line}"
    return ""


@contextmanager
def _as_main(script: Path, arguments: Sequence[str]) -> Iterator[None]:
    """Return a context in which ``sys.argv`` is as Python sets it for ``script`` with ``arguments``. Inside of it, the
    script's folder is appended to ``sys.path``.
    """
    argv, path = list(sys.argv), list(sys.path)
    # The lists are changed in place, because other modules may hold references to them.
    sys.argv[:] = [str(script), *arguments]
    append_module_folder(script.resolve().parent)
    try:
        yield
    finally:
        sys.argv[:], sys.path[:] = argv, path
