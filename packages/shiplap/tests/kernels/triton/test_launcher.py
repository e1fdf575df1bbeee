"""The Triton launcher: a call gets the kernel that Triton would have picked for it, and no other.

Triton is played by a stand-in, whose specialisation is Triton's own binder where it is installed, else a model of it.
What a launch really does is seen on a GPU (tests/gpu/test_native_cuda.py).
"""

import inspect
import types

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import shiplap as sl
from shiplap.declare.code_digest import code_digest
from shiplap.kernels.triton import launcher as launching
from shiplap.kernels.triton import triton_launcher

try:
    import triton
except ImportError:
    triton = None

DTYPES = {torch.float32: "*fp32", torch.float16: "*fp16", torch.int64: "*i64"}


class Pointer:
    """A tensor on a GPU, as far as Triton looks at one."""

    is_cuda = True

    def __init__(self, dtype, address):
        self.dtype, self.address = dtype, address

    def data_ptr(self):
        return self.address


def one(value):
    """What Triton specialises a run-time argument on: type and property."""
    if isinstance(value, Pointer):
        return DTYPES[value.dtype], "D" if value.address % 16 == 0 else ""
    if value is None:
        return "constexpr", None
    if isinstance(value, bool):
        return "u1", None
    if isinstance(value, float):
        return "fp32", None
    if value == 1:
        return "constexpr", 1
    width = "i32" if -(2**31) <= value < 2**31 else "i64" if value < 2**63 else "u64"
    return width, "D" if value % 16 == 0 else ""


def f(x, n, s, BLOCK, MODE=0): ...


class Chain:
    def __init__(self):
        self.calls = []


class Kernel:
    """A ``@triton.jit`` function: its own launch specialises, remembers which kernel ran, and returns it."""

    def __init__(self, fn=f, constants=("BLOCK", "MODE"), free=()):
        self.signature, self.fn = inspect.signature(fn), fn
        self.params = [
            types.SimpleNamespace(
                name=n,
                is_constexpr=n in constants,
                is_const=False,
                do_not_specialize=n in free,
                do_not_specialize_on_alignment=False,
                annotation_type="",
            )
            for n in self.signature.parameters
        ]
        self.hash, self.used_global_vals, self.pre_run_hooks, self.debug = "source", {}, [], None
        self.ordinary, self.launched = 0, []
        self.__qualname__, self.__module__ = fn.__qualname__, fn.__module__

    def specialise(self, args, kwargs):
        names = list(self.signature.parameters)
        bound = self.signature.bind(*args, **{k: v for k, v in kwargs.items() if k in names})
        bound.apply_defaults()
        if triton is not None:
            from triton.backends.compiler import GPUTarget
            from triton.compiler import make_backend
            from triton.runtime.jit import create_function_from_signature

            backend = make_backend(GPUTarget("cuda", 90, 32))
            binder = create_function_from_signature(self.signature, self.params, backend)
            _, signature, options = binder(*args, **kwargs)
        else:
            signature = [
                ("constexpr", v) if p.is_constexpr else one(v) if not p.do_not_specialize else one(v)[:1]
                for p, v in zip(self.params, bound.arguments.values(), strict=True)
            ]
            options = {k: v for k, v in kwargs.items() if k not in names}
        return repr(signature), repr(options)

    def __getitem__(self, grid):
        def launch(*args, **kwargs):
            self.ordinary += 1
            compiled = Compiled(self, self.specialise(args, kwargs))
            self.launched.append(compiled.tag)
            return compiled

        return launch


class Compiled:
    function, packed_metadata = 0xF, ("packed",)

    def __init__(self, kernel, tag):
        self.kernel, self.tag, self.seen = kernel, tag, None

    def run(self, *args):
        self.seen = args
        self.kernel.launched.append(self.tag)


@pytest.fixture
def knobs(monkeypatch):
    runtime = types.SimpleNamespace(debug=False, launch_enter_hook=Chain(), launch_exit_hook=Chain())
    settings = types.SimpleNamespace(runtime=runtime, compilation=types.SimpleNamespace(instrumentation_mode=""))
    settings.device = 0
    monkeypatch.setattr(launching, "_TENSORS", (Pointer,))
    stand_in = launching.TritonRuntime(lambda: settings.device, lambda device: 100 + device, settings, Chain)
    monkeypatch.setattr(launching, "_triton_runtime", lambda: stand_in)
    return settings


