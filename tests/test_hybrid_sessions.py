"""Sessions on a hybrid: reuse of prompts from checkpoints, and nothing that leaks between requests.

A recurrent state cannot be cut at a position, so each of these would show as a wrong token, a prompt
read again without need, or a draft that starts from rows it never saw.
"""

import numpy as np
import pytest

import cudflash
from cudflash import defaults
from cudflash.drafters import Cycle, Oracle, Random
from cudflash.events import PrefixReused
from cudflash.verify import Verifier
from cudflash.verify_sessions import scripts, session_checks
from tests.helpers.draft_vectors import draft_case
from tests.helpers.engines import SMALL_ROWS, engine, greedy
from tests.helpers.hybrid_model import hybrid_engine
from tests.helpers.speculation import GREEDY, SCRIPTED, draft_engine, plain_answer
from tests.helpers.vectors import target_case

SETTINGS = {"threads": 1, "rows": SMALL_ROWS}
CASE = draft_case("v2-qwen35-mixed")
TEXT = [int(t) for t in CASE.data["seq_ids"]]  # text on which the draft is good


def ids(n, seed=0):
    return np.random.default_rng(seed).integers(0, 380, n).tolist()


def drafting(**settings):
    return draft_engine("v2-qwen35-mixed", draft_sink=0, **settings)


def rounds_of(result):
    return [(r["n_past"], r["drafted"], r["accepted"]) for r in result.speculation["trace"]]


@pytest.mark.parametrize("kind", ["dflash2", "mtp"])
def test_ten_tails_on_a_shared_beginning_reuse_it_and_draft_as_if_cold(kind):
    """Catches a prefix hit that skips the draft's rows (A67), and hits that drafting turns off (A69).

    The first request makes no checkpoint where the second parts from it; from the third on the
    shared part is evaluated no more.
    """
    one = drafting() if kind == "dflash2" else engine("qwen35", drafter="mtp", threads=1)
    session = one.session()
    shared = TEXT[:40]
    for index in range(10):
        prompt = shared + [300 + index] + ids(8, seed=index)
        warm = greedy(session, prompt, 12, speculative="on", ignore_eos=True)
        if index in (2, 9):
            cold = greedy(one, prompt, 12, speculative="on", ignore_eos=True)
            assert warm.tokens == cold.tokens
            assert rounds_of(warm) == rounds_of(cold) and warm.speculation["used"]
        if index > 1:
            assert warm.usage.cached_tokens == len(shared)


@pytest.mark.parametrize("kind", ["none", "dflash2", "mtp"])
def test_the_same_prompt_again_evaluates_one_token(kind):
    """Catches whole prompts read again (A69, A70), with any drafter."""
    one = drafting() if kind == "dflash2" else engine(
        "qwen35", drafter="mtp" if kind == "mtp" else None, threads=1
    )
    mode = "off" if kind == "none" else "on"
    session, prompt = one.session(), TEXT[:60]
    first = greedy(session, prompt, 10, speculative=mode, ignore_eos=True)
    again = greedy(session, prompt, 10, speculative=mode, ignore_eos=True)
    assert again.tokens == first.tokens
    assert again.usage.cached_tokens == len(prompt) - 1
    assert again.stats["prompt_tokens_evaluated"] == 1
    if kind != "none":
        assert rounds_of(again) == rounds_of(first)
    follow = prompt + list(first.tokens) + ids(5)
    longer = greedy(session, follow, 5, speculative=mode, ignore_eos=True)
    assert longer.usage.cached_tokens == len(prompt) + len(first.tokens) - 1


def test_why_reuse_ended_is_said():
    """Catches a silent second reading of the prompt (A70): index and text of the first difference."""
    session, prompt = engine("qwen35", **SETTINGS).session(), ids(60)
    greedy(session, prompt, 3)
    changed = [*prompt[:20], (prompt[20] + 1) % 380, *prompt[21:]]
    events = session.generate(changed, max_tokens=2, sampling=GREEDY)
    first = next(event for event in events if isinstance(event, PrefixReused))
    assert (first.cached_tokens, first.first_difference) == (0, 20)
    assert "recurrent state" in first.reason and "20" in first.reason
    text = session._engine.tokenizer.decode([prompt[20]]).decode("utf-8", "replace")
    assert repr(text) in first.reason


def test_checkpoints_are_bounded_and_dropped_with_their_rows():
    """Catches memory that grows with requests, and a checkpoint of rows that were overwritten."""
    one = engine("qwen35", **SETTINGS)
    session = one.session()
    before = session._runner.allocator.total
    for index in range(8):
        greedy(session, ids(10 + 7 * index, seed=index % 3), 2)
        held = session._runner.cache.checkpoints
        assert len(held) <= defaults.CHECKPOINTS
        assert all(at <= session._runner.cache.length for at in held)
    assert session._runner.allocator.total == before
    long = ids(400, seed=9)
    greedy(session, long, 1)
    assert session._runner.prompt_stops(0, 5000, 0) == (2048, 4096, 4999)
    greedy(session, ids(12, seed=4), 1)
    assert max(session._runner.cache.checkpoints) < 12


