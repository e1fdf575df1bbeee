"""DTensor: the sharding rules of an op are registered here. ``torch.distributed.tensor`` is imported when it is in use.

Torch's ``experimental.register_sharding`` reuses the result of one call for all calls whose first integer argument
agrees. An op whose rules depend on a float, a list or a string has to state the position of that argument.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shiplap.torch_private.dispatcher_library import Overload

CallPlacements = tuple[list[Any], list[Any]]  # of the outputs, and of the arguments; None for other values than tensors
UNKNOWN, MIXED = "does not have a sharding strategy registered", "got mixed torch.Tensor and DTensor"


def is_dtensor(value: Any) -> bool:
    """Return whether a value is a DTensor. No value is one before the program has imported
    ``torch.distributed.tensor``.
    """
    # The module takes long to import, and no DTensor exists before its import.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def lacks_strategy(cause: Exception) -> bool:
    """Return whether ``cause``, the error of a call, says that DTensor has no sharding rules for an op."""
    return UNKNOWN in str(cause)


def has_plain_tensors(cause: Exception) -> bool:
    """Return whether ``cause``, the error of a call, says that the call got DTensors together with plain tensors."""
    return MIXED in str(cause)


def register_sharding_rules(
    overloads: Iterable[Overload], first_scalar: int, find: Callable[..., Sequence[CallPlacements]]
) -> None:
    """Register the function ``find(mesh_sizes, *args)`` with DTensor for ``overloads``. ``find`` returns the possible
    placements of the arguments and results of a call over one dimension of a mesh.

    Args:
        overloads: the ops to register.
        first_scalar: the position of the first argument that is not a tensor. DTensor reuses a result for calls that
            have the same arguments from there on.
        find: a function that gets a value with a ``shape`` and ``placements`` for each tensor.
    """
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._op_schema import OpStrategy, RuntimeSchemaInfo
    from torch.distributed.tensor._ops.utils import expand_to_full_mesh_op_strategy

    known = inspect.signature(expand_to_full_mesh_op_strategy).parameters
    # Before torch 2.13 only a dim that is shorter than the mesh is not cut; uneven shards are taken.
    uneven: dict[str, Any] = {"allow_uneven_sharding": True} if "allow_uneven_sharding" in known else {}

    def strategy(schema: Any) -> Any:
        """Return DTensor's strategy for one call. The strategy lists every way to shard the call over the dimensions of
        the mesh.
        """

        def seen(arg: Any) -> Any:
            """Return the spec of a tensor argument, which has its shape and placements. Return other arguments
            unchanged.
            """
            return arg.strategies[0].output_spec if isinstance(arg, OpStrategy) else arg

        mesh = schema.get_mesh_from_args()
        ways = find(tuple(mesh.shape), *(seen(arg) for arg in schema.args_schema))
        rows: list[Any] = [[*outputs, *inputs] for outputs, inputs in ways]
        outputs = len(schema.op._schema.returns)
        return expand_to_full_mesh_op_strategy(mesh, schema, rows, input_index=outputs, **uneven)

    propagator: Any = DTensor._op_dispatcher.sharding_propagator
    for overload in overloads:
        propagator.register_op_strategy(overload, strategy, RuntimeSchemaInfo(first_scalar, None, needs_pytree=True))
