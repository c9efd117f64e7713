"""Is the draft conditioned as it was trained? Asked by experiment: variants of the conditioning.

Owns the variants and the statistics of their comparison. Must not change what the engine runs.

A draft that is fed the wrong layers, or rotated in the wrong pairs, still proposes something, and the
answer stays right; only acceptance suffers, and how much a draft should accept nobody knows. But a
wrong conditioning has the right one next to it. So the same anchors of the same plain text are drafted
again with taps shifted or reordered, with the other RoPE pairing, with other windows, with a context
that ends elsewhere. A variant that accepts clearly more than what is in effect names the fault.

Nothing is inferred from a variant that accepts less: that is how a sound draft looks.
"""

from dataclasses import dataclass, replace
from math import sqrt

import numpy as np

from cudflash.model.draft_runner import DraftRunner
from cudflash.spec.diagnosis import Finding

MIN_ANCHORS, MAX_ANCHORS = 32, 160
SIGMAS = 4.0  # of the paired difference: once in 30,000 by chance, over a dozen variants in 2,500
GAIN = 1.25  # and worth telling

SHIFTED, PERMUTED, ROPE, WINDOW, STALE = (
    "taps-shifted", "taps-permuted", "rope-pairing", "window", "stale-rows"
)  # fmt: skip


@dataclass(frozen=True)
class Variant:
    """One way to condition the draft."""

    name: str
    what: str  # in words
    taps: tuple[int, ...]
    config: object  # DraftConfig
    lag: int = 0  # rows that the context ends too early


@dataclass(frozen=True)
class Probe:
    """What the variants accepted of the same anchors."""

    anchors: int
    accepted: float  # mean number of leading proposals equal to the text, as the engine runs
    variants: tuple[tuple[str, str, float, float], ...]  # name, what, mean, sigmas above
    findings: tuple[Finding, ...]

    def to_dict(self):
        """Plain values, for JSON."""
        keys = ("name", "what", "accepted", "sigmas")
        return {
            "anchors": self.anchors,
            "accepted": self.accepted,
            "variants": [dict(zip(keys, row)) for row in self.variants],
            "findings": [finding.to_dict() for finding in self.findings],
        }


def probe(engine, texts, n_tokens=7, max_anchors=MAX_ANCHORS):
    """Draft the anchors of plain answers with every variant.

    Parameters
    ----------
    engine : Engine
        With a draft.
    texts : sequence of (prompt ids, answer ids)
        Answers of plain decoding at temperature 0.
    n_tokens : int
        Proposals per anchor, at most.
    max_anchors : int
        Anchors at most; more are thinned out evenly. Costs one draft pass per anchor and variant.

    Returns
    -------
    Probe or None
        None for too few anchors.
    """
    config = engine.draft_config
    n_tokens = min(n_tokens, config.block_size - 1)
    anchors = sum(max(0, len(answer) - n_tokens) for _, answer in texts)
    if anchors < MIN_ANCHORS:
        return None
    stride = -(-anchors // max_anchors)
    findings = list(altered_vectors(engine))
    layers = tuple(range(engine.config.n_layers))
    rows = [(engine.taps([*prompt, *answer], layers), prompt, answer) for prompt, answer in texts]
    with engine.lock:
        base = _accepted(engine, Variant("", "", config.taps, config), rows, n_tokens, stride)
        told = []
        for variant in variants(config, engine.config.n_layers):
            found = _accepted(engine, variant, rows, n_tokens, stride)
            difference = found - base
            spread = difference.std(ddof=1) / sqrt(len(base))
            sigmas = float(difference.mean() / spread) if spread else 0.0
            told.append((variant.name, variant.what, float(found.mean()), sigmas))
    told = tuple(told)
    found = _best(told, float(base.mean()))
    return Probe(len(base), float(base.mean()), told, (*findings, *found))


def variants(config, n_layers):
    """Every variant of a draft's conditioning.

    Parameters
    ----------
    config : DraftConfig
    n_layers : int
        Of the target.

    Returns
    -------
    list of Variant
    """
    taps, made = config.taps, []
    for shift in (-1, 1):
        moved = tuple(tap + shift for tap in taps)
        if min(moved) >= 0 and max(moved) < n_layers:
            made.append(Variant(SHIFTED, f"taps {list(moved)} ({shift:+d})", moved, config))
    orders = {tuple(sorted(taps)), tuple(reversed(taps)), tuple(sorted(taps, reverse=True))}
    for order in sorted(orders - {taps}):
        made.append(Variant(PERMUTED, f"taps in the order {list(order)}", order, config))
    style = "interleaved" if config.rope.style == "split_half" else "split_half"
    turned = replace(config, rope=replace(config.rope, style=style))
    made.append(Variant(ROPE, f"RoPE in {style.replace('_', '-')} pairs", taps, turned))
    if config.window is not None:
        for window in (config.window // 2, config.window * 2):
            if window >= config.block_size:
                made.append(Variant(WINDOW, f"window {window}", taps, windowed(config, window)))
    made.append(Variant(STALE, "a context that ends one row earlier", taps, config, lag=1))
    return made


def windowed(config, window):
    """A config whose sliding layers have another window."""
    layers = tuple(
        replace(layer, window=None if layer.window is None else window) for layer in config.layers
    )
    return replace(config, layers=layers)


def altered_vectors(engine):
    """Findings about norms on the device that are not those of the file."""
    draft = engine.draft
    weights, model = draft.file_weights(), draft.model
    for name in ("hidden_norm", "output_norm"):
        if not np.array_equal(engine.ops.download(getattr(model, name)), getattr(weights, name)):
            shown = name.replace("_", "-")
            yield Finding(
                f"{shown}-altered",
                f"the draft's {shown} on the device is not the one in its file; the loader or the "
                "memory is at fault",
                {},
            )


def _accepted(engine, variant, texts, n_tokens, stride):
    """Leading proposals that are equal to the text, for every anchor: float64."""
    counts = []
    model = replace(engine.draft.model, config=variant.config)
    for rows, prompt, answer in texts:
        runner = DraftRunner(engine.ops, model, engine.draft.work)
        taps = engine.ops.upload(np.ascontiguousarray(rows[:, variant.taps]))
        done = 0
        for index in range(0, max(0, len(answer) - n_tokens), stride):
            end = max(0, len(prompt) + index - variant.lag)
            if end > done:
                runner.observe(taps[done:end], end - done)
                done = end
            tokens = runner.propose(answer[index], n_tokens).tokens
            expected = answer[index + 1 : index + 1 + n_tokens]
            same = [a == b for a, b in zip(tokens, expected)]
            counts.append(same.index(False) if False in same else len(same))
    return np.array(counts, np.float64)


def _best(told, base):
    """The finding about the best variant that is clearly better, if one is."""
    better = [
        row for row in told if row[3] >= SIGMAS and row[2] >= GAIN * base and row[2] > base + 0.05
    ]
    if not better:
        return ()
    name, what, mean, sigmas = max(better, key=lambda row: row[2])
    return (
        Finding(
            f"{name}-better",
            f"with {what} the draft has {mean:.2f} proposals per round accepted instead of "
            f"{base:.2f}; it was probably trained that way",
            {"variant": what, "accepted": mean, "now": base, "sigmas": sigmas},
        ),
    )
