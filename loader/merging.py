"""Repeated merging of neighbouring symbols: the loop that BPE and SPM share.

Owns the order of merges: always the pair of lowest cost, the leftmost of equals, costs re-read
after each merge. Must not know what a cost means.

Source: same decisions as the bigram queues of llama.cpp src/llama-vocab.cpp (``llm_bigram_bpe``,
``llm_bigram_spm``), commit 0c1e57098bba.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import pairwise

NEVER = float("inf")
# Measured: below this many symbols scanning a list in C beats a heap in Python.
_SCAN_LIMIT = 200


def merge_symbols(symbols: list[bytes], cost: Callable[[bytes, bytes], float]) -> list[bytes]:
    """Merge neighbours until no pair has a finite cost.

    Parameters
    ----------
    symbols : list of bytes
        Consumed: may be changed in place.
    cost : callable (left, right) -> float
        Lower merges first; ``NEVER`` for a pair that does not merge.

    Returns
    -------
    list of bytes
    """
    if len(symbols) > _SCAN_LIMIT:
        return _merge_by_heap(symbols, cost)
    return _merge_by_scan(symbols, cost)


def _merge_by_scan(symbols: list[bytes], cost) -> list[bytes]:
    costs = [cost(left, right) for left, right in pairwise(symbols)]
    while costs:
        lowest = min(costs)
        if lowest == NEVER:
            break
        i = costs.index(lowest)
        symbols[i] += symbols[i + 1]
        del symbols[i + 1], costs[i]
        if i:
            costs[i - 1] = cost(symbols[i - 1], symbols[i])
        if i < len(costs):
            costs[i] = cost(symbols[i], symbols[i + 1])
    return symbols


def _merge_by_heap(symbols: list[bytes], cost) -> list[bytes]:
    """Same result in O(n log n): entries are checked against the live symbols when they come up."""
    n = len(symbols)
    before, after = list(range(-1, n - 1)), list(range(1, n + 1))
    heap = []

    def push(i: int, j: int) -> None:
        price = cost(symbols[i], symbols[j])
        if price != NEVER:
            heapq.heappush(heap, (price, i, j, len(symbols[i]) + len(symbols[j])))

    for i in range(n - 1):
        push(i, i + 1)
    while heap:
        _, i, j, length = heapq.heappop(heap)
        # a merged-away symbol is empty, a grown one changes the length: both make the entry stale
        if not symbols[i] or not symbols[j] or len(symbols[i]) + len(symbols[j]) != length:
            continue
        symbols[i] += symbols[j]
        symbols[j] = b""
        after[i] = follower = after[j]
        if follower < n:
            before[follower] = i
            push(i, follower)
        if before[i] >= 0:
            push(before[i], i)
    return [symbol for symbol in symbols if symbol]
