"""The native binding of C ABI kernels: planned, compiled, cached, loaded and attached to ops."""
