"""Memory accesses of every kernel by what they cost a card: 32-byte sectors, bank conflicts.

Counted in the checking build on shapes whose rows are aligned, so that a ratio is the kernel's and
not the shape's. What may cost more than it must is in a table, with the reason.
"""

import numpy as np
import pytest

from scripts.device import twins
from tests.emulation import device_ops as device
from tests.emulation.cuda import emulated_ops
from tests.emulation.host_module import counting, to_device, unavailable
from tests.emulation.test_op_twins import normal
from tests.ops.test_draft_ops import Rows
from tests.ops.test_matmul import activations_with_outliers, random_rows

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))

LIMIT = 1.05
# (kernel, file of the line, space, direction, bytes) -> (largest cost / least, why)
DEARER = {
    ("matmul_q32", "matmul_q32.cu", "shared", "write", 4):
        (4.0, "partial sums leave the fragments once, after the loop over K"),
    ("matmul_q256", "matmul_q256.cu", "shared", "write", 4):
        (4.0, "partial sums leave the fragments once, after the loop over K"),
    ("quantize_q32", "quantize.cuh", "global", "write", 4):
        (4.0, "codes go to fragment order; a token's words lie 16 or 32 bytes apart"),
    ("quantize_q256", "quantize.cuh", "global", "write", 4):
        (4.0, "codes go to fragment order; a token's words lie 16 or 32 bytes apart"),
    ("quantize_q32", "quantize32.cuh", "global", "write", 4):
        (8.0, "scales lie token by token for the product's lanes; 12 bytes for each 32 values"),
    ("quantize_q32", "quantize.cuh", "global", "read", 16):
        (2.0, "two loads of 16 bytes share their sectors; the second is served from cache"),
    ("quantize_q256", "quantize.cuh", "global", "read", 16):
        (2.0, "two loads of 16 bytes share their sectors; the second is served from cache"),
    ("retile", "types.cuh", "global", "read", 2):
        (16.0, "raw blocks are 2-byte aligned; once, at load time"),
    ("retile_float", "matmul_float.cu", "global", "read", 2): (4.0, "once, at load time"),
    ("retile_float", "matmul_float.cu", "global", "read", 4): (4.0, "once, at load time"),
    ("kv_write", "kv_write.cu", "global", "write", 2):
        (16.0, "16 neighbouring keys lie side by side, one row writes each 16th"),
    ("attention_chunks", "attend.cuh", "shared", "write", 16):
        (2.0, "two stores of 16 bytes a key group, after a loop over the head"),
    ("attention_chunks", "attend.cuh", "global", "write", 16):
        (2.0, "two stores of 16 bytes share their sectors"),
    ("attention_chunks", "kv.cuh", "global", "read", 16):
        (2.0, "f32 only: two loads of 16 bytes share their sectors"),
    ("attention_chunks", "attend.cuh", "global", "read", 16):
        (2.0, "half a warp asks for the same 16 bytes of a query; the next 16 come from cache"),
    ("attention_chunks", "attend.cuh", "shared", "read", 4):
        (2.0, "rows of weights are 16-byte aligned: four groups of pairs meet in two banks"),
    ("attention_merge", "attend.cuh", "global", "read", 4):
        (1.13, "the values of a record begin inside a sector"),
    ("span_merge", "attend.cuh", "global", "read", 4):
        (1.13, "the values of a record begin inside a sector"),
    ("embed_rows", "expand.cuh", "global", "read", 1):
        (2.0, "raw blocks are 2-byte aligned; one row a token"),
    ("attention_prefill", "attention_prefill.cu", "global", "write", 16):
        (2.0, "two stores of 16 bytes share their sectors"),
    ("kv_write", "kv_write.cu", "global", "write", 4):
        (8.0, "16 neighbouring keys lie side by side, one row writes each 16th"),
    ("attention_prefill", "attention_prefill.cu", "shared", "read", 4):
        (2.0, "two factors of a pair for each chunk"),
    ("attention_prefill", "attention_prefill.cu", "shared", "write", 4):
        (4.0, "once a block: 16 bytes a pair"),
}
for _kernel in ("norm_quantize", "swiglu_quantize"):
    for _key in [key for key in DEARER if key[0] in ("quantize_q32", "quantize_q256")]:
        DEARER[(_kernel, *_key[1:])] = DEARER[_key]
DEARER["norm_quantize", "norm_quantize.cu", "global", "write", 16] = (
    2.0, "two stores of 16 bytes share their sectors")
for _kernel in ("span_chunks", "attention_prefill"):
    for _key in [key for key in DEARER if key[0] == "attention_chunks"]:
        DEARER[(_kernel, *_key[1:])] = DEARER[_key]


def ratios(counts):
    """{(kernel, file, space, direction, bytes): largest cost / least of its lines}."""
    found = {}
    for access, (_, cost, least) in counts.items():
        key = (access.kernel, access.line.split(":")[0], access.space, access.direction,
               access.n_bytes)
        found[key] = max(found.get(key, 0.0), cost / least)
    return found


def check(counts):
    """Fail on an access that costs more than it must without a stated reason."""
    assert counts
    bad = {key: ratio for key, ratio in ratios(counts).items()
           if ratio > DEARER.get(key, (LIMIT, ""))[0]}
    assert not bad


CHECK = {"mode": "check"}


