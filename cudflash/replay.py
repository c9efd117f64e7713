"""Events from elsewhere: a recording, one that is still written, a receipt.

Owns how a file is told apart and followed, and what a receipt has to say as events. Must not know
how events are shown. Invariant: a file is only read, so any number of readers may follow one.
"""

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass

from cudflash.errors import FormatError, UsageError
from cudflash.events import (
    Diagnosed,
    DrafterFailed,
    EconomyChanged,
    GateChanged,
    RoundFinished,
    Started,
    TokenEvent,
)
from cudflash.record_fields import no_facts
from cudflash.recording import SCHEMA, Reader, Recorded, Trouble
from cudflash.result import RECEIPT_SCHEMA
from cudflash.spec.acceptance import CORRECTED, STOPPED, Trial
from cudflash.spec.diagnosis import Finding
from cudflash.spec.economy import EconomyEvent
from cudflash.spec.gate import AcceptanceGate, GateEvent, constants
from cudflash.spec.guard import DrafterFault
from cudflash.spec.stats import RoundRecord

CHUNK = 1 << 16
POLL_S = 0.1
_UNKNOWN_TOKEN = -1  # decided, but after the end of the answer: receipts keep what was emitted


@dataclass
class Source:
    """Where bytes come from.

    ``read`` returns the next bytes, b"" where there are none at the moment.
    """

    name: str
    read: Callable[[], bytes]
    grows: bool  # more may come after b""
    size: Callable[[], int | None] = lambda: None  # now, to see that a file was begun anew
    restart: Callable[[], None] = lambda: None


def open_source(path, follow, stdin=None):
    """Open a recording or a receipt.

    Parameters
    ----------
    path : str
        "-" for ``stdin``.
    follow : bool
        Wait for more at the end.
    stdin : binary file, optional

    Raises
    ------
    UsageError
        If the file cannot be read.
    """
    if path == "-":
        if stdin is None:
            raise UsageError("standard input is closed, expected a recording; give a file")
        return Source("standard input", lambda: os.read(stdin.fileno(), CHUNK), False)
    try:
        file = open(path, "rb", buffering=0)
    except (OSError, ValueError) as err:
        reason = getattr(err, "strerror", None) or err
        raise UsageError(f"{path}: cannot be read ({reason}); check the path") from None
    return Source(
        str(path), lambda: file.read(CHUNK), follow, lambda: os.fstat(file.fileno()).st_size,
        lambda: file.seek(0),
    )  # fmt: skip


def entries(source, wait=time.sleep, poll=POLL_S, idle=None):
    """Yield every ``Recorded`` and ``Trouble`` of a source, in order, as they come.

    Parameters
    ----------
    source : Source
    wait : callable
        Takes seconds to wait for more.
    poll : float
    idle : callable, optional
        Called at each wait.

    Raises
    ------
    FormatError
        For a receipt that does not follow its schema.
    """
    reader, began, taken = Reader(), b"", 0
    looks_like_receipt = None
    while True:
        data = source.read()
        taken += len(data)
        if not data:
            if not source.grows or reader.closed:
                break
            if idle is not None:
                idle()
            size = source.size()
            if size is not None and size < taken:
                yield Trouble(0, "the recording was begun anew while it was followed")
                source.restart()
                reader, taken, began, looks_like_receipt = Reader(), 0, b"", None
                continue
            wait(poll)
            continue
        if looks_like_receipt is not False:
            began += data
            looks_like_receipt = _is_receipt(began)
            if looks_like_receipt is not False:
                continue  # a receipt is read as a whole
            data, began = began, b""
        yield from reader.feed(data)
    if began.strip() and (receipt := _whole(began)) is not None:
        yield from receipt_entries(check(receipt, source.name))
        return
    yield from reader.feed(began)
    yield from reader.finish()


def check(receipt, name):
    """Return a receipt that follows its schema.

    Raises
    ------
    FormatError
        Naming the file.
    """
    from cudflash.receipt import validate_receipt

    try:
        return validate_receipt(receipt)
    except FormatError as err:
        raise FormatError(f"{name}: {err}; or record events with --events") from err


def _is_receipt(data):
    """False for lines of events; True or None where more must be read to tell."""
    head = data.lstrip()
    if not head:
        return None
    if not head.startswith(b"{"):
        return False
    first, newline, _ = head.partition(b"\n")
    if not newline:
        return None if len(first) < CHUNK * 64 else False
    try:
        value = json.loads(first)
    except (ValueError, RecursionError):
        return True if first.strip() == b"{" else False
    return isinstance(value, dict) and "event" not in value


