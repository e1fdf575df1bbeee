"""Which library of a package serves an op, and the words for why none does."""

import json
from types import SimpleNamespace

import pytest

from shiplap.errors import error
from shiplap.kernels.native import prebuilt


def entry(device="cpu", needs="one", op="demo::f"):
    return SimpleNamespace(device=device, native=needs, op=SimpleNamespace(spec=SimpleNamespace(name=op)))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(prebuilt, "op_build_digest", lambda native: native)
    monkeypatch.setattr(prebuilt, "_unusable_libraries", {})
    prebuilt._read_manifest_rows.cache_clear()
    prebuilt._listed_libraries.cache_clear()
    yield tmp_path
    prebuilt._read_manifest_rows.cache_clear()
    prebuilt._listed_libraries.cache_clear()


def written(folder, name, entries, **changed):
    (folder / name).mkdir(mode=0o700)
    about = json.loads(prebuilt.library_manifest(entries)) | changed
    (folder / name / prebuilt.MANIFEST).write_text(json.dumps(about))
    return folder / name


def test_the_numbers_of_an_op_in_a_library(folder):
    place = written(folder, "a", [entry(op="demo::g"), entry("cuda"), entry()])
    one, two = entry(), entry("cuda")
    assert prebuilt._entry_numbers(place, [one, two]) == {2: one, 1: two}
    assert prebuilt._entry_numbers(place, [entry(op="demo::h")]) is None
    with pytest.raises(ValueError, match=r"^its code for cpu was made for another declaration of demo::f"):
        prebuilt._entry_numbers(place, [entry(needs="two")])
    with pytest.raises(ValueError, match=r"^it has no code for xpu, and was made for another"):
        prebuilt._entry_numbers(place, [entry("xpu")])
    prebuilt.give_up_library(place, "it does not load")
    with pytest.raises(ValueError, match=r"^it does not load$"):
        prebuilt._entry_numbers(place, [one])


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"format": "other"}, "is not of format shiplap-binding/1"),
        ({"machine": "other"}, "^it is for other, and this is "),
        ({"ops": [{"op": "demo::f"}]}, "lists something else than ops"),
    ],
)
def test_a_manifest_that_is_for_something_else(folder, changed, words):
    place = written(folder, "a", [entry()], **changed)
    with pytest.raises(ValueError, match=words):
        prebuilt._read_manifest_rows(place)


def test_a_manifest_is_for_releases_of_torch(folder, monkeypatch):
    place = written(folder, "a", [entry()])
    assert [row.needs for row in prebuilt._read_manifest_rows(place)] == ["one"]
    prebuilt._read_manifest_rows.cache_clear()
    monkeypatch.setattr(prebuilt, "takes_torch", lambda: False)
    with pytest.raises(ValueError, match=r"^it is for torch \['2.11', '3.0'\], and this is "):
        prebuilt._read_manifest_rows(place)


@pytest.mark.parametrize("more", [0, 1])
def test_a_manifest_has_a_length(folder, more):
    place = written(folder, "a", [entry()])
    text = (place / prebuilt.MANIFEST).read_text()
    (place / prebuilt.MANIFEST).write_text(text + " " * ((1 << 20) + more - len(text)))
    if more:
        with pytest.raises(OSError, match="longer than 1048576 bytes"):
            prebuilt._read_manifest_rows(place)
    else:
        assert len(prebuilt._read_manifest_rows(place)) == 1


@pytest.mark.parametrize("ops", [3, [3], []])
def test_rows_that_are_none_are_left_out(folder, ops):
    assert prebuilt._read_manifest_rows(written(folder, "a", [entry()], ops=ops)) == ()


def test_the_first_library_that_fits_is_taken(folder, monkeypatch):
    op, mine, present = SimpleNamespace(spec=SimpleNamespace(name="demo::f")), [entry()], []
    monkeypatch.setattr(prebuilt, "bindable_entries", lambda op: mine)
    monkeypatch.setattr(prebuilt, "package_folders", lambda op: [folder])
    monkeypatch.setattr(prebuilt, "is_library_present", lambda place, name, rule: place.name in present)
    assert prebuilt.find_prebuilt_library(op) == (None, "")
    prebuilt._listed_libraries.cache_clear()
    (folder / "0").mkdir()
    written(folder, "a", [entry(needs="two")])
    written(folder, "b", [entry(op="demo::g")])
    plan, why = prebuilt.find_prebuilt_library(op)
    assert plan is None
    assert why.startswith(f"{folder / 'a'}: its code for cpu was made for another")
    prebuilt._listed_libraries.cache_clear()
    third = written(folder, "c", mine)
    present[:] = ["b"]
    assert prebuilt.find_prebuilt_library(op) == (None, why)
    present[:] = ["b", "c"]
    plan, why = prebuilt.find_prebuilt_library(op)
    assert why == ""
    assert (plan.place, plan.entries) == (third, {0: mine[0]})
    mine.clear()
    assert prebuilt.find_prebuilt_library(op) == (None, "")


def test_the_words_for_libraries_that_do_not_serve(folder, monkeypatch):
    op = SimpleNamespace(spec=SimpleNamespace(name="demo::f"))
    monkeypatch.setattr(prebuilt, "bindable_entries", lambda op: [entry()])
    monkeypatch.setattr(prebuilt, "package_folders", lambda op: [folder])
    monkeypatch.setattr(prebuilt, "is_library_present", lambda place, name, rule: False)
    place = written(folder, "a", [entry()])
    seal = "its seal does not fit: a file is missing, cut short or changed"
    assert prebuilt.find_prebuilt_library(op) == (None, f"{place}: {seal}")

    def refuse(place, name, rule):
        raise error("SL406", where=name, got="others can write it", expected="no")

    monkeypatch.setattr(prebuilt, "is_library_present", refuse)
    assert prebuilt.find_prebuilt_library(op) == (None, f"{place}: others can write it")
    monkeypatch.setattr(prebuilt, "is_library_present", lambda place, name, rule: True)
    monkeypatch.setattr(prebuilt, "bindable_entries", lambda op: [entry(op="demo::g")])
    assert prebuilt.find_prebuilt_library(op)[0] is None
    assert prebuilt.find_prebuilt_library(op)[1] == f"{folder} has no binding for this declaration"
