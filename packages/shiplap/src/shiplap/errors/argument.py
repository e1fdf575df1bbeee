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
            "The declaration, or the function that was called, fixes the number of dims of this argument.",
            "reshape the tensor to the number of dims under 'expected', for example with x.unsqueeze(0)",
        ),
        (
            "SL202",
            "sizes disagree",
            (
                "A dim name that occurs several times in the declaration stands for the same size everywhere. "
                "Functions also require equal sizes, such as one row of features for each voxel."
            ),
            "pass tensors with the sizes under 'expected'",
        ),
        (
            "SL203",
            "a size differs from the declared size",
            "The declaration fixes the size of this dim.",
            "pass a tensor that has the size under 'expected' in this axis",
        ),
        (
            "SL204",
            "the dtype is not accepted",
            "The declaration, or the function that was called, lists the dtypes that the argument accepts.",
            "convert the tensor with .to(dtype) to a dtype that 'expected' lists",
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
            (
                "All tensors of a call must be on one device. Code that was built for the CPU takes only tensors on "
                "the CPU."
            ),
            (
                "move each tensor of the call that is on another device to the device under 'expected', with "
                ".to(device). A tensor on meta has no data to move: create it on that device instead"
            ),
        ),
        (
            "SL207",
            "the memory layout is not supported",
            (
                "The op requires contiguous tensors, or the layout that its declaration names. Its kernel may also "
                "require aligned memory."
            ),
            (
                "pass x.contiguous() in place of the tensor x. If 'expected' names another layout, pass a tensor of "
                "that layout. If it names an alignment, pass x.clone()"
            ),
        ),
        (
            "SL208",
            "a precondition does not hold",
            "The declaration, or the function that was called, requires the condition named under 'expected'.",
            "pass values that fulfil the condition under 'expected'",
        ),
        (
            "SL209",
            "an argument has the wrong type",
            "The signature of the op or function fixes the number, the names and the types of the arguments.",
            "pass a value of the type under 'expected'",
        ),
        (
            "SL210",
            "a mutated tensor overlaps itself",
            (
                "The op writes to the tensor. Where two of its elements share memory, the result of the write is not "
                "defined. The same holds for memory that it shares with another tensor of the call."
            ),
            (
                "pass y = x.clone() in place of the tensor x under 'where', and use y after the call. The values of x "
                "do not change"
            ),
        ),
        (
            "SL211",
            "the op does not accept these values",
            "The op is not defined for every value of its inputs. The line 'got' shows the value that it cannot use.",
            "replace or remove the input value that 'got' describes",
        ),
        (
            "SL212",
            "the given output does not fit",
            (
                "An out-variant, the call with out=, writes its results to given tensors. They must be contiguous, on "
                "the device of the call, and of the declared shape and dtype."
            ),
            "pass torch.empty(shape, dtype=dtype, device=device) with the values under 'expected'",
        ),
        (
            "SL213",
            "the given workspace does not fit",
            (
                "A workspace is a tensor of bytes in which a kernel keeps temporary values. The kernel relies on its "
                "size and alignment."
            ),
            (
                "pass workspace=torch.empty(op.workspace_bytes(*arguments), dtype=torch.uint8, device=device), with "
                "the arguments and the device of the call"
            ),
        ),
        (
            "SL214",
            "the C ABI cannot carry this dtype",
            (
                "A C kernel identifies a dtype by its code in DLPack, the standard for passing tensors between "
                "libraries. A dtype without a code of its own would be mistaken for another dtype."
            ),
            (
                "convert the tensor to a dtype with a DLPack code, such as torch.float32, or view its bytes as "
                "torch.uint8"
            ),
        ),
        (
            "SL215",
            "the sparse tensor would lose its gradient",
            (
                "Reentrant checkpointing computes gradients only for tensors that its function takes and returns "
                "directly. It computes none for a tensor inside of another object, such as a SparseTensor."
            ),
            "pass use_reentrant=False to torch.utils.checkpoint.checkpoint",
        ),
        (
            "SL216",
            "the call mixes DTensors and plain tensors",
            (
                "A plain tensor does not say whether it is the whole tensor or the shard of one rank. So Shiplap "
                "cannot combine it with DTensors."
            ),
            (
                "convert each plain tensor t with torch.distributed.tensor.distribute_tensor(t, mesh, placements), "
                "where mesh is the mesh of the DTensors. If the op is to run on the local shards alone, pass "
                "x.to_local() of each DTensor x"
            ),
        ),
        (
            "SL217",
            "the op has no sharding rule for this call",
            (
                "Shiplap runs an op on sharded tensors only if a sharding rule says how the results of the ranks "
                "form the result of the whole. It never gathers shards silently. DTensor itself cannot represent "
                "tensors in a list, sizes that depend on data, or an argument that an op writes to and returns."
            ),
            (
                "pass x.redistribute(placements=[Replicate()] * x.device_mesh.ndim) for each sharded tensor x, or "
                'declare a rule such as op.sharding({"x": 0}, 0). Where plain tensors are expected, pass '
                "x.full_tensor() of each DTensor x"
            ),
        ),
        (
            "SL218",
            "the sharding rule does not fit the op",
            (
                "A sharding rule gives each tensor argument and each output an axis along which it is sharded, or a "
                'word. "whole" means that each rank has all of it, and "sum", "max" or "min" how the tensors of the '
                "ranks are combined. An op that writes to its arguments or takes lists of tensors can have no rule."
            ),
            (
                'give each tensor an axis, "whole", "sum", "max" or "min", such as op.sharding({"x": 0}, 0). If the '
                "op writes to its arguments or takes lists of tensors, remove op.sharding"
            ),
        ),
        (
            "SL219",
            "the rows of a sparse tensor cannot be split",
            (
                "A split of the rows can separate neighbouring voxels of one scene, and convolutions would then give "
                "wrong results. Pipeline parallelism splits each micro-batch in this way."
            ),
            (
                "split the batch by scenes, as in x[start:stop]. For pipeline parallelism, pass plain tensors between "
                "the stages"
            ),
        ),
        (
            "SL220",
            "a tensor that requires a gradient was passed as a number",
            (
                "The op takes a plain number here, which carries no gradient. The gradient of the tensor would "
                "silently be lost."
            ),
            (
                'if the gradient is needed, declare the argument as a tensor: Float[Tensor, ""]. If not, pass t.item() '
                "of the tensor t"
            ),
        ),
        (
            "SL221",
            "an argument is not one of its allowed values",
            "The declaration lists the only values that the argument may have, as a Literal or an Enum.",
            "pass one of the values that 'expected' lists",
        ),
    ],
)
