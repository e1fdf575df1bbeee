"""The page says what was recorded, and what the arithmetic gives."""

from __future__ import annotations

import json
from typing import Any

from shiplap_slidesparse import Pattern
from shiplap_testing.paths import REPOSITORY

PAGE = (REPOSITORY / "docs" / "slidesparse.md").read_text(encoding="utf-8")
BENCHMARKS = (REPOSITORY / "docs" / "benchmarks.md").read_text(encoding="utf-8")
COLUMNS = (
    "int8 dense (control)",
    "quantize_dynamic",
    "torchao, compiled",
    "int8 6:8",
    "torch._int_mm",
    "F.linear float32",
    "bf16 dense (control)",
    "bf16 6:8",
    "F.linear bfloat16",
)


def recorded(name: str) -> Any:
    """Return a record, with the rows that the page shows of it."""
    found = json.loads((REPOSITORY / "benchmarks" / "results" / f"{name}.json").read_text(encoding="utf-8"))
    shown = BENCHMARKS[BENCHMARKS.index(f"<!-- {name} -->") : BENCHMARKS.index(f"<!-- /{name} -->")]
    return found, shown.strip().splitlines()[3:]


def test_the_page_repeats_the_recorded_layers() -> None:
    found, shown = recorded("slidesparse_cpu")
    cells = [[str(row["m"]), *(f"{row['least'][name]:.3g}" for name in COLUMNS)] for row in found["layers"]]
    assert shown == [f"| {' | '.join(each)} |" for each in cells]
    assert found["device"] in BENCHMARKS
    lifted = next(row["ms"] for row in found["activations"] if row["m"] == 256)
    assert f"{lifted['quantise + lift 6:8']:.2f} ms" in BENCHMARKS
    assert f"{lifted['eager PyTorch, not lifted']:.2f} ms" in BENCHMARKS


def test_the_page_repeats_the_recorded_logits() -> None:
    found, shown = recorded("slidesparse_logits")
    assert shown == [
        f"| {row['model']} | {row['int8']:.2%} | {row['torchao']:.2%} | {row['ratio']} | {row['converted']:.0%} |"
        for row in found["rows"]
    ]
    assert max(row["ratio"] for row in found["rows"]) <= 1.1


def test_the_ceilings_are_the_arithmetic() -> None:
    """Known defect elsewhere: tables that gave 1.67 for 8:10 and 2.17 for 14:16."""
    for pairs in range(2, 9):
        p = Pattern(pairs)
        row = next(line for line in PAGE.splitlines() if line.startswith(f"| {p} |"))
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        assert cells[1] == f"{p.expansion:.2f}"
        assert cells[2] == f"{p.ceiling:.2f}x"
        for cell, share in ((cells[3], 0.625 * p.expansion), (cells[4], 0.5625 * p.expansion)):
            gain = f"{1 / share:.2f}x" if share < 1 else "none" if share == 1 else "slower"
            assert cell == f"{share:.3f} ({gain})"


def test_the_page_repeats_the_recorded_gpu() -> None:
    found = json.loads((REPOSITORY / "benchmarks" / "results" / "slidesparse_gpu.json").read_text(encoding="utf-8"))
    products = ["torch bf16", "torch fp8 rowwise", "torch int8", "fp8 2:4", "torch sparse fp8", "fp8 6:8", "int8 2:4"]
    products.append("int8 6:8")
    modes = ["bf16", "torch-fp8", "fp8", "fp8 2:4", "fp8 6:8", "int8", "int8 2:4", "int8 6:8"]
    tables = {
        "gemm": [(f"{g['m']} x {g['n']} x {g['k']}", [g["us"][n] for n in products]) for g in found["gemm"]],
        "blocks": [
            (f"{b['model']}, {b['rows']}", [b["us"][n] for n in modes])
            for b in sorted(found["blocks"], key=lambda b: (b["model"] != "8B", b["rows"]))
        ],
    }
    for name, rows in tables.items():
        shown = BENCHMARKS[
            BENCHMARKS.index(f"<!-- slidesparse_gpu {name} -->") : BENCHMARKS.index(f"<!-- /slidesparse_gpu {name} -->")
        ]
        lines = [f"| {title} | {' | '.join(f'{us:.0f}' for us in times)} |" for title, times in rows]
        assert shown.splitlines()[3:] == lines, "\n".join(lines)
    goals = found["goals"]
    assert max(goals["a 2:4 call over _scaled_mm's, at most 1.2"].values()) <= 1.2
    assert min(goals["quantise + lift of copy bandwidth, at least 0.8"].values()) >= 0.8
    assert min(goals["int8 6:8 over torch's fastest dense, m >= 4096, at least 1.3"].values()) >= 1.3
