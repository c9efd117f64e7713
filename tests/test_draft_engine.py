"""Engines with a draft file: pairing, memory, turns, faults, what receipts say."""

import shutil

import numpy as np
import pytest

import cudflash
from cudflash.drafters import Oracle
from cudflash.errors import FormatError, NumericsError, PairingError, UsageError
from cudflash.events import DrafterFailed, PrefixReused
from cudflash.identity import pair_identity, write_identity
from cudflash.pair import open_pair
from cudflash.plan import plan
from cudflash.receipt import read_receipt, validate_receipt, write_receipt
from tests.helpers.draft_vectors import draft_case, quantised_draft
from tests.helpers.speculation import GREEDY, SAMPLED, draft_engine, plain_answer, same_answer
from tests.helpers.vectors import target_case

NAMES = ("v1-muse-swa", "v1-qwen3-full", "v2-muse-full")
DIRECTORY = draft_case("v1-qwen3-full").directory
TARGET = target_case("qwen3", "f32").path


def prompt(one, n, seed=0):
    return tuple(np.random.default_rng(seed).integers(0, one.config.vocab_size, n).tolist())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("accept", ["match", "ratio"])
def test_answers_are_those_of_plain_decoding(name, accept):
    """Catches a draft whose passes disturb the target, at every length and temperature."""
    one = draft_engine(name)
    ids = prompt(one, 60)
    for sampling in (GREEDY, SAMPLED):
        options = {"max_tokens": 90, "ignore_eos": True, "logprobs": 3}
        plain = plain_answer(one, ids, sampling, **options)
        for length in (3, 7, 15):
            if length >= one.draft_config.block_size:
                with pytest.raises(UsageError, match=f"has {one.draft_config.block_size} rows"):
                    one.generate(list(ids), verify_length=length, **options)
                continue
            result = one.generate(
                list(ids), sampling=sampling, seed=4, verify_length=length, accept=accept,
                speculative="on", **options,
            )  # fmt: skip
            if accept == "match" or sampling is GREEDY:
                same_answer(result, plain)
            assert result.stats["speculative"]["used"] and not result.stats["speculative"]["reason"]
            assert result.speculation["fault"] is None
            validate_receipt(result.receipt)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("settings", [{}, {"n_ctx": 300, "activations": "int8"}],
                         ids=["default", "int8"])  # fmt: skip
def test_plan_counts_everything_the_draft_takes(name, settings):
    """Catches a draft whose weights, context or tap buffers are found out at the first request."""
    one = draft_engine(name, **settings)
    session = one.session()
    runner = session._drafter.drafter.runner
    allocated = one.draft.allocator.n_bytes + runner.allocator.n_bytes
    for kind, n_bytes in allocated.items():
        assert one.plan.draft[kind] == pytest.approx(n_bytes, rel=0.01), kind
    assert session._runner.allocator.n_bytes["taps"] == one.plan.taps
    everything = allocated + one.allocator.n_bytes + session._runner.allocator.n_bytes
    assert one.plan.total == pytest.approx(everything.total(), rel=0.01)
    settings = {"n_ctx": 512, "device": "cpu", **settings}
    assert plan(one.gguf.path, draft_case(name).directory, **settings) == one.plan
    before = everything.total()
    session.generate(list(prompt(one, 40)), max_tokens=30, sampling=GREEDY).result()
    after = one.draft.allocator.n_bytes + runner.allocator.n_bytes + one.allocator.n_bytes
    assert (after + session._runner.allocator.n_bytes).total() == before


def test_quantised_draft_drafts_too():
    """Catches packed projections of a draft that only float drafts exercise."""
    path = quantised_draft("v2-muse-full")
    one = cudflash.load(
        target_case("muse-glimmer", "kq").path, path, device="cpu", n_ctx=256, threads=1
    )
    ids = prompt(one, 30)
    plain = plain_answer(one, ids, GREEDY, max_tokens=40, ignore_eos=True)
    for sampling in (GREEDY, SAMPLED):
        result = one.generate(
            list(ids), max_tokens=40, sampling=sampling, seed=4, ignore_eos=True, accept="ratio",
            speculative="on",
        )  # fmt: skip
        assert result.stats["speculative"]["used"]
        assert sampling is SAMPLED or result.tokens == plain.tokens


