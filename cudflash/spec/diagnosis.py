"""Why acceptance is low: named signatures, each a small pure function over statistics.

Owns the thresholds of the signatures. Must not know how the numbers came about. Each function
returns a Finding, or None when its signature is not there. A signature points to a cause; it proves
none, and never changes an answer.
"""

from dataclasses import dataclass, field

FIRST_PROPOSALS = 64
MIN_TESTS = 24  # a healthy rate of 1/4 gives 24 failures in a row once in a thousand times
HEALTHY_RATE = 0.25
COLLAPSE = 0.25  # of the earlier rate
ECHO_FLOOR = 0.5
MIN_ECHOES = 8


@dataclass(frozen=True)
class Finding:
    """A signature that was seen."""

    name: str
    sentence: str
    numbers: dict = field(default_factory=dict)

    def to_dict(self):
        """Plain values, for receipts."""
        return {"name": self.name, "sentence": self.sentence, "numbers": dict(self.numbers)}


def zero_acceptance(rounds):
    """Name it when the first 64 proposals were all rejected.

    Parameters
    ----------
    rounds : iterable of (drafted, accepted)
        In order.
    """
    proposals = n_rounds = 0
    for drafted, accepted in rounds:
        if accepted:
            return None
        proposals += drafted
        n_rounds += bool(drafted)
        if proposals >= FIRST_PROPOSALS:
            return Finding(
                "zero-acceptance",
                f"none of the first {proposals} proposals was accepted; likely causes: a draft of "
                "another model, taps that are shifted or permuted, or a wrong RoPE layout of the "
                "draft",
                {"proposals": proposals, "rounds": n_rounds},
            )
    return None


def zero_mid_block(tested_at, accepted_at):
    """Name it when a position is never accepted although the one before it often is.

    Parameters
    ----------
    tested_at, accepted_at : sequence of int
        Per position: how often its draft was compared, and accepted.
    """
    for position in range(1, len(tested_at)):
        before = _rate(accepted_at[position - 1], tested_at[position - 1])
        if accepted_at[position] or tested_at[position] < MIN_TESTS:
            continue
        if before < HEALTHY_RATE:
            return None
        return Finding(
            "zero-mid-block",
            f"draft {position + 1} of the block was rejected all {tested_at[position]} times, "
            f"draft {position} was accepted {before:.0%} of the time; likely causes: a wrong "
            "attention window or mask inside the draft's block, or a block shorter than trained",
            {"position": position, "tested": tested_at[position], "rate_before": before},
        )
    return None


def window_collapse(rounds, boundaries):
    """Name it when acceptance falls apart where the context passes a boundary of the draft.

    Parameters
    ----------
    rounds : iterable of (n_past, drafted, accepted)
    boundaries : mapping of str to int
        What ends there -> committed rows; for example the window, sink + window, a ring's capacity.
    """
    rounds = list(rounds)
    for what, boundary in boundaries.items():
        before = [(d, a) for n_past, d, a in rounds if n_past < boundary]
        after = [(d, a) for n_past, d, a in rounds if n_past >= boundary]
        n_before, n_after = sum(d for d, _ in before), sum(d for d, _ in after)
        if min(n_before, n_after) < FIRST_PROPOSALS:
            continue
        rate_before = _rate(sum(a for _, a in before), n_before)
        rate_after = _rate(sum(a for _, a in after), n_after)
        if rate_before >= HEALTHY_RATE and rate_after < COLLAPSE * rate_before:
            return Finding(
                "window-collapse",
                f"acceptance falls from {rate_before:.0%} to {rate_after:.0%} where the context "
                f"passes {boundary} rows ({what}); likely causes: a window that is not the trained "
                "one, rows read in slot order after the ring wrapped, or positions out of range",
                {
                    "what": what,
                    "boundary": boundary,
                    "rate_before": rate_before,
                    "rate_after": rate_after,
                },
            )
    return None


