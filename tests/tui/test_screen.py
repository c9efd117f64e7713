"""How it looks: golden screens, every size, what colour must not be needed for."""

import re

import pytest
from rich.cells import cell_len

from cudflash.tui.screen import Screen
from cudflash.tui.snapshot import render, save_snapshot
from cudflash.tui.state import MonitorState
from cudflash.tui.style import THEME
from cudflash.tui.text import TextTail, safe, wrapped
from tests.helpers.recorded_runs import answer, recording, state_of
from tests.tui import screens

ESCAPE = re.compile(r"\x1b\[([0-9;]*)m")


@pytest.mark.parametrize("name", screens.SCREENS)
def test_screen_is_the_golden_one(name):
    """Catches any change of what people see; see ``tests.tui.screens`` for a wanted one."""
    golden = (screens.FOLDER / f"{name}.txt").read_text(encoding="utf-8")
    assert screens.drawn(name) == golden


def test_every_golden_screen_is_drawn():
    """Catches a screen on the shelf that nothing compares with."""
    assert {path.stem for path in screens.FOLDER.glob("*.txt")} == set(screens.SCREENS)


@pytest.mark.parametrize("size", [(80, 24), (160, 48), (120, 34), (119, 60), (300, 100), (40, 12),
                                  (20, 4), (1, 1), (10, 40), (161, 33)])  # fmt: skip
@pytest.mark.parametrize("make", [screens.waiting, screens.closed, screens.long_blocks,
                                  screens.plain])  # fmt: skip
def test_every_size_is_filled_exactly(size, make):
    """Catches a line that wraps and moves all others, at any size and state."""
    width, height = size
    rows = Screen().rows(make(), width, height)
    assert len(rows) == height
    for row in rows:
        x = 0
        for at, w, segments in row:
            assert at == x and sum(cell_len(s.text) for s in segments) == w
            assert "\n" not in "".join(s.text for s in segments)
            x += w
        assert x == width


@pytest.mark.parametrize("size", [(80, 24), (160, 48)])
def test_what_is_promised_is_on_the_screen(size):
    """Catches a number that fell off the small screen: all of them are asked for at 80x24."""
    text = render(state_of(recording(), until=0.2), *size).export_text()
    for words in (
        "accepted 156", "bonus 11", "corrected 37", "plain 17",  # tokens told apart
        "38/48", "79%", "11/48",  # by position
        "gate closed", "11 of 56 proposals", "20%", "floor", "rounds 8/8", "drafts 56/32",
        "tries again in 48 of 64 tokens",
        "rows 96 of 96", "240 KiB of 240 KiB", "sink 64", "window 32", "rows 225-256 of 257",
        "draft 21%", "verify 54%", "decide 1%", "tokens/s", "times plain",
        "0 1 2 3 4", "7, block 16", "match", "cpu",
    ):  # fmt: skip
        assert words in text, words


def test_kinds_differ_without_colour():
    """Catches a distinction that only colour makes (NO_COLOR, colour-blind readers)."""
    looks = {kind: re.sub(r"\b(green|red|magenta|cyan|blue)\b", "", THEME[kind]).strip()
             for kind in ("bonus", "corrected", "plain")}  # fmt: skip
    assert len(set(looks.values())) == 3
    text = render(state_of(recording()), 80, 24, no_color=True).export_text(styles=True)
    codes = {code for found in ESCAPE.findall(text) for code in found.split(";") if code}
    assert codes <= {"0", "1", "2", "4"}, codes  # bold, dim, underline


def test_only_colours_of_the_terminal_are_used():
    """Catches a fixed colour or background, unreadable on one of light and dark terminals."""
    for name in ("complete-160x48-colour", "closed-80x24-colour"):
        codes = {code for found in ESCAPE.findall(screens.drawn(name))
                 for code in found.split(";") if code}  # fmt: skip
        assert codes <= {"0", "1", "2", "4", *map(str, range(31, 37))}, codes
        assert "33" not in codes and "37" not in codes  # yellow and white vanish on white


