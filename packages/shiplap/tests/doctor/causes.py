# One small function a cause. Every line that breaks the graph is marked: BREAK cause registry-id call.
# ruff: noqa
import contextlib, ctypes, logging, os, time, zlib
import scipy.special, torch

libm = ctypes.CDLL(None)
libm.abs.restype, libm.abs.argtypes = ctypes.c_int, [ctypes.c_int]
log = logging.getLogger("program")
compressor = zlib.compressobj()
view, listing = memoryview(b""), os.scandir(os.curdir)
weight = torch.ones(4, requires_grad=True)


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, *, scale):
        return x * x * scale

    @staticmethod
    def backward(ctx, grad):
        return grad


class JITFunction:  # as Triton's: an object with [grid] that launches compiled code
    def __getitem__(self, grid):
        return self.run

    run = staticmethod(zlib.crc32)


kernel = JITFunction()


@torch.compiler.disable
def helper(x):
    return x + 1


def item(x):
    return x * x.sum().item()  # BREAK item GB0124 x.sum().item


def tolist(x):
    return x + x.long().tolist()[0]  # BREAK item GB0033 x.long().tolist


def as_int(x):
    return x + int(x.sum())  # BREAK item GB0124 int


def as_bool(x):
    return x if bool(x.all()) else -x  # BREAK item GB0124 bool


def slice_by_tensor(x):
    return x[: x.argmax()]  # BREAK item GB0124 x[:x.argmax()]


def in_loop(x):
    for _ in range(2):
        x = x + x.sum().item()  # BREAK item GB0124 x.sum().item
    return x


def ranked(x):
    order = sorted(range(len(x)), key=lambda i: -x[i])  # BREAK item GB0207 sorted
    return x[order]


def branch(x):
    if x.sum() > 0:  # BREAK branch GB0170 if x.sum() > 0
        return x + 1
    return x


def loop(x):
    while x.sum() < 50:  # BREAK branch GB0170 while x.sum() < 50
        x = x * 2
    return x


def nonzero(x):
    return torch.nonzero(x) + 1  # BREAK shape GB0036 torch.nonzero


def mask(x):
    return x[x > 2]  # BREAK shape GB0036 x[x > 2]


def unique(x):
    return torch.unique(x)  # BREAK shape GB0036 torch.unique


def masked_select(x):
    return x.masked_select(x > 2)  # BREAK shape GB0036 x.masked_select


def extension(x):
    zlib.crc32(b"")  # BREAK foreign GB0007 zlib.crc32
    return x + 1


def through_ctypes(x):
    return x + libm.abs(-1)  # BREAK foreign GB0156|GB4818 libm.abs


def in_try(x):
    try:
        zlib.decompress(b"no")  # BREAK foreign GB0007 zlib.decompress
    except zlib.error:
        pass
    return x + 1


def launcher(x):
    kernel[(1,)](b"")  # BREAK foreign GB0007 zlib.crc32
    return x + 1


def python_object(x):
    compressor.flush(zlib.Z_NO_FLUSH)  # BREAK object GB0156 Compress.flush
    return x + 1


def ufunc(x):
    return x + torch.from_numpy(scipy.special.erf(x.numpy()))  # BREAK numpy GB0156|GB4818 scipy.special.erf


def array_attribute(x):
    x.numpy().dtype  # BREAK numpy GB0157 x.numpy
    return x + 1


def printing(x):
    print("shape", x.shape)  # BREAK print GB0059 print
    return x + 1


def logs(x):
    log.warning("shape %s", x.shape)  # BREAK print GB0291 Logger.warning
    return x + 1


def clock(x):
    return x + time.perf_counter()  # BREAK system GB0007|GB9193 time.perf_counter


def reads(x):
    open(os.devnull)  # BREAK system GB0059 open
    return x + 1


def seeds(x):
    torch.manual_seed(0)  # BREAK system GB0007 torch.random.manual_seed
    return x + torch.rand(4)


def disabled(x):
    return helper(x) * 2  # BREAK disabled GB0098 helper


def explicit(x):
    torch._dynamo.graph_break()  # BREAK disabled GB0025 torch._dynamo.graph_break
    return x + 1


def function(x):
    return Square.apply(x, scale=2.0)  # BREAK autograd_function GB4372 Square.apply


def backward(x):
    (weight * x).sum().backward()  # BREAK autograd GB0123 (weight * x).sum().backward
    return x + 1


def context(x):
    with view:  # BREAK context GB0142 with view
        return x + 1


def generator(x):
    for entry in listing:  # BREAK generator GB0811|GB9493 for ... in listing
        x = x + 1
    return x


FUNCTIONS = [f for name, f in list(globals().items()) if hasattr(f, "__code__") and name != "helper"]

if __name__ == "__main__":
    for function in FUNCTIONS:
        with contextlib.suppress(Exception):
            torch.compile(function, backend="eager")(torch.arange(1.0, 5.0))
