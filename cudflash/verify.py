"""Proof that drafting changes nothing: plain answers against drafted ones, token by token.

Owns which comparisons are made and what counts as passed. Must not know command lines. Invariant: a
check that could not be made is reported as such; it never counts as passed.
"""

import hashlib
from dataclasses import asdict, dataclass, field

import numpy as np

from cudflash.drafters import AlwaysWrong, Cycle, KeepK, Oracle, Random
from cudflash.errors import UsageError
from cudflash.events import RoundFinished
from cudflash.probe import probe
from cudflash.prompts import prompt_ids
from cudflash.reach_check import check_reach
from cudflash.sampling import Distribution, Mt19937, SamplingConfig
from cudflash.spec.acceptance import RATIO, ratio
from cudflash.spec.diagnosis import MIN_ECHOES, seed_echo_score
from cudflash.spec.proposals import POINT_MASS, Proposal, ProposalDistribution
from cudflash.spec.verify_length import legal_lengths
from cudflash.verify_sessions import REQUESTS, session_checks

MAX_TOKENS = 64
CHEAP_MS = 250.0  # a plain answer that takes less is repeated with every scripted drafter
TEMPERATURE, SEED = 0.8, 20250813
QUALIFY_TOKENS = 256
RULE_STEPS = 20_000
REPLAY_EVERY = 3  # rounds; each replay costs a round
STANDARD_ERRORS = 5.0
# p is cut differently by q in each position, one id is only in p, one only in q
RULE_P, RULE_Q = (0.3, 0.5, 0.2, 0.0), (0.4, 0.3, 0.0, 0.3)


@dataclass(frozen=True)
class Check:
    """One comparison."""

    name: str  # "match", "scripted", "session-...", "ratio-replay", "rule", "qualify-..."
    prompt: int | None  # index, None for checks without a prompt
    drafter: str
    verify_length: int | None
    temperature: float | None
    passed: bool
    tokens: int = 0  # compared
    first_difference: int | None = None
    plain_id: int | None = None
    drafted_id: int | None = None
    margin: float | None = None  # between the two likeliest ids, where the lists part
    plain_sha256: str = ""
    drafted_sha256: str = ""
    used: bool | None = None  # whether anything was drafted
    drafted: int = 0
    accepted: int = 0
    note: str = ""


@dataclass(frozen=True)
class VerifyReport:
    """All comparisons of a pair."""

    target: str
    draft: str | None
    checks: tuple[Check, ...]
    findings: tuple = field(default=())  # of spec.diagnosis, as dicts
    seed_echo: float | None = None  # share of blocks whose row 0 reproduced the anchor
    acceptance: float | None = None  # of the draft, at temperature 0
    probe: object = None  # Probe of the draft's conditioning, None for too little text

    @property
    def passed(self):
        """Whether every check has passed."""
        return bool(self.checks) and all(check.passed for check in self.checks)

    def to_dict(self):
        """Plain values, for JSON."""
        return {
            "passed": self.passed,
            "target": self.target,
            "draft": self.draft,
            "acceptance": self.acceptance,
            "seed_echo": self.seed_echo,
            "findings": list(self.findings),
            "probe": None if self.probe is None else self.probe.to_dict(),
            "checks": [asdict(check) for check in self.checks],
        }


def ids_sha256(ids):
    """SHA-256 of a list of token ids, as little-endian 32-bit integers."""
    return hashlib.sha256(np.asarray(ids, "<i4").tobytes()).hexdigest()


