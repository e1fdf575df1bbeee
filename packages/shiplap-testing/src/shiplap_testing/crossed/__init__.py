"""Crossed declarations: random declarations, kernels, bindings, layouts and ways of a call meet, and nothing may lie.

``python -m shiplap_testing.crossed --count 5000 --jobs 4`` draws declarations from a seed, declares them in child
processes, calls each of them in several ways, and compares every result with the reference and its autograd. What
shiplap refuses by an error of its catalogue is counted; everything else that is not equal is a failure.
"""
