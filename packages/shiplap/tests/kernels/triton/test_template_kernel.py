"""The choice of a template's config for a call of new sizes, which the host repeats for each new size."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from jaxtyping import Float
from torch import Tensor

import shiplap as sl
from shiplap.declare.binding import Binding
from shiplap.dispatch import registry
from shiplap.kernels.triton.template_kernel import TemplateKernel
from shiplap.settings import Settings, read_setting, settings

pytest.importorskip("triton")
TEMPLATE = """{{def_kernel()}}
    rows = tl.make_tensor_descriptor(x, shape=[{{size("x", 0)}}, {{size("x", 1)}}], strides=[{{stride("x", 0)}}, 1],
                                     block_shape=[16, 16])
    i, j = tl.arange(0, 16)[:, None], tl.arange(0, 16)[None, :]
    {{store_output(("i", "j"), "rows.load([0, 0])", "(i < 16) & (j < 16)")}}
"""


@pytest.fixture
def bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[TemplateKernel, list[int], list[int]]:
    """A template whose third config suits its calls. The lists get the configs that were made, and a number for each
    rendering.
    """
    made, rendered = list[int](), list[int]()
    (tmp_path / "rows.triton.jinja").write_text(TEMPLATE)

    @sl.op("template_kernel_test::rows")
    def rows(x: Float[Tensor, "n m"]) -> Float[Tensor, "n m"]:
        """Return a copy."""
        return x.clone()

    def configs(sizes: object) -> Iterator[dict[str, int]]:
        """Yield ten configs, and note each one."""
        for number in range(10):
            made.append(number)
            yield {"NUMBER": number}

    rows.template(
        "cuda",
        str(tmp_path / "rows.triton.jinja"),
        configs=configs,
        grid=lambda sizes, config, cdiv: (cdiv(sizes["n"], 16), 1, 1),
        supports=lambda sizes, dtypes, config: config["NUMBER"] >= 2 or "a small number",
    )
    (kernel,) = rows.kernels["cuda"]
    assert isinstance(kernel, TemplateKernel)
    render = TemplateKernel.render

    def counted(self: TemplateKernel, *args: Any, **more: Any) -> Any:
        """Note a rendering, and render."""
        rendered.append(1)
        return render(self, *args, **more)

    monkeypatch.setattr(TemplateKernel, "render", counted)
    made.clear()
    return kernel, made, rendered


def bind(kernel: TemplateKernel, x: Tensor) -> Binding:
    """Return a call of the op with ``x``, whose arguments are checked."""
    op = registry.find_declared_op(kernel.spec.name)
    assert op is not None
    return op.plan.quick(x)


def test_configs_behind_the_first_that_suits_are_not_made(bound: tuple[TemplateKernel, list[int], list[int]]) -> None:
    kernel, made, _ = bound
    variant = kernel.variant_for_call(bind(kernel, torch.zeros(32, 16)))
    assert not isinstance(variant, str), variant
    assert dict(variant.values) == {"NUMBER": 2}
    assert made == [0, 1, 2]


def test_the_text_is_not_looked_at_for_rows_that_begin_at_16_bytes(
    bound: tuple[TemplateKernel, list[int], list[int]],
) -> None:
    kernel, _, rendered = bound
    variant = kernel.variant_for_call(bind(kernel, torch.zeros(32, 16)))
    assert not isinstance(variant, str), variant
    assert not rendered
    refused = variant.why_refused(bind(kernel, torch.zeros(513)[1:].view(32, 16)))
    assert refused == "x with strides (16, 1): rows of a tensor descriptor start at 16 bytes"
    assert rendered


@pytest.mark.parametrize("name", ["replay", "native", "strict", "tuned", "cache_dir"])
def test_a_setting_that_is_read_alone_is_that_of_all(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(Settings.variable(name), raising=False)
    assert read_setting(name) == getattr(settings(), name)
    monkeypatch.setenv(Settings.variable(name), "0")
    assert read_setting(name) == getattr(settings(), name)
