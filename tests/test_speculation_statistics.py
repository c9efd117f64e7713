"""Drafted answers in numbers: their distribution, their cost, what a rollback touches."""

import time
from collections import Counter
from math import sqrt
from unittest import mock

import numpy as np
import pytest

import cudflash
from cudflash.drafters import AlwaysWrong, Oracle
from tests.helpers.real_models import require_model
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


@pytest.mark.parametrize("name", ["v1-muse-swa", "v1-qwen3-full"])
def test_commit_and_rollback_move_no_byte_and_write_only_the_block(name):
    """Catches a rollback that copies caches: rows outside the block keep every bit."""
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

    def snapshot():
        layers = [*runner.cache.layers, *drafter.context.layers]
        return [one.ops.download(layer.v).copy() for layer in layers]

    first = runner.cache.length
    before = snapshot()
    rounds.next(50)
    rounds.abandon()
    assert runner.cache.length == first == drafter.length
    layers = [*runner.cache.layers, *drafter.context.layers]
    for layer, old, new in zip(layers, before, snapshot()):
        touched = np.flatnonzero((old.view(np.uint8) != new.view(np.uint8)).reshape(
            *new.shape[:2], -1).any(axis=(0, 2)))  # fmt: skip
        block = {p % layer.capacity for p in range(first, first + drafter.config.block_size)}
        assert set(touched.tolist()) <= block
    assert runner.cache.bytes_moved == drafter.context.bytes_moved == 0
    assert running.result().tokens == plain.tokens


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


@pytest.mark.models
def test_rounds_cost_what_their_passes_cost():
    """Catches a loop whose Python outweighs drafting: under 3 % of a round on a small real model.

    The least of several rounds, because other programs run as well. And eight rows cost at most
    two and a half steps: that is what makes drafting pay.
    """
    one = cudflash.load(require_model("smollm2"), device="cpu", n_ctx=512)
    prompt = "The history of the city begins with"
    options = {"max_tokens": 40, "sampling": GREEDY, "ignore_eos": True}
    plain = one.generate(prompt, speculative="off", **options)
    session = one.session()
    running = session.generate(
        prompt, drafter=AlwaysWrong(plain.tokens), speculative="on", verify_length=7, **options
    )
    step, passes = session._runner.step, []

    def timed(*args, **kwargs):
        started = time.perf_counter()
        step(*args, **kwargs)
        passes.append(time.perf_counter() - started)

    shares = []
    with mock.patch.object(session._runner, "step", timed):
        started = time.perf_counter()
        for event in running:
            if type(event).__name__ == "RoundFinished":
                now = time.perf_counter()
                shares.append((now - started - passes[-1]) / passes[-1])
                started = now
    assert running.result().tokens == plain.tokens
    assert min(shares[2:]) < 0.03
    assert min(passes[3:30]) < 2.5e-3 * one.plain_step.ms
    oracle = one.generate(
        prompt, drafter=Oracle(plain.tokens), speculative="on", verify_length=7, **options
    )
    assert oracle.tokens == plain.tokens
    assert oracle.stats["speculative"]["estimated_speedup"] > 1.5
