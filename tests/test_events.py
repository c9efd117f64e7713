"""What a watcher is told: facts before the first token, gate and context after every round."""

import json

import pytest

from cudflash.drafters import KeepK
from cudflash.events import PromptProgress, RoundFinished, Started
from cudflash.spec.gate import AcceptanceGate
from tests.helpers.engines import engine
from tests.helpers.speculation import GREEDY, draft_engine

PROMPT = list(range(3, 90))


def run(one, **options):
    """Events of a greedy answer of 60 tokens."""
    settings = {"max_tokens": 60, "sampling": GREEDY, "ignore_eos": True, **options}
    return list(one.session().generate(PROMPT, **settings))


def test_first_event_of_a_plain_answer_says_why_nothing_is_drafted():
    """Catches a monitor that shows a draft where none is at work, or no reason."""
    first = run(engine("llama"))[0]
    assert isinstance(first, Started)
    facts = first.facts
    assert facts["drafter"] is None and facts["reason"] == "no draft is loaded"
    assert (facts["prompt_tokens"], facts["max_tokens"], facts["n_ctx"]) == (87, 60, 512)
    assert facts["target"]["file"] == "llama-kq.gguf" and facts["device"]["kind"] == "cpu"
    assert json.loads(json.dumps(facts)) == facts


@pytest.mark.parametrize("name", ["v1-muse-swa", "v2-muse-full", "v1-qwen3-full"])
def test_rows_held_are_those_of_the_context_and_within_its_bounds(name):
    """Catches a bound that is exceeded, rows counted twice, and bytes of another geometry."""
    one = draft_engine(name)
    events = run(one, speculative="on")
    facts = events[0].facts["drafter"]
    config, geometry = one.draft_config, facts["geometry"]
    assert facts["kind"] == config.kind and facts["taps"] == list(config.taps)
    assert geometry["window"] == config.window and geometry["layers"] == config.n_layers
    row_bytes = 2 * 4 * config.n_kv_heads * config.head_dim
    rounds = [e for e in events if isinstance(e, RoundFinished)]
    assert rounds
    for event in [e for e in events if isinstance(e, PromptProgress)] + rounds:
        held = event.context
        per_layer = [
            held.length
            if layer.window is None
            else min(held.length, config.sink)
            + min(max(held.length - config.sink, 0), layer.window)
            for layer in config.layers
        ]
        assert held.rows == max(per_layer) <= geometry["row_limit"]
        assert held.n_bytes == row_bytes * sum(per_layer) <= geometry["byte_limit"]
    for event in rounds:
        assert event.context.length == event.record.n_past + event.record.emitted


def test_gate_status_after_every_round_is_a_replayed_gate(monkeypatch):
    """Catches a status that is one round late, or counts rounds of the warm-up."""
    one = engine("llama")
    monkeypatch.setattr(one, "round_costs", None)  # the gate alone decides
    plain = one.generate(PROMPT, max_tokens=200, sampling=GREEDY, ignore_eos=True)
    events = run(one, max_tokens=200, drafter=KeepK(plain.tokens, 1), verify_length=7)
    gate, seen = AcceptanceGate("auto"), []
    n_rounds = 0
    for event in events:
        if not isinstance(event, RoundFinished):
            continue
        record = event.record
        committed = record.n_past + record.emitted - len(PROMPT)
        gate.allows(record.index, committed - record.emitted)
        if committed < 199:
            gate.record(record.index, len(record.drafted), record.accepted, committed)
        assert event.gate == gate.status(committed)
        assert event.context is None  # a scripted drafter has none
        seen.append(event.gate.state)
        n_rounds += 1
    assert n_rounds > 20 and {"open", "closed"} <= set(seen)


def test_a_drafter_that_fails_to_tell_its_rows_costs_speed_only():
    """Catches an exception of a drafter that reaches the answer by way of the monitor."""
    one = engine("llama")
    plain = one.generate(PROMPT, max_tokens=20, sampling=GREEDY, ignore_eos=True)

    class Silent(KeepK):
        def held(self):
            raise OSError("no rows today")

    events = run(one, max_tokens=20, drafter=Silent(plain.tokens, 2))
    assert events[-1].result.tokens == plain.tokens
    assert "no rows today" in events[-1].result.speculation["fault"]["reason"]
