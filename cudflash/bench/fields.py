"""The fields of a record: what the reports read of each, and the first one that is wrong.

Owns types, ranges and the sentence about them. Must not know what a report says. Invariant: of a
record that passes, every figure can be computed: times are finite, and none that is divided by is 0.
"""

import math

from cudflash import defaults
from cudflash.errors import FormatError

FASTEST_MS, SLOWEST_MS = 1e-6, 1e12  # of anything that was timed: a nanosecond, thirty years
MOST = 2**53  # whole numbers up to it are exact wherever they are shown


class Field:
    """One kind of value.

    Parameters
    ----------
    expected : str
        What is expected, for people.
    holds : callable
        Value -> whether it is that.
    """

    def __init__(self, expected, holds):
        self.expected, self.holds = expected, holds

    def check(self, value, path):
        """Raise FormatError unless the value is of this kind."""
        if not self.holds(value):
            raise FormatError(f"{path} is {str(value)[:60]!r}, expected {self.expected}")

    def or_null(self):
        """The same, or null."""
        return Field(f"{self.expected} or null", lambda v: v is None or self.holds(v))


class Fields(Field):
    """An object with fields of its own, some of which older records lack; others are not looked at."""

    def __init__(self, fields, null=False, optional=()):
        expected = "an object or null" if null else "an object"
        super().__init__(expected, lambda v: isinstance(v, dict) or null and v is None)
        self.fields, self.optional = fields, optional

    def check(self, value, path):
        """Raise FormatError, naming the first field that is wrong."""
        super().check(value, path)
        if value is None:
            return
        for key, field in self.fields.items():
            if key not in value and key in self.optional:
                continue
            if key not in value:
                raise FormatError(f"{path}.{key} is missing")
            field.check(value[key], f"{path}.{key}")

    def or_null(self):
        """The same, or null."""
        return Fields(self.fields, True, self.optional)


class Rows(Field):
    """A list of values of one kind."""

    def __init__(self, of, least=0):
        some = f" of at least {least}" if least else ""
        super().__init__(f"a list{some}", lambda v: isinstance(v, list) and len(v) >= least)
        self.of = of

    def check(self, value, path):
        """Raise FormatError, naming the first element that is wrong."""
        super().check(value, path)
        for index, one in enumerate(value):
            self.of.check(one, f"{path}[{index}]")


def _is_text(value):
    if not isinstance(value, str):
        return False
    return value.isascii() or not any("\ud800" <= letter <= "\udfff" for letter in value)


def _is_number(value):
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return abs(value) <= MOST and math.isfinite(value)


def _is_whole(value):
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) <= MOST


def _whole(least):
    return Field(f"a whole number of at least {least}", lambda v: _is_whole(v) and v >= least)


def _word(*words):
    return Field(f"one of {', '.join(words)}", lambda v: isinstance(v, str) and v in words)


ANY = Field("anything", lambda v: True)
TEXT = Field("a text", _is_text)
FLAG = Field("true or false", lambda v: isinstance(v, bool))
NUMBER = Field("a finite number", _is_number)
COUNT, SOME = _whole(0), _whole(1)
WHOLE = Field("a whole number", _is_whole)
SHARE = Field("a number from 0 to 1", lambda v: _is_number(v) and 0 <= v <= 1)
SPENT = Field(
    f"0 or milliseconds from {FASTEST_MS:g} to {SLOWEST_MS:g}",
    lambda v: _is_number(v) and (v == 0 or FASTEST_MS <= v <= SLOWEST_MS),
)
TIMED = Field(
    f"milliseconds from {FASTEST_MS:g} to {SLOWEST_MS:g}",
    lambda v: _is_number(v) and FASTEST_MS <= v <= SLOWEST_MS,
)
STOP = _word("natural", "forced")
SETTING = Fields({"value": COUNT.or_null(), "source": TEXT})

