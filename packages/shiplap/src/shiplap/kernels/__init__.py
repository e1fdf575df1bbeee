"""Kernels that are not Python functions. They are C functions, their compiled binding, Triton kernels and templates."""
