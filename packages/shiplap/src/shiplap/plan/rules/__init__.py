"""The rules of calls, one class a rule: when it holds, in Python and in C++, and what an error says where it does not.

``tensors``: of one argument. ``sizes``: of dims. ``relations``: of all arguments together. ``outputs``: of what the
caller owns besides, and what kernels ask.
"""
