"""Lines and tables of text: printed in parts, never wrapped, plain where nobody reads colours."""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path

import pytest
from rich.console import Console

from shiplap.render.lines import TextTable, line, print_lines, relative_place, row, value_json


def printed(*lines: object, width: int = 30) -> str:
    out = io.StringIO()
    print_lines(lines, Console(file=out, width=width))
    return out.getvalue()


def test_a_line_is_printed_as_it_is_and_never_wrapped() -> None:
    text = "[bold]a path[/bold] " + "x" * 60
    assert printed(line(text, "green")) == text + "\n"
    assert str(line("a", "dim", ("b", "red"))) == "ab"


def test_a_row_puts_further_lines_below_its_value_and_an_empty_one_is_left_out() -> None:
    assert printed(*row("fix", "first\nsecond"), *row("hint", "")) == "  fix      first\n           second\n"


def test_numbers_stand_on_the_right_and_a_column_may_stay_whole() -> None:
    table = TextTable(("n", "id"), ((("1", ""), ("GB0007", "dim")), (("22", ""), ("", ""))), ("n",), ("id",))
    assert [text.rstrip() for text in printed(table).splitlines()] == [" n  id", " 1  GB0007", "22", ""]


def test_a_place_is_relative_below_the_current_directory_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert relative_place(f"{tmp_path}/a/b.py:3") == "a/b.py:3"
    assert relative_place("/elsewhere/b.py:3") == "/elsewhere/b.py:3"


def test_a_value_is_json_with_its_facts_and_what_is_derived() -> None:
    @dataclass(frozen=True)
    class Counted:
        names: tuple[str, ...]

    assert value_json(Counted(("a",)), {"torch": "2"}, ok=True) == {"facts": {"torch": "2"}, "names": ["a"], "ok": True}
