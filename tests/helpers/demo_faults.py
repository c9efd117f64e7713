"""The embedded pair as test bed: golden traces, and every wrong conditioning of its drafts.

A draft is asked at the same anchors of the same plain answers with the right conditioning and with
each fault; what differs is counted per drafted token. Nothing here changes what the engine runs.
"""

import hashlib
import json
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np

import cudflash
from cudflash.context_check import check_context
from cudflash.model.draft_runner import DraftRunner
from cudflash.probe import altered_vectors, probe, windowed
from cudflash.reach_check import check_reach

FOLDER = Path(__file__).parents[1] / "vectors" / "demo_pair"
KINDS = ("dflash", "dflash2")
VERIFY = {"dflash": 15, "dflash2": 7}
GREEDY = cudflash.SamplingConfig(temperature=0)
N_CTX = 1024
# Share of drafted tokens that may differ between two arithmetics; a fault is above. Activations of 8
# bits instead of 16, far coarser than a sum in another order, change 1.8 and 4.6 % of them.
BUDGET = {"dflash": 0.025, "dflash2": 0.05}


@cache
def pair(kind, **settings):
    """The engine of the embedded target with one of its drafts; one thread."""
    settings = {"n_ctx": N_CTX, "device": "cpu", "threads": 1, **settings}
    return cudflash.load("demo", f"demo:{kind}", **settings)


@cache
def prompts():
    """The held-out prompts: list of {kind, source, text}."""
    return json.loads((FOLDER / "prompts.json").read_text(encoding="utf-8"))["prompts"]


def chosen(per_kind):
    """(index, prompt) of the first prompts of each kind of text."""
    taken = {}
    for index, prompt in enumerate(prompts()):
        taken.setdefault(prompt["kind"], []).append((index, prompt))
    return [pair for of in taken.values() for pair in of[:per_kind]]


# -- golden traces ----------------------------------------------------------------------------------


def trace(engine, kind, index, n_tokens):
    """What one prompt's drafted answer must be, bit for bit.

    Returns
    -------
    dict
        ``prompt`` (index), ``ids_sha256`` of the prompt's ids, ``taps_sha256`` of the bits of the
        layers that the draft reads, ``rounds``: [n_past, anchor, drafted ids, accepted].
    """
    ids = engine.tokenizer.encode(prompts()[index]["text"])
    result = engine.generate(
        ids, max_tokens=n_tokens, sampling=GREEDY, ignore_eos=True, speculative="on",
        verify_length=VERIFY[kind],
    )  # fmt: skip
    rounds = [
        [r["n_past"], r["anchor"], r["drafted"], r["accepted"]] for r in result.speculation["trace"]
    ]
    taps = engine.taps(ids, engine.draft_config.taps)
    return {
        "prompt": index,
        "ids_sha256": hashlib.sha256(np.asarray(ids, "<i4").tobytes()).hexdigest(),
        "taps_sha256": hashlib.sha256(np.ascontiguousarray(taps).tobytes()).hexdigest(),
        "tokens": list(result.tokens),
        "rounds": rounds,
    }


# -- faults -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A plain answer with everything that drafting at its anchors needs."""

    index: int
    kind: str
    prompt: list
    answer: tuple
    residuals: np.ndarray  # (n, n_layers, hidden) after every layer


def cases(engine, per_kind, n_tokens):
    """Plain greedy answers of some prompts."""
    layers = tuple(range(engine.config.n_layers))
    made = []
    for index, prompt in chosen(per_kind):
        ids = engine.tokenizer.encode(prompt["text"])
        answer = engine.generate(
            ids, max_tokens=n_tokens, sampling=GREEDY, ignore_eos=True, speculative="off"
        ).tokens
        rows = engine.taps([*ids, *answer], layers)
        made.append(Case(index, prompt["kind"], ids, answer, rows))
    return made


