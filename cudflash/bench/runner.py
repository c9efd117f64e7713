"""Measuring: every prompt is answered by every lane, in turns, and every pair of answers compared.

Owns the order of the runs and what is taken down of each. Must not know how a record is stored or
shown. Invariants: a lane never runs twice in a row where there is another one (A B B A, and the next
prompt begins with B), so that a drift of the machine falls on all lanes alike; nothing of the
warm-up is in a figure; a run that was made is in ``runs`` before the next one begins.
"""

import hashlib
import os
import statistics
import time
from dataclasses import dataclass, field

import numpy as np

from cudflash.bench.lanes import MTP, PLAIN, Lane, make_scripted
from cudflash.bench.prompts import loops
from cudflash.bench.statistics import COUNTS, LISTS, TIMES
from cudflash.sampling import SamplingConfig
from cudflash.spec.acceptance import MATCH
from cudflash.spec.drafters import AtMost
from cudflash.spec.verify_length import covering

NATURAL_STOP, FORCED = "natural", "forced"
STOPS = (NATURAL_STOP, FORCED)
WARM_UP = "Before anything is measured, every way of decoding answers this line once."
WARM_UP_TOKENS = 40  # enough for each verify width to be recorded
LONGEST_BLOCK = 16  # M of the verify curve: 1 to this
DEFAULT_SEED = 20260822


@dataclass(frozen=True)
class Settings:
    """What is the same for all runs of a bench.

    Attributes
    ----------
    n_tokens : int
        Of an answer at most, at least 2: the first comes from the prompt's pass and is not timed.
    repetitions : int
        Answers per prompt and lane.
    stops : tuple of {"natural", "forced"}
        Whether the model's end token stops. Forced answers run on past it, often into loops.
    sampling : SamplingConfig
    seed : int
    """

    n_tokens: int = 128
    repetitions: int = 2
    stops: tuple[str, ...] = (NATURAL_STOP,)
    sampling: SamplingConfig = field(default_factory=lambda: SamplingConfig(temperature=0.0))
    seed: int = DEFAULT_SEED

    def to_dict(self):
        """What a record says about it."""
        return {
            "n_tokens": self.n_tokens, "repetitions": self.repetitions, "stops": list(self.stops),
            "sampling": self.sampling.to_dict(), "seed": self.seed,
        }  # fmt: skip


class Group:
    """One engine with its lanes: the plain one, and those of its draft.

    Parameters
    ----------
    engine : Engine
    name : str
        Kind of the draft, "none" without one.
    lanes : sequence of Lane
        Drafted ones.
    """

    def __init__(self, engine, name, lanes):
        self.engine, self.name = engine, name
        self.lanes = (Lane(PLAIN), *lanes)
        self._sessions, self._drafters = {}, {}

    def session(self, lane):
        """The conversation of plain or of drafted answers; of each lane with a drafter of its own.

        Kept over the prompts, so that passes are recorded once and a common beginning (the filler)
        is evaluated once; an answer has the bits of a fresh conversation.
        """
        key = lane.name if lane.drafter == PLAIN or self._owns(lane) else None
        if key not in self._sessions:
            self._sessions[key] = self.engine.session()
        return self._sessions[key]

    @staticmethod
    def _owns(lane):
        """Whether the lane's drafter is not the engine's: it belongs to the lane's conversation."""
        held = lane.verify_length is not None and covering(lane.verify_length) != lane.verify_length
        return lane.drafter == MTP or held and not lane.scripted

    def drafter(self, lane):
        """The lane's own drafter, kept as its conversation is; None for the engine's.

        That of the target's MTP block, or the draft's, held to a number of tokens that no block has.
        """
        if not self._owns(lane):
            return None
        if lane.name not in self._drafters:
            if lane.drafter == MTP:
                made = self.engine.mtp_drafter(lane.verify_length)
            else:
                made = self.engine.draft.drafter(self.engine.config.vocab_size).drafter
                made = AtMost(made, lane.verify_length)
            self._drafters[lane.name] = made
        return self._drafters[lane.name]

    def to_dict(self):
        """Everything in effect, for the record."""
        receipt = self.engine.receipt({})
        keys = ("target", "draft", "device", "kernel_path", "threads", "n_ctx", "kv_type",
                "activations", "numerics")  # fmt: skip
        return {
            "name": self.name, "lanes": [lane.to_dict() for lane in self.lanes],
            **{key: _without_folder(receipt[key]) for key in keys},
            "planned_bytes": self.engine.plan.total,
        }  # fmt: skip


def _without_folder(part):
    """A part of a receipt without the folder of its file: a record says what ran, not where."""
    if isinstance(part, dict) and "path" in part:
        return {**part, "path": os.path.basename(part["path"])}
    return part


