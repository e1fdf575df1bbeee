"""What Dynamo did in this process: ``compile_counts()`` after ``reset_compiler()``. And which sizes vary from call to
call, said before the first one: ``mark_dynamic``. What a graph asserts each time it runs: ``assert_in_graph``.
"""

from shiplap.compat import CompileCounts, compile_counts, mark_dynamic, reset_compiler
from shiplap.compat.sizes import assert_in_graph

__all__ = ["CompileCounts", "assert_in_graph", "compile_counts", "mark_dynamic", "reset_compiler"]
