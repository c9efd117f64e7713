"""Sessions on real tiny targets: reuse, several at once, long answers on wrapped rings."""

import json
import math
import subprocess
import sys
import threading

import numpy as np
import pytest

import cudflash
from cudflash.errors import ContextLengthError, NumericsError, UsageError
from cudflash.events import PrefixReused, PromptProgress, TokenEvent
from tests.helpers.engines import SMALL_ROWS, engine, greedy
from tests.helpers.vectors import ARCHES, target_case

RINGS = ("gemma3", "muse-glimmer")
MAY_LOSE = (*RINGS, "qwen35")  # rows: a ring that moved on, a state without a checkpoint there


def ids(arch, n, seed=0):
    return np.random.default_rng(seed).integers(0, engine(arch).config.vocab_size, n).tolist()


@pytest.mark.parametrize("arch", ARCHES)
def test_greedy_answer_is_the_argmax_of_plain_logits(arch):
    """Catches positions, caches or captured passes that drift from a pass over all tokens.

    Rings are smaller than the answer and wrap three times over; the plain pass never wraps.
    """
    one = engine(arch, rows=SMALL_ROWS)
    prompt = ids(arch, 50)
    result = greedy(one, prompt, 300)
    tokens = prompt + list(result.tokens)
    expected = engine(arch).logits(tokens[:-1])[len(prompt) - 1 :].argmax(axis=1)
    np.testing.assert_array_equal(result.tokens, expected[: len(result.tokens)])
    assert result.finish_reason == "length" or result.stopped_by in one.tokenizer.eog_ids


@pytest.mark.parametrize("arch", RINGS)
def test_rings_of_the_long_answer_do_wrap(arch):
    """Catches the test above losing its point when sizes change."""
    session = engine(arch, rows=SMALL_ROWS).session()
    capacities = {layer.capacity for layer in session._runner.cache.layers if layer.window}
    assert max(capacities) * 2 < 350


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("n_shared", [0, 1, 20, 60, 299])
def test_second_turn_equals_a_cold_one(arch, n_shared):
    """Catches rows reused that differ, a ring trusted after it moved on, and wrong counts."""
    one = engine(arch, rows=SMALL_ROWS)
    session = one.session()
    first = ids(arch, 300)
    greedy(session, first, 20)
    held = session.tokens
    second = first[:n_shared] + ids(arch, 30, seed=5)
    warm = greedy(session, second, 25, logprobs=2)
    cold = greedy(one, second, 25, logprobs=2)
    assert (warm.tokens, warm.text, warm.logprobs) == (cold.tokens, cold.text, cold.logprobs)
    same = next((i for i, (a, b) in enumerate(zip(held, second)) if a != b), len(second))
    assert warm.usage.cached_tokens in (0, same)
    if arch not in MAY_LOSE:
        assert warm.usage.cached_tokens == same


def test_continued_conversation_reuses_everything():
    """Catches reuse that silently never happens: turn two evaluates only what is new."""
    session = engine("gemma3", rows=SMALL_ROWS).session()
    prompt = ids("gemma3", 200)
    answer = greedy(session, prompt, 30).tokens
    follow = prompt + list(answer) + ids("gemma3", 10, seed=3)
    events = list(
        session.generate(follow, max_tokens=2, sampling=cudflash.SamplingConfig(temperature=0))
    )
    reused = events[1]
    assert isinstance(reused, PrefixReused) and reused.first_difference is None
    assert reused.cached_tokens == len(prompt) + len(answer) - 1
    again = greedy(session, follow, 2)
    assert again.usage.cached_tokens == len(follow) - 1


def test_rewind_beyond_a_ring_is_evaluated_again_and_said():
    """Catches a scrambled context after a rewind that the ring can no longer serve."""
    one = engine("gemma3", rows=SMALL_ROWS)
    session = one.session()
    prompt = ids("gemma3", 300)
    greedy(session, prompt, 5)
    edited = prompt[:100] + ids("gemma3", 5, seed=8)
    events = list(
        session.generate(edited, max_tokens=3, sampling=cudflash.SamplingConfig(temperature=0))
    )
    assert events[1].cached_tokens == 0 and "sliding" in events[1].reason
    assert events[-1].result.tokens == greedy(one, edited, 3).tokens


