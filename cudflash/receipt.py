"""Receipts: how an answer was made, as one versioned JSON object that can be checked.

Owns the schema and its checks. Must not know engines. Invariant: equal answers made equally have
equal receipts; wall times are therefore no part of one (they are in ``Result.stats``).

``engine.receipt`` gives the top level, ``speculative_part`` the object under "speculative". A draft
is described by what is in effect, each setting that its file should state with its source. Keys are
added in later versions of the schema, never renamed; an unknown key is an error, because nothing
that changes numbers may go unread.
"""

import hashlib
import json
from pathlib import Path

from cudflash import defaults
from cudflash.errors import CudflashError, FormatError
from cudflash.result import RECEIPT_SCHEMA
from cudflash.spec.acceptance import ENDS, RULES
from cudflash.spec.economy import DRAFTING, PAUSED
from cudflash.spec.gate import CLOSED, DISABLED, MODES, OFF, OPEN
from cudflash.spec.stats import identities, why_nothing

SOURCES = ("file", "override", "absent")
_TIMES = ("_ms", "_speedup")


# -- making ---------------------------------------------------------------------------------------


class SpeculativePart:
    """Makes what a receipt says under "speculative" when it is asked for; picklable.

    A trace is thousands of objects, and most answers are never asked for theirs.

    Parameters
    ----------
    part : dict
        All but the trace.
    stats : SpecStats or None
    """

    def __init__(self, part, stats):
        self._part, self._stats = part, stats

    def __call__(self):
        trace = [] if self._stats is None else self._stats.trace()
        return {"speculative": {**self._part, "trace": trace}}


def speculative_part(mode, accept, state, drafter, verify_length, findings=()):
    """Return the object under "speculative" for an answer that had a drafter, without its trace.

    Parameters
    ----------
    mode : {"auto", "on", "off"}
    accept : {"match", "ratio"}
        As asked for.
    state : RoundState or None
        None when the answer ended before its first round.
    drafter : GuardedDrafter
    verify_length : int
    findings : iterable of Finding

    Returns
    -------
    dict
    """
    part = {
        "mode": mode,
        "used": False,
        "reason": "it had no round after the prompt",
        "drafter": drafter.name,
        "verify_length": verify_length,
        "accept": accept,
        "rule": accept,
        "gate": None,
        "economy": None,
        "fault": None if drafter.fault is None else dict(vars(drafter.fault)),
        "findings": [finding.to_dict() for finding in findings],
        "counts": None,
    }
    if state is None:
        return part
    counts = state.stats.to_dict()
    part["rule"] = state.rule
    part["gate"] = state.gate.to_dict()
    if state.economy is not None:
        part["economy"] = state.economy.to_dict()
    part["counts"] = {key: v for key, v in counts.items() if not key.endswith(_TIMES)}
    part["used"] = state.stats.drafted > 0
    part["reason"] = why_nothing(state.stats, drafter.fault)
    return part


def ordered(receipt):
    """Return a copy with every known key in the schema's order."""
    return _sorted(_RECEIPT, receipt)


def to_json(receipt):
    """Return the receipt as JSON text, keys in the schema's order, one line."""
    return json.dumps(ordered(receipt), ensure_ascii=False, allow_nan=False)


def receipt_digest(receipt):
    """SHA-256 of ``to_json``: equal receipts, equal digests."""
    return hashlib.sha256(to_json(receipt).encode()).hexdigest()


def write_receipt(path, receipt):
    """Check a receipt and write it as indented JSON."""
    validate_receipt(receipt)
    text = json.dumps(ordered(receipt), ensure_ascii=False, allow_nan=False, indent=1)
    Path(path).write_text(text + "\n", encoding="utf-8")


def read_receipt(path):
    """Return the checked receipt in a file.

    Raises
    ------
    FormatError
        Naming the file and the first key that is wrong.
    """
    try:
        receipt = json.loads(Path(path).read_text(encoding="utf-8"))
        return validate_receipt(receipt)
    except (ValueError, FormatError) as err:
        raise FormatError(f"{path}: {err}") from err


