"""Drafts import, refuse every call until they are finished, and carry over all that can be known."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from shiplap.errors import ShiplapError
from shiplap.scaffold.signature import DraftSignature, parse_signature, signature_of_overload, signatures_of_function
from shiplap.scaffold.skeleton import Draft, fill_lines, render_draft
from shiplap_testing.forked import WITH_VERBS, python

PYBIND = """quant(*args, **kwargs)
Overloaded function.

1. quant(x: torch.Tensor, scale: at::Tensor, bits: typing.SupportsInt = 8, mode: Mode = <Mode.up: 0>) -> None

2. quant(x: torch.Tensor, sizes: std::vector<int64_t, std::allocator<int64_t> >) -> List[torch.Tensor]
"""

SOURCE = '''
import torch
from typing import Optional
from jaxtyping import Float, Int32
from torch import Tensor

def annotated(x: Tensor, w: Optional[Tensor] = None, k: int = 3, *, eps: float = 1e-5) -> tuple[Tensor, Tensor]:
    return x, x

def typed(x: Float[Tensor, "n c"], i: Int32[Tensor, "n"] | None = None) -> Float[Tensor, "n c"]:
    return x

def dtyped(x: Tensor, dtype: torch.dtype = torch.float32, n: int = 1):
    return x

class Extension:
    __name__, __doc__ = "quant", """{pybind}"""
    def __call__(self, *args, **kwargs): ...

quant = Extension()

def opaque(*args, **kwargs): ...
'''


def call(text: str, tmp_path: Path, *arguments: str) -> ShiplapError:
    """Import ``text`` as a user would and call its first op; the error it must raise."""
    scope: dict[str, Any] = {}
    exec(compile(text, "draft.py", "exec"), scope)
    drafts = [v for v in scope.values() if type(v).__name__ == "UnfinishedOp"]
    assert drafts
    for one in drafts:
        with pytest.raises(ShiplapError) as e:
            one()
    return e.value


@pytest.fixture
def library(tmp_path: Path) -> Path:
    file = tmp_path / "cli_library.py"
    file.write_text(SOURCE.replace("{pybind}", PYBIND))
    return file


@pytest.mark.parametrize("function", ["annotated", "typed", "dtyped", "quant"])
def test_draft_imports_and_refuses_calls(run: Any, library: Path, tmp_path: Path, function: str) -> None:
    file = tmp_path / "declared.py"
    result = run("init", file, "--from", f"{library}:{function}")
    assert result.exit_code == 0, result.stderr
    text = file.read_text()
    assert call(text, tmp_path).id == "SL113"
    marked = [n for n, line in enumerate(text.splitlines(), 1) if "FILL: " in line]
    assert marked
    assert all(f"{file}:{n}: " in result.stderr for n in marked)
    sys.modules.pop("cli_library", None)


@pytest.mark.long
def test_a_draft_in_a_process_of_its_own(process: Any, library: Path, tmp_path: Path) -> None:
    done = process("init", "draft.py", "--from", "cli_library:annotated", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    parsed = json.loads(done.stdout)
    assert parsed["ops"] == ["cli_library::annotated"]
    assert parsed["file"] == "draft.py"
    assert {f["line"] for f in parsed["fill"]} == {
        n for n, line in enumerate((tmp_path / "draft.py").read_text().splitlines(), 1) if "FILL: " in line
    }
    done = process("audit", "draft.py", cwd=tmp_path)
    assert done.returncode == 2
    assert "SL113" in done.stderr


def test_signature_survives(run: Any, library: Path) -> None:
    text = run("init", "-", "--from", f"{library}:annotated").stdout
    assert "    x: Tensor,  # FILL: dtype and dims" in text
    assert "    w: Tensor | None = None,  # FILL: dtype and dims" in text
    assert "    k: int = 3,\n    *,\n    eps: float = 1e-05,\n" in text
    assert ") -> tuple[Tensor, Tensor]:  # FILL: " in text
    assert '@annotated.kernel("cpu", name="cli_library.annotated")' in text
    assert "    return cli_library.annotated(x, w, k, eps=eps)" in text


def test_jaxtyping_annotations_are_kept(run: Any, library: Path) -> None:
    text = run("init", "-", "--from", f"{library}:typed").stdout
    assert 'x: Float[Tensor, "n c"],\n' in text
    assert 'i: Int32[Tensor, "n"] | None = None,\n' in text
    assert ') -> Float[Tensor, "n c"]:\n' in text
    assert "from jaxtyping import Float, Int32" in text


def test_finished_draft_is_an_op(library: Path, tmp_path: Path) -> None:
    """Filling the marked lines in, and nothing else, gives an op that works."""
    (tmp_path / "cli_norm.py").write_text("import torch\ndef norm(x: torch.Tensor) -> torch.Tensor: return x.abs()\n")
    sys.path.insert(0, str(tmp_path))
    try:
        import cli_norm
    finally:
        sys.path.remove(str(tmp_path))
    draft = Draft(
        "cli_norm:norm",
        "cli_norm",
        "op",
        signatures_of_function(cli_norm.norm, "w"),
        "import cli_norm\n",
        "cli_norm.norm",
    )
    text = render_draft(draft)
    for old, new in (
        ("@unfinished(", "@sl.op("),
        ("x: Tensor,", 'x: Float[Tensor, "n"],'),
        (") -> Tensor:", ') -> Float[Tensor, "n"]:'),
        ('raise error("SL113", where="cli_norm::norm, reference")', "return x.abs()"),
    ):
        assert old in text
        text = text.replace(old, new)
    (tmp_path / "cli_finished.py").write_text(
        text + "\nimport torch\nassert norm(torch.tensor([-1.0])).item() == 1\n"
        "print([k.name for k in norm.kernels['cpu']])\n"
    )
    done = python("cli_finished.py", cwd=tmp_path, imported=WITH_VERBS)
    assert done.returncode == 0, done.stderr
    assert "cli_norm.norm" in done.stdout


def one(text: str) -> DraftSignature:
    return parse_signature(text, "somewhere")


@pytest.mark.parametrize(
    ("text", "type"),
    [
        ("f(x: at::Tensor)", "Tensor"),
        ("f(x: Optional[torch.Tensor])", "Tensor | None"),
        ("f(x: torch.Tensor | None)", "Tensor | None"),
        ("f(x: c10::optional<at::Tensor>)", "Tensor | None"),
        ("f(x: List[torch.Tensor])", "list[Tensor]"),
        ("f(x: typing.SupportsInt)", "int"),
        ("f(x: Annotated[SupportsFloat, 'x'])", "float"),
        ("f(x: Tuple[int, int])", "list[int]"),
        ("f(x: collections.abc.Sequence[float])", "list[float]"),
        ("f(x: 'torch.Tensor')", "Tensor"),
        ("f(x: Union[int, None])", "int | None"),
        ("f(x: torch.dtype)", "object"),
        ("f(x: Union[int, float])", "object"),
        ("f(x: Tuple[int, float])", "object"),
        ("f(x: std::vector<int64_t>)", "object"),
        ("f(x)", "object"),
    ],
)
def test_types_are_mapped_or_left_open(text: str, type: str) -> None:
    assert one(text).parameters[0].type == type


@pytest.mark.parametrize(
    ("text", "returns"),
    [
        ("f(x)", None),
        ("f(x) -> None", ()),
        ("f(x) -> torch.Tensor", ("Tensor",)),
        ("f(x) -> Tuple[torch.Tensor, torch.Tensor]", ("Tensor", "Tensor")),
        ("f(x) -> list[torch.Tensor]", ("list[Tensor]",)),
        ("f(x) -> tuple[torch.Tensor, ...]", ("list[Tensor]",)),
        ("f(x) -> int", ("int",)),
    ],
)
def test_results(text: str, returns: tuple[str, ...] | None) -> None:
    assert one(text).returns == returns
    draft = Draft("a:f", "a", "op", [one(text)])
    assert call(render_draft(draft), Path()).id == "SL113"


def test_overloads_become_ops_of_their_own(run: Any, library: Path) -> None:
    result = run("init", "-", "--from", f"{library}:quant")
    assert '@unfinished("cli_library::quant", mutates=())' in result.stdout
    assert "it returns nothing, so there is one" in result.stdout  # -> None: something must be written
    assert '@unfinished("cli_library::quant_2", mutates=())' in result.stdout
    assert "give this overload a name of its own" in result.stdout


def test_defaults_that_are_no_literals_are_dropped_with_those_before() -> None:
    text = render_draft(Draft("a:f", "a", "op", [one("f(x: Tensor, n: int = 1, m: Mode = <Mode.up: 0>, k: int = 2)")]))
    assert "    n: int,  # FILL: its default was 1\n" in text
    assert "    m: object,  # FILL: it was Mode = ...:" in text
    assert "    k: int = 2,\n" in text


def test_torch_schema() -> None:
    import torch

    signature = signature_of_overload(torch.ops.aten.addmm_.default)
    by_name = {p.name: p for p in signature.parameters}
    assert by_name["self"].written
    assert not by_name["mat1"].written
    assert by_name["beta"].type == "object"  # Scalar: int, float or complex
    assert by_name["beta"].keyword_only
    assert signature.returns == ("object",)  # self again: no fresh output


def test_adopting_a_registered_op(run: Any, tmp_path: Path) -> None:
    text = run("init", "-", "--from", "aten::relu").stdout
    assert '@unfinished("aten::relu")  # FILL: sl.adopt' in text
    assert ".kernel(" not in text
    assert call(text, tmp_path).id == "SL113"


@pytest.mark.parametrize(
    ("source", "id", "expected"),
    [
        ("cli_library.py:anotated", "SL501", "did you mean 'annotated'?"),
        ("cli_library.py:opaque", "SL604", "opaque(x: torch.Tensor, ...) -> torch.Tensor"),
        ("cli_library.py", "SL501", "module:function"),
        ("aten::reluu", "SL501", "fix"),
        ("aten::_foreach_add", "SL604", "an overload without a suffix"),
    ],
)
def test_wrong_sources(run: Any, library: Path, source: str, id: str, expected: str) -> None:
    result = run("init", "-", "--from", source.replace("cli_library.py", str(library)))
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith(id)
    assert expected in result.stderr
    assert result.stdout == ""


def test_files_are_not_overwritten(run: Any, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("precious")
    result = run("init", file, "--from", "aten::relu")
    assert result.exit_code == 2
    assert "SL602: the file already exists" in result.stderr
    assert file.read_text() == "precious"
    assert run("init", file, "--from", "aten::relu", "--force").exit_code == 0
    assert fill_lines(file.read_text())
    assert run("init", tmp_path / "absent" / "x.py", "--from", "aten::relu").exit_code == 2
