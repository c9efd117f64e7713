"""Launches that cut their work by rows need no barrier between them: what they claim is true."""

import ctypes

import numpy as np
import pytest

from cudflash.ops import cpu as ops
from cudflash.ops.cpu import program, runtime
from tests.ops.test_matmul import activations_with_outliers, assert_same_bits, random_rows

ROWS, WIDTH, HEADS = 8, 256, 4
POISON = 0xFF  # NaN in floats


def floats(*shape, seed=0):
    buffer = ops.empty(shape, np.float32)
    buffer[...] = np.random.default_rng((seed, *shape)).standard_normal(shape)
    return buffer


def quantised(layout, activations):
    xq = ops.quantized_rows(ROWS, WIDTH, layout, activations)
    return lambda: ops.quantize_rows(xq, floats(ROWS, WIDTH))


def rope():
    table = floats(32, 32, 2, seed=3)
    ops.rope(floats(ROWS, HEADS, 64), np.arange(ROWS, dtype=np.int32), table, "split_half", 64)


def attention():
    cache_k, cache_v = ops.kv_cache(2, 64, ops.CHUNK, "f16")
    positions = np.arange(ROWS, dtype=np.int32)
    k, v = floats(ROWS, 2, 64, seed=1), floats(ROWS, 2, 64, seed=2)
    ops.kv_write(cache_k, cache_v, k, v, positions)
    ops.attention(floats(ROWS, HEADS, 64), floats(ROWS, HEADS, 64, seed=4), cache_k, cache_v,
                  positions, 0, 0.125, 0.0)


def span_attention(n_rows=32):
    cache_k, cache_v = ops.kv_cache(2, 64, 2 * ops.CHUNK, "f32")
    positions = np.arange(100, 100 + n_rows, dtype=np.int32)
    k, v = floats(n_rows, 2, 64, seed=1), floats(n_rows, 2, 64, seed=2)
    ops.kv_write(cache_k, cache_v, k, v, positions)
    ranges = np.stack([np.maximum(positions - 19, 100), positions + 1], 1).astype(np.int32)
    ops.attention_span(floats(n_rows, HEADS, 64), floats(n_rows, HEADS, 64, seed=4), cache_k,
                       cache_v, None, None, ranges, None, 0.125, 0.0)


def chunked_attention():
    cache_k, cache_v = ops.kv_cache(2, 64, ops.CHUNK, "f16")
    positions = np.arange(16, dtype=np.int32)
    k, v = floats(16, 2, 64, seed=1), floats(16, 2, 64, seed=2)
    ops.kv_write(cache_k, cache_v, k, v, positions)
    ops.attention(floats(16, HEADS, 64), floats(16, HEADS, 64, seed=4), cache_k, cache_v,
                  positions, 0, 0.125, 0.0)


def product(weights, layout, activations, n_rows=32):
    def call():
        w = ops.pack(random_rows(weights, 48, WIDTH), weights, WIDTH)
        x = floats(n_rows, WIDTH)
        if layout != "f32":
            xq = ops.quantized_rows(n_rows, WIDTH, layout, activations)
            ops.quantize_rows(xq, x)
            x = xq
        ops.matmul(floats(n_rows, 48, seed=9), x, w)

    return call


def embed():
    table = ops.embedding_table(random_rows("Q4_K", 16, WIDTH), "Q4_K", WIDTH)
    ops.embed_rows(floats(ROWS, WIDTH), table, np.arange(ROWS, dtype=np.int32), 1.0)


def row(*shape):
    return lambda seed=0: floats(*(shape or (ROWS, WIDTH)), seed=seed)


