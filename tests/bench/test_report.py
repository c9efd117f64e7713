"""Markdown, CSV, JSON and pictures of a record agree and hide nothing."""

import csv
import io
import re

import pytest

from cudflash.bench import plot
from cudflash.bench.report import COLUMNS, rows, shown_cells, to_csv, to_markdown
from cudflash.bench.statistics import cells
from cudflash.errors import UsageError
from tests.helpers.bench_records import record, run, simple_record


def costs(depth=0):
    return [{"group": "dflash2", "depth": depth, "m": m, "ms": [1.0 + m, 1.0 + m]}
            for m in range(1, 17)]  # fmt: skip


def full_record():
    """Two sets, two depths, a synthetic set, a verify curve."""
    runs = []
    for depth in (0, 512):
        for name, kind in (("prose", "natural"), ("code", "natural"), ("periodic", "synthetic")):
            for prompt in range(6):
                where = {"set": name, "kind": kind, "depth": depth}
                runs.append(run(prompt=prompt, **where))
                ms = 40.0 + prompt + depth / 16
                runs.append(run("dflash2 k3", prompt, ms=ms, blocks=[3, 1, 2, 0], **where))
    return record(runs, verify_cost=costs())


def test_csv_json_and_table_agree():
    """Three reports of one record with three numbers."""
    made = full_record()
    table = list(csv.DictReader(io.StringIO(to_csv(made))))
    assert tuple(table[0]) == COLUMNS and len(table) == len(cells(made["runs"])) == 12
    text = to_markdown(made)
    for row, cell, line in zip(rows(made), cells(made["runs"]), table):
        assert (line["set"], line["lane"]) == (cell["set"], cell["lane"])
        assert float(line["t/s"]) == cell["tps"] == row["t/s"]
        if cell["speedup"] is not None:
            assert float(line["speed-up"]) == cell["speedup"]
            assert float(line["acceptance length"]) == cell["acceptance"]["length"]
            assert float(line["verify ms"]) == 3.0
        assert "| " + " | ".join(shown_cells(row)) + " |" in text
        assert re.search(f"{cell['tps']:.1f}", text)


def test_synthetic_text_stands_apart_and_no_number_is_over_all_sets():
    """A headline made of periodic text, or of everything at once."""
    text = to_markdown(full_record())
    natural, synthetic = text.split("#### Synthetic text")
    assert "periodic" not in natural and "not a result" in synthetic
    assert "prose, tg64" in natural and "from " in natural and " to " in natural
    assert "| all " not in text and "mean" not in text.lower()


def test_what_a_reader_must_know_is_in_the_notes():
    """A partial record, a difference, a loop, a dead draft, an answer of one token: unsaid."""
    runs = [run(loops=True), run("dflash2 k3", blocks=[0, 0], loops=True, exact=False),
            run(prompt=1, n_tokens=1, decode_tokens=0, decode_ms=0.0),
            run("dflash2 k3", 1, blocks=[0], loops=True, fault="the drafter broke")]  # fmt: skip
    difference = {"group": "dflash2", "lane": "dflash2 k3", "stop": "natural", "set": "prose",
                  "index": 0, "depth": 0, "repetition": 0, "against": "plain decoding",
                  "first_difference": 3, "expected": 7, "found": 8}  # fmt: skip
    made = record(runs, status="interrupted", differences=[difference], others_share=0.31)
    text = to_markdown(made)
    for words in ("is interrupted", "not one proposal was accepted", "end in a loop",
                  "fewer than two tokens", "the drafter broke", "DIFFERENT: prose 0",
                  "token 3 is 8, plain decoding has 7", "31.0 % of the machine", "| NO |"):  # fmt: skip
        assert words in text, words


def test_everything_in_effect_is_in_the_head():
    """A figure that does not say which files, window, taps and block it belongs to."""
    head = to_markdown(simple_record()).split("####")[0]
    for words in ("target.gguf", "a" * 12, "draft.gguf", "dflash2", "block 8", "taps [0, 1]",
                  "window 64 (file)", "sink 64", "int8x2", "KV f16", "2 CPUs"):  # fmt: skip
        assert words in head, words


def test_plain_record_has_no_draft_columns_filled():
    """Zeros where nothing was drafted."""
    made = record([run(), run(prompt=1)], draft=None)
    (row,) = rows(made)
    assert row["acceptance length"] is row["speed-up"] is row["draft ms"] is None
    text = to_markdown(made)
    assert "by position" not in text and "Time per round" not in text


def test_empty_record_is_shown():
    """A Ctrl-C before the first run that ends in a traceback."""
    assert "interrupted" in to_markdown(record([], status="interrupted"))


@pytest.mark.parametrize("suffix", ["svg", "png"])
def test_pictures(tmp_path, suffix):
    """A picture of nothing, or one that shows synthetic text."""
    pytest.importorskip("matplotlib")
    path = tmp_path / f"p.{suffix}"
    plot.plot(full_record(), path)
    data = path.read_bytes()
    assert len(data) > 5000
    if suffix == "svg":
        again = tmp_path / "again.svg"
        plot.plot(full_record(), again)
        assert again.read_bytes() == data
    plot.plot(simple_record(), path)  # one depth: bars
    plot.plot(record([run()], draft=None), path)  # nothing drafted


def test_missing_matplotlib_is_one_sentence(monkeypatch):
    """An ImportError after the measurement."""
    monkeypatch.setattr(plot.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"pip install 'cudflash\[plot\]'"):
        plot.require_matplotlib()
