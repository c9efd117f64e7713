"""`verify`: it passes where it must, finds what it must, and names what conditions a draft wrongly."""

from dataclasses import replace
from unittest import mock

import numpy as np
import pytest

import cudflash
import cudflash.verify
from cudflash.cli.verify import show
from cudflash.drafters import POINT_MASS, DFlashDrafter, KeepK, Proposal
from cudflash.errors import UsageError
from cudflash.events import Diagnosed, DrafterFailed
from cudflash.loader import draft_bind
from cudflash.probe import probe
from cudflash.sampling import SamplerChain
from cudflash.spec import acceptance
from cudflash.spec.acceptance import LogitRows
from cudflash.spec.drafters import TokenDrafter
from cudflash.verify import QUALIFY_TOKENS, Verifier, ids_sha256, rule_checks
from tests.helpers.draft_vectors import draft_case
from tests.helpers.engines import engine
from tests.helpers.speculation import GREEDY, SAMPLED, draft_engine, plain_answer
from tests.helpers.vectors import target_case

PROMPT = [5, 6, 7, 8]


@pytest.mark.parametrize("name", ["v1-qwen3-full", "v2-muse-full"])
def test_sound_pairs_pass(name):
    """Catches a verify that fails on a sound pair, or that compares nothing."""
    one = draft_engine(name)
    seen = []
    report = Verifier(one, max_tokens=48, progress=seen.append).run([PROMPT])
    assert report.passed, [check for check in report.checks if not check.passed]
    assert tuple(seen) == report.checks
    names = {check.name for check in report.checks}
    assert names == {"match", "gate", "auto", "ratio-replay", "scripted", "rule"}
    lengths = {c.verify_length for c in report.checks if c.name == "match"}
    assert lengths == ({3, 7, 15} if one.draft_config.block_size == 16 else {3, 7})
    assert {c.temperature for c in report.checks if c.name == "match"} == {0.0, 0.8}
    assert all(c.drafted for c in report.checks if c.name in ("match", "ratio-replay"))
    matches = [c for c in report.checks if c.name == "match"]
    assert all(c.plain_sha256 == c.drafted_sha256 != "" for c in matches)
    assert report.probe.anchors >= 32 and report.seed_echo is not None
    assert report.to_dict()["passed"] is True


def test_targets_without_a_draft_are_verified_by_scripted_drafters():
    """Catches a verify that passes because it had nothing to do."""
    report = Verifier(engine("llama", threads=1), max_tokens=20).run([PROMPT, [1, 2]])
    drafters = {check.drafter for check in report.checks if check.name == "scripted"}
    assert drafters == {"oracle", "always-wrong", "keep-k", "cycle", "random"}
    assert report.passed and report.draft is None
    with pytest.raises(UsageError, match="needs a draft"):
        Verifier(engine("llama")).qualify(PROMPT)


def test_a_difference_is_found_and_described():
    """Catches a proof that cannot fail: one row decides wrongly, deep in one block."""
    one = engine("llama", threads=1)
    sound = LogitRows.choose
    calls = []

    def wrong(rows, row):
        calls.append(row)
        token = sound(rows, row)
        return (token + 1) % 320 if len(calls) == 400 else token

    with mock.patch.object(LogitRows, "choose", wrong):
        report = Verifier(one, max_tokens=40).run([PROMPT])
    failed = [check for check in report.checks if not check.passed]
    assert not report.passed and failed
    check = failed[0]
    assert check.first_difference > 0 and check.margin >= 0
    assert check.drafted_id != check.plain_id and check.plain_sha256 != check.drafted_sha256
    lines = []
    output = mock.Mock(line=lambda text="": lines.append(text))
    show(output, report)
    assert any(str(check.plain_id) in line and "margin" in line for line in lines)
    assert "NOT equal" in lines[-1]


def test_a_failing_drafter_proves_nothing():
    """Catches a pass because every answer was decoded plainly."""

    class Failing(TokenDrafter):
        def propose(self, anchor, n, context):
            raise RuntimeError("broken")

    with mock.patch.object(cudflash.verify, "Oracle", lambda ids: Failing()):
        report = Verifier(engine("llama", threads=1), max_tokens=20).run([PROMPT])
    failed = [check for check in report.checks if not check.passed]
    assert failed and all("broken" in check.note for check in failed)