class Bench:
    """Runs the lanes of groups over items.

    Parameters
    ----------
    settings : Settings
    items : sequence of Item
    tell : callable, optional
        Called with one sentence before each run; may raise to end the bench.
    save : callable, optional
        Called without arguments after each prompt.

    Attributes
    ----------
    runs : list of dict
        Finished runs.
    differences : list of dict
        Runs whose tokens were not those they had to be.
    verify_cost : list of dict
        t_verify(M), see ``measure_verify_cost``.
    """

    def __init__(self, settings, items, *, tell=None, save=None):
        self.settings, self.items = settings, list(items)
        self.runs, self.differences, self.verify_cost = [], [], []
        self._tell, self._save = tell or (lambda text: None), save or (lambda: None)
        self._expected = {}  # (stop, item) -> ids of plain decoding, over all groups
        self._replayed = {}  # (stop, item, lane) -> ids of the first repetition, where ratio draws
        self._pending = []
        self._done = 0

    def run(self, group):
        """Measure one group; the warm-up first."""
        self.warm_up(group)
        for stop in self.settings.stops:
            for number, item in enumerate(self.items):
                self._prompt(group, stop, number, item)
                self._save()

    def warm_up(self, group):
        """Answer one line by every lane, untimed; the answers are compared as all others."""
        engine = group.engine
        ids = engine.tokenizer.encode(WARM_UP)
        room = max(2, min(WARM_UP_TOKENS, engine.n_ctx - len(ids)))
        if len(ids) + room > engine.n_ctx:
            ids = ids[: engine.n_ctx - room]
        plain = None
        for lane in group.lanes:
            self._tell(f"warm-up: {lane.name}")
            result = self._answer(group, lane, ids, room, True, plain)
            plain = result.tokens if plain is None else plain
            spec = result.stats["speculative"]
            if (spec is None or spec["rule"] == MATCH) and result.tokens != plain:
                where = dict.fromkeys(("stop", "index", "depth", "repetition"))
                run = {"group": group.name, "lane": lane.name, "set": "warm-up", **where}
                self._differs(run, plain, result.tokens, "plain decoding")

    def order(self, number, repetition, lanes):
        """Return the lanes in the order of one repetition of a prompt: A B, then B A, ..."""
        return lanes if (number + repetition) % 2 == 0 else lanes[::-1]

    def _prompt(self, group, stop, number, item):
        """All repetitions of one prompt by all lanes of a group."""
        scripted = [lane for lane in group.lanes if lane.scripted]
        answer = self._expected.get((stop, item))
        if scripted and answer is None:  # a script needs the answer before the plain lane's turn
            self._tell(f"{item.set} {item.index}: the script of {scripted[0].name}")
            plain = self._answer(group, group.lanes[0], item.ids, None, stop == FORCED)
            answer = self._expected[stop, item] = plain.tokens
        for repetition in range(self.settings.repetitions):
            for position, lane in enumerate(self.order(number, repetition, group.lanes)):
                self._done += 1
                self._tell(f"{self._done}: {item.set} {item.index} at {item.depth}, {lane.name}")
                result = self._answer(group, lane, item.ids, None, stop == FORCED, answer)
                run = self._taken(group, lane, stop, number, item, repetition, position, result)
                self.runs.append(run)
        self._compare_late(stop, item)

    def _answer(self, group, lane, ids, n_tokens, ignore_eos, plain=None):
        settings = self.settings
        options = {"speculative": "off"}
        if lane.drafter != PLAIN:
            length = lane.verify_length
            options = {
                "speculative": lane.mode, "verify_length": covering(length), "accept": lane.accept,
            }  # fmt: skip
            if lane.scripted:
                made = make_scripted(lane.drafter, plain)
                options["drafter"] = made if covering(length) == length else AtMost(made, length)
            elif (own := group.drafter(lane)) is not None:
                options["drafter"] = own
        return group.session(lane).generate(
            list(ids), max_tokens=n_tokens or settings.n_tokens, sampling=settings.sampling,
            seed=settings.seed, ignore_eos=ignore_eos, **options,
        ).result()  # fmt: skip

    # -- what is taken down -----------------------------------------------------------------------

    def _taken(self, group, lane, stop, number, item, repetition, position, result):
        stats, spec = result.stats, result.stats["speculative"]
        run = {
            "group": group.name, "lane": lane.name, "stop": stop, "set": item.set,
            "kind": item.kind, "depth": item.depth, "prompt": number, "index": item.index,
            "repetition": repetition, "order": position,
            "prompt_tokens": result.usage.prompt_tokens,
            "cached_tokens": result.usage.cached_tokens, "n_tokens": len(result.tokens),
            "tokens_sha256": tokens_sha256(result.tokens), "finish_reason": result.finish_reason,
            "loops": loops(result.tokens), "prompt_ms": stats["prompt_ms"],
            "decode_ms": stats["decode_ms"], "decode_tokens": stats["decode_tokens"],
            "rule": None, "counts": None, "fault": None, "closings": 0, "exact": None,
        }  # fmt: skip
        if spec is not None:
            run["rule"] = spec["rule"]
            run["counts"] = {name: spec[name] for name in (*COUNTS, *TIMES, *LISTS)}
            gate, fault = result.speculation.get("gate"), result.speculation.get("fault")
            run["closings"] = gate["closings"] if gate else 0
            run["fault"] = fault["reason"] if fault else None
        self._compare(run, lane, stop, item, result.tokens)
        return run

    def _compare(self, run, lane, stop, item, tokens):
        """Compare with the plain answer; under ``ratio`` with the lane's own first repetition."""
        if run["rule"] not in (None, MATCH):
            expected = self._replayed.setdefault((stop, item, lane.name), tokens)
            if expected != tokens:
                self._differs(run, expected, tokens, "the same lane's first repetition")
            return
        expected = self._expected.get((stop, item))
        if expected is None:
            if lane.drafter != PLAIN:
                self._pending.append((run, tokens))  # the plain lane comes later in this repetition
                return
            expected = self._expected[stop, item] = tokens
        self._judge(run, expected, tokens)

    def _compare_late(self, stop, item):
        """Compare drafted answers that were made before the first plain one."""
        for run, tokens in self._pending:
            self._judge(run, self._expected[stop, item], tokens)
        self._pending.clear()

    def _judge(self, run, expected, tokens):
        run["exact"] = expected == tokens
        if not run["exact"]:
            self._differs(run, expected, tokens, "plain decoding")

    def _differs(self, run, expected, tokens, against):
        at = next(
            (i for i, (a, b) in enumerate(zip(expected, tokens)) if a != b),
            min(len(expected), len(tokens)),
        )
        where = ("group", "lane", "stop", "set", "index", "depth", "repetition")
        self.differences.append({
            **{key: run[key] for key in where}, "against": against, "first_difference": at,
            "expected": expected[at] if at < len(expected) else None,
            "found": tokens[at] if at < len(tokens) else None,
        })  # fmt: skip


