"""The workflows run sessions and targets that exist, with pinned actions and no more rights than they need."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from shiplap.torch_private.versions import RELEASES
from shiplap_testing.paths import REPOSITORY

pytestmark = pytest.mark.docs

GITHUB = REPOSITORY / ".github"
WORKFLOWS = {path.name: yaml.safe_load(path.read_text("utf-8")) for path in sorted(GITHUB.glob("workflows/*.yml"))}
JOBS = [(file, name, job) for file, workflow in WORKFLOWS.items() for name, job in workflow["jobs"].items()]
each_job = pytest.mark.parametrize(("file", "name", "job"), JOBS, ids=[f"{f}:{n}" for f, n, _ in JOBS])


def steps(job: dict[str, Any]) -> list[dict[str, Any]]:
    return job.get("steps", [])


@pytest.fixture(scope="module")
def sessions() -> set[str]:
    """Every name by which nox can be asked for a session."""
    call = [sys.executable, "-m", "nox", "--list"]
    listed = subprocess.run(call, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout
    names = re.findall(r"^[*-] (\S+)(?: ->|$)", listed, re.MULTILINE)
    return {*names, *(re.sub(r"(-3\.\d+)?(\(.*)?$", "", name) for name in names)}


def test_workflows_are_found() -> None:
    assert {"ci.yml", "nightly.yml", "wheels.yml", "release.yml"} <= WORKFLOWS.keys()


@each_job
def test_a_job_runs_sessions_and_targets_that_exist(
    file: str, name: str, job: dict[str, Any], sessions: set[str]
) -> None:
    targets = set(re.findall(r"^([a-z-]+):.*## ", (REPOSITORY / "Makefile").read_text(), re.MULTILINE))
    matrix = job.get("strategy", {}).get("matrix", {})
    rows = [*matrix.get("include", []), *({key: value} for key in matrix for value in matrix[key] if key != "include")]
    for step in steps(job):
        run = step.get("run", "")
        named = re.findall(r'\bnox (?:--[\w-]+ )*-s "?([^\s"]+)"?', run)
        made = [
            word for line in re.findall(r"\bmake ([^\n]+)", run) for word in line.split() if re.match(r'["\w]', word)
        ]
        for variable, expression in step.get("env", {}).items():
            key = re.fullmatch(r"\$\{\{ matrix\.(\w+) \}\}", str(expression))
            values = [row[key[1]] for row in rows if key and key[1] in row]
            named = [v for n in named for v in (values if n == f"${variable}" else [n])]
            made = [v for m in made for v in (values if m.strip('"') == f"${variable}" else [m])]
        assert set(named) <= sessions, f"{file}: {name}"
        assert {target for target in made if "=" not in target} <= targets, f"{file}: {name}"


def test_each_change_runs_on_the_releases_that_are_listed() -> None:
    """The whole suite on the newest one, and some session on each of the others (``oldest`` takes the first)."""
    rows = {row["session"] for row in WORKFLOWS["ci.yml"]["jobs"]["matrix"]["strategy"]["matrix"]["include"]}
    assert {f"matrix(torch='{RELEASES[-1]}')", "oldest"} <= rows
    assert set(RELEASES[1:]) <= set(re.findall(r"torch='([^']+)'", " ".join(rows)))


@each_job
def test_a_job_has_few_rights_and_ends(file: str, name: str, job: dict[str, Any]) -> None:
    assert WORKFLOWS[file]["permissions"] == {}
    rights = job["permissions"]
    written = {right for right, level in rights.items() if level != "read"}
    assert written <= ({"id-token", "attestations"} if file == "release.yml" else set())
    assert "uses" in job or job["timeout-minutes"] <= 360
    for step in steps(job):
        if step.get("uses", "").startswith("actions/checkout@"):
            assert step["with"]["persist-credentials"] is False
        assert "${{" not in step.get("run", ""), "pass it in an environment variable: it may hold code"


def test_actions_are_pinned_by_commit_with_their_version() -> None:
    for path in (*GITHUB.glob("workflows/*.yml"), REPOSITORY / "action.yml"):
        for line in re.findall(r"uses: (.+)", path.read_text("utf-8")):
            assert line.startswith("./") or re.fullmatch(r"[\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", line), line


@pytest.mark.parametrize("source", sorted(GITHUB.glob("requirements/*.in")), ids=lambda p: p.stem)
def test_tools_of_workflows_have_versions_and_hashes(source: Path) -> None:
    wanted = {line for line in source.read_text().splitlines() if line and not line.startswith("#")}
    pinned = re.findall(
        r"^([\w.-]+)==\S+ \\\n((?:    --hash=sha256:[0-9a-f]{64}(?: \\)?\n)+)",
        source.with_suffix(".txt").read_text(),
        re.M,
    )
    assert wanted <= {name for name, _ in pinned}
    assert len(pinned) == len(re.findall(r"^[\w.-]+==", source.with_suffix(".txt").read_text(), re.M))


def test_what_a_hook_runs_is_part_of_lint() -> None:
    lint = (
        (REPOSITORY / "Makefile")
        .read_text()
        .partition("\nlint: ")[2]
        .partition("\n\n")[0]
        .replace("$(BIN)", ".venv/bin")
    )
    hooks = yaml.safe_load((REPOSITORY / ".pre-commit-config.yaml").read_text("utf-8"))["repos"][0]["hooks"]
    for hook in hooks:
        assert hook["entry"].removesuffix(" --fix") in lint, hook["id"]


def make_prints(*words: str) -> str:
    """Return the commands that ``make`` would run with the arguments ``words``."""
    command = ["make", "--dry-run", "--no-print-directory", *words]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    return subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize(
    ("workers", "wanted"), [("3", "-n $(( 3 + 1 )) "), ("auto", "-n auto "), ("logical", "-n logical ")]
)
def test_workers_are_a_number_or_a_word_of_xdist(workers: str, wanted: str) -> None:
    assert wanted in make_prints("test", f"WORKERS={workers}")


@pytest.mark.parametrize(
    ("arguments", "replaced"),
    [
        ("", False),
        ("-k conv", False),
        ('-k "one or two"', False),
        ("tests -x", True),
        ("tests/test_workflows.py::test_a", True),
    ],
)
def test_a_path_takes_the_place_of_the_files_with_tests_of_a_gpu(arguments: str, replaced: bool) -> None:
    printed = make_prints("test-gpu", f"ARGS={arguments}")
    assert printed.count(f" {arguments} || ") == 2
    assert printed.count("$(grep ") == (0 if replaced else 2)


@pytest.mark.parametrize("form", sorted(GITHUB.glob("ISSUE_TEMPLATE/[!c]*.yml")), ids=lambda p: p.stem)
def test_a_form_asks_for_what_is_needed(form: Path) -> None:
    read = yaml.safe_load(form.read_text("utf-8"))
    assert {"name", "description", "body"} <= read.keys()
    fields = [part for part in read["body"] if part["type"] != "markdown"]
    assert len({field["id"] for field in fields}) == len(fields)
    assert any(field.get("validations", {}).get("required") for field in fields)
