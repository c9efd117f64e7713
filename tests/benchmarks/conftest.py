"""The fixture that times beside a calibration loop, and what a run says about its machine.

A machine that others use, or a slower one, moves every time. So each timed call comes right after a
fixed piece of NumPy work that has nothing to do with this program, and what is stored and compared is
the ratio of the two. Both run on one thread and are timed in processor time, not on the wall clock:
waiting for a processor that others have taken is no time of ours. What is left of others (caches,
bandwidth) slows the loop as well. The loop leaves caches cold, so a time here is longer than the
same step in a running answer; only changes of it mean something.
"""

import statistics
import time

import numpy as np
import pytest

TIMER = time.process_time
ROUNDS, WARM_UP = 21, 2
BEAT_FLOATS, BEAT_PASSES = 1 << 16, 48  # arithmetic in the second-level cache
BEAT_BYTES = 4 << 20  # and one pass over memory


class Beat:
    """The calibration loop: about two milliseconds of arithmetic and copying, always the same."""

    def __init__(self):
        self._a = np.linspace(0, 1, BEAT_FLOATS, dtype=np.float32)
        self._b, self._c = self._a[::-1].copy(), np.empty_like(self._a)
        self._from = np.ones(BEAT_BYTES, np.uint8)
        self._to = np.empty_like(self._from)

    def seconds(self):
        """Run it once."""
        started = TIMER()
        for _ in range(BEAT_PASSES):
            np.multiply(self._a, self._b, out=self._c)
            np.add(self._c, self._a, out=self._c)
        np.copyto(self._to, self._from)
        return TIMER() - started


@pytest.fixture(scope="session")
def beat():
    """One calibration loop for all benchmarks."""
    return Beat()


@pytest.fixture
def measured(benchmark, beat):
    """``measured(function, **facts)``: time a function in turns with the calibration loop."""

    def run(function, **facts):
        beats = []

        def setup():
            beats.append(beat.seconds())

        benchmark.pedantic(
            function, setup=setup, rounds=ROUNDS, iterations=1, warmup_rounds=WARM_UP
        )
        if benchmark.stats is None:  # --benchmark-disable
            return
        times = benchmark.stats.stats.data
        beats = beats[-len(times) :]
        benchmark.extra_info.update(
            facts, beat_s=statistics.median(beats),
            ratio=statistics.median(t / b for t, b in zip(times, beats)),
            ratio_low=min(times) / min(beats),
        )  # fmt: skip

    return run


def pytest_collection_modifyitems(items):
    """Time all benchmarks in processor time."""
    for item in items:
        if "benchmark" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.benchmark(timer=TIMER))


@pytest.hookimpl(optionalhook=True)
def pytest_benchmark_update_machine_info(config, machine_info):
    """Keep what makes two runs comparable, and no name of a host."""
    from cudflash.bench.machine import facts
    from cudflash.backend import planner

    machine_info.clear()
    machine_info.update(facts(), kernel_path=planner("cpu").kernel_path(), threads=1)


@pytest.hookimpl(optionalhook=True)
def pytest_benchmark_update_commit_info(config, commit_info):
    """The commit is in the machine's facts; the rest tells of a person's checkout."""
    commit_info.clear()
