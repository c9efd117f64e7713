"""`cudflash bench` and `compare` as commands: files, exit codes, what is refused before any work."""

import csv
import json

import pytest

from cudflash.bench.record import read_record
from cudflash.bench.runner import Bench
from cudflash.cli import bench as bench_command
from cudflash.demo import demo_files
from tests.cli.pairs import put_directory, put_draft, put_target
from tests.helpers.bench_records import simple_record

QUICK = ("--sets", "copy", "--prompts", 2, "-n", 6, "-r", 1, "-t", 1, "--verify-trials", 1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A target with two drafts of two kinds, and one that has none."""
    folder = tmp_path_factory.mktemp("bench")
    put_target(folder)
    put_target(folder, "qwen3", "plain.gguf")
    put_draft(folder, "dflash-model.gguf")
    put_directory(folder)
    return folder


@pytest.fixture
def target(folder):
    return folder / "model.gguf"


def test_pair_is_measured_and_recorded(cli, folder, target, tmp_path):
    """A report, a record and a table that do not hold what was measured."""
    paths = {name: tmp_path / name for name in ("r.json", "r.csv", "r.svg")}
    done = cli("bench", target, folder / "dflash-model.gguf", folder / "draft", *QUICK,
               "--k", "3,7", "--stop", "both", "--record", paths["r.json"], "--csv",
               paths["r.csv"], "--plot", paths["r.svg"])  # fmt: skip
    assert done.code == 0, done.err
    text = done.out.decode()
    for words in ("dflash2 k3", "dflash2 k7", "dflash k7", "forced length", "by position",
                  "Verifying M rows at once", "| yes |"):  # fmt: skip
        assert words in text, words
    made = read_record(paths["r.json"])
    assert made["status"] == "complete" and not made["differences"]
    assert [group["name"] for group in made["groups"]] == ["dflash2", "dflash"]
    assert all(run["exact"] is True for run in made["runs"])
    assert len(made["runs"]) == 2 * 2 * 2 * 3  # prompts, stops, groups, lanes with plain
    assert made["command"].startswith("cudflash bench model.gguf dflash-model.gguf draft --sets")
    assert str(folder) not in paths["r.json"].read_text()
    assert [cost["m"] for cost in made["verify_cost"]] == list(range(1, 17))
    rows = list(csv.DictReader(paths["r.csv"].open()))
    assert len(rows) == 2 * 2 * 3 and paths["r.svg"].stat().st_size > 5000


def test_json_is_one_object_with_record_and_cells(cli, target):
    """Two objects, or an object without the runs."""
    done = cli("bench", target, "--no-draft", *QUICK, "--json")
    assert done.code == 0 and len(done.out.splitlines()) == 1
    assert done.json["schema"] == "cudflash-bench/1" and len(done.json["runs"]) == 2
    (cell,) = done.json["cells"]
    assert cell["lane"] == "plain" and cell["tps"] > 0 and cell["speedup"] is None


def test_plain_model_and_scripted_drafters(cli, folder):
    """A model without a draft that cannot be measured."""
    done = cli("bench", folder / "plain.gguf", *QUICK, "--drafters", "keep-2", "--k", 3,
               "-o", "csv", "--no-draft", "-n", 13, "--stop", "forced")  # fmt: skip
    assert done.code == 0, done.err
    rows = list(csv.DictReader(done.out.decode().splitlines()))
    assert [row["lane"] for row in rows] == ["plain", "keep-2 k3"]
    assert float(rows[1]["acceptance length"]) == 3.0


def test_draft_beside_the_model_is_found(cli, target):
    """A pair measured plain because nobody named the draft."""
    done = cli("bench", target, *QUICK, "--json", "--verify-trials", 0)
    assert {run["lane"] for run in done.json["runs"]} == {"plain", "dflash2 k7"}
    assert done.json["verify_cost"] == []


def test_depths_and_own_prompts(cli, target, tmp_path):
    """Depths that are not what was asked for; a user's file ignored, or its loop called natural."""
    path = tmp_path / "mine.txt"
    path.write_text("What a long and winding road this is\n\nla la la la la la la la la la la la\n")
    done = cli("bench", target, "--no-draft", "-f", path, "-d", "0,40", "-n", 4, "-r", 1, "-t", 1,
               "--verify-trials", 0, "--json")  # fmt: skip
    assert done.code == 0, done.err
    found = {(i["set"], i["depth"]): i["n_tokens"] for i in done.json["prompts"]["items"]}
    assert set(found) == {("own", 0), ("own", 40), ("own (synthetic)", 0), ("own (synthetic)", 40)}
    assert 38 <= found["own", 40] - found["own", 0] <= 44
    assert {c["kind"] for c in done.json["cells"] if c["set"] == "own"} == {"natural"}


def test_difference_is_exit_1(cli, target, monkeypatch):
    """A wrong answer that is counted, and an exit code of 0."""
    judge = Bench._judge

    def altered(self, run, expected, tokens):
        judge(self, run, expected, tokens if run["lane"] == "plain" else (*tokens[:2], 0))

    monkeypatch.setattr(Bench, "_judge", altered)
    done = cli("bench", target, *QUICK, "--drafters", "oracle", "--json")
    assert done.code == 1 and len(done.json["differences"]) == 2
    assert "differ" in done.sentence
    text = cli("bench", target, *QUICK, "--drafters", "oracle")
    assert text.code == 1 and b"DIFFERENT" in text.out and b"| NO |" in text.out


@pytest.mark.parametrize("after, runs", [(3, 0), (5, 2)])
def test_interrupt_keeps_what_was_recorded(cli, target, tmp_path, monkeypatch, after, runs):
    """A Ctrl-C that leaves nothing, or a record that looks whole."""
    seen = []

    def press():
        seen.append(1)
        if len(seen) > after:
            raise KeyboardInterrupt

    def run(self, group):
        monkeypatch.setattr(bench_command, "raise_kept", press)
        original(self, group)

    original = Bench.run
    monkeypatch.setattr(Bench, "run", run)
    path = tmp_path / "r.json"
    args = ("bench", target, *QUICK, "--drafters", "oracle", "--record", path)
    done = cli(*args)
    assert done.code == 130 and f"interrupted after {runs} runs" in done.sentence
    assert b"is interrupted" in done.out
    if not runs:
        assert list(tmp_path.iterdir()) == []
        return
    assert [p.name for p in tmp_path.iterdir()] == ["r.json"]
    made = read_record(path)
    assert made["status"] == "interrupted" and len(made["runs"]) == runs
    shown = cli("bench", "--from", path)
    assert shown.code == 0 and b"is interrupted" in shown.out


@pytest.mark.parametrize(
    "args, code, words",
    [
        ((), 2, "no model was given"),
        (("model.gguf", "-n", 1), 2, "at least 2"),
        (("model.gguf", "--sets", "poems"), 2, "no prompt set 'poems'"),
        (("model.gguf", "--drafters", "mtp"), 2, "has no MTP block"),
        (("model.gguf", "--k", "16"), 2, "verify length is 16"),
        (("model.gguf", "--k", "x"), 2, "no whole number"),
        (("model.gguf", "-d", "-5"), 2, "no whole number"),
        (("model.gguf", "--accept", "often"), 2, "accept is 'often'"),
        (("model.gguf", "-c", 64, "-d", 512), 7, "the context holds 64"),
        (("model.gguf", "--record", "none/r.json"), 2, "cannot be written"),
        (("model.gguf", "--csv", "none/r.csv"), 2, "cannot be written"),
        (("model.gguf", "--plot", "p.pdf"), 2, "ends in .svg or .png"),
        (("model.gguf", "-f", "none"), 2, "cannot be read"),
        (("model.gguf", "--chat"), 2, "needs a chat template"),
        (("model.gguf", "dflash-model.gguf", "dflash-model.gguf"), 2, "two drafts of kind dflash2"),
        (("model.gguf", "draft", "--no-draft"), 2, "contradict"),
        (("missing.gguf",), 3, "missing.gguf"),
        (("plain.gguf", "dflash-model.gguf"), 4, "does not belong"),
        (("--from", "none"), 2, "cannot be read"),
        (("--from", "model.gguf"), 3, "is not UTF-8"),
        (("model.gguf", "--from", "x"), 2, "pass no model"),
        (("--from", "x", "--draft-activations", "int4"), 2, "--draft-activations is about"),
        (("--from", "x", "--k", "3"), 2, "about measuring"),
        (("--from", "x", "-t", "2"), 2, "about measuring"),
    ],
)
def test_refused_before_any_work(cli, folder, monkeypatch, args, code, words):
    """A mistake that is found out after an hour of measuring, or a traceback."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(bench_command, "open_engine", lambda *a: pytest.fail("a model was loaded"))
    done = cli("bench", *args)
    assert done.code == code and words in done.sentence and done.out == b""


def test_record_is_not_overwritten(cli, target, tmp_path):
    """An hour's record gone because a name was used twice."""
    path = tmp_path / "r.json"
    path.write_text("precious")
    done = cli("bench", target, "--no-draft", *QUICK, "--record", path)
    assert done.code == 2 and "is there already" in done.sentence and path.read_text() == "precious"
    assert cli("bench", target, "--no-draft", *QUICK, "--record", path, "--force").code == 0
    assert read_record(path)["status"] == "complete"


def write(path, record):
    path.write_text(json.dumps(record))
    return path


def test_compare_shows_one_change(cli, tmp_path):
    """A table without the variable, the interval or the label."""
    other = simple_record(ms=40.0)
    other["groups"][0]["lanes"][1]["verify_length"] = 7
    a, b = write(tmp_path / "a.json", simple_record()), write(tmp_path / "b.json", other)
    done = cli("compare", a, b)
    text = done.out.decode()
    assert done.code == 0 and "differs: verify length: 3 -> 7" in text
    assert "1.250 (1.250-1.250)" in text and text.splitlines()[-1].startswith("measured")
    (found,) = cli("compare", a, b, "--json").json["comparisons"]
    assert found["label"] == "measured" and found["cells"][0]["prompts"] == 6


def test_compare_refuses_and_labels(cli, tmp_path):
    """A confounded comparison that exits with 0 and a number."""
    other = simple_record(ms=40.0)
    other["groups"][0]["lanes"][1]["verify_length"] = 7
    other["versions"]["commit"] = "def"
    a, b = write(tmp_path / "a.json", simple_record()), write(tmp_path / "b.json", other)
    done = cli("compare", a, b)
    assert done.code == 2 and "differ in 2 variables" in done.sentence and done.out == b""
    done = cli("compare", a, b, "--allow-confounded")
    assert done.code == 0 and b"CONFOUNDED" in done.out and b"cudflash: 1 abc -> 1 def" in done.out
    damaged = tmp_path / "c.json"
    damaged.write_text("{")
    assert cli("compare", a, damaged).code == 3 and cli("compare", a, tmp_path / "x").code == 2
    single = write(tmp_path / "d.json", simple_record(n=1))
    assert "no evidence" in cli("compare", single, single, "--lane", "plain").sentence


@pytest.mark.parametrize(
    "change, words",
    [
        ({"machine": {}}, "record.machine.cpu is missing"),
        ({"prompts": {}}, "record.prompts.sha256 is missing"),
        ({"settings": {}}, "record.settings.n_tokens is missing"),
        ({"versions": {}}, "record.versions.cudflash is missing"),
        ({"differences": [None]}, "record.differences[0] is 'None'"),
        ({"runs": [{**one, "decode_ms": float("nan")} for one in simple_record()["runs"]]}, "'nan'"),
        ("[" * 100_000, "nested too deeply"),
    ],
    ids=["machine", "prompts", "settings", "versions", "differences", "nan", "deep"],
)  # fmt: skip
def test_odd_records_are_one_sentence(cli, tmp_path, change, words):
    """An internal error, or figures, from a record that is none."""
    good, bad = write(tmp_path / "good.json", simple_record()), tmp_path / "bad.json"
    bad.write_text(change if isinstance(change, str) else json.dumps(simple_record() | change))
    for args in (("bench", "--from", bad), ("compare", good, bad), ("compare", bad, good)):
        done = cli(*args)
        assert done.code == 3 and done.out == b""
        assert words in done.sentence and str(bad) in done.sentence


def test_record_that_no_report_can_be_made_of(cli, tmp_path, monkeypatch):
    """An internal error where the checks have let something through."""
    path = write(tmp_path / "r.json", simple_record())
    monkeypatch.setattr("cudflash.bench.report.to_markdown", lambda made: made["nothing"])
    done = cli("bench", "--from", path)
    assert done.code == 3 and f"{path}: no report can be made" in done.sentence
    monkeypatch.setattr("cudflash.compare.choose_sides", lambda *args: None + 1)
    done = cli("compare", path, path)
    assert done.code == 3 and f"{path}: no report can be made" in done.sentence


def test_compare_of_lanes_in_one_file(cli, tmp_path):
    """Two files demanded where one record holds both lanes."""
    a = write(tmp_path / "a.json", simple_record())
    done = cli("compare", a, a, "--lane", "plain", "--lane-b", "dflash2 k3")
    assert done.code == 0 and b"2.000 (2.000-2.000)" in done.out


def test_auto_is_a_lane_beside_on(cli, target):
    """A comparison of always drafting with drafting while it pays that needs two runs."""
    done = cli("bench", target, *QUICK, "--speculative", "on,auto", "--json", "--verify-trials", 0)
    assert done.code == 0, done.err
    assert {c["lane"] for c in done.json["cells"]} == {"plain", "dflash2 k7", "dflash2 k7 auto"}


def test_embedded_pair_has_both_drafts(cli, monkeypatch):
    """A word that is taken for a file, or a pair of which one draft is measured."""
    seen = []

    def stop(output, model, arguments):
        seen.append((model, arguments))
        raise KeyboardInterrupt

    monkeypatch.setattr(bench_command, "open_engine", stop)
    done = cli("bench", "demo", *QUICK)
    assert done.code == 130 and "interrupted after 0 runs" in done.sentence
    (model, arguments), = seen
    assert model == demo_files()[0] and "dflash-" in arguments["draft"]
    assert cli("bench", "demo", "demo:dflash2", *QUICK, "--drafters", "dflash").code == 2
