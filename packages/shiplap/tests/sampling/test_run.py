"""How a failure is told in a finding."""

from shiplap.errors import short_error_line


def test_a_long_error_is_cut_between_two_words():
    text = short_error_line(ValueError("wrong number " * 40))
    assert text.startswith("ValueError: wrong number wrong")
    assert text.endswith(("wrong ...", "number ..."))
    assert len(text) <= 200
