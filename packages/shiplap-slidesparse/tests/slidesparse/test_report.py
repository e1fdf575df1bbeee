"""``shiplap slidesparse report``: numbers that follow from sizes, drift that is what it says, and how it ends."""

from __future__ import annotations

import importlib.metadata
import json
import math
import re
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import shiplap_slidesparse as ss
from shiplap.cli.app import app
from shiplap.errors import ShiplapError
from shiplap_slidesparse import accuracy, report, roofline
from shiplap_slidesparse.cli import show
from tests.slidesparse.models import llama, mlp, model

HERE = "tests.slidesparse.models"


def run(*args: object) -> Any:
    return CliRunner().invoke(app, ["slidesparse", "report", *map(str, args)])


@pytest.mark.parametrize(
    ("pattern", "ceiling", "bytes_ratio"),
    [("2:4", 2, 1.6), ("4:6", 1.5, 1.2), ("6:8", 4 / 3, 1.0667), ("8:10", 1.25, 1)],
)
def test_ceilings_of_the_roofline(pattern: str, ceiling: float, bytes_ratio: float) -> None:
    """N / (N - 1) of arithmetic, 1 / (0.625 gamma) of the weight's bytes."""
    pairs = ss.Pattern.parse(pattern).pairs
    k = 960 * pairs
    many = [roofline.layer_work(form, "int8", 4096, 8192, k, pairs) for form in ("dense", "slide")]
    assert many[0].macs / many[1].macs == pytest.approx(ceiling)
    one = [roofline.layer_work(form, "int8", 1, 8192, k, pairs) for form in ("dense", "slide")]
    assert one[0].bytes / one[1].bytes == pytest.approx(bytes_ratio, rel=0.01)
    without = roofline.layer_work("slide", "int8", 1, 8192, k, pairs, sparse_units=False)
    assert without.macs == pytest.approx(2 * one[1].macs)


def test_seconds_are_the_scarcer_of_two() -> None:
    peaks = roofline.DevicePeaks("test", 1e12, 2e12, 1e9)
    assert roofline.roofline_seconds("base", "int8", roofline.LayerWork(1e12, 1), peaks) == 1
    assert roofline.roofline_seconds("dense", "int8", roofline.LayerWork(1e12, 1), peaks) == 0.5
    assert roofline.roofline_seconds("dense", "bf16", roofline.LayerWork(1e12, int(3e9)), peaks) == 3


def test_drift_is_what_it_says() -> None:
    net, tokens = model(), [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]
    before = accuracy.logits_of(net, tokens, window=4)  # 4, 4 and 2
    same = accuracy.measure_drift(before, before, tokens, window=4)
    assert (same.tokens, same.divergence, same.agreement, same.largest) == (7, 0, 1, 0)
    wanted = torch.cat(
        [
            torch.nn.functional.cross_entropy(b[:-1], torch.tensor(tokens[i + 1 : i + len(b)]), reduction="none")
            for i, b in zip((0, 4, 8), before, strict=True)
        ]
    )
    assert same.perplexity == pytest.approx(math.exp(wanted.mean()), rel=1e-5)
    ss.convert(net, "2:4")
    moved = accuracy.measure_drift(before, accuracy.logits_of(net, tokens, window=4), tokens, window=4)
    assert moved.divergence > 0
    assert moved.largest > 0
    places = torch.nn.Module()
    assert accuracy.window_of(places) == accuracy.WINDOW
    places.config = types.SimpleNamespace(max_position_embeddings=16)  # more would be no tokens that it knows
    assert accuracy.window_of(places) == 16
    with pytest.raises(ShiplapError, match=r"SL613[\s\S]*model\(tokens \[1, 3\]\)[\s\S]*RuntimeError"):
        accuracy.logits_of(mlp(), [1, 2, 3])
    with pytest.raises(ShiplapError, match=r"SL613[\s\S]*1 of them"):
        accuracy.logits_of(net, [1])
    with pytest.raises(ShiplapError, match=r"SL613[\s\S]*tokens from 1 to 70[\s\S]*0 to 63"):
        accuracy.logits_of(llama(vocab_size=64), [1, 70])


def test_a_survey_without_a_clock() -> None:
    surveyed = report.survey_model(mlp(), rows=[1, 64], measure=False)
    assert [(s.n, s.k, s.layers) for s in surveyed.sizes] == [(40, 48, ("0",)), (48, 40, ("2",))]
    assert [b.rows for b in surveyed.sizes[0].buckets] == [1, 64]
    assert surveyed.sizes[0].buckets[0].winner == ""  # no peaks of a CPU are known
    assert not surveyed.pays
    net = mlp()
    ss.convert(net)
    with pytest.raises(ShiplapError, match="a model that is converted already"):
        report.survey_model(net)


def test_the_winner_is_the_fastest_by_the_next() -> None:
    bucket = report.LayerBucket(16, {"base": 3.0, "dense": 1.0, "slide": 1.5}, {"slide": 0.1, "dense": 9.0}, 1.3)
    assert (bucket.winner, bucket.gain) == ("dense", 1.5)
    assert report.LayerBucket(16, {}, {"slide": 0.1, "dense": 0.2}, 1.3).winner == "slide"
    even = report.LayerBucket(16, {"base": 3.0, "dense": 1.01, "slide": 1.0}, {}, 1.3)
    assert (even.winner, even.gain) == ("dense", pytest.approx(1 / 1.01))  # a difference that is noise is no win
    assert (report.LayerBucket(16, {}, {}, 1.3).winner, report.LayerBucket(16, {"base": 1.0}, {}, 1.3).gain) == (
        "",
        1.0,
    )


