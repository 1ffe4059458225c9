"""Reading and writing cached vectors as bytes, in pages and in rings."""

from widemesh.pallas_kernels.paged_cache.records import decode_vectors, encode_vectors, fake_quant
from widemesh.pallas_kernels.paged_cache.reference import gather_rows, read_keys, read_rows, write_source

__all__ = [
    "decode_vectors",
    "encode_vectors",
    "fake_quant",
    "gather_rows",
    "read_keys",
    "read_rows",
    "write_source",
]
