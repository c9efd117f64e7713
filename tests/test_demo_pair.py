"""The embedded pair as test bed: golden traces, acceptance on held-out text, wrong conditioning.

Traces are exact: the same files give the same drafted ids in every round, on every instruction set.
``scripts/make_demo_traces.py`` writes them when the files of the pair change.
"""

import json
import os
import subprocess
import sys
from functools import cache

import numpy as np
import pytest

import cudflash
from cudflash.model.draft_runner import DraftRunner

from tests.helpers.demo_faults import (
    BUDGET,
    FAULTS,
    FOLDER,
    GREEDY,
    KINDS,
    accepted,
    cases,
    differing,
    drafts,
    named,
    pair,
    prompts,
    trace,
)

# tokens per target pass at the anchors of held-out text, of the files in the package; measured by
# this test itself, 2.25 and 2.59 (few anchors: the model card has the acceptance over all prompts)
FLOORS = {"dflash": 2.1, "dflash2": 2.4}


@cache
def golden():
    return json.loads((FOLDER / "traces.json").read_text(encoding="utf-8"))


@cache
def found(kind):
    """Plain answers of two prompts of each kind of text."""
    return cases(pair(kind), 2, 40)


@cache
def right(kind):
    """Drafts with the right conditioning."""
    return drafts(pair(kind), kind, found(kind), stride=1)


@pytest.mark.parametrize("kind", KINDS)
def test_traces_belong_to_the_files(kind):
    """Catches a pair that was replaced without its traces, which then prove nothing."""
    one, made = pair(kind), golden()["drafts"][kind]
    again = "run python -m scripts.make_demo_traces"
    assert made["target_sha256"] == one.target_digest(), again
    assert made["draft_sha256"] == one.draft.digest(), again


@pytest.mark.parametrize("kind", KINDS)
def test_rounds_are_the_golden_ones_bit_for_bit(kind):
    """Catches every change of conditioning or arithmetic: prompt ids, taps, drafts, acceptance."""
    made = golden()
    for expected in made["drafts"][kind]["traces"]:
        assert trace(pair(kind), kind, expected["prompt"], made["n_tokens"]) == expected


@pytest.mark.slow
@pytest.mark.parametrize("isa", ["generic", "avx2", "avx512vnni"])
def test_golden_rounds_on_every_instruction_set(isa):
    """Catches drafts that depend on the processor."""
    code = (
        "import json, sys; from tests.helpers.demo_faults import pair, trace\n"
        "print(json.dumps([trace(pair(k), k, 0, 48) for k in ('dflash', 'dflash2')]))"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=600,
        env={**os.environ, "CUDFLASH_CPU_ISA": isa},
    )  # fmt: skip
    if run.returncode and "CUDFLASH_CPU_ISA" in run.stderr:
        pytest.skip(f"this processor has no {isa}")
    assert run.returncode == 0, run.stderr[-500:]
    made = golden()["drafts"]
    expected = [next(t for t in made[k]["traces"] if t["prompt"] == 0) for k in KINDS]
    assert json.loads(run.stdout) == expected


def test_a_causal_draft_runs_the_rows_it_proposes_and_no_bit_changes(monkeypatch):
    """Catches a causal draft that pays for rows nobody reads, and a short block of one that is
    another conditioning."""
    one = pair("dflash")
    ids = one.tokenizer.encode(prompts()[0]["text"])
    blocks, run = [], DraftRunner._run_block

    def note(runner, anchor, n_tokens, block):
        blocks.append((n_tokens, block))
        run(runner, anchor, n_tokens, force or block)

    monkeypatch.setattr(DraftRunner, "_run_block", note)
    found = []
    for force in (None, one.draft_config.block_size):
        result = one.generate(
            ids, max_tokens=24, sampling=GREEDY, ignore_eos=True, speculative="on", verify_length=3
        )
        found.append([r["drafted"] for r in result.speculation["trace"]])
    assert found[0] == found[1] and len(found[0]) > 5
    assert set(blocks) == {(n, n + 1) for n, _ in blocks}


@pytest.mark.parametrize("kind", KINDS)
def test_acceptance_on_held_out_text(kind):
    """Catches a draft that is worse than the one measured: exported, loaded or fed otherwise."""
    natural = [
        accepted(tokens, text)
        for number, tokens, text in right(kind)
        if found(kind)[number].kind in ("docs", "code")
    ]
    assert len(natural) >= 15 and 1 + np.mean(natural) >= FLOORS[kind]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
@pytest.mark.parametrize("kind", KINDS)
def test_every_wrong_conditioning_changes_the_drafts(kind, fault):
    """Catches a fault that leaves the trace as it is, so that the golden traces would not see it:
    beyond the budget that another arithmetic gets."""
    wrong = drafts(pair(kind), kind, found(kind), fault, stride=1)
    assert len(wrong) == len(right(kind)) >= 20
    assert differing(right(kind), wrong)[0] > (0 if fault.slight else BUDGET[kind])


@pytest.mark.parametrize("kind", KINDS)
def test_another_arithmetic_stays_within_the_budget(kind):
    """Catches a budget that a change of rounding alone exceeds: it would tell nothing of a fault."""
    other = drafts(pair(kind, draft_activations="int8x2"), kind, found(kind), stride=1)
    assert 0 < differing(right(kind), other)[0] <= BUDGET[kind]


@pytest.mark.parametrize("fault", [f for f in FAULTS if f.named], ids=lambda fault: fault.name)
@pytest.mark.parametrize("kind", KINDS)
def test_what_can_be_named_is_named(kind, fault):
    """Catches a diagnosis that no longer recognises what docs/SPECULATION.md says it does."""
    assert named(pair(kind), found(kind), fault) == fault.named


@pytest.mark.parametrize("kind", KINDS)
def test_the_right_conditioning_is_not_named(kind):
    """Catches false alarms on the pair that everybody runs first."""
    from cudflash.probe import probe
    from cudflash.reach_check import check_reach

    one = pair(kind)
    assert check_reach(one) is None
    result = probe(one, [(case.prompt, case.answer) for case in found(kind)])
    assert result.anchors >= 32 and not result.findings


@pytest.mark.parametrize("kind", KINDS)
def test_a_draft_that_works_is_not_accused(kind):
    """Catches a diagnosis that names faults of a draft whose first proposals are accepted.

    Row 0 of these drafts was not trained to reproduce the anchor.
    """
    ids = pair(kind).tokenizer.encode(prompts()[0]["text"])
    result = pair(kind).generate(
        ids, max_tokens=64, sampling=cudflash.SamplingConfig(temperature=0.0), ignore_eos=True,
        speculative="on",
    )  # fmt: skip
    stats = result.stats["speculative"]
    assert stats["accepted_at"][0] > 0.25 * stats["tested_at"][0], "or the test says nothing"
    assert [f["name"] for f in stats["findings"]] == []
