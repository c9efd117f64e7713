"""Fields of recorded events: what each may hold, checked while it is read.

Owns the checks of ``cudflash-events/1``. Must not know lines or files. Invariant: an event that was
read can be counted and shown without a further check; counts of a round agree with one another.
"""

import math

from cudflash import events
from cudflash.errors import CudflashError
from cudflash.model.draft_context import HeldRows
from cudflash.result import Result, TokenLogprob, Usage
from cudflash.spec.acceptance import BONUS, CORRECTED, ENDS, PLAIN, STOPPED, Trial
from cudflash.spec.diagnosis import Finding
from cudflash.spec.economy import EconomyEvent
from cudflash.spec.gate import CLOSED, DISABLED, OFF, OPEN, GateEvent, GateStatus
from cudflash.spec.guard import DrafterFault
from cudflash.spec.stats import RoundRecord

_LARGEST = 1 << 53  # what every reader of JSON keeps exactly
SKIPPED = ("", "gate", "off", "budget", "fault", "empty", "retry", "economy", "measure")


class Wrong(Exception):
    """A field that is missing or holds something else; the text goes after "has"."""


class _Unlike(Exception):
    """A value that is not what its check wants; the text names what is wanted."""


def read_event(kind, value):
    """Return an event from the object of a line.

    Parameters
    ----------
    kind : type
        One of ``cudflash.events``.
    value : dict

    Returns
    -------
    (event, list of str)
        The list tells what a header lacks.

    Raises
    ------
    Wrong
    """
    if kind is events.Started:
        facts, notes = read_facts(value.get("facts"))
        return events.Started(facts), notes
    return _READ[kind](value), []


# -- checks of one value: each returns it as the event holds it ------------------------------------


def _count(value):
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < _LARGEST:
        raise _Unlike("a whole number of at least 0")
    return value


def _number(value):
    whole_or_real = isinstance(value, int | float) and not isinstance(value, bool)
    if not whole_or_real or not 0 <= value < _LARGEST or not math.isfinite(value):
        raise _Unlike("a number of at least 0")
    return float(value)


def _real(value):
    whole_or_real = isinstance(value, int | float) and not isinstance(value, bool)
    if not whole_or_real or not -_LARGEST < value < _LARGEST:
        raise _Unlike("a number")
    return float(value)


def _text(value):
    if not isinstance(value, str):
        raise _Unlike("a text")
    return value


def _object(value):
    if not isinstance(value, dict):
        raise _Unlike("an object")
    return value


def _one_of(*values):
    def check(value):
        if not isinstance(value, str) or value not in values:
            raise _Unlike(f"one of {', '.join(v or repr(v) for v in values)}")
        return value

    return check


def _optional(check):
    return lambda value: None if value is None else check(value)


def _many(check):
    def checked(value):
        if not isinstance(value, list):
            raise _Unlike("a list")
        return tuple(check(item) for item in value)

    return checked


def _stopped_by(value):
    return value if value is None or isinstance(value, str) else _count(value)


_STATE = _one_of(OPEN, CLOSED, DISABLED, OFF)
_ABSENT = object()


def _take(value, fields, what=""):
    """Checked fields of an object, by name; an optional one may be missing."""
    if not isinstance(value, dict):
        raise Wrong(f"{_shown(value)} as {what}, expected an object")
    taken = {}
    for name, check in fields.items():
        path = f"{what}.{name}" if what else name
        found = value.get(name, _ABSENT)
        try:
            taken[name] = check(None if found is _ABSENT else found)
        except (_Unlike, RecursionError) as err:
            if found is _ABSENT:
                raise Wrong(f"no field {path}, expected {err}") from None
            raise Wrong(f"{_shown(found)} as {path}, expected {err}") from None
    return taken


def _shown(value):
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."


# -- events -----------------------------------------------------------------------------------------

