"""Recordings: what is written can be read, what is damaged costs a sentence and nothing else."""

import errno
import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cudflash.drafters import KeepK
from cudflash.errors import CudflashError, FormatError, UsageError
from cudflash.events import Finished, RoundFinished, Started, TokenEvent
from cudflash.recording import (
    KINDS,
    LONGEST_LINE,
    SCHEMA,
    Reader,
    Recorded,
    Recorder,
    Trouble,
    read_recording,
    to_line,
)
from cudflash.replay import Source, entries, open_source, receipt_entries
from cudflash.spec.stats import identities
from cudflash.tui.screen import Screen
from cudflash.tui.state import MonitorState
from tests.helpers.engines import engine
from tests.helpers.recorded_runs import answer, events_of, facts, recording, state_of
from tests.helpers.speculation import GREEDY, SAMPLED, draft_engine
from tests.tui.test_state import ROUNDS

PROMPT = list(range(3, 60))


def lines_of(events):
    """A recording of events, a tenth of a second apart."""
    lines = [to_line(event, i / 10) for i, event in enumerate(events)]
    return ("\n".join([*lines, '{"event":"closed","t":9}']) + "\n").encode()


def troubles(data):
    """Sentences about a recording."""
    return [entry.sentence for entry in read_recording(data) if isinstance(entry, Trouble)]


def same(found, made):
    """Two events are equal, but for what a recording leaves out of a result."""
    if isinstance(made, Finished):
        return found.text == made.text and all(
            getattr(found.result, name) == getattr(made.result, name)
            for name in ("text", "tokens", "usage", "finish_reason", "stopped_by")
        ) and json.loads(json.dumps(made.result.stats)) == found.result.stats
    return found == made


@pytest.mark.parametrize("sampling, options", [
    (GREEDY, {"speculative": "on"}),
    (SAMPLED, {"accept": "ratio", "seed": 3, "speculative": "on"}),
    (GREEDY, {"logprobs": 2, "verify_length": 3, "speculative": "on"}),
    (GREEDY, {"speculative": "off"}),
    (GREEDY, {"max_tokens": 0}),
    (GREEDY, {"max_tokens": 1}),
])  # fmt: skip
def test_events_of_real_answers_come_back_equal(sampling, options):
    """Catches a field that is not written, is rounded, or comes back as another type."""
    session = draft_engine("v1-muse-swa").session()
    request = {"max_tokens": 30, "ignore_eos": True, **options}
    for prompt in (PROMPT, PROMPT[:20] + [9] * 8):  # the second one reuses a prefix
        made = list(session.generate(prompt, sampling=sampling, **request))
        found = events_of(lines_of(made))
        known = [event for event in made if type(event) in KINDS.values()]
        assert len(found) == len(known)
        assert all(same(event, m) for (_, event), m in zip(found, known))
        assert [t for t, _ in found] == sorted(t for t, _ in found)


def test_events_of_a_fault_and_of_a_finding_come_back():
    """Catches the rare events, which nobody sees missing."""
    one = engine("llama")

    class Broken(KeepK):
        def propose(self, anchor, n, context):
            if context.answer_index > 5:
                raise ValueError("broken")
            return super().propose(anchor, n, context)

    plain = one.generate(PROMPT, max_tokens=120, sampling=GREEDY, ignore_eos=True)
    request = {"max_tokens": 120, "sampling": GREEDY, "ignore_eos": True, "speculative": "on"}
    for drafter in (Broken(plain.tokens, 1), KeepK(plain.tokens, 0)):
        made = list(one.session().generate(PROMPT, drafter=drafter, **request))
        found = events_of(lines_of(made))
        known = [event for event in made if type(event) in KINDS.values()]
        assert all(same(event, m) for (_, event), m in zip(found, known))
        names = {type(event).__name__ for _, event in found}
        assert {"DrafterFailed", "Diagnosed"} & names