def test_ten_prompts_in_one_process_equal_fresh_sessions():
    """Catches state that leaks from one request to the next, shorter prompts after longer ones."""
    for arch in ("llama", "gemma3", "qwen35"):
        one = engine(arch, rows=SMALL_ROWS)
        session = one.session()
        rng = np.random.default_rng(11)
        for i in range(10):
            prompt = ids(arch, int(rng.integers(1, 200)), seed=100 + i)
            config = cudflash.SamplingConfig(temperature=1.0, repeat_penalty=1.1)
            options = {"max_tokens": int(rng.integers(0, 30)), "sampling": config, "seed": i}
            warm = session.generate(prompt, **options).result()
            cold = one.generate(prompt, **options)
            assert (warm.tokens, warm.text) == (cold.tokens, cold.text)


def test_late_answer_equals_that_of_a_fresh_process():
    """Catches anything that depends on what the process did before, or on hashing and addresses."""
    one = engine("muse-glimmer", rows=SMALL_ROWS)
    session = one.session()
    rng = np.random.default_rng(2)
    for i in range(10):
        prompt = ids("muse-glimmer", int(rng.integers(1, 150)), seed=i)
        last = session.generate(prompt, max_tokens=12, seed=i).result()
    code = (
        "import sys, json, cudflash; path, prompt, seed = json.loads(sys.argv[1]); "
        "e = cudflash.load(path, device='cpu', n_ctx=512); "
        "print(list(e.generate(prompt, max_tokens=12, seed=seed).tokens))"
    )
    argument = json.dumps([one.gguf.path, prompt, 9])
    done = subprocess.run(
        [sys.executable, "-c", code, argument], capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout) == list(last.tokens)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_non_finite_logits_are_an_error_before_any_decision(temperature):
    """Catches NaN turned into token 0, and caches left with an open block."""
    case = target_case("llama", "f32")
    one = cudflash.load(case.path, device="cpu", n_ctx=64)
    session = one.session()
    sampling = cudflash.SamplingConfig(temperature=temperature)
    running = session.generate([1, 2, 3], max_tokens=9, sampling=sampling, seed=1)
    while not isinstance(next(running), TokenEvent):
        pass
    norm = one.ops.download(one.model.output_norm)
    one.ops.copy_in(one.model.output_norm, np.full_like(norm, np.nan))
    with pytest.raises(NumericsError, match="position 3"):
        list(running)
    with pytest.raises(NumericsError):
        running.result()
    one.ops.copy_in(one.model.output_norm, norm)
    assert session.tokens == (1, 2, 3)
    after = session.generate([1, 2, 3], max_tokens=9, sampling=sampling, seed=1).result()
    assert after.tokens == engine("llama", "f32").generate(
        [1, 2, 3], max_tokens=9, sampling=sampling, seed=1
    ).tokens


def test_stop_string_that_spells_a_control_token_stops_there():
    """Catches a stop string that can never match because control tokens have no text."""
    one = engine("llama")
    kinds = one.tokenizer.vocabulary
    control = next(t for t in kinds.special_ids() if one.tokenizer.decode_piece(t) == b"")
    text = one.tokenizer.token_text(control)
    banned = dict.fromkeys(range(one.config.vocab_size), -math.inf)
    banned.pop(control)
    only = cudflash.SamplingConfig(temperature=0, logit_bias=banned)
    result = one.generate([1, 2], max_tokens=5, sampling=only, stop=[text])
    assert (result.tokens, result.text, result.stopped_by) == ((control,), "", control)


def test_interleaved_sessions_equal_the_same_run_alone():
    """Catches scratch, logits or generators shared between two answers in progress."""
    one = engine("muse-glimmer", rows=SMALL_ROWS)
    prompts = [ids("muse-glimmer", 40, seed=s) for s in (1, 2)]
    options = [{"max_tokens": 30, "seed": s} for s in (1, 2)]
    alone = [one.generate(p, **o).tokens for p, o in zip(prompts, options)]
    running = [one.session().generate(p, **o) for p, o in zip(prompts, options)]
    for pair in zip(*running):
        assert len(pair) == 2
    assert [g.result().tokens for g in running] == alone


def test_two_threads_on_two_sessions_give_the_same_answers():
    """Catches passes that overlap on shared scratch."""
    one = engine("llama", rows=SMALL_ROWS)
    prompts = [ids("llama", 60, seed=s) for s in range(4)]
    alone = [one.generate(p, max_tokens=25, seed=3).tokens for p in prompts]
    found = [None] * 4

    def work(i):
        found[i] = one.session().generate(prompts[i], max_tokens=25, seed=3).result().tokens

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert found == alone


