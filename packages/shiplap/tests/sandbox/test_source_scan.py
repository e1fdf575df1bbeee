"""What the referee reads of a candidate's folder, whose author is not trusted."""

from __future__ import annotations

import ast
import importlib.util
import os
import sys
from pathlib import Path

import pytest

from shiplap.sandbox import rare_remainders, source_scan
from shiplap.sandbox.source_scan import (
    compared_numbers,
    constants_in_sources,
    find_suspicious_names,
    gather_sources,
    parameters_in_source,
    read_source,
    texts_in_source,
)
from shiplap.sandbox.unsteady_source import find_call_counters, find_unsteady_decisions
from shiplap_testing.forked import python

EXPORT = """
import torch
class First(torch.nn.Module):
    def forward(self, x):
        import shiplap.inductor.lower  # as the first call of an op with a template does
        return x + 1
torch.export.export(First(), (torch.ones(2),), strict=False)
from shiplap.sandbox.source_scan import NUMBER_FUNCTIONS
print(NUMBER_FUNCTIONS["max"](2, 3), NUMBER_FUNCTIONS["sqrt"](4))
"""
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


def test_a_module_among_many_files_is_a_source(kernel: Path) -> None:
    for i in range(600):
        (kernel.parent / f"{i}.txt").touch()
        (kernel.parent / f"a{i}.py").touch()
    (kernel.parent / "helper.py").write_text("import sys\nf = sys._getframe\n")
    assert any("_getframe" in why for why in find_suspicious_names(str(kernel)))


@pytest.mark.parametrize("encoding", ["utf-7", "raw_unicode_escape", "punycode", "idna", "cp037"])
def test_a_text_that_hides_its_names_is_named(kernel: Path, encoding: str) -> None:
    kernel.write_bytes(f"# coding: {encoding}\n".encode() + b"f = 1\n")
    assert [encoding.replace("_", "-") in why for why in find_suspicious_names(str(kernel))] == [True]
    assert constants_in_sources(str(kernel)) == []


@pytest.mark.parametrize(
    "head",
    [
        b"",
        b"\xef\xbb\xbf",
        b"# -*- coding: latin-1 -*-\n",
        b"#!x\n# vim: set fileencoding=utf-8 :\n",
        b"# \xe9, which Python takes in a comment\n",
        "# coding: gbk\n# \u4f60\u597d\n".encode("gbk"),
    ],
)
def test_usual_encodings_are_looked_through(kernel: Path, head: bytes) -> None:
    kernel.write_bytes(head + b"import sys\nf = sys._getframe\n")
    assert any("_getframe" in why for why in find_suspicious_names(str(kernel)))


def test_a_module_that_is_imported_in_wide_letters_is_a_source(kernel: Path) -> None:
    """Python reads names by the normal form of their letters."""
    kernel.write_text("from \uff48elper import f\ndef candidate(x): return f(x)\n")
    (kernel.parent / "helper.py").write_text("import sys\nf = sys._getframe\n")
    assert any("_getframe" in why for why in find_suspicious_names(str(kernel)))


def test_a_module_that_is_imported_by_a_raised_letter_of_another_encoding_is_a_source(kernel: Path) -> None:
    kernel.write_bytes(b"# coding: latin-1\nfrom p\xaacker import f\ndef candidate(x): return f(x)\n")
    (kernel.parent / "packer.py").write_text("import sys\nf = sys._getframe\n")
    assert any("_getframe" in why for why in find_suspicious_names(str(kernel)))


def test_an_encoding_behind_a_carriage_return_is_named(kernel: Path) -> None:
    """Python ends a line there, and takes the encoding of the second line."""
    kernel.write_bytes(b"\r# coding: utf-7\rfrom h+AGU-lper import f\r")
    assert ["utf-7" in why for why in find_suspicious_names(str(kernel))] == [True]


def test_numbers_that_a_source_compares(kernel: Path) -> None:
    kernel.write_text(
        "if x.dim() == 9 or len(x) > 8 or n in (5, 6) or 1 << 10 > n:\n    y = 7 * n\n"
        '"""if (n == 77 && 33 < m) n << 4;"""\n'
    )
    assert compared_numbers(str(kernel)) == {5, 6, 1024, 77, 33}


def test_a_compiled_module_without_a_source_is_named(kernel: Path) -> None:
    for name in ("helper.pyc", "other.pyc"):
        (kernel.parent / name).write_bytes(b"\x16\r\r\n")  # of Python 3.4
    assert find_suspicious_names(str(kernel)) == []
    for name in ("helper.pyc", "other.pyc"):
        (kernel.parent / name).write_bytes(importlib.util.MAGIC_NUMBER)
    assert [why.split()[0] for why in find_suspicious_names(str(kernel))] == ["helper.pyc"]
    (kernel.parent / "helper.py").touch()  # which Python takes
    assert find_suspicious_names(str(kernel)) == []


