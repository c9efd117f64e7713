"""What a closed session leaves behind is used by the next one, and cannot be seen in its answers."""

import gc
import weakref

import numpy as np
import pytest

import cudflash
from cudflash.drafters import AlwaysWrong
from cudflash.errors import UsageError
from tests.helpers.engines import SMALL_ROWS, engine
from tests.helpers.speculation import GREEDY, draft_engine
from tests.helpers.vectors import ARCHES, target_case

DRAFTS = ("v1-muse-swa", "v1-qwen3-full", "v2-qwen35-mixed")


def ids(one, n, seed):
    return np.random.default_rng(seed).integers(0, one.config.vocab_size, n).tolist()


def fresh(one):
    """Let go of what is kept, so that the next session makes everything anew."""
    runner, _ = one.parking.take()
    if runner is not None:
        runner.release()


def poison(runner, draft_runner):
    """Fill every cache and state with NaN: what an earlier conversation left must not matter."""
    arrays = [a for layer in runner.cache.layers if hasattr(layer, "k") for a in (layer.k, layer.v)]
    if runner.cache.recurrent is not None:
        for state in runner.cache.recurrent._layers.values():
            arrays += [a for a in vars(state).values() if isinstance(a, np.ndarray)]
    if draft_runner is not None:
        for layer in draft_runner.context.layers:
            arrays += [a for a in (layer.k, layer.v, layer.sink_k, layer.sink_v) if a is not None]
    floats = [a for a in arrays if np.issubdtype(a.dtype, np.floating)]
    for array in floats:
        array.fill(np.nan)
    assert floats


def answers(one, poisoned, reuse):
    """Three answers of different length and drafting, one after the other."""
    found, drafts = [], one.draft is not None
    for seed, (n_prompt, n_tokens) in enumerate(((70, 60), (5, 20), (130, 40))):
        if not reuse:
            fresh(one)
        elif poisoned and one.parking.kept[0] is not None:
            poison(*one.parking.kept)
        result = one.generate(
            ids(one, n_prompt, seed), max_tokens=n_tokens, sampling=GREEDY, ignore_eos=True,
            row_digests=True, speculative="on" if drafts else "off",
        )  # fmt: skip
        trace = [(r["drafted"], r["accepted"]) for r in result.speculation["trace"]] if drafts else []
        found.append((result.tokens, result.row_digests, trace))
    return found


@pytest.mark.parametrize("arch", ARCHES)
def test_an_answer_on_what_another_left_is_that_of_a_fresh_session(arch):
    """Catches rows, a recurrent state or a ring's place that outlive their conversation."""
    one = engine(arch, rows=SMALL_ROWS)
    assert answers(one, True, reuse=True) == answers(one, False, reuse=False)


@pytest.mark.parametrize("name", DRAFTS)
def test_a_draft_on_what_another_left_proposes_the_same(name):
    """Catches a draft context that outlives its conversation: acceptance falls, no token differs."""
    one = draft_engine(name)
    assert answers(one, True, reuse=True) == answers(one, False, reuse=False)


def test_the_second_answer_records_nothing():
    """Catches passes that every answer records anew: milliseconds before its first token."""
    one = draft_engine("v1-muse-swa")
    fresh(one)
    options = {"max_tokens": 30, "sampling": GREEDY, "ignore_eos": True, "speculative": "on"}
    one.generate(ids(one, 40, 1), **options)
    runner, draft_runner = one.parking.kept
    graphs = [dict(runner._graphs), dict(draft_runner._graphs)]
    again = one.generate(ids(one, 40, 1), **options)
    assert one.parking.kept == (runner, draft_runner) and again.stats["speculative"]["draft_rounds"] > 3
    assert [dict(runner._graphs), dict(draft_runner._graphs)] == graphs


def test_sessions_side_by_side_have_their_own_and_one_is_kept():
    """Catches two conversations in one cache, and caches that pile up."""
    one = engine("llama", rows=SMALL_ROWS)
    first, second = one.session(), one.session()
    assert first._runner is not second._runner
    caches = [weakref.ref(s._runner.cache) for s in (first, second)]
    kept = first._runner
    first.close()
    second.close()
    del first, second
    gc.collect()
    assert one.parking.kept[0] is kept and caches[1]() is None
    third = one.session()
    assert third._runner is kept and one.parking.kept == (None, None) and third.tokens == ()
    third.close()
    third.close()  # again: it has nothing to give back
    assert one.parking.kept[0] is kept


def test_a_session_that_was_cut_off_leaves_nothing():
    """Catches an unfinished answer that still writes into the next one's rows when it is dropped."""
    one = engine("llama", rows=SMALL_ROWS)
    fresh(one)
    session = one.session()
    unfinished = session.generate(ids(one, 20, 3), max_tokens=50, sampling=GREEDY)
    for _ in range(4):
        next(unfinished)
    session.close()
    assert one.parking.kept == (None, None)
    assert unfinished.result().finish_reason == "cancelled"


def test_a_closed_engine_lets_go_of_what_it_kept():
    """Catches memory that an engine holds after it was closed."""
    with cudflash.load(target_case("llama", "f32").path, n_ctx=64, threads=1) as one:
        one.generate([1, 2, 3], max_tokens=4)
        cache = weakref.ref(one.parking.kept[0].cache.layers[0])
        assert cache() is not None
    gc.collect()
    assert cache() is None and one.parking.kept == (None, None)


