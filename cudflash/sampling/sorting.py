"""Descending order of logits, ties placed where libstdc++'s unstable algorithms put them.

llama.cpp orders candidates with ``std::partial_sort`` (k <= 128) or, for more, a histogram of 128
buckets whose full buckets go through ``std::sort`` and whose last one through
``std::partial_sort``. Both are unstable but deterministic: where equal logits land is a function of
the input array. That function is reproduced here (heap selection; median-of-three introsort with
threshold 16, heap sort at depth 2*log2(n), final insertion sort).

Unequal values are ordered by NumPy at once. The place of equal ones is worked out only when somebody
asks which id stands there (`Ordering.exact`), and then only along the partitions that
contain the position asked for. Invariant: values at each position are final from the start; only
*which* of several equal candidates holds a position is settled late.

note: for a logit above about 3.3e8 llama.cpp's bucket number overflows an int; on x86 that sends the
logit to the lowest bucket, on ARM to the highest. Here it goes to the highest.

Source: libstdc++ 12 ``bits/stl_algo.h`` and ``bits/stl_heap.h``; bucket rule of llama.cpp
``src/llama-sampler.cpp`` (``llama_token_data_array_partial_sort``). Behaviour reproduced, no code
taken; checked against compiled C++ in the tests.
"""

import numpy as np

HEAP_LIMIT = 128  # llama.cpp: up to this many by std::partial_sort, more by buckets
_BUCKETS = 128
_COLUMNS = 512  # groups whose maxima give a lower bound of the k-th largest value
SELECT_MIN = 4096  # below this a plain sort is as quick
_SORT_THRESHOLD = 16


class Ordering:
    """The first ``k`` of ``values`` in descending order, ties settled on demand.

    Parameters
    ----------
    values : ndarray of shape (n,), float32
        Not NaN. Kept by reference: the caller must not change it afterwards.
    k : int
        1 to n.
    maxima : ndarray or None
        ``column_maxima(values)`` where the caller has it.

    Attributes
    ----------
    order : ndarray of shape (k,), int
        Position in ``values`` of each ordered candidate. Among equal values the entries are
        arbitrary until settled with ``settle``.
    values : ndarray of shape (k,), float32
        The ordered values; final.
    """

    __slots__ = ("_boundary_tie", "_cache", "_layout", "_source", "order", "values")

    def __init__(self, values, k, maxima=None):
        self._source = values
        self.order, self._boundary_tie = _select(values, k, maxima)
        self.values = values[self.order]
        self._cache = {}
        self._layout = None

    def tied(self, start, stop):
        """Positions in [start, stop) whose candidate is one of several with the same value."""
        low, high = max(start - 1, 0), min(stop + 1, len(self.values))
        window = self.values[low:high]
        equal = window[1:] == window[:-1]
        if not equal.any() and not (self._boundary_tie and stop == len(self.values)):
            return np.empty(0, np.int64)
        marks = np.zeros(high - low, bool)
        marks[1:] |= equal
        marks[:-1] |= equal
        if self._boundary_tie and high == len(self.values):
            marks[-1] = True
        return start + np.flatnonzero(marks[start - low : stop - low])

    def exact(self, positions):
        """Position in the source array of the candidates at ``positions`` (ascending)."""
        if len(self.values) <= HEAP_LIMIT:
            if 0 not in self._cache:
                self._cache[0] = heap_select(self._source, len(self.values))
            return self._cache[0][positions]
        members, starts = self._buckets()
        out = np.empty(len(positions), np.int64)
        segment = np.searchsorted(starts, positions, "right") - 1
        for j in np.unique(segment):
            chosen = segment == j
            first, last = starts[j], starts[j + 1]
            source = members[first:last]
            local = positions[chosen] - first
            wanted = len(self.values) - first
            if wanted < last - first or j == len(starts) - 2:
                if j not in self._cache:
                    self._cache[j] = heap_select(self._source[source], min(wanted, last - first))
                out[chosen] = source[self._cache[j][local]]
            else:
                out[chosen] = source[introsort(self._source[source], local)]
        return out

    def _buckets(self):
        """Members of the buckets in use, highest bucket first, each in source order."""
        if self._layout is None:
            number = _bucket_numbers(self._source)
            counts = np.bincount(number, minlength=_BUCKETS)[::-1]
            totals = np.cumsum(counts)
            last = int(np.searchsorted(totals, len(self.values)))
            members = np.flatnonzero(number >= _BUCKETS - 1 - last)
            by_bucket = np.argsort(-number[members], kind="stable")
            starts = np.concatenate([[0], totals[: last + 1]])
            self._layout = members[by_bucket], starts
        return self._layout