def test_rule_check_fails_for_a_biased_rule():
    """Catches a distribution test too blunt to see the classic fault (softmax q for an argmax)."""
    assert all(check.passed for check in rule_checks(1))
    sound = cudflash.verify.ratio

    def biased(proposal, rows, rng):
        if not proposal.point_mass:
            return sound(proposal, rows, rng)
        q = cudflash.verify.ProposalDistribution(None, np.full(4, 0.25))
        return sound(replace(proposal, distribution=(q,)), rows, rng)

    with mock.patch.object(cudflash.verify, "ratio", biased):
        drawn, point = rule_checks(1)
        assert drawn.passed
    # a point mass cycling over all ids with q = 1/4 each happens to be that distribution
    assert point.passed

    def never_fair(proposal, rows, rng):
        return sound(replace(proposal, tokens=(0,)), rows, rng)

    with mock.patch.object(cudflash.verify, "ratio", never_fair):
        assert not rule_checks(1)[0].passed


def test_qualify_compares_every_row():
    """Catches rows of logits that differ although every token is equal."""
    one = draft_engine("v1-qwen3-full")
    report = Verifier(one).qualify(PROMPT)
    assert report.passed and {c.name for c in report.checks} == {
        f"qualify-{what}" for what in ("tokens", "length", "rows", "trace", "counts", "floor")
    }
    assert all(check.tokens == QUALIFY_TOKENS for check in report.checks)
    strict = Verifier(one).qualify(PROMPT, floor=0.99)
    assert [c.name for c in strict.checks if not c.passed] == ["qualify-floor"]
    plain = plain_answer(one, tuple(PROMPT), GREEDY, max_tokens=20, row_digests=True)
    assert len(plain.row_digests) == len(plain.tokens)
    verifier = Verifier(one)
    answer = verifier._answer

    def altered(prompt, sampling, **options):
        result = answer(prompt, sampling, **options)
        if options["speculative"] == "off":
            return result
        return replace(result, row_digests=("0" * 64, *result.row_digests[1:]))

    with mock.patch.object(verifier, "_answer", altered):
        report = verifier.qualify(PROMPT)
    assert [c.name for c in report.checks if not c.passed] == ["qualify-rows"]
    with pytest.raises(UsageError, match="floor"):
        Verifier(one).qualify(PROMPT, floor=2)
    with pytest.raises(UsageError, match="context"):
        Verifier(draft_engine("v1-qwen3-full", n_ctx=200)).qualify(PROMPT)


def test_hash_of_ids_is_of_little_endian_words():
    """Catches a hash that differs between machines."""
    assert ids_sha256([1, 2]) == ids_sha256((1, 2)) != ids_sha256([2, 1])
    assert ids_sha256([]).startswith("e3b0c442")


# -- conditioning ---------------------------------------------------------------------------------


def conditioned(change):
    """The trained pair with a fault put between its file and the engine."""
    sound = draft_bind.bind_draft

    def bind(draft, target):
        bound = sound(draft, target)
        return replace(bound, config=change(bound.config))

    case = draft_case("v1-qwen3-full")
    with mock.patch.object(draft_bind, "bind_draft", bind):
        return cudflash.load(
            target_case("qwen3", "f32").path, case.directory, device="cpu", n_ctx=256, threads=1
        )


def plain_texts(one):
    """Answers to random prompts: 452 anchors, thinned out below."""
    texts = []
    for seed in range(4):
        ids = np.random.default_rng(seed).integers(0, 320, 30).tolist()
        answer = one.generate(
            ids, max_tokens=120, sampling=GREEDY, ignore_eos=True, speculative="off"
        )
        texts.append((ids, answer.tokens))
    return texts


