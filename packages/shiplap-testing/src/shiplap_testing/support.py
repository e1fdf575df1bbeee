"""What the tests of declarations share."""

import pickle
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

import shiplap as sl


@contextmanager
def fails(id: str, *fragments: str, **fields: str) -> Iterator[None]:
    """The block raises the catalogue error ``id``; its text has every fragment, its fields are exactly ``fields``."""
    with pytest.raises(sl.ShiplapError) as caught:
        yield
    raised = caught.value
    assert raised.id == id, str(raised)
    for fragment in fragments:
        assert fragment in str(raised), str(raised)
    for name, value in fields.items():
        assert getattr(raised, name) == value, str(raised)
    assert raised.fix, "every error names one fix"
    assert str(pickle.loads(pickle.dumps(raised))) == str(raised)
