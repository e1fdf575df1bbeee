"""Builders of samples that a draft has from recorded calls: indices stay within what they are indices of."""

import pytest
import torch

from shiplap.scaffold.calls import DispatchRecorder
from shiplap.scaffold.dims import name_dims
from shiplap.scaffold.infer import infer_declaration, write_sampler
from shiplap.scaffold.probe import ProbeResult
from shiplap.scaffold.schema import parse_schema

SCHEMA = "(Tensor images, Tensor boxes, float scale, int height) -> Tensor"


def pooled(images, boxes, scale, height):
    """As torchvision's roi_align: a row of ``boxes`` is the number of an image, and two corners."""
    assert boxes.shape[1] == 5
    number = boxes[:, 0].long()
    assert not len(number) or (int(number.min()) >= 0 and int(number.max()) < len(images)), "outside of memory"
    return images[number, :, :height, :height] * scale


@pytest.fixture
def record(request):
    library = torch.library.Library(f"drawn_{abs(hash(request.node.name)) % 10**8}", "DEF")

    def recorded(schema, fn, calls):
        library.define(f"op{schema}")
        library.impl("op", fn, "CPU")
        op = getattr(torch.ops, library.ns).op.default
        recorder = DispatchRecorder({op._schema.name})
        with recorder.mode():
            for args in calls:
                op(*args)
        return parse_schema(op._schema), recorder.calls[op._schema.name], op

    yield recorded
    library._destroy()


def boxes_of(images, count, *, whole=False):
    corners = torch.rand(count, 4) * 7
    numbers = torch.randint(0, images, (count, 1))
    numbers[0] = images - 1
    return torch.cat([numbers.float(), corners.round() if whole else corners], 1)


def builder(form, calls):
    """The function that the draft would have, and its lines."""
    lines = infer_declaration(form, calls, ProbeResult()).sampler
    scope = {"torch": torch}
    exec("def build(rng, sizes, dtype, device):\n" + "".join(f"    {line}\n" for line in lines), scope)
    return scope["build"], lines


@pytest.mark.parametrize("whole", [False, True])
def test_a_column_of_indices_stays_within_the_images(record, whole):
    calls = [(torch.rand(n, 3, 9, 9 + n), boxes_of(n, k, whole=whole), 1.0, 2) for n, k in ((2, 4), (3, 7), (5, 9))]
    form, kept, op = record(SCHEMA, pooled, calls)
    build, lines = builder(form, kept)
    shapes = name_dims(form, kept, ProbeResult()).shapes
    assert shapes["boxes"][1] == "5"
    rng, (images, *rest), rows = torch.Generator().manual_seed(0), shapes["images"], shapes["boxes"][0]
    assert f'torch.randint(0, sizes["{images}"], (sizes["{rows}"],)' in lines[1]
    for n in (1, 2, 17):
        sizes = {name: 4 for name in rest if name.isidentifier()} | {images: n, rows: 40, "scale": 1.0, "height": 2}
        args = build(rng, sizes, torch.float32, "cpu")
        assert args[1].dtype == torch.float32
        assert int(args[1][:, 0].max()) == n - 1
        op(*args)
    with pytest.raises(RuntimeError):  # no index into nothing: such a sample is none
        build(rng, sizes | {images: 0}, torch.float32, "cpu")


def test_one_image_gives_one_number(record):
    """Of a program that has one image only, the number is 0 whatever the sizes are."""
    calls = [(torch.rand(1, 3, h, h + 1), boxes_of(1, k), 1.0, 2) for h, k in ((5, 4), (6, 7), (9, 9))]
    form, kept, op = record(SCHEMA, pooled, calls)
    build, _ = builder(form, kept)
    shapes = name_dims(form, kept, ProbeResult()).shapes
    sizes = {d: 6 for shape in shapes.values() for d in shape if d.isidentifier()} | {"scale": 1.0, "height": 2}
    args = build(torch.Generator().manual_seed(0), sizes, torch.float32, "cpu")
    assert set(args[1][:, 0].tolist()) == {0.0}
    op(*args)


def test_an_index_of_which_nobody_knows_what_it_counts_stays_below_every_size_that_was_larger(record):
    def taken(rows, table, index):
        assert int(index.max()) < min(len(rows), len(table)), "outside of memory"
        return rows[index]

    calls = [
        (torch.rand(n, 2), torch.rand(2 * n + 1), torch.tensor([0, 1, k % 3])) for n, k in ((40, 1), (50, 2), (60, 3))
    ]
    form, kept, op = record("(Tensor rows, Tensor table, Tensor index) -> Tensor", taken, calls)
    build, lines = builder(form, kept)
    shapes = name_dims(form, kept, ProbeResult()).shapes
    assert "torch.randint(0, min(3, " in lines[2]
    sizes = {d: 2 for shape in shapes.values() for d in shape if d.isidentifier()}
    op(*build(torch.Generator().manual_seed(0), sizes, torch.float32, "cpu"))


def test_a_matrix_of_plain_numbers_is_drawn_as_a_whole(record):
    calls = [(torch.randn(n, 4),) for n in (3, 5, 8)]
    form, kept, _ = record("(Tensor x) -> Tensor", lambda x: x + 1, calls)
    (line, _) = write_sampler(form, name_dims(form, kept, ProbeResult()), kept)
    assert "stack" not in line
