"""The trained hybrid: its two drafters on held-out text, and the equalities on likely proposals.

Random models accept next to nothing, so that a round of theirs seldom keeps more than the anchor.
Here rounds keep any number of proposals, in text that a model has learned.
"""

from functools import cache

import pytest

import cudflash
from cudflash.verify import Verifier
from cudflash.verify_sessions import session_checks
from tests.helpers.demo_faults import prompts
from tests.helpers.speculation import GREEDY
from tests.helpers.vectors import vector_path

TARGET = "hybrid_pair/hybrid-tiny-q4_k_m.gguf"
DRAFT = "hybrid_pair/dflash2-hybrid-tiny-q4_k_m.gguf"
N_TOKENS = 64
# tokens per target pass of the answers below; measured by the test itself, 2.33 and 3.11 (few and
# short answers: the README beside the files has the acceptance over all prompts)
FLOORS = {"dflash2": 2.25, "mtp": 3.0}
NATURAL = [p for p in prompts() if p["kind"] in ("docs", "code")]


@cache
def pair(drafter="dflash2"):
    """The engine with one of its drafters; one thread."""
    settings = {"n_ctx": 768, "device": "cpu", "threads": 1}
    if drafter == "mtp":
        return cudflash.load(vector_path(TARGET), drafter="mtp", mtp_k=7, **settings)
    return cudflash.load(vector_path(TARGET), vector_path(DRAFT), draft_sink=0, **settings)


@cache
def answers(drafter):
    """Drafted greedy answers to held-out prompts."""
    return [answer(pair(drafter), prompt["text"]) for prompt in NATURAL[::4]]


def answer(engine, text, **options):
    options = {"speculative": "on", "verify_length": 7, **options}
    ids = engine.tokenizer.encode(text)
    return engine.session().generate(
        ids, max_tokens=N_TOKENS, sampling=GREEDY, ignore_eos=True, **options
    ).result()


@cache
def plain(text):
    return answer(pair(), text, speculative="off", verify_length=None)


@pytest.mark.parametrize("drafter", ["dflash2", "mtp"])
def test_acceptance_on_held_out_text(drafter):
    """Catches a drafter that is worse than the one measured: exported, loaded or fed otherwise."""
    stats = [result.stats["speculative"] for result in answers(drafter)]
    length = sum(s["emitted"] for s in stats) / sum(s["rounds"] for s in stats)
    assert length >= FLOORS[drafter], f"{length:.3f} tokens per pass"


@pytest.mark.parametrize("drafter", ["dflash2", "mtp"])
def test_drafted_answers_are_the_plain_ones(drafter):
    """Catches an acceptance, at any position, that changes a token."""
    kept = set()
    for prompt, drafted in zip(NATURAL[::4], answers(drafter)):
        assert drafted.tokens == plain(prompt["text"]).tokens
        kept |= {record["accepted"] for record in drafted.speculation["trace"]}
    assert len(kept) >= 5, "too few patterns to prove anything"


@pytest.mark.parametrize("drafter", ["dflash2", "mtp"])
def test_states_after_drafted_answers_are_those_of_tokens_alone(drafter):
    """Catches a trace of a rejected token in any state tensor, by digest."""
    one, text = pair(drafter), NATURAL[0]["text"]
    session = one.session()
    ids = one.tokenizer.encode(text)
    result = session.generate(
        ids, max_tokens=N_TOKENS, sampling=GREEDY, ignore_eos=True, speculative="on",
        verify_length=7,
    ).result()  # fmt: skip
    held = session.tokens
    assert list(held) == (ids + list(result.tokens))[:-1]
    runner = one.session()._runner
    for token in held:
        runner.step((token,))
        runner.commit(1)
    assert runner.cache.digest() == session._runner.cache.digest()


@pytest.mark.parametrize("drafter", ["dflash2", "mtp"])
def test_used_sessions_equal_fresh_ones(drafter):
    """Catches what an earlier conversation leaves in the target's states or the drafter's rows."""
    one = pair(drafter)
    ids = one.tokenizer.encode(NATURAL[1]["text"])[:90]
    checks = list(session_checks(Verifier(one), ids, n_requests=6))
    assert all(check.passed for check in checks), [c for c in checks if not c.passed]
    assert any(check.drafter == drafter for check in checks)


def test_deeper_mtp_accepts_more_per_pass_and_less_per_draft():
    """Catches a chain whose later passes read the wrong rows: its curve would be flat."""
    one, text = pair("mtp"), NATURAL[0]["text"]
    found = []
    for k in (1, 3, 7):
        stats = answer(one, text, drafter=one.mtp_drafter(k)).stats["speculative"]
        found.append((stats["tokens_per_pass"], stats["accepted"] / stats["drafted"]))
    lengths, shares = zip(*found)
    assert lengths[0] < lengths[1] < lengths[2] and shares[0] > shares[1] > shares[2]


def test_verify_passes_with_the_models_own_block():
    """Catches a rule, a mode or a replay that holds for drafts only."""
    report = Verifier(pair("mtp"), max_tokens=24).run([NATURAL[2]["text"]], scripted=False)
    assert report.passed, [check for check in report.checks if not check.passed]
    assert {check.drafter for check in report.checks if check.name == "match"} == {"mtp"}


def test_readme_names_the_files_that_are_here():
    """Catches files that were replaced without the figures about them."""
    from tests.helpers.vectors import ROOT, recorded_sha256

    text = (ROOT / "hybrid_pair/README.md").read_text(encoding="utf-8")
    for name in (TARGET, DRAFT):
        assert recorded_sha256(name) in text and vector_path(name)
