"""Arguments of a call: SL2xx."""

from __future__ import annotations

from shiplap.errors.base import ShiplapError, register

__all__ = ["ArgumentError"]


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
            "A dim that the declaration names twice must have one size.",
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
            "Arguments that share a dtype class such as Float must have the same dtype.",
            "convert one of the tensors with .to(dtype)",
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
            "pass .clone()",
        ),
        (
            "SL211",
            "the op does not accept these values",
            ("The op is not defined for every value of its inputs. The line 'got' shows the value that it cannot use."),
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
            "convert the tensor with .to(dtype), or view its bytes as torch.uint8",
        ),
        (
            "SL215",
            "the sparse tensor has no gradient",
            (
                "Reentrant checkpointing gives a gradient to the tensors that its function takes and returns. It gives "
                "none to a tensor inside of another object."
            ),
            "pass use_reentrant=False to torch.utils.checkpoint.checkpoint",
        ),
        (
            "SL216",
            "the call has DTensors and plain tensors",
            "A rank cannot know which part of the whole a plain tensor is.",
            "pass the named tensors through distribute_tensor, or all local tensors with .to_local()",
        ),
        (
            "SL217",
            "the op has no sharding rule",
            (
                "An op may be cut over ranks only where its reference has been seen to give the same result in parts. "
                "Nothing is gathered silently."
            ),
            "declare a rule with op.sharding(...), or redistribute the tensors to Replicate()",
        ),
        (
            "SL218",
            "the sharding rule does not fit the op",
            "A rule names tensor arguments, and an axis or a part of each.",
            'write op.sharding({"x": 0}, 0) with the axes that are cut, or "whole", "sum", "max" or "min"',
        ),
        (
            "SL219",
            "a sparse tensor cannot be cut by its rows",
            (
                "Rows of one scene would lie in both parts, and each part would miss neighbours. Pipelining cuts the "
                "tensors of a micro-batch so."
            ),
            "split by scenes, x[start:stop], and hand plain tensors from stage to stage",
        ),
    ],
)