# -- checking -------------------------------------------------------------------------------------


def validate_receipt(receipt):
    """Return the receipt, if it follows the schema and agrees with itself.

    Beyond types: the trace is continuous (each anchor is the last token of the round before, each
    ``n_past`` counts the rows committed so far), its sums are the counts, and the counts keep the
    identities of ``cudflash.spec.stats``.

    Raises
    ------
    FormatError
        Naming the first key that is wrong, what it holds and what was expected.
    """
    _check(_RECEIPT, receipt, "receipt")
    part = receipt["speculative"]
    if set(part) != set(_NO_DRAFTER):
        _check(_SPECULATIVE, part, "receipt.speculative")
        _check_trace(part["trace"])
        _check_counts(part["counts"], part["trace"])
    return receipt


def _check_trace(trace):
    path = "receipt.speculative.trace"
    for index, record in enumerate(trace):
        at = f"{path}[{index}]"
        if record["round"] != index:
            raise _wrong(f"{at}.round", record["round"], str(index))
        if not record["emitted"]:
            raise _wrong(f"{at}.emitted", record["emitted"], "at least one token")
        accepted = record["accepted"]
        if not 0 <= accepted <= len(record["drafted"]):
            raise _wrong(f"{at}.accepted", accepted, f"0 to {len(record['drafted'])}")
        same = min(accepted, len(record["emitted"]))
        if record["emitted"][:same] != record["drafted"][:same]:
            raise _wrong(f"{at}.emitted", record["emitted"], "the accepted drafts first")
        if index:
            before = trace[index - 1]
            frontier = before["n_past"] + len(before["emitted"])
            if record["n_past"] != frontier:
                raise _wrong(f"{at}.n_past", record["n_past"], str(frontier))
            if record["anchor"] != before["emitted"][-1]:
                raise _wrong(f"{at}.anchor", record["anchor"], str(before["emitted"][-1]))


def _check_counts(counts, trace):
    path = "receipt.speculative.counts"
    if counts is None:
        if trace:
            raise _wrong(path, counts, "the counts of the trace")
        return
    sums = {
        "rounds": len(trace),
        "drafted": sum(len(r["drafted"]) for r in trace),
        "accepted": sum(r["accepted"] for r in trace),
        "emitted": sum(len(r["emitted"]) for r in trace),
    }
    for name, expected in sums.items():
        if counts[name] != expected:
            raise _wrong(f"{path}.{name}", counts[name], f"{expected}, the sum over the trace")
    try:
        identities(counts)
    except CudflashError as err:
        raise FormatError(f"{path}: {err}") from err


def _wrong(path, found, expected):
    text = repr(found)
    text = text if len(text) <= 80 else text[:77] + "..."
    return FormatError(f"{path} is {text}, expected {expected}")


# -- the schema: callables check a value, dicts describe an object --------------------------------


class _Object:
    """Fields in order; ``optional`` ones may be absent."""

    def __init__(self, fields, optional=()):
        self.fields, self.optional = fields, frozenset(optional)


class _Is:
    """A value of one of some types, or one of some values."""

    def __init__(self, what, test):
        self.what, self.test = what, test


class _List:
    def __init__(self, item):
        self.item = item


class _Map:
    def __init__(self, item):
        self.item = item


class _OrNone:
    def __init__(self, inner):
        self.inner = inner


def _check(schema, value, path):
    if isinstance(schema, _OrNone):
        if value is not None:
            _check(schema.inner, value, path)
    elif isinstance(schema, _Is):
        if not schema.test(value):
            raise _wrong(path, value, schema.what)
    elif isinstance(schema, _List):
        if not isinstance(value, (list, tuple)):
            raise _wrong(path, value, "a list")
        for index, item in enumerate(value):
            _check(schema.item, item, f"{path}[{index}]")
    elif not isinstance(value, dict):
        raise _wrong(path, value, "an object")
    elif isinstance(schema, _Map):
        for key, item in value.items():
            _check(schema.item, item, f"{path}.{key}")
    else:
        _check_object(schema, value, path)


