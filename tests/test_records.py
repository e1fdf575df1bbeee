"""``tools/records.py`` finds what is stale and says so; nothing fails for it."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tools import records

ROOT = Path(__file__).resolve().parents[1]
COMMIT = "0123456789"
USAGE = "python benchmarks/kernel.py --device cpu"
PAGE = "Before.\n\n<!-- kernel times -->\n| a | b |\n|---|---|\n| 1 | 2 |\n<!-- /kernel times -->\n\nAfter.\n"


def module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with one record, of a kernel in C++, a function in Python and the script that measured them."""
    files = {
        "src/kernel.cpp": "int f() { return 1; }\n",
        "src/launch.py": "def run():\n    return 1\n\n\ndef other():\n    return 2\n",
        "benchmarks/kernel.py": f'"""Times.\n\n    {USAGE} [--json benchmarks/results/kernel.json] [--fast]\n"""\n',
        "README.md": PAGE,
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    recorder = module(ROOT / "benchmarks" / "_record.py")
    monkeypatch.setattr(recorder, "ROOT", tmp_path)
    patterns = ["src/*.cpp", "src/launch.py::run", "benchmarks/kernel.py"]
    result = recorder.record(patterns, ["no-such-package"], device="a device", ms=1.0)
    assert result["digest"] == recorder.digest(patterns)
    assert result["commit"] == ""  # no git
    assert result["versions"]["no-such-package"] == "not installed"
    result |= {"date": "2026-11-22", "commit": COMMIT}
    recorder.write(tmp_path / "benchmarks" / "results" / "kernel.json", result)
    return tmp_path


def only(root: Path) -> records.Record:
    (actual,) = records.records(root)
    return actual


def rewrite(root: Path, **changes: Any) -> None:
    path = root / "benchmarks" / "results" / "kernel.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_record_of_the_sources_as_they_are_is_fresh(root: Path) -> None:
    record = only(root)
    assert not record.stale
    assert (record.name, record.device, record.date, record.commit) == ("kernel", "a device", "2026-11-22", COMMIT)
    assert list(records.show([record])) == [f"fresh  kernel  2026-11-22  {COMMIT}  a device", "1 records, 0 stale"]


def test_layout_and_comments_make_nothing_stale(root: Path) -> None:
    (root / "src/kernel.cpp").write_text("// what\nint f()\n{\n  return 1;\n}\n")
    (root / "src/launch.py").write_text("import os\n\n\ndef run(): \n    '''Why.'''\n    return 1  # one\n")
    with (root / "benchmarks/kernel.py").open("a") as file:
        file.write("\n# the end \n")
    assert not only(root).stale


def test_a_change_of_meaning_is_listed_with_what_measures_again(root: Path) -> None:
    (root / "src/kernel.cpp").write_text("int f() { return 2; }\n")
    record = only(root)
    assert record.changed == ("src/kernel.cpp",)
    assert list(records.show([record]))[1:] == [
        "       changed since: src/kernel.cpp",
        f"       measure again: {USAGE} --json benchmarks/results/kernel.json",
        "1 records, 1 stale",
    ]
    (root / "src/launch.py").write_text("def run():\n    return 3\n")
    assert only(root).changed == ("src/kernel.cpp", "src/launch.py::run")


def test_a_new_file_and_a_file_fewer_are_changes(root: Path) -> None:
    (root / "src/more.cpp").write_text("int g();\n")
    assert only(root).changed == ("src/more.cpp",)
    shutil.copy(root / "src/kernel.cpp", root / "src/more.cpp")
    assert not only(root).stale
    (root / "src/more.cpp").write_text("int g();\n")
    rewrite(root, **{field: digests(root)[field] for field in ("sources", "digest")})
    assert not only(root).stale
    (root / "src/more.cpp").unlink()
    assert only(root).changed == ("src/*.cpp (fewer files)",)


def digests(root: Path) -> dict[str, Any]:
    sources = records.sources_of(["src/*.cpp", "src/launch.py::run", "benchmarks/kernel.py"], root)
    return {"sources": sources, "digest": records.digest_of(sources)}


def test_a_source_that_is_gone_is_said_to_be(root: Path) -> None:
    (root / "src/launch.py").unlink()
    record = only(root)
    assert record.stale
    assert (record.changed, record.gone) == ((), ("src/launch.py::run",))
    assert "       measured a source that is gone: src/launch.py::run" in records.show([record])


def test_files_move_when_the_patterns_are_rewritten(root: Path) -> None:
    (root / "packages").mkdir()
    (root / "src").rename(root / "packages/kernels")
    assert only(root).gone == ("src/*.cpp", "src/launch.py::run")
    path = root / "benchmarks" / "results" / "kernel.json"
    path.write_text(path.read_text().replace('"src/', '"packages/kernels/'))
    assert not only(root).stale
    (root / "packages/kernels/launch.py").rename(root / "packages/launch.py")
    path.write_text(path.read_text().replace("kernels/launch", "launch"))
    assert not only(root).stale


def test_a_part_of_another_day_is_a_record_of_its_own(root: Path) -> None:
    part = json.loads((root / "benchmarks/results/kernel.json").read_text())
    (root / "src/kernel.cpp").write_text("int f() { return 2; }\n")
    rewrite(root, **digests(root), **{"with AVX-512": part | {"date": "2026-11-20"}})
    whole, older = records.records(root)
    assert (whole.name, whole.stale) == ("kernel", False)
    assert (older.name, older.date, older.changed) == ("kernel with AVX-512", "2026-11-20", ("src/kernel.cpp",))
    assert records.find("kernel with AVX-512", [whole, older]) is older
    assert records.find("kernel times", [whole, older]) is whole
    assert records.find("kernels", [whole, older]) is None


def test_the_documentation_says_it_beside_the_figures(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hook = module(ROOT / "tools" / "mkdocs_records.py")
    monkeypatch.setattr(hook, "ROOT", root)

    def built(markdown: str) -> str:
        hook.on_pre_build(config=None)
        return str(hook.on_page_markdown(markdown, page=None, config=None, files=None))

    head, tail = PAGE[: PAGE.index("\nAfter")], PAGE[PAGE.index("\nAfter") :]
    assert built(PAGE) == f"{head}\n*Measured 2026-11-22 on a device, commit {COMMIT}.*\n{tail}"
    (root / "src/kernel.cpp").write_text("int f() { return 2; }\n")
    assert built(PAGE) == (
        f"{head}\n*Measured 2026-11-22 on a device, commit {COMMIT}; **the measured sources have changed since**: "
        f"`src/kernel.cpp`. Run `{USAGE} --json benchmarks/results/kernel.json`.*\n{tail}"
    )
    for name in "abc":
        (root / f"src/{name}.cpp").write_text(f"int {name}();\n")
    assert "`src/a.cpp`, `src/b.cpp`, `src/c.cpp` and 1 more. Run" in built(PAGE)
    assert built("<!-- /unknown -->\n") == "<!-- /unknown -->\n"
    assert "tools/mkdocs_records.py" in (ROOT / "mkdocs.yml").read_text()


def test_the_readme_links_to_records_whether_stale_or_not(root: Path) -> None:
    readme = records.linked(PAGE, [only(root)])
    line = f"*Measured 2026-11-22 on a device, commit {COMMIT}: [kernel.json](benchmarks/results/kernel.json).*\n"
    assert f"<!-- /kernel times -->\n{line}\nAfter.\n" in readme
    assert records.linked(readme, [only(root)]) == readme
    (root / "src/kernel.cpp").write_text("int f() { return 2; }\n")
    assert records.linked(readme, [only(root)]) == readme
    rewrite(root, date="2026-11-23")
    assert records.linked(readme, [only(root)]) == readme.replace("2026-11-22", "2026-11-23")


def test_a_page_links_to_records_and_the_documentation_replaces_the_line(root: Path) -> None:
    page = records.linked(PAGE, [only(root)], "docs/benchmarks.md")
    assert f", commit {COMMIT}: [kernel.json](../benchmarks/results/kernel.json).*\n" in page
    (root / "src/kernel.cpp").write_text("int f() { return 2; }\n")
    built = records.captioned(page, [only(root)])
    assert built == records.captioned(PAGE, [only(root)])
    assert built.count("*Measured") == 1


def test_a_commit_is_entered_once_it_is_known(root: Path) -> None:
    def git(*arguments: str) -> str:
        who = ("-c", "user.name=a", "-c", "user.email=a@b.c")
        return subprocess.run(["git", *who, *arguments], cwd=root, capture_output=True, text=True, check=True).stdout

    git("init", "-q")
    git("add", ".")
    git("commit", "-q", "-m", "all")
    head = git("rev-parse", "--short=10", "HEAD").strip()
    assert records.clean_commit(["src/*.cpp"], root) == head
    (root / "src/kernel.cpp").write_text("int f() { return 2; }\n")
    assert records.clean_commit(["src/*.cpp"], root) == ""
    git("commit", "-q", "-a", "-m", "other")
    records.update(root)
    assert only(root).commit == COMMIT  # stale: of no commit that is known
    git("reset", "-q", "--hard", head)
    records.update(root)  # COMMIT is in no history
    assert only(root).commit == head
    assert f"commit {head}: [kernel.json]" in (root / "README.md").read_text()
    git("commit", "-q", "-a", "-m", "more")
    records.update(root)
    assert only(root).commit == head
