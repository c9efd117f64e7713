"""The screen: which part stands where, for the size there is.

Owns the layout. Must not know what the parts say, nor how they reach a terminal. Invariant: a screen
of height h and width w is h rows whose parts fill exactly w cells; smaller terminals lose parts, the
text last.
"""

from cudflash.tui import panels
from cudflash.tui.style import UNICODE, fitted, line, title
from cudflash.tui.text import TextTail, wrapped

WIDE, TALL = 120, 34  # from this size on, text and numbers stand side by side
SIDE = 62  # cells of the numbers then


def as_lines(rows):
    """Rows as one list of segments, each row a line."""
    from rich.segment import Segment

    segments = []
    for row in rows:
        for _, _, part in row:
            segments += part
        segments.append(Segment.line())
    return segments


class Screen:
    """Composes rows from a state; keeps what need not be made again.

    A row is a list of (x, width, segments).

    Parameters
    ----------
    glyphs : Glyphs
    """

    def __init__(self, glyphs=UNICODE):
        self._glyphs = glyphs
        self._tail, self._shown, self._answer = None, 0, None

    def rows(self, state, width, height):
        """Return ``height`` rows of ``width`` cells."""
        width, height = max(1, width), max(1, height)
        wide = width >= WIDE and height >= TALL
        rows = self._wide(state, width, height) if wide else self._narrow(state, width, height)
        return [
            [(x, w, fitted(segments, w)) for x, w, segments in row] for row in rows[:height]
        ] + [[(0, width, fitted([], width))]] * (height - len(rows))

    # -- layouts ----------------------------------------------------------------------------------

    def _narrow(self, state, width, height):
        """Everything below the text; parts are dropped from the least important on."""
        drafted = state.drafter is not None and width >= 44
        n_positions = max(len(state.stats.proposed_at), (state.drafter or {}).get(
            "verify_length") or 0) if drafted else 0  # fmt: skip
        numbers = (9 if n_positions > 7 else 8) if drafted else 0
        parts = {"model": 1, "settings": 1, "numbers": numbers + 1 if drafted else 0,
                 "rule": 1, "context": 2 if drafted else 0, "times": 1 if drafted else 0,
                 "speed": 1, "notice": 1}  # fmt: skip
        for name in ("settings", "times", "context", "numbers", "rule", "notice", "speed", "model"):
            if sum(parts.values()) + 1 + (5 if height >= 20 else 3) <= height:
                break
            if name == "numbers" and drafted and height >= 13:
                parts[name] = min(parts[name], height - sum(parts.values()) + parts[name] - 4)
                continue
            parts[name] = 0
        n_text = max(1, height - sum(parts.values()) - 1)
        g, rows = self._glyphs, []
        if parts["model"]:
            rows.append(panels.model_line(state))
        if parts["settings"]:
            rows.append(panels.settings_line(state, width))
        rows.append(self._text_title(state, width))
        rows += self._text(state, width, n_text)
        whole = [[(0, width, segments)] for segments in rows]
        if parts["numbers"]:
            whole += self._numbers(state, width, parts["numbers"])
        rows = []
        if parts["rule"]:
            rows.append(title(g, width, ("draft context, time, speed" if drafted else "speed",
                                         "title")))  # fmt: skip
        if parts["context"]:
            rows += panels.context(state, g, width)
        if parts["times"]:
            rows += panels.times(state, g, width)
        if parts["speed"]:
            rows.append(panels.speed(state))
        if parts["notice"]:
            rows.append(self._notice(state, width))
        return whole + [[(0, width, segments)] for segments in rows]

    def _numbers(self, state, width, n_lines):
        """Positions beside the gate."""
        g = self._glyphs
        left = max(10, (width - 2) * 9 // 20)
        right = width - left - 2
        a = [title(g, left, ("accepted by position", "title"))]
        a += panels.positions(state, g, left, n_lines - 1)
        b = [title(g, right, *panels.gate_title(state))]
        b += panels.gate(state, g, right, n_lines - 1)
        a += [[]] * (n_lines - len(a))
        b += [[]] * (n_lines - len(b))
        return [
            [(0, left + 2, p), (left + 2, right, q)] for p, q in zip(a[:n_lines], b[:n_lines])
        ]

    def _wide(self, state, width, height):
        """Text at the left, numbers at the right."""
        g = self._glyphs
        left = width - SIDE - 2
        body = height - 2
        text = [self._text_title(state, left), *self._text(state, left, body - 1)]
        text += [[]] * (body - len(text))
        side = self._side(state, g, body)
        rows = [[(0, width, panels.model_line(state))]]
        rows += [[(0, left + 2, p), (left + 2, SIDE, q)] for p, q in zip(text, side)]
        return [*rows, [(0, width, self._notice(state, width))]]

    def _side(self, state, g, n_lines):
        settings = []
        for name, value in panels.settings_parts(state):
            settings.append(line((f"{name:<12}", "dim"), value))
        side = [title(g, SIDE, ("settings", "title")), *settings]
        tail = [title(g, SIDE, ("time and speed", "title"))]
        if state.drafter is not None:
            tail += panels.times(state, g, SIDE, 2)
        tail.append(panels.speed(state))
        if state.drafter is not None:
            tail = [title(g, SIDE, ("draft context", "title")),
                    *panels.context(state, g, SIDE), *tail]  # fmt: skip
        room = n_lines - len(side) - len(tail) - 2
        n = max(len(state.stats.proposed_at), (state.drafter or {}).get("verify_length") or 0)
        n_positions = min(n + 1, max(2, room - 8)) if state.drafter is not None else 1
        n_gate = min(12, max(4, room - n_positions))
        side += [title(g, SIDE, ("accepted by position, of proposed", "title"))]
        side += panels.positions(state, g, SIDE, n_positions)
        side += [title(g, SIDE, *panels.gate_title(state))]
        side += panels.gate(state, g, SIDE, n_gate)
        side += tail
        left = n_lines - len(side) - 1
        if left > 1 and state.notices:
            side.append(title(g, SIDE, ("events", "title")))
            side += self._log(state, left)
        return side[:n_lines] + [[]] * (n_lines - len(side))

    # -- parts ------------------------------------------------------------------------------------

    def _text_title(self, state, width):
        counts = panels.kind_counts(state)
        parts = [("answer ", "title"), panels.progress(state), *(["  "] if counts else []), *counts]
        return title(self._glyphs, width, *parts)

    @staticmethod
    def _log(state, n_lines):
        """The last notices, each on as many lines as it needs, newest at the end."""
        lines = []
        for notice in reversed(state.notices):
            text = wrapped(notice, SIDE - 2, 3)
            if len(lines) + len(text) > n_lines:
                break
            lines = [line(("> " if i == 0 else "  ", "dim"), t) for i, t in enumerate(text)] + lines
        return lines

    def _text(self, state, width, n_lines):
        """The last lines of the answer; what was wrapped before is not wrapped again."""
        if self._answer != state.answers or self._tail is None or self._tail.width != width:
            self._answer, self._shown = state.answers, 0
            self._tail = TextTail(width, max(200, n_lines))
        spans = state.spans
        for span in spans[self._shown :]:
            ids = not span.text and self._textless(state)
            self._tail.add(f"{span.token} " if ids else span.text, span.kind)
        self._shown = len(spans)
        lines = self._tail.lines(n_lines)
        return lines + [[]] * (n_lines - len(lines))

    @staticmethod
    def _textless(state):
        return bool(state.facts.get("textless"))

    def _notice(self, state, width):
        if not state.notices and not state.transient:
            return line("")
        lines = wrapped(state.transient or state.notices[-1], width - 2, 1)
        return line(("> ", "dim"), lines[0] if lines else "")
