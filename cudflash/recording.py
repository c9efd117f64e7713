"""Recorded answers: events as lines of JSON, written while an answer runs, read by whoever watches.

Owns the schema ``cudflash-events/1`` and what a damaged recording still gives. Must not know how
events are shown. Invariant: a line is written whole or the recording ends; reading never fails: what
cannot be read becomes a ``Trouble`` with one sentence, and every other line is still read.

A recording is ASCII. Each line is one object with ``event`` (a name of ``KINDS``) and ``t``, seconds
since the recorder began. An answer begins with ``started``, which also carries ``schema`` and the
facts of ``cudflash.answer_facts``; a conversation has several. The last line is ``closed``: where it
is missing, the writer was stopped. Keys may be added within a version; unknown keys are left out,
unknown events are left out with a sentence. A receipt (log-probabilities and digests of rows, too)
is no part of it.
"""

import dataclasses
import json
import math
import time
from dataclasses import dataclass

from cudflash import events
from cudflash.errors import UsageError
from cudflash.record_fields import Wrong, read_event

SCHEMA = "cudflash-events/1"
CLOSED = "closed"
KINDS = {
    "started": events.Started,
    "prefix_reused": events.PrefixReused,
    "prompt": events.PromptProgress,
    "token": events.TokenEvent,
    "round": events.RoundFinished,
    "gate": events.GateChanged,
    "economy": events.EconomyChanged,
    "drafter_failed": events.DrafterFailed,
    "diagnosed": events.Diagnosed,
    "finished": events.Finished,
}
_NAMES = {kind: name for name, kind in KINDS.items()}
_quoted = json.encoder.encode_basestring_ascii
_encode = json.JSONEncoder(default=vars, separators=(",", ":"), allow_nan=False).encode
_RESULT = ("text", "tokens", "finish_reason", "stopped_by", "stats")
LONGEST_LINE = 1 << 24  # bytes; a longer one is no line of ours


# -- writing --------------------------------------------------------------------------------------


def to_line(event, t):
    """Return an event as one line of JSON, without its end.

    Parameters
    ----------
    event : one of ``cudflash.events``
    t : float
        Seconds.
    """
    name = _NAMES[type(event)]
    if name == "token" and event.logprob is None:
        # The most frequent line, made after every pass over the weights, when the caches hold none
        # of what the general way needs: a tenth of its time.
        return (f'{{"event":"token","t":{round(t, 6)!r},"index":{event.index},'
                f'"token":{event.token},"text":{_quoted(event.text)}}}')
    value = {"event": name, "t": round(t, 6)}
    if name == "started":
        value = {"schema": SCHEMA, **value, "facts": event.facts}
    elif name == "finished":
        result = {key: getattr(event.result, key) for key in _RESULT}
        value |= {"text": event.text, "result": result | {"usage": vars(event.result.usage)}}
    elif name in ("gate", "economy", "drafter_failed", "diagnosed"):
        value |= vars(next(iter(vars(event).values())))
    else:
        value |= vars(event)
    try:
        return _encode(value)
    except ValueError:
        return json.dumps(_finite(value), separators=(",", ":"))