class Verifier:
    """Comparisons on one engine.

    Parameters
    ----------
    engine : Engine
    max_tokens : int
        Tokens per answer, less where the context ends.
    temperature : float
        Of the sampled checks.
    seed : int
    progress : callable, optional
        Called with each finished Check.
    """

    def __init__(
        self, engine, *, max_tokens=MAX_TOKENS, temperature=TEMPERATURE, seed=SEED, progress=None
    ):
        if temperature <= 0:
            raise UsageError(f"the temperature is {temperature}, expected more than 0")
        self.engine = engine
        self._max_tokens, self.seed, self._progress = max_tokens, seed, progress
        self.modes = (SamplingConfig(temperature=0), SamplingConfig(temperature=temperature))
        block = None if engine.draft_config is None else engine.draft_config.block_size
        self.lengths, self._all_lengths = legal_lengths(block), legal_lengths()
        self._drafts = engine.draft is not None or engine.mtp_k is not None
        self._findings, self._echoes = {}, []
        self._drafted = self._accepted = 0
        self._session = None  # of the newest answer

    def run(self, prompts, scripted=True, requests=REQUESTS):
        """Make every comparison.

        Parameters
        ----------
        prompts : sequence of str, token ids or messages
        scripted : bool
            Also with the scripted drafters: on the first prompt, and on all others where plain
            answers take little time; and by sessions that have answered before, on the first.
        requests : int
            Requests of random lengths that one session answers.

        Returns
        -------
        VerifyReport
        """
        checks, texts = [], []
        for index, prompt in enumerate(self._ids(prompts)):
            for sampling in self.modes:
                plain = self.answer(prompt, sampling, speculative="off")
                if sampling.greedy:
                    texts.append((prompt, plain.tokens))
                if self._drafts:
                    checks += self._draft_checks(index, prompt, sampling, plain)
                if scripted and (index == 0 or plain.stats["decode_ms"] < CHEAP_MS):
                    checks += self._scripted_checks(index, prompt, sampling, plain)
            if scripted and index == 0:
                checks += session_checks(self, prompt, requests)
        checks += [self._tell(check) for check in rule_checks(self.seed)]
        found = None
        if self.engine.draft is not None:
            found = probe(self.engine, texts)
            reach = check_reach(self.engine)
            if reach is not None:
                self._findings[reach.name] = reach.to_dict()
        return self._report(checks, found)

    def qualify(self, prompt, floor=0.0, verify_length=None):
        """The strict form: 256 greedy tokens with a digest of every row of target logits.

        The drafted answer is made twice, and its trace and counts must be equal, too.

        Parameters
        ----------
        prompt : str, token ids or messages
        floor : float
            Least share of accepted proposals.
        verify_length : int, optional
            The default one if absent.

        Returns
        -------
        VerifyReport
        """
        if not self._drafts:
            raise UsageError("qualifying needs a draft; give the pair TARGET DRAFT")
        if not 0 <= floor <= 1:
            raise UsageError(f"the floor is {floor}, expected a share from 0 to 1")
        (ids,) = self._ids([prompt])
        if len(ids) + QUALIFY_TOKENS > self.engine.n_ctx:
            raise UsageError(
                f"qualifying takes {len(ids)} + {QUALIFY_TOKENS} tokens, the context holds "
                f"{self.engine.n_ctx}; load the model with a larger one"
            )
        greedy = self.modes[0]
        options = {"max_tokens": QUALIFY_TOKENS, "ignore_eos": True, "row_digests": True}
        plain = self.answer(ids, greedy, speculative="off", **options)
        options |= {"speculative": "on", "verify_length": verify_length}
        one, two = (self.answer(ids, greedy, **options) for _ in range(2))
        stats = self._note(one)
        length = stats["verify_length"]
        tokens = self.compare("qualify-tokens", 0, ids, plain, one, length, greedy)
        rows = _first_difference(plain.row_digests, one.row_digests)
        traces = [r.speculation for r in (one, two)]
        rate = stats["acceptance_rate"] or 0.0
        name = stats["drafter"]

        def check(what, passed, note=""):
            return self._tell(
                Check(
                    f"qualify-{what}", 0, name, length, 0.0, passed, len(one.tokens), used=True,
                    drafted=stats["drafted"], accepted=stats["accepted"], note=note,
                )
            )  # fmt: skip

        enough = len(plain.tokens) == QUALIFY_TOKENS
        return self._report([
            tokens,
            check("length", enough, f"{len(plain.tokens)} of {QUALIFY_TOKENS} tokens"),
            check("rows", rows is None and len(one.row_digests) == len(one.tokens),
                  "" if rows is None else f"the rows of logits differ from token {rows} on"),
            check("trace", traces[0]["trace"] == traces[1]["trace"]),
            check("counts", traces[0]["counts"] == traces[1]["counts"]),
            check("floor", rate >= floor, f"acceptance {rate:.4f}, floor {floor:.4f}"),
        ])  # fmt: skip

    # -- groups ---------------------------------------------------------------------------------

    def _draft_checks(self, index, prompt, sampling, plain):
        checks = []
        for length in self.lengths:
            options = {"speculative": "on", "verify_length": length}
            drafted = self.answer(prompt, sampling, **options)
            self._note(drafted, count=sampling.greedy)
            context = self._session.check_draft_context() if sampling.greedy else None
            checks.append(
                self.compare("match", index, prompt, plain, drafted, length, sampling, context)
            )
            if not sampling.greedy:
                checks.append(self._replay(index, prompt, sampling, length))
        costs, self.engine.round_costs = self.engine.round_costs, None
        try:  # what the gate alone decides can be made again, and short answers draft, too
            gated = self.answer(prompt, sampling, speculative="auto")
        finally:
            self.engine.round_costs = costs
        checks.append(
            self.compare("gate", index, prompt, plain, gated, self._used_length(gated), sampling)
        )
        auto = self.answer(prompt, sampling, speculative="auto")
        checks.append(
            self.compare("auto", index, prompt, plain, auto, self._used_length(auto), sampling,
                         may_pause=True)
        )  # fmt: skip
        return checks

    def _replay(self, index, prompt, sampling, length):
        """Under ratio the same state of the generator gives the same decisions.

        The answer is made twice. In the second, rounds in its midst are rehearsed: decided,
        replayed by another chain from a snapshot of the generator with the same rows and proposals,
        dropped, and made again.
        """
        options = {"speculative": "on", "verify_length": length, "accept": RATIO}
        replay = RoundReplay()
        one = self.answer(prompt, sampling, **options)
        two = self.answer(prompt, sampling, watch=replay.watch, **options)
        traces = [r.speculation["trace"] for r in (one, two)]
        stats = one.stats["speculative"]
        at = _first_difference(one.tokens, two.tokens)
        return self._tell(
            Check(
                "ratio-replay", index, stats["drafter"], length, sampling.temperature,
                at is None and traces[0] == traces[1] and not replay.difference,
                len(one.tokens), at,
                plain_sha256=ids_sha256(one.tokens), drafted_sha256=ids_sha256(two.tokens),
                used=stats["used"], drafted=stats["drafted"], accepted=stats["accepted"],
                note=replay.note(),
            )
        )  # fmt: skip

    def _scripted_checks(self, index, prompt, sampling, plain):
        ids = plain.tokens
        checks = []
        for make in (
            lambda: Oracle(ids), lambda: AlwaysWrong(ids), lambda: KeepK(ids, 2),
            lambda: Cycle(ids, (15, 0, 3, 1)), lambda: Random(self.seed),
        ):  # fmt: skip
            for length in self._all_lengths:
                drafted = self.answer(
                    prompt, sampling, drafter=make(), speculative="on", verify_length=length
                )
                checks.append(
                    self.compare("scripted", index, prompt, plain, drafted, length, sampling)
                )
        return checks

    # -- parts ----------------------------------------------------------------------------------

    def _ids(self, prompts):
        engine = self.engine
        return [
            prompt_ids(p, engine.tokenizer, engine.chat_template, engine.config.vocab_size)
            for p in prompts
        ]

    def answer(self, prompt, sampling, *, watch=None, session=None, **options):
        """The answer of a session, a fresh one if none is given.

        ``watch`` is called with the running answer and each of its events.
        """
        room = self.engine.n_ctx - len(prompt)
        options.setdefault("max_tokens", min(self._max_tokens, max(0, room)))
        self._session = self.engine.session() if session is None else session
        running = self._session.generate(prompt, sampling=sampling, seed=self.seed, **options)
        for event in running if watch is not None else ():
            watch(running, event)
        return running.result()

    def _used_length(self, result):
        return result.stats["speculative"]["verify_length"]

    def _note(self, result, count=True):
        """Collect what the answer says about the draft; returns its counters."""
        stats = result.stats["speculative"]
        if count:
            self._drafted += stats["drafted"]
            self._accepted += stats["accepted"]
        for finding in stats["findings"]:
            self._findings.setdefault(finding["name"], finding)
        self._echoes += stats["echoes"]
        return stats

    def compare(self, name, index, prompt, plain, drafted, length, sampling, context=None,
                may_pause=False):  # fmt: skip
        """Return the Check of two answers to a prompt, the plain one first."""
        stats = drafted.stats["speculative"]
        at = _first_difference(plain.tokens, drafted.tokens)
        values = {}
        if at is not None:
            values = {
                "plain_id": _at(plain.tokens, at),
                "drafted_id": _at(drafted.tokens, at),
                "margin": self._margin([*prompt, *plain.tokens[:at]]),
            }
        # a drafter that has failed proves nothing about drafting
        note = stats["reason"] if stats["reason"] else ""
        fine = stats["used"] or stats["rounds"] <= 1 or (
            may_pause and drafted.speculation["fault"] is None
        )
        if context is not None:  # the tokens are right, the draft was shown the wrong rows
            fine, note = False, context.sentence
            self._findings.setdefault(context.name, context.to_dict())
        return self._tell(
            Check(
                name, index, stats["drafter"], length, sampling.temperature, at is None and fine,
                len(plain.tokens), at, **values,
                plain_sha256=ids_sha256(plain.tokens), drafted_sha256=ids_sha256(drafted.tokens),
                used=stats["used"], drafted=stats["drafted"], accepted=stats["accepted"], note=note,
            )
        )  # fmt: skip

    def _margin(self, ids):
        """Gap between the two largest logits after some tokens."""
        row = np.sort(self.engine.logits(ids)[-1])
        return float(row[-1] - row[-2])

    def _tell(self, check):
        if self._progress is not None:
            self._progress(check)
        return check

    def _report(self, checks, found=None):
        for finding in () if found is None else found.findings:
            self._findings[finding.name] = finding.to_dict()
        draft = self.engine.draft
        echo = None
        if len(self._echoes) >= MIN_ECHOES:
            echo = seed_echo_score(*zip(*self._echoes))
        return VerifyReport(
            str(self.engine.gguf.path), None if draft is None else str(draft.path), tuple(checks),
            tuple(self._findings.values()), echo,
            self._accepted / self._drafted if self._drafted else None, found,
        )  # fmt: skip


