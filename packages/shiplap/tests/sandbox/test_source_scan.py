"""What the referee reads of a candidate's folder, whose author is not trusted."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from shiplap.sandbox import source_scan
from shiplap.sandbox.source_scan import constants_in_sources, find_suspicious_names, gather_sources, read_source

KERNEL = "from helper import f\ndef candidate(x): return f(x)\n"


@pytest.fixture
def kernel(tmp_path: Path) -> Path:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "it.py").write_text(KERNEL)
    return tmp_path / "folder" / "it.py"


@pytest.mark.parametrize(
    "target", ["/proc/self/pagemap", "/proc/self/environ", "/dev/zero", "helper.py", "../secret.py"]
)
def test_a_link_that_leads_out_of_the_folder_is_no_source(kernel: Path, tmp_path: Path, target: str) -> None:
    """A file of ``/proc`` states no size and may have no end; a process in the sandbox could not read it anyway."""
    (tmp_path / "secret.py").write_text("N = 734211\n")
    (kernel.parent / "helper.py").symlink_to(target)
    assert gather_sources(str(kernel)) == [kernel]
    assert find_suspicious_names(str(kernel)) == []
    assert 734211 not in constants_in_sources(str(kernel))


def test_a_link_within_the_folder_is_a_source(kernel: Path) -> None:
    (kernel.parent / "real.py").write_text("import sys\nf = sys._getframe\n")
    (kernel.parent / "helper.py").symlink_to("real.py")
    assert any("_getframe" in why for why in find_suspicious_names(str(kernel)))


def test_a_source_has_an_end(kernel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_scan, "MAX_SOURCE_BYTES", 4096)
    os.mkfifo(kernel.parent / "pipe.py")
    assert read_source(kernel.parent / "pipe.py") == read_source(kernel.parent) == read_source("no such file") == b""
    assert len(read_source("/proc/self/smaps")) == 4097
    kernel.unlink()
    kernel.symlink_to("/proc/self/smaps")  # the file that the user names may be a link of its author
    assert find_suspicious_names(str(kernel)) == ["more than 4096 bytes, which nobody looks through"]
    assert constants_in_sources(str(kernel)) == []


def test_a_condition_of_any_length_is_looked_through(kernel: Path) -> None:
    kernel.write_text(f"import sys\nif {'+'.join(['1'] * 900)}:\n    f = sys._getframe\n")
    assert find_suspicious_names(str(kernel)) == ["line 3: _getframe looks at the callers"]


@pytest.mark.parametrize("test", ["__name__ == '__main__'", "'__main__' == __name__"])
def test_what_runs_as_a_program_alone_may_read_the_date(kernel: Path, test: str) -> None:
    read = "import time\n    time.time()\n"
    kernel.write_text(f"if {test}:\n    {read}")
    assert find_suspicious_names(str(kernel)) == []
    for other in (f"{test} or 1", "__name__ != '__main__'", "__name__ == '__main__' == 1", "'__main__' == '__main__'"):
        kernel.write_text(f"if {other}:\n    {read}")
        assert find_suspicious_names(str(kernel)) == ["line 3: time.time reads the date, on which no result may depend"]
    kernel.write_text(f"if {test}:\n    pass\nelse:\n    {read}")
    assert len(find_suspicious_names(str(kernel))) == 1


def test_what_is_nested_too_deeply_for_this_process_is_named(kernel: Path) -> None:
    """A candidate may raise the limit of recursion before it imports the rest."""
    deep = kernel.parent / "helper.py"
    deep.write_text(f"import sys\nf = sys._getframe\nx = {'-' * 9000}1\n")
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(300)
    try:
        found = find_suspicious_names(str(kernel))
    finally:
        sys.setrecursionlimit(before)
    assert found == ["helper.py, expressions that are nested too deeply to be looked through"]
