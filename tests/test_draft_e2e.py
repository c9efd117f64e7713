"""Whole drafted answers against llama.cpp's and z-lab's loops on the same files, round by round."""

import json
from functools import cache

import pytest

from cudflash.choose import Choice, Chooser
from cudflash.sampling import SamplerChain
from cudflash.spec.gate import AcceptanceGate
from cudflash.spec.round import Limits, RoundState
from cudflash.spec_options import SpecOptions
from cudflash.spec_rounds import SpecRounds
from tests.helpers.draft_vectors import draft_case
from tests.helpers.speculation import GREEDY, draft_engine
from tests.helpers.vectors import vector_path

NAMES = ("v1-muse-swa", "v1-qwen3-full", "v2-muse-full", "v2-qwen35-mixed")
# The references have no pinned rows. float32 caches, as z-lab's; llama.cpp's are float16, and its
# smallest margin between the two best ids of a row is 0.005 in these runs.
SETTINGS = {"kv_type": "f32", "n_ctx": 256}


@cache
def recorded():
    return json.loads(vector_path("drafts/e2e.json").read_text())


def cases(part):
    return [
        pytest.param(name, case, id=f"{name}/{case['case']}")
        for name in NAMES
        for case in recorded()[name]
        if part in case["case"]
    ]


def pair(name, **settings):
    sink = {"draft_sink": 0} if name in ("v1-muse-swa", "v2-qwen35-mixed") else {}
    return draft_engine(name, **SETTINGS, **sink, **settings)


@pytest.mark.parametrize("name, case", cases("/f32/"))
def test_rounds_are_those_of_llamacpp(name, case):
    """Catches wrong conditioning that token equality cannot see: every proposal of every round.

    llama.cpp keeps the last prompt token as the first anchor, so the answer is begun by hand.
    """
    n_max = int(case["flags"][case["flags"].index("--spec-draft-n-max") + 1])
    one = pair(name, draft_full_block=n_max == draft_case_block(name) - 1)
    session = one.session()
    prompt = case["prompt"]
    chain = SamplerChain(GREEDY, 0, n_vocab=one.config.vocab_size)
    chooser = Chooser(one.ops, one.work, chain, 0)
    limits = Limits(n_max, one.n_ctx, one.config.vocab_size)
    rounds = SpecRounds(
        session._runner, chooser, session._drafter, SpecOptions("on", "match", limits),
        one.plain_step,
    )  # fmt: skip
    rounds.rewind(0)
    rounds.prompt_chunk(prompt[:-1], False, 0)
    rounds._state = RoundState(
        prompt[-1], len(prompt) - 1, limits=limits, accept="match", chain=chain,
        drafter=session._drafter, gate=AcceptanceGate("on"),
    )  # fmt: skip
    emitted = []
    for expected, accepted in zip(case["rounds"], case["accepted_per_round"]):
        choices = rounds.next(1000)
        assert all(isinstance(choice, Choice) for choice in choices)
        rounds.settle(len(choices))
        record = rounds._state.stats.records[-1]
        assert (record.n_past, record.anchor) == (expected["n_past"], expected["seed"])
        # llama.cpp shortens its last rounds to what is left of the answer
        n = len(expected["draft"])
        if n < n_max:
            break
        assert list(record.drafted) == expected["draft"]
        assert record.accepted == accepted
        emitted += record.decided
    assert emitted == case["output_ids"][: len(emitted)] and len(emitted) > 40


def draft_case_block(name):
    """Rows of a recorded draft's block."""
    return json.loads((draft_case(name).directory / "config.json").read_text()).get(
        "block_size", 16 if name.startswith("v1") else 8
    )


@pytest.mark.parametrize("name, case", cases("/zlab/"))
def test_acceptance_lengths_are_those_of_zlab(name, case):
    """Catches rounds that begin elsewhere, and acceptance counted in another way."""
    one = pair(name)
    result = one.generate(
        case["prompt"], max_tokens=100, sampling=GREEDY, ignore_eos=True, speculative="on",
        verify_length=15,
    )  # fmt: skip
    ids = case["output_ids"]
    assert list(result.tokens[: len(ids)]) == ids
    lengths = [len(record["emitted"]) for record in result.speculation["trace"]]
    # z-lab shortens blocks that would cross the end of its answer: those rounds are other ones
    emitted = 1
    for index, expected in enumerate(case["acceptance_lengths"]):
        if emitted + 16 > len(ids):
            break
        assert lengths[index] == expected, index
        emitted += expected
    assert index > 5