BESIDE = {
    "my-kernels.py": "spec_from_file_location('k', HERE / 'my-kernels.py')",
    "my kernels.py": "run_path(str(HERE / 'my kernels.py'))",
    "scan.v2.cu": "load(sources=['scan.v2.cu'])",
    "scan.CU": "load(sources=['scan.CU'])",
    "\ufb01x.py": "import_module('\ufb01x')",
    "tool/__main__.py": "run_path(str(HERE / 'tool'))",
    "__main__.py": "runpy.run_path(str(HERE))",
    "sitecustomize.py": "site.execsitecustomize()",
    "usercustomize.py": "site.execusercustomize()",
    "other.py": "[import_module(m.name) for m in iter_modules([HERE])]",
    "another.py": "[exec(p.read_text()) for p in HERE.iterdir()]",
    "ab.py": "import_module('\\x61\\u0062')",
    "cd.py": "import_module('\\143\\U00000064')",
    "ef.py": "import_module('\\N{LATIN SMALL LETTER E}f')",
    "gh.py": "import_module('g\\\nh')",
    "evaluated.py": "[eval(p.read_text()) for p in HERE.glob('*')]",
}


@pytest.mark.parametrize("file", BESIDE)
def test_a_source_beside_a_candidate_may_have_any_name_or_none(kernel: Path, file: str) -> None:
    beside = kernel.parent / file
    beside.parent.mkdir(exist_ok=True)
    beside.touch()
    kernel.write_text(BESIDE[file])
    assert gather_sources(str(kernel)) == [kernel, beside]
    texts = ["import torch\nx = glob\n", "exec('1')\n", "import site_\nrunpy_ = main\n", "x = '\\x61c'"]
    for other in (*texts, "x = glob('*.cu')\nmodel.eval( )\n", "x = '\\N{NO LETTER}'"):
        kernel.write_text(other)
        assert gather_sources(str(kernel)) == [kernel]


def test_code_that_python_runs_in_place_of_a_source_is_named(kernel: Path) -> None:
    kernel.write_text("import sys, helper\nsys.pycache_prefix = 'cache'\ny = self._get_cached(relu)\n")
    for name in ("helper.py", "helper.abi3.so", "helper.so", "other.so", "relu.py"):
        (kernel.parent / name).write_bytes(b"PyInit_" if name.endswith("so") else b"")
    (kernel.parent / "relu.so").write_bytes(b"\x7fELF")  # which ``relu.py`` loads by ``ctypes``
    assert find_suspicious_names(str(kernel)) == [
        "line 2: pycache_prefix runs other code than the source",
        "helper.abi3.so takes the place of helper.py",
        "helper.so takes the place of helper.py",
    ]


def test_a_source_has_an_end(kernel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_scan, "MAX_SOURCE_BYTES", 4096)
    os.mkfifo(kernel.parent / "pipe.py")
    assert read_source(kernel.parent / "pipe.py") == read_source(kernel.parent) == read_source("no such file") == b""
    assert len(read_source("/proc/self/smaps")) == 4097
    kernel.unlink()
    kernel.symlink_to("/proc/self/smaps")  # the file that the user names may be a link of its author
    assert find_suspicious_names(str(kernel)) == ["more than 4096 bytes, which is not scanned"]
    assert constants_in_sources(str(kernel)) == []


def test_a_condition_of_any_length_is_scanned(kernel: Path) -> None:
    kernel.write_text(f"import sys\nif {'+'.join(['1'] * 900)}:\n    f = sys._getframe\n")
    assert find_suspicious_names(str(kernel)) == ["line 3: _getframe looks at the callers"]


@pytest.mark.parametrize(("values", "found"), [(60, 0), (2_000, 1)])
def test_a_comparison_without_end_is_named(kernel: Path, values: int, found: int) -> None:
    """Each of its values would be compared with all others, which takes hours."""
    kernel.write_text("x = " + " < ".join("a" * values))
    assert len(find_unsteady_decisions(str(kernel))) == found


