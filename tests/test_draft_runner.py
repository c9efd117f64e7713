"""The draft runner: equal bits however rows came in, transactions, memory, sampled walks."""

from types import SimpleNamespace

import numpy as np
import pytest
from cudflash.loader.ggml_types import GGMLType

from cudflash.errors import NumericsError
from cudflash.model.draft_buffers import CONTEXT_ROWS, draft_memory
from cudflash.model.draft_runner import DraftRunner
from cudflash.model.draft_walk import sample_walk
from cudflash.ops import cpu as ops
from tests.helpers.draft_models import (
    N_CTX,
    bound_draft,
    load_model,
    loaded,
    make_runner,
    tap_rows,
)
from tests.helpers.draft_vectors import draft_case, target_tables
from tests.reference.draft import DraftReference

# drafts by kind of context: all sliding with a sink that ends inside a chunk, and without one;
# sliding and full layers mixed; full only
SETTINGS = {
    "sliding, sink": ("v1-muse-swa", {"sink": 11}),
    "sliding, no sink": ("v1-muse-swa", {"sink": 0}),
    "mixed, sink": ("v2-qwen35-mixed", {"sink": 5}),
    "full": ("v2-muse-full", {"sink": 0}),
}
LONG = 280  # rows; every ring of 128 slots has wrapped twice


@pytest.fixture(autouse=True)
def two_threads():
    ops.set_threads(2)


@pytest.fixture(params=SETTINGS)
def draft(request):
    """Make runners of one draft: (make, rows)."""
    name, settings = SETTINGS[request.param]
    return (lambda: poisoned(make_runner(name, **settings))), long_rows(name)


def long_rows(name):
    """More target rows than any ring holds, no two alike."""
    rows = np.concatenate([tap_rows(name)] * 8)[:N_CTX]
    tilt = np.linspace(1, 1.5, len(rows), dtype=np.float32)
    return ops.upload(rows * tilt[:, None, None])


def poisoned(runner):
    """The runner, every slot of its context NaN."""
    for layer in runner.context.layers:
        for cache in (layer.k, layer.v, layer.sink_k, layer.sink_v):
            if cache is not None:
                cache[...] = np.nan
    return runner


def feed(runner, rows, sizes):
    """Observe rows in parts of the given sizes."""
    for n in sizes:
        runner.observe(rows[runner.length : runner.length + n], n)
    return runner


def state(runner, anchor=7):
    """All that a block gives: bits of hidden rows and logits, tokens, and the context's digest."""
    block = runner.config.block_size
    outcome = runner.propose(anchor, block - 1)
    return (
        outcome, runner.logits().tobytes(), runner.hidden(block).tobytes(), runner.length,
        runner.digest(),
    )  # fmt: skip


def cold(make, rows, length):
    """State of a fresh conversation given the first rows in the largest parts."""
    return state(feed(make(), rows, [length]))


@pytest.mark.parametrize("sizes", [[1] * LONG, [3, 5] * 35, [97, 83, 100]], ids=["1", "3+5", "100"])
def test_bits_do_not_depend_on_how_rows_came_in(draft, sizes):
    """Catches sums that depend on a chunk, and rows placed by their order in a call."""
    make, rows = draft
    assert state(feed(make(), rows, sizes)) == cold(make, rows, LONG)


def test_rounds_with_rejected_rows_equal_a_cold_start(draft):
    """Catches rejected or block rows that stay visible, before and after the ring wraps."""
    make, rows = draft
    runner, generator = feed(make(), rows, [9]), np.random.default_rng(3)
    wrong = ops.upload(-ops.download(rows))
    checks = {40, 131, 200, LONG}
    while runner.length < LONG:
        runner.propose(int(generator.integers(300)), int(generator.integers(1, 7)))
        kept = int(min(generator.integers(1, 9), LONG - runner.length))
        block = np.concatenate([rows[runner.length : runner.length + kept], wrong[: 8 - kept]])
        runner.write(block, len(block))
        if generator.integers(4) == 0:
            runner.rollback()
            continue
        runner.commit(kept)
        passed = {c for c in checks if c <= runner.length}
        if passed:
            checks -= passed
            assert state(runner) == cold(make, rows, runner.length)


@pytest.mark.parametrize("length", [0, 3, 11, 40, 70])
def test_rewound_and_redone_equals_cold(draft, length):
    """Catches a rewind that keeps rows of the text it left."""
    make, rows = draft
    other = ops.upload(-ops.download(rows))
    runner = feed(make(), rows, [length])
    runner.observe(other[length : length + 20], 20)
    runner.propose(5, 1)
    assert runner.keepable(length) == length and runner.rewind(length) == length
    feed(runner, rows, [90 - length])
    assert state(runner) == cold(make, rows, 90)


