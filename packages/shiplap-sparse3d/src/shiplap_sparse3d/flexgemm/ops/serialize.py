"""``flex_gemm.ops.serialize``."""

from shiplap_sparse3d.serialize import decode_seq, encode_seq

__all__ = ["decode_seq", "encode_seq"]