def _whole(data):
    """The object that a file consists of, None where it is none or one of ours."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) and "event" not in value else None


# -- receipts -------------------------------------------------------------------------------------


def receipt_entries(receipt):
    """Yield what a receipt tells as ``Recorded`` events without times.

    Parameters
    ----------
    receipt : dict
        Checked.
    """
    part = receipt["speculative"]
    trace = part.get("trace") or []
    yield Recorded(None, Started(receipt_facts(receipt)))
    if not trace:
        yield Trouble(0, f"the receipt has no rounds: {part['reason']}")
        return
    gate = part["gate"] or {}
    replayed = _replay_gate(gate)
    events = [GateChanged(GateEvent(**event)) for event in gate.get("events", ())]
    economy = part.get("economy") or {}
    events += [EconomyChanged(EconomyEvent(**event)) for event in economy.get("events", ())]
    events.sort(key=lambda changed: changed.event.round)
    prompt = trace[0]["n_past"]
    yield Recorded(None, TokenEvent(0, trace[0]["anchor"], "", None))
    for record in map(_record, trace):
        committed = record.n_past + record.emitted - prompt
        for i, token in enumerate(record.decided[: record.emitted]):
            yield Recorded(None, TokenEvent(committed - record.emitted + 1 + i, token, "", None))
        status = None
        if replayed is not None:
            replayed.allows(record.index, committed - record.emitted)
            if record.index + 1 < len(trace):  # the last one may have been cut: the gate skips it
                replayed.record(record.index, len(record.drafted), record.accepted, committed)
            status = replayed.status(committed)
        yield Recorded(None, RoundFinished(record, status))
        while events and events[0].event.round <= record.index:
            yield Recorded(None, events.pop(0))
    yield from (Recorded(None, event) for event in events)
    if part["fault"] is not None:
        yield Recorded(None, DrafterFailed(DrafterFault(**part["fault"])))
    for finding in part["findings"]:
        yield Recorded(None, Diagnosed(Finding(**finding)))


def receipt_facts(receipt):
    """Return the facts of ``Started`` that a receipt knows; the others are None.

    ``textless`` tells that tokens have ids only.
    """
    facts = no_facts()
    part, draft, device = receipt["speculative"], receipt["draft"], receipt["device"]
    trace = part.get("trace") or []
    facts |= {
        "version": receipt["versions"].get("cudflash"),
        "target": {
            "file": os.path.basename(receipt["target"]["path"]),
            "arch": receipt["target"]["arch"],
            "name": receipt["target"]["name"],
            "n_layers": None,
        },
        "device": {"kind": device.get("kind"), "name": device.get("name")},
        "prompt_tokens": trace[0]["n_past"] if trace else None,
        "reason": part["reason"],
        "textless": True,
    }
    for name in ("threads", "n_ctx", "kv_type", "activations", "max_tokens"):
        facts[name] = receipt[name]
    if "drafter" not in part:
        return facts
    gate = part["gate"] or {}
    facts["drafter"] = {
        "kind": part["drafter"],
        "mode": part["mode"],
        "verify_length": part["verify_length"],
        "accept": part["accept"],
        "rule": part["rule"],
        "block_size": draft and draft["block_size"],
        "taps": None if draft is None else draft["taps"]["value"],
        "gate": {name: gate.get(name) for name in constants()},
        "file": draft and os.path.basename(draft["path"]),
        "geometry": draft and _geometry(draft, receipt["n_ctx"]),
    }
    return facts


def _geometry(draft, n_ctx):
    window, sink = draft["window"]["value"], draft["sink"]["value"] or 0
    full = sum(layer is None for layer in draft["layer_windows"])
    return {
        "layers": draft["n_layers"],
        "full_layers": full,
        "sink": sink if window is not None else 0,
        "sink_source": draft["sink"]["source"],
        "window": window,
        "window_source": draft["window"]["source"],
        "row_limit": max(0 if window is None else sink + window, n_ctx if full else 0),
        "byte_limit": None,
    }


def _replay_gate(gate):
    """A gate that decides as the one of the receipt, None where its numbers are others."""
    same = all(gate.get(name) == value for name, value in constants().items())
    return AcceptanceGate(gate["mode"]) if gate and same else None


def _record(entry):
    """The RoundRecord of an entry of a trace; its times are unknown and 0."""
    drafted, emitted = tuple(entry["drafted"]), tuple(entry["emitted"])
    accepted, end = entry["accepted"], entry["end"]
    decided = emitted + drafted[len(emitted) : accepted]
    if end != STOPPED and len(decided) == accepted:
        decided += (_UNKNOWN_TOKEN,)
    trials = tuple(
        Trial(int(token), p, q, u, i < accepted)
        for i, (token, p, q, u) in enumerate(entry.get("trials", ()))
    )
    return RoundRecord(
        index=entry["round"], n_past=entry["n_past"], anchor=entry["anchor"], drafted=drafted,
        accepted=accepted, tested=accepted + (end == CORRECTED), decided=decided,
        emitted=len(emitted), end=end, gate=entry["gate"], skipped=entry["skipped"],
        trials=trials, draft_ms=0.0, verify_ms=0.0, decide_ms=0.0,
    )  # fmt: skip


def expected():
    """What a monitor can show, for sentences."""
    return f"a recording ({SCHEMA}) or a receipt ({RECEIPT_SCHEMA})"