def test_rewind_past_the_ring_says_what_is_left(draft):
    """Catches a context that goes on with rows its ring has lost."""
    make, rows = draft
    runner = feed(make(), rows, [LONG])
    runner.propose(5, 1)
    windowed = runner.config.window is not None
    # rings of 128 slots that end at 280 and a block hold 160 on at best: a window before 150 is gone
    kept = runner.rewind(150)
    assert kept == (runner.context.sink if windowed else 150)
    feed(runner, rows, [200 - kept])
    assert state(runner) == cold(make, rows, 200)
    assert runner.rewind(199) == 199
    feed(runner, rows, [1])
    assert state(runner) == cold(make, rows, 200)


def test_prompt_rows_that_no_block_sees_may_be_left_out(draft):
    """Catches a gap that changes a bit, and one where a full layer needs every row."""
    make, rows = draft
    runner, written = make(), []
    runner._write_rows = lambda flat, write=runner._write_rows: (written.append(len(flat)),
                                                                 write(flat))
    for start in range(0, LONG, 50):
        n = min(50, LONG - start)
        runner.observe(rows[start : start + n], n, remaining=LONG - start - n)
    assert state(runner) == cold(make, rows, LONG)
    full = any(layer.window is None for layer in runner.config.layers)
    # all, or the sink and what the ring holds at the end
    most = LONG if full else 50 + 128
    assert sum(written) <= most and (sum(written) == LONG) == full