integers = st.one_of(
    st.sampled_from(
        [0, 1, 2, 15, 16, 17, -1, -16, 2**31 - 1, 2**31, -(2**31), -(2**31) - 1, 2**63 - 1, 2**63, 2**64 - 16]
    ),
    st.integers(-(2**63), 2**64 - 1),
)
values = st.one_of(
    integers,
    st.sampled_from([True, False, None, 0.0, 1.0, -1.5]),
    st.builds(Pointer, st.sampled_from(list(DTYPES)), st.integers(0, 2**47)),
    st.builds(Pointer, st.sampled_from(list(DTYPES)), st.integers(0, 2**40).map(lambda i: 16 * i)),
)
constants = st.sampled_from([0, 1, 16, 128, True, False, 1.0, 0.0, -0.0, "a", None])
options = st.dictionaries(st.sampled_from(["num_warps", "num_stages"]), st.sampled_from([1, 4, True, False]))
calls = st.tuples(values, values, values, constants, constants, options)


@given(sequence=st.lists(calls, min_size=2, max_size=12), free=st.sampled_from([(), ("n",), ("x", "n", "s")]))
def test_a_call_gets_the_kernel_that_triton_would_pick(sequence, free):
    with pytest.MonkeyPatch.context() as patch:
        runtime = types.SimpleNamespace(debug=False, launch_enter_hook=Chain(), launch_exit_hook=Chain())
        stub = types.SimpleNamespace(runtime=runtime, compilation=types.SimpleNamespace(instrumentation_mode=""))
        patch.setattr(launching, "_TENSORS", (Pointer,))
        patch.setattr(
            launching, "_triton_runtime", lambda: launching.TritonRuntime(lambda: 0, lambda d: 0, stub, Chain)
        )
        kernel = Kernel(free=free)
        launch = triton_launcher(kernel)
        for x, n, s, block, mode, keywords in sequence * 2:
            want = kernel.specialise((x, n, s, block), {"MODE": mode, **keywords})
            got = launch[(1,)](x, n, s, block, MODE=mode, **keywords)
            assert got.tag == want == kernel.launched[-1]
        assert kernel.ordinary <= len(sequence), "the second time nothing is bound again"