def not_from_file(setting, value, source, file_value=None):
    """Name it when a setting that the draft was trained with does not come from its file.

    Parameters
    ----------
    setting : str
        "window", "taps", ...
    value : object
        In effect.
    source : {"file", "override", "absent"}
    file_value : object, optional
        What the file says, where it says something.
    """
    if source == "file" or (source == "override" and value == file_value):
        return None
    said = "says nothing" if file_value is None else f"says {file_value}"
    return Finding(
        f"{setting}-not-from-file",
        f"the draft's {setting} is {value} ({source}), its file {said}; a draft conditioned "
        "otherwise than in training proposes worse",
        {"value": value, "source": source, "file_value": file_value},
    )


def context_hole(draft_length, committed):
    """Name it when the draft's context does not end where the committed rows end.

    Parameters
    ----------
    draft_length : int
        Rows that the drafter has seen.
    committed : int
        Rows of the target.
    """
    if draft_length == committed:
        return None
    return Finding(
        "context-hole",
        f"its context ends at row {draft_length}, {committed} rows are committed; some rows were "
        "not handed to it",
        {"draft_length": draft_length, "committed": committed},
    )


def seed_echo_score(echoed, anchors):
    """Share of blocks whose row 0 reproduces the anchor.

    Row 0 is not trained for it in every draft, so a low score is a hint, a high one a good sign.

    Parameters
    ----------
    echoed : sequence of int
        Most likely token of row 0, per block.
    anchors : sequence of int

    Returns
    -------
    float or None
        None without a block.
    """
    if len(echoed) != len(anchors):
        raise ValueError(f"{len(echoed)} rows for {len(anchors)} anchors")
    return _rate(sum(e == a for e, a in zip(echoed, anchors)), len(anchors)) if anchors else None


def seed_echo(echoed, anchors):
    """Name it when fewer than half of at least 8 blocks reproduce their anchor."""
    score = seed_echo_score(echoed, anchors)
    if score is None or len(anchors) < MIN_ECHOES or score >= ECHO_FLOOR:
        return None
    return Finding(
        "seed-echo-low",
        f"row 0 of the draft's block reproduced the anchor in {score:.0%} of {len(anchors)} "
        "blocks; likely causes: a wrong embedding scale, hidden norm or output head of the draft",
        {"score": score, "blocks": len(anchors)},
    )


def diagnose(records, stats, boundaries=(), settings=()):
    """Return every finding about one answer.

    Parameters
    ----------
    records : sequence of RoundRecord
    stats : SpecStats
    boundaries : mapping, optional
        See ``window_collapse``.
    settings : iterable of (setting, value, source, file_value), optional
        See ``not_from_file``.

    Returns
    -------
    tuple of Finding
    """
    found = [not_from_file(*setting) for setting in settings]
    found.append(zero_acceptance((len(r.drafted), r.accepted) for r in records))
    found.append(zero_mid_block(stats.tested_at, stats.accepted_at))
    if boundaries:
        counts = [(r.n_past, len(r.drafted), r.accepted) for r in records]
        found.append(window_collapse(counts, boundaries))
    return tuple(f for f in found if f is not None)


def diagnose_drafter(stats, drafter, settings=()):
    """Return every finding about one answer and what its drafter tells of itself.

    Parameters
    ----------
    stats : SpecStats
    drafter : Drafter
        May have ``boundaries()`` and ``echoes``.
    settings : iterable
        As of ``diagnose``.
    """
    boundaries = getattr(drafter, "boundaries", dict)()
    found, echo = diagnose(stats.drafting_records, stats, boundaries, settings), None
    # not every draft is trained to echo: worth telling only where first drafts are rejected, which
    # a wrong embedding, norm or head would spoil as well
    first, tested = sum(stats.accepted_at[:1]), sum(stats.tested_at[:1])
    if getattr(drafter, "echoes", None) and first < HEALTHY_RATE * tested:
        echo = seed_echo(*zip(*drafter.echoes))
    return found if echo is None else (*found, echo)


def _rate(part, whole):
    return part / whole if whole else 0.0
