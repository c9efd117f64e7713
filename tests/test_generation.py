"""The life of an answer, with scripted tokens instead of a model."""

import threading

import pytest

from cudflash.errors import UsageError
from cudflash.events import Finished, PrefixReused, PromptProgress, TokenEvent
from tests.helpers.scripted import EOG, PieceTokenizer, ScriptedRunner, scripted_generation

LETTERS = PieceTokenizer([bytes([c]) for c in b"abcdefghijklmnopqrstuvwxyz"] * 4)
SCRIPT = list(range(100))
SIZES = [(1,), (2,), (3, 1), (16,), (1, 4, 16)]


def summary(result):
    return result.text, result.tokens, result.finish_reason, result.usage.completion_tokens


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("max_tokens", range(41))
def test_limit_is_exact_whatever_a_round_brings(sizes, max_tokens):
    """Catches a round that crosses the limit: delivered, counted and committed must agree."""
    generation = scripted_generation(SCRIPT, LETTERS, max_tokens=max_tokens, sizes=sizes)
    events = [e for e in generation if isinstance(e, TokenEvent)]
    result = generation.result()
    assert [e.token for e in events] == list(result.tokens) == SCRIPT[:max_tokens]
    assert [e.index for e in events] == list(range(max_tokens))
    assert "".join(e.text for e in events) == result.text
    assert result.usage.completion_tokens == max_tokens and result.finish_reason == "length"
    # the caches hold the prompt and every token but the newest
    assert generation.runner.tokens == [0] + SCRIPT[: max(0, max_tokens - 1)]


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("position", [0, 1, 2, 5, 15, 16, 17, 31])
def test_stop_inside_a_round_cuts_there(sizes, position):
    """Catches tokens after a stop in the same round: stop token, end of generation, stop string."""
    script = SCRIPT[:position] + [EOG] + SCRIPT[position:]
    by_token = scripted_generation(script, LETTERS, sizes=sizes).result()
    assert summary(by_token) == summary(scripted_generation(script, LETTERS).result())
    assert by_token.tokens == tuple(script[: position + 1]) and by_token.finish_reason == "stop"
    string = LETTERS.pieces[position].decode() + LETTERS.pieces[position + 1].decode()
    for sizes_now in ((1,), sizes):
        generation = scripted_generation(SCRIPT, LETTERS, sizes=sizes_now, stop=[string])
        result = generation.result()
        cut = min(position, (position % 26))
        assert len(result.tokens) == cut + 2 and len(result.text) == cut
        assert generation.runner.tokens == [0] + SCRIPT[: cut + 1]


def test_events_come_in_order_and_the_last_carries_the_result():
    """Catches progress that is not monotonic, and a missing or doubled end."""
    prompt = list(range(10))
    generation = scripted_generation(SCRIPT, LETTERS, prompt=prompt, max_tokens=3)
    events = list(generation)
    assert events[:3] == [PromptProgress(4, 10), PromptProgress(8, 10), PromptProgress(10, 10)]
    assert [type(e) for e in events[3:]] == [TokenEvent] * 3 + [Finished]
    assert events[-1].result is generation.result() and events[-1].text == ""
    assert generation.result().stats["rounds"] == 2
    assert generation.result().receipt == {"schema": "x", "seed": 1}


@pytest.mark.parametrize("n_events", range(7))
def test_closing_at_any_event_leaves_a_result_and_clean_caches(n_events):
    """Catches answers lost, or blocks left open, when a consumer stops early."""
    ended = []
    generation = scripted_generation(
        SCRIPT, LETTERS, prompt=range(6), max_tokens=9, on_end=ended.append
    )
    seen = [next(generation) for _ in range(n_events)]
    generation.close()
    result = generation.result()
    tokens = [e.token for e in seen if isinstance(e, TokenEvent)]
    assert (list(result.tokens), result.finish_reason) == (tokens, "cancelled")
    assert generation.runner.tokens == (list(range(6)) + tokens[:-1])[: len(generation.runner.tokens)]
    assert generation.rounds.open is None and ended == [generation]
    generation.close()
    assert list(generation) == []


