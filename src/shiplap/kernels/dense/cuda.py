"""Templates for CUDA devices, in Triton."""
