"""Recorded graphs: barriers where launches depend on one another, and nowhere else."""

import threading

import numpy as np
import pytest

from cudflash.errors import UsageError
from cudflash.ops import cpu as ops
from tests.ops.test_matmul import activations_with_outliers, assert_same_bits, random_rows


def chain(width, n_threads):
    """A recorded chain of dependent products; returns (graph, input, output)."""
    ops.set_threads(n_threads)
    w = ops.pack(random_rows("Q8_0", width, width, scale=0.1 / width), "Q8_0", width)
    x, y = ops.zeros((1, width), np.float32), ops.zeros((1, width), np.float32)
    xq = ops.quantized_rows(1, width, "q32", "int8")
    with ops.capture() as graph:
        for source, target in ((x, y), (y, x)) * 6:
            ops.quantize_rows(xq, source)
            ops.matmul(target, xq, w)
    return graph, x, y


@pytest.mark.parametrize("width", [32, 768])
def test_replay_equals_eager_calls_and_is_repeatable(width):
    """Catches a missing barrier: dependent launches that run beside each other give other bits."""
    start = activations_with_outliers(1, width)
    expected = None
    for n_threads in (1, 2, 3):
        graph, x, y = chain(width, n_threads)
        for _ in range(20):
            ops.copy_in(x, start)
            graph.launch()
            if expected is None:
                expected = x.copy()
            assert_same_bits(x, expected)
    ops.set_threads(2)


def test_independent_launches_need_no_barrier():
    """Catches barriers between launches that share only what they read."""
    w = [ops.pack(random_rows("Q8_0", 512, 512, seed), "Q8_0", 512) for seed in range(3)]
    out = [ops.empty((1, 512), np.float32) for _ in w]
    xq = ops.quantized_rows(1, 512, "q32", "int8")
    x = ops.upload(activations_with_outliers(1, 512))
    with ops.capture() as graph:
        ops.quantize_rows(xq, x)
        for target, matrix in zip(out, w):
            ops.matmul(target, xq, matrix)
    assert len(graph) == 4 and graph.n_barriers == 1


def test_small_launches_of_one_thread_need_no_barrier():
    """Catches the return of one barrier per tiny step, which costs as much as the step."""
    x = ops.zeros((1, 64), np.float32)
    xq = ops.quantized_rows(1, 64, "q32", "int8")
    with ops.capture() as graph:
        for _ in range(10):
            ops.add(x, x, x)
            ops.quantize_rows(xq, x)
    assert graph.n_barriers == 0


def test_a_capture_inside_a_capture_is_refused():
    """Catches launches lost in an inner recording."""
    with ops.capture():
        with pytest.raises(UsageError, match="already open"):
            with ops.capture():
                pass


def test_two_threads_may_launch_at_once():
    """Catches programs of two Python threads that mix in the worker pool (numba #10565)."""
    graphs = [chain(256, 2) for _ in range(2)]
    start = activations_with_outliers(1, 256)
    expected = []
    for graph, x, _ in graphs:
        ops.copy_in(x, start)
        graph.launch()
        expected.append(x.copy())
    failures = []

    def work(i):
        graph, x, _ = graphs[i]
        for _ in range(50):
            ops.copy_in(x, start)
            graph.launch()
            if not np.array_equal(x.view(np.int32), expected[i].view(np.int32)):
                failures.append(i)

    workers = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not failures


@pytest.mark.parametrize("n", [0, -1, 1.5, "2"])
def test_a_bad_thread_count_is_refused(n):
    """Catches a silent fall-back to some other number of threads."""
    with pytest.raises(UsageError, match="number of threads"):
        ops.set_threads(n)