X = row()
CALLS = {
    "rms_norm": lambda: ops.rms_norm(X(), X(1), floats(WIDTH), 1e-5),
    "rms_norm of heads": lambda: ops.rms_norm(
        floats(ROWS * HEADS, 64), floats(ROWS * HEADS, 64, seed=1), floats(64), 1e-5),
    "l2_norm": lambda: ops.l2_norm(floats(ROWS, HEADS, 64), floats(ROWS, HEADS, 64, seed=1), 1e-5),
    "gated_rms_norm": lambda: ops.gated_rms_norm(X(), X(1), X(2), floats(WIDTH), 1e-5),
    "add": lambda: ops.add(X(), X(1), X(2)),
    "add_bias": lambda: ops.add_bias(X(), X(1), floats(WIDTH)),
    "swiglu": lambda: ops.swiglu(X(), X(1), X(2)),
    "sigmoid_gate": lambda: ops.sigmoid_gate(X(), X(1), X(2)),
    "softcap": lambda: ops.softcap(X(), X(1), 30.0),
    "rope": rope,
    "embed_rows": embed,
    "attention": attention,
    "dynamic_conv": lambda: ops.dynamic_conv(
        X(), X(1), floats(ROWS, 32), floats(2, 2, WIDTH), 0, 32),
    "quantize q256 int8": quantised("q256", "int8"),
    "quantize q256 int8x2": quantised("q256", "int8x2"),
    "quantize q32 int8": quantised("q32", "int8"),
    "quantize q32 int8x2": quantised("q32", "int8x2"),
    "attention_span": span_attention,
    "matmul Q4_K int8": product("Q4_K", "q256", "int8"),
    "matmul Q6_K int8x2": product("Q6_K", "q256", "int8x2"),
    "matmul Q8_0 int8x2": product("Q8_0", "q32", "int8x2"),
    "matmul F32": product("F32", "f32", None),
}  # fmt: skip


def memory(span):
    first, last, _ = span
    return np.ctypeslib.as_array((ctypes.c_ubyte * (last - first)).from_address(first))


def run_share(op, thread, n_threads):
    """One thread's part of a launch, and nothing of the others'."""
    scratch = np.zeros(2, np.int64)
    call = program.NATIVE(op.kernel.address)
    call(scratch.ctypes.data, scratch.ctypes.data + 8, op.args, thread, n_threads)


@pytest.mark.parametrize("n_threads", [1, 2, 4])
@pytest.mark.parametrize("name", CALLS)
def test_a_thread_touches_its_part_of_the_rows_alone(name, n_threads):
    """Catches a kernel that reads or writes rows of another thread, or cuts them elsewhere: the
    barriers that are left out would be missed, now and then and on some machines."""
    with ops.capture() as graph:
        CALLS[name]()
    *first, op = graph._ops
    check_share(first, op, n_threads, in_place=name == "rope")


@pytest.mark.parametrize("n_threads", [1, 2, 4])
def test_a_thread_attends_for_its_part_of_the_rows_alone(n_threads):
    """As above, for the first of two launches."""
    with ops.capture() as graph:
        chunked_attention()
    *first, chunks, merge = graph._ops
    assert chunks.kernel.name.startswith("attention_chunks")
    check_share(first, chunks, n_threads)
    check_share([*first, chunks], merge, n_threads)


def check_share(first, op, n_threads, in_place=False):
    """What a thread of so many writes, and that it reads nothing of other threads' rows."""
    runtime.Graph(first).launch()
    written = [span for span in op.writes if span[2]]
    assert op.rows and op.rows % 4 == 0 and written == list(op.writes)
    inputs = written if in_place else [span for span in op.reads if span[2]]
    given = [np.array(memory(span)) for span in inputs]
    for span in () if in_place else written:
        memory(span)[...] = POISON  # what a launch leaves alone stays so
    runtime.Graph([op]).launch()
    expected = [np.array(memory(span)) for span in written]
    for thread in range(n_threads):
        for span in written:
            memory(span)[...] = POISON
        for span, content in zip(inputs, given):
            memory(span)[...] = POISON
            memory(span)[part(content, thread, n_threads)] = content[part(content, thread, n_threads)]
        run_share(op, thread, n_threads)
        for span, whole in zip(written, expected):
            own, found = part(whole, thread, n_threads), np.array(memory(span))
            np.testing.assert_array_equal(found[own], whole[own])
            found[own] = POISON
            assert (found == POISON).all(), "wrote in rows of another thread"


