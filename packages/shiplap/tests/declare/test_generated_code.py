"""The printer of generated functions: a text is compiled once, however many functions are made of it."""

from __future__ import annotations

from shiplap.declare.generated_code import define_function, define_lambda


def test_functions_of_one_text_share_their_code_and_keep_their_own_values() -> None:
    """Calls of new sizes define such functions, and to compile a text takes longer than a launch."""
    lines = ["def add(x):", "    return x + step"]
    one, two = (define_function("add", lines, "add", {"step": step}) for step in (1, 2))
    assert (one(10), two(10)) == (11, 12)
    assert one.__code__ is two.__code__
    other = define_function("add", lines, "other", {"step": 3})
    assert (other.__code__.co_filename, one.__code__.co_filename) == ("<other>", "<add>")


def test_lambdas_of_one_text_share_their_code_and_keep_their_own_values() -> None:
    one, two = (define_lambda("lambda x: x * factor", {"factor": factor}) for factor in (2, 3))
    assert (one(10), two(10)) == (20, 30)
    assert one.__code__ is two.__code__
