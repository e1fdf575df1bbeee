"""Kernels that are not Python functions: C functions, their compiled binding, Triton kernels and templates."""
