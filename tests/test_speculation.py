"""Drafted answers are plain answers: scripted drafters on real tiny targets."""

import subprocess
import sys
from unittest import mock

import pytest

import cudflash
from cudflash.drafters import (
    AlwaysWrong,
    Cycle,
    KeepK,
    NoDrafter,
    Oracle,
    Random,
)
from cudflash.errors import UsageError
from cudflash.events import GateChanged, PrefixReused, RoundFinished, TokenEvent
from cudflash.receipt import read_receipt, validate_receipt, write_receipt
from cudflash.spec.stats import identities
from tests.helpers.engines import engine
from tests.helpers.speculation import (
    GREEDY,
    LENGTHS,
    SAMPLED,
    SCRIPTED,
    long_engine,
    plain_answer,
    same_answer,
)

PROMPT = (1, 2, 3)
TEMPERATURES = {"greedy": GREEDY, "sampled": SAMPLED}


def drafted(one, drafter, sampling=GREEDY, prompt=PROMPT, **options):
    options.setdefault("speculative", "on")
    return one.generate(list(prompt), sampling=sampling, seed=4, drafter=drafter, **options)


@pytest.mark.parametrize("arch", ["gemma3", "muse-glimmer"])
@pytest.mark.parametrize("sampling", TEMPERATURES.values(), ids=TEMPERATURES)
@pytest.mark.parametrize("name", SCRIPTED)
def test_two_thousand_tokens_are_those_of_plain_decoding(arch, sampling, name):
    """Catches rows of a rejected draft that survive somewhere, on full and wrapped sliding layers."""
    one = long_engine(arch)
    n_tokens = 2000
    options = {"max_tokens": n_tokens, "ignore_eos": True}
    plain = plain_answer(one, PROMPT, sampling, **options)
    assert len(plain.tokens) == n_tokens
    for length in LENGTHS:
        result = drafted(
            one, SCRIPTED[name](plain.tokens), sampling, verify_length=length, **options
        )
        same_answer(result, plain)
        counts = result.stats["speculative"]
        identities(counts)
        assert counts["used"] and counts["emitted"] == n_tokens - 1
        rate = {"oracle": 1.0, "always-wrong": 0.0}.get(name)
        assert rate is None or counts["acceptance_rate"] == rate


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_other_architectures_agree_over_full_acceptance_and_none(arch):
    """Catches a graph of one architecture whose rows are not independent."""
    one = long_engine(arch)
    for sampling in (GREEDY, SAMPLED):
        options = {"max_tokens": 120, "ignore_eos": True}
        plain = plain_answer(one, PROMPT, sampling, **options)
        for make in SCRIPTED.values():
            same_answer(drafted(one, make(plain.tokens), sampling, verify_length=15, **options), plain)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("make", [Oracle, lambda ids: KeepK(ids, 1)], ids=["oracle", "keep-1"])
def test_every_limit_is_exact(length, make):
    """Catches a block that crosses max_tokens: delivered, counted and committed must agree."""
    one = engine("llama", threads=1)
    full = plain_answer(one, PROMPT, GREEDY, max_tokens=40, ignore_eos=True)
    for limit in range(1, 2 * length + 4):
        session = one.session()
        result = session.generate(
            list(PROMPT), max_tokens=limit, sampling=GREEDY, seed=4, ignore_eos=True,
            drafter=make(full.tokens), speculative="on", verify_length=length,
        ).result()  # fmt: skip
        assert result.tokens == full.tokens[:limit]
        assert result.usage.completion_tokens == limit and result.finish_reason == "length"
        assert session.tokens == (*PROMPT, *full.tokens[: limit - 1])


@pytest.mark.parametrize("length", LENGTHS)
def test_context_is_filled_to_its_last_row(length):
    """Catches a block that begins where the context has no room for it."""
    one = engine("llama", n_ctx=61, threads=1)
    plain = plain_answer(one, PROMPT, GREEDY, max_tokens=None, ignore_eos=True)
    assert len(plain.tokens) == 58
    for make in SCRIPTED.values():
        result = drafted(
            one, make(plain.tokens), max_tokens=None, ignore_eos=True, verify_length=length
        )
        same_answer(result, plain)


