"""What goes wrong under capture and replay; numbers are those of the table in docs/audit.md."""

import ctypes

import torch
from jaxtyping import Float, Int64
from torch import Tensor

import shiplap as sl
from shiplap_testing.zoo.gpu.common import M, V, bad, checked, cudart, double, stream_of
from shiplap_testing.zoo.specimen import register

# 1: memory that the graph does not own


def _malloc(x):
    """Return ``2 * x``. This function has a defect on purpose, which shows under CUDA graph capture. Each call
    allocates device memory by ``cudaMalloc`` and releases it by ``cudaFree``.
    """
    room, out, size = ctypes.c_void_p(), torch.empty_like(x), ctypes.c_size_t(x.nbytes)
    checked(cudart().cudaMalloc(ctypes.byref(room), size))
    for to, source in ((room, x.data_ptr()), (out.data_ptr(), room)):
        source = source if isinstance(source, ctypes.c_void_p) else ctypes.c_void_p(source)
        to = to if isinstance(to, ctypes.c_void_p) else ctypes.c_void_p(to)
        # 3 stands for a copy from device to device.
        checked(cudart().cudaMemcpyAsync(to, source, size, 3, stream_of(x)))
    checked(cudart().cudaFree(room))
    return out * 2


bad("cudaMalloc in the op", double("gpu_malloc", _malloc), "allocates or releases device memory by itself")

# 2, 3: what is created at the first call

_handles = {}


def _handle(x):
    """Return ``2 * x``. This function has a defect on purpose, which shows under CUDA graph capture. The first call of
    each shape allocates device memory by ``cudaMalloc`` for a handle.
    """
    if x.shape not in _handles:
        room = ctypes.c_void_p()
        checked(cudart().cudaMalloc(ctypes.byref(room), ctypes.c_size_t(4096)))
        _handles[x.shape] = room
    return x * 2


bad("handle created at the first call of a shape", double("gpu_handle", _handle), "made while capturing, fails")

# 4: the host waits


def _item(x):
    """Return ``2 * x``. This function has a defect on purpose, which shows under CUDA graph capture. The host reads the
    largest magnitude of ``x`` and waits for the device.
    """
    return x / x.abs().max().item() * x.abs().max() * 2 if x.numel() else x * 2


bad("scale read with .item()", double("gpu_item", _item), "waits for the device")


def _stream_synchronize(x):
    """Return ``2 * x``. This function has a defect on purpose, which shows under CUDA graph capture. The host waits for
    the current stream.
    """
    y = x * 2
    checked(cudart().cudaStreamSynchronize(stream_of(x)))
    return y


bad("cudaStreamSynchronize", double("gpu_synchronize", _stream_synchronize), "in relaxed mode too")

# 5: another stream


def _default_stream(x):
    """Return ``2 * x``. This function has a defect on purpose, which shows under CUDA graph capture. The result is
    computed on the default stream and not on the current one.
    """
    with torch.cuda.stream(torch.cuda.default_stream(x.device)):
        return x * 2


bad("launch on the default stream", double("gpu_default_stream", _default_stream), "15 of 15 differ")

# 6: SlideSparse's shared workspace, replaced when a larger one is needed. Its shadow on the CPU is in stateful.py.

_workspace = {}


def _replaced(x):
    """Return ``2 * x``. This function has a defect on purpose. The result passes through a workspace, which a call with
    a larger ``x`` replaces and frees. A later replay of a CUDA graph then uses freed memory.
    """
    key = x.device, torch.cuda.current_stream(x.device).cuda_stream
    if key not in _workspace or _workspace[key].nbytes < x.nbytes:
        # The smaller one is freed here, while a captured graph may still use it.
        _workspace[key] = torch.empty(x.nbytes, dtype=torch.uint8, device=x.device)
    mine = _workspace[key][: x.nbytes].view(x.dtype).view(x.shape).copy_(x)
    return mine * 2


bad("workspace replaced by a larger one", double("gpu_workspace", _replaced), "memory that was freed")

_tables = {}


