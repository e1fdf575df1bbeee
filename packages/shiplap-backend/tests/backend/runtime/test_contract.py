"""What torch asks of a device module by the names of its attributes: every one is there, or refused with a reason."""

from __future__ import annotations

import ast
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from shiplap_backend.project import Project
from shiplap_testing.forked import python

# What torch's own sources call a device module, and the folders that are not of a device's user.
MODULES = {"device_module", "device_mod", "device_handle", "_device_handle", "custom_backend_mod", "custom_device_mod"}
GETTERS = {"_get_device_module", "get_device_module", "_get_device_handle"}
# Of the function that gets the module; of the one place that looks before it asks.
NOT_OF_A_MODULE = {"__wrapped__", "_utils"}


def is_module(tree: ast.expr) -> bool:
    """Return whether an expression of torch's sources is a device module."""
    match tree:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name in MODULES
        case ast.Call(func=ast.Name(id="getattr"), args=[ast.Name(id="torch"), which, *_]):
            return "device" in ast.unparse(which) or "backend_name" in ast.unparse(which)
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)):
            return name in GETTERS
    return False


def asked(source: str) -> Iterator[str]:
    """Yield the names that a file of torch reads from device modules."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Attribute(value=value, attr=name) if is_module(value):
                yield name
            case ast.Call(func=ast.Name(id="getattr" | "hasattr"), args=[value, ast.Constant(value=str(name)), *_]):
                if is_module(value):
                    yield name


def asked_by_torch() -> dict[str, str]:
    """Return the names, each with a file that reads it."""
    root = Path(torch.__file__).parent
    names: dict[str, str] = {}
    for path in sorted(root.rglob("*.py")):
        source = path.read_text(encoding="utf-8", errors="replace")
        # Parsing all of torch takes a minute.
        if "testing" not in path.parts and any(name in source for name in (*MODULES, *GETTERS, "getattr(torch,")):
            names |= {name: str(path.relative_to(root)) for name in asked(source)}
    return {name: where for name, where in names.items() if name not in NOT_OF_A_MODULE}


def test_torch_finds_what_it_asks_for(dev: Any) -> None:
    names = asked_by_torch()
    assert {"_initialized", "default_generators", "current_stream", "set_rng_ctx"} <= {*names}
    missing = {name: where for name, where in names.items() if not hasattr(dev, name) and name not in dev.REFUSED}
    assert missing == {}
    for name in dev.REFUSED:
        with pytest.raises(AttributeError, match=f"torch.{dev.NAME} has no '{name}': "):
            getattr(dev, name)


@pytest.mark.parametrize("reentrant", [False, True])
def test_dropout_under_a_checkpoint(dev: Any, device: str, reentrant: bool) -> None:
    """torch saves the random state of a device that says that it is initialised."""
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Tanh(), nn.Linear(4, 4)).to(device)
    x = torch.randn(3, 4).to(device).requires_grad_()
    torch.manual_seed(3)
    checkpoint(model, x, use_reentrant=reentrant).sum().backward()
    torch.manual_seed(3)
    (want,) = torch.autograd.grad(model(x).sum(), x)
    assert x.grad is not None
    assert torch.equal(x.grad.cpu(), want.cpu())


def test_generators(dev: Any, device: str) -> None:
    own = torch.Generator(device).manual_seed(3)
    torch.rand(2, generator=own, device=device)
    copy = pickle.loads(pickle.dumps(own))
    assert (copy.device, copy.initial_seed()) == (own.device, 3)
    assert torch.equal(
        torch.rand(2, generator=own, device=device).cpu(), torch.rand(2, generator=copy, device=device).cpu()
    )
    dev.manual_seed_all(5)
    assert len(dev.default_generators) == dev.device_count()
    assert all(g.initial_seed() == 5 for g in dev.default_generators)
    assert dev._get_generator(torch.device(device)) is dev.default_generators[dev.current_device()]
    with pytest.raises(RuntimeError, match="have no offset: got 4, expected 0"):
        own.set_offset(4)


@pytest.mark.skipif(not hasattr(torch.accelerator, "get_device_capability"), reason="not in this torch")
def test_capability_and_memory(dev: Any, device: str) -> None:
    held = torch.accelerator.get_device_capability()["supported_dtypes"]
    assert {torch.float32, torch.int64, torch.bool, torch.complex64} <= held
    assert torch.quint8 not in held
    assert dev.get_device_capability()["supported_dtypes"] == held
    free, total = torch.accelerator.get_memory_info()
    assert 0 < free <= total == dev.get_device_properties().total_memory
    assert dev.memory_stats()["allocated_bytes.all.current"] == dev.memory_allocated()
    dev.reset_accumulated_memory_stats()
    assert dev.max_memory_reserved() >= dev.memory_reserved()


def test_a_device_module_exchanges_devices_and_streams(dev: Any, device: str) -> None:
    last = dev.device_count() - 1
    before = dev._exchange_device(last)
    assert dev.current_device() == last
    assert dev._maybe_exchange_device(before) == last
    assert dev._exchange_device(-1) == before
    stream = dev.current_stream()
    dev._set_stream_by_id(stream.stream_id, stream.device_index, stream.device_type)
    assert dev.current_stream() == stream


def test_fake_tensors(dev: Any, device: str) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        made = [torch.ones(2, 3).to(device), torch.ones(2, 3, device=device) + 1, nn.Linear(3, 2, device=device).weight]
    here = torch.device(device, dev.current_device())
    assert [t.device for t in made] == [here] * 3
    real = torch.ones(2, 3, device=device)
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(real) @ torch.ones(3, 2).to(device)
    assert (fake.device, fake.shape) == (here, (2, 2))


def with_a_stream(x: torch.Tensor) -> torch.Tensor:
    other = torch.Stream(device=x.device)
    with other:
        y = x * 2
    torch.accelerator.current_stream().wait_stream(other)
    return y + 1


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_streams_in_a_compiled_function(dev: Any, device: str, backend: str) -> None:
    from torch._dynamo.device_interface import get_interface_for_device

    interface: Any = get_interface_for_device(device)
    assert interface.device_count() == dev.device_count()
    assert interface.get_device_properties(device) == dev.get_device_properties()
    torch._dynamo.reset()
    x = torch.ones(2, device=device)
    assert torch.compile(with_a_stream, backend=backend)(x).cpu().tolist() == [3, 3]


@pytest.mark.capability("Inductor on a generated device")
@pytest.mark.usefixtures("of_shared_memory")
def test_streams_in_a_graph_of_inductor(dev: Any, device: str) -> None:
    """The generated code entered a stream that it had not defined."""
    torch._dynamo.reset()
    assert torch.compile(with_a_stream)(torch.ones(2, device=device)).cpu().tolist() == [3, 3]


def test_a_device_that_is_loaded_after_inductor_was_used(project: Project) -> None:
    """The compilation ended with a KeyError that names the device."""
    program = f"""
