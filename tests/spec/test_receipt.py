"""Receipts: the schema accepts what the core makes, and names the first thing that is wrong."""

import copy
import json

import pytest

from cudflash.drafters import Cycle, Random, TokenDrafter
from cudflash.errors import FormatError
from cudflash.receipt import (
    ordered,
    read_receipt,
    receipt_digest,
    SpeculativePart,
    speculative_part,
    to_json,
    validate_receipt,
    write_receipt,
)
from cudflash.result import RECEIPT_SCHEMA
from cudflash.sampling import SamplingConfig
from cudflash.spec.diagnosis import context_hole
from tests.spec.fakes import Sampled, drafted, plain

GREEDY = SamplingConfig(temperature=0)


def sourced(value):
    return {"value": value, "source": "file", "file_value": value}


DRAFT = {
    "path": "draft.gguf", "sha256": "a" * 64, "arch": "dflash", "name": "tiny", "kind": "dflash2",
    "n_layers": 2, "block_size": 16, "mask_token_id": 40, "taps": sourced([0, 2]),
    "window": sourced(2048), "sink": {"value": 64, "source": "override", "file_value": None},
    "layer_windows": [2048, None], "layer_causal": [True, False],
    "rope": {
        "style": "split_half", "n_dims": 64, "freq_base": 1e6, "freq_scale": 1.0, "yarn": None,
        "attn_factor": 1.0,
    },
    "full_block": True, "activations": "int8",
}  # fmt: skip


def receipt(speculative, draft=DRAFT, sampling=GREEDY):
    return {
        "schema": RECEIPT_SCHEMA,
        "versions": {"cudflash": "0.1.0", "numpy": "2.0", "python": "3.11"},
        "target": {"path": "m.gguf", "sha256": "0" * 64, "arch": "llama", "name": ""},
        "draft": draft,
        "device": {"kind": "cpu", "name": "CPU", "reason": "asked for"},
        "kernel_path": "avx2", "threads": 2, "n_ctx": 4096, "kv_type": "f16",
        "activations": "int8", "numerics": "1", "sampling": sampling.to_dict(), "seed": 11,
        "max_tokens": 100, "stop": {"strings": [], "ids": [2]}, "speculative": speculative,
    }  # fmt: skip


def part(answer, mode="auto", accept="match", findings=()):
    found = speculative_part(mode, accept, answer.state, answer.guard, 7, findings)
    return SpeculativePart(found, answer.state.stats)()["speculative"]


@pytest.fixture(scope="module")
def sound():
    answer = drafted(GREEDY, 100, Cycle(plain(GREEDY, 100), (7, 0, 2)), mode="auto")
    return receipt(part(answer, findings=[context_hole(1, 2)]))


class Failing(TokenDrafter):
    def propose(self, anchor, n, context):
        raise RuntimeError("broken")


@pytest.mark.parametrize("accept", ["match", "ratio"])
@pytest.mark.parametrize("drafter", [Random(1), Sampled(), Failing()])
def test_receipts_of_answers_are_valid(drafter, accept):
    """Catches a schema that the core itself does not follow: closings, faults, trials."""
    answer = drafted(SamplingConfig(), 300, drafter, accept=accept, mode="auto")
    made = receipt(part(answer, accept=accept), sampling=SamplingConfig())
    assert validate_receipt(made) is made
    speculative = made["speculative"]
    assert speculative["used"] == (drafter.name != "tokens") == (not speculative["reason"])
    assert ("broken" in speculative["reason"]) == (speculative["fault"] is not None)
    assert speculative["rule"] == accept
    with_trials = [r for r in speculative["trace"] if "trials" in r]
    assert bool(with_trials) == (accept == "ratio" and speculative["used"])


def test_answers_without_drafter_or_rounds_are_valid():
    """Catches a schema that only knows drafted answers."""
    none = {"mode": "auto", "used": False, "reason": "no draft is loaded"}
    validate_receipt(receipt(none, draft=None))
    answer = drafted(GREEDY, 1, Random(1))
    short = speculative_part("on", "match", None, answer.guard, 7)
    short = SpeculativePart(short, None)()["speculative"]
    assert not validate_receipt(receipt(short))["speculative"]["used"]


def test_equal_answers_have_equal_receipts(sound, tmp_path):
    """Catches times in a receipt, and an order of keys that depends on how it was built."""
    again = receipt(part(drafted(
        GREEDY, 100, Cycle(plain(GREEDY, 100), (7, 0, 2)), mode="auto"
    ), findings=[context_hole(1, 2)]))  # fmt: skip
    shuffled = dict(reversed(list(sound.items())))
    assert to_json(shuffled) == to_json(sound) == to_json(again)
    assert receipt_digest(again) == receipt_digest(sound)
    assert list(ordered(shuffled))[:3] == ["schema", "versions", "target"]
    write_receipt(tmp_path / "r.json", shuffled)
    assert read_receipt(tmp_path / "r.json") == json.loads(to_json(sound))


def _set(path, value):
    def change(made):
        at = made
        for key in path[:-1]:
            at = at[key]
        at[path[-1]] = value

    return change


def _drop(made):
    del made["numerics"]


TRACE = ("speculative", "trace")
DAMAGES = {
    "receipt.schema is 'cudflash-receipt/9'": _set(("schema",), "cudflash-receipt/9"),
    "receipt.numerics is missing": _drop,
    "receipt.extra is unknown": _set(("extra",), 1),
    "receipt.target.sha256": _set(("target", "sha256"), "xyz"),
    "receipt.seed is -1": _set(("seed",), -1),
    "receipt.n_ctx is True": _set(("n_ctx",), True),
    "receipt.draft.window.source": _set(("draft", "window", "source"), "guess"),
    "receipt.draft.rope.freq_base": _set(("draft", "rope", "freq_base"), "1e6"),
    "receipt.draft.layer_causal[0]": _set(("draft", "layer_causal", 0), 1),
    "receipt.speculative.counts is missing": lambda made: made["speculative"].pop("counts"),
    "receipt.speculative.rule": _set(("speculative", "rule"), "typical"),
    "trace[2].round": _set((*TRACE, 2, "round"), 7),
    "trace[1].n_past": _set((*TRACE, 1, "n_past"), 5),
    "trace[1].anchor": _set((*TRACE, 1, "anchor"), 0),
    "trace[0].accepted": _set((*TRACE, 0, "accepted"), 9),
    "trace[0].emitted": lambda made: made["speculative"]["trace"][0]["emitted"].__setitem__(0, 47),
    "counts.rounds": _set(("speculative", "counts", "rounds"), 3),
    "counts.emitted": _set(("speculative", "counts", "emitted"), 3),
    "counts: the statistics break": _set(("speculative", "counts", "tested"), 0),
}


@pytest.mark.parametrize("words", DAMAGES)
def test_damage_is_named(sound, words):
    """Catches a check that passes what it should refuse, or does not say where."""
    damaged = copy.deepcopy(sound)
    DAMAGES[words](damaged)
    with pytest.raises(FormatError) as caught:
        validate_receipt(damaged)
    assert words in str(caught.value)


def test_a_file_that_is_no_receipt_is_named(tmp_path):
    """Catches an error without the path."""
    path = tmp_path / "r.json"
    for text in ("{", "[]", "{}"):
        path.write_text(text)
        with pytest.raises(FormatError, match="r.json"):
            read_receipt(path)
