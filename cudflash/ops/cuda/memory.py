"""Device memory in segments: few large allocations, arrays side by side in them.

Owns when memory is taken from the driver and given back. A segment is given back when no array
lies in it any more, so unloading a model needs no call; arrays inside it are never freed one by
one, so nothing fragments. The driver hands out memory in pages of 2 MiB: one allocation for each
matrix would waste a page's half on every one.
"""

import weakref

ALIGNMENT = 256  # of every array: what a card reads at once, and more than any vector load needs
PAGE = 2 << 20  # what the driver allocates in
_MARGIN = 1 << 20  # room for the alignment of some thousand arrays


def round_up(n, to):
    """Smallest multiple of ``to`` that is at least ``n``."""
    return -(-n // to) * to


class Segment:
    """One allocation of the driver; freed when nothing refers to it."""

    __slots__ = ("address", "size", "used", "__weakref__")

    def __init__(self, driver, size):
        self.address, self.size, self.used = driver.allocate(size), size, 0
        weakref.finalize(self, driver.free, self.address, size)

    def take(self, n_bytes):
        """Address of ``n_bytes`` fresh bytes, or None when they do not fit."""
        start = round_up(self.used, ALIGNMENT)
        if start + n_bytes > self.size:
            return None
        self.used = start + n_bytes
        return self.address + start


class Heap:
    """Hands out device memory.

    Parameters
    ----------
    driver : Driver
    exact : bool
        Give every array an allocation of its own, so that a memory checker sees its ends.
    """

    def __init__(self, driver, exact=False):
        self._driver, self._exact = driver, exact
        self._open = weakref.WeakSet()
        self._reserved = None

    def reserve(self, n_bytes):
        """Take one segment for the ``n_bytes`` of arrays that are allocated next."""
        if self._exact or n_bytes <= 0:
            return
        self._reserved = Segment(self._driver, round_up(n_bytes + _MARGIN, PAGE))
        self._open.add(self._reserved)

    def allocate(self, n_bytes):
        """Uninitialised memory.

        Returns
        -------
        segment : Segment
            Must be kept as long as the memory is used.
        address : int
        """
        n_bytes = max(1, n_bytes)
        if self._exact:
            segment = Segment(self._driver, n_bytes)
            return segment, segment.take(n_bytes)
        reserved, self._reserved = self._reserved, None  # arrays keep it alive from here on
        if reserved is not None:
            address = reserved.take(n_bytes)
            if address is not None:
                return reserved, address
        for segment in tuple(self._open):
            address = segment.take(n_bytes)
            if address is not None:
                return segment, address
        segment = Segment(self._driver, round_up(n_bytes, PAGE))
        self._open.add(segment)
        return segment, segment.take(n_bytes)