def part(content, thread, n_threads):
    """The bytes of a buffer that belong to one thread."""
    size = len(content) // n_threads
    return slice(thread * size, (thread + 1) * size)


def layer(n_rows):
    """A recorded piece of a layer: (graph, input, output)."""
    w = ops.pack(random_rows("Q8_0", WIDTH, WIDTH, scale=0.1 / WIDTH), "Q8_0", WIDTH)
    x, h, y, z = (floats(n_rows, WIDTH, seed=i) for i in range(4))
    xq = ops.quantized_rows(n_rows, WIDTH, "q32", "int8")
    norm, dyn, base = floats(WIDTH), floats(n_rows, 32), floats(2, 2, WIDTH)
    with ops.capture() as graph:
        for _ in range(6):
            ops.rms_norm(h, x, norm, 1e-5)
            ops.quantize_rows(xq, h)
            ops.matmul(y, xq, w)
            ops.dynamic_conv(z, y, dyn, base, 0, 32)  # reads the row before
            ops.add(x, x, z)
            ops.dynamic_conv(z, x, dyn, base, 1, 32)
            ops.swiglu(x, z, h)
    return graph, x


@pytest.mark.parametrize("n_rows", [1, 2, 3, 4, 8, 12, 33])
def test_one_recording_gives_the_same_bits_on_any_number_of_threads(n_rows):
    """Catches a program of another number of threads that is used again, and a missing barrier."""
    start, expected = activations_with_outliers(n_rows, WIDTH), None
    ops.set_threads(1)
    graph, x = layer(n_rows)
    try:
        for n_threads in (1, 2, 3, 4, 2, 1):
            ops.set_threads(n_threads)
            for _ in range(10):
                ops.copy_in(x, start)
                graph.launch()
                expected = x.copy() if expected is None else expected
                assert_same_bits(x, expected)
    finally:
        ops.set_threads(2)


def test_rows_that_stay_with_their_thread_need_no_barrier():
    """Catches the return of a barrier per step of the same rows, and one that is missing before a
    step that reads other rows."""
    ops.set_threads(2)
    x, y, dyn, base = floats(8, 256), floats(8, 256), floats(8, 32), floats(2, 2, 256)
    xq = ops.quantized_rows(8, 256, "q256", "int8x2")
    with ops.capture() as graph:
        ops.add(x, x, x)
        ops.rms_norm(y, x, None, 1e-5)
        ops.rms_norm(y.reshape(32, 64), y.reshape(32, 64), None, 1e-5)
        ops.quantize_rows(xq, y)
    assert graph.n_barriers == 0
    with ops.capture() as graph:
        ops.add(x, x, x)
        ops.dynamic_conv(y, x, dyn, base, 0, 32)
    assert graph.n_barriers == 1
    w = ops.pack(random_rows("Q4_K", 256, 256), "Q4_K", 256)
    with ops.capture() as graph:
        ops.quantize_rows(xq, y)
        ops.matmul(y, xq, w)
        ops.add(x, x, y)
    assert graph.n_barriers == 0
    columns = floats(8, 768)[:, 256:512]  # what lies between its rows is not looked at
    with ops.capture() as graph:
        ops.matmul(columns, xq, w)
        ops.add(y[7:8], columns[7:8], columns[7:8])
    assert graph.n_barriers == 1
    wide = ops.pack(random_rows("Q4_K", 4096, 256), "Q4_K", 256)  # too large to be read twice
    with ops.capture() as graph:
        ops.quantize_rows(xq, y)
        ops.matmul(floats(8, 4096), xq, wide)
    assert graph.n_barriers == 1
    with ops.capture() as graph:  # an odd number of rows is cut within a row
        ops.add(x[:7], x[:7], x[:7])
        ops.rms_norm(y[:7], x[:7], None, 1e-5)
    ops.set_threads(3)
    assert graph.n_barriers == 0, "seven small rows are one thread's"
