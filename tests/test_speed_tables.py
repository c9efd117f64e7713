"""`scripts/speed_tables.py`: tables in documents are those of the committed records."""

import json

import pytest

from scripts.speed_tables import BLOCK, DOCUMENTS, ROOT, VIEWS, BlockError, fill, take
from tests.helpers.bench_records import record, run, simple_record

PLAIN = {"name": "plain", "drafter": "plain", "verify_length": None, "accept": None,
         "scripted": False, "mode": None}  # fmt: skip


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_table_is_what_its_record_says(name):
    """A figure that was typed, or a table of last month's record."""
    text = (ROOT / name).read_text(encoding="utf-8")
    assert BLOCK.search(text), "there is no table"
    assert fill(text) == text, "run python scripts/speed_tables.py"


def document(view, record="r.json", body="old\n"):
    return f"before\n<!-- table {view} {record} -->\n{body}<!-- end -->\nafter\n"


VIEWS_OF_BENCH = ("bench", "bench-brief", "bench-depth", "bench-positions", "bench-verify")


@pytest.mark.parametrize("view", VIEWS_OF_BENCH)
def test_block_is_replaced_and_stays(tmp_path, view):
    """Old rows that stay beside the new ones, or a second run that changes the first's result."""
    (tmp_path / "r.json").write_text(json.dumps(simple_record()))
    once = fill(document(view), tmp_path)
    assert "old" not in once and once.startswith("before\n<!-- table") and once.endswith("after\n")
    assert fill(once, tmp_path) == once
    if view == "bench-brief":
        assert "| prose | 2.00 (2.00–2.00); 2.50 |" in once


def test_depth_table_has_a_row_per_drafted_number(tmp_path):
    """A curve in which another lane's figures stand at a k, or without the k where it loses."""
    lanes = [{"name": f"mtp k{k}", "drafter": "mtp", "verify_length": k, "accept": "match",
              "scripted": False, "mode": "on"} for k in (1, 2, 3)]  # fmt: skip
    runs = [run(prompt=p) for p in range(2)]
    for lane, ms, blocks in zip(lanes, (50.0, 40.0, 80.0), ([1, 0], [2, 0, 1], [3, 1])):
        runs += [run(lane["name"], p, ms=ms, blocks=blocks) for p in range(2)]
    text = VIEWS["bench-depth"](record(runs, [PLAIN, *lanes]))
    rows = [line for line in text.splitlines() if line.startswith("| prose | mtp |")]
    assert [row.split(" | ")[2] for row in rows] == ["1", "2", "3"]
    assert "| 3 | 3.00 | 66.7 % |" in rows[2]
    assert "mtp is fastest at k = 2" in text and "from k = 3 on it loses" in text


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


FACTS = {"commit": "abc", "cpu": "a processor", "cpus": 2, "numpy": "2", "numba": "0",
         "python": "3"}  # fmt: skip


def test_rollback_table_counts_what_a_way_costs_over_plain():
    """A cost over the wrong yardstick: (30 - 20) of a round of 80 + 20 us is a tenth."""
    figures = {"ops_us": {"products/1": [50.0], "products/8": [80.0], "delta/1": [5.0],
                          "delta/8": [20.0]},
               "rounds_us": {"plain/8": [20.0], "tape/4": [30.0]}}  # fmt: skip
    text = VIEWS["rollback"]({**FACTS, "threads": 1, "shapes": {"tiny": figures}})
    assert "| tape | 4 | 30 (30–30) | 10.0 (10.0–10.0) |" in text
    assert "| delta | 5 (5–5) | 10.0 (10.0–10.0) | 20 (20–20) | 25.0 (25.0–25.0) |" in text


def test_drafted_peer_table_pairs_the_programs():
    """A ratio of one prompt's speed to another's."""
    row = {"draft": "dflash", "prompt": "docs 0", "tokens": 9, "drafted": 20, "accepted": 6,
           "tokens_per_pass": 3.0, "same_characters": 4, "characters": 5}  # fmt: skip
    options = {"verify_length": 7, "threads": 2, "tokens": 9, "repeats": 3}
    rows = [{**row, "program": "cudflash", "tps": 30.0}, {**row, "program": "llama.cpp", "tps": 20.0}]
    text = VIEWS["drafted-peer"]({**FACTS, "options": options, "rows": rows})
    assert "cudflash to llama.cpp: 1.50 (1.50–1.50) over 1 prompts" in text
    text = VIEWS["drafted-peer"]({**FACTS, "options": options, "rows": rows[:1]})
    assert "Absent: llama.cpp." in text


def test_cpu_table_of_first_tokens_only():
    """A record without verify costs that no table can be made of."""
    measure = {"name": "command to first token", "unit": "s", "ours": [0.4], "peer": [0.3],
               "foreign": [0.0]}  # fmt: skip
    model = {"model": "m.gguf", "measures": [measure], "verify_seconds": {}}
    text = VIEWS["cpu"]({**FACTS, "threads": 2, "models": [model]})
    assert "0.75 (0.75–0.75)" in text and "rows M" not in text


def test_economy_table_names_the_first_answer():
    """A first answer, which pays for the preparations, mixed with later ones."""
    ratios = {"wall_ms": [1.02, 1.04], "cpu_ms": [1.0, 1.0], "decode_ms": [1.01, 1.01]}
    rows = [{"draft": "dflash", "threads": 2, "kind": "first", "ratios": ratios, "plain_ms": 150.4}]
    text = VIEWS["economy"]({**FACTS, "load": [[0.5, 1, 1], [0.6, 1, 1]], "tokens": 1000, "rows": rows})
    assert "| dflash | 2 | first | 2 | 150 | 1.030 (1.020–1.040) | 1.000" in text
    assert "Load before and after: 0.5, 0.6." in text