def _stops(ids, at):
    """The token at an index and that it is not there before."""
    return ids[at] not in ids[:at]


@pytest.mark.parametrize("length", LENGTHS)
def test_stop_token_wherever_it_falls_in_a_block(length):
    """Catches a stop that is missed as first, accepted, bonus or corrected token, or passed over."""
    one = engine("muse-glimmer", threads=1)
    ids = plain_answer(one, PROMPT, SAMPLED, max_tokens=40, ignore_eos=True).tokens
    places = [i for i in range(40) if _stops(ids, i)]
    assert places[0] == 0 and len(places) > 20
    seen = set()
    for at in places[::4] + [i for i in places if i % (length + 1) == 0]:
        options = {"max_tokens": 40, "ignore_eos": True, "stop": [ids[at]]}
        plain = plain_answer(one, PROMPT, SAMPLED, **{**options, "stop": (ids[at],)})
        assert (plain.stopped_by, len(plain.tokens)) == (ids[at], at + 1)
        for make in (Oracle, AlwaysWrong, lambda ids: KeepK(ids, 2)):
            result = drafted(one, make(ids), SAMPLED, verify_length=length, **options)
            same_answer(result, plain)
            trace = result.speculation["trace"]
            seen.add(trace[-1]["end"] if trace else "first")
    assert seen == {"first", "stopped", "bonus", "corrected"}


@pytest.mark.parametrize("sampling", TEMPERATURES.values(), ids=TEMPERATURES)
def test_stop_string_inside_an_accepted_run(sampling):
    """Catches a string whose end only the tail of a run is searched for."""
    one = engine("llama", threads=1)
    whole = plain_answer(one, PROMPT, sampling, max_tokens=80, ignore_eos=True)
    assert len(whole.text) > 30
    for start in range(0, 30, 3):
        string = whole.text[start : start + 3]
        plain = plain_answer(
            one, PROMPT, sampling, max_tokens=80, ignore_eos=True, stop=(string,)
        )
        assert plain.stopped_by == string and string not in plain.text
        for length in LENGTHS:
            result = drafted(
                one, Oracle(whole.tokens), sampling, max_tokens=80, ignore_eos=True,
                stop=[string], verify_length=length,
            )  # fmt: skip
            same_answer(result, plain)


EDITED = {
    "penalties": {"repeat_penalty": 1.3, "frequency_penalty": 0.2, "presence_penalty": 0.1},
    "bias": {"logit_bias": {5: 3.0, 7: float("-inf"), 9: -2.0}},
    "dry": {"dry_multiplier": 0.8, "dry_base": 1.75, "dry_allowed_length": 1},
    "xtc": {"xtc_probability": 0.5, "xtc_threshold": 0.05},
    "mirostat": {"mirostat": 1},
    "mirostat 2": {"mirostat": 2},
    "everything": {
        "repeat_penalty": 1.1, "logit_bias": {5: 1.0}, "top_n_sigma": 2.0, "typical_p": 0.9,
        "dynatemp_range": 0.3, "top_k": 30,
    },
}  # fmt: skip


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("edit", EDITED.values(), ids=EDITED)
def test_every_sampler_sees_exactly_the_tokens_before_a_row(edit, temperature):
    """Catches penalties that count rejected drafts, or that are dropped while drafting."""
    one = engine("llama", threads=1)
    sampling = cudflash.SamplingConfig(temperature=temperature, **edit)
    options = {"max_tokens": 60, "ignore_eos": True, "logprobs": 3}
    plain = plain_answer(one, PROMPT, sampling, **options)
    unedited = plain_answer(
        one, PROMPT, cudflash.SamplingConfig(temperature=temperature), **options
    )
    if temperature or "mirostat" not in edit:  # which draws, so it is no part of temperature 0
        assert plain.tokens != unedited.tokens, "the edit must matter, or nothing is tested"
    for make, length in zip(SCRIPTED.values(), (15, 3, 7, 15, 3), strict=True):
        result = drafted(one, make(plain.tokens), sampling, verify_length=length, **options)
        same_answer(result, plain)