@pytest.mark.parametrize("name", ["v1-muse-swa", "v2-muse-full"])
@pytest.mark.parametrize("temperature", [0.0, 1e-37])
def test_dynamic_temperature_around_nothing_drafts(name, temperature):
    """Catches a division by a temperature of 0 where dynamic temperature makes the target draw."""
    one = draft_engine(name)
    sampling = cudflash.SamplingConfig(temperature=temperature, dynatemp_range=0.5)
    for accept in ("ratio", "match"):
        result = one.generate(
            [1, 2, 3], max_tokens=60, sampling=sampling, seed=4, ignore_eos=True, accept=accept,
            speculative="on",
        )  # fmt: skip
        counts = result.stats["speculative"]
        assert counts["used"] and result.speculation["fault"] is None
        assert counts["rule"] == accept and len(result.tokens) == 60
        validate_receipt(result.receipt)


# -- turns ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("n_shared", [0, 1, 20, 100, 199])
def test_second_turn_equals_a_cold_one_draft_included(name, n_shared):
    """Catches a target and a draft rewound to different rows: answers and every proposal."""
    one = draft_engine(name)
    session = one.session()
    first = list(prompt(one, 200))
    options = {"max_tokens": 40, "sampling": GREEDY, "ignore_eos": True, "speculative": "on"}
    session.generate(first, **options).result()
    second = first[:n_shared] + list(prompt(one, 30, seed=5))
    running = session.generate(second, **options)
    events = list(running)
    warm, cold = running.result(), one.generate(second, **options)
    assert warm.tokens == cold.tokens
    assert warm.speculation["trace"] == cold.speculation["trace"]
    assert isinstance(events[1], PrefixReused)
    cached = warm.usage.cached_tokens
    assert cached <= len(second) and cached == events[1].cached_tokens
    if cached < min(n_shared, len(second) - 1):
        assert "no longer holds" in events[1].reason
    runners = session._runner, session._drafter.drafter.runner
    fresh = one.session()
    fresh.generate(second, **options).result()
    assert runners[0].cache.digest() == fresh._runner.cache.digest()
    assert runners[1].digest() == fresh._drafter.drafter.runner.digest()


@pytest.mark.parametrize("name", NAMES)
def test_the_same_prompt_again_drafts_as_before(name):
    """Catches a cache hit after which nothing, or less, is drafted."""
    one = draft_engine(name)
    session = one.session()
    options = {"max_tokens": 60, "sampling": GREEDY, "ignore_eos": True, "speculative": "on"}
    ids = list(prompt(one, 80))
    first, second = (session.generate(ids, **options).result() for _ in range(2))
    assert first.tokens == second.tokens and second.usage.cached_tokens >= 79 - 60
    counts = [r.stats["speculative"] for r in (first, second)]
    for key in ("rounds", "drafted", "tested", "accepted"):
        assert counts[1][key] == counts[0][key], key
    assert second.speculation["trace"][0]["drafted"]


def test_conversation_reuses_everything_with_a_draft():
    """Catches speculation that turns prefix hits to zero."""
    one = draft_engine("v1-qwen3-full")
    session = one.session()
    text = list(prompt(one, 50))
    for turn in range(3):
        result = session.generate(
            text, max_tokens=20, sampling=GREEDY, ignore_eos=True, speculative="on"
        ).result()
        assert result.usage.cached_tokens == (len(text) - 4 if turn else 0)
        text += [*result.tokens, 1, 2, 3]


def test_answer_without_drafting_in_between_is_caught_up():
    """Catches a hole in the draft's context after an answer that did not feed it."""
    one = draft_engine("v1-qwen3-full")
    session = one.session()
    options = {"max_tokens": 20, "sampling": GREEDY, "ignore_eos": True}
    text = list(prompt(one, 50))
    text += session.generate(text, speculative="on", **options).result().tokens
    text += session.generate(text, speculative="off", **options).result().tokens
    running = session.generate(text, speculative="on", **options)
    events = list(running)
    assert "draft's context no longer holds" in events[1].reason
    cold = one.generate(text, speculative="on", **options)
    assert running.result().speculation["trace"] == cold.speculation["trace"]


@pytest.mark.parametrize("between", ["plain", "scripted"])
def test_other_prompt_without_the_draft_in_between_is_noticed(between):
    """A draft context that holds another prompt's rows: right answers, bad proposals, no error.

    The answer in between shares no token with the first prompt, and the third one continues it.
    """
    one = draft_engine("v2-muse-full")
    session = one.session()
    first, other = list(range(10, 60)), list(range(100, 150))
    session.generate(first, max_tokens=8, sampling=GREEDY, speculative="on").result()
    options = {"speculative": "off"} if between == "plain" else {
        "speculative": "on", "drafter": Oracle((1, 2, 3))}  # fmt: skip
    session.generate(other, max_tokens=8, sampling=GREEDY, **options).result()
    for longer in ([*other, 7, 8, 9], [*other, 7, 8]):
        got = session.generate(longer, max_tokens=8, sampling=GREEDY, speculative="on").result()
        assert session.check_draft_context() is None
        cold = one.generate(longer, max_tokens=8, sampling=GREEDY, speculative="on")
        assert got.speculation["trace"] == cold.speculation["trace"]
    assert got.usage.cached_tokens == len(longer) - 1  # what both hold is still reused


