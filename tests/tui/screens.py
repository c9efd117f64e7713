"""The golden screens: what is drawn from which recording. Write them anew after a wanted change:

    python -m tests.tui.screens

and look at what has changed before committing it.
"""

from pathlib import Path

from cudflash.tui.snapshot import render
from cudflash.tui.state import MonitorState
from cudflash.tui.style import ASCII
from tests.helpers.recorded_runs import answer, recording, state_of

FOLDER = Path(__file__).parent / "screens"


def waiting():
    """Nothing has come yet."""
    return MonitorState()


def closed():
    """The scripted run while its gate is closed."""
    return state_of(recording(), until=0.2)


def complete():
    """The scripted run at its end."""
    return state_of(recording())


def never():
    """A draft of which nothing is ever accepted."""
    return state_of(recording("never-accepted"))


def long_blocks():
    """Verify length 15, by hand."""
    state = MonitorState()
    for at, event in enumerate(answer([(15, 15, "bonus", 16), (15, 4, "corrected", 5)] * 5)):
        state.see(event, at / 50)
    return state


def plain():
    """No draft."""
    state = MonitorState()
    for at, event in enumerate(e for e in answer((), drafter=False)):
        state.see(event, at / 50)
    return state


# name -> (state, columns, rows, options of render, styles kept)
SCREENS = {
    "waiting-80x24": (waiting, 80, 24, {}, False),
    "closed-80x24": (closed, 80, 24, {}, False),
    "closed-80x24-colour": (closed, 80, 24, {}, True),
    "closed-80x24-no-colour": (closed, 80, 24, {"no_color": True}, True),
    "closed-160x48": (closed, 160, 48, {}, False),
    "complete-160x48-colour": (complete, 160, 48, {}, True),
    "complete-60x16": (complete, 60, 16, {}, False),
    "complete-40x8": (complete, 40, 8, {}, False),
    "complete-80x24-ascii": (complete, 80, 24, {"glyphs": ASCII}, False),
    "never-80x24": (never, 80, 24, {}, False),
    "verify-15-80x24": (long_blocks, 80, 24, {}, False),
    "plain-80x24": (plain, 80, 24, {}, False),
}


def drawn(name):
    """Text of a screen, with escape sequences where styles are kept."""
    make, width, height, options, styles = SCREENS[name]
    text = render(make(), width, height, **options).export_text(styles=styles)
    return "\n".join(line.rstrip() for line in text.splitlines()) + "\n"


def main():
    """Write all of them."""
    FOLDER.mkdir(exist_ok=True)
    for name in SCREENS:
        (FOLDER / f"{name}.txt").write_text(drawn(name), encoding="utf-8")


if __name__ == "__main__":
    main()
