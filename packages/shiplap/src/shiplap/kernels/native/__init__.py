"""The native binding of C ABI kernels, which is planned, compiled, cached, loaded and attached to ops."""
