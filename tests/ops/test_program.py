"""Programs made from launches: where barriers are, and launches that are copied to other buffers."""

import weakref
from array import array

import numpy as np
import pytest

from cudflash.ops import cpu as ops
from cudflash.ops.cpu import program
from tests.ops.test_matmul import random_rows


copies = pytest.mark.skipif(
    ops.zeros(64, np.float32).ctypes.data < 1 << 32,
    reason="small buffers lie below 4 GiB here, so that nothing is copied",
)


class Kernel:
    address = 77


def overlap(spans, others):
    return any(
        a < d and c < b and not (by_rows and also and (a, b) == (c, d))
        for a, b, by_rows in spans for c, d, also in others
    )  # fmt: skip


def slow_program(launches, n_threads):
    """The rule of ``build_program`` once more, as plainly as it can be said."""
    since, found = [], []
    for op in launches:
        by_rows = op.rows > 0 and op.rows % n_threads == 0
        serial = op.touched <= (
            program._SERIAL_BYTES_BY_ROWS if by_rows else program._SERIAL_BYTES
        )
        reads, writes = (
            [(a, b, cut and by_rows and not serial) for a, b, cut in spans]
            for spans in (op.reads, op.writes)
        )
        barrier = any(
            not (serial and other_serial)
            and (overlap(reads, w) or overlap(writes, r) or overlap(writes, w))
            for other_serial, r, w in since
        )
        if barrier:
            since = []
        since.append((serial, reads, writes))
        found.append([Kernel.address, op.args, barrier, serial])
    return np.array(found)


def random_launches(rng, n):
    """Launches on few ranges, many of them the same, some inside others, sizes around the limits."""
    ranges = [(a, a + int(rng.integers(1, 40))) for a in rng.integers(0, 300, 12).tolist()]
    launches = []
    for index in range(n):
        chosen = rng.choice(len(ranges), int(rng.integers(1, 6)))
        cut = rng.random(len(chosen)) < 0.6
        spans = array("q", [v for i, c in zip(chosen, cut) for v in (*ranges[i], int(c))])
        limit = rng.choice([program._SERIAL_BYTES, program._SERIAL_BYTES_BY_ROWS])
        touched = int(limit) + int(rng.integers(-1, 2))
        rows = int(rng.choice([0, 1, 2, 3, 4, 6]))
        n_reads = int(rng.integers(0, len(chosen) + 1))
        launches.append(program.Op(Kernel, 1000 + index, spans, n_reads, None, touched, rows))
    return launches


@pytest.mark.parametrize("n_threads", [2, 3, 4])
@pytest.mark.parametrize("seed", range(60))
def test_barriers_are_where_the_plain_rule_wants_them(seed, n_threads):
    """A barrier that is missing: threads that run dependent launches at once, now and then."""
    launches = random_launches(np.random.default_rng(seed), 40)
    found = program.build_program(launches, n_threads)
    np.testing.assert_array_equal(found, slow_program(launches, n_threads))


def test_one_thread_and_one_launch_wait_for_nobody():
    """A record that says serial where all threads have to run it, or asks for a barrier."""
    launches = random_launches(np.random.default_rng(1), 30)
    alone = program.build_program(launches, 1)
    assert not alone[:, 2].any() and alone[:, 1].tolist() == [op.args for op in launches]
    for op in launches:
        (record,) = program.build_program([op], 4).tolist()
        np.testing.assert_array_equal([record], slow_program([op], 4))


def buffers(seed, type_="Q4_K", k=256):
    rng = np.random.default_rng(seed)
    w = ops.pack(random_rows(type_, 64, k, seed), type_, k)
    return [w, ops.upload(rng.standard_normal(k, dtype=np.float32)), None, 7]


