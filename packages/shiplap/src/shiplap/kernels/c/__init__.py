"""C ABI kernels, with ``sl.cabi``, the memory of one call, the header, and the libraries that are loaded."""