def _bucket_numbers(values):
    with np.errstate(over="ignore", invalid="ignore"):
        scaled = values * np.float32(6.4) + np.float32(64)
    return np.clip(scaled, 0, _BUCKETS - 1).astype(np.int16)


def _select(values, k, maxima):
    """Positions of the k largest in descending order, and whether the k-th equals the next one."""
    n = len(values)
    if n < SELECT_MIN or k > HEAP_LIMIT * 2:
        order = np.argsort(-values)
    else:
        maxima = column_maxima(values) if maxima is None else maxima
        lowest = kth_lower_bound(maxima, k)
        if lowest > -np.inf:
            order = np.flatnonzero(values >= lowest)
        else:  # few finite values: the k are those and enough of the equal rest, one more to see
            finite = values > -np.inf
            order = np.flatnonzero(finite)
            missing = max(k + 1 - len(order), 0)
            order = np.concatenate([order, np.flatnonzero(~finite)[:missing]])
        order = order[np.argsort(-values[order])]
    boundary = len(order) > k and values[order[k - 1]] == values[order[k]]
    return order[:k], bool(boundary)


def column_maxima(values):
    """Maxima of 512 disjoint groups that cover ``values``; NaN anywhere shows as NaN."""
    rows = len(values) // _COLUMNS
    maxima = np.maximum.reduce(values[: rows * _COLUMNS].reshape(rows, _COLUMNS), axis=0)
    rest = values[rows * _COLUMNS :]
    if len(rest):
        np.maximum(maxima[: len(rest)], rest, out=maxima[: len(rest)])
    return maxima


def kth_lower_bound(maxima, k):
    """A value that at least k elements reach: the k-th largest of the group maxima."""
    return np.partition(maxima, len(maxima) - k)[len(maxima) - k]