class RoundReplay:
    """Rehearses rounds of a running answer and compares each with the round that follows.

    Attributes
    ----------
    difference : str
        The first one that was seen, "" for none.
    rounds, trials : int
        Compared so far.
    """

    def __init__(self, every=REPLAY_EVERY):
        self._every = every
        self._open = None
        self.difference, self.rounds, self.trials = "", 0, 0

    def watch(self, running, event):
        """Take an event; a round that ends may be followed by a rehearsal of the next."""
        if not isinstance(event, RoundFinished):
            return
        if self._open is not None:
            self.difference = self.difference or self._open.difference(event.record)
            self.rounds += 1
            self.trials += len(self._open.decision.trials)
        self._open = None
        if event.record.index % self._every == 1:
            self._open = running.rehearse()

    def note(self):
        """One sentence for the report."""
        if self.difference:
            return f"replayed from a snapshot of the generator: {self.difference}"
        return f"{self.rounds} rounds with {self.trials} trials replayed from a snapshot"


class _StubRows:
    """One fixed distribution as rows of a target."""

    def __init__(self, probs):
        kept = np.flatnonzero(probs)
        shares = np.asarray(probs, np.float32)[kept]
        self._distribution = Distribution(kept.astype(np.int32), shares, shares)

    def distribution(self, row):
        return self._distribution

    def accept(self, token):
        pass


