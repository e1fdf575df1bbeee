"""Every example runs as its reader would run it, and shows what its page says it shows.

Each is a process that imports, and most of them compile, so ``make docs`` runs the shortest of them, as it checks the
pages that quote them. ``make test`` looks at the names that they use.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from shiplap_testing.forked import interpreted, python
from shiplap_testing.ranks import table as ranks_table

ROOT = Path(__file__).resolve().parents[1]


def run(*command: object) -> subprocess.CompletedProcess[str]:
    return python(*command, cwd=ROOT)


def output(name: str) -> str:
    done = run(ROOT / "examples" / name)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_no_example_is_forgotten() -> None:
    names = {p.stem for p in (ROOT / "examples").glob("*.py")}
    assert names == {name.removeprefix("test_") for name in globals() if name.startswith("test_") and name[5:] in names}


def used(tree: ast.Module) -> set[tuple[str, str]]:
    """(module, name) of what a program takes from our packages: ``from m import n``, and ``a.n`` for an imported a."""
    taken, modules = set[tuple[str, str]](), dict[str, str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            ours = [alias for alias in node.names if alias.name.partition(".")[0].startswith("shiplap")]
            modules |= {alias.asname: alias.name for alias in ours if alias.asname}
            taken |= {(alias.name, "") for alias in ours}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("shiplap"):
            taken |= {(str(node.module), alias.name) for alias in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
            taken.add((modules[node.value.id], node.attr))
    return taken


def missing(tree: ast.Module) -> set[tuple[str, str]]:
    """What of ``used`` is not there; a name may be that of a module."""
    return {
        (module, name)
        for module, name in used(tree)
        if not hasattr(importlib.import_module(module), name or "__name__")
        and importlib.util.find_spec(f"{module}.{name}") is None
    }


@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.py")), ids=lambda p: p.stem)
def test_an_example_parses_and_uses_names_that_exist(example: Path) -> None:
    tree = ast.parse(example.read_text(encoding="utf-8"))
    assert missing(tree) == set()
    described = ast.get_docstring(tree) or ""
    assert f" examples/{example.name}" in described, "the docstring says how it is run"


def test_a_name_that_is_not_there_is_seen() -> None:
    tree = ast.parse("import shiplap as sl\nfrom shiplap import op, nothing\nsl.op('a::b'), sl.gone()\n")
    assert missing(tree) == {("shiplap", "nothing"), ("shiplap", "gone")}


@pytest.mark.docs
def test_out_variant() -> None:
    done = run("examples/out_variant.py")
    assert done.returncode == 0, done.stderr
    assert "SL210: an output overlaps another tensor" in done.stdout
    assert done.stdout.endswith("the caller owns what the kernel wrote\n")


FIRST = """
import runpy
import shiplap as sl
example = runpy.run_path("examples/first_op.py")
example["compile_it"]()
report = sl.audit(example["rms_norm"], checks=("schema", "numerics", "gradient"), budget=600)
print(report.verdict)
"""


@pytest.mark.docs
def test_first_op() -> None:
    """With three checks of its audit; all take as long as the rest of these examples."""
    done = run("-c", FIRST)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "compiled into one graph" in done.stdout
    assert done.stdout.splitlines()[-1] == "proven"


@pytest.mark.long
def test_first_op_with_its_whole_audit() -> None:
    shown = output("first_op.py")
    assert "compiled into one graph" in shown
    assert re.search("compile +ok ", shown)
    assert "rms_norm: proven by " in shown


@pytest.mark.docs
def test_triton_kernel() -> None:
    assert output("triton_kernel.py") == "compiled for a device that need not be here\n"


def test_declaration_fits_on_a_page() -> None:
    text = (ROOT / "examples" / "first_op.py").read_text()
    declaration = text.split("[start:declare]\n")[1].split("# --8<-- [end:declare]")[0]
    assert len(declaration.strip().splitlines()) <= 13  # of 88 columns


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
@pytest.mark.long
def test_c_kernel() -> None:
    assert "the C kernel agrees with the reference" in output("c_kernel.py")
    checks = [word for name in ("numerics", "edges", "gradient", "stateless", "c_abi") for word in ("--check", name)]
    done = run("-m", "shiplap.cli", "audit", "examples/c_kernel.py", *checks)
    assert done.returncode == 0, done.stdout
    done = run("-m", "shiplap.cli", "header", "examples/c_kernel.py", "-o", "examples/build/c_kernel.h", "--check")
    assert done.returncode == 0, done.stdout


@pytest.mark.docs
@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")
def test_source_kernel() -> None:
    assert "agrees with the reference" in output("source_kernel.py")


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc")
@pytest.mark.long
def test_the_cuda_source_compiles() -> None:
    program = (
        "import runpy\n"
        "from shiplap.kernels.c.library import source_libraries\n"
        "op = runpy.run_path('examples/source_kernel.py')['rms_norm']\n"
        "(kernel,) = op.native_kernels('cuda')\n"
        "print(source_libraries[kernel.native.library].compile())\n"
    )
    done = run("-c", program)
    assert done.returncode == 0, done.stderr
    assert "librms_norm_cuda-" in done.stdout


@pytest.mark.docs
def test_cuda_kernels() -> None:
    assert "agree with their references" in output("cuda_kernels.py")


@pytest.mark.docs
def test_hub_kernels() -> None:
    shown = output("hub_kernels.py")
    assert "squash_v1::squash: failed" in shown
    assert "exactly those with scale <= -" in shown
    assert "each is -1 times the expected" in shown
    assert "squash_v2::squash: proven" in shown


@pytest.mark.docs
def test_coming_from() -> None:
    shown = output("coming_from.py")
    assert "each declaration computes what the form before it computed" in shown
    assert "from before::gated:\n  taken  kernel on cpu, cuda\n" in shown


@pytest.mark.long
def test_coming_from_cpp(tmp_path: Path) -> None:
    """Compiling against torch's headers takes most of a minute."""
    program = ROOT / "examples" / "coming_from_cpp.py"
    done = python(program, cwd=ROOT, env={**os.environ, "TORCH_EXTENSIONS_DIR": str(tmp_path)})
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the forms in C++ and their declarations compute the same" in done.stdout


