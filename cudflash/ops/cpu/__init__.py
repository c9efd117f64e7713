"""The op set on the CPU: the bit-exact twin of the CUDA kernels, compiled by Numba.

Every function writes into caller-owned buffers. Names, argument order and bits are those of
``cudflash.ops.cuda``.
"""

from cudflash.ops.cpu.formats import packed_nbytes
from cudflash.ops.cpu.packed import matmul, pack, quantize_rows, quantized_rows
from cudflash.ops.cpu.runtime import (
    capture,
    copy_in,
    download,
    empty,
    set_threads,
    threads,
    upload,
    zeros,
)

__all__ = [
    "capture", "copy_in", "download", "empty", "matmul", "pack", "packed_nbytes",
    "quantize_rows", "quantized_rows", "set_threads", "threads", "upload", "zeros",
]
