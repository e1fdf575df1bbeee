"""C ABI kernels: ``sl.cabi``, the frame of one call, the header, and the libraries that are loaded."""
