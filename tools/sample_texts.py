"""Draw paragraphs of the README and the pages, and entries of the error catalogue, for readers to paraphrase.

A reader who knows PyTorch and has never heard of this project says in its own words what each text means. What it gets
wrong shows which texts need another wording; ``docs/design/0014-readers.md`` has the protocol and outcomes.

A paragraph is a block of prose with at least 30 words. A list belongs to the paragraph before it. Code, tables,
headings and generated pages are left out. Each text is printed with its page and heading, which a reader of the page
would see too. The same seed draws the same texts as long as the pages and the catalogue stay the same.

Usage: ``sample_texts.py [--seed N] [--paragraphs N] [--errors N] [--design] [--output FILE]``
"""

from __future__ import annotations

import argparse
import random
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WORDS = 30  # of a paragraph, at least
GENERATED = {"errors.md", "checks.md", "cli.md", "backend-opinfo.md", "rewrites-shipped.md"}


@dataclass(frozen=True)
class Text:
    """A text to paraphrase: where it stands, and what it says."""

    where: str
    content: str


def pages(root: Path, design: bool) -> list[Path]:
    """The README and the pages that people write; with ``design`` the design notes too."""
    written = [page for page in sorted((root / "docs").rglob("*.md")) if page.name not in GENERATED]
    return [root / "README.md", *(page for page in written if design or page.parent.name != "design")]


def paragraphs(text: str, name: str) -> Iterator[Text]:
    """The paragraphs of a page with at least ``WORDS`` words."""
    text = re.sub(r"^ *(`{3,}).*?^ *\1$", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    blocks: list[Text] = []
    heading = ""
    for block in re.split(r"\n\s*\n", text):
        lines = [line for line in block.strip("\n").splitlines() if line.strip()]
        while lines and lines[0].startswith("#"):
            heading = lines.pop(0).lstrip("# ")
        if not lines or lines[0].lstrip().startswith(("|", "![", "*Measured")):
            continue
        drawn = Text(f"{name}: {heading}", "\n".join(lines))
        if blocks and re.match(r" *([*-]|\d+\.) ", lines[0]) and blocks[-1].where == drawn.where:
            drawn = Text(drawn.where, f"{blocks.pop().content}\n\n{drawn.content}")
        blocks.append(drawn)
    return (block for block in blocks if len(block.content.split()) >= WORDS)


def catalogue() -> Iterator[Text]:
    """The entries of the error catalogue, those of installed families included."""
    from shiplap.cli.families import load_families, verbs
    from shiplap.errors import CATALOGUE

    load_families()
    verbs()
    for entry in sorted(CATALOGUE.values(), key=lambda e: e.id):
        yield Text(entry.id, f"what failed: {entry.title}\nwhy: {entry.why}\nfix: {entry.fix}")


def draw(texts: Iterable[Text], count: int, seed: int) -> list[Text]:
    """``count`` of ``texts`` in the order of the draw, or all of them if there are fewer."""
    listed = list(texts)
    return random.Random(seed).sample(listed, min(count, len(listed)))


def shown(drawn: Sequence[Text], seed: int) -> str:
    """The sample as one Markdown page with numbered texts."""
    parts = [f"# Texts to paraphrase (seed {seed})"]
    parts += [f"## {number}. {text.where}\n\n{text.content}" for number, text in enumerate(drawn, 1)]
    return "\n\n".join(parts) + "\n"


def main(arguments: list[str]) -> int:
    """Print or write the sample."""
    parser = argparse.ArgumentParser(
        prog="sample_texts.py",
        description="Draw paragraphs of the README and the pages, and entries of the error catalogue, for readers.",
        epilog="example: python tools/sample_texts.py --seed 7 --paragraphs 20 --errors 20 --output exam.md",
    )
    parser.add_argument("--seed", type=int, default=0, help="the same seed draws the same texts (default: 0)")
    parser.add_argument("--paragraphs", type=int, default=20, help="the number of paragraphs (default: 20)")
    parser.add_argument("--errors", type=int, default=20, help="the number of catalogue entries (default: 20)")
    parser.add_argument("--design", action="store_true", help="draw from the design notes too")
    parser.add_argument("--output", type=Path, help="the file to write (default: standard output)")
    options = parser.parse_args(arguments)
    if options.paragraphs < 0 or options.errors < 0:
        parser.error("--paragraphs and --errors must not be negative")
    listed = [
        text
        for page in pages(ROOT, options.design)
        for text in paragraphs(page.read_text(encoding="utf-8"), page.relative_to(ROOT).as_posix())
    ]
    drawn = draw(listed, options.paragraphs, options.seed)
    drawn += draw(catalogue(), options.errors, options.seed) if options.errors else []
    content = shown(drawn, options.seed)
    if options.output is None:
        sys.stdout.write(content)
    else:
        options.output.write_text(content, encoding="utf-8")
    print(f"drew from {len(listed)} paragraphs", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
