"""Whether a target and a draft belong together, and finding the draft that lies beside a model.

Owns the verdict ``inspect TARGET DRAFT`` prints and the choice among ``dflash-*.gguf`` files. Must
not touch a device. Invariant: a draft is chosen by what it states and holds, never by its name
alone, and never silently.
"""

from __future__ import annotations

import glob
import hashlib
import os
from dataclasses import dataclass

from cudflash.loader.draft_bind import Draft, bind_draft, mismatches, open_draft
from cudflash.loader.draft_config import QUALIFIED_LANE, DraftConfig, describe_draft_config
from cudflash.loader.draft_names import BESIDE
from cudflash.loader.summary import file_digest

from cudflash.errors import CudflashError, UsageError


@dataclass(frozen=True)
class FoundDraft:
    """Outcome of looking for a draft beside a model."""

    path: str | None  # None: nothing there fits
    explanation: str  # one sentence for people
    rejected: tuple[tuple[str, str], ...]  # (path, why not)


def pairing_verdict(target, draft: Draft) -> dict:
    """Say whether a draft belongs to a target, and what is worth knowing about the pair.

    Parameters
    ----------
    target : TargetConfig or Target
    draft : Draft
        Opened alone.

    Returns
    -------
    dict
        JSON-able: ``compatible``, ``reasons`` (why not; each with both numbers), ``checks`` (what
        was compared: name, draft's value, target's value, equal), ``qualified_lane``,
        ``warnings``, ``draft`` (its configuration).
    """
    target = getattr(target, "config", target)
    config = draft.config
    reasons = mismatches(config, target)
    warnings = draft.warnings if reasons else bind_draft(draft, target).warnings
    return {
        "compatible": not reasons,
        "reasons": reasons,
        "checks": _checks(config, target),
        "qualified_lane": config.qualified_lane,
        "lane": lane_sentence(config),
        "warnings": list(warnings),
        "draft": describe_draft_config(config),
    }


def lane_sentence(config: DraftConfig) -> str:
    """Say how the geometry relates to the qualified one."""
    found = f"{config.n_layers} layers x {len(config.taps)} taps x block {config.block_size}"
    if config.qualified_lane:
        return f"{found}: the qualified lane"
    expected = "{} x {} x {}".format(*QUALIFIED_LANE)
    return f"{found}: runs, but is not the qualified lane ({expected})"


def _checks(config: DraftConfig, target) -> list[dict]:
    """List what was compared; a value the draft does not state counts as equal."""
    rows = [
        ("hidden size", config.hidden_dim, target.hidden_dim),
        ("vocabulary", config.vocab_size, target.vocab_size),
        ("target layers", config.n_target_layers, target.n_layers),
    ]
    checks = [
        {"what": what, "draft": ours, "target": theirs, "fits": ours in (None, theirs)}
        for what, ours, theirs in rows
    ]
    limits = [
        ("last tap (0-based)", max(config.taps), target.n_layers - 1),
        ("mask token id", config.mask_token_id, target.vocab_size - 1),
    ]
    checks += [
        {"what": what, "draft": ours, "target": f"at most {most}", "fits": ours <= most}
        for what, ours, most in limits
    ]
    return checks


def find_draft_beside(path: str | os.PathLike, target) -> FoundDraft:
    """Look for the draft of a model among ``dflash-*.gguf`` in the model's folder.

    Parameters
    ----------
    path : str or path-like
        The target's file.
    target : TargetConfig or Target
        The target at that path.

    Returns
    -------
    FoundDraft

    Raises
    ------
    UsageError
        If several drafts fit; all are listed.
    """
    target = getattr(target, "config", target)
    path = os.fspath(path)
    folder = os.path.dirname(path) or "."
    candidates = sorted(glob.glob(os.path.join(glob.escape(folder), BESIDE)))
    candidates = [name for name in candidates if not _same_file(name, path)]
    fitting, rejected = [], []
    for name in candidates:
        try:
            reasons = mismatches(open_draft(name).config, target)
        except CudflashError as err:
            reasons = [str(err)]
        if reasons:
            rejected.append((name, "; ".join(reasons)))
        else:
            fitting.append(name)
    if len(fitting) > 1:
        raise UsageError(
            f"{path}: {len(fitting)} drafts beside it fit ({', '.join(fitting)}), expected one; "
            "name one with --draft, or pass --draft none"
        )
    return FoundDraft(
        path=fitting[0] if fitting else None,
        explanation=_explain(path, target, fitting, rejected, len(candidates)),
        rejected=tuple(rejected),
    )


def _explain(path, target, fitting, rejected, n_candidates) -> str:
    if not n_candidates:
        return f"no {BESIDE} beside {path}, so no draft is used"
    others = "; ".join(f"not {os.path.basename(name)}: {why}" for name, why in rejected)
    others = f" ({others})" if others else ""
    if not fitting:
        return f"none of {n_candidates} {BESIDE} beside {path} fits{others}, so no draft is used"
    config = open_draft(fitting[0]).config
    return (
        f"draft {fitting[0]} found beside the model and used: it states hidden size "
        f"{config.hidden_dim}, a vocabulary of {config.vocab_size or target.vocab_size} and taps "
        f"{list(config.taps)}, which fit the target's {target.n_layers} layers{others}"
    )


def _same_file(one: str, other: str) -> bool:
    try:
        return os.path.samefile(one, other)
    except OSError:
        return False


def draft_digest(draft: Draft) -> str:
    """Return the SHA-256 of a draft as 64 hex digits.

    Returns
    -------
    str
        Of the file; for a directory, of the lines ``NAME SHA256`` of the files that were read, in
        the order of ``draft.files``.
    """
    if len(draft.files) == 1:
        return file_digest(draft.files[0])
    lines = (f"{os.path.basename(name)} {file_digest(name)}\n" for name in draft.files)
    return hashlib.sha256("".join(lines).encode("utf-8")).hexdigest()
