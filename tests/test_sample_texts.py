"""``tools/sample_texts.py`` draws whole paragraphs, and the same ones for the same seed."""

from __future__ import annotations

from pathlib import Path

import pytest
from tools.sample_texts import Text, draw, main, paragraphs

LONG = " ".join(["word"] * 30)
PAGE = f"""# Title

Too short.

## First

{LONG} and the list:

* one
* two

```python
{LONG}
```

| {LONG} |

<!-- {LONG} -->
## Second

{LONG}
"""


def test_a_list_belongs_to_the_paragraph_before_it_and_code_and_tables_are_left_out() -> None:
    assert list(paragraphs(PAGE, "page.md")) == [
        Text("page.md: First", f"{LONG} and the list:\n\n* one\n* two"),
        Text("page.md: Second", LONG),
    ]


def test_a_seed_decides_what_is_drawn() -> None:
    texts = [Text(str(number), "") for number in range(100)]
    assert draw(texts, 20, 7) == draw(texts, 20, 7) != draw(texts, 20, 8)
    assert len(set(draw(texts, 20, 7))) == 20
    assert len(draw(texts, 200, 7)) == 100


def test_the_pages_and_the_catalogue_give_a_sample(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seed", "3", "--paragraphs", "4", "--errors", "2", "--output", str(tmp_path / "a.md")]) == 0
    assert main(["--seed", "3", "--paragraphs", "4", "--errors", "2"]) == 0
    sample = (tmp_path / "a.md").read_text("utf-8")
    assert capsys.readouterr().out == sample
    assert sample.count("\n## ") == 6
    assert sample.count("what failed: ") == 2


def test_a_negative_number_is_refused() -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--errors", "-1"])
    assert stopped.value.code == 2
