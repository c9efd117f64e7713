"""Recorded runs, and events made by hand with counters that are known."""

from functools import cache

from cudflash.events import Finished, PromptProgress, RoundFinished, Started, TokenEvent
from cudflash.record_fields import no_facts
from cudflash.recording import Recorded, read_recording
from cudflash.result import Result, Usage
from cudflash.spec.gate import constants
from cudflash.spec.stats import RoundRecord
from cudflash.tui.state import MonitorState
from tests.helpers.vectors import vector_path


@cache
def recording(name="scripted"):
    """Bytes of a committed recording."""
    return vector_path(f"recordings/{name}.jsonl").read_bytes()


def events_of(data):
    """(t, event) of a recording that has no fault."""
    found = read_recording(data)
    assert all(isinstance(entry, Recorded) for entry in found), found
    return [(entry.t, entry.event) for entry in found]


def state_of(data, until=None):
    """What a monitor knows after ``until`` seconds of a recording."""
    state = MonitorState()
    for t, event in events_of(data):
        if until is None or t <= until:
            state.see(event, t)
    return state


def facts(drafter=True):
    """Facts of an answer, with a drafter of verify length 3."""
    found = no_facts() | {"n_ctx": 128, "max_tokens": 20, "prompt_tokens": 5, "threads": 2,
                          "version": "0", "kv_type": "f16", "activations": "int8",
                          "reason": ""}  # fmt: skip
    found["target"] |= {"file": "target.gguf", "arch": "llama", "n_layers": 4}
    found["device"] |= {"kind": "cpu", "name": "a processor"}
    if drafter:
        found["drafter"] = {
            "kind": "dflash2", "mode": "auto", "verify_length": 3, "accept": "match",
            "rule": "match", "block_size": 8, "taps": [1, 3], "gate": constants(),
            "file": "draft.gguf", "geometry": None,
        }  # fmt: skip
    else:
        found["reason"] = "no draft is loaded"
    return found


def answer(rounds, drafter=True, text=chr, finish="length"):
    """Events of an answer by rounds of (drafted, accepted, end, emitted): all known by hand.

    Tokens count from 65 (A); the first one comes from the prompt. Drafts are the tokens that follow
    as far as accepted, then 0. Each round takes 1 + 3 + 1 ms.
    """
    token, n_past = 65, 5
    yield Started(facts(drafter))
    yield PromptProgress(5, 5)
    yield TokenEvent(0, token, text(token), None)
    for index, (drafted, accepted, end, emitted) in enumerate(rounds):
        n_decided = accepted + (end != "stopped")
        decided = tuple(range(token + 1, token + 1 + n_decided))
        drafts = (decided[:accepted] + (0,) * drafted)[:drafted]
        for i in range(emitted):
            yield TokenEvent(token - 64 + i, decided[i], text(decided[i]), None)
        yield RoundFinished(RoundRecord(
            index, n_past, token, drafts, accepted, accepted + (end == "corrected"), decided,
            emitted, end, "open", "" if drafted else "gate", (), 1.0, 3.0, 1.0,
        ))  # fmt: skip
        token, n_past = decided[emitted - 1], n_past + emitted
    n = token - 64
    yield Finished(finished(tuple(range(65, 65 + n)), finish), "")


def finished(tokens, reason="length", stats=None):
    """A Result of given tokens."""
    return Result(
        text="".join(map(chr, tokens)), tokens=tokens, logprobs=(), finish_reason=reason,
        usage=Usage(5, len(tokens), 0), stopped_by=None, stats=stats or {}, make_receipt=dict,
    )  # fmt: skip
