"""Records: what is refused when one is read, and that a file is whole or not there."""

import json

import pytest

from cudflash.bench.machine import ForeignLoad, commit, machine, versions
from cudflash.bench.prompts import Item
from cudflash.bench.record import (
    RecordFile,
    new_record,
    read_record,
    to_text,
    validate_record,
)
from cudflash.bench.runner import Settings
from cudflash.errors import FormatError, UsageError
from tests.helpers.bench_records import record, run, simple_record


def written(path, value):
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    return path


def test_round_trip(tmp_path):
    """A record that reads back as another one."""
    made = simple_record()
    path = tmp_path / "record.json"
    RecordFile(path).finish(made)
    assert read_record(path) == made and list(tmp_path.iterdir()) == [path]
    lines = path.read_text().splitlines()
    assert sum('"lane": "plain"' in line for line in lines) == 6  # a line per run


def test_new_record_is_valid_and_names_no_place():
    """A record without a machine, a version, a digest; or with a user's folders in it."""
    made = new_record("cudflash bench", Settings(), [Item("prose", 0, 0, "natural", "", (1, 2))], [])
    validate_record(made)
    assert made["status"] == "running" and made["machine"]["cpus"] >= 1
    assert {"cudflash", "commit", "numpy", "numba", "python"} == set(versions())
    assert set(machine()) == {"cpu", "cpus", "system"}
    text = to_text(made)
    assert json.loads(text) == made and "/" not in commit()


@pytest.mark.parametrize(
    "value, words",
    [
        ("{", "is not JSON"),
        ('{"status": "complete"', "is not JSON"),
        ("[]", "no key 'schema'"),
        ({}, "no key 'schema'"),
        ({"schema": "cudflash-bench/0"}, "schema is 'cudflash-bench/0', expected 'cudflash-bench/1'"),
        ({"schema": "cudflash-receipt/1"}, "the receipt of one answer"),
        (simple_record() | {"status": "fine"}, "status is 'fine'"),
        (simple_record() | {"runs": {}}, "record.runs is '{}', expected a list"),
        ({k: v for k, v in simple_record().items() if k != "machine"}, "record.machine is missing"),
        (record([run(lane="other")]), r"runs\[0\].lane is 'other'"),
        (record([run(decode_ms=True)]), r"runs\[0\].decode_ms is 'True', expected 0 or milli"),
        (record([run(n_tokens=3)]), r"runs\[0\].decode_tokens is 10, expected at most 3"),
        (record([run(counts={})]), r"runs\[0\].counts.proposed_at is missing"),
        (record([{k: v for k, v in run().items() if k != "exact"}]), r"runs\[0\].exact is missing"),
    ],
)
def test_damaged_record_is_one_sentence(tmp_path, value, words):
    """A traceback, or figures from half a file."""
    path = written(tmp_path / "r.json", value)
    with pytest.raises(FormatError, match=words) as err:
        read_record(path)
    assert str(err.value).startswith(str(path)) and "\n" not in str(err.value)


def test_counters_that_disagree_are_refused():
    """A record that was edited: more accepted than the answer has."""
    made = simple_record()
    made["runs"][1]["counts"]["accepted"] += 1
    with pytest.raises(FormatError, match=r"runs\[1\].counts: the statistics break"):
        validate_record(made)
    made = simple_record()
    made["runs"][1]["decode_tokens"] = 4
    with pytest.raises(FormatError, match=r"runs\[1\].counts.emitted is 10, expected 4"):
        validate_record(made)


def test_missing_and_binary_files(tmp_path):
    """An unreadable file that is called damaged, or that ends in a traceback."""
    with pytest.raises(UsageError, match="cannot be read"):
        read_record(tmp_path / "none")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(FormatError, match="byte 0 is not UTF-8"):
        read_record(tmp_path / "binary")


def test_place_is_tried_before_any_work(tmp_path):
    """A folder that does not exist, found out at the end; an old record that is gone."""
    with pytest.raises(UsageError, match="cannot be written"):
        RecordFile(tmp_path / "none" / "r.json")
    with pytest.raises(UsageError, match="is a directory"):
        RecordFile(tmp_path, replace=True)
    old = written(tmp_path / "old.json", "precious")
    with pytest.raises(UsageError, match="is there already"):
        RecordFile(old)
    place = RecordFile(old, replace=True)
    place.save(simple_record())
    assert old.read_text() == "precious"  # until the new one is whole
    place.finish(simple_record())
    assert read_record(old)["status"] == "complete"
    RecordFile(tmp_path / "new.json").drop()
    assert [p.name for p in tmp_path.iterdir()] == ["old.json"]


def test_share_of_others():
    """A share that is negative, above 1, or made up in no time."""
    with ForeignLoad(1) as load:
        pass
    assert load.share is None
