"""Records with the right keys and something odd in one of them: one sentence, never a traceback."""

import json
import math
from copy import deepcopy

import pytest

from cudflash.bench.record import read_record, reporting_on, validate_record
from cudflash.compare import choose_sides, compare
from cudflash.bench.report import to_csv, to_markdown
from cudflash.bench.statistics import cells
from cudflash.errors import CudflashError, FormatError
from tests.helpers.bench_records import run, simple_record

MISSING = object()
ODD = (MISSING, None, {}, [], [None], [{}], -1, 0, -1e308, 1e308, 1e-320, 10**400, math.nan, math.inf,
       True, "", "x", "\ud800")  # fmt: skip


def whole_record():
    """One of everything that a report reads."""
    made = simple_record(n=2)
    made["verify_cost"] = [
        {"group": "dflash2", "depth": 0, "m": m, "ms": [1.0 * m, 1.1 * m]} for m in (1, 2)
    ]
    made["differences"] = [{
        "group": "dflash2", "lane": "dflash2 k3", "stop": "natural", "set": "prose", "index": 0,
        "depth": 0, "repetition": 0, "against": "plain decoding", "first_difference": 1,
        "expected": 5, "found": None,
    }]  # fmt: skip
    made["others_share"] = 0.5
    return made


def places(value, at=()):
    """The path of every field and element, depth first."""
    inner = value.items() if isinstance(value, dict) else enumerate(value)
    for key, one in inner:
        yield (*at, key)
        if isinstance(one, (dict, list)):
            yield from places(one, (*at, key))


def changed(record, place, value):
    """A copy with one field replaced, or taken out."""
    made = deepcopy(record)
    inner = made
    for key in place[:-1]:
        inner = inner[key]
    if value is MISSING:
        del inner[place[-1]]
    else:
        inner[place[-1]] = value
    return made


def report(made):
    """Everything that is shown of a record that passed."""
    to_markdown(made).encode()
    to_csv(made).encode()
    json.dumps(cells(made["runs"]), allow_nan=False)
    for lane in ("plain", "dflash2 k3"):
        for other in (made, simple_record(n=2)):
            try:
                pairs = choose_sides(made, other, "a", "b", lane)
                for pair in pairs:
                    json.dumps(compare(*pair, allow_confounded=True))
            except CudflashError:  # nothing that could be compared: a sentence
                pass


PLACES = list(places(whole_record()))


@pytest.mark.parametrize("odd", ODD, ids=lambda v: "missing" if v is MISSING else repr(v)[:12])
def test_any_field_replaced_is_shown_or_refused(odd):
    """A KeyError, a TypeError or an infinite figure from a report of a record that was let in."""
    good = whole_record()
    validate_record(good)
    report(good)
    for place in PLACES:
        made = changed(good, place, odd)
        try:
            validate_record(made)
        except FormatError as err:
            assert "\n" not in str(err), place
            continue
        try:
            report(made)
        except Exception as err:
            raise AssertionError(f"{place} was let in: {type(err).__name__}: {err}") from err


@pytest.mark.parametrize(
    "place, value, words",
    [
        (("machine",), {}, "record.machine.cpu is missing"),
        (("prompts",), {}, "record.prompts.sha256 is missing"),
        (("settings",), {}, "record.settings.n_tokens is missing"),
        (("versions",), {}, "record.versions.cudflash is missing"),
        (("differences",), [None], r"record.differences\[0\] is 'None', expected an object"),
        (("runs", 0, "decode_ms"), math.nan, r"runs\[0\].decode_ms is 'nan', expected 0 or milli"),
        (("runs", 0, "decode_ms"), 0.0, r"runs\[0\].decode_ms is '0.0', expected milli"),
        (("runs", 0, "prompt_ms"), -1e308, r"runs\[0\].prompt_ms is '-1e\+308', expected 0 or"),
        (("runs", 0, "cached_tokens"), 21, r"runs\[0\].cached_tokens is 21, expected at most 20"),
        (("runs", 1, "counts", "tested_at"), [6], r"runs\[1\].counts: proposed_at, .* positions"),
        (("groups", 0, "draft", "activations"), 5, r"groups\[0\].draft.activations is '5', expected"),
        (("groups", 0, "draft", "activations"), "foo", "is 'foo', expected one of int8, int8x2"),
        (("verify_cost", 0, "m"), 3, "verify_cost of dflash2 after 0 tokens has no m of 1"),
        (("verify_cost", 1, "ms"), [1.0], r"verify_cost\[1\].ms has 1 turns, expected 2"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(tmp_path, place, value, words):
    """A refusal without the file, the field, or what was expected there."""
    path = tmp_path / "r.json"
    path.write_text(json.dumps(changed(whole_record(), place, value)))
    with pytest.raises(FormatError, match=words) as err:
        read_record(path)
    assert str(err.value).startswith(f"{path}: ") and "\n" not in str(err.value)


@pytest.mark.parametrize("value", [-1e308, 0.0, math.nan])
def test_no_speed_is_made_of_times_that_are_none(value):
    """Every time of a record replaced by the same: figures of nothing, or an AttributeError."""
    made = simple_record()
    for one in made["runs"]:
        one |= {"prompt_ms": value, "decode_ms": value}
    with pytest.raises(FormatError, match="prompt_ms|decode_ms"):
        validate_record(made)


def test_deep_nesting_is_refused(tmp_path):
    """A RecursionError of the parser."""
    path = tmp_path / "deep.json"
    path.write_text("[" * 100_000)
    with pytest.raises(FormatError, match="nested too deeply|is not JSON"):
        read_record(path)


def test_answers_without_a_second_token_stay_valid():
    """A record of an answer of one token that is refused for having no decoding time."""
    validate_record(simple_record() | {"runs": [run(n_tokens=1, decode_tokens=0, decode_ms=0.0)]})


def test_unforeseen_errors_blame_the_record():
    """An internal error for a file that the checks let through; a sentence of ours replaced."""
    half = UnicodeEncodeError("utf-8", "\ud800", 0, 1, "surrogates not allowed")
    for error in (KeyError("k"), ZeroDivisionError("a\nb"), RecursionError("deep"), half):
        with pytest.raises(FormatError, match=r"^a.json or b.json: no report") as err:
            with reporting_on("a.json", "b.json", "a.json"):
                raise error
        assert "\n" not in str(err.value)
    for error in (FormatError("said"), OSError("full"), UnicodeEncodeError("ascii", "é", 0, 1, "no")):
        with pytest.raises(type(error)), reporting_on("a.json"):
            raise error
