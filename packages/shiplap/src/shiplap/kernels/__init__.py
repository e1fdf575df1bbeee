"""Kernels that are not Python functions: C functions, the compiled binding of them, Triton kernels and templates."""
