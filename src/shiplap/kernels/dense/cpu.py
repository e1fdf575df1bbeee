"""Templates for the CPU: C++ micro-kernels, vectorised as Inductor vectorises."""
