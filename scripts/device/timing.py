"""Times on a device: events around replayed graphs, medians and spreads."""

import statistics
import time


def spread(values):
    """{"median", "low", "high", "n"} of some repeats."""
    return {"median": statistics.median(values), "low": min(values), "high": max(values),
            "n": len(values)}


class Stopwatch:
    """Two events of a driver."""

    def __init__(self, driver):
        self._driver = driver
        self._start, self._end = driver.event(timing=True), driver.event(timing=True)

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        for event in (self._start, self._end):
            self._driver.free_event(event)

    def ms(self, run):
        """Milliseconds of device time that ``run()`` starts."""
        self._driver.record(self._start)
        run()
        self._driver.record(self._end)
        self._driver.wait(self._end)
        return self._driver.elapsed_ms(self._start, self._end)


def graph_ms(ops, record, repeats=7):
    """Device time of what ``record()`` starts, replayed as one graph: spread in milliseconds."""
    with ops.capture() as graph:
        record()
    graph.launch()  # loads kernels
    graph.launch()  # records the graph
    ops.synchronize()
    with Stopwatch(ops.driver) as watch:
        return spread([watch.ms(graph.launch) for _ in range(repeats)])


def wall_ms(run, repeats):
    """Host time of ``run()``, which must wait for its own end: spread in milliseconds."""
    values = []
    for _ in range(repeats):
        started = time.perf_counter()
        run()
        values.append(1e3 * (time.perf_counter() - started))
    return spread(values)


def gbps(n_bytes, ms):
    """1e9 bytes a second."""
    return n_bytes / ms / 1e6
