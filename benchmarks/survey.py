"""The memory and the speed of a survey: copies of the packaged scan side by side, each survey in its own process.

Usage: ``python benchmarks/survey.py [--copies 50] [--workers 1 2] [--rounds 3] [--json FILE]``. The network is the
small U-Net of the tests of ``shiplap_sparse3d.survey``. Without workers, one copy is compared with all of them: exit
status 1 if the peak memory of the two differs by more than 10 %. With workers, the numbers of Dask workers take turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "packages/shiplap-sparse3d/tests/survey/models.py"
APART = 1_200.0  # feet from one copy to the next: the scan is 1,180 wide


def copies(target: Path, count: int) -> None:
    """Write ``count`` copies of the scan side by side, one after the other in the file."""
    import laspy

    import shiplap_sparse3d.demo

    scan = laspy.read(Path(shiplap_sparse3d.demo.__file__).parent / "data" / "autzen_trim.laz")
    step = round(APART / scan.header.scales[0])
    with laspy.open(target, mode="w", header=scan.header) as writer:
        for _ in range(count):
            writer.write_points(scan.points)
            scan.X += step


def measure(count: int, tile: int, *options: str) -> dict[str, Any]:
    """What ``shiplap survey`` says of ``count`` copies."""
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "in.laz", Path(folder) / "out.laz"
        copies(source, count)
        arguments = "survey", source, target, "--model", f"{MODEL}:model", "--tile", str(tile), "--json", *options
        done = subprocess.run(
            [sys.executable, "-m", "shiplap.cli", *arguments], cwd=MODEL.parents[2], capture_output=True, text=True
        )
        if done.returncode:
            raise SystemExit(done.stderr)
        result: dict[str, Any] = json.loads(done.stdout)
        return result


def speed(options: argparse.Namespace) -> int:
    """Print the seconds of each number of workers, from the start of the call to the output, and their medians."""
    seconds: dict[int, list[float]] = {workers: [] for workers in options.workers}
    for _ in range(options.rounds):
        for workers, of in seconds.items():
            of.append(measure(options.copies, options.tile, "--workers", str(workers))["seconds"])
            print(f"{workers} workers: {of[-1]:.1f} s", flush=True)
    medians = {workers: statistics.median(of) for workers, of in seconds.items()}
    first = medians[options.workers[0]]
    print({workers: f"{median:.1f} s, {first / median:.2f} times as fast" for workers, median in medians.items()})
    if options.json:
        options.json.write_text(json.dumps(seconds, indent=2))
    return 0


def main() -> int:
    """Measure both, print a line for each."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--copies", type=int, default=50)
    parser.add_argument("--tile", type=int, default=64)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--workers", type=int, nargs="*", default=[])
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    if options.workers:
        return speed(options)
    results = [measure(count, options.tile) for count in (1, options.copies)]
    for result in results:
        print(f"{result['points']:>12,} points  {result['peak_mb']:8.1f} MB  {result['seconds']:8.1f} s")
    one, many = (result["peak_mb"] for result in results)
    points = results[1]["points"] - results[0]["points"]
    print(f"{many / one - 1:+.1%}; {(many - one) / max(1, points) * 1e9:,.0f} MB more for each billion of points")
    if options.json:
        options.json.write_text(json.dumps(results, indent=2))
    return int(abs(many / one - 1) > 0.1)


if __name__ == "__main__":
    sys.exit(main())
