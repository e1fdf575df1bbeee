"""What the tests of declarations share."""

import pickle
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import shiplap as sl


@contextmanager
def fails(id: str, *fragments: str, **fields: str) -> Iterator[pytest.ExceptionInfo[sl.ShiplapError]]:
    """Assert that the block of the ``with`` statement raises shiplap's error ``id``, such as ``SL208``. Its message
    must contain each of ``fragments``, and its attributes must equal ``fields``.

    The error must also have a fix and survive pickling. The ``as`` of the statement gives pytest's information about
    it, whose ``value`` is the error.
    """
    with pytest.raises(sl.ShiplapError) as caught:
        yield caught
    raised = caught.value
    assert raised.id == id, str(raised)
    for fragment in fragments:
        assert fragment in str(raised), str(raised)
    for name, value in fields.items():
        assert getattr(raised, name) == value, str(raised)
    assert raised.fix, "every error names one fix"
    # Errors cross processes: those of workers are raised again in the parent.
    assert str(pickle.loads(pickle.dumps(raised))) == str(raised)


def files_entered(call: Callable[[], object]) -> list[str]:
    """Return a list of the files of the Python functions that ``call`` enters, in the order of the calls. A function
    that is entered twice is listed twice.
    """
    files: list[str] = []
    sys.setprofile(lambda frame, event, of: files.append(frame.f_code.co_filename) if event == "call" else None)
    try:
        call()
    finally:
        sys.setprofile(None)
    return files


def triton_files_entered(call: Callable[[], object]) -> list[str]:
    """Return a list of the files of the Python functions that ``call`` enters, in the order of the calls. Only files of
    Triton and generated launchers are listed. The list is empty if C++ replays a launch.
    """
    ours = str(Path(sl.__file__).parent)  # our own kernels lie in a folder of that name, too
    entered = files_entered(call)
    return [name for name in entered if "<launch" in name or ("triton" in name and not name.startswith(ours))]
