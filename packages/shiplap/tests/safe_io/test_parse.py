"""Attacks on what is parsed: too deep, too large, too many, the wrong shape. Errors of the catalogue, at once."""

from __future__ import annotations

import hashlib
import json
import os
import random
import time
from pathlib import Path

import pytest
import torch
from jaxtyping import Float
from torch import Tensor

import shiplap as sl
from shiplap import safe_io
from shiplap.errors import ShiplapError
from shiplap.tuning.frozen_table import FORMAT, dump_table, frozen, read_frozen_table, thaw
from shiplap.tuning.key import Key
from shiplap.tuning.recorded_calls import read_calls
from shiplap.tuning.store import seal_entry
from shiplap_testing.choices import FIELDS, VALUE
from shiplap_testing.forked import python
from shiplap_testing.mutate import mutated

SECONDS = 2.0  # most take less than one; the host of a virtual machine may halve its speed
HOSTILE = {
    "deep list": b"[" * 100_000,
    "deep and closed": b"[" * 5000 + b"]" * 5000,
    "deep object": b'{"a":' * 100_000,
    "long number": b"1" * 1_000_000,
    "number of 65 bits": b"18446744073709551616",
    "infinite": b"Infinity",
    "not a number": b"[NaN]",
    "overflow": b"1e999",
    "NUL": b'"a\\u0000b"',
    "half a pair": b'"\\ud800"',
    "not UTF-8": b'"\xff"',
    "UTF-16": "[1]".encode("utf-16"),
    "twice": b'{"a": 1, "a": 2}',
    "empty": b"",
    "unclosed": b'["',
    "many": b"[" + b"0," * 1_200_000 + b"0]",
    "brackets in a text, then none": b'"' + b"[" * 1000,
}


@pytest.mark.parametrize(
    ("limits", "fits", "too_much"),
    [
        ({"depth": 3}, b"[[[0]]]", b"[[[[0]]]]"),
        ({"size": 5}, b"[100]", b"[1000]"),
        ({"nodes": 3}, b"[0,0,0]", b"[0,0,0,0]"),
        ({}, b"[9223372036854775807]", b"[9223372036854775808]"),
        ({}, b"[-9223372036854775808]", b"[-9223372036854775809]"),
    ],
)
def test_a_limit_admits_what_is_as_large_and_nothing_beyond(
    limits: dict[str, int], fits: bytes, too_much: bytes
) -> None:
    bounds = safe_io.ParseLimits(**limits)
    assert safe_io.parse_json(fits, bounds) == json.loads(fits)
    with pytest.raises(ValueError, match=r"deeper than 3|longer than 5|more than (3 values|64 bits)"):
        safe_io.parse_json(too_much, bounds)


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_json_is_a_value_error_at_once(name):
    started = time.process_time()
    with pytest.raises(ValueError, match=r"."):
        safe_io.parse_json(HOSTILE[name])
    assert time.process_time() - started < 1


def test_honest_json_is_read():
    value = {"a": [1, -(1 << 63), 1.5, True, None, "[[[[" * 100, 'x"]']}
    assert safe_io.parse_json(json.dumps(value).encode()) == value


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("reader", [read_frozen_table, read_calls], ids=["table", "record"])
def test_hostile_files_are_errors_of_the_catalogue(tmp_path, name, reader):
    path = tmp_path / "file"
    path.write_bytes(HOSTILE[name] + b"\n")
    path.chmod(0o600)
    started = time.process_time()
    if reader is read_calls and name == "empty":
        assert reader(path) == []
        return
    with pytest.raises(ShiplapError) as caught:
        reader(path)
    assert caught.value.id in ("SL602", "SL609")
    assert time.process_time() - started < 1


def sealed(**content):
    """A table with a checksum that fits: whoever can write it, can write that."""
    body = {"format": FORMAT, **content}
    known = {name: body.get(name) for name in ("format", "entries")}
    text = json.dumps(known, sort_keys=True, separators=(",", ":"))
    return json.dumps({**body, "sha256": hashlib.sha256(text.encode()).hexdigest()})


def entries(key=(), value=()):
    return [seal_entry(Key.of({**FIELDS, **dict(key)}), {**VALUE, **dict(value)})]


SHAPES = {
    "missing": {},
    "a number": {"entries": 5},
    "null": {"entries": None},
    "an object": {"entries": {"a": 1}},
    "a text": {"entries": "abc"},
    "a list of numbers": {"entries": [5]},
    "no such device": {"entries": entries(key={"device": "abacus"})},
    "an odd device": {"entries": entries(key={"device": "cuda:99999999999999"})},
    "a bucket that is a call": {"entries": entries(key={"bucket": "n<=__import__('os').system('true')"})},
    "a deep bucket": {"entries": entries(key={"bucket": "n<=" + "(" * 3000 + ")" * 3000})},
    "a bucket of minuses": {"entries": entries(key={"bucket": "n<=" + "-" * 4000 + "1"})},
    "a long bucket": {"entries": entries(key={"bucket": "n<=1, " * 10_000})},
    "a bucket of a list": {"entries": entries(key={"bucket": "n<=[1]"})},
    "a bucket that is infinite": {"entries": entries(key={"bucket": "n<=1e999"})},
    "a huge bucket": {"entries": entries(key={"bucket": "n<=" + "9" * 3000})},
    "a bucket with NUL": {"entries": entries(key={"bucket": "n<='\\0'"})},
    "a config of lists": {"entries": entries(value={"config": {"tile": [1]}})},
    "a config that is a list": {"entries": entries(value={"config": [1]})},
    "no kernel": {"entries": entries(value={"kernel": None})},
    "findings of other fields": {"entries": entries(value={"findings": [{"foo": "bar"}]})},
}