def test_header_states_schema_and_geometry():
    """Catches a recording that cannot say which version it is, or how its draft was conditioned."""
    header = json.loads(recording().split(b"\n", 1)[0])
    assert header["schema"] == SCHEMA and header["event"] == "started"
    drafter = header["facts"]["drafter"]
    assert drafter["geometry"]["window"] == 32 and drafter["geometry"]["sink"] == 64
    assert drafter["gate"]["floor"] == 0.25 and drafter["taps"] == [0, 1, 2, 3, 4]
    assert recording().isascii() and json.loads(recording().splitlines()[-1])["event"] == "closed"


def test_result_of_a_recording_says_that_it_has_no_receipt():
    """Catches an internal error where somebody asks a recorded result for its receipt."""
    result = events_of(recording())[-1][1].result
    with pytest.raises(CudflashError, match="holds no receipt"):
        assert result.receipt


def test_lone_surrogates_and_infinities_are_written():
    """Catches an answer that ends because a token's bytes or a number cannot be JSON."""
    event = TokenEvent(0, 1, "a\udc80b", None)
    assert read_recording(to_line(event, 0.0).encode() + b"\n")[1].event == event
    broken = list(answer(ROUNDS))[-1]
    broken.result.stats["x"] = {"a": float("nan"), "b": [float("inf"), 1.0]}
    line = json.loads(to_line(broken, 0.0))
    assert line["result"]["stats"]["x"] == {"a": None, "b": [None, 1.0]}


# -- writing ------------------------------------------------------------------------------------


def test_every_line_is_there_as_soon_as_its_event_was_seen(tmp_path):
    """Catches a buffer: somebody who follows would see nothing until the end."""
    path = tmp_path / "events"
    recorder = Recorder.to_file(path, clock=lambda: 5.0)
    for n, event in enumerate(answer(ROUNDS), 1):
        recorder.see(event)
        assert path.read_bytes().count(b"\n") == n and path.read_bytes().endswith(b"\n")
    recorder.close()
    recorder.close()
    assert not recorder.trouble and not troubles(path.read_bytes())


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EPIPE])
def test_failing_writes_give_one_sentence_and_no_exception(code):
    """Catches a full disk, or a reader that left, which ends the answer."""
    written = []

    def write(data):
        if len(written) == 3:
            raise OSError(code, "no more")
        written.append(data)

    recorder = Recorder(write, "run.jsonl")
    for event in answer(ROUNDS):
        recorder.see(event)
    recorder.close()
    assert recorder.trouble == (
        "run.jsonl: recording of events stopped after 3 lines (no more); the answer is not affected"
    )
    assert len(written) == 3


def test_path_that_cannot_be_written_is_refused_before_the_answer(tmp_path):
    """Catches a run of an hour whose recording went nowhere."""
    with pytest.raises(UsageError, match="cannot be written"):
        Recorder.to_file(tmp_path / "no" / "such")


def test_unknown_events_are_not_recorded():
    """Catches a new kind of event that breaks answers with --events."""
    written = []
    recorder = Recorder(written.append, "x")
    recorder.see(object())
    assert not written and not recorder.trouble


# -- reading what is damaged ----------------------------------------------------------------------


def test_stream_cut_at_every_byte_keeps_all_whole_lines():
    """Catches a reader that drops, doubles or invents an event where a writer was stopped."""
    data = lines_of(answer(ROUNDS[:2]))
    whole = [entry for entry in read_recording(data) if isinstance(entry, Recorded)]
    for cut in range(len(data)):
        found = read_recording(data[:cut])
        kept = [entry for entry in found if isinstance(entry, Recorded)]
        told = [entry.sentence for entry in found if isinstance(entry, Trouble)]
        assert kept == whole[: len(kept)]
        assert len(kept) >= data[:cut].count(b"\n") - (cut == len(data))
        if cut < len(data) - 1:  # without its last newline the last line is still whole
            assert told and len(told) == len(set(told)) <= 2


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.lists(st.integers(1, 400), min_size=1, max_size=40))
def test_chunks_of_any_size_give_the_same_events(seed, sizes):
    """Catches lines joined or split where reads end."""
    data, reader, at, found = lines_of(answer(ROUNDS)), Reader(), 0, []
    rng = random.Random(seed)
    while at < len(data):
        size = rng.choice(sizes)
        found += reader.feed(data[at : at + size])
        at += size
    assert [*found, *reader.finish()] == read_recording(data)