def _check_object(schema, value, path):
    for key in value:
        if key not in schema.fields:
            known = ", ".join(schema.fields)
            raise FormatError(f"{path}.{key} is unknown, expected the keys {known}")
    for key, inner in schema.fields.items():
        if key in value:
            _check(inner, value[key], f"{path}.{key}")
        elif key not in schema.optional:
            raise FormatError(f"{path}.{key} is missing")


def _sorted(schema, value):
    if isinstance(schema, _OrNone):
        return None if value is None else _sorted(schema.inner, value)
    if isinstance(schema, _List) and isinstance(value, (list, tuple)):
        return [_sorted(schema.item, item) for item in value]
    if isinstance(schema, _Map) and isinstance(value, dict):
        return {key: _sorted(schema.item, value[key]) for key in sorted(value)}
    if isinstance(schema, _Object) and isinstance(value, dict):
        known = {k: _sorted(inner, value[k]) for k, inner in schema.fields.items() if k in value}
        return known | {k: value[k] for k in sorted(value) if k not in known}
    return value


def _plain_int(value):
    return isinstance(value, int) and not isinstance(value, bool)


def _one_of(*values):
    return _Is(f"one of {', '.join(values)}", lambda v: isinstance(v, str) and v in values)


_ANY = _Is("anything", lambda v: True)
_TEXT = _Is("a text", lambda v: isinstance(v, str))
_BOOL = _Is("true or false", lambda v: isinstance(v, bool))
_COUNT = _Is("a whole number of at least 0", lambda v: _plain_int(v) and v >= 0)
_NUMBER = _Is("a number", lambda v: _plain_int(v) or isinstance(v, float))
_SHA256 = _Is(
    "64 hexadecimal digits",
    lambda v: isinstance(v, str) and len(v) == 64 and not set(v) - set("0123456789abcdef"),
)


def _sourced(value):
    """A setting of the draft: in effect, where from, and what the file says."""
    return _Object({"value": value, "source": _one_of(*SOURCES), "file_value": value})