def _finite(value):
    """A nest of values with numbers that JSON lacks replaced by null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return _finite(vars(value)) if dataclasses.is_dataclass(value) else value


class Recorder:
    """Writes the events of one or more answers.

    Parameters
    ----------
    write : callable
        Takes bytes, all of them, or raises OSError.
    name : str
        Of the file, for the sentence.
    close : callable, optional
    clock : callable
        Seconds.

    Attributes
    ----------
    trouble : str
        One sentence after a failed write, "" before. Nothing is written after it, and whoever
        calls ``see`` is not disturbed.
    """

    def __init__(self, write, name, close=None, clock=time.monotonic):
        self._write, self._close, self._clock = write, close, clock
        self.name, self.trouble = name, ""
        self._began, self._lines = clock(), 0

    @classmethod
    def to_file(cls, path, clock=time.monotonic):
        """Record to a file (or a named pipe), replacing what it held.

        Raises
        ------
        UsageError
            If it cannot be opened.
        """
        try:
            file = open(path, "wb", buffering=0)  # a line is there for others once it is written
        except (OSError, ValueError) as err:
            reason = getattr(err, "strerror", None) or err
            raise UsageError(
                f"{path}: events cannot be written ({reason}); choose another path"
            ) from None

        def write(data):
            while data:
                data = data[file.write(data) :]

        return cls(write, str(path), file.close, clock)

    def see(self, event):
        """Write an event; one that the schema does not know is left out."""
        if type(event) in _NAMES:
            self._line(to_line(event, self._clock() - self._began))

    def close(self):
        """Write the last line and close; idempotent."""
        write, self._write = self._write, None
        if write is None:
            return
        self._write = write
        end = {"event": CLOSED, "t": round(self._clock() - self._began, 6)}
        self._line(json.dumps(end, separators=(",", ":")))
        self._write = None
        if self._close is not None:
            try:
                self._close()
            except OSError as err:  # a disk over a network may tell only now
                self._fail(err)

    def _line(self, line):
        if self.trouble or self._write is None:
            return
        try:
            self._write(line.encode() + b"\n")
            self._lines += 1
        except OSError as err:
            self._fail(err)

    def _fail(self, err):
        self.trouble = self.trouble or (
            f"{self.name}: recording of events stopped after {self._lines} lines "
            f"({err.strerror or err}); the answer is not affected"
        )


# -- reading --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Recorded:
    """An event that was read."""

    t: float | None  # seconds since the recorder began; None where the line does not say
    event: object


@dataclass(frozen=True)
class Trouble:
    """Something that could not be read; the rest was."""

    line: int  # 1 for the first, 0 for the recording as a whole
    sentence: str


class Reader:
    """Turns bytes of a recording into ``Recorded`` and ``Trouble``, in order, as they come.

    Attributes
    ----------
    closed : bool
        The writer has said that it is done.
    events : int
        Events read so far.
    """

    def __init__(self):
        self._rest, self._skipping = b"", False
        self._line = self.events = 0
        self._seen_header = False
        self._unknown = set()
        self.closed = False

    def feed(self, data):
        """Take bytes, cut anywhere; return what they complete."""
        found = []
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._line += 1
            if self._skipping:
                self._skipping = False
                continue
            found += self._read(line)
        if len(self._rest) > LONGEST_LINE:
            self._rest = b""
            if not self._skipping:
                self._skipping = True
                found.append(self._trouble(
                    self._line + 1, f"is longer than {LONGEST_LINE} bytes, expected one event"
                ))  # fmt: skip
        return found

    def finish(self):
        """Tell how the recording ends; a last line without its end is read if it is whole."""
        found, rest = [], self._rest
        self._rest = b""
        if rest.strip() and not self._skipping:
            self._line += 1
            try:
                json.loads(rest)
            except (ValueError, RecursionError):
                found.append(Trouble(
                    self._line,
                    f"line {self._line} is cut after {len(rest)} bytes, expected a whole event; "
                    f"the {self.events} events before it were read",
                ))  # fmt: skip
            else:
                found += self._read(rest)
        if self.events and not self.closed:
            found.append(Trouble(
                0, "the recording has no end, so whoever wrote it was stopped or still writes; "
                f"{self.events} events were read",
            ))  # fmt: skip
        elif not self.events:
            found.append(Trouble(0, f"there is no event in it, expected lines of {SCHEMA}"))
        return found

    def _read(self, line):
        """Events and troubles of one whole line."""
        if not line.strip():
            return []
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            return [self._trouble(self._line, "is no JSON, expected one event; it was left out")]
        if not isinstance(value, dict) or not isinstance(value.get("event"), str):
            return [self._trouble(self._line, "names no event; it was left out")]
        name = value["event"]
        if name == CLOSED:
            self.closed = True
            return []
        found = self._check_header(name, value)
        if name not in KINDS:
            if name not in self._unknown:
                self._unknown.add(name)
                found.append(self._trouble(
                    self._line, f"has the event {_shown(name)}, which this version does not know; "
                    "it and others of that name were left out",
                ))  # fmt: skip
            return found
        try:
            event, notes = read_event(KINDS[name], value)
        except Wrong as err:
            return [*found, self._trouble(self._line, f"({name}) has {err}; it was left out")]
        found += [self._trouble(self._line, note) for note in notes]
        t = value.get("t")
        timed = isinstance(t, int | float) and not isinstance(t, bool) and 0 <= t < 1e9
        self.events += 1
        self.closed = False
        return [*found, Recorded(float(t) if timed else None, event)]

    def _check_header(self, name, value):
        if name == "started":
            self._seen_header = True
            schema = value.get("schema")
            if schema != SCHEMA:
                return [self._trouble(
                    self._line, f"has the schema {_shown(schema)}, this version reads {SCHEMA!r}; "
                    "what it understands is shown",
                )]  # fmt: skip
        elif not self._seen_header:
            self._seen_header = True
            return [self._trouble(
                self._line, "comes before any header, expected a 'started' event first; model, "
                "draft and geometry are unknown",
            )]  # fmt: skip
        return []

    def _trouble(self, line, what):
        return Trouble(line, f"line {line} {what}")


def read_recording(data):
    """Return every ``Recorded`` and ``Trouble`` of a whole recording.

    Parameters
    ----------
    data : bytes
    """
    reader = Reader()
    return [*reader.feed(data), *reader.finish()]


def _shown(value):
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
