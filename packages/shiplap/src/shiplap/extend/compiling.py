"""Control and observe Dynamo in this process.

``compile_counts()`` counts what was compiled since ``reset_compiler()``. ``mark_dynamic`` declares, before the first
call, which sizes vary from call to call. ``assert_in_graph`` adds a check that the graph makes each time it runs.
"""

from shiplap.compat import CompileCounts, compile_counts, mark_dynamic, reset_compiler
from shiplap.compat.sizes import assert_in_graph

__all__ = ["CompileCounts", "assert_in_graph", "compile_counts", "mark_dynamic", "reset_compiler"]