def tokens_sha256(ids):
    """SHA-256 of token ids, as little-endian 32-bit integers."""
    return hashlib.sha256(np.asarray(ids, "<i4").tobytes()).hexdigest()


def measure_verify_cost(engine, depth, *, trials=7, tell=None):
    """Time target passes of 1 to 16 rows with all logits, as verifying needs them.

    Passes of all widths take turns, up and down, and are rolled back; the first turn records them
    and is dropped. Below the public interface, because the cost of a pass must not depend on what a
    drafter proposes. With a draft, its taps are captured, as in decoding.

    Parameters
    ----------
    engine : Engine
    depth : int
        Rows in the caches, cut where the context ends.
    trials : int
    tell : callable, optional

    Returns
    -------
    list of dict
        ``depth``, ``m``, ``ms`` (one per trial).
    """
    from cudflash.model.runner import ALL, Runner

    vocab = engine.config.vocab_size
    widest = min(LONGEST_BLOCK, engine.n_ctx - 1, engine.work.logit_rows)
    depth = max(1, min(depth, engine.n_ctx - widest))
    tokens = [(1000 + 7 * i) % vocab for i in range(depth + widest)]
    runner = Runner(engine.ops, engine.model, engine.work, engine.n_ctx, engine.kv_type)
    if engine.draft_config is not None:
        runner.set_taps(engine.draft_config.taps)
    found = {m: [] for m in range(1, widest + 1)}
    with engine.lock:
        engine.begin_pass()
        for start in range(0, depth, runner.max_rows):
            part = tokens[start : min(start + runner.max_rows, depth)]
            runner.prefill_chunk(part, start + len(part) == depth)
        for trial in range(trials + 1):
            if tell is not None:
                tell(f"verify cost at {depth}, {trial} of {trials}")
            for m in found if trial % 2 else reversed(found):
                started = time.perf_counter()
                runner.step(tokens[depth : depth + m], ALL)
                elapsed = 1e3 * (time.perf_counter() - started)
                runner.rollback()
                if trial:
                    found[m].append(elapsed)
    runner.release()
    return [{"depth": depth, "m": m, "ms": ms} for m, ms in found.items()]


def verify_curve(costs):
    """Return [(m, median ms, t(m) / t(1))] of the costs of one depth, ratios taken turn by turn."""
    one = next(cost["ms"] for cost in costs if cost["m"] == 1)
    return [
        (cost["m"], statistics.median(cost["ms"]),
         statistics.median(a / b for a, b in zip(cost["ms"], one)))
        for cost in costs
    ]  # fmt: skip