def test_what_reaches_the_compiled_kernel(knobs):
    kernel = Kernel()
    launch = triton_launcher(kernel)
    x = Pointer(torch.float32, 4096)
    compiled = launch[(7,)](x, 128, 2.5, BLOCK=64)
    repeated = launch[(7, 2)](Pointer(torch.float32, 8192), 256, 0.5, BLOCK=64)
    assert repeated is compiled
    assert kernel.ordinary == 1
    assert compiled.seen == (7, 2, 1, 100, 0xF, ("packed",), None, None, None, 8192, 256, 0.5, 64, 0)
    launch[lambda meta: (meta["n"] // meta["BLOCK"], 2, 3)](x, 256, 0.5, 64)
    assert compiled.seen[:3] == (4, 2, 3)
    knobs.device = 1
    other = launch[(7,)](x, 128, 2.5, BLOCK=64)
    assert kernel.ordinary == 2, "a handle belongs to its device"
    launch[(7,)](x, 128, 2.5, BLOCK=64)
    assert other.seen[3] == 101, "the current stream of that device"


def test_no_value_of_an_annotated_integer_makes_another_kernel(knobs):
    kernel = Kernel(free=("n", "s"))
    kernel.params[1].annotation_type = "i64"
    launch = triton_launcher(kernel)
    compiled = launch[(1,)](None, 2**40, 7, 64)
    for n, s in ((1, 7), (-(2**62), 1), (16, -16)):
        assert launch[(1,)](None, n, s, 64) is compiled
        assert compiled.seen[-5:-2] == (None, n, s)
    assert kernel.ordinary == 1
    assert launch[(1,)](None, 5, 2**31, 64) is not compiled


@pytest.mark.parametrize("where", ["launch_enter_hook", "launch_exit_hook", "pre_run", "stages", "plain"])
def test_hooks_see_every_launch(knobs, where):
    kernel = Kernel()
    launch = triton_launcher(kernel)
    call = lambda: launch[(1,)](None, 3, 2.0, 64)  # noqa: E731
    call()
    call()
    assert kernel.ordinary == 1
    if where == "pre_run":
        kernel.pre_run_hooks.append(print)
    elif where == "stages":
        knobs.runtime.add_stages_inspection_hook = print
    elif where == "plain":
        knobs.runtime.launch_enter_hook = print
    else:
        getattr(knobs.runtime, where).calls.append(print)
    call()
    assert kernel.ordinary == 2, "Triton's own launch calls them"
    if where == "plain":
        knobs.runtime.launch_enter_hook = None
        call()
        assert kernel.ordinary == 2


@pytest.mark.parametrize("change", ["debug", "kernel.debug", "instrumentation"])
def test_modes_are_part_of_the_key(knobs, change):
    kernel = Kernel()
    launch = triton_launcher(kernel)
    launch[(1,)](None, 3, 2.0, 64)
    if change == "debug":
        knobs.runtime.debug = True
    elif change == "kernel.debug":
        kernel.debug = True
    else:
        knobs.compilation.instrumentation_mode = "fpsan"
    launch[(1,)](None, 3, 2.0, 64)
    assert kernel.ordinary == 2


def test_an_edited_kernel_is_not_served_stale(knobs):
    kernel = Kernel()
    launch = triton_launcher(kernel)
    call = lambda: launch[(1,)](None, 3, 2.0, 64)  # noqa: E731
    first = call()
    kernel.hash = None  # Triton forgets the hash of a source that it is told to update
    assert call() is not first
    assert call() is not first
    kernel.hash = "recursion:f"
    assert call() is not first
    kernel.hash = "edited"
    second = call()
    assert call() is second
    assert second is not first
    kernel.hash = "".join(["sou", "rce"])
    assert call() is not first, "what an older source was compiled to is gone"


def test_a_changed_global_is_left_to_triton(knobs):
    kernel = Kernel()
    launch = triton_launcher(kernel)
    scope = {"WIDTH": 3}
    kernel.used_global_vals = {("WIDTH", 1): (3, scope)}
    launch[(1,)](None, 3, 2.0, 64)
    launch[(1,)](None, 3, 2.0, 64)
    assert kernel.ordinary == 1
    scope["WIDTH"] = 4
    launch[(1,)](None, 3, 2.0, 64)
    assert kernel.ordinary == 2, "which raises there"


def test_what_the_key_cannot_hold_goes_the_ordinary_way(knobs):
    class Subclass(Pointer): ...

    kernel = Kernel(constants=("MODE",))
    on_cpu = Pointer(torch.float32, 4096)
    on_cpu.is_cuda = False
    for odd in (Subclass(torch.float32, 0), on_cpu):
        launch = triton_launcher(Kernel(constants=("MODE",)))
        for _ in range(2):
            launch[(1,)](odd, 1, 1, 1)
        assert launch.kernel.ordinary == 2
        assert not launch.compiled_by_key
    launch = triton_launcher(kernel)
    kernel.specialise = lambda args, kwargs: "odd"
    for args, keywords in (
        ((None, (1, 2), 1, 1), {}),
        ((None, 2**70, 1, 1), {}),
        ((None, 1, 1, 1), {"MODE": [1]}),
        ((None, 1, 1, 1), {"grid_constant": [1]}),
    ):
        before = kernel.ordinary
        for _ in range(2):
            launch[(1,)](*args, **keywords)
        assert kernel.ordinary == before + 2
    assert not launch.compiled_by_key


def test_errors_are_those_of_the_call(knobs):
    launch = triton_launcher(Kernel())
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'BLOCK'"):
        launch[(1,)](None, 3, 2.0)
    launch[(1,)](None, 3, 2.0, 64)
    with pytest.raises(TypeError, match="multiple values for argument 'BLOCK'"):
        launch[(1,)](None, 3, 2.0, 64, BLOCK=64)


def test_what_is_kept_is_bounded(knobs, monkeypatch):
    monkeypatch.setattr(launching, "LIMIT", 5)
    kernel = Kernel()
    launch = triton_launcher(kernel)
    for i in range(20):
        assert launch[(1,)](None, 3, 2.0, i).tag == kernel.launched[-1]
        assert len(launch.compiled_by_key) <= 5


def test_another_triton_launches_the_ordinary_way_and_says_so_once(monkeypatch):
    class Autotuner:
        __module__, __qualname__ = __name__, "tuned"

        def __getitem__(self, grid):
            return lambda *args, **kwargs: (grid, args, kwargs)

    launch = triton_launcher(Autotuner())
    with pytest.warns(
        sl.ShiplapNotice, match="tuned is launched the ordinary way: Autotuner has no signature, params, ha"
    ):
        assert launch[(3,)](1, a=2) == ((3,), (1,), {"a": 2})
    assert launch[(3,)](1, a=2) == ((3,), (1,), {"a": 2})

    def missing():
        raise AttributeError("no launch_enter_hook")

    monkeypatch.setattr(launching, "_triton_runtime", missing)
    kernel = Kernel()
    launch = triton_launcher(kernel)
    with pytest.warns(sl.ShiplapNotice, match="the ordinary way: AttributeError: no launch_enter_hook"):
        launch[(1,)](None, 3, 2.0, 64)
    launch[(1,)](None, 3, 2.0, 64)
    assert kernel.ordinary == 2

    def odd(_x, type): ...

    with pytest.warns(sl.ShiplapNotice, match="a signature with _x, type"):
        triton_launcher(Kernel(odd))[(1,)](None, 1)


def test_digests_see_the_kernel_behind_it():
    def other(x, n, s, BLOCK, MODE=1): ...

    def launcher_of(kernel):
        launch = triton_launcher(kernel)

        def run(x, *, out):
            launch[(1,)](x, out, 1, 2)

        return code_digest(run)

    other.__qualname__ = f.__qualname__
    assert launcher_of(Kernel(f)) == launcher_of(Kernel(f))
    assert launcher_of(Kernel(f)) != launcher_of(Kernel(other))