_HELD = {"length": _count, "rows": _count, "n_bytes": _count, "window_start": _count}
_GATE_STATUS = {
    "state": _STATE, "accepted": _count, "proposals": _count, "rounds": _count,
    "warmup_left": _count, "committed": _count, "resume_at": _optional(_count),
}  # fmt: skip
_GATE_EVENT = {
    "kind": _one_of("closed", "reopened", "disabled"), "round": _count, "committed": _count,
    "accepted": _count, "proposals": _count, "resume_at": _optional(_count), "reason": _text,
}  # fmt: skip
_ECONOMY_EVENT = {
    "kind": _one_of("paused", "resumed", "length"), "round": _count, "committed": _count,
    "length": _count, "speedup": _optional(_real), "resume_at": _optional(_count), "reason": _text,
}  # fmt: skip
_TRIAL = {
    "token": _count, "p": _real, "q": _real, "uniform": _real,
    "accepted": lambda value: bool(value),
}  # fmt: skip
_RECORD = {
    "index": _count, "n_past": _count, "anchor": _count, "drafted": _many(_count),
    "accepted": _count, "tested": _count, "decided": _many(_count), "emitted": _count,
    "end": _one_of(*ENDS), "gate": _STATE, "skipped": _one_of(*SKIPPED),
    "trials": _many(lambda value: Trial(**_take(value, _TRIAL, "trial"))),
    "draft_ms": _number, "verify_ms": _number, "decide_ms": _number,
}  # fmt: skip
_USAGE = {"prompt_tokens": _count, "completion_tokens": _count, "cached_tokens": _count}


def _held(value):
    return None if value is None else HeldRows(**_take(value, _HELD, "context"))


def _prefix(value):
    return events.PrefixReused(**_take(value, {
        "cached_tokens": _count, "prompt_tokens": _count, "first_difference": _optional(_count),
        "reason": _text,
    }))  # fmt: skip


def _prompt(value):
    taken = _take(value, {"done": _count, "total": _count})
    return events.PromptProgress(**taken, context=_held(value.get("context")))


def _token(value):
    taken = _take(value, {"index": _count, "token": _count, "text": _text})
    return events.TokenEvent(**taken, logprob=_logprob(value.get("logprob")))


def _logprob(value):
    if value is None:
        return None
    pair = _many(lambda item: item)
    fields = {"token": _count, "logprob": _real, "top": _many(pair)}
    taken = _take(value, fields, "logprob")
    try:
        top = tuple((_count(token), _real(p)) for token, p in taken["top"])
    except (_Unlike, ValueError, TypeError):
        raise Wrong("a wrong field logprob.top, expected pairs of token and logprob") from None
    return TokenLogprob(taken["token"], taken["logprob"], top)


def _round(value):
    record = RoundRecord(**_take(value.get("record"), _RECORD, "record"))
    agree = (
        record.accepted <= record.tested <= len(record.drafted)
        and 1 <= record.emitted <= len(record.decided)
        and record.tested == record.accepted + (record.end == CORRECTED)
        and len(record.decided) == record.accepted + (record.end in (PLAIN, BONUS, CORRECTED))
        and (record.end == PLAIN) == (not record.drafted)
        and (record.end != BONUS or record.accepted == len(record.drafted))
        and (record.end != STOPPED or record.accepted > 0)
    )
    if not agree:
        raise Wrong("counts in its record that do not agree with one another")
    gate = value.get("gate")
    status = None if gate is None else GateStatus(**_take(gate, _GATE_STATUS, "gate"))
    return events.RoundFinished(record, status, _held(value.get("context")))


def _gate(value):
    return events.GateChanged(GateEvent(**_take(value, _GATE_EVENT)))


def _economy(value):
    return events.EconomyChanged(EconomyEvent(**_take(value, _ECONOMY_EVENT)))


def _failed(value):
    fields = {"step": _text, "n_past": _count, "kind": _text, "reason": _text}
    return events.DrafterFailed(DrafterFault(**_take(value, fields)))


def _diagnosed(value):
    fields = {"name": _text, "sentence": _text, "numbers": _object}
    return events.Diagnosed(Finding(**_take(value, fields)))