def test_light_and_dark_pictures_have_the_same_text(tmp_path):
    """Catches a picture that loses text, or that differs from run to run."""
    state, found = state_of(recording()), {}
    for light in (False, True):
        path = tmp_path / f"{light}.svg"
        save_snapshot(path, state, (80, 24), light=light)
        first = path.read_bytes()
        save_snapshot(path, state, (80, 24), light=light)
        assert path.read_bytes() == first
        found[light] = first.decode()
    assert found[True] != found[False]
    texts = [re.findall(r"<text[^>]*>([^<]*)</text>", picture) for picture in found.values()]
    assert texts[0] == texts[1] and any("gate" in text for text in texts[0])


# -- text -----------------------------------------------------------------------------------------


def tail_text(parts, width, n=100):
    tail = TextTail(width)
    for part in parts:
        tail.add(part, "")
    return ["".join(s.text for s in line) for line in tail.lines(n)]


def test_text_is_wrapped_at_words_and_only_where_needed():
    """Catches words torn apart, lines too long, blank lines lost."""
    assert tail_text(["one two", " three\n\nfour"], 9) == ["one two", "three", "", "four"]
    assert tail_text(["abcdefghij"], 4) == ["abcd", "efgh", "ij"]
    assert tail_text(["a ", "bcdefgh"], 4) == ["a", "bcde", "fgh"]
    assert tail_text(["x日本語y"], 3) == ["x日", "本", "語y"]
    assert tail_text(["    indented"], 20) == ["    indented"]
    assert tail_text(["日"], 1) == ["?"]


@pytest.mark.parametrize("width", [1, 2, 5, 13, 80])
def test_text_in_pieces_wraps_as_in_one(width):
    """Catches a line that changes when a word arrives in two tokens."""
    text = "The quick brown fox\njumps over\n\n  the lazy 日本 dog, incomprehensibilities. " * 3
    whole = tail_text([text], width)
    assert tail_text(list(text), width) == whole
    assert all(cell_len(line) <= width for line in whole)


def test_complete_lines_never_change():
    """Catches text that jumps while it grows."""
    text, tail, before = "some words that wrap \n and some more of them " * 5, TextTail(12), []
    for char in text:
        tail.add(char, "")
        now = ["".join(s.text for s in line) for line in tail.lines(200)]
        assert now[: max(0, len(before) - 2)] == before[: max(0, len(before) - 2)]
        before = now


def test_control_characters_are_shown_not_sent():
    """Catches an answer that clears the screen, moves the cursor or turns text around."""
    assert safe("a\x1b[2Jb\rc\x07\x9b\u202e\x7f\ud800") == "a␛[2Jb␍c␇\ufffd\ufffd␡\ufffd"
    state = MonitorState()
    for event in answer([(3, 3, "bonus", 4)], text=lambda token: "\x1b[31m\x9b2J\u202e\r"):
        state.see(event)
    text = render(state, 80, 24, no_color=True).export_text(styles=False)
    assert "\x1b" not in text and "\x9b" not in text and "\u202e" not in text


def test_file_names_and_reasons_cannot_move_the_cursor():
    """Catches a recording whose facts carry escape sequences to the terminal."""
    state = MonitorState()
    for event in answer([(3, 0, "corrected", 1)]):
        if hasattr(event, "facts"):
            event.facts["target"]["file"] = "\x1b[2J"
            event.facts["kv_type"] = "\x9bx"
            event.facts["drafter"]["kind"] = "\r\n"
            event.facts["drafter"]["rule"] = "\x1b]0;x\x07"
            event.facts["drafter"]["file"] = "a\nb"
        state.see(event)
    state.tell("\x1b[2J\n\n")
    for size in ((80, 24), (160, 48)):
        for row in Screen().rows(state, *size):
            for _, _, segments in row:
                assert not set("".join(s.text for s in segments)) & set("\x1b\x9b\r\n\x07")


def test_sentences_are_cut_visibly():
    """Catches a reason that ends in the middle and looks complete."""
    assert wrapped("one two three", 7, 2) == ["one two", "three"]
    assert wrapped("one two three", 7, 1) == ["one t …"]
    assert wrapped("abcdefghij", 4, 3) == ["abcd", "efgh", "ij"]
    assert wrapped("", 10, 2) == []
