"""The parts of the screen: each turns the state into lines of a width.

Owns wording and numbers. Must not know where a part stands. Every function returns at most as many
lines as it is given; unknown facts are said to be unknown, never guessed.
"""

from cudflash.spec.gate import CLOSED, DISABLED, OPEN
from cudflash.tui.style import bar, human_bytes, length, line, percent, stacked
from cudflash.tui.text import flat, wrapped

KINDS = ("accepted", "bonus", "corrected", "plain")
LEGEND = {
    "accepted": "drafts that the target agreed with",
    "bonus": "its own token after a whole draft",
    "corrected": "its own token instead of a draft",
    "plain": "without a draft",
}


def known(value, text="{}"):
    """A value in a text, or a question mark."""
    return "?" if value is None else text.format(value)


def model_line(state):
    """What runs, in one line."""
    facts = state.facts
    if not facts:
        return line(("cudflash", "title"), ("  waiting for an answer", "dim"))
    target, device = facts.get("target") or {}, facts.get("device") or {}
    name = flat(known(target.get("file")))
    drafter = state.drafter
    draft = ""
    if drafter is not None:
        draft = f" + {flat(known(drafter['file'] or drafter['kind']))}"
    where = flat(known(device.get("kind")))
    if facts.get("threads"):
        where += f", {facts['threads']} thread{'' if facts['threads'] == 1 else 's'}"
    answer = f", answer {state.answers}" if state.answers > 1 else ""
    return line(("cudflash ", "title"), (f"on {where}{answer}: ", "dim"), name + draft)


def settings_parts(state):
    """(name, value) of the settings an answer is made with, the important ones first.

    The device comes last: a line has it elsewhere.
    """
    facts, drafter = state.facts, state.drafter
    parts = []
    if drafter is None:
        parts.append(("plain:", flat(facts.get("reason") or "?")))
    else:
        taps = drafter["taps"]
        block = f", block {drafter['block_size']}" if drafter["block_size"] else ""
        rule = known(drafter["rule"])
        if drafter["accept"] not in (None, drafter["rule"]):
            rule += f" ({drafter['accept']} asked for)"
        parts += [
            ("draft", flat(known(drafter["kind"]))),
            ("taps", "?" if taps is None else " ".join(map(str, taps)) or "none"),
            ("verify", known(drafter["verify_length"]) + block),
            ("accept", flat(rule)),
        ]
    parts += [
        ("n_ctx", known(facts.get("n_ctx"))),
        ("KV", flat(known(facts.get("kv_type")))),
        ("activations", flat(known(facts.get("activations")))),
        ("device", flat(known((facts.get("device") or {}).get("name")))),
    ]
    return parts if facts else []


