"""Hash maps against a dict: any keys, any order, in any number of calls; full tables end, and say so."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import shiplap as sl
import shiplap_sparse3d as sparse3d
from shiplap_sparse3d.hashing import home_slot

KEYS = st.one_of(st.integers(-2, 8), st.integers(-(2**63), 2**63 - 1))
ENTRIES = st.lists(st.tuples(KEYS, st.integers(0, 2**31 - 1)), max_size=40)
RUNS = ("kernel", "reference")


def pick(op: sl.Op, run: str):
    return op if run == "kernel" else op.reference


def tensors(entries):
    keys = torch.tensor([k for k, _ in entries], dtype=torch.int64)
    return keys, torch.tensor([v for _, v in entries], dtype=torch.int32)


def expected(entries):
    rows: dict[int, int] = {}
    for key, value in entries:
        if key != -1:
            rows[key] = min(value, rows.get(key, value))
    return rows


@settings(max_examples=20, deadline=None)
@given(entries=ENTRIES, cut=st.integers(0, 40), seed=st.integers(0, 999))
def test_a_table_is_a_function_of_its_entries(entries, cut, seed):
    """Order and number of calls do not show, nor does which of kernel and reference ran."""
    once, parts, by_reference = (sparse3d.init_hashmap(len(entries)) for _ in range(3))
    sparse3d.hash_insert(*once, *tensors(entries))
    sparse3d.hash_insert.reference(*by_reference, *tensors(entries))
    shuffled = random.Random(seed).sample(entries, len(entries))
    for part in (shuffled[:cut], shuffled[cut:]):
        sparse3d.hash_insert(*parts, *tensors(part))
    for a, b, c in zip(once, parts, by_reference, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)


@settings(max_examples=20, deadline=None)
@given(entries=ENTRIES, others=st.lists(KEYS, max_size=20))
def test_what_was_inserted_is_found_and_nothing_else(entries, others):
    want = expected(entries)
    keys = torch.tensor([*want, *others, -1], dtype=torch.int64)
    for run in RUNS:
        table = sparse3d.init_hashmap(len(entries))
        pick(sparse3d.hash_insert, run)(*table, *tensors(entries))
        actual = pick(sparse3d.hash_lookup, run)(*table, keys)
        assert actual.tolist() == [want.get(k, -1) for k in keys.tolist()]


def colliding(count: int, capacity: int) -> list[int]:
    """Keys that all start in the last slot, and so wrap around."""
    return list(itertools.islice((k for k in itertools.count() if home_slot(k, capacity) == capacity - 1), count))


@pytest.mark.parametrize("n", [1, 2, 7, 40])
def test_the_capacity_of_init_hashmap_takes_any_keys(n):
    """Each key takes one slot: that all of them collide changes the time, and nothing else."""
    table = sparse3d.init_hashmap(n)
    keys = torch.tensor(colliding(n, len(table[0])))
    sparse3d.hash_insert(*table, keys, torch.arange(n, dtype=torch.int32))
    assert sparse3d.hash_lookup(*table, keys).tolist() == list(range(n))


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("capacity", [0, 1, 8])
def test_a_full_table_is_an_error_and_not_a_hang(capacity, run):
    keys, values = torch.full((capacity,), -1), torch.full((capacity,), -1, dtype=torch.int32)
    insert, lookup = pick(sparse3d.hash_insert, run), pick(sparse3d.hash_lookup, run)
    wanted = torch.arange(100, 100 + capacity)
    insert(keys, values, wanted, torch.arange(capacity, dtype=torch.int32))  # exactly full
    assert lookup(keys, values, wanted).tolist() == list(range(capacity))
    assert lookup(keys, values, torch.tensor([7, -1])).tolist() == [-1, -1]
    insert(keys, values, wanted, torch.zeros(capacity, dtype=torch.int32))  # nothing new
    assert not values.any()
    with pytest.raises(sl.ShiplapError, match=rf"SL211(.|\n)*more distinct keys than the {capacity} slots"):
        insert(keys, values, torch.tensor([7]), torch.tensor([7], dtype=torch.int32))


def test_all_odd_voxels_overrun_a_heuristic_capacity_and_are_told():
    """K3 S2 P1 on all-odd voxels has eight outputs each where a heuristic allows for 1.1 * 27 / 8."""
    cells = torch.randperm(50**3)[:300]
    coords = torch.stack([cells * 0, cells // 2500, cells // 50 % 50, cells % 50], 1).int() * 2 + 1
    coords[:, 0] = 0
    outs = sparse3d.out_coords(coords, [102] * 3, [3] * 3, [2] * 3, [1] * 3, [1] * 3)
    heuristic = int(1.1 * 27 / 8 * len(coords))
    assert len(outs) > heuristic
    table = torch.full((heuristic,), -1), torch.full((heuristic,), -1, dtype=torch.int32)
    with pytest.raises(sl.ShiplapError, match=r"SL211"):
        sparse3d.hash_insert_3d_index(*table, outs, [51] * 3)
    table = sparse3d.init_hashmap(len(outs))
    sparse3d.hash_insert_3d_index(*table, outs, [51] * 3)
    assert torch.equal(sparse3d.hash_lookup_3d(*table, outs, [51] * 3), torch.arange(len(outs), dtype=torch.int32))


@settings(max_examples=15, deadline=None)
@given(
    cells=st.lists(st.tuples(*[st.integers(0, 2)] * 4), max_size=30),
    far=st.sampled_from([0, 2**30]),
    step=st.sampled_from([1, 2]),
)
def test_voxels_clustered_odd_and_far_away(cells, far, step):
    """Of equal voxels the first row is found, in grids of more than 2^32 cells too."""
    shape = [far + 6, 7, 2**20]
    coords = torch.tensor(cells, dtype=torch.int32).view(-1, 4) * step + torch.tensor([0, far, 0, 0]).int()
    first: dict[tuple[int, ...], int] = {}
    for row, voxel in enumerate(coords.tolist()):
        first.setdefault(tuple(voxel), row)
    queries = torch.cat([coords, coords + torch.tensor([0, 1, 0, 0]).int(), torch.tensor([[-1] * 4, [0, -1, 0, 0]])])
    want = [first.get(tuple(q), -1) for q in queries.tolist()]
    for run in RUNS:
        table = sparse3d.init_hashmap(len(cells))
        pick(sparse3d.hash_insert_3d_index, run)(*table, coords, shape)
        assert pick(sparse3d.hash_lookup_3d, run)(*table, queries.int(), shape).tolist() == want
        repeated = sparse3d.init_hashmap(len(cells))
        rows = torch.arange(len(cells), dtype=torch.int32)
        pick(sparse3d.hash_insert_3d, run)(*repeated, coords, rows, shape)
        assert torch.equal(repeated[0], table[0])
        assert torch.equal(repeated[1], table[1])


@pytest.mark.parametrize("run", RUNS)
def test_bad_voxels_are_refused_and_padding_is_not(run):
    table = sparse3d.init_hashmap(4)
    insert = pick(sparse3d.hash_insert_3d_index, run)
    for bad in ([0, 0, 5, 0], [0, -1, 0, 0], [-2, 0, 0, 0]):
        with pytest.raises(sl.ShiplapError, match=r"SL211(.|\n)*coords row 1 (.|\n)*outside spatial_shape"):
            insert(*table, torch.tensor([[0, 0, 0, 0], bad], dtype=torch.int32), [5, 5, 5])
    huge = torch.tensor([[4, 0, 0, 0]], dtype=torch.int32)
    for op in (insert, pick(sparse3d.hash_lookup_3d, run)):
        with pytest.raises(sl.ShiplapError, match=r"SL211(.|\n)*2\^63 cells"):
            op(*table, huge, [2**31 - 1, 2**15, 2**15])
    empty = sparse3d.init_hashmap(2)
    insert(*empty, torch.tensor([[-1, 7, 7, 7], [-1, -1, -1, -1]], dtype=torch.int32), [5, 5, 5])
    assert (empty[0] == -1).all()


def test_many_keys_on_several_threads():
    keys = torch.randint(-(2**63), 2**63 - 1, (60_000,))
    table = sparse3d.init_hashmap(len(keys))
    sparse3d.hash_insert(*table, keys, torch.arange(len(keys), dtype=torch.int32))
    assert torch.equal(sparse3d.hash_lookup(*table, keys), torch.arange(len(keys), dtype=torch.int32))
    assert (sparse3d.hash_lookup(*table, keys + 1) == -1).all()


def test_views_are_written_to():
    wide = torch.full((2, 10), -1)
    values = torch.full((20,), -1, dtype=torch.int32)[::4]
    sparse3d.hash_insert(wide.t()[::2, 0], values, torch.tensor([3, 4]), torch.tensor([0, 1], dtype=torch.int32))
    assert sparse3d.hash_lookup(wide[0, ::2], values, torch.tensor([4, 3])).tolist() == [1, 0]
    assert (wide[1] == -1).all()


def test_insertion_inside_a_compiled_graph(fresh_compiler):
    """Tables made in the graph, tables given to it, and any number of keys."""

    def rows(coords, keys, values):
        sparse3d.hash_insert_3d_index(keys, values, coords, [9, 9, 9])
        own = sparse3d.init_hashmap(coords.shape[0])
        sparse3d.hash_insert_3d_index(*own, coords, [9, 9, 9])
        return sparse3d.hash_lookup_3d(*own, coords.flip(0), [9, 9, 9])

    compiled = torch.compile(rows, fullgraph=True, dynamic=True)
    for n in (4, 20):
        coords = torch.randint(0, 9, (n, 4), dtype=torch.int32)
        tables = [sparse3d.init_hashmap(n) for _ in range(2)]
        assert torch.equal(compiled(coords, *tables[0]), rows(coords, *tables[1]))
        assert torch.equal(tables[0][0], tables[1][0])
        assert torch.equal(tables[0][1], tables[1][1])