def test_fifty_requests_in_one_session_equal_cold_ones(monkeypatch):
    """Catches a draft position that is not reset, shorter prompts after longer ones."""
    one = draft_engine("v1-muse-swa")
    monkeypatch.setattr(one, "round_costs", None)  # equal traces: no decision by measured times
    session = one.session()
    rng = np.random.default_rng(3)
    for i in range(50):
        ids = list(prompt(one, int(rng.integers(1, 200)), seed=i % 7))
        options = {
            "max_tokens": int(rng.integers(0, 25)), "sampling": SAMPLED, "seed": i,
            "verify_length": (3, 7, 15)[i % 3], "speculative": ("on", "auto")[i % 2],
        }  # fmt: skip
        warm = session.generate(ids, **options).result()
        cold = one.generate(ids, **options)
        assert warm.tokens == cold.tokens
        assert warm.speculation["trace"] == cold.speculation["trace"]
        assert warm.speculation["fault"] is None


def test_prompt_lengths_around_every_boundary():
    """Catches a draft context that is wrong at the window, the sink, or a chunk's end."""
    one = draft_engine("v1-muse-swa")
    window, sink = one.draft_config.window, one.draft_config.sink
    for n in (*range(1, 6), 15, 16, 17, window - 1, window, window + 1, 63, sink, sink + 1,
              sink + window, sink + window + 1, 255, 256, 257):  # fmt: skip
        options = {"max_tokens": 12, "ignore_eos": True}
        plain = plain_answer(one, prompt(one, n), GREEDY, **options)
        result = one.generate(list(prompt(one, n)), sampling=GREEDY, speculative="on", **options)
        assert result.tokens == plain.tokens and result.speculation["fault"] is None


# -- faults ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["fc", "head"])
def test_nan_in_the_draft_ends_in_plain_decoding(where):
    """Catches NaN logits of a draft turned into a proposal, or into an error for the user."""
    one = cudflash.load(TARGET, DIRECTORY, device="cpu", n_ctx=256, threads=1)
    plain = one.generate(
        [1, 2, 3], max_tokens=40, sampling=GREEDY, ignore_eos=True, speculative="off"
    )
    norm = one.draft.model.hidden_norm if where == "fc" else one.draft.model.output_norm
    sound = one.ops.download(norm)
    session = one.session()
    one.ops.copy_in(norm, np.full_like(sound, np.nan))
    options = {"max_tokens": 40, "sampling": GREEDY, "ignore_eos": True, "speculative": "on"}
    running = session.generate([1, 2, 3], **options)
    events = list(running)
    assert running.result().tokens == plain.tokens
    told = [event for event in events if isinstance(event, DrafterFailed)]
    assert len(told) == 1 and "finite" in told[0].fault.reason
    assert running.result().speculation["fault"]["kind"] == NumericsError.__name__
    one.ops.copy_in(norm, sound)
    healed = session.generate([1, 2, 3], **options).result()
    assert healed.speculation["fault"] is None and healed.stats["speculative"]["used"]


# -- pairing and receipts -------------------------------------------------------------------------


def test_wrong_files_are_one_sentence_each(tmp_path):
    """Catches a draft loaded as a model, a model loaded as a draft, a draft of another model."""
    shutil.copytree(DIRECTORY, tmp_path / "draft")
    (tmp_path / "empty").mkdir()
    for target, draft, error, words in (
        (tmp_path / "draft", None, UsageError, "this is a draft"),
        (tmp_path / "empty", None, UsageError, "a directory"),
        (quantised_draft("v2-muse-full"), None, UsageError, "this is a draft"),
        (TARGET, TARGET, UsageError, "this is a target"),
        (TARGET, tmp_path / "empty", FormatError, "without config.json"),
        (TARGET, draft_case("v1-muse-swa").directory, PairingError, "does not belong"),
    ):
        with pytest.raises(error, match=words) as caught:
            cudflash.load(target, draft, device="cpu", n_ctx=64)
        assert "\n" not in str(caught.value)