def rule_checks(seed, steps=RULE_STEPS):
    """The distribution test of ``ratio``: first tokens against p, within five standard errors.

    Parameters
    ----------
    seed : int
    steps : int

    Returns
    -------
    list of Check
        For proposals drawn from a distribution, and for point masses.
    """
    checks = []
    for name, q in (("drawn", RULE_Q), ("point mass", None)):
        rng = Mt19937(seed)
        counts = np.zeros(len(RULE_P))
        rows = _StubRows(RULE_P)
        drawn_from = None if q is None else ProposalDistribution(None, np.asarray(q, np.float64))
        for step in range(steps):
            if q is None:
                proposal = Proposal((step % len(RULE_P),), POINT_MASS)
            else:
                token = int(np.searchsorted(np.cumsum(q), rng.uniform_double(), side="right"))
                proposal = Proposal((min(token, len(q) - 1),), (drawn_from,))
            counts[ratio(proposal, rows, rng).tokens[0]] += 1
        p = np.asarray(RULE_P)
        error = np.sqrt(p * (1 - p) / steps)
        worst = np.abs(counts / steps - p)
        passed = bool((worst <= STANDARD_ERRORS * error).all())
        checks.append(
            Check(
                "rule", None, name, None, None, passed, steps,
                note=f"{RATIO}: largest deviation {worst.max():.4f} after {steps} steps",
            )
        )  # fmt: skip
    return checks


def _first_difference(a, b):
    """First index at which two lists differ, length included; None when they are equal."""
    for index, (x, y) in enumerate(zip(a, b)):
        if x != y:
            return index
    return None if len(a) == len(b) else min(len(a), len(b))


def _at(ids, index):
    return ids[index] if index < len(ids) else None