def _finished(value):
    fields = {"text": _text, "tokens": _many(_count), "finish_reason": _text,
              "stopped_by": _stopped_by, "stats": _object}  # fmt: skip
    taken = _take(value.get("result"), fields, "result")
    usage = Usage(**_take(value["result"].get("usage"), _USAGE, "result.usage"))
    result = Result(**taken, logprobs=(), usage=usage, make_receipt=_no_receipt)
    return events.Finished(result, _take(value, {"text": _text})["text"])


def _no_receipt():
    raise CudflashError("a recording of events holds no receipt; use --receipt when it is made")


_READ = {
    events.PrefixReused: _prefix,
    events.PromptProgress: _prompt,
    events.TokenEvent: _token,
    events.RoundFinished: _round,
    events.GateChanged: _gate,
    events.EconomyChanged: _economy,
    events.DrafterFailed: _failed,
    events.Diagnosed: _diagnosed,
    events.Finished: _finished,
}


# -- facts of the header: what is missing is None, and told ----------------------------------------

_SOURCE_TEXT = _optional(_text)
_GATE_FACTS = {
    "window_rounds": _count, "warmup_rounds": _count, "min_proposals": _count, "floor": _number,
    "first_pause": _count, "longest_pause": _count,
}  # fmt: skip
_GEOMETRY_FACTS = {
    "layers": _count, "full_layers": _count, "sink": _count, "sink_source": _SOURCE_TEXT,
    "window": _optional(_count), "window_source": _SOURCE_TEXT, "row_limit": _count,
    "byte_limit": _optional(_count),
}  # fmt: skip
_DRAFTER_FACTS = {
    "kind": _text, "mode": _text, "verify_length": _count, "accept": _text, "rule": _text,
    "block_size": _optional(_count), "taps": lambda value: list(_many(_count)(value)),
    "gate": _GATE_FACTS,
    "file": _optional(_text), "geometry": (_GEOMETRY_FACTS,),
}  # fmt: skip
_FACTS = {
    "version": _text,
    "target": {"file": _text, "arch": _text, "name": _optional(_text), "n_layers": _count},
    "device": {"kind": _text, "name": _text},
    "threads": _count, "n_ctx": _count, "kv_type": _text, "activations": _text,
    "prompt_tokens": _count, "max_tokens": _count, "plain_step_ms": _optional(_number),
    "drafter": (_DRAFTER_FACTS,), "reason": _text,
}  # fmt: skip


def read_facts(value):
    """Return (facts, notes): every key of ``answer_facts``, None where a header lacks it."""
    lacks = []
    facts = _facts(value if isinstance(value, dict) else {}, _FACTS, "", lacks)
    if not lacks:
        return facts, []
    some = ", ".join(lacks[:4]) + (f" and {len(lacks) - 4} more" if len(lacks) > 4 else "")
    return facts, [f"(started) lacks a usable {some}; shown as unknown"]


def no_facts():
    """Return the facts of an answer whose header is missing: every key, nothing known."""
    return read_facts(None)[0]


def _facts(value, fields, path, lacks):
    """Objects as dicts are expected, those in a tuple may be null."""
    facts = {}
    for name, check in fields.items():
        at = f"{path}.{name}" if path else name
        found = value.get(name, _ABSENT)
        inner = check[0] if isinstance(check, tuple) else check
        if isinstance(inner, dict):
            if isinstance(check, tuple) and found in (None, _ABSENT):
                facts[name] = None
                lacks += [at] if found is _ABSENT else []
            elif isinstance(found, dict):
                facts[name] = _facts(found, inner, at, lacks)
            else:
                lacks.append(at)
                absent = isinstance(check, tuple)
                facts[name] = None if absent else _facts({}, inner, at, [])
            continue
        try:
            facts[name] = check(None if found is _ABSENT else found)
            lacks += [at] if found is _ABSENT else []
        except (_Unlike, Wrong):
            facts[name] = None
            lacks.append(at)
    return facts
