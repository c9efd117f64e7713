"""Kernel-level benchmarks: the products of the M = 16 shape table, scaled by memory.

The table is that of the release pair (a 30B target and its draft): the products of one verify block
and one draft block of 16 rows. K is never scaled, because the order of the reduction is a function of
it; N is cut so that the weights fit ``CUDFLASH_BENCH_MIB`` (16 by default), which leaves time per
byte as it is.
"""

import os

import numpy as np
import pytest

from scripts.bench_kernels_cpu import matmul_graph, random_raw

MIB = int(os.environ.get("CUDFLASH_BENCH_MIB", "16"))
N_MULTIPLE = 64
SHAPES = (  # name, format, K, N; the eleven shapes of the table
    ("attn_q", "Q4_K", 6656, 4096),
    ("attn_k", "Q4_K", 6656, 256),
    ("attn_v", "Q6_K", 6656, 256),
    ("attn_output", "Q4_K", 4096, 6656),
    ("ffn_gate", "Q4_K", 6656, 19968),
    ("ffn_down_q4", "Q4_K", 19968, 6656),
    ("ffn_down_q6", "Q6_K", 19968, 6656),
    ("lm_head", "Q5_K", 6656, 202048),
    ("draft_k", "Q4_K", 6656, 1024),
    ("draft_v", "Q6_K", 6656, 1024),
    ("draft_fc", "Q4_K", 33280, 6656),
)
ONE_ROW = ("ffn_gate", "ffn_down_q6", "lm_head")  # decode steps, to tell t(16) / t(1)
CASES = [(shape, 16) for shape in SHAPES] + [(s, 1) for s in SHAPES if s[0] in ONE_ROW]


def scaled(n, row_bytes):
    """Rows of the weight matrix that fit the memory, a multiple of 64."""
    fitting = max(N_MULTIPLE, (MIB << 20) // row_bytes // N_MULTIPLE * N_MULTIPLE)
    return min(n, fitting)


@pytest.mark.parametrize("shape, rows", CASES, ids=[f"{s[0]}-M{rows}" for s, rows in CASES])
def bench_product(measured, shape, rows):
    """``rows`` activations times packed weights, quantised beforehand, as a recorded graph."""
    from cudflash.loader.ggml_types import GGMLType, row_bytes

    from cudflash.ops import cpu as ops

    _, kind, k, n = shape
    ops.set_threads(1)
    ggml_type = GGMLType[kind]
    cut = scaled(n, row_bytes(ggml_type, k))
    rng = np.random.default_rng(0)
    matrix = ops.pack(random_raw(ggml_type, cut, k, rng), ggml_type, k)
    graph = matmul_graph([matrix], rows, "int8x2", rng)
    graph.launch()  # compiles
    measured(graph.launch, shape=[k, cut], of_shape=[k, n], rows=rows, format=kind,
             packed_bytes=matrix.nbytes)  # fmt: skip
