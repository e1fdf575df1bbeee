"""``tools/records.py`` lists which records are stale, and pages include figures of records."""

from __future__ import annotations

import importlib.util
import json
import subprocess
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import jinja2
import pytest
from tools import records

pytestmark = pytest.mark.docs

ROOT = Path(__file__).resolve().parents[1]
USAGE = "python benchmarks/kernel.py --device cpu"
PAGE = "Before.\n\n<!-- kernel times -->\n| a | b |\n|---|---|\n| 1 | 2 |\n<!-- /kernel times -->\n\nAfter.\n"


def module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def git(root: Path, *arguments: str) -> str:
    who = ("-c", "user.name=a", "-c", "user.email=a@b.c")
    return subprocess.run(["git", *who, *arguments], cwd=root, capture_output=True, text=True, check=True).stdout


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with one record, of a kernel in C++, a function in Python and the script that measured them."""
    files = {
        "src/kernel.cpp": "int f() { return 1; }\n",
        "src/launch.py": "def run():\n    return 1\n",
        "benchmarks/kernel.py": f'"""Times.\n\n    {USAGE} [--json benchmarks/results/kernel.json] [--fast]\n"""\n',
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "all")
    recorder = module(ROOT / "benchmarks" / "_record.py")
    monkeypatch.setattr(recorder, "ROOT", tmp_path)
    patterns = ["src/*.cpp", "src/launch.py::run", "benchmarks/kernel.py"]
    result = recorder.record(patterns, ["no-such-package"], device="a device", ms=1.0, rows=[{"n": 8, "us": 1.25}])
    assert result["commit"] == git(tmp_path, "rev-parse", "--short=10", "HEAD").strip()
    assert result["versions"]["no-such-package"] == "not installed"
    recorder.write(tmp_path / "benchmarks" / "results" / "kernel.json", result | {"date": "2026-11-22"})
    with pytest.raises(FileNotFoundError, match="src/none"):
        recorder.record(["src/none.cpp"], [])
    return tmp_path


def only(root: Path) -> records.Record:
    (actual,) = records.load_records(root)
    return actual


def test_a_record_of_the_sources_as_they_are_is_fresh(root: Path) -> None:
    record = only(root)
    assert (record.name, record.device, record.date, record.changed) == ("kernel", "a device", "2026-11-22", ())
    assert list(records.show([record])) == [
        f"fresh  kernel  2026-11-22  {record.commit}  a device",
        "1 records, 0 stale",
    ]


@pytest.mark.parametrize("committed", [False, True])
def test_a_changed_file_is_listed_with_the_command_that_measures_again(root: Path, committed: bool) -> None:
    (root / "src/kernel.cpp").write_text("int f() { return 2; }\n")
    if committed:
        git(root, "commit", "-q", "-a", "-m", "more")
    record = only(root)
    assert list(records.show([record]))[1:] == [
        "       changed since: src/kernel.cpp",
        "       reason: none given",
        f"       measure again: {USAGE} --json benchmarks/results/kernel.json",
        "1 records, 1 stale",
    ]


@pytest.mark.parametrize(
    ("text", "changed"),
    [
        ('"""Runs."""\ndef run():\n    """Return one."""\n    return 1  # the first\n', ()),
        ("def run():\n    return 1\n\ndef beside():\n    return 3\n", ()),
        ("def run():\n    return 2\n", ("src/launch.py",)),
        ("def ran():\n    return 1\n", ("src/launch.py",)),
        ("def run():\n    return '1'\n", ("src/launch.py",)),
    ],
)
def test_comments_and_docstrings_of_python_leave_a_record_fresh(
    root: Path, text: str, changed: tuple[str, ...]
) -> None:
    (root / "src/launch.py").write_text(text)
    assert only(root).changed == changed


@pytest.mark.parametrize(
    ("text", "changed"),
    [
        ("int f()\n  { return 1; } // the first\n/* and\n the last */\n", ()),
        ("int f() { return/* one */1; }\n", ()),
        ("int f() { return 11; }\n", ("src/kernel.cpp",)),
        ('int f() { return 1; }\nchar const *page = "// no comment";\n', ("src/kernel.cpp",)),
    ],
)
def test_comments_and_spaces_of_cpp_leave_a_record_fresh(root: Path, text: str, changed: tuple[str, ...]) -> None:
    (root / "src/kernel.cpp").write_text(text)
    assert only(root).changed == changed


def test_methods_and_constants_can_be_named(root: Path) -> None:
    text = "A = 1\nB: int = 2\nclass C:\n    def f(self): return 1\n    def g(self): return 2\n"
    named = frozenset({"B", "C.f"})
    assert records.code_text(text, named) == records.code_text(text.replace("return 2", "return 3"), named)
    assert records.code_text(text, named) != records.code_text(text.replace("return 1", "return 3"), named)
    assert records.code_text(text, named) != records.code_text(text.replace("= 2", "= 3"), named)


def test_a_stale_record_has_a_reason_and_a_fresh_one_has_none(root: Path) -> None:
    reasons = root / "benchmarks/results/stale.toml"
    assert records.find_unexplained([only(root)], {}) == []
    (root / "src/kernel.cpp").write_text("int f() { return 2; }\n")
    assert [line.partition(":")[0] for line in records.find_unexplained([only(root)], {})] == ["kernel"]
    reasons.write_text('[slow]\nreason = "A reason."\nrecords = ["kernel"]\n')
    assert "       reason: A reason." in records.show([only(root)])
    assert records.find_unexplained([only(root)], records.load_reasons(root)) == []
    assert " A reason. Run `" in only(root).caption
    (root / "src/kernel.cpp").write_text("int f() { return 1; }\n")
    assert records.find_unexplained([only(root)], records.load_reasons(root)) == [
        "kernel: not stale, but has a reason there"
    ]


def test_stale_records_are_measured_again_each_command_once(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(records, "ROOT", root)
    (root / "src/kernel.cpp").write_text("int f() { return 2; }\n")
    stale = only(root)
    commands = {
        "kernel": 'python -c \'open("again", "a").write("x")\'',
        "kernel part": 'python -c \'open("again", "a").write("x")\'',
        "broken": "python -c 'raise SystemExit(3)'",
        "other": 'python -c \'open("other", "w")\'',
    }
    listed = [replace(stale, name=name, command=command) for name, command in commands.items()]
    assert records.renew([replace(stale, changed=())], [], 60, 60) == 0
    assert records.renew(listed, ["kernel", "broken"], 60, 60) == 1
    assert (root / "again").read_text() == "x"
    assert not (root / "other").exists()
    assert "failed (3)" in capsys.readouterr().out
    assert records.renew(listed[3:], [], 60, -1) == 1
    assert not (root / "other").exists()


def test_a_source_that_is_gone_is_listed(root: Path) -> None:
    (root / "src/launch.py").unlink()
    assert only(root).changed == ("src/launch.py", "src/launch.py::run")


def test_a_part_of_another_day_is_a_record_of_its_own(root: Path) -> None:
    path = root / "benchmarks/results/kernel.json"
    part = json.loads(path.read_text())
    path.write_text(json.dumps(part | {"with AVX-512": part | {"date": "2026-11-20"}}))
    whole, older = records.load_records(root)
    assert (whole.name, older.name, older.date) == ("kernel", "kernel with AVX-512", "2026-11-20")
    assert records.find_record("kernel with AVX-512", [whole, older]) is older
    assert records.find_record("kernel times", [whole, older]) is whole
    assert records.find_record("kernels", [whole, older]) is None


def test_the_documentation_includes_figures_and_says_below_them_whether_they_are_stale(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hook = module(ROOT / "tools" / "mkdocs_records.py")
    monkeypatch.setattr(hook, "ROOT", root)

    def built(markdown: str) -> str:
        hook.on_pre_build(config=None)
        return str(hook.on_page_markdown(markdown, page=None, config=None, files=None))

    rows = '[[% for r in kernel.rows ]]\n| [[= r.n ]] | [[= "%.1f" | format(r.us) ]] |\n[[% endfor ]]'
    template = PAGE.replace("| 1 | 2 |", rows)
    head, tail = PAGE[: PAGE.index("\nAfter")].replace("| 1 | 2 |", "| 8 | 1.2 |"), PAGE[PAGE.index("\nAfter") :]
    commit = only(root).commit
    assert built(template) == f"{head}\n*Measured 2026-11-22 on a device, commit {commit}.*\n{tail}"
    (root / "src/kernel.cpp").write_text("int f() { return 2; }\n")
    assert "**the measured sources have changed since**: `src/kernel.cpp`. Run `" in built(template)
    assert built("[[ `{{ x }}` ]]\n<!-- /unknown -->\n") == "[[ `{{ x }}` ]]\n<!-- /unknown -->\n"
    with pytest.raises(jinja2.UndefinedError):
        built("[[= kernel.absent ]]")
    assert "tools/mkdocs_records.py" in (ROOT / "mkdocs.yml").read_text()


def test_the_readme_links_to_records_whether_stale_or_not(root: Path) -> None:
    readme = records.linked(PAGE, [only(root)])
    commit = only(root).commit
    line = f"*Measured 2026-11-22 on a device, commit {commit}: [kernel.json](benchmarks/results/kernel.json).*\n"
    assert f"<!-- /kernel times -->\n{line}\nAfter.\n" in readme
    (root / "src/kernel.cpp").write_text("int f() { return 2; }\n")
    assert records.linked(readme, [only(root)]) == readme
    page = records.linked(PAGE, [only(root)], "docs/benchmarks.md")
    assert records.captioned(page, [only(root)]).count("*Measured") == 1


def test_every_record_of_this_repository_says_where_it_comes_from() -> None:
    for path in sorted((ROOT / "benchmarks" / "results").glob("*.json")):
        assert (ROOT / "benchmarks" / f"{path.stem}.py").is_file()
        for name, part in records.parts(path.stem, json.loads(path.read_text(encoding="utf-8"))):
            assert [field for field in records.FIELDS if not part.get(field)] == [], name
            if git(ROOT, "rev-parse", "--is-shallow-repository").strip() == "false":  # it has all commits
                assert git(ROOT, "cat-file", "-t", part["commit"]).strip() == "commit", name


def test_figures_on_pages_are_of_a_record() -> None:
    known = records.load_records(ROOT)
    hook = module(ROOT / "tools" / "mkdocs_records.py")
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        text = hook.with_figures(page.read_text(encoding="utf-8"))
        for name in (match[2] for match in records.LINE.finditer(text)):
            assert name.startswith(("native", "install")) or records.find_record(name, known), (
                f"{page.name}: no record {name}"
            )