@pytest.mark.parametrize("line, sentence", [
    (b"nonsense", "line 2 is no JSON, expected one event; it was left out"),
    (b"[1]", "line 2 names no event; it was left out"),
    (b'{"event":"surprise"}', "line 2 has the event 'surprise', which this version does not know"),
    (b'{"event":"token","index":1,"token":5}', "line 2 (token) has no field text, expected a text"),
    (b'{"event":"token","index":-1,"token":5,"text":""}',
     "line 2 (token) has -1 as index, expected a whole number of at least 0"),
    (b'{"event":"round","record":null}', "line 2 (round) has None as record, expected an object"),
    (b'{"event":"prompt","done":1e999,"total":2}', "line 2 (prompt) has inf as done"),
    (b"\xff\xfe\x00", "line 2 is no JSON"),
    (b"[" * 100000, "line 2 is no JSON"),
])  # fmt: skip
def test_damaged_line_costs_itself_and_one_sentence(line, sentence):
    """Catches a reader that stops at, or stumbles over, the first line it does not like."""
    first, *rest = lines_of(answer(ROUNDS)).split(b"\n")
    data = b"\n".join([first, line, *rest])
    found = read_recording(data)
    assert [e.event for e in found if isinstance(e, Recorded)] == [
        e for _, e in events_of(lines_of(answer(ROUNDS)))
    ]
    (told,) = [e.sentence for e in found if isinstance(e, Trouble)]
    assert told.startswith(sentence)


@pytest.mark.parametrize("change", [
    {"accepted": 4}, {"accepted": 2}, {"tested": 0}, {"emitted": 9}, {"emitted": 0},
    {"end": "plain"}, {"end": "stopped"}, {"decided": [1]}, {"drafted": []},
])  # fmt: skip
def test_round_whose_counts_contradict_each_other_is_left_out(change):
    """Catches statistics that break their identities because a file said so."""
    event = next(e for e in answer(ROUNDS) if isinstance(e, RoundFinished))
    line = json.loads(to_line(event, 0.0))
    line["record"] |= change
    found = read_recording(json.dumps(line).encode() + b"\n")
    assert not any(isinstance(e, Recorded) for e in found)
    assert any("(round) has" in e.sentence for e in found)


def test_unknown_kind_is_told_once():
    """Catches a thousand sentences about one thing."""
    data = lines_of(answer(ROUNDS)).replace(b"\n", b'\n{"event":"surprise"}\n')
    assert len(troubles(data)) == 1


@pytest.mark.parametrize("schema, words", [
    ("cudflash-events/0", "has the schema 'cudflash-events/0', this version reads"),
    (None, "has the schema None, this version reads"),
])  # fmt: skip
def test_other_schema_is_told_and_shown_as_far_as_possible(schema, words):
    """Catches an old recording that is refused, or silently misread."""
    header = {"schema": schema, "event": "started", "t": 0, "facts": facts()}
    data = lines_of(answer(ROUNDS)).split(b"\n", 1)[1]
    found = read_recording(json.dumps(header).encode() + b"\n" + data)
    assert words in found[0].sentence
    assert sum(isinstance(e, Recorded) for e in found) == len(list(answer(ROUNDS)))


