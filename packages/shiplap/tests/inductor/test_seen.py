"""Ops of ``sl.triton`` whose kernels Inductor sees: torch's flag for fusing into plain Triton functions, since 2.13."""

from __future__ import annotations

import re
import subprocess

import pytest
import torch._inductor.config

from shiplap_testing.forked import interpreted

pytest.importorskip("triton")
FLAG = "epilogue_fusion_user_defined_triton_kernel"


def made(flag: str) -> tuple[str, list[str]]:
    """The generated code of seen_interpreted.py, and the kernels that ran. Results are those of eager calls."""
    done: subprocess.CompletedProcess[str] = interpreted("-m", "tests.inductor.seen_interpreted", flag)
    assert done.stdout.endswith("equal\n"), done.stderr[-3000:]
    code, _, rest = done.stdout.rpartition("ran: ")
    return code, rest.splitlines()[0].split()


@pytest.mark.skipif(FLAG not in torch._inductor.config.get_config_copy(), reason="this torch has no such flag")
def test_what_follows_is_fused_into_the_kernel_where_its_layout_is_the_same():
    """The store of the kernel has the activation in it; two of five calls need no kernel of their own beside it."""
    code, ran = made("on")
    first = r"tmp0 = tl.load\(x \+ at, mask=at < numel_x\) \* 2\n.*\n.*maximum\(tmp1, tmp0"
    assert re.search(first + r"(.|\n)*?tl.store\(out \+ at, tmp3", code)
    second = r"tmp0 = value - 1\n.*exp\(tmp0\)(.|\n)*?tl.float16\)\n"
    assert re.search(second + r" +tl.store\(out \+ row \* m \+ at, tmp3", code)
    assert "torch.ops.seen" not in code
    assert sorted(name for name in ran if "triton_" not in name) == ["turned_kernel"] * 2 + ["twice_kernel"] * 3
    assert len(ran) == 8, "three that follow with another layout"


@pytest.mark.long
def test_without_the_flag_the_op_is_called():
    code, ran = made("off")
    names = re.findall(r"^(\w+) = in_code\(torch\.ops\.seen", code, re.MULTILINE)
    assert sum(code.count(f"= {name}(") for name in names) == 5
    assert len([name for name in ran if "triton_" in name]) == 5