@pytest.mark.parametrize("n_events", [1, 3, 5, 9])
def test_session_goes_on_after_a_cancelled_answer(n_events):
    """Catches half a block left in the caches by an answer that was closed or cancelled."""
    one = engine("gemma3", rows=SMALL_ROWS)
    session = one.session()
    prompt = ids("gemma3", 30)
    running = session.generate(prompt, max_tokens=20, seed=1)
    for _ in range(n_events):
        next(running)
    if n_events % 2:
        session.cancel()
        assert running.result().finish_reason == "cancelled"
    after = session.generate(prompt, max_tokens=20, seed=1).result()
    assert running.result().finish_reason == "cancelled"
    assert after.tokens == one.generate(prompt, max_tokens=20, seed=1).tokens


def test_seed_decides_and_is_recorded():
    """Catches a seed without effect, and a random one that cannot be repeated."""
    one = engine("qwen3")
    prompt = ids("qwen3", 12)
    hot = cudflash.SamplingConfig(temperature=1.5, top_k=0, top_p=1, min_p=0)
    first, second, other = (
        one.generate(prompt, max_tokens=20, sampling=hot, seed=s) for s in (1, 1, 2)
    )
    assert first.tokens == second.tokens != other.tokens
    unseeded = one.generate(prompt, max_tokens=20, sampling=hot)
    again = one.generate(prompt, max_tokens=20, sampling=hot, seed=unseeded.receipt["seed"])
    assert unseeded.tokens == again.tokens


def test_greedy_on_the_device_equals_the_sampler_chain():
    """Catches a fast path that chooses another token than the chain would."""
    one = engine("llama")
    prompt = ids("llama", 20)
    bias = cudflash.SamplingConfig(temperature=0, logit_bias={3: 0.0})  # forces the slow path
    fast, slow = greedy(one, prompt, 30), one.generate(prompt, max_tokens=30, sampling=bias)
    assert fast.tokens == slow.tokens


def test_logprobs_are_those_of_the_plain_logits():
    """Catches log-probabilities of another row, or after temperature."""
    one = engine("qwen2")
    prompt = ids("qwen2", 9)
    result = one.generate(prompt, max_tokens=6, seed=4, logprobs=3)
    rows = one.logits(prompt + list(result.tokens))[len(prompt) - 1 :].astype(np.float64)
    for entry, token, row in zip(result.logprobs, result.tokens, rows):
        expected = row - np.log(np.exp(row - row.max()).sum()) - row.max()
        assert entry.token == token and len(entry.top) == 3
        assert entry.logprob == pytest.approx(expected[token], abs=1e-5)
        assert [i for i, _ in entry.top] == np.argsort(-row, kind="stable")[:3].tolist()
    assert one.generate(prompt, max_tokens=6, seed=4).logprobs == ()


def test_limits_are_refused_before_any_work():
    """Catches a request that fails half-way: both numbers in the message, nothing evaluated."""
    one = engine("llama", n_ctx=64)
    session = one.session()
    with pytest.raises(ContextLengthError, match="65.*64"):
        session.generate(ids("llama", 65), max_tokens=0)
    with pytest.raises(ContextLengthError, match=r"60 \+ 5 = 65.*64"):
        session.generate(ids("llama", 60), max_tokens=5)
    with pytest.raises(ContextLengthError, match="65.*64"):
        one.logits(ids("llama", 65))
    assert session.tokens == ()
    full = greedy(session, ids("llama", 60), None)
    assert len(full.tokens) <= 4 and full.finish_reason in ("length", "stop")
    assert greedy(session, ids("llama", 64), None).tokens == ()
    assert greedy(session, ids("llama", 60), 4).usage.prompt_tokens == 60


@pytest.mark.parametrize("max_tokens", [0, 1, 2, 17, 40])
def test_max_tokens_is_exact(max_tokens):
    """Catches an answer one too long or short, with zero tokens leaving the prompt evaluated."""
    session = engine("qwen3").session()
    result = greedy(session, ids("qwen3", 10), max_tokens)
    assert len(result.tokens) == result.usage.completion_tokens <= max_tokens
    assert len(result.tokens) == max_tokens or result.finish_reason == "stop"
    assert session.tokens[:10] == tuple(ids("qwen3", 10))