LANE = Fields({
    "name": TEXT, "drafter": TEXT, "verify_length": SOME.or_null(), "accept": TEXT.or_null(),
    "scripted": FLAG, "mode": TEXT.or_null(),
})  # fmt: skip
DRAFT = Fields({
    "path": TEXT, "sha256": TEXT, "kind": TEXT, "block_size": SOME,
    "taps": Fields({"value": Rows(COUNT)}),
    "window": SETTING, "sink": SETTING, "full_block": FLAG,
    "activations": _word(*defaults.ACTIVATION_TYPES),
}, optional=("activations",))  # fmt: skip
GROUP = Fields({
    "name": TEXT, "lanes": Rows(LANE), "target": Fields({"path": TEXT, "sha256": TEXT}),
    "draft": DRAFT.or_null(), "device": Fields({"kind": TEXT, "name": TEXT}), "kernel_path": TEXT,
    "threads": SOME, "n_ctx": SOME, "kv_type": TEXT, "activations": TEXT, "numerics": TEXT,
    "planned_bytes": COUNT,
})  # fmt: skip
COUNTERS = Fields({
    **dict.fromkeys(("proposed_at", "tested_at", "accepted_at"), Rows(COUNT)),
    **dict.fromkeys((
        "rounds", "draft_rounds", "plain_rounds", "drafted", "tested", "accepted",
        "accepted_emitted", "emitted", "bonus", "corrected", "stopped", "cut",
    ), COUNT),
    **dict.fromkeys(("draft_ms", "verify_ms", "decide_ms", "plain_ms"), SPENT),
})  # fmt: skip
RUN = Fields({
    "group": TEXT, "lane": TEXT, "stop": STOP, "set": TEXT, "kind": TEXT, "depth": COUNT,
    "prompt": COUNT, "index": COUNT, "repetition": COUNT, "order": COUNT, "prompt_tokens": COUNT,
    "cached_tokens": COUNT, "n_tokens": COUNT, "tokens_sha256": TEXT, "finish_reason": TEXT,
    "loops": FLAG, "prompt_ms": SPENT, "decode_ms": SPENT, "decode_tokens": COUNT,
    "rule": TEXT.or_null(), "counts": COUNTERS.or_null(), "fault": TEXT.or_null(),
    "closings": COUNT, "exact": FLAG.or_null(),
})  # fmt: skip
COST = Fields({"group": TEXT, "depth": COUNT, "m": SOME, "ms": Rows(TIMED, 1)})
DIFFERENCE = Fields({
    "set": TEXT, "index": COUNT, "depth": COUNT, "lane": TEXT, "repetition": COUNT, "against": TEXT,
    "first_difference": COUNT, "expected": COUNT.or_null(), "found": COUNT.or_null(),
})  # fmt: skip
ITEM = Fields({"set": TEXT, "index": COUNT, "depth": COUNT, "note": TEXT, "sha256": TEXT})
RECORD = Fields({
    "schema": TEXT, "status": TEXT, "created": TEXT, "command": TEXT,
    "machine": Fields({"cpu": TEXT, "cpus": SOME.or_null()}),
    "versions": Fields(
        dict.fromkeys(("cudflash", "commit", "numpy", "numba", "python"), TEXT)
    ),
    "settings": Fields({
        "n_tokens": SOME, "repetitions": SOME, "stops": Rows(STOP, 1),
        "sampling": Fields({"temperature": NUMBER}), "seed": WHOLE,
    }),
    "prompts": Fields({"sha256": TEXT, "sets": Rows(ANY), "items": Rows(ITEM)}),
    "groups": Rows(GROUP), "runs": Rows(RUN), "verify_cost": Rows(COST),
    "differences": Rows(DIFFERENCE), "others_share": SHARE.or_null(),
})  # fmt: skip


def check_run(run, path):
    """Raise FormatError where the fields of one run disagree."""
    if not run["decode_tokens"] <= run["n_tokens"]:
        raise FormatError(
            f"{path}.decode_tokens is {run['decode_tokens']}, expected at most {run['n_tokens']}"
        )
    if not run["cached_tokens"] <= run["prompt_tokens"]:
        raise FormatError(
            f"{path}.cached_tokens is {run['cached_tokens']}, expected at most "
            f"{run['prompt_tokens']}, the tokens of the prompt"
        )
    if run["decode_tokens"]:
        TIMED.check(run["decode_ms"], f"{path}.decode_ms")
    if run["prompt_tokens"] > run["cached_tokens"]:
        TIMED.check(run["prompt_ms"], f"{path}.prompt_ms")
    if run["counts"] is not None:
        lengths = [len(run["counts"][name]) for name in ("proposed_at", "tested_at", "accepted_at")]
        if len(set(lengths)) > 1:
            raise FormatError(
                f"{path}.counts: proposed_at, tested_at and accepted_at have {lengths[0]}, "
                f"{lengths[1]} and {lengths[2]} positions, expected as many in each"
            )


def check_costs(costs):
    """Raise FormatError where a curve of verify costs has no pass of one row, or gaps in its turns."""
    curves = {}
    for index, cost in enumerate(costs):
        curves.setdefault((cost["group"], cost["depth"]), []).append((index, cost))
    for (group, depth), rows in curves.items():
        one = next((cost for _, cost in rows if cost["m"] == 1), None)
        if one is None:
            raise FormatError(
                f"record.verify_cost of {group} after {depth} tokens has no m of 1, expected one: "
                "the others are shown as multiples of it"
            )
        for index, cost in rows:
            if len(cost["ms"]) != len(one["ms"]):
                raise FormatError(
                    f"record.verify_cost[{index}].ms has {len(cost['ms'])} turns, expected "
                    f"{len(one['ms'])} as m of 1 has"
                )
