"""Stop tokens, stop strings and limits, against a definition that looks at one character at a time."""

import codecs
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cudflash.errors import UsageError
from cudflash.stop import AnswerText, StopRules, StopStrings, stop_rules
from tests.helpers.scripted import EOG, PieceTokenizer

ALPHABET = "abc€😀"


def definition(pieces, stops, max_tokens):
    """Text, token count and reason, from the bytes of every prefix: slow and obvious."""
    for n in range(max_tokens + 1):
        if n and n <= len(pieces) and pieces[n - 1] is None:
            text, reason = _decoded(pieces[: n - 1], True), "stop"
        elif n == max_tokens:
            text, reason = _decoded(pieces[:n], True), "length"
        else:
            text, reason = _decoded(pieces[:n], False), None
        cut = _cut(text, stops)
        if cut is not None:
            return text[:cut], n, "stop"
        if reason:
            return text, n, reason
    raise AssertionError("the script is shorter than max_tokens")


def _decoded(pieces, final):
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    return decoder.decode(b"".join(pieces), final)


def _cut(text, stops):
    """Grow the text by one character until it ends in a stop string; the longest one counts."""
    for end in range(1, len(text) + 1):
        complete = [s for s in stops if text[:end].endswith(s)]
        if complete:
            return end - len(max(complete, key=len))
    return None


def run(pieces, stops, max_tokens, extra_ids=()):
    tokenizer = PieceTokenizer(pieces)
    answer = AnswerText(tokenizer.stream(), StopRules(tuple(stops), {EOG, *extra_ids}), max_tokens)
    deltas = []
    for token, piece in enumerate(pieces):
        if answer.finish_reason:
            break
        deltas.append(answer.push(EOG if piece is None else token))
    return answer, deltas


@st.composite
def scripts(draw):
    text = draw(st.text(ALPHABET, max_size=24)).encode()
    cuts = draw(st.lists(st.integers(0, len(text)), max_size=24).map(sorted))
    edges = [0, *cuts, len(text)]
    pieces = [text[a:b] for a, b in itertools.pairwise(edges)]
    if draw(st.booleans()):
        pieces.insert(draw(st.integers(0, len(pieces))), None)  # end of generation
    stops = draw(st.lists(st.text(ALPHABET + "\ufffd", min_size=1, max_size=4), max_size=4))
    return pieces, stops, draw(st.integers(0, len(pieces)))


@settings(max_examples=1500, deadline=None)
@given(scripts())
def test_text_count_and_reason_follow_the_definition(case):
    """Catches a stop missed across tokens or characters, a wrong cut, and a wrong token count."""
    pieces, stops, max_tokens = case
    answer, deltas = run(pieces, stops, max_tokens)
    assert (answer.text, len(answer.tokens), answer.finish_reason) == definition(*case)
    assert "".join(deltas) == answer.text
    assert not any(stop in answer.text for stop in stops)


@settings(max_examples=300, deadline=None)
@given(scripts())
def test_cancelled_text_is_what_the_tokens_say(case):
    """Catches held-back text that is lost when an answer is cancelled."""
    pieces, stops, _ = case
    answer, deltas = run(pieces, stops, len(pieces) + 1)
    tail = answer.cancel()
    if answer.finish_reason == "cancelled":
        assert answer.text == _decoded(pieces, True)
    assert "".join(deltas) + tail == answer.text
    assert answer.cancel() == ""


@pytest.mark.parametrize("offset", range(16))
@pytest.mark.parametrize("width", [1, 2, 3])
def test_stop_string_at_every_offset_of_a_run(offset, width):
    """Catches a search of the tail only: stop at offset 0 to 15, and across two tokens."""
    text = "." * offset + "STOP" + "." * (16 - offset)
    pieces = [text[i : i + width].encode() for i in range(0, len(text), width)]
    answer, _ = run(pieces, ["STOP"], len(pieces))
    assert answer.text == "." * offset
    assert len(answer.tokens) == -(-(offset + 4) // width)
    assert (answer.finish_reason, answer.stopped_by) == ("stop", "STOP")


def test_text_is_held_back_only_while_it_may_be_a_stop_string():
    """Catches text delayed without need, or released too early."""
    search = StopStrings(["abcd", "cx"])
    assert [search.push(t) for t in ("a", "b", "c", "e", "zc", "y")] == [
        "", "", "", "abce", "z", "cy"
    ]  # fmt: skip
    assert search.push("ab") == "" and search.finish() == "ab"


def test_which_of_several_stops_counts():
    """Catches results that depend on how the text was cut into tokens."""
    for pieces in ([b"abcd"], [b"ab", b"cd"], [b"a", b"b", b"c", b"d"]):
        answer, _ = run(pieces, ["bcd", "c"], 4)
        assert (answer.text, answer.stopped_by) == ("ab", "c")  # complete first
        answer, _ = run(pieces, ["cd", "bcd", "d"], 4)
        assert (answer.text, answer.stopped_by) == ("a", "bcd")  # same end: the longest


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_emoji_split_over_tokens_is_one_character(cut):
    """Catches replacement characters from tokens decoded alone; a truncated tail is flushed."""
    emoji = "😀".encode()
    answer, deltas = run([emoji[:cut], emoji[cut:], b"!"], [], 3)
    assert deltas == ["", "😀", "!"]
    answer, deltas = run([b"x", emoji[:cut]], [], 2)
    assert answer.text == "x\ufffd"


def test_stop_token_counts_and_has_no_text():
    """Catches stop tokens that are dropped from ids or shown in the text."""
    answer, _ = run([b"a", b"b", b"c"], [], 3, extra_ids={1})
    assert (answer.tokens, answer.text, answer.stopped_by) == ([0, 1], "a", 1)
    answer, _ = run([None], [], 5)
    assert (answer.tokens, answer.text, answer.finish_reason) == ([EOG], "", "stop")


def test_limit_of_zero_ends_before_the_first_token():
    """Catches one token too many."""
    answer, _ = run([b"a"], [], 0)
    assert (answer.tokens, answer.finish_reason, answer.room) == ([], "length", 0)
    with pytest.raises(RuntimeError):
        answer.push(0)


@pytest.mark.parametrize("stop", ["", ["a", ""], [1.5], [True], [70], [-1], [None]])
def test_impossible_stops_are_refused(stop):
    """Catches a stop that silently never matches."""
    with pytest.raises(UsageError, match="stop"):
        stop_rules(stop, {3}, 70)


def test_stop_rules_sort_what_users_pass():
    """Catches a single string taken letter by letter, or end-of-generation ids lost."""
    assert stop_rules("ab", {3}, 70) == StopRules(("ab",), frozenset({3}))
    assert stop_rules(5, {3}, 70) == StopRules((), frozenset({3, 5}))
    assert stop_rules(["x", 5, "x"], (), 70) == StopRules(("x",), frozenset({5}))