def test_a_failed_write_leaves_the_context_as_it_was(draft, monkeypatch):
    """Catches rows half written and counted, and a transaction left open."""
    make, rows = draft
    runner = feed(make(), rows, [30])
    before = runner.digest()
    monkeypatch.setattr(runner, "_graph", lambda key: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        runner.observe(rows[30:60], 30)
    monkeypatch.undo()
    assert runner.digest() == before and runner.length == 30
    assert state(feed(runner, rows, [10])) == cold(make, rows, 40)


def test_several_conversations_share_scratch(draft):
    """Catches state that lives in shared memory."""
    make, rows = draft
    one, two = make(), make()
    for n in (13, 1, 70):
        feed(one, rows, [n])
        feed(two, rows, [n, 2])
        one.propose(3, 1)
        two.propose(4, 2)
    assert state(one) == cold(make, rows, 84)
    assert state(two) == cold(make, rows, 90)


@pytest.mark.parametrize("n_threads", [1, 2, 3])
def test_bits_do_not_depend_on_threads(draft, n_threads):
    """Catches a sum shared out between threads."""
    make, rows = draft
    expected = cold(make, rows, 50)
    ops.set_threads(n_threads)
    assert cold(make, rows, 50) == expected


def test_rounds_record_and_allocate_nothing(draft):
    """Catches a round that records passes or allocates buffers anew."""
    make, rows = draft
    runner = feed(make(), rows, [20])
    for _ in range(2):
        runner.propose(5, 3)
        runner.write(rows[20:28], 8)
        runner.rollback()
    graphs, n_bytes = dict(runner._graphs), dict(runner.allocator.n_bytes)
    for _ in range(10):
        runner.propose(6, 3)
        runner.write(rows[20:28], 8)
        runner.commit(4)
    assert dict(runner._graphs) == graphs and dict(runner.allocator.n_bytes) == n_bytes


def test_sink_rows_are_seen_from_far_away():
    """Catches a sink that is stored and not attended to: one that holds all equals no window."""
    rows, block = long_rows("v1-muse-swa"), 16
    close_runner = feed(make_runner("v1-muse-swa", sink=128), rows, [100])
    open_runner = feed(make_runner("v1-muse-swa", sink=None, window=0), rows, [100])
    plain_runner = feed(make_runner("v1-muse-swa", sink=0), rows, [100])
    hidden = []
    for runner in (close_runner, open_runner, plain_runner):
        runner.propose(5, block - 1)
        hidden.append(runner.hidden(block))
    np.testing.assert_allclose(hidden[0], hidden[1], rtol=0, atol=1e-4)
    assert np.abs(hidden[0] - hidden[2]).max() > 0.1


def test_sink_and_window_match_a_masked_reference():
    """Catches pinned rows beyond the sink, or a window that moves with it."""
    name, n = "v1-muse-swa", 100
    case, rows = draft_case(name), long_rows(name)
    reference = DraftReference(case.directory, *target_tables(case.target), sink=7)
    keys, values = reference.context(reference.fuse(ops.download(rows)[:n]), np.arange(n))
    runner = feed(make_runner(name, sink=7), rows, [n])
    runner.propose(5, 1)
    ids = np.array([5] + [runner.config.mask_token_id] * 15)
    np.testing.assert_allclose(
        runner.hidden(16), reference.block(ids, keys, values), rtol=0, atol=1e-4
    )


def test_rows_that_are_not_finite_are_an_error():
    """Catches a NaN that becomes token 0."""
    for name in ("v1-muse-swa", "v2-muse-full"):
        rows = long_rows(name)
        bad = ops.upload(np.full((1, *rows.shape[1:]), np.nan, np.float32))
        runner = feed(make_runner(name), rows, [9])
        runner.observe(bad, 1)
        with pytest.raises(NumericsError, match="position 10"):
            runner.propose(5, 1)
        runner.rewind(9)
        runner.propose(5, 1)


def test_wrong_use_is_refused():
    """Catches tokens asked for past the block, and a block inside a transaction."""
    runner, rows = make_runner("v2-muse-full"), long_rows("v2-muse-full")
    for n_tokens, block in ((8, None), (0, None), (4, 4), (3, 9), (1, 1)):
        with pytest.raises(RuntimeError, match="from a block"):
            runner.propose(5, n_tokens, block)
    with pytest.raises(RuntimeError, match="no rows"):
        runner.commit(1)
    runner.write(rows[:4], 4)
    with pytest.raises(RuntimeError, match="tentative"):
        runner.propose(5, 1)
    with pytest.raises(RuntimeError, match="tentative"):
        runner.write(rows[:4], 4)
    with pytest.raises(RuntimeError, match="fewer"):
        runner.commit(5)


@pytest.mark.parametrize("name, variant, sink", [
    ("v1-muse-swa", "f32", 64), ("v2-qwen35-mixed", "f32", 0), ("v2-muse-full", "kq", 0),
])  # fmt: skip
@pytest.mark.parametrize("activations", ["int8", "int8x2"])
def test_memory_is_what_is_stated(name, variant, sink, activations):
    """Catches a buffer that the plan does not know, kind by kind."""
    draft, target = bound_draft(name, variant, sink), draft_case(name).target
    model, work, allocator = load_model(draft, target, activations)
    runner = DraftRunner(ops, model, work)
    feed(runner, long_rows(name), [CONTEXT_ROWS + 3])
    runner.propose(5, 3)
    head = SimpleNamespace(shape=(model.head.n, model.head.k), type=GGMLType.F32)
    bound = SimpleNamespace(weights=SimpleNamespace(output=head))
    found = allocator.n_bytes + runner.allocator.n_bytes
    stated = draft_memory(ops, draft, bound, N_CTX, activations)
    assert {k: v for k, v in stated.items() if v} == {k: v for k, v in found.items() if v}


def test_sampled_walk_draws_from_what_it_reports():
    """Catches a distribution that is not the one drawn from: frequencies within five errors."""
    generator = np.random.default_rng(8)
    ids = np.array([[10, 11, 12], [20, 21, 22]], np.int32)
    scores = generator.standard_normal((2, 3, 3)).astype(np.float32)
    scores[1, 0, 1] = -200  # probability 0
    n, firsts, seconds = 20_000, np.zeros(3), np.zeros((3, 3))
    for _ in range(n):
        tokens, probs = sample_walk(ids, scores, 0.7, generator.random)
        firsts[tokens[0] - 10] += 1
        seconds[tokens[0] - 10, tokens[1] - 20] += 1
        first_probs = probs[0]
        assert probs[1, tokens[1] - 20] > 0 and abs(probs.sum() - 2) < 1e-12
    z = scores[0, 0].astype(np.float64) / 0.7
    np.testing.assert_allclose(first_probs, np.exp(z) / np.exp(z).sum())
    assert np.all(np.abs(firsts / n - first_probs) < 5 * np.sqrt(first_probs / n))
    for a in range(3):
        p = np.exp(scores[1, a].astype(np.float64) / 0.7)
        p /= p.sum()
        error = np.sqrt(np.maximum(p, 1e-9) / firsts[a])
        assert np.all(np.abs(seconds[a] / firsts[a] - p) < 5 * error)


def test_sampled_walk_at_the_edges_of_the_draw():
    """Catches a candidate of probability 0 at a draw of 0, and none at all just below 1."""
    ids = np.array([[1, 2, 3]], np.int32)
    scores = np.array([[[-1000, 0, -1000]]], np.float32).repeat(3, axis=1)
    for u in (0.0, 0.5, np.nextafter(1, 0)):
        assert sample_walk(ids, scores, 1.0, lambda u=u: u)[0] == (2,)


def test_sampled_walk_at_low_temperature_is_the_greedy_one():
    """Catches a walk that reads another row than the op does."""
    runner = feed(make_runner("v2-qwen35-mixed"), long_rows("v2-qwen35-mixed"), [30])
    greedy = runner.propose(5, 7)
    model, _ = loaded("v2-qwen35-mixed")
    tokens, probs = sample_walk(*runner.lattice(), 1e-3, lambda: 0.5)
    assert tokens == greedy.tokens and model.config.selector_top_k == probs.shape[1]
    _, at_one = sample_walk(*runner.lattice(), 1.0, iter([0.999999] * 7).__next__)
    assert at_one[0].max() == pytest.approx(greedy.confidence[0], rel=1e-5)
