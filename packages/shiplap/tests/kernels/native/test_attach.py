"""Which library serves the calls of an op, and which error of Python native code passes on."""

import ctypes
from pathlib import Path
from types import SimpleNamespace

import pytest

from shiplap.errors import ShiplapError, error
from shiplap.kernels.native import attach
from shiplap.kernels.native.attach import OpEntrance, _exception_text


class Library:
    """A library that notes the calls of its functions."""

    def __init__(self, refused=b"", refusal=(b"",) * 7):
        self.refused, self.texts, self.calls = refused, refusal, []

    def __getattr__(self, name):
        def function(*given):
            self.calls.append((name.removeprefix("shiplap_"), *(getattr(v, "value", v) for v in given)))
            if name == "shiplap_refusal":
                return self.texts[given[0]]
            return self.refused if name in ("shiplap_attach", "shiplap_find") else 99

        return function


@pytest.fixture
def entrance(monkeypatch):
    monkeypatch.setattr(OpEntrance, "_define", lambda self, op: None)
    return OpEntrance(None)


def led(entrance, library, index=0, device="cpu"):
    return entrance.lead_calls_to(device, library, ctypes.c_uint64(index), Path("/k.so"))


def test_a_later_library_is_reached_from_the_first(entrance):
    first, second, third = Library(), Library(), Library(refused=b"not here")
    assert led(entrance, first, 4) == ""
    assert first.calls == [("attach", 4, b"/k.so")]
    assert led(entrance, second, 7) == ""
    assert second.calls == [("find", 7, b"/k.so"), ("code", 7)]
    assert first.calls[1:] == [("lead", 4, 99)]
    assert led(entrance, third) == "not here"
    assert third.calls == [("find", 0, b"/k.so")]
    assert len(first.calls) == 2
    assert entrance.bindings == [first, second, third]
    assert led(entrance, second, 7) == ""
    assert entrance.bindings == [first, second, third]
    entrance.release("cpu")
    assert first.calls[-1] == ("lead", 4, None)


def test_a_library_that_torch_refuses_is_not_the_first(entrance):
    refused, other = Library(refused=b"taken"), Library()
    assert led(entrance, refused) == "taken"
    assert entrance.first == {}
    assert led(entrance, other, device="cuda") == ""
    assert entrance.first.keys() == {"cuda"}


def test_the_error_behind_a_message(entrance):
    mine = error("SL201", where="demo::f", got="1", expected="2")
    assert entrance.refusal(RuntimeError(str(mine))) is None
    entrance.raised.error = mine
    assert entrance.refusal(RuntimeError(f"torch: {mine}")) is mine
    assert entrance.refusal(RuntimeError("another")) is None
    texts = [b"SL202", b"a size is wrong", b"demo::g", b"3", b"4", b"pass 4", b"the text of C++"]
    entrance.bindings = [Library(refusal=[b""] * 7), Library(refusal=texts)]
    assert entrance.refusal(RuntimeError("another")) is None
    found = entrance.refusal(RuntimeError("so says the text of C++."))
    assert isinstance(found, ShiplapError)
    shown = (found.id, found.what, found.where, found.got, found.expected, found.fix)
    assert shown == ("SL202", "a size is wrong", "demo::g", "3", "4", "pass 4")


def test_an_error_of_python_is_kept_and_sent(entrance):
    library, mine = Library(), error("SL201", where="demo::f", got="1\0", expected="2")
    entrance.bindings = [library]

    def fail(cause):
        raise cause

    run = entrance._with_error_text(fail)
    with pytest.raises(ShiplapError):
        run(mine)
    assert str(entrance.raised.error) == str(mine)
    with pytest.raises(KeyError):
        run(KeyError("k"))
    assert entrance.raised.error is None
    library.calls = [each for each in library.calls if each[0] == "set_error"]
    assert library.calls[0] == ("set_error", str(mine).replace("\0", "").encode())
    assert library.calls[-1] == ("set_error", b"KeyError: 'k'")
    assert entrance._with_error_text(lambda value: value)(3) == 3


def test_the_text_of_an_exception():
    assert _exception_text(ValueError("a\0b\ud800")) == "ValueError: ab?"
    mine = error("SL201", where="demo::f", got="1", expected="2")
    assert _exception_text(mine) == str(mine)


def test_choices_are_sent_to_native_code(monkeypatch):
    sent = []
    native = SimpleNamespace(update_choices=lambda: sent.append("sent"))
    ops = [SimpleNamespace(native=None), SimpleNamespace(native=native)]
    monkeypatch.setattr(attach.registry, "declared_op_list", lambda: ops)
    attach._send_all_choices()
    assert sent == ["sent"]