@pytest.mark.parametrize("sampling", TEMPERATURES.values(), ids=TEMPERATURES)
def test_logprobs_belong_to_the_emitted_tokens(sampling):
    """Catches log-probabilities of a neighbouring row, or of a rejected draft."""
    one = engine("gemma3", threads=1)
    options = {"max_tokens": 60, "ignore_eos": True, "logprobs": 5, "row_digests": True}
    plain = plain_answer(one, PROMPT, sampling, **options)
    for make in SCRIPTED.values():
        result = drafted(one, make(plain.tokens), sampling, verify_length=7, **options)
        same_answer(result, plain)
        assert result.row_digests == plain.row_digests and len(set(plain.row_digests)) > 30
        assert [entry.token for entry in result.logprobs] == list(result.tokens)


def test_ratio_repeats_with_its_seed_and_differs_with_another():
    """Catches a rule that draws from anywhere else, and one that ignores the seed."""
    one = engine("muse-glimmer", threads=1)
    options = {"max_tokens": 80, "ignore_eos": True, "accept": "ratio", "sampling": SAMPLED,
               "speculative": "on"}  # fmt: skip
    plain = plain_answer(one, PROMPT, SAMPLED, max_tokens=80, ignore_eos=True)

    def answer(seed, length=7):
        return one.generate(
            list(PROMPT), seed=seed, drafter=KeepK(plain.tokens, 3), verify_length=length, **options
        )

    first, again, other = answer(4), answer(4), answer(5)
    assert first.tokens == again.tokens and first.speculation == again.speculation
    assert first.tokens != other.tokens
    assert first.speculation["rule"] == "ratio"
    assert any("trials" in record for record in first.speculation["trace"])
    validate_receipt(first.receipt)


@pytest.mark.parametrize("sampling", TEMPERATURES.values(), ids=TEMPERATURES)
def test_cancelling_in_any_round_leaves_only_emitted_tokens(sampling):
    """Catches an open block after a cancellation between the events of a round."""
    one = engine("gemma3", threads=1, rows=16)
    plain = plain_answer(one, PROMPT, sampling, max_tokens=60, ignore_eos=True)
    for n_events in range(3, 41, 3):
        session = one.session()
        running = session.generate(
            list(PROMPT), max_tokens=60, sampling=sampling, seed=4, ignore_eos=True,
            drafter=KeepK(plain.tokens, 4), speculative="on", verify_length=7,
        )  # fmt: skip
        for _ in range(n_events):
            next(running)
        running.close()
        tokens = running.result().tokens
        assert tokens == plain.tokens[: len(tokens)] and running.result().finish_reason == "cancelled"
        assert session._runner.cache.pending == 0
        assert session.tokens == (*PROMPT, *tokens[:-1])
        follow = [*PROMPT, *tokens, 9]
        warm = session.generate(
            follow, max_tokens=9, sampling=sampling, seed=1, drafter=Random(1)
        ).result()
        cold = one.generate(follow, max_tokens=9, sampling=sampling, seed=1, speculative="off")
        assert warm.tokens == cold.tokens and warm.usage.cached_tokens == len(follow) - 2


def test_gate_closes_comes_back_and_is_told(monkeypatch):
    """Catches a gate that stays closed, and drafts made while it is."""
    one = long_engine("gemma3")
    monkeypatch.setattr(one, "round_costs", None)  # the gate alone decides
    options = {"max_tokens": 400, "ignore_eos": True}
    plain = plain_answer(one, PROMPT, GREEDY, **options)
    running = one.session().generate(
        list(PROMPT), sampling=GREEDY, seed=4, drafter=AlwaysWrong(plain.tokens),
        verify_length=15, **options,
    )  # fmt: skip
    events = list(running)
    same_answer(running.result(), plain)
    kinds = [event.event.kind for event in events if isinstance(event, GateChanged)]
    assert kinds[:3] == ["closed", "reopened", "closed"]
    records = [event.record for event in events if isinstance(event, RoundFinished)]
    assert {r.skipped for r in records} >= {"", "gate"}
    assert all(not r.drafted for r in records if r.skipped)
    stats = running.result().stats["speculative"]
    assert stats["skipped"]["gate"] > 300 and stats["rounds"] == len(records)
    always = drafted(one, AlwaysWrong(plain.tokens), verify_length=15, **options)
    assert "gate" not in always.stats["speculative"]["skipped"]


