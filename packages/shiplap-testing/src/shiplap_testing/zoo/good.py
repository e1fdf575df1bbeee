"""Sound ops of every kind that a declaration can express: an audit that fails one of them is wrong."""

import torch
from jaxtyping import Bool, Float, Float32, Float64, Int32, Int64, Shaped
from torch import Tensor

import shiplap as sl
from shiplap_testing.build import compile_c
from shiplap_testing.folder import temporary
from shiplap_testing.zoo.specimen import Specimen, register

V = Float[Tensor, "n"]
M = Float[Tensor, "n c"]
SPECIMENS: list[Specimen] = []


def good(name, op, note=""):
    """Add the sound op ``op`` under ``name`` to ``SPECIMENS``, the ops on which the audit is tested. No check of the
    audit may fail on it. ``note`` is a remark.
    """
    SPECIMENS.append(Specimen(name, op, note=note))


@sl.op("zoo_good::mm")
def mm(x: Float[Tensor, "a b"], y: Float[Tensor, "b c"]) -> Float[Tensor, "a c"]:
    """Return the matrix product ``x @ y``."""
    return x @ y


@mm.backward
def _(grad, saved, needs):
    """Return the gradients of ``x @ y`` by argument name, or None for an argument that ``needs`` does not name. They
    are computed by the op ``mm`` itself, so that they can be differentiated again.
    """
    # The op itself, so that the gradient is differentiable as often as one likes.
    return {"x": mm(grad, saved.y.T) if needs.x else None, "y": mm(saved.x.T, grad) if needs.y else None}


good("matrix product, differentiable any number of times", mm)


@sl.op("zoo_good::nested")
def nested(x: Float[Tensor, "n ci"], w: Float[Tensor, "ci co"]) -> Float[Tensor, "n co"]:
    """Return ``2 * x @ w``, computed by the declared op ``mm``."""
    return mm(x, w) * 2


@nested.backward
def _(grad, saved, needs):
    """Return the gradients of ``2 * x @ w`` by argument name, or None for an argument that ``needs`` does not name."""
    return {"x": mm(grad, saved.w.T) * 2 if needs.x else None, "w": mm(saved.x.T, grad) * 2 if needs.w else None}


good("calls another declared op", nested)


@sl.op("zoo_good::view")
def view(x: Shaped[Tensor, "n c"]) -> Shaped[Tensor, "c n"]:
    """Return the transpose of ``x``. This function returns a view of ``x``. The op that is declared from it copies the
    view and returns the copy, since results of an op must not alias its arguments.
    """
    return x.T


good("reference returns a view, shiplap copies it", view)


@sl.op("zoo_good::several", outputs=["value", "index", "total"])
def several(x: M) -> tuple[Float[Tensor, "n"], Int64[Tensor, "n"], Float64[Tensor, ""]]:
    """Return the maximum of each row, its position, and the sum of all elements in float64. If there are no columns,
    the maxima and positions are zero.
    """
    if x.shape[1] == 0:
        return x.new_zeros(len(x)), torch.zeros(len(x), dtype=torch.int64), x.double().sum()
    value, index = x.max(1)
    return value, index, x.double().sum()


good("several outputs of several dtypes", several)


@sl.op("zoo_good::dynamic", bounds={"m": "n"})
def dynamic(x: V, threshold: float = 0.0) -> tuple[Int64[Tensor, "m"], Float[Tensor, "m"]]:
    """Return the positions of the elements of ``x`` above ``threshold``, and these elements."""
    index = (x > threshold).nonzero()[:, 0]
    return index, x[index]


good("data-dependent sizes", dynamic)


@sl.op("zoo_good::update_", mutates=["table"])
def update_(table: M, x: M, alpha: float = 1.0) -> V:
    """Add ``alpha * x`` to ``table`` in place, and return the sum of each row of ``table``."""
    table.add_(x, alpha=alpha)
    return table.sum(1)


good("mutates an argument", update_)


@sl.op("zoo_good::stack")
def stack(xs: list[V], weight: float = 1.0) -> V:
    """Return ``weight`` times the sum of the tensors ``xs``."""
    return torch.stack(xs).sum(0) * weight


@stack.backward
def _(grad, saved, needs):
    """Return the gradients of ``stack`` for the tensors of the list ``xs``, ``grad * weight`` for each of them."""
    return {"xs": [grad * saved.weight for _ in saved.xs]}


good("list of tensors", stack)


@sl.op("zoo_good::affine", autocast="autocast")
def affine(
    x: Float[Tensor, "n ci"], w: Float[Tensor, "co ci"], bias: Float[Tensor, "co"] | None = None
) -> Float[Tensor, "n co"]:
    """Return ``x @ w.T``, plus ``bias`` unless that is None."""
    out = x @ w.T
    return out if bias is None else out + bias


@affine.backward
def _(grad, saved, needs):
    """Return the gradients of ``affine`` by argument name, or None for an argument that ``needs`` does not name."""
    return {
        "x": grad @ saved.w if needs.x else None,
        "w": grad.T @ saved.x if needs.w else None,
        "bias": grad.sum(0) if needs.bias else None,
    }


good("optional tensor, autocast rule", affine)


@sl.op("zoo_good::scalars", requires=("mode == 'add' and k >= 1", "len(ks) == 2"))
def scalars(
    x: V,
    k: int = 2,
    p: float = 0.5,
    flag: bool = True,
    ks: list[int] = (1, 2),
    ps: list[float] = (0.5,),
    *,
    mode: str = "add",
) -> V:
    """Return ``x`` if ``flag`` is true and ``-x`` otherwise, times ``k * p``, plus the product of ``ks`` and the sum of
    ``ps``. The op has scalars of every kind.
    """
    return (x if flag else -x) * (k * p) + ks[0] * ks[1] + sum(ps)


