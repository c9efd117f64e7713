"""`scripts/speed_tables.py`: tables in documents are those of the committed records."""

import json

import pytest

from scripts.speed_tables import BLOCK, DOCUMENTS, ROOT, VIEWS, BlockError, fill, take
from tests.helpers.bench_records import simple_record


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_table_is_what_its_record_says(name):
    """A figure that was typed, or a table of last month's record."""
    text = (ROOT / name).read_text(encoding="utf-8")
    assert BLOCK.search(text), "there is no table"
    assert fill(text) == text, "run python scripts/speed_tables.py"


def document(view, record="r.json", body="old\n"):
    return f"before\n<!-- table {view} {record} -->\n{body}<!-- end -->\nafter\n"


@pytest.mark.parametrize("view", ["bench", "bench-brief", "bench-positions", "bench-verify"])
def test_block_is_replaced_and_stays(tmp_path, view):
    """Old rows that stay beside the new ones, or a second run that changes the first's result."""
    (tmp_path / "r.json").write_text(json.dumps(simple_record()))
    once = fill(document(view), tmp_path)
    assert "old" not in once and once.startswith("before\n<!-- table") and once.endswith("after\n")
    assert fill(once, tmp_path) == once
    if view == "bench-brief":
        assert "| prose | 2.00 (2.00–2.00); 2.50 |" in once


def test_peer_table_tells_who_is_absent(tmp_path):
    """A missing peer that looks like a peer of equal speed."""
    facts = {"commit": "abc", "cpu": "a processor", "cpus": 2, "numpy": "2", "numba": "0",
             "python": "3"}  # fmt: skip
    rows = [{"name": "plain", "model": "m.gguf", "ours": [10.0, 12.0, 11.0], "peer": []},
            {"name": "drafted", "model": "m.gguf", "ours": [30.0], "peer": [20.0]}]  # fmt: skip
    record = {**facts, "rows": rows, "absent": ["llama-speculative-simple was not given"],
              "others_shares": [0.5, 0.1]}  # fmt: skip
    text = VIEWS["peer"](record)
    assert "| plain | m.gguf | 11.0 (10.0–12.0) | absent | – |" in text
    assert "1.50 (1.50–1.50)" in text and "Absent: llama-speculative-simple was not given." in text
    assert "used 30.0 % of the machine (median), 50.0 % at most" in text


@pytest.mark.parametrize(
    "text, words",
    [
        (document("odd"), "no view 'odd'"),
        (document("bench", "none.json"), "none.json"),
        (document("cpu"), "no table cpu can be made"),
        ("<!-- table bench r.json -->\n", "no end"),
        ("<!-- table -->\n<!-- end -->\n", "no end"),
    ],
)
def test_wrong_block_is_one_sentence(tmp_path, text, words):
    """A block that is silently left as it was."""
    (tmp_path / "r.json").write_text(json.dumps(simple_record()))
    with pytest.raises(BlockError, match=words):
        fill(text, tmp_path)


def test_record_is_cut_out_of_an_output(tmp_path):
    """A record that was copied by hand."""
    take(["# table", '{"a": 1}', '{"b": [1, 2]}'], tmp_path / "r.json")
    assert json.loads((tmp_path / "r.json").read_text()) == {"b": [1, 2]}
    with pytest.raises(BlockError, match="no JSON line"):
        take(["nothing"], tmp_path / "s.json")