BLOCKED = """
import os
import sys

os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # Shiplap's plugin would be imported

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0].startswith(("shiplap", "jaxtyping")):
            raise ImportError(name)

sys.meta_path.insert(0, Blocked())
import pytest
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "--import-mode=importlib", *sys.argv[1:]]))
"""


@pytest.mark.long
@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")
@pytest.mark.parametrize(
    "name",
    [
        *("first_op", "coming_from", "data_dependent", "gather_rows", "out_variant", "language", "source_kernel"),
        *("triton_kernel", "fuse", "c_kernel", "eight_kernels"),
    ],
)
def test_every_op_of_the_examples_is_ejected(name: str, tmp_path: Path) -> None:
    """The plain sources pass their tests, eager and compiled, where neither Shiplap nor jaxtyping can be imported."""
    pytest.importorskip("triton")
    examples = ROOT / "examples"
    if name in ("c_kernel", "eight_kernels"):
        built = interpreted("-c", f"import {name}; {name}.build()", cwd=examples)
        assert built.returncode == 0, built.stderr
    out = tmp_path / f"{name}_plain"
    made = interpreted("-m", "shiplap.cli", "eject", examples / f"{name}.py", "-o", out, "--accept-loss")
    assert made.returncode == 0, made.stderr
    program = tmp_path / "blocked.py"
    program.write_text(BLOCKED + f"# {name}")
    path = os.pathsep.join([str(examples / "build"), os.environ.get("PYTHONPATH", "")])
    done = interpreted(program, out, cwd=tmp_path, env={**os.environ, "PYTHONPATH": path}, imported="")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.docs
def test_adopt_foreign_op() -> None:
    shown = output("adopt_foreign_op.py")
    assert "torch.library.opcheck passes" in shown
    assert "= [0.0, 2.0], correct is [0.5, 1.5]" in shown
    assert re.search("fresh +fail +output 0 shares memory with the next call's output 0", shown)


@pytest.mark.long
def test_data_dependent() -> None:
    shown = output("data_dependent.py")
    assert "most common of [5, 5, 2, 2, 2, 9]: 2" in shown
    assert "SL302: a data-dependent size exceeds its bound" in shown


@pytest.mark.docs
def test_gather_rows() -> None:
    assert output("gather_rows.py") == "gather does what it declares\n"


@pytest.mark.long
def test_tune_op() -> None:
    shown = output("tune_op.py")
    assert "m<=1024, k<=256, n<=64\n" in shown
    assert "half(PARTS=2): result 0: " in shown
    assert shown.endswith("tuned, frozen, served\n")


@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
@pytest.mark.long
def test_fuse() -> None:
    assert output("fuse.py").splitlines() == [
        "template ('fused::scaled_mm', 'aten.add', 'aten.gelu')",
        "scaled_mm(BM=16, BN=64)",
        "not inside: ('aten.add', 'aten.gelu', 'aten.mean') it reduces; only pointwise neighbours go into a template's "
        "store",
    ]


@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
@pytest.mark.long
def test_spconv_model() -> None:
    assert output("spconv_model.py") == "one graph: (2, 64, 20, 16) seen from above, (800, 16) on the voxels\n"


@pytest.mark.long
def test_sparse3d() -> None:
    lines = output("sparse3d.py").splitlines()
    assert lines[1] == "trained in one graph"
    assert re.fullmatch(r"exported with 1000 rows, \d+ of them voxels", lines[2])


