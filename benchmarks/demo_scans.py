"""The network of the demonstration on classified scans, against the best rules of two numbers on the same split.

Usage: ``python benchmarks/demo_scans.py SCAN... [--classes 2] [--unit 1.0] [--seeds 3] [--quick] [--json FILE]``. The
network runs eagerly and without the audit, so this takes seconds a seed. Exit status 1 if a seed is worse than the
better rule, which is chosen by the training area.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

from shiplap_sparse3d.demo import evaluate
from shiplap_sparse3d.demo.read import read_scan
from shiplap_sparse3d.demo.rules import best_rules
from shiplap_sparse3d.demo.run import FULL, QUICK
from shiplap_sparse3d.demo.scan import held_out_mask
from shiplap_sparse3d.demo.score import iou
from shiplap_sparse3d.demo.train import TrainingRecipe, train_network


def measure(path: Path, classes: tuple[int, ...], unit: float, seeds: int, recipe: TrainingRecipe) -> dict[str, Any]:
    """Held-out IoU of the rule that is best on the training area, and of the network for each seed."""
    scan = read_scan(path, classes, unit)
    held = held_out_mask(scan)
    rule = max(best_rules(scan, held), key=lambda tried: tried.fitted)
    scores = []
    for seed in range(seeds):
        trained = train_network([scan.take(~held)], recipe, seed, lambda *_: None, compiled=False)
        logits = evaluate.predict_logits(trained.forward, trained.look, scan, held, recipe.levels)
        scores.append(iou(logits > trained.threshold, scan.ground[held]))
    return {"scan": path.name, "points": len(scan), "rule": rule.iou, "text": rule.text, "network": scores}


def main() -> int:
    """Measure each scan, print a line for it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("scans", type=Path, nargs="+")
    parser.add_argument("--classes", default="2")
    parser.add_argument("--unit", type=float, default=1.0)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    classes = tuple(int(code) for code in options.classes.split(","))
    recipe, results = QUICK if options.quick else FULL, []
    for path in options.scans:
        result = measure(path, classes, options.unit, options.seeds, recipe)
        results.append(result)
        network = " ".join(f"{value:.3f}" for value in result["network"])
        print(f"{result['scan']:30} {result['points']:>9,}  rule {result['rule']:.3f}  network {network}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(results, indent=2))
    return int(any(min(result["network"]) < result["rule"] for result in results))


if __name__ == "__main__":
    sys.exit(main())