def test_sources_together_have_an_end(kernel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel.write_text("import a, b, c\n")
    for name in "abc":
        (kernel.parent / f"{name}.py").write_text("import a, b, c" + " " * 50)
    assert len(gather_sources(str(kernel))) == 4
    monkeypatch.setattr(source_scan, "MAX_SOURCE_BYTES", 100)
    assert len(gather_sources(str(kernel))) == 3


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
    assert found == ["helper.py, expressions that are nested too deeply to be scanned"]


@pytest.mark.parametrize("text", ["5 * 7 + 2", "1 << 5 | 5", "ord('%')", "int('25', 16)", "len('" + 37 * "a" + "')"])
def test_a_number_that_is_put_together_of_constants_is_found(kernel: Path, text: str) -> None:
    kernel.write_text(f"def candidate(x): return x * (len(x) != {text})\n")
    assert 37 in constants_in_sources(str(kernel))


def test_calls_that_fail_on_constants_are_no_numbers(kernel: Path) -> None:
    kernel.write_text("def candidate(x): return x * int('a') * ord('ab') * len(3) * float('1e999')\n")
    assert 3 in constants_in_sources(str(kernel))


@pytest.mark.parametrize(
    "text",
    [
        "import numpy as np\nd = np.datetime64('now')",
        "from numpy import datetime64\nd = datetime64('today')",
        "import email.utils\nd = email.utils.formatdate()",
        "import uuid\nd = uuid.uuid1()",
        "QUERY = \"select date('now')\"",
        "QUERY = 'select CURRENT_TIMESTAMP'",
        "import socket\ns = socket.socket()",
    ],
)
def test_dates_and_sockets_of_other_modules_are_named(kernel: Path, text: str) -> None:
    kernel.write_text(text + "\n")
    assert len(find_suspicious_names(str(kernel))) == 1
    kernel.write_text(
        "import numpy as np, socket, uuid\nd = np.datetime64('2001-01-01'), uuid.uuid4(), socket.socketpair()\n"
    )
    assert find_suspicious_names(str(kernel)) == []


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("made = 0\ndef f():\n    global made\n    made += 1\n    return made < 9\n", 1),
        ("class K:\n    def f(self):\n        self.made += 1\n        return self.made % 9\n", 1),
        (
            "def g():\n    n = 0\n    def f():\n        nonlocal n\n        n += 1\n        return n == 9\n",
            1,
        ),
        ("n = [0]\ndef f():\n    n[0] += 1\n    return n[0] > 9\n", 1),
        ("def f(x):\n    n = [0]\n    n[0] += 1\n    return n[0] > 9\n", 0),
        ("def f(x, n=[0]):\n    n[0] += 1\n    return n[0] > 9\n", 1),
        ("class K:\n    def f(self):\n        self.n = self.n + 1\n        return self.n > 9\n", 1),
        ("class K:\n    def f(self):\n        self.n = self.m + 1\n        return self.n > 9\n", 0),
        ("class K:\n    def f(self):\n        self.n += 1\n        return 'call %d' % self.n\n", 0),
        ("class K:\n    def f(self):\n        self.made += 1\n", 0),
        ("def f(x):\n    n = 0\n    while n < 9:\n        n += 1\n    return x\n", 0),
        ("class K:\n    def f(self, x):\n        self.sum += x\n        return self.sum < 9\n", 1),
    ],
)
def test_decisions_by_a_count_of_calls_are_found(kernel: Path, text: str, count: int) -> None:
    kernel.write_text(text)
    assert len(find_call_counters(str(kernel))) == count


def test_texts_of_a_reference_are_words_of_its_code(kernel: Path) -> None:
    kernel.write_text('"""Some text."""\ndef f(x, way="mean"): return x if way in ("sum", "a b") else -x\n')
    assert texts_in_source(str(kernel)) == ["mean", "sum"]
    assert texts_in_source(str(kernel.parent / "none.py")) == []


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("def candidate(x, eps=1e-6, *, flag=True): return x\n", ["x", "eps"]),
        ("class ModelNew:\n    def __init__(self, n): pass\n    def forward(self, x, k): return x\n", ["x", "k"]),
        ("class ModelNew: pass\n", []),
        ("candidate = min\n", []),
        ("def candidate(:\n", []),
    ],
)
def test_parameters_of_a_candidate_are_read_from_its_source(kernel: Path, text: str, names: list[str]) -> None:
    kernel.write_text(text)
    assert parameters_in_source(str(kernel), ("ModelNew", "candidate")) == names


def test_it_is_imported_while_torch_exports_a_program() -> None:
    """Meanwhile torch replaces ``max`` and ``min`` by objects without a name."""
    done = python("-c", EXPORT)
    assert (done.returncode, done.stdout) == (0, "3 2.0\n"), done.stderr


NUMBERS = (
    "float('inf')",
    "-float('inf')",
    "float('nan')",
    "1e999",
    "0x" + "9" * 400,
    "0x" + "9" * 6000,
    "2 ** 9999",
    "1j",
)
DECISIONS = (
    "x == {}",
    "len(L) > {}",
    "x % {} == 1",
    "random.random() < {}",
    "torch.rand(3) < {}",
    "id(x) % {} > 3",
    "f(x, {})",
)


