"""Samples of the arguments of an op, drawn from its declaration, and comparison of the op with its
reference on them.
"""
