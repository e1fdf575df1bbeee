"""What Dynamo did in this process: ``compile_counts()`` after ``reset_compiler()``. And which sizes vary from call to
call, said before the first one: ``mark_dynamic``.
"""

from shiplap.compat import CompileCounts, compile_counts, mark_dynamic, reset_compiler

__all__ = ["CompileCounts", "compile_counts", "mark_dynamic", "reset_compiler"]