def _evicted(x):
    """Return ``2 * x``. This function has a defect on purpose. The factors lie in a table, which a call with another
    shape replaces and frees. A later replay of a CUDA graph then uses freed memory.
    """
    key = x.device, torch.cuda.current_stream(x.device).cuda_stream
    if key not in _tables or _tables[key].shape != x.shape:
        # The table of the shape before is freed here, while a captured graph may still use it.
        _tables[key] = torch.full(x.shape, 2.0, dtype=x.dtype, device=x.device)
    return x * _tables[key]


bad("table evicted from a cache", double("gpu_evicted", _evicted), "after a larger call, freed memory poisoned")

_pair, _turn = {}, [0]


def _ping_pong(x):
    """Return ``2 * x``. This function has a defect on purpose. The result is one of two buffers in turn, so that the
    second call after this one overwrites it.
    """
    key = x.shape, x.dtype, torch.cuda.current_stream(x.device).cuda_stream
    if key not in _pair:
        _pair[key] = [torch.empty_like(x) for _ in range(2)]
    _turn[0] += 1
    # Of two buffers the second call after this one reuses the first.
    return torch.mul(x, 2, out=_pair[key][_turn[0] % 2])


bad("two output buffers in turn", double("gpu_ping_pong", _ping_pong), "an eager call overwrites the results")

# 7: one scratch buffer for all streams

_scratch = {}


def _shared(x):
    """Return ``2 * x``. This function has a defect on purpose. The result passes through one buffer per device, which
    calls on several streams overwrite for each other.
    """
    room = _scratch.setdefault(x.device, torch.empty(1 << 22, dtype=torch.uint8, device=x.device))
    mine = room[: x.nbytes].view(x.dtype).view(x.shape).copy_(x)
    for _ in range(4):
        mine.mul_(2)
    return mine / 8


bad("scratch shared by streams", double("gpu_scratch", _shared), "two streams at once")

# 8: SlideSparse's plan cache, filled lazily

_plans = {}


def _plan(x):
    """Return ``2 * x``. This function has a defect on purpose. The factor is computed at the first call of each shape
    and kept. If that call is under CUDA graph capture, the computation is recorded but does not run.
    """
    if x.shape not in _plans:
        _plans[x.shape] = torch.full((1,), 2.0, dtype=x.dtype, device=x.device)
    return x * _plans[x.shape]


bad("plan cache filled during capture", double("gpu_plans", _plan), "recorded but not computed")

# 9, 14: host values and addresses that the graph keeps

_scales = {}


def _calibrated(x):
    """Return ``x`` divided by its largest magnitude. This function has a defect on purpose. It uses the magnitude of
    the first call of each shape in all later ones.
    """
    if x.shape not in _scales:
        _scales[x.shape] = x.abs().max().item()
    return x / _scales[x.shape]


@sl.adopt(register("gpu_calibrated(Tensor x) -> Tensor", _calibrated, torch.empty_like), autocast=None)
def calibrated(x: M) -> M:
    """Return ``x`` divided by its largest magnitude, the reference of the broken operator ``zoo::gpu_calibrated``. The
    operator uses the magnitude of the first call of each shape in all later ones.
    """
    return x / x.abs().max()


bad("range calibrated at the first call", calibrated, "15 of 15 differ")

_factor = []


@sl.adopt(register("gpu_host_scalar(Tensor x) -> Tensor", lambda x: _mean(x), lambda x: x.new_empty(())), autocast=None)
def host_scalar(x: V) -> Float[Tensor, ""]:
    """Return the mean of ``x``, the reference of the broken operator ``zoo::gpu_host_scalar``. The operator reads a
    factor from host memory. Later calls change the factor before a CUDA graph is replayed.
    """
    return x.mean()


def _mean(x):
    """Return the mean of ``x``. This function has a defect on purpose. The factor ``1 / n`` is read from pinned host
    memory, and later calls change it before a CUDA graph is replayed.
    """
    if not _factor:
        # Pinned memory is copied without the host waiting, so a capture records its address.
        _factor.append(torch.empty((), dtype=torch.float64, pin_memory=True))
    _factor[0].fill_(1 / max(1, x.numel()))
    return (x.sum() * _factor[0].to(x.device, non_blocking=True)).to(x.dtype)


bad("host scalar read at replay", host_scalar, "a replay after a larger call")

