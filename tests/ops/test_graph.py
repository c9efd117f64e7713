"""Recorded graphs: barriers where launches depend on one another, and nowhere else."""

import linecache
import os
import sys
import threading

import numpy as np
import pytest

from cudflash.errors import DeviceError, UsageError
from cudflash.ops import cpu as ops
from cudflash.ops.cpu import runtime
from tests.helpers.ops_checks import poisoned
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


@pytest.mark.parametrize("n", [0, -1, 1.5, "2", True, 10**5])
def test_a_bad_thread_count_is_refused(n):
    """Catches a silent fall-back to some other number, and a pool the system cannot give."""
    ops.set_threads(2)
    with pytest.raises(UsageError, match="number of threads"):
        ops.set_threads(n)
    assert ops.threads() == 2


def test_threads_the_system_refuses_leave_the_former_pool(monkeypatch):
    """Catches a pool that is closed before its successor exists: every later launch would hang."""
    graph, x, _ = chain(256, 2)
    start = activations_with_outliers(1, 256)
    ops.copy_in(x, start)
    graph.launch()
    expected = x.copy()

    class Refused(threading.Thread):
        def start(self):
            raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(runtime.threading, "Thread", Refused)
        with pytest.raises(DeviceError, match="could not be started"):
            ops.set_threads(5)
    ops.copy_in(x, start)
    graph.launch()
    assert ops.threads() == 2
    assert_same_bits(x, expected)


def interrupted_at(n):
    """Trace function that raises KeyboardInterrupt at the n-th line run in runtime.py.

    Lines of ``with`` statements are left out: a trace function can raise between the body and the
    release of a lock, where the interpreter itself looks at no signal.
    """
    seen = [0]

    def trace(frame, event, arg):
        if frame.f_code.co_filename != runtime.__file__:
            return None
        text = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
        if event == "line" and not text.lstrip().startswith("with "):
            seen[0] += 1
            if seen[0] == n:
                raise KeyboardInterrupt
        return trace

    return trace


def test_an_interrupt_at_any_line_of_a_launch_changes_no_later_result():
    """Catches a Ctrl-C between starting and joining the workers: one of them stays behind in the
    old program and meets the next one at its barriers (wrong bits, a hang, or a crash)."""
    graph, x, _ = chain(768, 3)
    start = activations_with_outliers(1, 768)
    ops.copy_in(x, start)
    graph.launch()
    expected = x.copy()
    interrupted = 0
    for n in range(1, 60):
        ops.copy_in(x, start)
        sys.settrace(interrupted_at(n))
        try:
            graph.launch()
        except KeyboardInterrupt:
            interrupted += 1
        finally:
            sys.settrace(None)
        for _ in range(3):
            ops.copy_in(x, start)
            graph.launch()
            assert_same_bits(x, expected)
    assert interrupted > 5, "the launch has hardly any lines left to be interrupted at"
    ops.set_threads(2)


def test_changing_the_threads_while_another_thread_launches():
    """Catches a launch on a pool whose workers have been sent home: it would wait for ever."""
    graph, x, _ = chain(256, 2)
    start = activations_with_outliers(1, 256)
    ops.copy_in(x, start)
    graph.launch()
    expected = x.copy()
    done, failures = threading.Event(), []

    def launch():
        for _ in range(200):
            ops.copy_in(x, start)
            graph.launch()
            if not np.array_equal(x.view(np.int32), expected.view(np.int32)):
                failures.append(1)
        done.set()

    worker = threading.Thread(target=launch, daemon=True)
    worker.start()
    count = 0
    while not done.wait(0.001) and count < 2000:
        count += 1
        ops.set_threads(1 + count % 3)
    assert done.wait(60), "the launching thread hangs"
    assert not failures
    ops.set_threads(2)


def test_an_abandoned_capture_does_not_stay_open():
    """Catches a thread that can record nothing more: an interrupt may skip the end of a with."""
    abandoned = ops.capture()
    abandoned.__enter__()
    with pytest.raises(UsageError, match="already open"), ops.capture():
        pass
    del abandoned
    out = poisoned((1, 16))
    ops.copy(out, np.ones((1, 16), np.float32))
    assert (out == 1).all(), "recorded into a graph that nobody holds"
    with ops.capture() as graph:
        ops.copy(out, np.zeros((1, 16), np.float32))
    assert len(graph) == 1


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity") or runtime.usable_cores() < 2,
                    reason="needs two cores and a system that says on which one a thread runs")
def test_workers_are_kept_off_the_core_of_their_caller(monkeypatch):
    """Two threads on one core: for tens of milliseconds every barrier costs a time slice."""
    allowed = os.sched_getaffinity(0)
    assert runtime._current_core() in allowed
    pool = runtime.ThreadPool(2)
    worker = pool._workers[0].native_id
    try:
        for core in [*sorted(allowed)[:2], -1]:
            monkeypatch.setattr(runtime, "_current_core", lambda core=core: core)
            before = os.sched_getaffinity(worker)
            assert pool.run(program=0, n_records=0)
            expected = allowed - {core} if core in allowed else before
            assert os.sched_getaffinity(worker) == expected
    finally:
        pool.close()
    assert os.sched_getaffinity(0) == allowed


def test_a_system_that_moves_no_threads_runs_programs_all_the_same(monkeypatch):
    """Catches a launch that fails for what would only have made it faster."""
    def refused(*args):
        raise PermissionError("not here")

    monkeypatch.setattr(os, "sched_setaffinity", refused, raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1}, raising=False)
    monkeypatch.setattr(runtime, "_current_core", lambda: 1)
    pool = runtime.ThreadPool(2)
    try:
        assert pool.run(program=0, n_records=0)
    finally:
        pool.close()