def heap_select(values, k):
    """Positions of ``std::partial_sort(v, v + k, v + n, greater)``, in order.

    Parameters
    ----------
    values : ndarray of shape (n,), float32
    k : int
        1 to n.

    Returns
    -------
    ndarray of shape (k,), int64
    """
    heap_values = values[:k].tolist()
    heap_ids = list(range(k))
    for parent in range((k - 2) // 2, -1, -1):
        _adjust(heap_values, heap_ids, parent, k, heap_values[parent], heap_ids[parent])
    # Only elements above the root (the smallest kept) change the heap, and the root only rises:
    # look for them in growing stretches, against the root as it is at the stretch's start.
    start, length, n = k, 256, len(values)
    while start < n:
        stretch = values[start : start + length]
        for i in (start + np.flatnonzero(stretch > heap_values[0])).tolist():
            value = float(values[i])
            if value > heap_values[0]:
                _adjust(heap_values, heap_ids, 0, k, value, i)
        start += length
        length *= 2
    _sort_heap(heap_values, heap_ids)
    return np.array(heap_ids, np.int64)


def _sort_heap(values, ids):
    for last in range(len(values) - 1, 0, -1):
        value, ident = values[last], ids[last]
        values[last], ids[last] = values[0], ids[0]
        _adjust(values, ids, 0, last, value, ident)


def _adjust(values, ids, hole, n, value, ident):
    """libstdc++ ``__adjust_heap`` on a heap whose root is the smallest, then ``__push_heap``."""
    top = hole
    child = hole
    while child < (n - 1) // 2:
        child = 2 * (child + 1)
        if values[child] > values[child - 1]:
            child -= 1
        values[hole], ids[hole] = values[child], ids[child]
        hole = child
    if n % 2 == 0 and child == (n - 2) // 2:
        child = 2 * (child + 1)
        values[hole], ids[hole] = values[child - 1], ids[child - 1]
        hole = child - 1
    parent = (hole - 1) // 2
    while hole > top and values[parent] > value:
        values[hole], ids[hole] = values[parent], ids[parent]
        hole = parent
        parent = (hole - 1) // 2
    values[hole], ids[hole] = value, ident


def introsort(values, wanted=None):
    """Positions of ``std::sort(v, v + n, greater)``, exact at the places ``wanted``.

    Only partitions that contain a wanted place are followed, so asking for few places of a long
    array costs a few passes over it. Each partition step is the sequential Hoare scan in closed
    form: the t-th stop from the left is swapped with the t-th stop from the right until they cross.

    Parameters
    ----------
    values : ndarray of shape (n,), float32
        Not NaN.
    wanted : ndarray of shape (m,), int, ascending, or None
        Places of the sorted array to settle; None settles all.

    Returns
    -------
    ndarray of shape (m,) or (n,), int64
        Source position of the element at each wanted place.
    """
    n = len(values)
    keys = values.copy()
    ids = np.arange(n)
    places = np.arange(n) if wanted is None else np.asarray(wanted)
    pending = [(0, n, 2 * (n.bit_length() - 1))]
    while pending:
        first, last, depth = pending.pop()
        if not _any_between(places, first, last):
            continue
        if last - first <= _SORT_THRESHOLD:
            # the final insertion sort: stable, and nothing crosses a partition's border
            settled = first + np.argsort(-keys[first:last], kind="stable")
            keys[first:last], ids[first:last] = keys[settled], ids[settled]
        elif depth == 0:
            settled = first + heap_select(keys[first:last], last - first)
            keys[first:last], ids[first:last] = keys[settled], ids[settled]
        else:
            cut = _partition(keys, ids, first, last)
            pending.append((first, cut, depth - 1))
            pending.append((cut, last, depth - 1))
    return ids[places]


def _any_between(places, first, last):
    i = np.searchsorted(places, first)
    return i < len(places) and places[i] < last


def _partition(keys, ids, first, last):
    """``__unguarded_partition_pivot``: median of three to the front, then the Hoare scan."""
    a, b, c = first + 1, first + (last - first) // 2, last - 1
    ka, kb, kc = keys[a], keys[b], keys[c]
    if ka > kb:
        median = b if kb > kc else (c if ka > kc else a)
    else:
        median = a if ka > kc else (c if kb > kc else b)
    swap = [first, median], [median, first]
    keys[swap[0]], ids[swap[0]] = keys[swap[1]], ids[swap[1]]
    pivot = keys[first]
    body = keys[first + 1 : last]
    left = np.flatnonzero(~(body > pivot))  # where the scan from the left stops
    right = np.flatnonzero(~(pivot > body))[::-1]  # where the scan from the right stops
    m = min(len(left), len(right))
    swaps = int(np.count_nonzero(left[:m] < right[:m]))  # left rises, right falls: a prefix
    from_left, from_right = left[:swaps] + first + 1, right[:swaps] + first + 1
    here = np.concatenate([from_left, from_right])
    there = np.concatenate([from_right, from_left])
    keys[here], ids[here] = keys[there], ids[there]
    # After the last swap the left scan stops at its next stop, or at the element just swapped in.
    stops = ([left[swaps]] if swaps < len(left) else []) + ([right[swaps - 1]] if swaps else [])
    return first + 1 + int(min(stops))