def record_twice(one, other, x, outs):
    """A norm and a product, and the same again as a copy; whether it was copied, and the graph."""
    h = ops.empty(x.shape, np.float32)
    xq = ops.quantized_rows(len(x), x.shape[1], one[0].layout, "int8")

    def steps(w, weight, out):
        ops.rms_norm(h, x, weight, 1e-5)
        ops.quantize_rows(xq, h)
        ops.matmul(out, xq, w)

    with ops.capture() as graph:
        assert ops.recorded() == 0
        steps(*one[:2], outs[0])
        moves = ops.moves([*one, outs[0]], [*other, outs[1]])
        copied = moves is not None and ops.repeat(0, ops.recorded(), moves)
        if not copied:
            steps(*other[:2], outs[1])
    return copied, graph


@copies
def test_a_copy_computes_with_the_other_buffers():
    """A copy that still reads the first weights, or writes over the first result."""
    x = ops.upload(np.random.default_rng(3).standard_normal((3, 256), dtype=np.float32))
    one, other = buffers(1), buffers(2)
    outs = [ops.zeros((3, 64), np.float32) for _ in range(4)]
    copied, graph = record_twice(one, other, x, outs[:2])
    assert copied
    graph.launch()
    for parts, out in ((one, outs[2]), (other, outs[3])):
        record_twice(parts, parts, x, [out, out])[1].launch()
    np.testing.assert_array_equal(outs[0].view(np.int32), outs[2].view(np.int32))
    np.testing.assert_array_equal(outs[1].view(np.int32), outs[3].view(np.int32))
    assert not np.array_equal(outs[0], outs[1])


@copies
def test_a_copy_keeps_its_buffers_alive():
    """A copy that points at memory which somebody else uses by now."""
    x = ops.zeros((1, 256), np.float32)
    one, other = buffers(1), buffers(2)
    outs = [ops.zeros((1, 64), np.float32) for _ in range(2)]
    kept = weakref.ref(other[1].base if other[1].base is not None else other[1])
    copied, graph = record_twice(one, other, x, outs)
    del other
    assert copied and kept() is not None
    del graph
    assert kept() is None


@copies
@pytest.mark.parametrize("change", ["type", "size", "shape", "dtype", "missing", "number", "count"])
def test_what_is_not_alike_is_not_copied(change):
    """Launches for another format or size on the buffers of this one."""
    one, other = buffers(1), buffers(2)
    if change == "type":
        other[0] = buffers(2, "Q6_K")[0]
    elif change == "size":
        other[0] = ops.pack(random_rows("Q4_K", 32, 256, 2), "Q4_K", 256)
    elif change == "shape":
        other[1] = ops.zeros((2, 128), np.float32)
    elif change == "dtype":
        other[1] = other[1].view(np.int32)
    elif change == "missing":
        other[2] = other[1]
    elif change == "number":
        other[3] = 8
    else:
        other.pop()
    assert ops.moves(one, buffers(2)) is not None
    assert ops.moves(one, other) is None


@copies
def test_ranges_that_no_address_can_be_told_by_are_not_copied():
    """A buffer that is two things in one layer and one in the other; one inside another; one with
    gaps, which reaches further than its bytes."""
    a, b, c, d = (ops.zeros(64, np.float32) for _ in range(4))
    assert ops.moves([a, a], [b, b]) is not None
    assert ops.moves([a, None, 7, "f16", 0.5, True], [b, None, 7, "f16", 0.5, True]) is not None
    assert ops.moves([a, a], [b, c]) is None
    assert ops.moves([a, a[8:16]], [b, c[8:16]]) is None
    assert ops.moves([a, b], [b, a]) is not None
    wide = ops.zeros((4, 64), np.float32)
    assert ops.moves([wide[:, :8]], [wide[:, 8:16]]) is None
    # a launch that touches a part of what moves, and more
    both = ops.zeros(128, np.float32)
    with ops.capture():
        ops.copy(both.reshape(1, -1), both.reshape(1, -1))
        before = ops.recorded()
        moves = ops.moves([both[:64]], [d])
        assert not ops.repeat(0, before, moves) and ops.recorded() == before
        assert ops.repeat(0, before, ops.moves([a], [b]))  # not touched at all: as it is
    assert ops.recorded() is None