FAULTS = {
    "sound": (lambda c: c, None),
    "taps shifted by one": (lambda c: replace(c, taps=(1, 2, 3, 4, 5)), "taps-shifted-better"),
    "taps permuted": (lambda c: replace(c, taps=(4, 3, 2, 1, 0)), "taps-permuted-better"),
    "wrong RoPE pairing": (
        lambda c: replace(c, rope=replace(c.rope, style="interleaved")), "rope-pairing-better",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_wrong_conditioning_is_named(fault):
    """Catches a fault of conditioning that only costs speed, and so would never be found."""
    change, name = FAULTS[fault]
    one = conditioned(change)
    found = probe(one, plain_texts(one), max_anchors=300)
    assert [finding.name for finding in found.findings] == ([] if name is None else [name])
    if name is not None:
        assert "probably trained that way" in found.findings[0].sentence


def test_missing_hidden_norm_is_named():
    """Catches a norm that is lost between the file and the device."""
    one = conditioned(lambda c: c)
    norm = one.draft.model.hidden_norm
    one.ops.copy_in(norm, np.ones_like(one.ops.download(norm)))
    found = probe(one, plain_texts(one)[:1], max_anchors=40)
    assert [finding.name for finding in found.findings] == ["hidden-norm-altered"]


def test_halved_window_is_named_in_every_answer():
    """Catches a window that is not the file's and that nobody hears of."""
    one = draft_engine("v1-muse-swa", draft_window=16)
    result = one.generate(PROMPT, max_tokens=30, sampling=GREEDY, ignore_eos=True)
    found = {f["name"]: f for f in result.stats["speculative"]["findings"]}
    assert found["window-not-from-file"]["numbers"] == {
        "value": 16, "source": "override", "file_value": 32,
    }  # fmt: skip
    assert any("overridden" in note for note in one.notes)


def test_rows_that_the_draft_has_not_seen_are_named():
    """Catches a draft context that has fallen behind: the invariant of every round."""
    one = draft_engine("v1-qwen3-full")
    plain = plain_answer(one, tuple(PROMPT), SAMPLED, max_tokens=40, ignore_eos=True)
    session = one.session()
    drafter = session._drafter.drafter
    commit, calls = drafter.commit, []

    def stale(n):
        calls.append(n)
        commit(n if len(calls) < 5 else n - 1)

    with mock.patch.object(drafter, "commit", stale):
        running = session.generate(
            PROMPT, max_tokens=40, sampling=SAMPLED, seed=4, ignore_eos=True, speculative="on"
        )
        events = list(running)
    told = [event.fault for event in events if isinstance(event, DrafterFailed)]
    assert len(told) == 1 and told[0].kind == "context-hole" and "ends at row" in told[0].reason
    assert running.result().tokens == plain.tokens


def spoilt(one, how, first=30):
    """``DFlashDrafter.observe`` given other taps for positions from ``first`` on.

    ``how`` returns those of position p from all true ones so far.
    """
    sound, seen = DFlashDrafter.observe, []

    def observe(drafter, tokens, taps):
        n = drafter.length
        seen[n:] = one.ops.download(taps)[: len(tokens)]
        rows = [how(seen, p) if p >= first else seen[p] for p in range(n, n + len(tokens))]
        return sound(drafter, tokens, one.ops.upload(np.stack(rows)))

    return mock.patch.object(DFlashDrafter, "observe", observe)


SPOILT = {
    "sound": (lambda seen, p: seen[p], None, None),
    "late by one": (lambda seen, p: seen[p - 1], "stale-rows", 1),
    "late by four": (lambda seen, p: seen[p - 4], "stale-rows", 4),
    "zeroed": (lambda seen, p: np.zeros_like(seen[p]), "zeroed-rows", None),
    "foreign": (lambda seen, p: seen[p % 7] + seen[p % 5], "foreign-rows", None),
}


@pytest.mark.parametrize("name", ["v1-qwen3-full", "v1-muse-swa"])
@pytest.mark.parametrize("fault", SPOILT)
def test_rows_of_the_right_number_and_the_wrong_content_are_named(name, fault):
    """Catches a draft context that is stale: every count is right, only acceptance suffers."""
    one = draft_engine(name)
    how, found, lag = SPOILT[fault]
    plain = plain_answer(one, tuple(PROMPT), GREEDY, max_tokens=250, ignore_eos=True)
    session = one.session()
    with spoilt(one, how):
        running = session.generate(
            PROMPT, max_tokens=250, sampling=GREEDY, seed=4, ignore_eos=True, speculative="on"
        )
        for _ in range(90):  # in the midst of an answer, too
            next(running)
        midst = session.check_draft_context()
        result = running.result()
    assert result.tokens == plain.tokens and result.speculation["fault"] is None
    end = session.check_draft_context()
    for seen in (midst, end):
        assert (None if seen is None else seen.name) == found
        if seen is not None:
            assert seen.numbers["lag"] == lag and seen.numbers["first"] >= 30
    assert found is None or midst.numbers["first"] == 30
    # and the context of before is made good by a new conversation
    session = one.session()
    session.generate(PROMPT, max_tokens=9, sampling=GREEDY).result()
    assert session.check_draft_context() is None


def test_verify_fails_on_stale_rows():
    """Catches a verify that looks at tokens only, which stale rows never change."""
    one = draft_engine("v1-qwen3-full")
    with spoilt(one, lambda seen, p: seen[p - 1], first=1):
        report = Verifier(one, max_tokens=24).run([PROMPT], scripted=False)
    failed = [check for check in report.checks if not check.passed]
    assert {check.name for check in failed} == {"match"} and not report.passed
    assert all(check.first_difference is None and "before them" in check.note for check in failed)
    assert "stale-rows" in {finding["name"] for finding in report.findings}


def test_replay_finds_a_decision_that_depends_on_the_unseen():
    """Catches a rule with a source of chance of its own, and a snapshot without the generator."""
    one = draft_engine("v1-qwen3-full")
    verifier = Verifier(one, max_tokens=40)

    def replayed():
        return verifier._replay(0, PROMPT, SAMPLED, 3)

    check = replayed()
    assert check.passed and "trials replayed" in check.note and " 0 trials" not in check.note
    sound, calls = acceptance.ratio, []

    def moody(proposal, rows, rng, stop_ids=frozenset()):
        calls.append(rng)
        if len(calls) % 5 == 0:
            rng.uniform_float()
        return sound(proposal, rows, rng, stop_ids)

    with mock.patch.object(acceptance, "ratio", moody):
        check = replayed()
    assert not check.passed and "trial" in check.note
    restore = SamplerChain.restore

    def forgetful(chain, snapshot):
        restore(chain, (*snapshot[:-1], chain.snapshot()[-1]))

    with mock.patch.object(SamplerChain, "restore", forgetful):
        check = replayed()
    assert not check.passed and "the replay has" in check.note


class RingReader(KeepK):
    """Proposes rightly while what its ring of ids holds reads as the newest ids.

    ``in_order`` False is the fault: slots are read from the first on, as they lie.
    """

    capacity = 128  # 64 proposals fit before it

    def __init__(self, ids, in_order):
        super().__init__(ids, 0)
        self._ring, self._in_order, self._block = [0] * self.capacity, in_order, ()

    def observe(self, tokens, taps=None):
        super().observe(tokens, taps)
        self._block = tokens

    def commit(self, n):
        for i, token in enumerate(self._block[:n]):
            self._ring[(self.length + i) % self.capacity] = token
        super().commit(n)

    def boundaries(self):
        return {"ring": self.capacity}

    def propose(self, anchor, n, context):
        held = min(self.length, self.capacity)
        start = self.length - held if self._in_order else 0
        read = [self._ring[(start + i) % self.capacity] for i in range(held)]
        right = read == list(context.tokens[-held:])
        return Proposal(self._spoilt(context, n, n if right else 0), POINT_MASS)


@pytest.mark.parametrize("in_order", [True, False])
def test_collapse_at_the_boundary_is_named(in_order):
    """Catches a ring read in slot order after it has wrapped, in real rounds."""
    one = engine("muse-glimmer", threads=1)
    options = {"max_tokens": 250, "ignore_eos": True}
    plain = plain_answer(one, (5, 6, 7, 8), SAMPLED, **options)
    running = one.session().generate(
        PROMPT, sampling=SAMPLED, seed=4, speculative="on", verify_length=3,
        drafter=RingReader(plain.tokens, in_order), **options,
    )  # fmt: skip
    told = [event.finding.name for event in running if isinstance(event, Diagnosed)]
    result = running.result()
    assert result.tokens == plain.tokens and result.speculation["fault"] is None
    found = {f["name"]: f["numbers"] for f in result.stats["speculative"]["findings"]}
    if in_order:
        assert not told and not found
        return
    assert told == ["window-collapse"] == list(found)
    numbers = found["window-collapse"]
    assert (numbers["what"], numbers["boundary"]) == ("ring", 128)
    assert numbers["rate_before"] > 0.9 and numbers["rate_after"] < 0.1
