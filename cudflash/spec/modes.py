"""Whether an answer may draft at all: the words of a request, and what they need.

Owns the check that a request asks for nothing it cannot have. Must stay light: every answer imports
it, also those without a drafter.
"""

from cudflash.errors import UsageError
from cudflash.spec.verify_length import check_verify_length, default_verify_length

AUTO, ON, OFF = "auto", "on", "off"
MODES = (AUTO, ON, OFF)


def check_speculative(mode, verify_length, drafter):
    """Return the verify length to use, for a request.

    Parameters
    ----------
    mode : {"auto", "on", "off"}
    verify_length : int or None
    drafter : Drafter or GuardedDrafter or None

    Raises
    ------
    UsageError
        If something was asked for that needs a drafter, and there is none; for an illegal length.
    """
    if mode not in MODES:
        raise UsageError(f"speculative is {mode!r}, expected auto, on or off")
    if drafter is None:
        if mode == "on" or verify_length is not None:
            wanted = "speculative='on'" if mode == "on" else f"verify_length={verify_length}"
            raise UsageError(f"{wanted} needs a draft, but none is loaded; pass draft= to load()")
        return None
    if verify_length is None:
        verify_length = getattr(drafter, "usual_length", None)
    if verify_length is None:
        return default_verify_length(drafter.block_size)
    return check_verify_length(verify_length, drafter.block_size)