@pytest.mark.parametrize(
    "options, error, words",
    [
        ({"max_tokens": -1}, UsageError, "max_tokens"),
        ({"max_tokens": 1.5}, UsageError, "max_tokens"),
        ({"max_tokens": 1, "stop": [""]}, UsageError, "stop string"),
        ({"max_tokens": 1, "logprobs": -1}, UsageError, "logprobs"),
        ({"max_tokens": 1, "sampling": {"temperature": 0}}, UsageError, "SamplingConfig"),
        ({"max_tokens": 1, "speculative": "on"}, UsageError, "needs a draft"),
        ({"max_tokens": 1, "speculative": "maybe"}, UsageError, "auto, on or off"),
        ({"max_tokens": 1, "verify_length": 7}, UsageError, "needs a draft"),
        ({"max_tokens": 1, "accept": "sometimes"}, UsageError, "match or ratio"),
        ({"max_tokens": 1, "drafter": object()}, UsageError, "drafter"),
        ({"max_tokens": 1, "seed": -7}, UsageError, "seed"),
    ],
)
def test_impossible_options_are_refused(options, error, words):
    """Catches an option that is silently ignored."""
    session = engine("llama").session()
    with pytest.raises(error, match=words):
        session.generate([1, 2], **options)
    assert session.tokens == ()


@pytest.mark.parametrize("prompt, words", [
    ([], "no tokens"), ([-1], "below"), ([10**6], "below"), (["a", 1], "token id"),
    (3, "expected text"), ([1.0], "token id"), ({"role": "user"}, "expected text"),
])  # fmt: skip
def test_impossible_prompts_are_refused(prompt, words):
    """Catches ids outside the vocabulary reaching the embedding table."""
    with pytest.raises(UsageError, match=words):
        engine("llama").session().generate(prompt, max_tokens=1)


def test_text_of_events_and_result_agree_with_the_tokenizer():
    """Catches text lost or doubled between tokens, and stop text in the answer."""
    one = engine("llama")
    running = one.session().generate("Hello", max_tokens=40, seed=5)
    events = list(running)
    result = running.result()
    texts = [e.text for e in events if isinstance(e, TokenEvent)]
    spoken = [t for t in result.tokens if t not in one.tokenizer.eog_ids]
    expected = one.tokenizer.decode(spoken, continuation=True).decode("utf-8", "replace")
    assert "".join(texts) == result.text == expected
    assert any(isinstance(e, PromptProgress) for e in events)
    if len(result.text) > 4:
        stop = result.text[2:4]
        cut = one.generate("Hello", max_tokens=40, seed=5, stop=[stop])
        assert cut.text == result.text[: result.text.index(stop)]
        assert cut.tokens == result.tokens[: len(cut.tokens)]


def test_result_is_plain_data():
    """Catches a result that cannot be written as JSON, or a receipt without its schema."""
    result = greedy(engine("llama"), [1, 2, 3], 4, logprobs=1)
    values = json.loads(json.dumps(result.to_dict()))
    assert set(values) >= {
        "text", "tokens", "logprobs", "usage", "finish_reason", "stats", "receipt"
    }  # fmt: skip
    receipt = values["receipt"]
    assert receipt["schema"] == "cudflash-receipt/1" and len(receipt["target"]["sha256"]) == 64
    assert receipt["activations"] in ("int8", "int8x2") and receipt["device"]["kind"] == "cpu"


def test_a_finished_answer_that_is_dropped_leaves_the_next_one_alone(monkeypatch):
    """Catches an answer that, collected late, drops the open block of the one in progress."""
    import gc

    from cudflash.events import Finished

    options = {"max_tokens": 12, "seed": 1, "ignore_eos": True}
    one = engine("llama")
    expected = one.generate([5, 6, 7], **options).tokens
    session = one.session()
    finished = [session.generate([1, 2, 3], **options)]
    while not isinstance(next(finished[0]), Finished):
        pass
    commit = session._runner.commit

    def collect_first(n_rows):
        finished.clear()
        gc.collect()
        return commit(n_rows)

    monkeypatch.setattr(session._runner, "commit", collect_first)
    assert session.generate([5, 6, 7], **options).result().tokens == expected
