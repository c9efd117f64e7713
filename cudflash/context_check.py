"""Does a draft's context hold what it should? Its rows against rows made afresh from the tokens.

Owns the comparison and the names of what is found. Must not change the context. The count of rows is
checked in every round (``spec.diagnosis.context_hole``); their content costs a pass over all tokens
to check, so this is for ``verify`` and for whoever asks. Invariant: equal tokens give equal bits,
however they came in, so every difference is a fault.
"""

import numpy as np

from cudflash.model.draft_runner import DraftRunner
from cudflash.spec.diagnosis import Finding, context_hole

MAX_LAG = 8  # rows by which stale ones are looked for
ZEROED, STALE, FOREIGN = "zeroed-rows", "stale-rows", "foreign-rows"


def check_context(engine, runner, tokens):
    """Compare every row that a draft attends to with one made afresh.

    Parameters
    ----------
    engine : Engine
        With a draft; not locked by the caller.
    runner : DraftRunner
        Of a conversation, between rounds.
    tokens : sequence of int
        Its committed ids.

    Returns
    -------
    Finding or None
        None when all rows have the bits they should.
    """
    if runner.length != len(tokens):
        return context_hole(runner.length, len(tokens))
    if not tokens:
        return None
    taps = engine.taps(tokens, runner.config.taps)
    with engine.lock:
        found = _rows(runner)
        wrong = _different(found, _rows(_made(engine, taps)))
        if not len(wrong):
            return None
        name, what, lag = _named(engine, taps, found, wrong)
    first, last = int(wrong[0]), int(wrong[-1])
    return Finding(
        name,
        f"{len(wrong)} rows of the draft's context, from position {first} to {last}, are not those "
        f"of the committed tokens: {what}; taps were handed over for other rows than they belong to, "
        "or the context was overwritten",
        {"rows": len(wrong), "first": first, "last": last, "lag": lag},
    )


def _made(engine, taps):
    """A conversation of the same draft that is given these taps, and nothing else."""
    runner = DraftRunner(engine.ops, engine.draft.model, engine.draft.work)
    runner.observe(engine.ops.upload(np.ascontiguousarray(taps)), len(taps))
    return runner


def _rows(runner):
    """What counts, per layer: (positions, (n, 2, n_kv_heads, head_dim) float32)."""
    context = runner.context
    kept = [context.retained(index) for index in range(len(context.layers))]
    return [(at, np.stack(context.rows(i, at), axis=1)) for i, at in enumerate(kept)]


def _different(found, expected):
    """Positions at which any bit differs in any layer, sorted."""
    wrong = set()
    for (positions, a), (_, b) in zip(found, expected, strict=True):
        same = (a.view(np.uint32) == b.view(np.uint32)).all(axis=(1, 2, 3))
        wrong.update(positions[~same].tolist())
    return np.array(sorted(wrong), np.int64)


def _named(engine, taps, found, wrong):
    """(name, words, lag or None) of what stands where the rows should be."""
    chosen = [values[np.isin(positions, wrong)] for positions, values in found]
    if not any(values.any() for values in chosen):
        return ZEROED, "they are zero", None
    for lag in range(1, min(MAX_LAG, len(taps) - 1) + 1):
        late = np.concatenate([taps[:1]] * lag + [taps[:-lag]])
        left = _different(found, _rows(_made(engine, late)))
        if not np.isin(wrong[wrong >= lag], left).any():
            rows = "row" if lag == 1 else "rows"
            return STALE, f"they hold what belongs {lag} {rows} before them", lag
    return FOREIGN, "they hold something else", None