def test_missing_header_and_missing_facts_are_told():
    """Catches a monitor that shows a default where the file says nothing."""
    header, rest = lines_of(answer(ROUNDS)).split(b"\n", 1)
    assert "comes before any header" in troubles(rest)[0]
    poor = json.loads(header)
    del poor["facts"]["drafter"]["gate"]["floor"], poor["facts"]["n_ctx"]
    poor["facts"]["drafter"]["taps"] = "all"
    found = read_recording(json.dumps(poor).encode() + b"\n" + rest)
    assert found[0].sentence == (
        "line 1 (started) lacks a usable n_ctx, drafter.taps, drafter.gate.floor; shown as unknown"
    )
    known = found[1].event.facts
    assert known["drafter"]["gate"]["floor"] is None and known["drafter"]["taps"] is None
    assert known["drafter"]["gate"]["window_rounds"] == 8


def test_line_without_an_end_is_not_kept_in_memory():
    """Catches a device that never ends a line and takes all memory."""
    reader = Reader()
    found = [e for _ in range(40) for e in reader.feed(b"x" * (LONGEST_LINE // 16))]
    assert len(found) == 1 and "longer than" in found[0].sentence
    found = reader.feed(b"\n" + lines_of(answer(ROUNDS)))
    assert sum(isinstance(e, Recorded) for e in found) == len(list(answer(ROUNDS)))


@pytest.mark.parametrize("data", [b"", b"\n\n  \n"])
def test_empty_recording_is_said_to_be_empty(data):
    """Catches a screen full of zeros for a file with nothing in it."""
    assert troubles(data) == [f"there is no event in it, expected lines of {SCHEMA}"]


MUTATIONS = st.lists(
    st.tuples(st.integers(0, 1 << 30), st.sampled_from(["flip", "cut", "insert", "swap", "dup"]),
              st.integers(0, 255)), min_size=1, max_size=12,
)  # fmt: skip


@settings(max_examples=120, deadline=None)
@given(MUTATIONS)
def test_garbled_recordings_never_break_reader_state_or_screen(mutations):
    """Catches any exception, any identity broken, any screen of a wrong size."""
    data = bytearray(lines_of(list(answer(ROUNDS * 3))[:40]))
    for at, kind, byte in mutations:
        at %= max(1, len(data))
        if kind == "flip":
            data[at : at + 1] = bytes([byte])
        elif kind == "cut":
            del data[at : at + byte]
        elif kind == "insert":
            data[at:at] = bytes([byte]) * (byte % 7)
        elif kind == "dup":
            data[at:at] = data[at : at + 4 * byte]
        else:
            data[at : at + 8] = data[at + 8 : at + 16] + data[at : at + 8]
    state, screen = MonitorState(), Screen()
    for entry in read_recording(bytes(data)):
        if isinstance(entry, Trouble):
            state.tell(entry.sentence)
        else:
            state.see(entry.event, entry.t)
    identities(state.stats.to_dict())
    for width, height in ((80, 24), (160, 48), (31, 7)):
        rows = screen.rows(state, width, height)
        assert len(rows) == height
        assert all(sum(w for _, w, _ in row) == width for row in rows)


# -- files ------------------------------------------------------------------------------------------


def test_followed_file_is_read_as_it_grows_by_two_readers(tmp_path):
    """Catches readers that take lines from one another, or end before the writer does."""
    path, data = tmp_path / "run.jsonl", recording()
    path.write_bytes(b"")
    parts = [data[i : i + 5001] for i in range(0, len(data), 5001)]

    def grow(seconds):
        with open(path, "ab") as file:
            file.write(parts.pop(0) if parts else b"")

    first = list(entries(open_source(path, follow=True), wait=grow))
    again = list(entries(open_source(path, follow=True), wait=grow))
    assert not parts and first == again == read_recording(data)


def test_recording_that_is_begun_anew_is_followed_from_its_start(tmp_path):
    """Catches a follower that waits for ever behind the end of a file that became shorter."""
    path = tmp_path / "run.jsonl"
    path.write_bytes(recording()[:40000])
    steps = iter([lambda: path.write_bytes(lines_of(answer(ROUNDS)))])
    found = list(entries(open_source(path, follow=True), wait=lambda s: next(steps)()))
    anew = [i for i, e in enumerate(found) if isinstance(e, Trouble) and "anew" in e.sentence]
    assert len(anew) == 1
    assert found[anew[0] + 1 :] == read_recording(lines_of(answer(ROUNDS)))


def source_of(data, size=1000):
    """A pipe that gives ``size`` bytes at a time."""
    parts = [data[i : i + size] for i in range(0, len(data), size)]
    return Source("a pipe", lambda: parts.pop(0) if parts else b"", False)


@pytest.mark.parametrize("size", [1, 7, 1 << 20])
def test_pipe_gives_the_same_as_a_file(size):
    """Catches a stream that is taken for a receipt, or held back until its end."""
    data = lines_of(answer(ROUNDS))
    assert list(entries(source_of(data, size))) == read_recording(data)


# -- receipts ---------------------------------------------------------------------------------------


def drafted_receipt():
    """A result with drafts kept and cut, and its receipt."""
    one = engine("llama")
    plain = one.generate(PROMPT, max_tokens=150, sampling=GREEDY, ignore_eos=True)
    return one.generate(
        PROMPT, max_tokens=150, sampling=GREEDY, ignore_eos=True, speculative="on",
        drafter=KeepK(plain.tokens, 2),
    )  # fmt: skip


@pytest.mark.parametrize("indent, size", [(None, 1 << 20), (1, 1 << 20), (1, 100)])
def test_receipt_gives_the_counters_of_its_answer(indent, size):
    """Catches a receipt shown with other counts than it holds; indented as generate writes it."""
    result = drafted_receipt()
    data = json.dumps(result.receipt, indent=indent).encode()
    state = MonitorState()
    for entry in entries(source_of(data, size)):
        assert isinstance(entry, Recorded) and entry.t is None
        state.see(entry.event, entry.t)
    stats, told = state.stats.to_dict(), result.receipt["speculative"]["counts"]
    identities(stats)
    for name, value in told.items():
        assert stats[name] == value, name
    assert [span.token for span in state.spans + state.pending] == list(result.tokens)
    assert state.tokens_per_second is None and state.shares == {}
    assert state.drafter["verify_length"] == 7 and state.facts["textless"]


def test_receipt_replays_the_gate_that_it_records():
    """Catches a gate reconstructed one round late: its events are in the receipt."""
    one = engine("llama")
    result = one.generate(
        PROMPT, max_tokens=150, sampling=SAMPLED, seed=2, ignore_eos=True, accept="ratio",
        drafter=KeepK([1] * 300, 0),
    )  # fmt: skip
    told = result.receipt["speculative"]["gate"]
    assert told["closings"]
    reopened = {event["round"] for event in told["events"] if event["kind"] == "reopened"}
    after = "open"
    seen = set()
    for entry in receipt_entries(result.receipt):
        if isinstance(entry.event, RoundFinished):
            record = entry.event.record
            assert record.gate == ("open" if record.index in reopened else after)
            after = entry.event.gate.state
            seen.add(after)
    assert seen == {"open", "closed"}


def test_older_receipt_is_refused_in_a_sentence():
    """Catches a receipt of another schema that is half understood."""
    receipt = dict(drafted_receipt().receipt, schema="cudflash-receipt/0")
    with pytest.raises(FormatError, match="a pipe: receipt.schema is 'cudflash-receipt/0'"):
        list(entries(source_of(json.dumps(receipt).encode())))


def test_receipt_without_rounds_says_so():
    """Catches an empty screen without a reason."""
    plain = engine("llama").generate(PROMPT, max_tokens=3, sampling=GREEDY)
    first, second = receipt_entries(plain.receipt)
    assert isinstance(first.event, Started) and "no draft is loaded" in second.sentence


def test_committed_recording_holds_what_the_screens_need():
    """Catches a fixture that cannot fail: no pause, no wrapped window, one kind of token."""
    state = state_of(recording())
    assert min(state.counts.values()) > 10
    assert state.context.rows == 96 and state.context.window_start > 300
    assert {event.kind for event in [state.gate_event]} == {"reopened"}