def periodic_case(engine, n_prompt, n_tokens, period=8):
    """Random ids with a short period: the fixture that real models copy, and blind for faults."""
    rng = np.random.default_rng(5)
    ids = [int(t) for t in np.resize(rng.integers(2, engine.config.vocab_size, period), n_prompt)]
    answer = engine.generate(
        ids, max_tokens=n_tokens, sampling=GREEDY, ignore_eos=True, speculative="off"
    ).tokens
    layers = tuple(range(engine.config.n_layers))
    return Case(-1, "periodic", ids, answer, engine.taps([*ids, *answer], layers))


class _Shifted(DraftRunner):
    """Rotates the keys of its context rows by another position than theirs."""

    shift = 1

    def _write_rows(self, flat):
        table, self._model = self._model, replace(
            self._model, rope_table=self._model.rope_table[self.shift :]
        )
        try:
            super()._write_rows(flat)
        finally:
            self._model = table


def _tapped(change):
    return lambda rows, taps, other: rows[:, list(change(taps))]


def _reversed(taps):
    return taps[::-1]


def _rotated(taps):
    return taps[1:] + taps[:1]


def _late(taps):
    return tuple(tap + 1 for tap in taps)


def _early(taps):
    return tuple(tap - 1 for tap in taps)


def _stale(lag):
    def select(rows, taps, other):
        rows = rows[:, list(taps)]
        return np.concatenate([rows[:1]] * lag + [rows[:-lag]])

    return select


def _missing(rows, taps, other):
    rows = rows[:, list(taps)].copy()
    rows[:, -1] = 0
    return rows


def _zeroed(rows, taps, other):
    return np.zeros_like(rows[:, list(taps)])


def _foreign(rows, taps, other):
    return np.resize(other[:, list(taps)], (len(rows), len(taps), rows.shape[2]))


class _WithoutNorm:
    """An op set that leaves one norm out."""

    def __init__(self, ops, weight):
        self._ops, self._weight = ops, weight

    def __getattr__(self, name):
        return getattr(self._ops, name)

    def rms_norm(self, out, x, weight, eps):
        if weight is self._weight:
            self._ops.copy(out, x)
        else:
            self._ops.rms_norm(out, x, weight, eps)


class _Unnormed(DraftRunner):
    """Makes keys and values from fused taps that were not normed."""

    def __init__(self, ops, model, work):
        super().__init__(ops, model, work)
        self._ops = _WithoutNorm(ops, model.hidden_norm)


@dataclass(frozen=True)
class Fault:
    """One way to condition a draft wrongly."""

    name: str
    rows: object = None  # (residuals, taps, another case's residuals) -> tap rows
    model: object = None  # (engine, DraftModel) -> DraftModel
    runner: type = DraftRunner
    taps: object = None  # (taps) -> the taps that the configuration then states, for the probe
    named: str = ""  # the finding that has to name it
    slight: bool = False  # may change less than the budget


def _window(change):
    def make(engine, model):
        return replace(model, config=windowed(model.config, change(model.config.window)))

    return make


def _sink(engine, model):
    """Pinned rows where there were none, none where there were."""
    sink = 0 if model.config.sink else 64
    return replace(model, config=replace(model.config, sink=sink))


def _other_rope(engine, model):
    style = "interleaved" if model.config.rope.style == "split_half" else "split_half"
    return replace(
        model, config=replace(model.config, rope=replace(model.config.rope, style=style))
    )


def _unit_norm(engine, model):
    ones = np.ones_like(engine.ops.download(model.hidden_norm))
    return replace(model, hidden_norm=engine.ops.upload(ones))


