"""What goes along in a wheel beside bindings: tuned choices and compiled Triton kernels, used without a compiler."""

import importlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from shiplap.dispatch import registry
from shiplap.dispatch.package_folder import FOLDER
from shiplap.kernels.triton import prebuilt
from shiplap.packaging import PackageExtras, WheelRequest, package
from shiplap.tuning.choice import Choice
from shiplap.tuning.frozen_table import dump_table
from shiplap.tuning.inputs import draw_inputs, recipe_of
from shiplap.tuning.key import key_for
from shiplap_headers import include_dir
from shiplap_testing.forked import python
from shiplap_testing.support import fails

pytest.importorskip("triton")
HERE = Path(__file__).parent
C_SOURCE = """
#include "shiplap/abi.h"
SL_EXPORT int shipped_double(const sl_context* ctx, const DLTensor* x, DLTensor* out) {
  for (int64_t i = 0; i < x->shape[0]; ++i) ((float*)out->data)[i] = (2 + ctx->config[0]) * ((float*)x->data)[i];
  return SL_OK;
}
"""
DECLARED = '''
"""A package with a C kernel, right only where it is tuned, and a Triton kernel."""
from pathlib import Path

import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

import shiplap as sl

HERE = Path(__file__)
SCALE = tl.constexpr(3)


@sl.op("shipped_extras::double")
def double(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
    return x * 2


KERNEL = sl.cabi(HERE.with_name("libdouble.so"), "shipped_double", without_signature=True)
double.kernel("cpu", KERNEL, configs=[{"WRONG": 1}, {"WRONG": 0}])


@triton.jit
def factor():
    return SCALE


@triton.jit
def triple_kernel(x, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, mask=at < n) * factor(), mask=at < n)


@sl.op("shipped_extras::triple")
def triple(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
    return x * 3


triple.kernel("cuda", sl.triton(triple_kernel, grid="cdiv(n, BLOCK)", constants={"BLOCK": 64}))
'''


