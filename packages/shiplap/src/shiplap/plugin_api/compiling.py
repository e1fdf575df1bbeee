"""Control and observe Dynamo in this process.

``compile_counts()`` counts graphs, breaks and recompiles since ``reset_compiler()``. ``mark_dynamic`` declares, before
the first call, which sizes vary from call to call. ``assert_in_graph`` adds a check that the graph makes each time it
runs. ``allows_tf32()`` is ``torch.backends.cuda.matmul.allow_tf32``, at a third of the time that Dynamo takes for that.
``constant_result`` marks a function whose result a graph takes as a constant, without an import of Dynamo.
``checkpoints_keep_objects()`` returns whether a function that a graph checkpoints may return objects that hold tensors.
``try_best_instructions()`` shortens the first compilation of a process for the CPU.
"""

from shiplap.torch_private import CompileCounts, compile_counts, mark_dynamic, reset_compiler
from shiplap.torch_private.dispatcher_calls import allows_tf32
from shiplap.torch_private.dynamo import checkpoints_keep_objects, constant_result, try_best_instructions
from shiplap.torch_private.symbolic_sizes import assert_in_graph

__all__ = [
    "CompileCounts",
    "allows_tf32",
    "assert_in_graph",
    "checkpoints_keep_objects",
    "compile_counts",
    "constant_result",
    "mark_dynamic",
    "reset_compiler",
    "try_best_instructions",
]
