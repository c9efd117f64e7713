"""Drafted answers in numbers: their distribution, their cost, what a rollback touches."""

from collections import Counter
from math import sqrt
from unittest import mock

import numpy as np
import pytest

import cudflash
from tests.helpers.speculation import GREEDY, draft_engine, plain_answer

SAMPLES = 1500


def chi_square(one, two):
    """Two-sample statistic and its degrees of freedom; ids seen fewer than 20 times are pooled."""
    totals = one + two
    common = [token for token, n in totals.items() if n >= 20]

    def row(counts):
        kept = [counts[token] for token in common]
        return np.array([*kept, sum(counts.values()) - sum(kept)], float)

    a, b = row(one), row(two)
    used = a + b > 0
    a, b = a[used], b[used]
    expected = (a + b) / 2  # as many samples on both sides
    return float((((a - expected) ** 2 + (b - expected) ** 2) / expected).sum()), len(a) - 1


@pytest.mark.parametrize("name", ["v1-qwen3-full", "v2-muse-full"])
def test_first_drafted_tokens_are_distributed_as_plain_ones(name):
    """Catches a biased rule, or a drafter whose q is not what it drew from: chi-square.

    The second and third token of many seeds, ratio against plain. The bound is five standard
    deviations of the statistic, whose mean is the degrees of freedom and whose variance is twice
    that.
    """
    one = draft_engine(name)
    sampling = cudflash.SamplingConfig(temperature=1.0, top_k=6, top_p=1.0, min_p=0.0)
    session, plain_session = one.session(), one.session()
    drafted, plain = [Counter(), Counter()], [Counter(), Counter()]
    proposals = 0
    for seed in range(SAMPLES):
        options = {"max_tokens": 5, "sampling": sampling, "ignore_eos": True}
        result = session.generate(
            [9, 8, 7], seed=seed, accept="ratio", speculative="on", verify_length=3, **options
        ).result()
        proposals += result.stats["speculative"]["drafted"]
        other = plain_session.generate(
            [9, 8, 7], seed=seed + SAMPLES, speculative="off", **options
        ).result()
        for index in range(2):
            drafted[index][result.tokens[index + 1]] += 1
            plain[index][other.tokens[index + 1]] += 1
    assert proposals > 3 * SAMPLES
    for index in range(2):
        statistic, freedom = chi_square(drafted[index], plain[index])
        assert freedom > 5
        assert statistic < freedom + 5 * sqrt(2 * freedom), (index, statistic, freedom)


def test_chi_square_sees_a_biased_sample():
    """Catches a statistic that cannot fail."""
    rng = np.random.default_rng(0)
    fair, other = (Counter(rng.integers(0, 10, SAMPLES).tolist()) for _ in range(2))
    skewed = Counter(rng.choice(10, SAMPLES, p=[0.19, *[0.09] * 9]).tolist())
    statistic, freedom = chi_square(fair, other)
    assert statistic < freedom + 5 * sqrt(2 * freedom)
    statistic, freedom = chi_square(fair, skewed)
    assert statistic > freedom + 5 * sqrt(2 * freedom)


def _bytes(one, layers):
    """Every byte of the caches: one array (slots, bytes of a slot) per buffer."""
    found = []
    for layer in layers:
        for name in ("k", "v", "sink_k", "sink_v"):
            buffer = getattr(layer, name, None)
            if buffer is None:
                continue
            values = one.ops.download(buffer)
            if name.endswith("k"):  # (heads, tiles, D, 16) as (heads, slots, D)
                values = values.swapaxes(2, 3).reshape(len(values), -1, values.shape[2])
            slots = np.ascontiguousarray(values.swapaxes(0, 1)).view(np.uint8)
            found.append(slots.reshape(len(slots), -1).copy())
    return found


@pytest.mark.parametrize("name", ["v1-muse-swa", "v1-qwen3-full"])
def test_commit_and_rollback_write_nothing_and_a_round_only_its_block(name):
    """Catches a commit or rollback that copies caches, and a round that writes beyond its block.

    Counted are bytes that change, over all keys and values of target and draft: none by commit or
    rollback; by a round at most its rows.
    """
    one = draft_engine(name)
    session = one.session()
    runner, drafter = session._runner, session._drafter.drafter.runner
    plain = plain_answer(one, (5, 6, 7), GREEDY, max_tokens=100, ignore_eos=True)
    running = session.generate(
        [5, 6, 7], max_tokens=100, sampling=GREEDY, ignore_eos=True, speculative="on",
        verify_length=7,
    )  # fmt: skip
    for _ in range(30):
        next(running)
    rounds = running._rounds
    n_target = 8  # the anchor and seven drafts
    n_draft = drafter.config.block_size  # the block, over which the evaluated rows are then written

    def changed(before, after):
        """Per buffer: bytes that differ, the slots they lie in, bytes of a slot."""
        told = []
        for a, b in zip(before, after, strict=True):
            differ = a != b
            told.append((int(differ.sum()), np.flatnonzero(differ.any(axis=1)), a.shape[1]))
        return told

    layers = [(runner.cache.layers, n_target), (drafter.context.layers, n_draft)]
    for ends in ("rollback", "commit"):
        first = runner.cache.length
        before = [_bytes(one, part) for part, _ in layers]
        choices = rounds.next(50)
        middle = [_bytes(one, part) for part, _ in layers]
        if ends == "rollback":
            rounds.abandon()
            assert runner.cache.length == first == drafter.length
        else:
            rounds.settle(len(choices))
            assert runner.cache.length == first + len(choices) == drafter.length
        after = [_bytes(one, part) for part, _ in layers]
        for (part, n_rows), *stages in zip(layers, before, middle, after, strict=True):
            assert sum(n for n, *_ in changed(*stages[1:])) == 0
            written = changed(*stages[:2])
            n_bytes = sum(n for n, *_ in written)
            assert n_bytes <= sum(n_rows * row for *_, row in written)
            assert n_bytes or ends == "commit"  # the same round again writes the same bits
            for (_, rows, _), slots in zip(written, stages[0], strict=True):
                block = {(first + i) % len(slots) for i in range(n_rows)}
                assert set(rows.tolist()) <= block
    assert runner.cache.bytes_moved == drafter.context.bytes_moved == 0
    # the committed round was made by hand, so the answer lacks its tokens; it ends well even so
    running.close()
    assert running.result().tokens == plain.tokens[: len(running.result().tokens)]


def test_abandoned_round_leaves_no_trace():
    """Catches state that a dropped round has moved: the generator, penalties, the draft's context."""
    one = draft_engine("v1-qwen3-full")
    sampling = cudflash.SamplingConfig(temperature=0.9, repeat_penalty=1.2, mirostat=0)
    options = {"max_tokens": 60, "sampling": sampling, "seed": 3, "ignore_eos": True,
               "speculative": "on", "accept": "ratio"}  # fmt: skip
    expected = one.generate([5, 6, 7], **options)
    running = one.session().generate([5, 6, 7], **options)
    sound, left = running._rounds.next, [2]

    def twice(room):
        if left[0]:
            left[0] -= 1
            sound(room)
            running._rounds.abandon()
        return sound(room)

    with mock.patch.object(running._rounds, "next", twice):
        assert running.result().tokens == expected.tokens
    assert running.result().speculation["trace"] == expected.speculation["trace"]
