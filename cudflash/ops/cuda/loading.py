"""Weights on their way to the device: read, copied and re-tiled in chunks that overlap.

While the device copies and re-tiles one chunk, the host reads the next one from the file into
page-locked memory. Two chunks are in flight; the buffers live while a model is loaded.
"""

import contextlib

import numpy as np

from cudflash.ops.cuda.array import DeviceArray

CHUNK_BYTES = 16 << 20
N_BUFFERS = 2
_SMALLEST = 1 << 20


class _Buffer:
    """One chunk's way: page-locked memory, device memory, and two events."""

    def __init__(self, driver, n_bytes):
        self._driver, self.n_bytes, self.busy = driver, n_bytes, False
        self.address = self.array = self.device = None
        self.arrived = self.used = None
        self.address, self.array = driver.pinned(n_bytes)
        self.device = driver.allocate(n_bytes)
        self.arrived = driver.event()  # the copy is done: kernels may read the device's side
        self.used = driver.event()  # the kernels are done: the copy may overwrite it

    def __del__(self):
        self.close()  # also one that was only half made, or left behind by an interrupt

    def close(self):
        """Wait for what is in flight and give everything back. Never raises; idempotent."""
        driver, self._driver = self._driver, None
        if driver is None:
            return
        if self.busy:
            with contextlib.suppress(Exception):
                driver.synchronize()
        self.array = None
        if self.address is not None:
            driver.free_pinned(self.address)
        if self.device is not None:
            driver.free(self.device, self.n_bytes)
        for event in (self.arrived, self.used):
            if event is not None:
                driver.free_event(event)


class Loader:
    """Streams raw rows through two buffers.

    Parameters
    ----------
    driver : Driver
    chunk_bytes : int
        Size of a buffer; one tile's rows must fit, or the buffers grow.
    """

    def __init__(self, driver, chunk_bytes=CHUNK_BYTES):
        self._driver, self._chunk_bytes = driver, chunk_bytes
        self._buffers = []
        self._next = 0

    def stream(self, raw, multiple, consume):
        """Bring rows to the device, some at a time.

        Parameters
        ----------
        raw : ndarray of shape (n, row_bytes), uint8
            Host rows, a memory map as a rule.
        multiple : int
            Rows of every chunk but the last are a multiple of it.
        consume : callable
            ``consume(rows, first)`` launches what reads the chunk: ``rows`` (m, row_bytes) uint8 on
            the device, ``first`` the number of its first row.
        """
        n, row_bytes = raw.shape
        per_chunk = max(1, self._chunk_bytes // (row_bytes * multiple)) * multiple
        for first in range(0, n, per_chunk):
            part = raw[first:first + per_chunk]
            buffer = self._take(min(per_chunk, n) * row_bytes)
            n_bytes = part.shape[0] * row_bytes
            buffer.array[:n_bytes].reshape(part.shape)[...] = part
            driver, buffer.busy = self._driver, True
            driver.upload_async(buffer.device, buffer.address, n_bytes)
            driver.record(buffer.arrived, driver.upload_stream)
            driver.stream_waits(driver.stream, buffer.arrived)
            consume(DeviceArray(buffer, buffer.device, part.shape, np.uint8), first)
            driver.record(buffer.used)

    def close(self):
        """Give the buffers back."""
        buffers, self._buffers = self._buffers, []
        for buffer in buffers:
            buffer.close()

    def _take(self, n_bytes):
        """A buffer of at least ``n_bytes`` that nothing reads any more."""
        if self._buffers and self._buffers[0].n_bytes < n_bytes:
            self.close()
        while len(self._buffers) < N_BUFFERS:
            self._buffers.append(_Buffer(self._driver, max(n_bytes, _SMALLEST)))
        buffer = self._buffers[self._next % N_BUFFERS]
        self._next += 1
        if buffer.busy:
            self._driver.wait(buffer.used)
            buffer.busy = False
        return buffer