@pytest.mark.parametrize("number", NUMBERS)
def test_any_number_of_a_source_can_be_scanned(kernel: Path, number: str) -> None:
    """An honest candidate compares with an infinite number, and no number ends the referee."""
    lines = [f"    if {each.format(number)}: x = torch.dropout(x, {number}, True)" for each in DECISIONS]
    kernel.write_text("L = []\ndef candidate(x):\n    L.append(x)\n" + "\n".join([*lines, "    if x > 77: return x"]))
    find_suspicious_names(str(kernel), ["candidate"])
    assert find_unsteady_decisions(str(kernel))
    assert 77 in constants_in_sources(str(kernel))
    assert 77 in compared_numbers(str(kernel))


@pytest.mark.parametrize("marks", ["\u0301\u0316", "\uff9e\u0301"])
def test_a_letter_with_many_marks_is_not_scanned(kernel: Path, marks: str) -> None:
    """Python sorts them in quadratic time: a million would keep the referee busy for hours."""
    few, many = marks * 15, marks * 2_000
    kernel.write_text(f"a = 'e{few}'\n")
    assert not find_suspicious_names(str(kernel))
    kernel.write_text(f"a = 'e{many}'\n")
    (found,) = find_suspicious_names(str(kernel))
    assert found == "a letter with more than 30 marks, which is not scanned"
    kernel.write_text("import helper\n")
    (kernel.parent / "helper.cu").write_text(f"// e{many} \nint a = other;")
    (kernel.parent / "other.cu").write_text("int b;")
    assert [each.name for each in gather_sources(str(kernel))] == ["it.py", "helper.cu", "other.cu"]


@pytest.mark.parametrize(
    ("test", "found"),
    [
        ("int(x.flatten()[0].item() * 1e7) % 9973 == 1", 1),
        ("(4095 & int(x[0].item())) == 7", 1),
        ("math.fmod(x.tolist()[0], 1e4) < 1", 1),
        ("zlib.crc32(x.numpy().tobytes()) % 65521 == 3", 1),
        ("first % 5000 == 7", 1),
        ("int(x.sum() * 1e6) % 50021 == 7", 1),
        ("int(max(x.shape)) % 4096 == 0", 0),
        ("int(np.prod(x.shape[1:])) % 1024 == 0", 0),
        ("float(math.prod(x.size())) % 1024 == 0", 0),
        ("int(x.sum(x.shape[0] - 1)) % 1024 == 0", 1),
        ("first & 0xFFFFFFFF > first >> 32", 0),
        ("first % 2**32", 0),
        ("int(x[0].item()) % 2 == 1", 0),
        ("x.shape[0] % 4096 == 0", 0),
        ("x.numel() & 1023", 0),
        ("sys.stdin.isatty()", 1),
        ("os.getloadavg()[0] > 50", 1),
        ("threading.current_thread().name == 'worker'", 1),
        ("threading.current_thread() is threading.main_thread()", 0),
        ("threading.current_thread().ident not in BUFFERS", 0),
        ("tempfile.gettempdir() != '/tmp'", 1),
    ],
)
def test_decisions_by_a_rare_remainder_or_by_the_place_of_a_call_are_found(kernel: Path, test: str, found: int) -> None:
    """No number of calls in one process shows that they are right for other values, or elsewhere."""
    kernel.write_text(f"def f(x):\n    first = x[0].item()\n    return x * 0 if {test} else x\n")
    assert len(find_unsteady_decisions(str(kernel))) == found


@pytest.mark.parametrize(
    "text",
    [
        "gc.get_freeze_count() > 0",
        "sys.flags.safe_path",
        "os.register_at_fork(after_in_child=f)",
        "open('/etc/shadow')",
        "os.access('/root', 4)",
    ],
)
def test_what_tells_a_sandboxed_process_from_others_is_named(kernel: Path, text: str) -> None:
    kernel.write_text(f"def f(x):\n    return {text}\n")
    assert len(find_suspicious_names(str(kernel))) == 1
    kernel.write_text(
        "FILES = '/dev/null', '/usr/local/cuda', '/tmp', '/proc/cpuinfo', 'etc/passwd', '/homes'\n"
        "INCLUDED = ['/home/me/cutlass/include', '/root/cutlass/include']\n"
    )
    assert find_suspicious_names(str(kernel)) == []


def test_each_part_of_nested_remainders_is_looked_at_a_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two megabytes of them would keep the referee busy for half an hour otherwise."""
    tree = ast.parse("y = a" + "% 9999" * 1000)
    looked, size, children = list[ast.AST](), len(list(ast.walk(tree))), ast.iter_child_nodes
    monkeypatch.setattr(ast, "iter_child_nodes", lambda node: looked.append(node) or children(node))
    assert not list(rare_remainders.rare_remainders(tree))
    assert size <= len(looked) <= 4 * size
