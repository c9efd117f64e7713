"""Ctrl-C at every point of an answer: the session stays usable and its answers stay right."""

import sys
import threading

import pytest

import cudflash
from cudflash.drafters import KeepK
from cudflash.errors import NumericsError, UsageError
from tests.helpers.engines import SMALL_ROWS, engine, greedy
from tests.helpers.given_times import given_times
from tests.helpers.speculation import GREEDY, draft_engine

PROMPT = list(range(3, 24))
OTHER = PROMPT[:10] + [9, 9, 9]
WATCHED = (
    "generation.py", "session.py", "rounds.py", "spec_rounds.py", "runner.py", "cache.py",
    "transaction.py", "round.py", "guard.py", "draft_runner.py", "draft_context.py", "choose.py",
    "draft_feed.py", "economy.py",
)  # fmt: skip


class Interrupter:
    """Raises KeyboardInterrupt at the n-th line that the watched files execute."""

    def __init__(self, at):
        self.at, self.seen, self.where = at, 0, None

    def __call__(self, frame, event, arg):
        path = frame.f_code.co_filename.replace("\\", "/")
        return self.line if "/cudflash/" in path and path.endswith(WATCHED) else None

    def line(self, frame, event, arg):
        if event != "line":
            return self.line
        self.seen += 1
        if self.seen == self.at:
            sys.settrace(None)
            self.where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
            raise KeyboardInterrupt
        return self.line


def interrupted(session, at, **options):
    """Run an answer that is interrupted at line ``at``; returns where, None when it had ended."""
    interrupter = Interrupter(at)
    before = sys.gettrace()
    sys.settrace(interrupter)
    try:
        greedy(session, PROMPT, **{"max_tokens": 4, **options})
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)
    return interrupter.where


def sweep(one, step, **options):
    """Interrupt at every ``step``-th line; the answers after it must be those of fresh sessions."""
    right = [greedy(one, p, 4).tokens for p in (PROMPT, OTHER)]
    session, at = one.session(), 1
    while where := interrupted(session, at, **options):
        held = list(session.tokens)
        assert held in ([*PROMPT, *right[0]][: len(held)], [*OTHER, *right[1]][: len(held)]), where
        again = [greedy(session, p, 4, **options).tokens for p in (PROMPT, OTHER)]
        assert again == right, where
        at += step
    assert at > 100


def test_plain_answer_survives_an_interrupt_at_every_line():
    """Catches locks that stay held, blocks that stay open, ids and rows that no longer agree."""
    sweep(engine("gemma3", rows=SMALL_ROWS), 1)


def test_drafted_answer_survives_an_interrupt_at_every_line():
    """Catches a target, a drafter or a chain that moved without the others."""
    one = engine("gemma3", rows=SMALL_ROWS)
    answer = greedy(one, PROMPT, 4).tokens
    session_drafter = KeepK(answer, 2)
    sweep(one, 3, drafter=session_drafter, speculative="on")


def test_threads_can_answer_after_an_interrupt():
    """Catches a pass that stays locked for every other thread."""
    one = engine("llama")
    session = one.session()
    original = session._runner.commit

    def once(n_rows):
        session._runner.commit = original
        original(n_rows)
        raise KeyboardInterrupt

    session._runner.commit = once
    with pytest.raises(KeyboardInterrupt):
        greedy(session, PROMPT, 4)
    found = []
    thread = threading.Thread(target=lambda: found.append(greedy(session, PROMPT, 4).tokens))
    thread.start()
    thread.join(60)
    assert found == [greedy(one, PROMPT, 4).tokens]


def test_answer_that_cannot_be_closed_does_not_block_the_session():
    """Catches a session that every later ``generate`` fails on, because closing the last one did."""
    one = engine("llama")
    session = one.session()
    stuck = session.generate(PROMPT, max_tokens=4)

    def fails(*args):
        raise NumericsError("damaged")

    stuck._finish = fails
    assert greedy(session, PROMPT, 4).tokens == greedy(one, PROMPT, 4).tokens