@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
@pytest.mark.long
def test_flexgemm() -> None:
    assert output("flexgemm.py") == "848 voxels, 339 after a step of 2, 100 points sampled\n"


@pytest.mark.long
def test_rewrite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # code from a cache is not compiled, nor rewritten
    assert output("rewrite.py") == "one_product replaced linear, silu, linear, mul\n"


@pytest.mark.docs
def test_slidesparse() -> None:
    lines = output("slidesparse.py").splitlines()
    assert lines[0] == "6:8 keeps 0.990 of the weight's norm; int8 adds an error of 0.0093"
    assert lines[1] == "the packed weight gives the bits of the dense one"
    assert re.fullmatch(r"for 7 rows \w+ is the fastest that is right", lines[2])
    assert lines[3] == "compiled into one graph"


@pytest.mark.long
def test_slidesparse_llama() -> None:
    pytest.importorskip("transformers")
    shown = output("slidesparse_llama.py")
    assert re.search(r"14 layers, \d\d% of the parameters → dense int8, outputs off by at most [01]\.", shown)
    assert "kept lm_head: skip='lm_head'" in shown
    assert shown.endswith("reloaded: the same bits\n")


@pytest.mark.long
def test_survey() -> None:
    pytest.importorskip("laspy")
    pytest.importorskip("lazrs")
    shown = output("survey.py")
    assert "110,000 points in 12 tiles with a halo of 6 voxels" in shown
    first, last = (float(text) for text in re.findall(r"\d\.\d\d", shown.splitlines()[-1]))
    assert last < first


@pytest.mark.long
def test_language() -> None:
    shown = output("language.py").splitlines()
    assert len(shown) == 5
    for line in shown:
        assert "audited, compiled, exported" in line, line


def test_eight_plain() -> None:
    """The declarations have fewer lines in all."""
    pytest.importorskip("triton")
    shown = re.findall(r"(\w+): (\d+) lines, with custom_op (\d+)", output("eight_plain.py"))
    assert [name for name, _, _ in shown] == ["rope", "squash", "swish", "cache", "plan"]
    ours, theirs = (sum(int(row[i]) for row in shown) for i in (1, 2))
    assert ours < theirs


@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
@pytest.mark.long
def test_eight_kernels() -> None:
    """Each is audited, compiled, exported, differentiated, mapped and cast, or says why not."""
    pytest.importorskip("triton")
    shown = output("eight_kernels.py")
    lines = [line for line in shown.splitlines() if "audited: " in line]
    assert len(lines) == 8, shown
    assert "WRONG" not in shown, shown
    for line in lines:
        assert all(f"{way}: yes" in line for way in ("audited", "compiled", "exported")), line
    assert sum(line.count(": yes") for line in lines) == 5 * 7 + 3 * 3


def test_a_compiled_write_clones_no_cache() -> None:
    """Lists and optionals that are written to stay in place under torch.compile: no clone, the same memory."""
    program = (
        "import sys, torch\nsys.path.insert(0, 'examples')\n"
        "from torch._inductor.utils import run_and_get_code\nfrom eight_kernels import write_\n"
        "args = [torch.zeros(9, 2, 3)], torch.zeros(9), torch.ones(5, 2, 3), torch.arange(5)\n"
        "function = torch.compile(lambda c, s, r, at: write_(c, s, r, at), fullgraph=True, dynamic=True)\n"
        "_, (code,) = run_and_get_code(function, *args)\n"
        "assert float(args[0][0].sum()) == 30 and args[1].tolist() == [1.0] * 5 + [0.0] * 4\n"
        "body = code[code.index('def call'):]\n"
        "assert 'eight.write_' in body, body\n"
        "assert not any(word in body for word in ('clone', 'copy_', 'empty_strided')), body\n"
    )
    done = run("-W", "ignore", "-c", program)
    assert done.returncode == 0, done.stderr[-3000:]


def ranks(*rows: str) -> dict[str, str]:
    """What two processes say of rows of ``many_devices.py``."""
    done = python(
        *("-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        *("examples/many_devices.py", *rows),
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(line.split(": ", 1) for line in done.stdout.splitlines())


@pytest.mark.long
def test_two_rows_of_many_devices() -> None:
    shown = ranks("DDP, static_graph", "DTensor, no rule")
    assert re.fullmatch(r"\d+ bytes of gradients, the same weights", shown["DDP, static_graph"])
    assert shown["DTensor, no rule"] == "refused: SL217 the op has no sharding rule for this call"


@pytest.mark.long
def test_many_devices() -> None:
    """Each row of the page's table runs, and is refused where the table says so."""
    shown, table = ranks(), [ranks_table(column) for column in ("sparse3d", "slidesparse", "your op")]
    assert shown.keys() == table[0].keys()
    for name, told in shown.items():
        ids = {match[0] for column in table if (match := re.search(r"SL\d+", column[name]))}
        assert {*re.findall(r"SL\d+", told)} == ids, name
