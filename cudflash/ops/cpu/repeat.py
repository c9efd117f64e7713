"""Recording a part of a pass once more, on other buffers.

Layers of one kind make the same launches; only which weights and caches they name differs. Making an
argument block takes as long as running a small launch dozens of times, copying one does not.

Owns what may be copied. Must not know what a launch computes. Invariant: a copy is, word for word,
what recording it would have given; where that is not certain nothing is copied. An argument block
holds whole numbers, addresses and bits of float64. Addresses are told from the others by where
they lie: inside a buffer, thus, from 4 GiB on, above every size and, while they have at most 52 bits,
below the bits of every float that is not subnormal. Where a buffer lies lower (the heap of some builds
of Python), layers are recorded one by one.
"""

from array import array as numbers
from bisect import bisect_left

import numpy as np

from cudflash.ops.cpu.packed import PackedMatrix
from cudflash.ops.cpu.program import Op
from cudflash.ops.cpu.runtime import open_graph, span_of

_LEAST_ADDRESS, _END_OF_ADDRESSES = 1 << 32, 1 << 52


def recorded():
    """Number of launches in the capture that is open in this thread; None without one."""
    graph = open_graph()
    return None if graph is None else len(graph)


def moves(buffers, others):
    """What it takes to name other buffers, one for one; None where that is not certain.

    Parameters
    ----------
    buffers : sequence
        Arrays, packed matrices, numbers, None.
    others : sequence
        What is to stand for them.

    Returns
    -------
    Moves or None
        None where two that stand for each other are not alike in all but their address.
    """
    if len(buffers) != len(others) or not all(map(_alike, buffers, others)):
        return None
    ends, shifts = {}, {}
    for one, other in zip(buffers, others):
        if not isinstance(one, (np.ndarray, PackedMatrix)):
            continue
        (start, end), (target, _) = _place(one), _place(other)
        if start == end:
            continue
        if start < _LEAST_ADDRESS or end > _END_OF_ADDRESSES:
            return None
        if (ends.setdefault(start, end), shifts.setdefault(start, target - start)) != (
                end, target - start):
            return None
    ranges = sorted(ends.items())
    if any(end > start for (_, end), (start, _) in zip(ranges, ranges[1:])):
        return None  # one inside another
    return Moves(ranges, shifts, others)


def repeat(first, last, moves):
    """Record launches ``first`` to ``last - 1`` of the open capture again, on other buffers.

    Parameters
    ----------
    first, last : int
        From :func:`recorded`.
    moves : Moves
        From buffers that these launches may touch and the new ones shall not, all of them.

    Returns
    -------
    bool
        False, with nothing recorded, where a launch touches one of the buffers and more.
    """
    graph = open_graph()
    section = graph.sections.get((first, last))
    if section is None or section.ranges != moves.ranges:
        section = _section(graph.ops(first, last), moves.ranges)
        if section is None:
            return False
        graph.sections[first, last] = section
    section.append_to(graph, moves)
    return True


class Moves:
    """Distances that addresses in some ranges move by.

    Attributes
    ----------
    ranges : list of (int, int)
        First address, and the one past the last, ascending and apart.
    shifts : dict of int to int
        Distance by first address.
    keep : sequence
        What the moved addresses lie in.
    """

    def __init__(self, ranges, shifts, keep):
        self.ranges, self.shifts, self.keep = ranges, shifts, keep


def _alike(one, other):
    """Whether launches differ in nothing but the address, given the other in place of the one."""
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray):
        same = one.shape == other.shape and one.dtype == other.dtype
        return same and one.flags.c_contiguous and other.flags.c_contiguous
    if isinstance(one, PackedMatrix):
        return (one.type, one.n, one.k, one.nbytes) == (other.type, other.n, other.k, other.nbytes)
    return one is other or isinstance(one, int) and one == other


def _place(buffer):
    return buffer.span if isinstance(buffer, PackedMatrix) else span_of(buffer)


class _Section:
    """Launches, and the words in them that move."""

    def __init__(self, ranges):
        self.ranges, self.ops = ranges, []
        self.words, self.moved_words = numbers("q"), []  # argument blocks; (index, range)
        self.spans, self.moved_spans = numbers("q"), []

    def append_to(self, graph, moves):
        """Append a copy in which everything is moved."""
        words, spans, shifts = numbers("q", self.words), numbers("q", self.spans), moves.shifts
        for index, start in self.moved_words:
            words[index] += shifts[start]
        for index, start in self.moved_spans:
            spans[index] += shifts[start]
            spans[index + 1] += shifts[start]
        for op, at, first in self.ops:
            block = words[at : at + len(op.keep[0])]
            graph.append(Op(op.kernel, block.buffer_info()[0], spans[first : first + len(op.spans)],
                            op.n_reads, (block, moves.keep, op.keep), op.touched,
                            op.rows))  # fmt: skip


def _section(ops, ranges):
    """The launches as a _Section; None where one touches a part of a range and more."""
    found = _Section(ranges)
    starts = [start for start, _ in ranges]

    def around(a, b):
        """First address of the range that holds this one, 0 for none, None for a part."""
        index = bisect_left(starts, b) - 1  # the last that begins before the end
        if index < 0 or ranges[index][1] <= a:
            return 0
        start, end = ranges[index]
        return start if start <= a and b <= end else None

    for op in ops:
        words, spans = op.keep[0], op.spans
        for index, word in enumerate(words):
            if start := around(word, word + 1):
                found.moved_words.append((len(found.words) + index, start))
        for index in range(0, len(spans), 3):
            if (start := around(*spans[index : index + 2])) is None:
                return None
            if start:
                found.moved_spans.append((len(found.spans) + index, start))
        found.ops.append((op, len(found.words), len(found.spans)))
        found.words.extend(words)
        found.spans.extend(spans)
    return found