def test_events_of_a_round_come_in_order():
    """Catches a round told before its tokens, or tokens that no round accounts for."""
    one = engine("llama", threads=1)
    plain = plain_answer(one, PROMPT, GREEDY, max_tokens=30, ignore_eos=True)
    running = one.session().generate(
        list(PROMPT), max_tokens=30, sampling=GREEDY, ignore_eos=True, drafter=Oracle(plain.tokens),
        speculative="on", verify_length=7,
    )  # fmt: skip
    tokens, emitted = [], []
    for event in running:
        if isinstance(event, TokenEvent):
            tokens.append(event.token)
        elif isinstance(event, RoundFinished):
            emitted.append(event.record.emitted)
            assert tokens[-event.record.emitted :] == list(
                event.record.decided[: event.record.emitted]
            )
    assert 1 + sum(emitted) == len(tokens) == 30 and emitted[0] == 8


def test_settings_are_refused_before_any_work():
    """Catches an illegal length that is rounded, ignored, or found out in the first round."""
    one = engine("llama", threads=1)
    session = one.session()
    for options, words in (
        ({"verify_length": 5}, "3, 7 or 15"),
        ({"verify_length": 16}, "3, 7 or 15"),
        ({"verify_length": True}, "3, 7 or 15"),
        ({"accept": "maybe"}, "match or ratio"),
        ({"speculative": "perhaps"}, "auto, on or off"),
        (
            {"accept": "ratio", "sampling": cudflash.SamplingConfig(mirostat=1)},
            "mirostat",
        ),
    ):
        with pytest.raises(UsageError, match=words):
            session.generate([1], max_tokens=4, drafter=Oracle([1]), **options)
    with pytest.raises(UsageError, match="needs a draft"):
        session.generate([1], max_tokens=4, speculative="on")

    class Small(NoDrafter):
        block_size = 8

    with pytest.raises(UsageError, match="block has 8 rows"):
        session.generate([1], max_tokens=4, drafter=Small(), verify_length=15)
    assert session.tokens == ()


def test_off_is_plain_and_says_so():
    """Catches a drafter that is asked although drafting is off."""
    one = engine("llama", threads=1)

    class Forbidden(NoDrafter):
        def propose(self, anchor, n, context):
            raise AssertionError

        observe = propose

    result = one.generate(
        list(PROMPT), max_tokens=5, sampling=GREEDY, drafter=Forbidden(), speculative="off"
    )
    assert result.stats["speculative"] is None
    assert result.speculation == {
        "mode": "off", "used": False, "reason": "it is switched off for this answer",
    }  # fmt: skip
    validate_receipt(result.receipt)


def test_drafter_of_the_engine_serves_every_session():
    """Catches a drafter given to load that is ignored, or shared where a class was given."""
    path = engine("llama").gguf.path
    one = cudflash.load(path, device="cpu", n_ctx=256, threads=1, drafter=lambda: Random(3))
    sessions = [one.session() for _ in range(2)]
    running = [
        s.generate([1, 2, 3], max_tokens=20, sampling=GREEDY, ignore_eos=True, speculative="on")
        for s in sessions
    ]
    for _ in range(10):  # interleaved
        for r in running:
            next(r)
    results = [r.result() for r in running]
    assert results[0].tokens == results[1].tokens
    assert all(r.stats["speculative"]["used"] for r in results)
    assert all(r.speculation["fault"] is None for r in results)