def settings_line(state, width):
    """The settings in one line, as many as it has room for."""
    parts, used = [], 0
    for name, value in settings_parts(state)[:-1]:
        value = value[: width // 2]  # a long one must not hide all others
        label = "" if name in ("draft", "activations") else f"{name} "  # they name themselves
        used += len(label) + len(value) + (2 if parts else 0)
        if used > width:
            break
        parts += ["  "] * bool(parts) + [(label, "dim"), value]
    return line(*parts)


def kind_counts(state):
    """The legend of the text: counts by kind, each in its style."""
    parts = []
    for kind in KINDS:
        if state.drafter is not None or state.counts[kind]:
            parts += [(f"{kind} {state.counts[kind]}", kind), "  "]
    return parts[:-1]


def positions(state, glyphs, width, n_lines):
    """Acceptance by position: one bar each, and a line that sums them up."""
    stats, drafter = state.stats, state.drafter
    asked = (drafter or {}).get("verify_length") or 0
    n = max(len(stats.proposed_at), min(asked, 64))
    if not n or n_lines < 2:
        return [line((_why_no_draft(state), "dim"))][:n_lines]
    room = n_lines - 1
    n_columns = -(-n // room)
    per_column = -(-n // n_columns)
    cell = (width - 2 * (n_columns - 1)) // n_columns
    rows = []
    for row in range(per_column):
        parts = []
        for column in range(n_columns):
            position = column * per_column + row
            if position < n:
                gap = line("  ") if column else []
                parts += [*gap, *_position(stats, glyphs, cell, position)]
        rows.append(parts)
    return [*rows, *[[]] * (room - per_column), _summary(stats, width)][:n_lines]


def _position(stats, glyphs, width, position):
    def at(counts):
        return counts[position] if position < len(counts) else 0

    proposed, tested, accepted = map(at, (stats.proposed_at, stats.tested_at, stats.accepted_at))
    share = accepted / proposed if proposed else 0.0
    text = f" {percent(share)}" if proposed else "    -"
    if width >= 30:
        text += f" {accepted:>4}/{proposed:<4}"
    if width >= 50:
        text += f" {percent(accepted / tested)} of tested" if tested else " " * 15
    label = f"{position + 1:>2} "
    name = "good" if share >= 0.25 else "bad"
    return [
        *line((label, "dim")),
        *bar(glyphs, max(1, width - len(label) - len(text)), share, name),
        *line(text),
    ]


def _summary(stats, width):
    if not stats.draft_rounds:
        return line(("nothing drafted yet", "dim"))
    parts = [("rate ", "dim"), f"{stats.acceptance_rate:.0%}", ("  length ", "dim"),
             f"{stats.acceptance_length:.2f}"]  # fmt: skip
    if width >= 34:
        parts += [("  per pass ", "dim"), f"{stats.tokens_per_pass:.2f}"]
    return line(*parts)


def _why_no_draft(state):
    if not state.facts:
        return ""
    return f"no draft: {flat(state.facts.get('reason') or 'unknown')}"


# -- the gate ---------------------------------------------------------------------------------------


def gate_title(state):
    """State of the gate, in words and colour."""
    drafter = state.drafter
    if drafter is None:
        return [("gate", "title")]
    if state.fault is not None:
        return [("gate ", "title"), ("off after a fault", "bad")]
    if state.gate is None:
        return [("gate ", "title"), ("open" if drafter["mode"] else "?", "dim")]
    name = "good" if state.gate.state == OPEN else "bad"
    mode = " (always)" if drafter["mode"] == "on" else ""
    parts = [("gate ", "title"), (state.gate.state, name), (mode, "dim")]
    if state.paused and state.gate.state == OPEN:
        parts += [("  paused: does not pay", "bad")]
    return parts


def gate(state, glyphs, width, n_lines):
    """Why the gate is as it is, its sample against the floor, the last rounds, the countdown."""
    if state.drafter is None:
        return [line((text, "dim")) for text in wrapped(_why_no_draft(state), width, n_lines)]
    rules = state.drafter["gate"] or {}
    floor = rules.get("floor")
    n_chart = max(1, n_lines - 4)
    reason = wrapped(_reason(state), width, 2)
    reason += [""] * (2 - len(reason))
    lines = [line(text) for text in reason]
    lines.append(_sample(state, rules, width))
    lines += _chart(state, glyphs, width, n_chart, floor)
    lines.append(_countdown(state, glyphs, width))
    return lines[:n_lines]


def _reason(state):
    gate, event, mode = state.gate, state.gate_event, state.drafter["mode"]
    if state.fault is not None:
        return state.fault.reason
    if gate is None:
        return "no round yet"
    if gate.state in (CLOSED, DISABLED):
        return event.reason if event is not None else "no reason was recorded"
    if state.paused:
        return state.economy.reason
    if mode == "on":
        return "drafting is kept on whatever the acceptance"
    if gate.warmup_left:
        n = gate.warmup_left
        again = event is not None and event.kind == "reopened"
        why = "tried again" if again else "warming up"
        return f"{why}: {n} more round{'' if n == 1 else 's'} will not count"
    if not gate.proposals:
        return "no sample yet"
    return f"{gate.accepted} of {gate.proposals} drafts of its sample were accepted"


def _sample(state, rules, width):
    gate = state.gate
    if gate is None:
        return line("")
    share = f"{gate.accepted / gate.proposals:.0%}" if gate.proposals else "-"
    below = gate.proposals and gate.accepted < (rules.get("floor") or 0) * gate.proposals
    parts = [
        (share, "bad" if below else "good"),
        (" floor ", "dim"), known(rules.get("floor"), "{:.0%}"),
        (" rounds ", "dim"), f"{gate.rounds}/{known(rules.get('window_rounds'))}",
        (" drafts ", "dim"), f"{gate.proposals}/{known(rules.get('min_proposals'))}",
    ]  # fmt: skip
    if width >= 50:
        parts = [("sample ", "dim"), *parts]
    return line(*parts)


def _chart(state, glyphs, width, n_rows, floor):
    """Share accepted of the last rounds, newest at the right, with the floor as a line."""
    axis = 5
    columns = list(state.recent)[-max(1, width - axis) :]
    steps = len(glyphs.heights)
    floor_row = None if floor is None else round(floor * n_rows)  # rows below the line
    rows = []
    for row in range(n_rows - 1, -1, -1):  # from the top
        label = "100% " if row == n_rows - 1 else ("floor" if row == floor_row else " " * axis)
        parts = [(label, "dim")]
        for share in columns:
            if share is None:
                blank = glyphs.floor if row == floor_row else " "
                parts.append((glyphs.dot if row == 0 else blank, "dim"))
                continue
            filled = min(steps, round(share * n_rows * steps) - row * steps)
            if row == 0 and filled < 1:
                filled = 1  # a round in which nothing was accepted is a round
            name = "good" if floor is None or share >= floor else "bad"
            if filled > 0:
                parts.append((glyphs.heights[filled - 1], name))
            else:
                parts.append((glyphs.floor, "dim") if row == floor_row else " ")
        rest = max(0, width - axis - len(columns))
        parts.append((glyphs.floor * rest if row == floor_row else "", "dim"))
        rows.append(_merged(parts))
    return rows


def _merged(parts):
    """A line with neighbours of one style joined: fewer pieces to write."""
    joined = []
    for part in parts:
        text, name = (part, "") if isinstance(part, str) else part
        if joined and joined[-1][1] == name:
            joined[-1] = (joined[-1][0] + text, name)
        elif text:
            joined.append((text, name))
    return line(*joined)


def _countdown(state, glyphs, width):
    pause = state.pause
    if pause is None:
        n = sum(1 for share in state.recent if share is not None)
        return line((f"last {n} round{'' if n == 1 else 's'} with drafts", "dim") if n else "")
    left, whole = pause
    text = f"tries again in {left} of {whole} tokens "
    return [*line(text), *bar(glyphs, max(1, min(20, width - len(text))), 1 - left / whole, "good")]


# -- context, time, speed ---------------------------------------------------------------------------


def context(state, glyphs, width):
    """What the draft remembers: where it lies in the conversation, and how much of its bounds."""
    drafter, held = state.drafter, state.context
    geometry = None if drafter is None else drafter["geometry"]
    if geometry is None:
        text = "this drafter keeps no context" if drafter is not None else _why_no_draft(state)
        return [line((text, "dim")), line("")]
    sink, window = geometry["sink"] or 0, geometry["window"]
    if held is None:
        numbers = [("rows held are not recorded, allowed ", "dim"), known(geometry["row_limit"])]
        numbers += [*_geometry_words(geometry, sink, window)]
        return [line(("where the window lies is not recorded", "dim")), line(*numbers)]
    numbers = [
        ("rows ", "dim"), f"{held.rows} of {known(geometry['row_limit'])}",
        ("  bytes ", "dim"), human_bytes(held.n_bytes), " of ",
        known(geometry["byte_limit"] and human_bytes(geometry["byte_limit"])),
        *_geometry_words(geometry, sink, window),
    ]  # fmt: skip
    return [_where(state, glyphs, width, held, min(sink, held.length)), line(*numbers)]


def _geometry_words(geometry, sink, window):
    if window is None:
        return ["  no window"]
    full = geometry["full_layers"]
    parts = [("  sink ", "dim"), str(sink), ("  window ", "dim"), str(window)]
    if geometry["window_source"] not in (None, "file"):
        parts.append((f" ({flat(geometry['window_source'])})", "bad"))
    return parts + ([("  full layers ", "dim"), str(full)] if full else [])


def _where(state, glyphs, width, held, sink):
    """The conversation as a bar: pinned rows, rows that are not seen, the window."""
    total = held.length
    first = min(max(held.window_start, sink), total)
    words = f" rows {first}-{total - 1} of {total}" if total > first else f" no row of {total}"
    cells = max(4, width - len(words))
    if not total:
        return line((glyphs.dot * cells, "dim"), words)
    a = min(cells, max(round(sink / total * cells), 1 if sink else 0))
    b = max(a, min(round(first / total * cells), cells - (total > first)))
    return line(
        (glyphs.shades[1] * a, "sink"), (glyphs.dot * (b - a), "dim"),
        (glyphs.shades[0] * (cells - b), "window"), words,
    )  # fmt: skip


_PHASES = {"draft": (1, "draft"), "verify": (0, "verify"), "decide": (2, "decide"),
           "plain": (3, "")}  # fmt: skip


def times(state, glyphs, width, n_lines=1):
    """Where the time went: a bar and its legend, on one line or on two."""
    shares = state.shares
    if not shares:
        return [line(("no round was timed", "dim")), []][:n_lines]
    words = []
    for name, share in shares.items():
        shade, look = _PHASES[name]
        words += [" ", (f"{glyphs.shades[shade]} {name} {share:.0%}", look)]
    legend = line(*words)
    parts = [(share, *_PHASES[name]) for name, share in shares.items()]
    if n_lines > 1:
        return [stacked(glyphs, width, parts), legend[1:]]
    room = width - length(legend)
    return [[*stacked(glyphs, min(room, 40), parts), *legend] if room >= 8 else legend]


def speed(state):
    """Tokens per second against a plain step."""
    tps, step = state.tokens_per_second, state.stats.plain_step_ms
    parts = [f"{tps:.1f}" if tps else "-", (" tokens/s", "dim")]
    if state.drafter is None:
        return line(*parts)
    if not step:
        return line(*parts, ("  no plain step was measured yet", "dim"))
    parts += [("  plain ", "dim"), f"{1000 / step:.1f}", (f" ({step:.1f} ms)", "dim")]
    speedup = state.stats.estimated_speedup
    if speedup:
        name = "good" if speedup >= 1 else "bad"
        parts += ["  ", (f"{speedup:.2f}", name), (" times plain", "dim")]
    return line(*parts)


def progress(state):
    """How far the answer is, in tokens of the prompt and then of the answer."""
    done, total = state.prompt
    if state.facts and not state.n_tokens and state.result is None:
        return f"prompt {done}/{total}"
    return f"{state.n_tokens}/{known(state.facts.get('max_tokens'))}"
