"""Identity of a pair: what must be equal for a draft's numbers to mean the same elsewhere.

Owns the file's fields and their comparison. Must not load weights. Invariant: nothing on the reading
side is inferred; a field that the file lacks, or has in addition, is a difference.
"""

import json
from pathlib import Path

from cudflash import defaults
from cudflash.errors import FormatError, PairingError, UsageError
from cudflash.model.draft_context import DraftContextGeometry

SCHEMA = "cudflash-identity/2"


def pair_identity(pair, n_ctx, activations, *, progress=None):
    """Return the identity of an opened pair.

    Parameters
    ----------
    pair : Pair
        With a draft; both are read whole, for their digests.
    n_ctx : int
        Context; part of the geometry only where a draft layer sees all of it.
    activations : str
    progress : callable, optional
        Called with the name of the file that is being read.

    Returns
    -------
    dict
    """
    if pair.draft is None:
        raise UsageError(
            f"{pair.gguf.path}: an identity is that of a target and its draft, but no draft was "
            "given; pass it with --draft"
        )
    config = pair.draft.config
    geometry = DraftContextGeometry.of(config, n_ctx)
    if progress is not None:
        progress(str(pair.gguf.path))
    target_digest = pair.files.sha256()
    if progress is not None:
        progress(str(pair.draft.path))
    return {
        "schema": SCHEMA,
        "numerics": defaults.NUMERICS,
        "activations": activations,
        "draft_activations": pair.draft_activations,
        "target_sha256": target_digest,
        "draft_sha256": pair.draft_files.sha256(),
        "draft_kind": config.kind,
        "taps": list(config.taps),
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "context_layers": geometry.layers,
        "context_elements_per_token": geometry.elements_per_token,
        "context_sink": geometry.sink,
        "context_window": geometry.window,
        "context_full_layers": geometry.full_layers,
        "context_n_ctx": geometry.n_ctx,
        "context_byte_limit": geometry.byte_limit,
    }


def require_identity(path, pair, n_ctx, activations):
    """Refuse a pair that is not the one of the identity file ``path``.

    Raises
    ------
    PairingError
        Names the first field that differs, what was expected and what was found.
    """
    check_identity(path, read_identity(path), pair_identity(pair, n_ctx, activations))


def write_identity(path, identity):
    """Write an identity as JSON."""
    try:
        Path(path).write_text(json.dumps(identity, indent=1) + "\n", encoding="utf-8")
    except OSError as err:
        raise UsageError(f"{path}: cannot be written ({err.strerror}); choose another path") from None


def read_identity(path):
    """Return the identity in a file.

    Raises
    ------
    UsageError
        If the file cannot be read.
    FormatError
        If it holds no identity of this schema.
    """
    if Path(path).is_fifo():
        raise UsageError(f"{path}: is a FIFO, expected an identity file; check the path")
    try:
        identity = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as err:
        raise UsageError(f"{path}: cannot be read ({err.strerror}); check the path") from None
    except (ValueError, RecursionError) as err:
        raise FormatError(f"{path}: is not JSON ({err}), expected an identity file") from None
    found = identity.get("schema") if isinstance(identity, dict) else None
    if found != SCHEMA:
        raise FormatError(
            f"{path}: schema is {found!r}, expected {SCHEMA!r}; make the file again with "
            "'cudflash identity'"
        )
    return identity


def check_identity(path, expected, found):
    """Raise unless two identities are equal in every field.

    Parameters
    ----------
    path : str or path-like
        Of the file, for the message.
    expected : dict
        From the file.
    found : dict
        Of the pair in use.

    Raises
    ------
    PairingError
        Naming the first field that differs, what was expected and what was found.
    """
    for name in [*found, *(n for n in expected if n not in found)]:
        if name not in expected or name not in found or expected[name] != found[name]:
            said = json.dumps(expected[name]) if name in expected else "nothing"
            has = json.dumps(found[name]) if name in found else "nothing"
            raise PairingError(
                f"{path}: {name} differs, expected {said} (the file), found {has} (this pair); use "
                "the pair and settings that the file was made for, or make it again"
            )
