"""Faults of drafters and targets in drafted answers: what they cost, what is told."""

import pytest

import cudflash
from cudflash.drafters import KeepK, Oracle, Proposal, TokenDrafter
from cudflash.errors import NumericsError
from cudflash.events import DrafterFailed, TokenEvent
from cudflash.receipt import validate_receipt
from tests.helpers.engines import engine
from tests.helpers.speculation import GREEDY, SAMPLED, plain_answer

PROMPT = (1, 2, 3)


class Broken(TokenDrafter):
    """Works for some rounds, then does something wrong."""

    name = "broken"

    def __init__(self, ids, fault, after=3):
        super().__init__()
        self._inner, self._fault, self._left = Oracle(ids), fault, after

    def propose(self, anchor, n, context):
        self._left -= 1
        return self._fault(n) if self._left < 0 else self._inner.propose(anchor, n, context)


def _raise(n):
    raise RuntimeError("out of luck")


FAULTS = {
    "exception": (_raise, "out of luck"),
    "nan": (lambda n: Proposal((float("nan"),) * n, "point_mass"), "nan"),
    "outside": (lambda n: Proposal((10**9,) * n, "point_mass"), "1000000000"),
    "too many": (lambda n: Proposal((1,) * (n + 1), "point_mass"), "at most"),
    "nothing": (lambda n: None, "NoneType"),
    "no distribution": (lambda n: Proposal((1,) * n, "softmax"), "softmax"),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("accept", ["match", "ratio"])
def test_fault_in_a_drafter_costs_speed_only(fault, accept):
    """Catches an answer that ends, changes, or goes on unsaid when the drafter breaks."""
    one = engine("llama", threads=1)
    action, words = FAULTS[fault]
    plain = plain_answer(one, PROMPT, SAMPLED, max_tokens=60, ignore_eos=True)
    session = one.session()
    running = session.generate(
        list(PROMPT), max_tokens=60, sampling=SAMPLED, seed=4, ignore_eos=True, accept=accept,
        drafter=Broken(plain.tokens, action), speculative="on", verify_length=3,
    )  # fmt: skip
    events = list(running)
    result = running.result()
    assert len(result.tokens) == 60
    if accept == "match":
        assert result.tokens == plain.tokens
    told = [event.fault for event in events if isinstance(event, DrafterFailed)]
    assert len(told) == 1 and words in told[0].reason
    assert result.speculation["fault"]["reason"] == told[0].reason
    assert result.stats["speculative"]["skipped"]["fault"] > 10
    validate_receipt(result.receipt)


def test_non_finite_logits_are_an_error_with_drafts_too():
    """Catches NaN in a verify block turned into token 0."""
    one = cudflash.load(engine("llama").gguf.path, device="cpu", n_ctx=64, threads=1)
    plain = one.generate([1, 2, 3], max_tokens=20, sampling=GREEDY, ignore_eos=True)
    session = one.session()
    running = session.generate(
        [1, 2, 3], max_tokens=20, sampling=GREEDY, ignore_eos=True, drafter=Oracle(plain.tokens),
        speculative="on",
    )  # fmt: skip
    while not isinstance(next(running), TokenEvent):
        pass
    norm = one.ops.download(one.model.output_norm)
    one.ops.copy_in(one.model.output_norm, norm * float("nan"))
    with pytest.raises(NumericsError, match="position 3"):
        list(running)
    one.ops.copy_in(one.model.output_norm, norm)
    assert session.tokens == (1, 2, 3) and session._runner.cache.pending == 0


@pytest.mark.parametrize("right,named", [(3, True), (15, False)])
def test_a_draft_that_is_blind_from_mid_block_on_is_named(right, named):
    """Catches a diagnosis that sees the position curve in made-up counters only: a drafter whose
    block is right up to a position and never beyond it, as a wrongly masked block is."""
    one = engine("llama", threads=1)
    plain = plain_answer(one, PROMPT, GREEDY, max_tokens=200, ignore_eos=True)
    result = one.session().generate(
        list(PROMPT), max_tokens=200, sampling=GREEDY, ignore_eos=True, speculative="on",
        verify_length=15, drafter=KeepK(plain.tokens, right),
    ).result()  # fmt: skip
    assert result.tokens == plain.tokens
    names = [finding["name"] for finding in result.stats["speculative"]["findings"]]
    assert ("zero-mid-block" in names) == named