def test_running_answer_is_not_entered_again():
    """Catches an answer advanced from inside itself."""
    one = engine("llama")
    session = one.session()
    seen = []

    class Nested(KeepK):
        def propose(self, anchor, n, context):
            again = lambda: session.generate([1], max_tokens=1)  # noqa: E731
            for move in (lambda: next(answer), answer.close, again):
                try:
                    move()
                except UsageError as err:
                    seen.append(str(err))
            return super().propose(anchor, n, context)

    sampling = cudflash.SamplingConfig(temperature=0)
    answer = session.generate(PROMPT, max_tokens=4, sampling=sampling, speculative="on",
                              drafter=Nested([], 0))  # fmt: skip
    assert answer.result().tokens == greedy(one, PROMPT, 4).tokens
    assert len(seen) >= 3 and all("further up the stack" in s for s in seen)


@pytest.mark.parametrize("name", ["v1-muse-swa", "v2-muse-full"])
def test_loaded_draft_survives_an_interrupt(name):
    """Catches a draft context that no longer matches the target: it proposes other tokens."""
    one = draft_engine(name)

    def answer(session, prompt):
        result = session.generate(prompt, max_tokens=8, speculative="on", sampling=GREEDY).result()
        return result.tokens, [r["drafted"] for r in result.speculation["trace"]]

    right = [answer(one.session(), p) for p in (PROMPT, OTHER)]
    session, at = one.session(), 1
    while where := interrupted(session, at, speculative="on"):
        assert [answer(session, p) for p in (PROMPT, OTHER)] == right, where
        at += 11
    assert at > 100


def test_answer_that_times_and_skips_survives_an_interrupt(monkeypatch):
    """Catches a draft that takes up its work with a hole, passes timed and left open, rounds of a
    pause that are half taken down: parts of a round are timed, the draft misses rows, then drafts."""
    one = draft_engine("v1-muse-swa", draft_sink=0)
    given_times(monkeypatch, one, lambda n: 0.2 if n == 0 else 0.25, prepare_ms=1.8, draft_ms=0.05)
    for module in ("account", "economy"):
        monkeypatch.setattr(f"cudflash.spec.{module}.REFILL", 4.0)

    def answer(session, prompt, n_tokens=60):
        running = session.generate(prompt, max_tokens=n_tokens, sampling=GREEDY, ignore_eos=True)
        return running.result()

    right = [answer(one.session(), p) for p in (PROMPT, OTHER)]
    drafted = [len(r["drafted"]) for r in right[0].speculation["trace"]]
    assert drafted[:30] == [0] * 30 and sum(drafted) > 0, "no pause, or nothing after it"
    session, at = one.session(), 1
    while where := interrupted(session, at, speculative="auto", max_tokens=60):
        found = [answer(session, p) for p in (PROMPT, OTHER)]
        assert [r.tokens for r in found] == [r.tokens for r in right], where
        assert all(r.speculation["fault"] is None for r in found), where
        assert session.check_draft_context() is None, where
        at += 293
    assert at > 1000


@pytest.mark.parametrize("use", ["logits", "answer"])
def test_engine_is_not_used_from_inside_a_pass(use):
    """Catches scratch overwritten in the middle of a round: wrong tokens, or a deadlock."""
    one = engine("llama")

    class Greedy(KeepK):
        def observe(self, tokens, taps=None):
            if use == "logits":
                one.logits([5, 6, 7])
            else:
                greedy(one, [5, 6, 7], 3)
            super().observe(tokens, taps)

    result = greedy(one, PROMPT, 6, drafter=Greedy([], 0), speculative="on")
    assert result.tokens == greedy(one, PROMPT, 6).tokens
    assert "from inside a pass" in result.speculation["fault"]["reason"]
