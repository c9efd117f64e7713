"""How many tokens a round may draft: legal verify lengths, and what an answer has room for.

Owns the arithmetic of budgets. Must not know drafters or targets. Invariant: a round never drafts a
token that could not be emitted or whose row would not fit the context.
"""

from cudflash.errors import UsageError

# Block sizes less one: a graph is captured per width, so the widths are few and pinned.
LEGAL = (3, 7, 15)
USUAL = 7  # taken when none is asked for and the draft's block allows it


def legal_lengths(block_size=None):
    """Return the verify lengths that a draft of ``block_size`` rows allows; None allows all."""
    if block_size is None:
        return LEGAL
    return tuple(n for n in LEGAL if n <= block_size - 1)


def check_verify_length(length, block_size=None):
    """Return ``length`` as an int.

    Parameters
    ----------
    length : int
    block_size : int, optional
        Rows of the draft's block, B; at most B - 1 tokens can be drafted. None for a drafter
        without a block.

    Raises
    ------
    UsageError
        Before any work, unless ``length`` is 3, 7 or 15 and at most B - 1.
    """
    legal = _some(block_size)
    whole = hasattr(length, "__index__") and not isinstance(length, bool)
    if not whole or int(length) not in legal:
        raise UsageError(
            f"verify length is {length!r}, expected {_listed(legal)}{_because(block_size)}; "
            "pass one of them"
        )
    return int(length)


def default_verify_length(block_size=None):
    """Return 7, or the largest legal length below it where the block is too short."""
    return max(n for n in _some(block_size) if n <= USUAL)


def round_down(length, block_size=None):
    """Return the largest legal length that is at most ``length``, and a sentence about it.

    For front ends only: the engine itself takes legal lengths and nothing else.

    Returns
    -------
    (int, str)
        The sentence is "" when nothing was changed.

    Raises
    ------
    UsageError
        If no legal length is small enough.
    """
    legal = _some(block_size)
    whole = hasattr(length, "__index__") and not isinstance(length, bool)
    fitting = [n for n in legal if whole and n <= int(length)]
    if not fitting:
        raise UsageError(
            f"verify length is {length!r}, expected at least {legal[0]} ({_listed(legal)})"
            f"{_because(block_size)}; pass one of them, or turn speculation off"
        )
    taken = fitting[-1]
    if taken == int(length):
        return taken, ""
    return taken, (
        f"verify length {int(length)} rounded down to {taken}: legal lengths are {_listed(legal)}"
        f"{_because(block_size)}"
    )


def covering(length):
    """Return the shortest legal verify length that has room for so many proposals."""
    return min(n for n in LEGAL if n >= length)


def draft_budget(verify_length, room, context_left, drafter_max=None):
    """Return how many tokens the next round may draft; 0 makes it a plain round.

    A round evaluates the anchor and its drafts and emits one token more than it accepts, so of
    ``room`` emitted tokens one is always the target's own, and of the free rows one is the
    anchor's.

    Parameters
    ----------
    verify_length : int
    room : int
        Tokens that the answer may still get, at least 1.
    context_left : int
        Rows that the context still has, at least 1: the anchor's is one of them.
    drafter_max : int, optional
        Tokens that the drafter can propose at once.
    """
    limits = [verify_length, room - 1, context_left - 1]
    if drafter_max is not None:
        limits.append(drafter_max)
    return max(0, min(limits))


def cut_after_stop(tokens, stop_ids):
    """Return how many leading ``tokens`` can be emitted: those up to the first stop token."""
    for index, token in enumerate(tokens):
        if token in stop_ids:
            return index + 1
    return len(tokens)


def _some(block_size):
    legal = legal_lengths(block_size)
    if not legal:
        raise UsageError(
            f"the draft's block has {block_size} rows, expected at least {LEGAL[0] + 1}: "
            f"the shortest verify length is {LEGAL[0]}; use another draft"
        )
    return legal


def _listed(values):
    texts = [str(v) for v in values]
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} or {texts[-1]}"


def _because(block_size):
    return "" if block_size is None else f" for a draft whose block has {block_size} rows"