@pytest.mark.parametrize("name", SHAPES)
def test_a_sealed_table_of_another_shape_is_an_error(tmp_path, name):
    path = tmp_path / "table.json"
    path.write_text(sealed(**SHAPES[name]))
    path.chmod(0o600)
    try:
        with pytest.raises(ShiplapError, match="SL609"):
            frozen(path)
    finally:
        thaw()


def test_mutated_tables_and_records_are_errors_of_the_catalogue(tmp_path):
    """A seeded sample of what ``nox -s fuzz`` does for longer: SL errors only, within 1 s and 512 MiB."""
    rng = random.Random(17)
    path = tmp_path / "table.json"
    dump_table(path, [(Key.of(FIELDS), VALUE)])
    whole = path.read_bytes()
    for _ in range(int(os.environ.get("SHIPLAP_TEST_FUZZ", "400"))):
        path.write_bytes(mutated(rng, whole))
        for reader in (read_frozen_table, read_calls):
            started = time.process_time()
            try:
                reader(path)
            except ShiplapError:
                assert time.process_time() - started < 1


MEMORY = """
import resource, sys, time
from shiplap.errors import ShiplapError
from shiplap.safe_io.files import NAMED, read_file
from shiplap.safe_io.parse import build_yaml, compose_yaml
from shiplap.tuning.recorded_calls import read_calls
from shiplap.tuning.frozen_table import read_frozen_table

before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for path in sys.argv[1:]:
    seconds = []
    for attempt in range(3):
        started = time.process_time()
        try:
            if path.endswith(".yaml"):
                build_yaml(compose_yaml(read_file(path, 1 << 24, NAMED)))
            else:
                (read_calls if path.endswith(".calls") else read_frozen_table)(path)
        except (ShiplapError, ValueError):
            pass
        else:
            raise AssertionError(f"{path} was accepted")
        seconds.append(time.process_time() - started)
        if seconds[-1] < 0.5:
            break
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    print(path, min(seconds), grown >> 10, "MiB")
"""
LARGE = {
    "list.json": b"[" + b"0," * ((1 << 23) - 100) + b"0]",
    "values.json": b"[" + b"[]," * 249_000 + b"[]]",
    "objects.json": b"[" + b'{"a":0},' * 124_500 + b"0]",
    "text.json": b'"' + b"\\u00e9" * 2_700_000 + b'"',
    "brackets.json": b"[" * (1 << 24),
    "long.calls": b'{"op": 1}' * 1_800_000 + b"\n",
    "bomb.yaml": b"a0: &a0 [x]\n"
    + b"".join(b"a%d: &a%d [%s]\n" % (i, i, b", ".join([b"*a%d" % (i - 1)] * 9)) for i in range(1, 10)),
    "wide.yaml": b"- 1\n" * (1 << 17),
    "deep.yaml": b"[" * (1 << 18),
}


@pytest.mark.long
def test_the_largest_files_take_neither_long_nor_much_memory(tmp_path):
    """Of each kind the dearest that its limit lets in: in a process of its own, whose memory is counted.

    The least time of three counts: a core whose other half works takes twice as long.
    """
    for name, content in LARGE.items():
        (tmp_path / name).write_bytes(content)
        (tmp_path / name).chmod(0o600)
    done = python("-c", MEMORY, *[tmp_path / name for name in LARGE], timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [line.split() for line in done.stdout.splitlines()]
    assert len(rows) == len(LARGE)
    slow = {Path(path).name: float(seconds) for path, seconds, *_ in rows if float(seconds) > SECONDS}
    assert not slow, slow
    assert int(rows[-1][2]) < 512, done.stdout


def test_tuning_what_is_no_sample_is_an_error(ns):
    @sl.op(f"{ns}::double")
    def double(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
        return 2 * x

    for samples in (torch.ones(3), [torch.ones(3)], 5, [5], None, [None], [(1,)], "abc", [()]):
        with pytest.raises(ShiplapError):
            sl.tune(double, samples)
    for nothing in ([], (), iter([])):
        with pytest.raises(ShiplapError, match="SL613") as caught:
            sl.tune(double, nothing)
        assert caught.value.got == "no samples"
        assert caught.value.expected == "a list of at least one sample, such as [(x, y)]"
