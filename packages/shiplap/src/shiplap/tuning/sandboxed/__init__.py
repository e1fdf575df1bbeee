"""The bench of the tuner for kernels that are not trusted: one locked process for each kernel."""