FAULTS = (
    Fault("stale by 1", _stale(1), named="stale-rows"),
    Fault("stale by 4", _stale(4), named="stale-rows"),
    Fault("positions off by 1", runner=_Shifted, named="foreign-rows"),
    Fault("taps reversed", _tapped(_reversed), taps=_reversed, named="taps-permuted-better"),
    Fault("taps rotated", _tapped(_rotated), taps=_rotated, named="taps-permuted-better"),
    Fault("taps a layer late", _tapped(_late), taps=_late),
    Fault("taps a layer early", _tapped(_early), taps=_early),
    Fault("last tap missing", _missing, named="foreign-rows"),
    Fault("window halved", model=_window(lambda w: w // 2), named="window-reach"),
    Fault("window quartered", model=_window(lambda w: w // 4), named="window-reach"),
    Fault("window unlimited", model=_window(lambda w: None), named="window-reach"),
    Fault("sink changed", model=_sink),
    Fault("context zeroed", _zeroed, named="zeroed-rows"),
    Fault("context foreign", _foreign, named="foreign-rows"),
    Fault("RoPE pairing", model=_other_rope, named="rope-pairing-better"),
    Fault("hidden norm missing", runner=_Unnormed, named="foreign-rows"),
    # the trained weights are all near 1, so little changes: the one fault that traces may not see
    Fault("hidden norm without its weights", model=_unit_norm, slight=True,
          named="hidden-norm-altered"),
)  # fmt: skip


def drafts(engine, kind, found, fault=None, stride=4):
    """Draft at every ``stride``-th anchor of every case.

    Parameters
    ----------
    engine : Engine
    kind : str
    found : sequence of Case
    fault : Fault, optional
        The right conditioning without.

    Returns
    -------
    list of (case number, drafted ids, expected ids)
    """
    n, taps = VERIFY[kind], engine.draft_config.taps
    model = engine.draft.model
    made = Fault("", model=None) if fault is None else fault
    model = model if made.model is None else made.model(engine, model)
    out = []
    for number, case in enumerate(found):
        other = found[number - 1].residuals
        rows = case.residuals[:, list(taps)]
        if made.rows is not None:
            rows = made.rows(case.residuals, taps, other)
        runner = made.runner(engine.ops, model, engine.draft.work)
        buffer = engine.ops.upload(np.ascontiguousarray(rows, np.float32))
        done = 0
        for at in range(0, len(case.answer) - n, stride):
            end = len(case.prompt) + at
            runner.observe(buffer[done:end], end - done)
            done = end
            tokens = runner.propose(case.answer[at], n).tokens
            out.append((number, tokens, tuple(case.answer[at + 1 : at + 1 + n])))
    return out


def named(engine, found, fault):
    """The finding by which ``verify`` would tell a fault, "" where it tells nothing.

    The fault is put where it would be: in the draft on the device, in what the configuration states,
    or in the rows that a conversation holds.
    """
    draft, config = engine.draft, engine.draft_config
    model = draft.model
    if fault.taps is not None or fault.model is _other_rope:
        if fault.taps is not None:
            wrong = replace(config, taps=fault.taps(config.taps))
        else:
            wrong = fault.model(engine, model).config
        try:
            engine.draft_config = wrong
            result = probe(engine, [(case.prompt, case.answer) for case in found])
        finally:
            engine.draft_config = config
        return result.findings[0].name if result.findings else ""
    if fault.model is not None:
        try:
            draft.model = fault.model(engine, model)
            names = [finding.name for finding in altered_vectors(engine)]
            reach = check_reach(engine)
        finally:
            draft.model = model
        return names[0] if names else "" if reach is None else reach.name
    if fault.runner is not DraftRunner:
        rows = found[0].residuals[:, list(config.taps)]
    else:
        rows = fault.rows(found[0].residuals, config.taps, found[-1].residuals)
    tokens = [*found[0].prompt, *found[0].answer]
    runner = fault.runner(engine.ops, model, draft.work)
    runner.observe(engine.ops.upload(np.ascontiguousarray(rows, np.float32)), len(tokens))
    finding = check_context(engine, runner, tokens)
    return "" if finding is None else finding.name


def accepted(drafted, expected):
    """Leading drafts that are the text."""
    same = [a == b for a, b in zip(drafted, expected)]
    return same.index(False) if False in same else len(same)


def differing(right, wrong):
    """Share of drafted tokens that differ, and of anchors that differ in the first three."""
    tokens = [a != b for (_, x, _), (_, y, _) in zip(right, wrong) for a, b in zip(x, y)]
    first = [x[:3] != y[:3] for (_, x, _), (_, y, _) in zip(right, wrong)]
    return sum(tokens) / len(tokens), sum(first) / len(first)