@pytest.mark.parametrize("name", sorted(device.TILE_BYTES))
def test_weights_are_read_by_whole_sectors(name):
    """A plane that lanes read with gaps: the card then moves more bytes than the matrix has."""
    k = 512
    raw, x = random_rows(name, 64, k), activations_with_outliers(16, k)
    with counting() as counts:
        w = device.retile(raw, name, k, **CHECK)
        device.matmul(x, w, "int8x2", 2, **CHECK)
    check(counts)
    loads = {a: n for a, n in counts.items()
             if a.line.startswith("formats") and a.direction == "read"}
    assert all(cost == least for _, cost, least in loads.values())
    wide = sum(cost for a, (_, cost, _) in loads.items() if a.n_bytes == 16)
    total = sum(cost for _, cost, _ in loads.values())
    assert wide >= 0.7 * total  # the rest is scales and fifth bits


@pytest.mark.parametrize("kv_type", ["f16", "f32"])
def test_attention_reads_the_cache_by_whole_sectors(kv_type):
    """Keys or values read with gaps, weights of all pairs in one bank."""
    rows = Rows(384, 2, 64)
    cache, sink = rows.ring(128, 384, 384, kv_type), rows.ring(0, 128, 128, kv_type)
    cache, sink = ([to_device(c) for c in pair] for pair in (cache, sink))
    q, positions = normal((8, 8, 64), 1), np.arange(376, 384, dtype=np.int32)
    with counting() as counts:
        device.attention(q, *cache, positions, 200, 0.2, 0.0, **CHECK)
        device.attention_prefill(q, *cache, positions, 200, 0.2, 0.0, **CHECK)
        device.attention_span(q, cache, sink, [(256, 384)] * 8, 128, 0.2, 0.0, **CHECK)
        device.kv_write(*cache, normal((8, 2, 64)), normal((8, 2, 64)), positions, **CHECK)
    check(counts)
    loads = {key: ratio for key, ratio in ratios(counts).items() if key[1] == "kv.cuh"}
    assert len(loads) == 3 and max(loads.values()) <= (1.0 if kv_type == "f16" else 2.0)


def test_other_kernels_read_and_write_whole_sectors():
    """A row read with a stride, a reduction through one bank."""
    x, table = normal((2, 4, 64)), normal((64, 32, 2), 1)
    rows, weight = normal((4, 1024), 2), normal(1024, 3)
    with counting() as counts:
        device.rope(x, np.array([3, 5], np.int32), table, "split_half", 64, **CHECK)
        device.rms_norm(rows, weight, 1e-6, **CHECK)
        device.rms_norm(rows.reshape(16, 256), weight[:256], 1e-6, **CHECK)
        device.elementwise("swiglu", rows, rows, **CHECK)
        device.argmax(rows, **CHECK)
        device.check_finite(rows, **CHECK)
        device.top_k(rows, 8, **CHECK)
        device.dynamic_conv(rows, normal((4, 64)), normal((2, 2, 1024)), 0, 64, **CHECK)
        device.selector_lattice(normal((2, 8, 64)), normal((2, 8, 64)), normal((2, 64)),
                                normal((2, 8)), **CHECK)
        device.matmul_float(rows, normal((32, 1024)).view(np.uint8), "F32", 4, **CHECK)
        device.embed_rows(random_rows("Q8_0", 3, 256), "Q8_0", 256, np.array([2], np.int32), 1.0,
                          **CHECK)
    check(counts)


def test_kernels_of_a_delta_net_read_and_write_whole_sectors():
    """A state, tape or window read with a stride."""
    ops, _ = emulated_ops(mode="check")
    with counting() as counts:
        twins.delta_state(ops, d_k=32)
        for d in (128, 512):
            x, weight = ops.upload(normal((3, 4 * d)).reshape(3, 4, d)), ops.upload(normal(d, 1))
            ops.l2_norm(x, x, 1e-6)
            flat = x.reshape(12, d)
            ops.gated_rms_norm(flat, flat, ops.upload(normal((12, d), 2)), weight, 1e-6)
        gates = [ops.upload(normal((3, 64), seed)) for seed in (1, 2)]
        ops.delta_gates(*gates, *gates, *(ops.upload(normal(64, seed)) for seed in (3, 4)))
    check(counts)
    assert {access.kernel for access in counts} == {
        "recurrent_open", "short_conv", "delta_rule", "delta_gates", "l2_norm_short", "l2_norm_long",
        "gated_rms_norm_short", "gated_rms_norm_long"}


def test_fused_quantisation_costs_no_more_than_alone():
    """A norm or a gate that reads its rows with gaps because lanes are those of the quantisation."""
    ops, _ = emulated_ops(mode="check")
    with counting() as counts:
        for layout in ("q32", "q256"):
            xq, h = ops.quantized_rows(8, 1024, layout, "int8x2"), ops.zeros((8, 1024), np.float32)
            x, weight = ops.upload(normal((8, 1024))), ops.upload(normal(1024, 1))
            ops.norm_quantize(xq, h, x, weight, 1e-6, True)
            ops.swiglu_quantize(xq, h, x, x)
    check(counts)


def test_every_exception_is_needed():
    """A limit that was kept after its kernel became better: it would hide the next fault."""
    raw, x = random_rows("Q4_K", 32, 256), activations_with_outliers(8, 256)
    with counting() as counts:
        device.matmul(x, device.retile(raw, "Q4_K", 256, **CHECK), "int8x2", 1, **CHECK)
    found = ratios(counts)
    for key in DEARER:
        if key[0] in ("matmul_q256", "quantize_q256", "retile"):
            assert found[key] > LIMIT, key