import {project.package.name}
from torch._inductor.codegen import common
common.init_backend_registration()
{project.package.name}.autoload()
common.init_backend_registration()
assert common.get_scheduling_for_device("{project.device}") and common.get_device_op_overrides("{project.device}")
"""
    done = python("-c", program, cwd=project.root)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_where_the_device_is_not_as_openreg_is(dev: Any, device: str) -> None:
    """OpenReg is torch's own example of a device; what it chose otherwise stands in docs/backend.md."""
    q = torch.rand(2, 2, 16, 8, dtype=torch.float16)
    # Attention takes the CPU's way, so nothing overrides the operator that a device may have for it.
    assert torch._fused_sdp_choice(*[q.to(device)] * 3) == torch._fused_sdp_choice(q, q, q)  # type: ignore[attr-defined]
    with pytest.raises(NotImplementedError, match="an operator for privateuse1 backends"):
        torch.ops.aten._scaled_dot_product_fused_attention_overrideable(*[q.to(device)] * 3)
    with torch.autocast(device):  # the lists are torch's for CUDA, without `dot`
        assert torch.dot(*[torch.ones(2, device=device).half()] * 2).dtype == torch.float16
    with pytest.warns(UserWarning, match=f"In {device} autocast, but the target dtype"):
        torch.autocast(device, dtype=torch.float32)
    x = torch.empty(3, device=device)
    torch._utils.set_tensor_metadata(x, {"format_number": True})
    assert torch._utils.get_tensor_metadata(x) == {}
    with pytest.raises(NotImplementedError, match="a quantized tensor"):
        torch.quantize_per_tensor(torch.rand(3, device=device), 0.1, 10, torch.qint8)
