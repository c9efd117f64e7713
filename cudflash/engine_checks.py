"""What an engine checks of its arguments and says about a loaded pair.

Owns sentences. Must not know ops or sessions.
"""

from collections.abc import Iterable

from cudflash.checks import index_of, shown
from cudflash.errors import UsageError

MTP = "mtp"  # the drafter that a model brings itself


def check_mtp_k(drafter, k):
    """Return the tokens that an MTP block is to draft per round; None for another drafter.

    Raises
    ------
    UsageError
        If k is none that the block can have, or given to another drafter; for a text that names no
        drafter.
    """
    if isinstance(drafter, (str, bytes)) and drafter != MTP:
        raise UsageError(
            f"drafter is {shown(drafter)}, expected '{MTP}', a Drafter or a callable that returns "
            "one; the file of a draft is passed as draft"
        )
    if drafter != MTP:
        if k is not None:
            raise UsageError(f"mtp_k is {shown(k)}, but the drafter is not 'mtp'; omit it")
        return None
    from cudflash.spec.mtp import DEFAULT_K, check_k

    return DEFAULT_K if k is None else check_k(k, "mtp_k")


def check_taps(layers, n_layers):
    """Return tap layers as a tuple.

    Raises
    ------
    UsageError
        If there is none, or one is no layer of the model.
    """
    if isinstance(layers, (str, bytes)) or not isinstance(layers, Iterable):
        raise UsageError(f"the tap layers are {shown(layers)}, expected a sequence of layer numbers")
    layers = tuple(layers)
    if not layers:
        raise UsageError("there are no tap layers, expected at least one")
    for layer in layers:
        if index_of(layer) is None:
            raise UsageError(f"tap layer {shown(layer)} is no layer number")
        if not 0 <= layer < n_layers:
            raise UsageError(f"tap layer {layer} is outside the model, expected 0 to {n_layers - 1}")
    return tuple(int(layer) for layer in layers)


def load_notes(pair, n_ctx):
    """Return what a user should see once about a loaded pair, a sentence each."""
    config = pair.target.config
    notes = [f"default taken for {line}" for line in config.defaults_taken]
    if n_ctx > config.context_length:
        notes.append(
            f"n_ctx {n_ctx} is more than the {config.context_length} positions the model "
            "was trained for; answers may degrade past them"
        )
    if pair.draft is not None:
        notes += [f"default taken for the draft: {s}" for s in pair.draft.config.defaults_taken]
        notes += pair.draft.warnings
    return tuple(notes)
