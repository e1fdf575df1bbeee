"""Digests of sources change with what the source means, and with nothing else."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import cast

import pytest
from tools.meaning import Repository, _hash, _python, combined, digests

Changes = dict[str, list[tuple[str, str]]]
MEASURED = "measure.clock_for("
PYTHON = '''"""What it is about."""
from __future__ import annotations
from typing import TYPE_CHECKING

import torch
from shiplap.tune.measure import clock_for
from shiplap import settings as options

if TYPE_CHECKING:
    from collections.abc import Callable

LIMITS = (1, 2.0, "a text")
WIDTH: int = 1


class Timer:
    """A clock."""

    def read(self, count: int = 1) -> float:
        """Seconds."""
        factor: int = 2
        return clock_for(options.current, torch.ones(count)) * factor  # why
'''
SAME = {
    "a trailing space": [("class Timer:", "class Timer: ")],
    "a comment": [("# why", "# because, and more")],
    "no comment": [("  # why", "")],
    "another docstring": [('"""A clock."""', '"""Another\n\n    text."""')],
    "no docstring": [('        """Seconds."""\n', "")],
    "other lines": [('(1, 2.0, "a text")', '(\n    1,\n    2.0,\n    "a " "text",\n)')],
    "other quotes": [('"a text"', "'a text'")],
    "imports in another order": [("import torch\n", ""), ("from typing", "import torch\nfrom typing")],
    "an import where it is used": [("import torch\n", ""), ('"""Seconds."""', "import torch")],
    "no imports for types": [("if TYPE_CHECKING:\n    from collections.abc import Callable\n\n", "")],
    "a type of a local variable": [("factor: int", "factor")],
    "a cast": [("import TYPE_CHECKING", "import TYPE_CHECKING, cast"), ("* factor", '* cast("int", factor)')],
    "an unused import": [("import torch", "import os\nimport torch")],
    "a helper in another module": [("shiplap.tune.measure", "shiplap.other")],
    "a helper under another name": [("clock_for", "clock"), ("import clock", "import clock_for as clock")],
    "a helper as the module's": [("tune.measure import clock_for", "tune import measure"), ("clock_for(", MEASURED)],
    "torch's function by name": [("import torch\n", "from torch import ones\n"), ("torch.ones", "ones")],
}
OTHER = {
    "a number": [("= 2", "= 3")],
    "a number of another type": [("2.0", "2")],
    "true for one": [("(1,", "(True,")],
    "a text": [("a text", "a  text")],
    "an operator": [("* factor", "+ factor")],
    "a default": [("count: int = 1", "count: int = 2")],
    "an annotation": [("count: int", "count: float")],
    "an annotation outside": [("WIDTH: int", "WIDTH: float")],
    "a name": [("def read", "def reads")],
    "another helper": [("clock_for", "clock_of")],
    "another function of torch": [("torch.ones", "torch.zeros")],
    "it under the old name": [("import torch\n", "from torch import zeros as ones\n"), ("torch.ones", "ones")],
    "another attribute": [("options.current", "options.default")],
    "a decorator": [("    def read", "    @torch.no_grad()\n    def read")],
    "an order": [('(1, 2.0, "a text")', '(2.0, 1, "a text")')],
}
C = """// What it does.
#pragma once
#include <vector>
#include "shiplap/abi.h"
#define SCALE(x) (2 * (x))
#define URL "http://a"  // where
namespace a {
/* a
   block */
inline int f(int n) { return n < 1'000 ? SCALE(n) : 'x'; }  // why
const char* text = "a // b";
const char* raw = R"(one " // two)";
}  // namespace a
"""
SAME_C = {
    "no comment": [("  // why", "")],
    "no comment behind a directive": [("  // where", "")],
    "what looks like a block comment there": [("// where", "// where /* it is")],
    "no block comment": [("/* a\n   block */\n", "")],
    "other lines": [("{ return", "{\n  return"), ("; }  //", ";\n} //")],
    "other includes": [('#include "shiplap/abi.h"', '#include "other/place/abi.h"\n#include <map>')],
    "a directive in two lines": [("SCALE(x) (2", "SCALE(x) \\\n  (2")],
    "a trailing space": [("a {", "a { ")],
}
OTHER_C = {
    "a number": [("1'000", "1'001")],
    "a string in a directive": [("http://a", "http://b")],
    "a character": [("'x'", "'y'")],
    "what looks like a comment in a string": [("a // b", "a // c")],
    "the same in a raw string": [("// two", "// three")],
    "a space in a string": [("a // b", "a  // b")],
    "the end of a directive": [("(2 * (x))\n", "(2 * (x)) ")],
    "a directive": [("#define SCALE", "#undef SCALE")],
    "one word in place of two": [("inline int", "inlineint")],
}
TEMPLATE = """{# about #}
{% include "micro.h" %}
@triton.jit
def k(x, {{ arguments }}):
    for i in range({{ n }}):  # why
        x += i
    return x
"""
SAME_TEMPLATE = {
    "a comment of Jinja": [("{# about #}", "{# don't\n care #}")],
    "a comment of Python": [("  # why", "  # don't")],
    "blank lines": [("    return", "\n\n    # here\n    return")],
    "where an included file lies": [("micro.h", "shiplap/cpu/micro.h")],
}
OTHER_TEMPLATE = {"an indentation": [("    return", "        return")], "a hole": [("{{ n }}", "{{ m }}")]}
CMAKE = """set(sources a.cpp
  b.cpp)  # which
shiplap_add_kernels(shiplap_rows SOURCES ${sources} DESTINATION shiplap/kernels/rows)
"""
SAME_CMAKE = {
    "other lines": [("\n  b", " b")],
    "comments": [("  # which", ""), ("set", "#[[ a\nb ]]set")],
    "a destination": [("shiplap/kernels/rows", "shiplap_rows")],
}
OTHER_CMAKE = {"a file": [("b.cpp", "c.cpp")], "a flag": [("${sources}", '${sources} "-O3"')]}
YAML = "ops:\n- {name: add, native: true}  # why\n- name: mul\n"
SAME_YAML = {
    "other lines": [("{name: add, native: true}  # why", "name: add\n  native: true")],
    "a space": [(":", ": ")],
}
OTHER_YAML = {"a value": [("true", "false")], "a line": [("mul\n", "mul\n- name: div\n")]}

KINDS: dict[str, tuple[str, Changes, Changes]] = {
    "a.py": (PYTHON, SAME, OTHER),
    "a.cpp": (C, SAME_C, OTHER_C),
    "a.h": (C, SAME_C, OTHER_C),
    "a.cpp.jinja": ("{# it's about #}" + C, SAME_C, OTHER_C),
    "a.triton.jinja": (TEMPLATE, SAME_TEMPLATE, OTHER_TEMPLATE),
    "CMakeLists.txt": (CMAKE, SAME_CMAKE, OTHER_CMAKE),
    "a.yaml": (YAML, SAME_YAML, OTHER_YAML),
    "a.json": ('[1, {"a": 2}]', {"layout": [(", ", ",\n  ")]}, {"a value": [("2", "3")]}),
    "a.laz": ("bytes", {}, {"anything": [("s", "s ")]}),
}
CASES = [(file, name, True) for file, (_, same, _) in KINDS.items() for name in same]
CASES += [(file, name, False) for file, (_, _, other) in KINDS.items() for name in other]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A repository with a package of a few modules."""
    for module in ("tune/measure", "tune/__init__", "settings", "other", "__init__"):
        file = tmp_path / "packages" / "shiplap" / "src" / "shiplap" / f"{module}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    return tmp_path


def digest(root: Path, file: str, text: str) -> str:
    (root / file).parent.mkdir(parents=True, exist_ok=True)
    (root / file).write_text(text)
    return digests(file, Repository(root))[file]


@pytest.mark.parametrize(("file", "name", "same"), CASES, ids=lambda value: str(value).replace(" ", "-"))
def test_what_changes_a_digest(root: Path, file: str, name: str, same: bool) -> None:
    text, *tables = KINDS[file]
    changed = text
    for before, after in tables[0 if same else 1][name]:
        assert before in changed
        changed = changed.replace(before, after)
    assert (digest(root, file, text) == digest(root, file, changed)) == same


def test_a_module_may_move_with_all_that_imports_it(root: Path) -> None:
    user = (
        "import sys\n"
        "from pathlib import Path\n"
        "sys.path.insert(0, 'src')\n"
        "import shiplap.tune.measure\n"
        "from shiplap import tune\n"
        "ROOT = Path(__file__).resolve().parents[1]\n"
        "CODE = 'shiplap.tune.measure:clock', 'src/shiplap/tune/measure.py', f'src/shiplap/tune/{ROOT}'\n"
        "def f(): return shiplap.tune.measure.clock(tune.measure.LIMIT)\n"
    )
    before = digest(root, "benchmarks/a.py", user)
    package = root / "packages" / "shiplap" / "src" / "shiplap"
    (package / "tune").rename(package / "selection")
    moved = user.replace("tune", "selection").replace("parents[1]", "parents[3]").replace("'src'", "'packages'")
    assert digest(root, "a/b/c.py", moved.replace("src/", "packages/shiplap/src/")) == before
    other = root / "packages" / "shiplap-tune" / "src"
    other.mkdir(parents=True)
    (package / "selection").rename(other / "shiplap_tune")
    moved = user.replace("shiplap.tune", "shiplap_tune").replace(
        "from shiplap import tune", "import shiplap_tune as tune"
    )
    assert digest(root, "a.py", moved.replace("src/shiplap/tune", "packages/shiplap-tune/src/shiplap_tune")) == before
    assert digest(root, "a.py", moved.replace("LIMIT", "LIMITS")) != before
    assert digest(root, "a.py", moved.replace("measure.py", "other.py")) != before


def test_an_include_guard_has_the_name_of_its_path(root: Path) -> None:
    guarded = "#ifndef {0}\n#define {0}\nint f();\n#endif  // {0}\n"
    first, second = (digest(root, "a.h", guarded.format(name)) for name in ("SRC_A_H_", "PACKAGES_A_H_"))
    assert first == second != digest(root, "a.h", guarded.format("A_H_").replace("f", "g", 1))


def test_a_benchmarks_list_of_sources_is_not_what_it_measures(root: Path) -> None:
    assert digest(root, "a.py", "SOURCES = ['a']\nx = 1") == digest(root, "a.py", "SOURCES = ['b', 'c']\nx = 1")
    assert digest(root, "a.py", "ROUNDS = ['a']\nx = 1") != digest(root, "a.py", "ROUNDS = ['b', 'c']\nx = 1")


def test_all_versions_of_python_make_one_digest(root: Path) -> None:
    """Records are made by several: 3.11.7, 3.12.1 and 3.13.0 make this one."""
    text = "def f(x: int) -> None:\n    return f'{x:{wide}} {x=} b'\n"
    assert digest(root, "a.py", text) == "357582f8298fe498"
    tree = ast.parse(text)
    (spec,) = (n.format_spec for n in ast.walk(tree) if isinstance(n, ast.FormattedValue) and n.format_spec)
    cast(ast.JoinedStr, spec).values.append(ast.Constant(""))  # as 3.12.1 does
    assert digest(root, "a.py", text) == _hash(json.dumps(_python(tree, Repository(root), "", "a.py")).encode())


def test_a_file_that_does_not_parse_has_a_digest(root: Path) -> None:
    assert digest(root, "a.py", "def f(:") != digest(root, "a.py", "def g(:")


def test_a_single_definition_can_be_a_source(tmp_path: Path) -> None:
    file = tmp_path / "a.py"
    file.write_text("limit = 1\nclass A:\n    def f(self): return 1\n    def g(self): return 2\n")
    before = {name: digests(f"a.py::{name}", Repository(tmp_path)) for name in ("limit", "A", "A.f", "A.g")}
    file.write_text("limit = 1\nclass A:\n    def f(self): return 1\n    def g(self): return 3\n")
    changed = {name for name, digest in before.items() if digests(f"a.py::{name}", Repository(tmp_path)) != digest}
    assert changed == {"A", "A.g"}
    with pytest.raises(FileNotFoundError, match=r"a\.py defines no A\.h"):
        digests("a.py::A.h", Repository(tmp_path))


def test_a_digest_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nothing matches nowhere/"):
        digests("nowhere/*.cpp", Repository(tmp_path))


def test_several_digests_are_one_in_any_order(tmp_path: Path) -> None:
    assert combined(["b", "a", "a"]) == combined(["a", "b"]) != combined(["a", "c"])
    for name in "ab":
        (tmp_path / f"{name}.py").write_text(f"x = {name!r}")
    both = digests("*.py", Repository(tmp_path))
    (tmp_path / "a.py").rename(tmp_path / "z.py")
    assert list(both) == ["a.py", "b.py"]
    assert combined(digests("*.py", Repository(tmp_path)).values()) == combined(both.values())
