"""A picture of the screen, as SVG.

Owns the export. Must not know where the state comes from. The same state gives the same bytes.
"""

import io

from cudflash.errors import UsageError
from cudflash.tui.screen import Screen, as_lines

DEFAULT_SIZE = (120, 36)


def render(state, width, height, *, no_color=False, glyphs=None):
    """Return a console that has recorded one screen.

    Parameters
    ----------
    state : MonitorState
    width, height : int
    no_color : bool
    glyphs : Glyphs, optional

    Returns
    -------
    rich.console.Console
        ``export_text``, ``export_svg`` and so on.
    """
    from rich.console import Console
    from rich.segment import Segment, Segments

    screen = Screen() if glyphs is None else Screen(glyphs)
    console = Console(
        file=io.StringIO(), width=width, height=height, record=True, force_terminal=True,
        color_system="truecolor", no_color=no_color, legacy_windows=False, _environ={},
    )  # fmt: skip
    segments = as_lines(screen.rows(state, width, height))
    if no_color:  # Rich drops colours when it writes, not when it records
        segments = list(Segment.remove_color(segments))
    console.print(Segments(segments), end="", crop=False)
    return console


def save_snapshot(path, state, size=None, *, light=False, no_color=False, title="cudflash"):
    """Write the screen of a state as an SVG picture.

    Parameters
    ----------
    path : str or path-like
    state : MonitorState
    size : (int, int), optional
        Columns and rows; ``DEFAULT_SIZE`` if absent.
    light : bool
        Dark text on white, as on a light terminal.
    no_color : bool
    title : str
        In the window's bar.

    Raises
    ------
    UsageError
        If the file cannot be written.
    """
    from rich.terminal_theme import DEFAULT_TERMINAL_THEME, SVG_EXPORT_THEME

    console = render(state, *(size or DEFAULT_SIZE), no_color=no_color)
    theme = DEFAULT_TERMINAL_THEME if light else SVG_EXPORT_THEME
    picture = console.export_svg(title=title, theme=theme, unique_id="cudflash")
    try:
        with open(path, "w", encoding="utf-8") as file:
            file.write(picture)
    except (OSError, ValueError) as err:
        reason = getattr(err, "strerror", None) or err
        raise UsageError(
            f"{path}: the picture cannot be written ({reason}); choose another path"
        ) from None