@pytest.mark.parametrize("arch", ["llama", "gemma3"])
def test_turns_reuse_rows_with_a_drafter(arch):
    """Catches a scripted drafter that makes a session evaluate its prompt again, or a wrong row."""
    one = engine(arch, threads=1, rows=16)
    session = one.session()
    text = list(range(5, 45))
    for turn in range(3):
        plain = plain_answer(one, tuple(text), GREEDY, max_tokens=20, ignore_eos=True)
        running = session.generate(
            text, max_tokens=20, sampling=GREEDY, ignore_eos=True, drafter=KeepK(plain.tokens, 2),
            speculative="on",
        )  # fmt: skip
        events = list(running)
        assert running.result().tokens == plain.tokens
        if turn:
            assert isinstance(events[1], PrefixReused)
            assert running.result().usage.cached_tokens == len(text) - 4
        counts = running.result().stats["speculative"]
        assert counts["drafted"] and counts["accepted"]
        text += [*plain.tokens, 7, 8, 9]


def test_plain_step_is_measured_once_and_compared_with():
    """Catches a speed-up estimated against nothing."""
    one = cudflash.load(engine("llama").gguf.path, device="cpu", n_ctx=128, threads=1)
    answer = {"max_tokens": 40, "sampling": GREEDY, "ignore_eos": True, "speculative": "on"}
    result = one.generate([1, 2, 3], drafter=Random(1), **answer)
    stats = result.stats["speculative"]
    assert one.plain_step.ms > 0 and stats["estimated_speedup"] > 0
    assert stats["plain_step_ms"] is not None


def test_cancelled_answer_measures_nothing():
    """Catches passes that are run after the user has said stop."""
    one = cudflash.load(engine("llama").gguf.path, device="cpu", n_ctx=128, threads=1)
    session = one.session()
    passes = []
    step = session._runner.step

    def counted(*args, **kwargs):
        passes.append(args)
        return step(*args, **kwargs)

    with mock.patch.object(session._runner, "step", counted):
        running = session.generate(
            [1, 2, 3], max_tokens=60, sampling=GREEDY, ignore_eos=True, drafter=Random(1),
            speculative="on",
        )  # fmt: skip
        for _ in range(8):
            next(running)
        before = len(passes)
        running.close()
    assert running.result().finish_reason == "cancelled"
    assert len(passes) == before > 1 and one.plain_step.ms is None
    assert running.result().stats["speculative"]["estimated_speedup"] is None


@pytest.mark.parametrize("kind", ["plain", "scripted", "ratio"])
def test_receipt_of_an_engine_follows_the_schema(kind, tmp_path):
    """Catches a key that an engine writes and the schema does not know, or the reverse."""
    one = engine("muse-glimmer", threads=1)
    options = {} if kind == "plain" else {"drafter": Random(2), "speculative": "on"}
    if kind == "ratio":
        options["accept"] = "ratio"
    receipt = one.generate(
        list(PROMPT), max_tokens=20, sampling=SAMPLED, seed=4, ignore_eos=True, **options
    ).receipt
    write_receipt(tmp_path / "receipt.json", receipt)
    assert read_receipt(tmp_path / "receipt.json") == validate_receipt(receipt)
    assert receipt["speculative"]["used"] == (kind != "plain")


def test_drafters_are_reached_from_the_package():
    """Catches a public module that has to be imported by hand."""
    code = "import cudflash; print(cudflash.drafters.Oracle([1]).name, cudflash.verify.MAX_TOKENS)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["oracle", "64"]


def test_cycle_restarts_with_every_answer():
    """Catches scripted state that leaks from one answer into the next."""
    one = engine("llama", threads=1)
    plain = plain_answer(one, PROMPT, GREEDY, max_tokens=40, ignore_eos=True)
    cycle = Cycle(plain.tokens, (2, 0))
    one_, two = (drafted(one, cycle, max_tokens=40, ignore_eos=True) for _ in range(2))
    assert one_.speculation["trace"] == two.speculation["trace"]
