"""Triton kernels of tables, sorted tables and coordinates, interpreted on the CPU beside the references."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest

pytest.importorskip("triton")

import shiplap_sparse3d
from shiplap_testing.effort import EFFORTS
from shiplap_testing.forked import interpreted

CASES = ("late_errors", "points", "submanifold", "bricks", "steps", "sorts")
WRONG = (  # one slip for each case: file, what it says, what it would say
    (
        "lookup_kernels.py",
        "report_row(status, code_twice, row, good & (twin != 0))",
        "report_row(status, code_twice, row, twin < 0)",
    ),
    ("tables.py", "kernel[{i}] // 2 * dilation", "(kernel[{i}] - 1) // 2 * dilation"),
    ("unique.py", "mask=ends, sem", "mask=begins, sem"),
    ("coords.py", "tl.where(there, line % width, -1)", "tl.where(there, line % width, 0)"),
    ("bricks.py", "word, start = tl.where(far_z, c1, c0)", "word, start = tl.where(far_z, c0, c1)"),
    ("sort.py", "b - 1 - (block - place)", "b - 1"),
)


def describe(*args: str) -> dict[str, str]:
    """What the script says of each case, on a fresh seed."""
    script = Path(__file__).with_name("maps_interpreted.py")
    command = script, random.randrange(2**31), *args
    done = interpreted(*command, timeout=600)
    lines = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    assert tuple(lines) == CASES, f"{command}\n{done.stdout}{done.stderr}"
    return lines


@pytest.mark.parametrize("effort", EFFORTS)
def test_interpreted_kernels_agree_with_the_references_and_tell_what_was_wrong(effort):
    assert describe(effort) == dict.fromkeys(CASES, "agrees")


@pytest.mark.long
def test_a_slip_in_a_kernel_does_not_agree(tmp_path):
    for file, right, wrong in WRONG:
        place, source = tmp_path / file, Path(shiplap_sparse3d.__file__).parent / "cuda" / file
        text = (place if place.exists() else source).read_text()
        assert text.count(right) == 1, f"{file} no longer says {right}"
        place.write_text(text.replace(right, wrong))
    verdicts = describe("every", str(tmp_path))
    assert all(verdict.startswith("differs: ") for verdict in verdicts.values()), verdicts


def test_every_form_of_a_sort_fits_its_scratch():
    from shiplap.declare.dim_expression import Expr
    from shiplap_sparse3d.cuda import sort

    form = sort.TableSort("", "m", "parts", "table", "0")
    values = {name: Expr.parse(text, name) for name, text in sort.sort_numbers(form).items()}
    room = Expr.parse(sort.scratch_bytes("m", "parts"), "scratch")
    for m in (1, 63, 129, 5000, 8193, 31999, 10**5, sort.COUNTED_ROWS, 350_001, 10**6, 5 * 10**6):
        for k, parts in ((27, 1), (27, 2), (27, 3), (27, 9), (27, 27), (125, 9), (1, 1)):
            for run in (1 << 18, 1000, 65_536):
                env = {"m": m, "k": k, "parts": parts, "run": run}
                for name, value in values.items():
                    env[name] = int(value(env))
                assert env["alone"] + env["counted"] + env["ranked"] == 1
                assert int(room(env)) % 8 == 0, env  # what lies behind it may be keys of 64 bits
                assert env["keys"] % 2 == 0 or not env["counted"], env
                most = env["keys"] + parts * m * (16 if env["digits"] else 24 if env["ranked"] else env["key"] // 8)
                assert most <= int(room(env)), env
                bits = env["size"] + (parts * env["runs"] - 1).bit_length()
                width = 32 if env["digits"] else next(b for b in (16, 32, 64) if bits < b)
                assert not env["ranked"] or env["key"] == width, env
                assert env["digits"] == (env["ranked"] and parts * m <= 1 << 18 and (m <= run or run % 8192 == 0)), env


def test_bricks_fit_where_the_other_hash_and_its_table_would_be_and_need_a_sort_that_ranks():
    from shiplap.declare.dim_expression import Expr
    from shiplap_sparse3d.cuda import brick_plan, hash, lookup, tables

    grids = (0, (100, 100, 100)), (1, (100, 100, 100)), (3, (40, 1, 9)), (2, (2**21, 2**21, 2**20))
    names = tables.subm_plan(0, 0, 0).values
    values = {name: Expr.parse(text, name) for name, text in names.items()}
    seen = set()
    for n in (63, 65, 700, 5000, 140_000, 1_000_000):
        for kernel, parts, run in (
            ((3, 3, 3), 1, 1 << 18),
            ((3, 3, 3), 9, 1 << 18),
            ((3, 3, 3), 27, 64),
            ((5, 3, 3), 2, 64),
        ):
            for scenes, grid in grids:
                env = {"n": n, "k": math.prod(kernel), "kernel": kernel, "dilation": (1, 1, 1), "parts": parts}
                env |= {"run": run, "scenes": scenes, "spatial_shape": grid}
                for name, value in values.items():
                    env[name] = int(value(env))
                seen.add((env["bricks"], env["dense"]))
                assert env["bricks"] + env["near"] + env["hashed"] == 1, env
                assert env["dense"] <= env["bricks"] <= env["ranked"], env
                bricks = scenes * math.prod(-(-size // 4) for size in grid)
                assert env["dense"] == (env["bricks"] and 0 < bricks <= 8 * n), env
                place = {name: int(Expr.parse(at, name)(env)) for name, (_, at) in brick_plan.SCRATCH.items()}
                slots = env["slot_bytes"] // (8 if env["dense"] else 16)
                if env["bricks"]:
                    assert place["own"] + (0 if env["dense"] else 4 * n) <= place["slots"], env
                    assert place["slots"] % (8 if env["dense"] else 16) == 0, env
                    assert place["slots"] + env["slot_bytes"] <= place["counters"] <= env["counts"] - 16, env
                    assert place["starts"] + 4 * slots <= env["place"] + 4 * n * env["k"], env
                    assert slots >= (bricks if env["dense"] else n), env
                assert hash.SLOT_BYTES * env["capacity"] == env["counts"], env
                assert Expr.parse(lookup.CAPACITY, "capacity")(env) == env["capacity"]
    assert seen == {(0, 0), (1, 0), (1, 1)}


def test_keys_that_are_sorted_have_room_and_few_need_none():
    from shiplap.declare.dim_expression import Expr
    from shiplap_sparse3d import cuda
    from shiplap_sparse3d.cuda import coords

    room = Expr.parse(cuda.KEYS, "workspace")
    assert [room({"m": m}) for m in (0, coords.FEW, coords.FEW + 1)] == [0, 0, 24 * (coords.FEW + 1)]
    assert f"8 * {coords.SLOTS}" == cuda.SET