def test_both_numbers_are_shown() -> None:
    both = report.LayerBucket(16, {"base": 3e-3, "dense": 1e-3}, {"base": 2e-3, "dense": 5e-4, "slide": 1e-4}, 1.3)
    assert [show.format_times(both, form) for form in ("base", "dense", "slide")] == [
        "3 ms (2 ms)",
        "1 ms (500 us)",
        "100 us",
    ]
    assert show.format_times(report.LayerBucket(16, {}, {}, 1.3), "base") == "-"


def test_the_verb(tmp_path: Path) -> None:
    tokens, page = tmp_path / "tokens.txt", tmp_path / "page.html"
    tokens.write_text("3 1 4 1 5 9 2 6")
    asked = "--pattern", "6:8", "--rows", "1,16", "--seconds", "0.01"
    done = run(f"{HERE}:model", *asked, "--tokens", tokens, "--html", page)
    assert done.exit_code in (0, 1), done.output
    assert re.search(r"slide wins \d of 6, measured; at most 1.33x on sparse tensor cores", done.stdout)
    assert re.search(r"7 tokens: perplexity [\d.]+ → [\d.]+, divergence", done.stdout)
    assert re.search(r"40 x 48: 1; weight off by 1\d.\d%, output by 1\d", done.stdout)
    html = page.read_text()
    assert "<script src" not in html
    assert re.search(r"weight off by 1\d.\d+ %</td><td>output off by 1", html)


def test_the_verb_measures_dense_layers_by_default() -> None:
    done = run(f"{HERE}:model", "--rows", "16", "--seconds", "0.01")
    assert done.exit_code in (0, 1), done.output
    assert re.search(r"dense int8 on cpu: dense wins \d of 3, measured\n", done.stdout)
    assert re.search(r"40 x 48: 1; weight off by 0.\d%, output by [01].\d%", done.stdout)
    refused = run(f"{HERE}:model", "--dtype", "bf16")
    assert refused.exit_code == 2
    assert "dense weights in bf16" in refused.output


def test_numbers_that_json_has_not_are_null(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens.txt"
    tokens.write_text("3 1 4")
    done = run(f"{HERE}:overflowing", "--rows", "4", "--no-measure", "--json", "--tokens", tokens)
    assert done.exit_code == 0, done.output
    parsed = json.loads(done.stdout, parse_constant=lambda name: pytest.fail(name))
    assert parsed["drift"]["perplexity"] is None


def test_directories_that_are_no_dense_model(tmp_path: Path) -> None:
    from shiplap_slidesparse import hf

    done = run(tmp_path / "nowhere")
    assert done.exit_code == 2
    assert "no such directory" in done.output
    net = llama()
    net.config.save_pretrained(tmp_path)
    done = run(tmp_path)
    assert done.exit_code == 2
    assert re.search(r"SL601: the model cannot be loaded(.|\n)*OSError", done.output)
    hf.attach(net, ss.convert(net))
    net.save_pretrained(tmp_path)
    done = run(tmp_path, "--no-measure")  # int8 weights are not the numbers of a dense one
    assert done.exit_code == 2
    assert "a model that is converted already" in done.output


def test_the_verb_as_json(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path)
    tokens = tmp_path / "tokens.json"
    tokens.write_text("[3, 1, 4]")
    done = run(tmp_path, "--rows", "4", "--no-measure", "--pattern", "2:4", "--json", "--tokens", tokens)
    assert done.exit_code == 0, done.output
    parsed = json.loads(done.stdout)
    assert (parsed["pattern"], parsed["ceiling"], parsed["drift"]["tokens"]) == ("2:4", 2.0, 2)
    assert sum(len(size["layers"]) for size in parsed["sizes"]) == 14
    assert [s["name"] for s in parsed["conversion"]["skipped"]] == ["lm_head", "model.embed_tokens.weight"]
    assert all(0.1 < c["output_error"] < 0.9 for c in parsed["conversion"]["converted"])
    assert parsed["facts"]["torch"] == importlib.metadata.version("torch")


@pytest.mark.parametrize(
    ("args", "text"),
    [
        ((f"{HERE}:model", "--rows", "1,x"), "SL613"),
        ((f"{HERE}:model", "--rows", "0"), "SL613"),
        ((f"{HERE}:model", "--seconds", "0"), "pass --no-measure"),
        ((f"{HERE}:model", "--seconds", "nan"), "more than 0"),
        ((f"{HERE}:TOKENS",), "expected a torch module"),
        (("nowhere.py", "--html", "nowhere/page.html"), "SL602"),  # before anything is measured
        ((f"{HERE}:model", "--tokens", "/dev/null"), "0 tokens"),
        ((f"{HERE}:layer_of",), "the model cannot be constructed"),
        ((f"{HERE}:modle",), "did you mean 'model'?"),
        (("nowhere.py",), "SL501"),
        (("tests",), "no config.json"),
        ((f"{HERE}:model", "--tokens", "nowhere.json"), "SL602"),
        ((f"{HERE}:model", "--tokens", "README.md"), "other text"),
        ((f"{HERE}:model", "--text", "README.md"), "no tokenizer"),
        ((f"{HERE}:model", "--device", "cuda:9"), "SL605"),
        (("nowhere.py", "--dtype", "int4"), "SL211"),  # before a model is looked for
        (("nowhere.py", "--pattern", "3:4"), "SL211"),
    ],
    ids=str,
)
def test_errors_say_what_to_do(args: tuple[str, ...], text: str) -> None:
    done = run(*args)
    assert done.exit_code == 2, done.output
    assert text in done.output


def test_help_has_examples_and_exit_codes() -> None:
    text = run("--help").stdout
    assert len(re.findall(r"^ +shiplap slidesparse report", text, re.MULTILINE)) >= 3
    assert re.search(r"Exit status:\n +0 ", text)
    assert max(map(len, text.splitlines())) <= 100
