"""How long C++ takes to look up a tuned choice among 1000 entries, hits and misses, with keys of six numbers.

    python benchmarks/choice_lookup.py

The goal is 200 ns. It was about 15 ns on two cores of an EPYC in November 2026.
"""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

from shiplap_headers import include_dir

PROGRAM = (
    Path(__file__).resolve().parents[1] / "packages" / "shiplap" / "tests" / "kernels" / "native" / "choice_lookup.cpp"
)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder, "look")
        subprocess.run(["c++", "-O2", "-std=c++20", f"-I{include_dir()}", "-o", program, PROGRAM], check=True)
        runs = [subprocess.run([program, "2000000"], capture_output=True, text=True, check=True) for _ in range(5)]
    print(f"{min(float(run.stdout.split()[0]) for run in runs):.1f} ns, the best of {len(runs)} runs")


if __name__ == "__main__":
    main()