def compiled(source, library, *flags):
    source_file = library.with_suffix(".c")
    source_file.write_text(source)
    subprocess.run(
        ["cc", "-O1", "-shared", "-fPIC", f"-I{include_dir()}", *flags, "-o", library, source_file], check=True
    )


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """The package as its author has it, a wheel of it, a frozen table and a profile."""
    home = tmp_path_factory.mktemp("extras")
    source = home / "source" / "shipped_extras"
    source.mkdir(parents=True)
    (source / "__init__.py").write_text(DECLARED)
    compiled(C_SOURCE, source / "libdouble.so")
    (source / "libdouble.c").unlink()
    with zipfile.ZipFile(home / "shipped_extras-1.0-py3-none-any.whl", "w") as archive:
        for path in source.iterdir():
            if path.is_file():
                archive.write(path, f"shipped_extras/{path.name}")
        archive.writestr("shipped_extras-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("shipped_extras-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: shipped_extras\n")
        archive.writestr("shipped_extras-1.0.dist-info/RECORD", "")
    return home


@pytest.fixture(scope="module")
def declared(home):
    """The author's process: the table and the profile are written, as by ``shiplap freeze`` and SHIPLAP_RECORD."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(home / "source"))
        module = importlib.import_module("shipped_extras")
        sizes = draw_inputs(module.double, recipe_of(module.double, (torch.ones(5),)), "cpu")
        choice = Choice(
            "shipped_extras::double", "cpu", sizes.bucket, sizes.dtypes, sizes.layout, "shipped_double", tried=2
        )
        dump_table(home / "tuned.json", [(key_for(module.double, sizes), {**choice.value(), "config": {"WRONG": 0}})])
        lines = [
            {
                "op": "shipped_extras::triple",
                "device": "cuda:0",
                "recipe": str(recipe_of(module.triple, (torch.ones(n),))),
            }
            for n in (64, 65)
        ]
        (home / "calls.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        yield module
        registry.forget_op("shipped_extras::double")
        registry.forget_op("shipped_extras::triple")
        del sys.modules["shipped_extras"]


@pytest.fixture(scope="module")
def extras(home, declared):
    return PackageExtras(home / "tuned.json", (90,), home / "calls.jsonl")


@pytest.fixture(scope="module")
def site(home, extras):
    """The wheel with its extras, installed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHIPLAP_CACHE_DIR", str(home / "cache"))
        patch.setenv("TRITON_CACHE_DIR", str(home / "triton"))
        packed = package(WheelRequest(home / "shipped_extras-1.0-py3-none-any.whl", home / "dist", extras=extras))
    (contents,) = packed.contents
    assert [(b.op, b.devices) for b in contents.bound] == [
        ("shipped_extras::double", ("cpu",)),
        ("shipped_extras::triple", ("cuda",)),
    ]
    assert contents.cubins == (("triple_kernel", 90), ("triple_kernel", 90)), "a multiple of 16, and another number"
    assert contents.choices == 1
    with zipfile.ZipFile(packed.wheel) as archive:
        archive.extractall(home / "site")
    return home / "site"


@pytest.mark.long
def test_both_ops_are_native_from_the_first_call_without_a_compiler(site, home, tmp_path):
    """C++, C and Triton's compiler are out of reach, the caches are empty, and the driver has no device."""
    fake = (HERE.parent / "kernels" / "triton" / "fake_cuda.c").read_text()
    compiled(fake, tmp_path / "libcuda.so", "-Wl,-soname,libcuda.so.1")
    (tmp_path / "bin").mkdir()
    env = {**os.environ, "PATH": str(tmp_path / "bin"), "SHIPLAP_CACHE_DIR": str(tmp_path / "cache")}
    env |= {"TRITON_CACHE_DIR": str(tmp_path / "triton")}
    env["PYTHONPATH"] = os.pathsep.join([str(site), env.get("PYTHONPATH", "")])
    for name in ("CXX", "CC", "SHIPLAP_TUNED", "SHIPLAP_NATIVE"):
        env.pop(name, None)
    done = python("-W", "ignore", HERE / "extras_cases.py", tmp_path / "libcuda.so", env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    results = json.loads(done.stdout)
    assert results["double"] == [True] * 3, "the choice of the wheel holds for the first call and for native ones"
    assert results["native"] == ["cpu"]
    assert results["launches"] == [["triple_kernel", 1], ["triple_kernel", 2], ["triple_kernel", 1]]
    assert results["arguments"] == [True] * 3, "the addresses of the tensors, and n"
    assert results["loads"] == 2, "each form is loaded once"
    assert results["other device"].startswith("AssertionError: Triton's compiler is asked"), "sm_80 is not in the wheel"
    assert not (tmp_path / "cache" / "native").exists()


@pytest.mark.long
def test_a_cubin_is_known_by_what_the_kernel_does(home, site, declared):
    """Comments do not count; a helper of the kernel, its constants and its options do."""
    (kernel,) = declared.triple.native_kernels("cuda")
    form = kernel.native.read(0, kernel_key(kernel, declared.triple, 64))
    rows = prebuilt._read_index_rows(site / "shipped_extras" / FOLDER / prebuilt.FOLDER)
    known = prebuilt.prebuilt_form_digest(declared.triple_kernel, form, 90)
    assert known in rows
    assert prebuilt.prebuilt_form_digest(declared.triple_kernel, form, 100) not in rows
    with pytest.MonkeyPatch.context() as patch:
        for edit, same in (
            (("    return SCALE", "    # by so much\n\n    return SCALE  # three"), True),
            (("return SCALE", "return SCALE + 0"), False),
            (("tl.constexpr(3)", "tl.constexpr(4)"), False),
            (("arange(0, BLOCK)", "arange(0, BLOCK) + 0"), False),
        ):
            other = edited(home, patch, *edit)
            assert (prebuilt.prebuilt_form_digest(other.triple_kernel, form, 90) == known) is same, edit
    form.options["num_warps"] = 8
    assert prebuilt.prebuilt_form_digest(declared.triple_kernel, form, 90) != known


def edited(home, patch, before, after):
    """The module with one edit, under another name; its kernels alone."""
    name = f"edited_{abs(hash(after))}"
    text = DECLARED.replace(before, after).replace("shipped_extras::", f"{name}::")
    assert text != DECLARED
    folder = home / name
    folder.mkdir()
    (folder / f"{name}.py").write_text(text)
    patch.syspath_prepend(str(folder))
    module = importlib.import_module(name)
    for op in ("double", "triple"):
        registry.forget_op(f"{name}::{op}")
    return module


def kernel_key(kernel, op, size):
    from shiplap.kernels.triton.specialize import specialization_key

    call = op.bind((torch.empty(size, device="meta"),))
    return specialization_key(kernel.native.launches[0], kernel._numbers(call, *kernel._stand_ins(call)), {})


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda folder: next(folder.glob("*.cubin")).write_bytes(b"\x7fELF"), "its checksum does not fit"),
        (lambda folder: next(folder.glob("*.cubin")).chmod(0o666), "it can be written by others"),
        (lambda folder: (folder / prebuilt.INDEX).write_text("{}"), "not of format shiplap-cubins/1"),
        (
            lambda folder: (folder / prebuilt.INDEX).write_text(json.dumps({"format": prebuilt.FORMAT, "cubins": [1]})),
            "Expected `object`",
        ),
    ],
)
def test_a_damaged_cubin_is_compiled_instead(site, declared, tmp_path, monkeypatch, damage, reason):
    shutil.copytree(site / "shipped_extras", tmp_path / "shipped_extras")
    monkeypatch.setattr(declared.__spec__, "submodule_search_locations", [str(tmp_path / "shipped_extras")])
    (kernel,) = declared.triple.native_kernels("cuda")
    asked = kernel_key(kernel, declared.triple, 64), kernel_key(kernel, declared.triple, 65)
    place = tmp_path / "shipped_extras" / FOLDER / prebuilt.FOLDER
    damage(place)
    with pytest.warns(UserWarning, match=reason):
        cubins = [
            prebuilt.find_prebuilt_form(declared.triple, declared.triple_kernel, kernel.native.read(0, key), 0, key, 90)
            for key in asked
        ]
    assert None in cubins


def test_extras_that_are_for_nothing_are_refused(home, extras, declared, tmp_path):
    wheel = home / "shipped_extras-1.0-py3-none-any.whl"
    with fails("SL308", got="architectures without calls"):
        package(WheelRequest(wheel, tmp_path, extras=PackageExtras(cubins=(90,))))
    with fails("SL308", got="calls without an architecture"):
        package(WheelRequest(wheel, tmp_path, extras=PackageExtras(calls=extras.calls)))
    with fails("SL308", got="the architecture 9"):
        package(WheelRequest(wheel, tmp_path, extras=PackageExtras(cubins=(9,), calls=extras.calls)))