good("many scalars", scalars)


@sl.op("zoo_good::softmax")
def softmax(x: M) -> M:
    """Return the softmax of each row of ``x``."""
    return torch.softmax(x, 1)


@softmax.kernel("cpu", workspace="n * itemsize + 64 * threads")
def _(x, *, out, workspace):
    """Write the softmax of each row of ``x`` to ``out``. Assert that ``workspace`` has the declared size. Its bytes are
    not used.
    """
    assert workspace.numel() >= x.shape[0] * x.itemsize
    if x.shape[1]:
        torch.sub(x, x.amax(1, keepdim=True), out=out)
        out.exp_().div_(out.sum(1, keepdim=True))


@softmax.backward
def _(grad, saved, needs):
    """Return the gradient of the softmax of each row, computed from the saved output."""
    return {"x": saved.out * (grad - (saved.out * grad).sum(1, keepdim=True))}


good("reduction, saves its output, workspace", softmax)


@sl.op("zoo_good::histogram", requires="bins >= 1")
def histogram(index: Int32[Tensor, "n"], mask: Bool[Tensor, "n"], bins: int = 8) -> Int64[Tensor, "bins"]:
    """Return the number of elements of ``index`` in each of ``bins`` classes modulo ``bins``. Only elements for which
    ``mask`` is set are counted.
    """
    return torch.bincount(index[mask].long() % bins, minlength=bins)


good("integers only", histogram)


@sl.op("zoo_good::scale")
def scale(x: Float[Tensor, "*batch"], s: Float[Tensor, ""]) -> tuple[Float[Tensor, "*batch"], Float32[Tensor, ""]]:
    """Return ``x * s`` for an ``x`` of any rank. ``s`` is a number in float32."""
    return x * s, s.float()


good("0-dim tensors, any rank", scale)


@sl.op("zoo_good::strided")
def strided(x: Float[Tensor, "n c"], y: Float[Tensor, "c n"]) -> M:
    """Return ``x + y.T``."""
    return x + y.T


@strided.kernel("cpu")
def _(x, y, *, out):
    """Write ``x + y.T`` to ``out``, for arguments of any strides."""
    torch.add(x, y.T, out=out)


@strided.backward
def _(grad, saved, needs):
    """Return the gradients of ``x + y.T`` by argument name, or None for an argument that ``needs`` does not name. The
    gradient of ``y`` is a transposed view.
    """
    return {"x": grad if needs.x else None, "y": grad.T if needs.y else None}


good("kernel that takes any strides", strided)


@sl.op("zoo_good::window", dims={"m": "(n - k) // s + 1"}, requires=("1 <= k", "k <= n", "s >= 1"), contiguous=["x"])
def window(x: V, k: int = 3, s: int = 2) -> Float[Tensor, "m"]:
    """Return the sums of windows of ``k`` elements of ``x``. The windows begin ``s`` elements apart."""
    return x.unfold(0, k, s).sum(1)


good("preconditions, computed size, contiguous input", window)


@sl.op("zoo_good::gather")
def gather(x: M, index: Int64[Tensor, "m"]) -> Float[Tensor, "m c"]:
    """Return the rows of ``x`` at ``index``."""
    return x[index]


@gather.samples
def _(rng, sizes, dtype, device):
    """Return sample arguments of ``gather``, which are a random matrix and random indices of its rows. There are no
    indices if the matrix has no rows.
    """
    n, m, c = sizes["n"], sizes["m"], sizes["c"]
    x = torch.randn(n, c, generator=rng).to(device, dtype)
    return x, torch.randint(0, max(n, 1), (m if n else 0,), generator=rng).to(device)


@gather.backward
def _(grad, saved, needs):
    """Return the gradient of ``gather`` for ``x``, which is zeros with the rows of ``grad`` added at ``index``."""
    return {"x": torch.zeros_like(saved.x).index_add_(0, saved.index, grad)}


good("integers that mean rows, with a sampler", gather)


def _double_backward(ctx, grad):
    """Return ``2 * grad``, the gradient of ``2 * x``. This is the backward of the operator ``zoo::sound``."""
    return grad * 2


@sl.adopt(
    register(
        "sound(Tensor x) -> Tensor", lambda x: (x * 2).contiguous(), lambda x: x.new_empty(x.shape), _double_backward
    )
)
def adopted(x: M) -> M:
    """Return ``2 * x``, the reference of the operator ``zoo::sound``, which is registered by ``torch.library`` and has
    no defect.
    """
    return x * 2


good("an outsider's sound op", adopted, note="the control of the outsider's bad ones")


@sl.op("zoo_good::saxpy", outputs=["z"])
def saxpy(x: Float32[Tensor, "n c"], y: Float32[Tensor, "n c"], a: float = 2.0) -> Float32[Tensor, "n c"]:
    """Return ``a * x + y``."""
    return a * x + y


_folder = temporary("zoo")
_BODY = """
int saxpy(const sl_context* ctx, const DLTensor* x, const DLTensor* y, DLTensor* z, double a) {
  const float *in = x->data, *add = y->data; float* out = z->data;
  for (int64_t i = 0; i < x->shape[0]; ++i)
    for (int64_t j = 0; j < x->shape[1]; ++j)
      out[i * z->strides[0] + j] = (float)a * in[i * x->strides[0] + j * x->strides[1]]
                                   + add[i * y->strides[0] + j * y->strides[1]];
  return SL_OK;
}"""
saxpy.kernel("cpu", sl.cabi(compile_c(_folder, "saxpy", {"saxpy": saxpy}, _BODY), "saxpy", strided=["x"]))
good("C ABI kernel", saxpy)