# 10: tuning inside the op

_chosen = {}


def _tuned(x):
    """Return ``2 * x``. This function has a defect on purpose, which shows under CUDA graph capture. The first call of
    each shape times two implementations and waits for events.
    """
    if x.shape not in _chosen:
        times = []
        for candidate in (lambda t: t * 2, lambda t: t + t):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            candidate(x)
            end.record()
            end.synchronize()
            times.append((start.elapsed_time(end), candidate))
        _chosen[x.shape] = min(times, key=lambda t: t[0])[1]
    return _chosen[x.shape](x)


bad("autotuning in the op", double("gpu_tuned", _tuned), "made while capturing, fails")

# 11: a branch on the host


def _branch(x):
    """Return ``2 * x``. This function has a defect on purpose, which shows under CUDA graph capture. The host waits for
    the device to branch on whether ``x`` has NaN.
    """
    return x * 2 if bool((x == x).all()) else torch.nan_to_num(x) * 2


bad("host branch on a value", double("gpu_branch", _branch), "waits for the device")

# 16: undeclared mutation


def _sorts(x):
    """Return twice the numbers of each column of ``x`` in ascending order. This function has a defect on purpose. It
    sorts ``x`` in place, which the schema does not declare.
    """
    x.copy_(x.sort(0).values)
    return x * 2


@sl.adopt(register("gpu_sorts(Tensor x) -> Tensor", _sorts, torch.empty_like), autocast=None)
def sorts(x: M) -> M:
    """Return twice the numbers of each column of ``x`` in ascending order, the reference of the broken operator
    ``zoo::gpu_sorts``. The operator sorts ``x`` in place, which its schema does not declare.
    """
    return x.sort(0).values * 2


bad("undeclared mutation", sorts, "replay 0 writes to an input", "cuda_graph", "schema")

# 19: data-dependent output


@sl.adopt(
    register(
        "gpu_nonzero(Tensor x) -> Tensor",
        lambda x: (x > 0).nonzero()[:, 0],
        lambda x: x.new_empty(torch.library.get_ctx().new_dynamic_size(), dtype=torch.int64),
    ),
    bounds={"m": "n"},
    autocast=None,
)
def nonzero(x: V) -> Int64[Tensor, "m"]:
    """Return the positions of the positive elements of ``x``, the reference of the operator ``zoo::gpu_nonzero``. The
    operator cannot be captured in a CUDA graph, since the number of positions depends on data.
    """
    return (x > 0).nonzero()[:, 0]


bad("data-dependent output", nonzero, "its size m depends on data; use the capacity form")

# 21: the current device instead of the tensor's


def _current_device(x):
    """Return ``2 * x``. This function has a defect on purpose. The result is on the current device, even if ``x`` is on
    another one.
    """
    return torch.empty(x.shape, dtype=x.dtype, device="cuda").copy_(x).mul_(2)


bad("output on the current device", double("gpu_device", _current_device, lambda x: x.new_empty(x.shape)), "current")

# 22: atomics


def _atomics(x):
    """Return the sum of all products of an element of ``x`` and one of 4096 weights, as a tensor of one element. This
    function has a defect on purpose. It uses atomic additions, which have no fixed order, so that the last bits vary.
    """
    spread = (x.reshape(1, -1) * torch.linspace(0.1, 1, 4096, device=x.device, dtype=x.dtype)[:, None]).reshape(-1)
    index = torch.zeros(len(spread), dtype=torch.int64, device=x.device)
    return x.new_zeros(1).index_add_(0, index, spread)


@sl.adopt(register("gpu_atomics(Tensor x) -> Tensor", _atomics, lambda x: x.new_empty(1)), autocast=None)
def atomics(x: M) -> Float[Tensor, "1"]:
    """Return the sum of ``x`` times the sum of 4096 weights from 0.1 to 1, the reference of the broken operator
    ``zoo::gpu_atomics``. The operator adds in no fixed order, so that the last bits vary.
    """
    return x.sum().reshape(1) * torch.linspace(0.1, 1, 4096, device=x.device, dtype=x.dtype).sum()


bad("atomics in any order", atomics, "the same call again", "determinism")