@pytest.mark.parametrize("kind", list(SCRIPTED))
def test_scripted_drafters_over_two_thousand_tokens(kind):
    """Catches errors that the recurrence carries on (A59, A73): every pattern of rejections."""
    one = hybrid_engine(n_ctx=2100, rows=16)
    options = {"max_tokens": 2000, "ignore_eos": True}
    plain = plain_answer(one, tuple(TEXT[:9]), GREEDY, **options)
    drafted = one.generate(
        TEXT[:9], sampling=GREEDY, speculative="on", verify_length=15, seed=4,
        drafter=SCRIPTED[kind](plain.tokens), **options,
    )  # fmt: skip
    assert drafted.tokens == plain.tokens and len(plain.tokens) == 2000


def test_states_after_a_drafted_answer_are_those_of_tokens_alone():
    """Catches any trace of a rejected token: every state tensor, by digest (A60)."""
    one = hybrid_engine(rows=SMALL_ROWS)
    plain = greedy(one, ids(20), 60, ignore_eos=True)
    for ks in ((15, 0, 3, 1), (2, 7, 0, 0, 5)):
        session = one.session()
        answer = session.generate(
            ids(20), max_tokens=60, sampling=GREEDY, speculative="on", verify_length=7,
            ignore_eos=True, drafter=Cycle(plain.tokens, ks),
        ).result()  # fmt: skip
        held = list(session.tokens)
        assert answer.tokens == plain.tokens and held == (ids(20) + list(plain.tokens))[:-1]
        runner = one.session()._runner
        for token in held:
            runner.step((token,))
            runner.commit(1)
        assert runner.cache.digest() == session._runner.cache.digest()


def test_fifty_requests_in_one_process_equal_fresh_sessions():
    """Catches positions that are not reset and state that leaks, also from longer requests (A64)."""
    one = hybrid_engine(n_ctx=256)
    checks = list(session_checks(Verifier(one), TEXT[:40], n_requests=50))
    names = {check.name for check in checks}
    assert names == {"session-requests", "session-shorter", "session-alternating"}
    assert len(checks) == 50 + 3 + 4
    assert all(check.passed for check in checks), [c for c in checks if not c.passed]


def test_used_sessions_with_a_draft_equal_fresh_ones():
    """Catches a draft context that an earlier request has left in disorder (A66)."""
    one = drafting(n_ctx=256)
    checks = list(session_checks(Verifier(one), TEXT[:30], n_requests=8))
    assert all(check.passed for check in checks), [c for c in checks if not c.passed]


def test_a_state_of_an_earlier_conversation_is_not_met_again():
    """Catches a slot that still names the position of other tokens.

    The first conversation ends at a position inside the second, which is read from its start in
    large chunks; the third parts from the second at just that position.
    """
    one = engine("qwen35", threads=1)
    session = one.session()
    greedy(session, ids(40), 6, ignore_eos=True)
    end = len(session.tokens)
    other = ids(90, seed=3)
    greedy(session, other, 2, ignore_eos=True)
    for cut in range(end - 2, end + 2):
        prompt = other[:cut] + ids(5, seed=cut)
        warm = greedy(session, prompt, 6, ignore_eos=True)
        assert warm.tokens == greedy(one, prompt, 6, ignore_eos=True).tokens
        greedy(session, ids(40), 6, ignore_eos=True)
        greedy(session, other, 2, ignore_eos=True)


def test_scripts_hold_what_their_names_say():
    """Catches a proof that proves nothing: no shorter request, no taking of turns."""
    requests, shorter, turns = scripts(list(range(50)), 50, 1)
    lengths = [len(p) for p in requests.prompts]
    assert len(set(lengths)) > 20 and any(b < a for a, b in zip(lengths, lengths[1:]))
    assert [len(p) for p in shorter.prompts] == [100, 25, 1]
    one, two, longer, other = turns.prompts
    assert longer[: len(one)] == one and other[: len(two)] == two


def test_an_interrupt_between_rounds_leaves_a_usable_session():
    """Catches a state that is ahead of the committed length after an answer was dropped."""
    one = engine("qwen35", **SETTINGS)
    session = one.session()
    running = session.generate(
        ids(30), max_tokens=40, sampling=GREEDY, speculative="on", drafter=Random(3),
        ignore_eos=True,
    )  # fmt: skip
    for _, event in zip(range(9), running):
        assert event is not None
    running.close()
    warm = greedy(session, ids(30) + ids(4, seed=2), 8)
    assert warm.tokens == greedy(one, ids(30) + ids(4, seed=2), 8).tokens


@pytest.mark.parametrize("kv_type", ["f16", "f32"])
@pytest.mark.parametrize("length", [3, 15])
def test_reuse_with_long_drafts_and_both_cache_types(kv_type, length):
    """Catches combinations that only fail together (A68, A71): reuse, draft length, cache type."""
    one = engine("qwen35", threads=1, kv_type=kv_type)
    session, prompt = one.session(), TEXT[:50]
    plain = greedy(one, prompt, 40, ignore_eos=True)
    for _ in range(2):
        warm = session.generate(
            prompt, max_tokens=40, sampling=GREEDY, speculative="on", verify_length=length,
            ignore_eos=True, drafter=Oracle(plain.tokens),
        ).result()  # fmt: skip
        assert warm.tokens == plain.tokens
    assert warm.usage.cached_tokens == len(prompt) - 1


def test_only_recurrent_targets_pause_their_prompts():
    """Catches passes that are cut for targets whose rows can be cut anywhere."""
    assert engine("llama", threads=1).session()._runner.prompt_stops(0, 5000, 7) == ()
    assert target_case("qwen35", "kq").arch == cudflash.load(
        target_case("qwen35", "kq").path, device="cpu"
    ).config.arch