def test_receipt_tells_what_is_in_effect(tmp_path):
    """Catches an override that is used and not recorded, or recorded as the file's."""
    case = draft_case("v1-muse-swa")
    one = draft_engine("v1-muse-swa", draft_window=16, draft_sink=8, n_ctx=128)
    assert any("overridden: 16 instead of 32" in note for note in one.notes)
    result = one.generate([1, 2, 3], max_tokens=30, sampling=GREEDY, ignore_eos=True)
    receipt = result.receipt
    write_receipt(tmp_path / "r.json", receipt)
    assert read_receipt(tmp_path / "r.json") == validate_receipt(receipt)
    draft = receipt["draft"]
    assert draft["window"] == {"value": 16, "source": "override", "file_value": 32}
    assert draft["sink"] == {"value": 8, "source": "override", "file_value": None}
    assert draft["path"] == str(case.directory) and len(draft["sha256"]) == 64
    assert draft["layer_windows"] == [16] * 5
    found = [finding["name"] for finding in receipt["speculative"]["findings"]]
    assert "window-not-from-file" in found
    usual = draft_engine("v1-muse-swa").generate([1, 2, 3], max_tokens=2).receipt["draft"]
    assert usual["window"] == {"value": 32, "source": "file", "file_value": 32}
    assert usual["sink"]["source"] == "absent" and usual["sink"]["value"] == 64
    scripted = one.generate([1], max_tokens=3, drafter=Oracle([1])).receipt
    assert scripted["draft"] is None and scripted["speculative"]["drafter"] == "oracle"


def test_draft_block_of_the_engine_is_that_of_the_rounds():
    """Catches a debugging entrance that computes something else than the rounds do."""
    one = draft_engine("v1-qwen3-full")
    ids = list(prompt(one, 40))
    result = one.generate(ids, max_tokens=20, sampling=GREEDY, ignore_eos=True, speculative="on")
    record = result.speculation["trace"][0]
    block = one.draft_block(one.taps(ids, one.draft_config.taps), record["anchor"])
    n = len(record["drafted"])
    assert list(block.tokens[:n]) == record["drafted"]


def test_verify_length_and_short_blocks_change_no_token():
    """Catches the trained block length taken for a property of the answer."""
    full, short = (
        draft_engine("v1-qwen3-full", draft_full_block=which) for which in (True, False)
    )
    ids = list(prompt(full, 40))
    options = {"max_tokens": 60, "sampling": GREEDY, "ignore_eos": True, "speculative": "on",
               "verify_length": 3}  # fmt: skip
    one, two = full.generate(ids, **options), short.generate(ids, **options)
    assert one.tokens == two.tokens
    assert one.receipt["draft"]["full_block"] and not two.receipt["draft"]["full_block"]
    drafted = [[r["drafted"] for r in x.speculation["trace"]] for x in (one, two)]
    assert drafted[0] != drafted[1], "rows of a block see one another"


def test_identity_refuses_any_other_pair(tmp_path):
    """Catches a field that is written and never compared."""
    pair = open_pair(TARGET, DIRECTORY)
    identity = pair_identity(pair, 128, "int8")
    path = tmp_path / "id.json"
    write_identity(path, identity)
    arguments = {"device": "cpu", "n_ctx": 128, "activations": "int8", "identity": path}
    cudflash.load(TARGET, DIRECTORY, **arguments)
    for name, value in identity.items():
        if name == "schema":
            continue
        other = [9] if isinstance(value, list) else (value or 0) + 1 if not isinstance(
            value, str
        ) else value + "0"  # fmt: skip
        write_identity(path, {**identity, name: other})
        with pytest.raises(PairingError, match=f"{name} differs") as caught:
            cudflash.load(TARGET, DIRECTORY, **arguments)
        assert "expected" in str(caught.value) and "found" in str(caught.value)
        write_identity(path, {k: v for k, v in identity.items() if k != name})
        with pytest.raises(PairingError, match=f"{name} differs, expected nothing"):
            cudflash.load(TARGET, DIRECTORY, **arguments)
    write_identity(path, {**identity, "novel": 1})
    with pytest.raises(PairingError, match="novel differs"):
        cudflash.load(TARGET, DIRECTORY, **arguments)
    with pytest.raises(UsageError, match="no draft was given"):
        cudflash.load(TARGET, **arguments)
    path.write_text("{}")
    with pytest.raises(FormatError, match="schema"):
        cudflash.load(TARGET, DIRECTORY, **arguments)