def test_cancel_ends_between_rounds_with_held_text():
    """Catches a cancellation that loses text which was held back for a stop string."""
    generation = scripted_generation(SCRIPT, LETTERS, stop=["cdeX"], max_tokens=50)
    texts = []
    for event in generation:
        texts.append(getattr(event, "text", ""))
        if isinstance(event, TokenEvent) and event.token == 4:
            generation.cancel()
    result = generation.result()
    assert (result.text, result.finish_reason) == ("abcde", "cancelled")
    assert "".join(texts) == "abcde" and event.text == "cde"


def test_cancel_during_the_prompt_stops_at_the_next_chunk():
    """Catches a long prompt that cannot be interrupted."""
    generation = scripted_generation(SCRIPT, LETTERS, prompt=range(20), max_tokens=5)
    assert next(generation) == PromptProgress(4, 20)
    generation.cancel()
    result = generation.result()
    assert (result.tokens, result.finish_reason) == ((), "cancelled")
    assert generation.runner.tokens == list(range(4))


def test_failure_drops_the_block_and_is_raised_again():
    """Catches a failed round whose rows stay, and a result invented for it."""
    ended = []
    generation = scripted_generation(SCRIPT, LETTERS, fail_at=2, on_end=ended.append)
    with pytest.raises(RuntimeError, match="scripted"):
        list(generation)
    with pytest.raises(RuntimeError, match="scripted"):
        generation.result()
    assert generation.rounds.abandoned and generation.rounds.open is None and ended


def test_interrupt_leaves_what_was_produced():
    """Catches Ctrl-C losing the answer so far."""
    generation = scripted_generation(SCRIPT, LETTERS)
    original = generation.rounds.next

    def interrupted(room):
        if generation.rounds.n_rounds == 3:
            raise KeyboardInterrupt
        return original(room)

    generation.rounds.next = interrupted
    with pytest.raises(KeyboardInterrupt):
        list(generation)
    assert generation.result().text == "abcd"
    assert generation.result().finish_reason == "cancelled"


def test_second_thread_is_refused_not_mixed_in():
    """Catches two threads stepping one answer at once."""
    generation = scripted_generation(SCRIPT, LETTERS)
    inside, go_on = threading.Event(), threading.Event()
    original = generation.rounds.next

    def slow(room):
        inside.set()
        go_on.wait(10)
        return original(room)

    generation.rounds.next = slow
    worker = threading.Thread(target=lambda: [next(generation) for _ in range(3)])
    worker.start()
    inside.wait(10)
    with pytest.raises(UsageError, match="another thread"):
        next(generation)
    go_on.set()
    worker.join(10)


@pytest.mark.parametrize(
    "held, prompt, cached, difference, words",
    [
        ([], [1, 2, 3], 0, None, None),
        ([1, 2], [1, 2, 3], 2, None, "continues"),
        ([1, 2, 3], [1, 2, 3], 2, None, "beginning"),
        ([1, 2, 3, 4], [1, 2], 1, None, "beginning"),
        ([1, 9, 3], [1, 2, 3], 1, 1, "index 1"),
        ([9], [1], 0, 0, "index 0"),
    ],
)
def test_reuse_of_a_prefix_and_its_reason(held, prompt, cached, difference, words):
    """Catches reuse of rows past the first difference, and a last row without logits."""
    runner = ScriptedRunner(max_rows=8)
    runner.tokens = list(held)
    generation = scripted_generation(
        SCRIPT, LETTERS, prompt=prompt, max_tokens=1, runner=runner
    )
    events = list(generation)
    assert generation.result().usage.cached_tokens == cached
    assert runner.evaluated == len(prompt) - cached
    if words is None:
        assert not isinstance(events[0], PrefixReused)
    else:
        assert (events[0].cached_tokens, events[0].first_difference) == (cached, difference)
        assert words in events[0].reason


def test_lost_rows_are_said_and_evaluated_again():
    """Catches a wrapped ring that is silently trusted."""
    runner = ScriptedRunner(max_rows=8, loses=True)
    runner.tokens = [1, 2, 3, 4]
    generation = scripted_generation(SCRIPT, LETTERS, prompt=[1, 2, 5], max_tokens=1, runner=runner)
    events = list(generation)
    assert events[0].cached_tokens == 0 and "sliding" in events[0].reason
    assert runner.evaluated == 3
