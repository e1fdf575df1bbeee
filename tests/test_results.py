"""A recorded measurement says where it comes from, and pages repeat what it says."""

from __future__ import annotations

import ast
import contextlib
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tools import records
from tools.meaning import Repository

ROOT = Path(__file__).resolve().parents[1]
RESULTS = sorted((ROOT / "benchmarks" / "results").glob("*.json"))
UPDATE = "python tools/records.py --update"
BENCHMARKS = ROOT / "docs" / "benchmarks.md"


@pytest.fixture(scope="module")
def repository() -> Repository:
    """With the digests that one test after the other has asked for."""
    return Repository(ROOT)


@pytest.fixture(scope="module")
def known(repository: Repository) -> list[records.Record]:
    return records.records(ROOT, repository)


def test_the_list_of_this_repository_ends_well(
    known: list[records.Record], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(records, "records", lambda: known)
    monkeypatch.setattr(sys, "argv", ["records.py", "--json"])
    records.main()
    listed = json.loads(capsys.readouterr().out)
    assert {record["name"] for record in listed} >= {path.stem for path in RESULTS}
    for record in listed:
        assert record["stale"] == bool(record["changed"] or record["gone"])
        script = f"benchmarks/{Path(record['file']).stem}.py"
        assert record["command"].startswith(f"python {script} ")
        flag = '"--json", action="store_true"' in (ROOT / script).read_text(encoding="utf-8")
        assert record["command"].endswith(" --json") if flag else f"--json {record['file']}" in record["command"]


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_a_record_says_where_it_comes_from(path: Path) -> None:
    assert (ROOT / "benchmarks" / f"{path.stem}.py").is_file()
    for name, part in records.parts(path.stem, json.loads(path.read_text(encoding="utf-8"))):
        assert [field for field in records.FIELDS if not part.get(field)] == [], f"{name}; a commit: {UPDATE}"
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", part["date"]), name
        assert re.fullmatch(r"[0-9a-f]{10}", part["commit"]), name
        assert "torch" in part["versions"], name
        digests = [digest for recorded in part["sources"].values() for digest in recorded]
        assert all(re.fullmatch(r"[0-9a-f]{16}", digest) for digest in digests), name
        assert all(part["sources"].values()), name
        assert part["digest"] == records.digest_of(part["sources"]), name


def test_figures_on_pages_are_of_a_record(known: list[records.Record]) -> None:
    shown: dict[str, list[str]] = {}
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        text = page.read_text(encoding="utf-8")
        shown[page.name] = records.BLOCK.findall(text)
        for name in shown[page.name]:
            assert records.find(name, known), f"{page.name}: there is no record {name}"
            assert text.index(f"<!-- {name} -->\n") < text.index(f"<!-- /{name} -->\n"), f"{page.name}: {name}"
    assert shown["README.md"] == ["sparse3d_gpu"], "the README has one measured table"
    told = {"demo", "sparse3d_cpu", "sparse3d_gpu", "overhead", "dense_gpu", "tune_gpu", "rewrite", "slidesparse_cpu"}
    assert told <= set(shown["benchmarks.md"])
    named = {records.find(name, known) for names in shown.values() for name in names}
    assert [record.name for record in known if record not in named] == [], "no page says what came of it"


@pytest.mark.parametrize("page", records.PAGES)
def test_a_page_says_when_and_where_its_figures_were_measured(known: list[records.Record], page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    assert text == records.linked(text, known, page), f"run: {UPDATE}"
    lines = re.findall(r"^<!-- /.* -->\n(.*)", text, re.MULTILINE)
    assert lines
    for line in lines:
        assert re.fullmatch(r"\*Measured \d{4}-\d\d-\d\d on .*, commit [0-9a-f]{10}: \[\w+\.json\]\(.*\)\.\*", line), (
            line
        )


def test_the_pages_repeat_the_recorded_demonstration() -> None:
    result = json.loads((ROOT / "benchmarks" / "results" / "demo.json").read_text(encoding="utf-8"))
    demo = result["demo"]
    page = " ".join(BENCHMARKS.read_text(encoding="utf-8").split())
    for sentence in (
        f"| **{demo['iou']:.2f}** |",
        f"{demo['graphs']} graph, with {demo['graph_breaks']} graph breaks and {demo['recompiles']} recompiles",
        f"compiled training step takes {demo['compiled_ms']:.1f} ms and an eager one {demo['eager_ms']:.1f} ms",
        f"{round(demo['points_per_s'], -3):,.0f} points/s",
        f"The whole demonstration takes {demo['total_s']:.0f} s",
    ):
        assert sentence in page
    note = (ROOT / "docs" / "design" / "0003-demo.md").read_text(encoding="utf-8")
    shown = note[note.index("<!-- demo -->") : note.index("<!-- /demo -->")].splitlines()[3:]
    assert [row.split("|")[2].strip() for row in shown] == [
        f"{demo['iou']:.3f}",
        f"{result['wall_s']:.0f} s",
        f"{result['cpu_s']:.0f}",
        f"{demo['compile_s']:.1f} s",
        f"{demo['train_s']:.1f} s",
        f"{demo['compiled_ms']:.1f} / {demo['eager_ms']:.1f} ms",
        f"{round(demo['points_per_s'], -3):,.0f} points/s",
        f"{demo['graphs']} / {demo['graph_breaks']} / {demo['recompiles']}",
    ]


def test_the_design_note_repeats_the_recorded_overhead() -> None:
    result = json.loads((ROOT / "benchmarks" / "results" / "overhead.json").read_text(encoding="utf-8"))
    note = (ROOT / "docs" / "design" / "0004-native.md").read_text(encoding="utf-8")
    for row, ns in result["eager_ns"].items():
        cells = [row, f"{ns:,.0f}", f"{result['inference_ns'][row]:,.0f}"]
        assert f"| {' | '.join(cells)} |" in note, f"{row}; run: python benchmarks/overhead.py --json"
    assert {"torch_library_cpp", "shiplap_native", "custom_op_ctypes", "tvm_ffi"} <= result["cpp_wrapper_ns"].keys()
    for name, goals in result["ratios"].items():
        assert goals["native_vs_hand_written"] <= 1.35, f"{name}: see docs/design/0004-native.md, Requirements"
    assert result["ratios"]["eager_ns"]["custom_op_vs_native"] >= 3.5


def test_page_and_note_repeat_the_recorded_dense_products() -> None:
    result = json.loads((ROOT / "benchmarks" / "results" / "dense_gpu.json").read_text(encoding="utf-8"))
    rows = set()
    for case in result["cases"]:
        cells = [f"{case['us'][name]:.1f}" for name in ("shiplap", "control", "inductor", "again", "anew", "eager")]
        kind = "PyTorch's" if case["chosen"].partition("(")[0] in ("reference", "torch_grouped_mm") else "template"
        rows.add(f"| {case['case']} | {' | '.join(cells)} | {kind} |")
    for page, whole in (("docs/benchmarks.md", False), ("docs/design/0006-fuse.md", True)):
        text = (ROOT / page).read_text(encoding="utf-8")
        shown = set(text[text.index("<!-- dense_gpu -->") : text.index("<!-- /dense_gpu -->")].splitlines()[3:])
        assert shown == rows if whole else shown and shown < rows, page


def test_the_note_repeats_what_was_compiled_anew() -> None:
    result = json.loads((ROOT / "benchmarks" / "results" / "dense_anew_gpu.json").read_text(encoding="utf-8"))
    note = (ROOT / "docs" / "design" / "0006-fuse.md").read_text(encoding="utf-8")
    for name, cases in (("dense_anew_gpu", result["cases"]), ("dense_anew_gpu matmul", result["matmul"]["cases"])):
        rows = []
        for case in cases:
            sides = [", ".join(f"{us:.1f}" for us in sorted(case["us"][side])) for side in ("shiplap", "inductor")]
            rows.append(f"| {case['case']} | {' | '.join(sides)} | {case['ratio']:.2f} | {case['best']:.2f} |")
        shown = note[note.index(f"<!-- {name} -->") : note.index(f"<!-- /{name} -->")]
        assert shown.splitlines()[3:] == rows
        assert not any(case["lost"] for case in cases)


def test_the_page_repeats_the_recorded_scaling() -> None:
    record = json.loads((ROOT / "benchmarks" / "results" / "many_gpus.json").read_text(encoding="utf-8"))
    text = (ROOT / "docs" / "many-devices.md").read_text(encoding="utf-8")
    for name, part in (
        ("many_gpus", record),
        *((f"many_gpus {name}", record[name]) for name in ("four", "eight", "eight before")),
    ):
        shown = text[text.index(f"<!-- {name} -->") : text.index(f"<!-- /{name} -->")].splitlines()[3:]
        sizes = [str(k) for k in (2, 4, 8) if k <= part["gpus"]]
        assert shown == [
            f"| {what} | {' | '.join(f'{of[k]:.2f}' for k in sizes)} |" + (f" {control:.2f} |" if control else " |")
            for what, of, control in scaled(part["parts"])
        ], name


def scaled(parts: dict[str, Any]) -> Iterator[tuple[str, dict[str, float], float | None]]:
    """A work, how many times as fast it was by number of GPUs, and the control."""
    for scenes, of in parts["train"]["scenes"].items() if "train" in parts else ():
        many = "scene" if scenes == "1" else "scenes"
        yield f"training, {scenes} {many} ({of['voxels']:,} voxels) a GPU", of["weak"], of["control"]
    if "large" in parts:
        of = parts["large"]
        yield f"training, 32 scenes ({of['voxels']:,} voxels) a GPU", of["weak"], of["control"]
    for of in parts["infer"]["surveys"].values() if "infer" in parts else ():
        channels = " ".join(map(str, of["channels"]))
        what = f"inference, {of['tiles']} tiles of {of['points']:,} points, channels {channels}, {of['dtype']}"
        yield what, of["speed"], of["control"]
    if "tensor" in parts:
        speed = parts["tensor"]["speed"]
        for what, kind in (
            ("dense, torch's tensor parallelism", "dense"),
            ("2:4 sparse int8, `slidesparse.shard`", "slidesparse"),
        ):
            speeds = {k: speed[f"{kind} {k}"] for k in ("2", "4")}
            yield f"a gated MLP, {what}", speeds, speed.get(f"{kind} 1 again")


def test_the_page_repeats_the_recorded_memory() -> None:
    record = json.loads((ROOT / "benchmarks" / "results" / "sparse3d_memory_gpu.json").read_text(encoding="utf-8"))
    text = (ROOT / "docs" / "sparse3d.md").read_text(encoding="utf-8")
    name, rows, trade = "sparse3d_memory_gpu", [], []
    for voxels in sorted({cell["voxels"] for cell in record["cells"]}):
        of = {cell["parts"]: cell for cell in record["cells"] if cell["voxels"] == voxels}
        result = of[1]["peak_mib"] / of[1]["results"]
        cells = [f"{of[p]['ms']:.3f} ms, {of[p]['peak_mib'] - result:.1f} MiB" + " `*`" * of[p]["default"] for p in of]
        rows.append(f"| {voxels:,}, {of[1]['channels']} | {' | '.join(cells)} | {result:.1f} MiB |")
        default = next(cell for cell in of.values() if cell["default"])
        taken = [of[max(p for p in of if p <= min(most, default["parts"]))] for most in (9, 3, 2, 1)]
        trade.append([(f"{cell['results']:.0f}", f"{cell['ms'] / default['ms']:.2f}") for cell in taken])
    shown = text[text.index(f"<!-- {name} -->") : text.index(f"<!-- /{name} -->")].splitlines()[3:]
    assert shown == rows
    shown = text[text.index(f"<!-- {name} trade -->") : text.index(f"<!-- /{name} trade -->")].splitlines()[3:]
    for line, *of in zip(shown, *trade, strict=True):
        assert line.split(" | ")[1:] == [", ".join(peak for peak, _ in of), ", ".join(ms for _, ms in of) + " |"]


SHELLS = [(8, 1024), (16, 1024), (32, 1024), (64, 1024), (128, 512), (256, 256), (512, 128), (1024, 64)]


def test_the_pages_repeat_the_recorded_shells() -> None:
    result = json.loads((ROOT / "benchmarks" / "results" / "sparse3d_gpu.json").read_text(encoding="utf-8"))
    cells = [(k, n) for k in ("forward", "train") for n in ("shiplap", "spconv", "spconv-triton")]
    cells += [(k, n) for k in ("map", "strided") for n in ("shiplap", "spconv")]
    rows = set()
    for shell in result["shells"]:
        numbers = " | ".join(f"{shell[k][n]:.3f}" for k, n in cells)
        rows.add(f"| {shell['res']}, {shell['channels']} | {100 * shell['fraction']:.0f} % | {numbers} |")
    assert [(s["res"], s["channels"]) for s in result["shells"]] == SHELLS
    assert [s["res"] for s in result["fused"]] == [res for res, _ in SHELLS[4:]]
    for page, whole in (("docs/benchmarks.md", False), ("docs/design/0008-sparse3d-cuda.md", True)):
        text = (ROOT / page).read_text(encoding="utf-8")
        shown = set(text[text.index("<!-- sparse3d_gpu -->") : text.index("<!-- /sparse3d_gpu -->")].splitlines()[3:])
        assert shown == rows if whole else shown and shown < rows, page
    better = [
        min(v for n, v in s["forward"].items() if n != "shiplap") / s["forward"]["shiplap"] for s in result["shells"]
    ]
    assert f"forward {min(better):.2f}x to {max(better):.2f}x" in text
    assert f"Forward is {min(better):.2f}x to {max(better):.2f}x" in " ".join(
        BENCHMARKS.read_text(encoding="utf-8").split()
    )


def test_the_readme_repeats_the_recorded_shells() -> None:
    result = json.loads((ROOT / "benchmarks" / "results" / "sparse3d_gpu.json").read_text(encoding="utf-8"))
    cells = [(kind, name) for kind in ("forward", "train") for name in ("shiplap", "spconv", "spconv-triton")]
    rows = set()
    for shell in result["shells"]:
        numbers = " | ".join(f"{shell[kind][name]:.3f}" for kind, name in cells)
        rows.add(f"| {shell['n']:,}, {shell['channels']} | {numbers} |")
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    shown = text[text.index("<!-- sparse3d_gpu -->") : text.index("<!-- /sparse3d_gpu -->")].splitlines()[3:]
    assert len(shown) >= 5
    assert set(shown) <= rows
    for package, version in result["versions"].items():
        if package.startswith("spconv"):
            assert f"`{package}` {version}" in text


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 160


def _limits(shell: dict[str, Any]) -> str:
    """Of a forward: products of pairs, the fewest bytes (each operand once), and what the captured call makes of it."""
    n, pairs, channels, ms = (shell[k] for k in ("n", "pairs", "channels", "captured_ms"))
    flops = 2 * pairs * channels**2
    moved = 2 * (2 * n * channels + 27 * channels**2) + 4 * 27 * n
    cells = [f"{flops / 1e9:.0f}", f"{moved / 1e6:.1f}", f"{2 * pairs * channels / 1e6:.0f}", f"{ms:.3f}"]
    rates = [f"{flops / ms / 1e9:.0f}", f"{moved / ms / 1e6:.0f}", f"{100 * shell['fraction']:.0f} %"]
    return f"| {shell['res']}, {channels} | {' | '.join(cells + rates)} |"


def test_the_design_note_has_flops_and_bytes_of_each_shell() -> None:
    result = json.loads((ROOT / "benchmarks" / "results" / "sparse3d_gpu.json").read_text(encoding="utf-8"))
    text = (ROOT / "docs" / "design" / "0008-sparse3d-cuda.md").read_text(encoding="utf-8")
    shown = text[text.index("<!-- sparse3d_gpu limits -->") : text.index("<!-- /sparse3d_gpu limits -->")]
    assert shown.splitlines()[3:] == [_limits(s) for s in result["shells"]]


def test_the_int8_product_is_as_fast_as_the_page_says() -> None:
    result = json.loads((ROOT / "benchmarks" / "results" / "dense_cpu.json").read_text(encoding="utf-8"))
    note = (ROOT / "docs" / "design" / "0007-dense-cpu.md").read_text(encoding="utf-8")
    for row in result["threads 1, CPU ms"]:
        ratio = row["plain / fused"][1]
        rows = int(row["name"].split("x")[0]) if row["kind"].startswith("int8") else 0
        assert f" {ratio:.2f} [" in note
        assert ratio >= (1.5 if 0 < rows <= 16 else 1.3 if rows == 128 else 1.05 if rows else 0), row["name"]


def _kinds(result: dict[str, Any]) -> Iterator[str]:
    for work in result["runs"][0]["workloads"]:
        for kind in work["kinds"]:
            forward, train = (kind["sections"][name] for name in ("forward", "forward+backward"))
            peer = forward.get("spconv")
            bound = (peer or forward["torch loop"]).get("bound")
            cells = [
                f"{work['workload']}: {kind['kind']}",
                f"{forward['ours']['ms']:.2f}",
                f"{peer['ratio']:.2f}" if peer else "–",
                f"{forward['torch loop']['ratio']:.2f}",
                f"{bound:.1f}" if bound else "–",
                f"{train['ours']['ms']:.2f}",
                f"{train['torch loop']['ratio']:.2f}",
            ]
            yield f"| {' | '.join(cells)} |"


def test_the_note_repeats_the_recorded_kinds_of_convolution() -> None:
    result = json.loads((ROOT / "benchmarks" / "results" / "sparse3d_kinds_cpu.json").read_text(encoding="utf-8"))
    note = (ROOT / "docs" / "design" / "0009-sparse3d-cpu.md").read_text(encoding="utf-8")
    shown = note[note.index("<!-- sparse3d_kinds_cpu -->") : note.index("<!-- /sparse3d_kinds_cpu -->")]
    assert shown.splitlines()[3:] == list(_kinds(result))


def test_no_built_file_is_in_a_digest() -> None:
    """CMake writes into the source folders; a digest of its files would differ from machine to machine."""
    for path in RESULTS:
        for pattern in json.loads(path.read_text(encoding="utf-8")).get("sources", ()):
            built = [p for p in ROOT.glob(pattern) if p.suffix in (".so", ".pyc") or p.name.startswith("cmake_")]
            assert not built, f"{path.name}: {pattern}"


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks").glob("[!_]*.py")), ids=lambda path: path.stem)
def test_the_sources_that_a_benchmark_names_are_there(path: Path, repository: Repository) -> None:
    """A file that was renamed would otherwise end a measurement after its last minute, when it is recorded."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    local: dict[str, Any] = {"ROOT": ROOT}
    for node in tree.body:
        names = [name.id for name in getattr(node, "targets", ()) if isinstance(name, ast.Name)]
        if not isinstance(node, ast.Assign) or not names or not names[0].isupper():
            continue
        with contextlib.suppress(Exception):  # it needs what the script imports
            local[names[0]] = eval(compile(ast.Expression(node.value), path.name, "eval"), local)
    records.sources_of(local.get("SOURCES", ()), ROOT, repository)  # FileNotFoundError for what is not there
    named = {each.value for each in ast.walk(tree) if isinstance(each, ast.Constant) and isinstance(each.value, str)}
    pattern = re.compile(r"(packages|benchmarks)/[\w/.*-]+\.\w+(::[\w.]+)?")
    records.sources_of([name for name in named if pattern.fullmatch(name)], ROOT, repository)


def _merges(result: dict[str, Any]) -> Iterator[str]:
    for case in result["cases"]:
        ratio, names = case["medians"], ("on", "forced", "inductor", "eager")
        ratios = [f"{ratio[n]:.2f}" if n in ratio else "–" for n in names]
        decided = "merged" if case["merged"] else "declined"
        yield f"| {case['case']} | {decided} | {case['us']['off']:.0f} | {' | '.join(ratios)} |"


@pytest.mark.parametrize("name", ["rewrite", "rewrite_gpu"])
def test_the_page_repeats_the_recorded_merges(name: str) -> None:
    result = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text(encoding="utf-8"))
    page = BENCHMARKS.read_text(encoding="utf-8")
    shown = page[page.index(f"<!-- {name} -->") : page.index(f"<!-- /{name} -->")]
    assert shown.splitlines()[3:] == list(_merges(result))
    text = " ".join(page.replace(shown, "").split())
    for case in result["cases"]:
        small = case["case"] in ("16 layers, 4 rows, 64x64", "64 layers, 4 rows, 32x32")
        ratio, least = case["medians"]["on"], 1.2 if small else 0.98
        told = f"*{case['case']}* has {ratio:.2f}x" in text
        assert ratio >= least or not case["merged"] or told, f"{case['case']}: the page has to say so"


def test_the_page_repeats_the_recorded_models() -> None:
    result = json.loads((ROOT / "benchmarks" / "results" / "backend_openvino.json").read_text(encoding="utf-8"))
    page = BENCHMARKS.read_text(encoding="utf-8")
    shown = page[page.index("<!-- backend_openvino -->") : page.index("<!-- /backend_openvino -->")].splitlines()[3:]
    for row, (name, record) in zip(shown, result["models"].items(), strict=True):
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        times, own = record["milliseconds"], "openvino's torch.compile backend"
        names = ("cpu eager", "cpu inductor", "device eager", "device inductor")
        assert cells[0].lower().replace("-", "").startswith(name.replace("-", "")), row
        assert cells[1:5] == [f"{times[n]:.0f}" for n in names]
        assert f"{times[own]:.0f}" in cells[5] if own in times else record["failed"][own].partition(": ")[2] in cells[5]


def _models(result: dict[str, Any]) -> Iterator[str]:
    for case in result["cases"]:
        matches = case["matches"]
        places = ", ".join(f"{name} {n}" for name, n in matches.items() if name != "no_ops" or len(matches) == 1)
        ratio, error = case["off over"], case["error"]
        cells = [
            case["model"],
            "x".join(map(str, case["input"])),
            places,
            f"{case['us']['off']:.0f}",
            *(f"{ratio[row]:.2f}" for row in ("on", "again")),
            f"{case['waited off over']['on']:.2f}",
            ", ".join(f"{case[name]:.2f}" for name in ("compile on over off", "compile and proofs over off")),
            f"{case['launch_us']['off']:.0f}, {case['launch_us']['on']:.0f}",
            f"{error['on']:.4f} ({error['eager']:.4f})",
        ]
        yield f"| {' | '.join(cells)} |"


def _pieces(result: dict[str, Any]) -> Iterator[str]:
    for case in result["cases"]:
        times = case["us"]
        (other,) = times.keys() - {"off", "again"}
        instead = f"{times[other]:.0f} ({'in blocks' if other == 'on' else other})"
        yield f"| {case['case']} | {times['off']:.0f} | {times['again']:.0f} | {instead} |"


@pytest.mark.parametrize(("name", "rows"), [("rewrite_models_gpu", _models), ("rewrite_pieces_gpu", _pieces)])
def test_the_page_repeats_the_recorded_models_and_pieces(name: str, rows: Any) -> None:
    result = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text(encoding="utf-8"))
    page = BENCHMARKS.read_text(encoding="utf-8")
    shown = page[page.index(f"<!-- {name} -->") : page.index(f"<!-- /{name} -->")]
    assert shown.splitlines()[3:] == list(rows(result))