@pytest.mark.parametrize("whole", [True, False])
def test_an_answer_that_is_kept_holds_no_weights_of_a_closed_engine(whole):
    """Catches a draft that stays in memory because somebody still has the result of an answer."""
    with cudflash.load("demo", "demo:dflash2", device="cpu", n_ctx=128) as one:
        session = one.session()
        answer = session.generate([65] * 8, max_tokens=9, sampling=GREEDY, speculative="on")
        next(answer)
        if whole:
            answer.result()
        draft, target = session._drafter.drafter.runner, session._runner
        held = [draft._model.layers[0].attn_q.data, draft.context.layers[0].k,
                target._model.layers[0].attn_q.data, target.cache.layers[0].k]  # fmt: skip
        held = [weakref.ref(array) for array in held]
        del session, draft, target
    gc.collect()
    assert [array() for array in held] == [None] * 4 and answer is not None


def test_an_ended_answer_leaves_the_next_conversation_alone():
    """Catches an answer that still works on rows when its session has given them to another."""
    one = draft_engine("v1-muse-swa")
    session = one.session()
    ended = session.generate(ids(one, 20, 3), max_tokens=5, sampling=GREEDY)
    ended.result()
    session.close()
    other = one.session()
    running = other.generate(ids(one, 30, 4), max_tokens=40, sampling=GREEDY, ignore_eos=True)
    for number, _ in enumerate(running):
        if number % 5 == 0:
            ended.bring_up()
            assert ended.rehearse() is None
            ended.close()
    fresh(one)
    expected = one.generate(
        ids(one, 30, 4), max_tokens=40, sampling=GREEDY, ignore_eos=True, speculative="off"
    )
    assert running.result().tokens == expected.tokens


def test_a_session_closed_while_an_answer_is_prepared_gives_none(monkeypatch):
    """Catches an answer on memory that a third conversation has taken over in between."""
    import cudflash.session as module

    one = engine("llama", rows=SMALL_ROWS)
    fresh(one)
    session, taken = one.session(), []

    class Rounds(module.PlainRounds):
        def __init__(self, *args):
            super().__init__(*args)
            if not taken:  # what another thread may do at this point
                session.close()
                taken.append(one.session())

    monkeypatch.setattr(module, "PlainRounds", Rounds)
    with pytest.raises(UsageError, match="session is closed"):
        session.generate([1, 2, 3], max_tokens=5, sampling=GREEDY)
    options = {"max_tokens": 20, "sampling": GREEDY, "ignore_eos": True}
    answer = taken[0].generate([4, 5, 6], **options).result()
    fresh(one)
    assert answer.tokens == one.generate([4, 5, 6], **options).tokens


def test_what_drafters_of_single_answers_have_read_is_not_kept():
    """Catches buffers for the layers of every drafter that was ever used."""
    one = engine("llama", rows=SMALL_ROWS)
    fresh(one)
    for n_taps in (1, 2, 3):
        one.generate([1, 2, 3, 4], max_tokens=6, drafter=Reader(n_taps), speculative="on")
    runner, _ = one.parking.kept
    assert not runner._tap_buffers and all(not key[3] for key in runner._graphs if key[0] != "head")


class Reader(AlwaysWrong):
    """Reads layers that it has no use for."""

    def __init__(self, n_taps):
        super().__init__([1, 2, 3])
        self.taps = tuple(range(n_taps))

    def observe(self, tokens, taps=None):
        super().observe(tokens)


@pytest.mark.parametrize("before", ["nothing", "a plain answer"])
def test_what_preparing_takes_is_known_when_an_earlier_answer_has_prepared(before):
    """Catches a pass that was recorded before and is timed as if recording it took no time."""
    one = draft_engine("v1-muse-swa", draft_sink=0, n_ctx=1024)
    fresh(one)
    one.__dict__.pop("round_costs", None)
    if before != "nothing":
        one.generate([1, 2, 3], max_tokens=8, sampling=GREEDY, speculative="off")
    one.generate([1, 2, 3], max_tokens=8, sampling=GREEDY)
    assert one.round_costs.prepare_ms > one.round_costs.plain.ms


def test_a_prompt_of_the_length_of_a_block_is_not_taken_for_one():
    """Catches a pass that leaves other rows counted as the one that verifies."""
    one = draft_engine("v1-muse-swa")
    fresh(one)
    session = one.session()
    options = {"sampling": GREEDY, "speculative": "on"}
    session.generate(ids(one, 8, 1), max_tokens=1, **options).result()
    runner, taps = session._runner, session._drafter.taps
    assert any(key[0] == 8 and key[3] == taps for key in runner._graphs)
    assert not runner.has_recorded(8, "all", taps, 0)
    session.generate(ids(one, 8, 1), max_tokens=40, **options).result()
    assert runner.has_recorded(8, "all", taps, 0) and not runner.has_recorded(8, "all", taps, 1)


def test_a_drafter_that_cannot_tell_what_it_has_recorded_costs_no_answer(monkeypatch):
    """Catches an attribute of a drafter that has the name by chance, and ends the answer."""
    from cudflash.spec.guard import GuardedDrafter

    for tell in (True, lambda n: 3, lambda n: 1 / 0):
        drafter = AlwaysWrong([1, 2, 3])
        drafter.has_recorded = tell
        assert GuardedDrafter(drafter, 100).has_recorded(3) == (False, False)
