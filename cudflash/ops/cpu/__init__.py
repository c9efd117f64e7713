"""The op set on the CPU: the bit-exact twin of the CUDA kernels, compiled by Numba.

Every function writes into caller-owned buffers. Names, argument order and bits are those of
``cudflash.ops.cuda``.
"""

from cudflash.ops.cpu.attend import CHUNK, attention, kv_cache, kv_write
from cudflash.ops.cpu.attend_span import attention_span
from cudflash.ops.cpu.convolve import dynamic_conv
from cudflash.ops.cpu.elementwise import (
    add,
    add_bias,
    copy,
    geglu,
    scale,
    sigmoid_gate,
    softcap,
    swiglu,
)
from cudflash.ops.cpu.embed import embed_rows, embedding_nbytes, embedding_table
from cudflash.ops.cpu.formats import packed_nbytes
from cudflash.ops.cpu.fused import (
    geglu_quantize,
    norm_quantize,
    sigmoid_gate_quantize,
    swiglu_quantize,
)
from cudflash.ops.cpu.norm import gated_rms_norm, l2_norm, rms_norm
from cudflash.ops.cpu.packed import matmul, pack, pack_all, quantize_rows, quantized_rows
from cudflash.ops.cpu.recurrent import (
    delta_gates,
    delta_rule,
    recurrent_copy,
    recurrent_open,
    short_conv,
)
from cudflash.ops.cpu.repeat import moves, recorded, repeat
from cudflash.ops.cpu.rotary import rope
from cudflash.ops.cpu.runtime import (
    capture,
    copy_in,
    download,
    empty,
    move,
    set_threads,
    threads,
    upload,
    zeros,
)
from cudflash.ops.cpu.select import accept_greedy, argmax, check_finite, top_k
from cudflash.ops.cpu.selector import selector_lattice, selector_walk

__all__ = [
    "CHUNK", "accept_greedy", "add", "add_bias", "argmax", "attention", "attention_span", "capture",
    "check_finite", "copy", "copy_in", "delta_gates", "delta_rule", "download", "dynamic_conv",
    "embed_rows", "embedding_nbytes", "embedding_table", "empty", "gated_rms_norm", "geglu",
    "geglu_quantize", "kv_cache", "kv_write", "l2_norm", "matmul", "move", "moves", "norm_quantize",
    "pack", "pack_all", "packed_nbytes", "quantize_rows", "quantized_rows", "recorded",
    "recurrent_copy", "recurrent_open", "repeat", "rms_norm", "rope", "scale", "selector_lattice",
    "selector_walk", "set_threads", "short_conv", "sigmoid_gate", "sigmoid_gate_quantize",
    "softcap", "swiglu", "swiglu_quantize", "threads", "top_k", "upload", "zeros",
]
