"""Arguments of a call: SL2xx."""

from __future__ import annotations

from shiplap.errors.base import ShiplapError, register


class ArgumentError(ShiplapError, ValueError):
    """A call that does not fit the declaration (SL2xx)."""


register(
    ArgumentError,
    [
        (
            "SL201",
            "a tensor has the wrong number of dims",
            "The declaration fixes the rank of the argument.",
            "reshape or unsqueeze the tensor",
        ),
        (
            "SL202",
            "sizes disagree",
            "A dim name that occurs several times in the declaration stands for the same size everywhere.",
            "pass tensors whose named dims agree",
        ),
        (
            "SL203",
            "a size differs from the declared size",
            "The declaration fixes the size of this dim.",
            "pass a tensor of the declared size",
        ),
        (
            "SL204",
            "the dtype is not accepted",
            "The declaration lists the dtypes that the argument accepts.",
            "convert the tensor with .to(dtype)",
        ),
        (
            "SL205",
            "dtypes disagree",
            (
                "Arguments that share a dtype class such as Float must have the same dtype. An argument with a dtype "
                "class of its own, such as BFloat16 | Float32, may have another one."
            ),
            (
                "convert one of the tensors with .to(dtype), or give one argument a dtype class of its own in the "
                'declaration: weight: BFloat16[Tensor, "c"] | Float32[Tensor, "c"]'
            ),
        ),
        (
            "SL206",
            "devices disagree",
            "All tensors of a call must be on one device.",
            "move the tensor with .to(device)",
        ),
        (
            "SL207",
            "the memory layout is not supported",
            "The op requires contiguous tensors, or the layout that its declaration names.",
            "call .contiguous() first",
        ),
        (
            "SL208",
            "a precondition does not hold",
            "The declaration, or the function that was called, requires the condition named under 'expected'.",
            "pass values that fulfil the condition",
        ),
        (
            "SL209",
            "an argument has the wrong type",
            "The schema fixes the number and the types of the arguments.",
            "pass the declared type",
        ),
        (
            "SL210",
            "a mutated tensor overlaps itself",
            "Two elements of the tensor share memory, so a write to it has no defined result.",
            "pass x.clone(), and read the result from the clone; x itself stays as it was",
        ),
        (
            "SL211",
            "the op does not accept these values",
            "The op is not defined for every value of its inputs. The line 'got' shows the value that it cannot use.",
            "correct the values that the message names",
        ),
        (
            "SL212",
            "the given output does not fit",
            "An out-variant fills contiguous tensors of the declared shape and dtype.",
            "pass torch.empty of the expected shape and dtype",
        ),
        (
            "SL213",
            "the given workspace does not fit",
            "A kernel relies on the size and the alignment of its workspace.",
            "pass torch.empty(op.workspace_bytes(...), dtype=torch.uint8, device=...)",
        ),
        (
            "SL214",
            "the C ABI cannot carry this dtype",
            (
                "A C kernel identifies a dtype by its DLPack code. A dtype without a code of its own would be "
                "mistaken for another dtype."
            ),
            "convert the tensor to a dtype with a DLPack code, such as torch.float32, or view its bytes as torch.uint8",
        ),
        (
            "SL215",
            "the sparse tensor would lose its gradient",
            (
                "Reentrant checkpointing computes gradients only for tensors that its function takes and returns "
                "directly. It computes no gradient for a tensor inside of another object, such as a SparseTensor."
            ),
            "pass use_reentrant=False to torch.utils.checkpoint.checkpoint",
        ),
        (
            "SL216",
            "the call mixes DTensors and plain tensors",
            "A plain tensor does not say whether it is the whole tensor or the shard of one rank.",
            "convert the plain tensors with distribute_tensor, or pass .to_local() of each DTensor",
        ),
        (
            "SL217",
            "the op has no sharding rule for this call",
            (
                "Shiplap runs an op on sharded tensors only if a sharding rule says how the results of the ranks form"
                " the result of the whole. It never gathers shards silently."
            ),
            "redistribute the tensors to Replicate(), or declare a rule with op.sharding(...)",
        ),
        (
            "SL218",
            "the sharding rule does not fit the op",
            (
                "A sharding rule says for each tensor argument and each output along which axis it is sharded, or how"
                " the tensors of the ranks are combined."
            ),
            'write for example op.sharding({"x": 0}, 0); an axis, "whole", "sum", "max" and "min" are allowed',
        ),
        (
            "SL219",
            "the rows of a sparse tensor cannot be split",
            (
                "A split of the rows can separate neighbouring voxels of one scene, and convolutions would then give "
                "wrong results. Pipeline parallelism splits each micro-batch in this way."
            ),
            "split the batch by scenes with x[start:stop], and pass plain tensors between pipeline stages",
        ),
        (
            "SL220",
            "a number carries a gradient",
            "The schema has a number there: what autograd knows of the tensor would be lost.",
            'pass number.item() or number.detach(), or declare the argument as a tensor, Float[Tensor, ""]',
        ),
        (
            "SL221",
            "an argument is none of its choices",
            "The declaration lists the only values that the argument may have, as a Literal or an Enum.",
            "pass one of the values that 'expected' lists",
        ),
    ],
)