_ROPE = _Object(
    {
        "style": _one_of("interleaved", "split_half"),
        "n_dims": _COUNT,
        "freq_base": _NUMBER,
        "freq_scale": _NUMBER,
        "yarn": _OrNone(_Map(_ANY)),
        "attn_factor": _NUMBER,
    }
)
_DRAFT = _Object(
    {
        "path": _TEXT,
        "sha256": _SHA256,
        "arch": _TEXT,
        "name": _TEXT,
        "kind": _one_of("dflash", "dflash2", "mtp"),
        "n_layers": _COUNT,
        "block_size": _COUNT,
        "mask_token_id": _OrNone(_COUNT),
        "taps": _sourced(_OrNone(_List(_COUNT))),
        "window": _sourced(_OrNone(_COUNT)),
        "sink": _sourced(_OrNone(_COUNT)),
        "layer_windows": _List(_OrNone(_COUNT)),
        "layer_causal": _List(_BOOL),
        "rope": _ROPE,
        "full_block": _BOOL,
        "activations": _one_of(*defaults.ACTIVATION_TYPES),
    },
    optional=("activations",),  # receipts made before it had its own
)
_GATE = _Object(
    {
        "mode": _one_of(*MODES),
        "window_rounds": _COUNT,
        "warmup_rounds": _COUNT,
        "min_proposals": _COUNT,
        "floor": _NUMBER,
        "first_pause": _COUNT,
        "longest_pause": _COUNT,
        "state": _one_of(OPEN, CLOSED, DISABLED, OFF),
        "closings": _COUNT,
        "events": _List(
            _Object(
                {
                    "kind": _one_of("closed", "reopened", "disabled"),
                    "round": _COUNT,
                    "committed": _COUNT,
                    "accepted": _COUNT,
                    "proposals": _COUNT,
                    "resume_at": _OrNone(_COUNT),
                    "reason": _TEXT,
                }
            )
        ),
    }
)
_ECONOMY = _Object(
    {
        "allowance": _NUMBER,
        "refill": _NUMBER,
        "min_rounds": _COUNT,
        "first_pause": _COUNT,
        "longest_pause": _COUNT,
        "state": _one_of(DRAFTING, PAUSED),
        "length": _COUNT,
        "pauses": _COUNT,
        "measured": _List(
            _Object({"length": _COUNT, "cost": _NUMBER, "speedup": _OrNone(_NUMBER)})
        ),
        "events": _List(
            _Object(
                {
                    "kind": _one_of("paused", "resumed", "length"),
                    "round": _COUNT,
                    "committed": _COUNT,
                    "length": _COUNT,
                    "speedup": _OrNone(_NUMBER),
                    "resume_at": _OrNone(_COUNT),
                    "reason": _TEXT,
                }
            )
        ),
    }
)
_COUNTS = _Object(
    {
        "rounds": _COUNT,
        "draft_rounds": _COUNT,
        "plain_rounds": _COUNT,
        "drafted": _COUNT,
        "tested": _COUNT,
        "accepted": _COUNT,
        "accepted_emitted": _COUNT,
        "emitted": _COUNT,
        "bonus": _COUNT,
        "corrected": _COUNT,
        "stopped": _COUNT,
        "cut": _COUNT,
        "skipped": _Map(_COUNT),
        "proposed_at": _List(_COUNT),
        "tested_at": _List(_COUNT),
        "accepted_at": _List(_COUNT),
        "acceptance_rate": _OrNone(_NUMBER),
        "acceptance_length": _OrNone(_NUMBER),
        "tokens_per_pass": _OrNone(_NUMBER),
    }
)
_ROUND = _Object(
    {
        "round": _COUNT,
        "n_past": _COUNT,
        "anchor": _COUNT,
        "drafted": _List(_COUNT),
        "accepted": _COUNT,
        "emitted": _List(_COUNT),
        "end": _one_of(*ENDS),
        "gate": _one_of(OPEN, CLOSED, DISABLED, OFF),
        "skipped": _one_of(
            "", "gate", "off", "economy", "measure", "budget", "fault", "empty", "retry"
        ),
        "confidence": _List(_NUMBER),  # of each draft, where the draft tells one
        "trials": _List(_List(_NUMBER)),  # token, p, q, uniform
    },
    optional=("confidence", "trials"),
)
_SPECULATIVE = _Object(
    {
        "mode": _one_of(*MODES),
        "used": _BOOL,
        "reason": _TEXT,
        "drafter": _TEXT,
        "verify_length": _COUNT,
        "accept": _one_of(*RULES),
        "rule": _one_of(*RULES),
        "gate": _OrNone(_GATE),
        "economy": _OrNone(_ECONOMY),
        "fault": _OrNone(
            _Object({"step": _TEXT, "n_past": _COUNT, "kind": _TEXT, "reason": _TEXT})
        ),
        "findings": _List(_Object({"name": _TEXT, "sentence": _TEXT, "numbers": _Map(_ANY)})),
        "counts": _OrNone(_COUNTS),
        "trace": _List(_ROUND),
    },
    optional=("economy",),  # receipts made before there was one
)
_NO_DRAFTER = ("mode", "used", "reason")  # all there is to say without a drafter

_RECEIPT = _Object(
    {
        "schema": _one_of(RECEIPT_SCHEMA),
        "versions": _Map(_TEXT),
        "target": _Object(
            {"path": _TEXT, "sha256": _SHA256, "arch": _TEXT, "name": _OrNone(_TEXT)}
        ),
        "draft": _OrNone(_DRAFT),
        "device": _Map(_ANY),
        "kernel_path": _TEXT,
        "threads": _COUNT,
        "n_ctx": _COUNT,
        "kv_type": _TEXT,
        "activations": _TEXT,
        "numerics": _TEXT,
        "sampling": _Map(_ANY),
        "seed": _COUNT,
        "max_tokens": _COUNT,
        "stop": _Object({"strings": _List(_TEXT), "ids": _List(_COUNT)}),
        "speculative": _Object(
            _SPECULATIVE.fields, [key for key in _SPECULATIVE.fields if key not in _NO_DRAFTER]
        ),
    }
)
