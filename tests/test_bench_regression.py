"""`scripts/bench_regression.py` on made runs: what is called slower, and what is not judged."""

import json

import pytest

from scripts import bench_regression
from scripts.bench_regression import BASELINE, load, main, reduced
from tests.test_project_rules import ROOT

MACHINE = {"cpu": "a processor", "cpus": 2, "kernel_path": "avx2", "numpy": "2", "threads": 1,
           "commit": "abc"}  # fmt: skip


def made(path, ratios, **changes):
    """A pytest-benchmark file; ``ratios`` is name -> (ratio, ratio_low)."""
    stats = {key: 1.0 for key in bench_regression.KEPT_STATS} | {"data": [1.0] * 5}
    run = {
        "machine_info": MACHINE | changes, "version": "5", "datetime": "2026", "commit_info": {},
        "benchmarks": [
            {"name": name, "stats": stats, "extra_info": {"ratio": ratio, "ratio_low": low}}
            for name, (ratio, low) in ratios.items()
        ],
    }  # fmt: skip
    path.write_text(json.dumps(run))
    return path


@pytest.fixture
def judged(tmp_path, capsys):
    """``judged(old, new, **changes)``: exit code and what was printed."""

    def run(old, new, *args, **changes):
        paths = made(tmp_path / "old.json", old), made(tmp_path / "new.json", new, **changes)
        code = main([str(paths[1]), "--baseline", str(paths[0]), *args])
        return code, capsys.readouterr()

    return run


@pytest.mark.parametrize(
    "new, code, word",
    [((1.0, 1.0), 0, "same"), ((1.29, 1.4), 0, "same"), ((1.4, 1.29), 0, "same"),
     ((1.31, 1.31), 1, "SLOWER"), ((9.0, 1.1), 0, "same"), ((0.7, 0.7), 0, "faster"),
     ((0.7, 0.9), 0, "same")],
)  # fmt: skip
def test_slower_is_what_both_ratios_say(judged, new, code, word):
    """An alarm because another program ran for a moment; a real regression that passes."""
    got, printed = judged({"verify[8]": (1.0, 1.0)}, {"verify[8]": new})
    assert got == code and f"| {word} |" in printed.out
    assert ("verify[8] is slower than the baseline" in printed.out) == (code == 1)


def test_a_slower_machine_is_no_regression(tmp_path):
    """Times compared as they are: the ratio to the loop is what counts, whatever the seconds."""
    path = made(tmp_path / "r.json", {"a": (2.0, 2.1)})
    run = json.loads(path.read_text())
    run["benchmarks"][0]["stats"]["median"] *= 10
    path.write_text(json.dumps(run))
    assert load(path)[1] == {"a": (2.0, 2.1)}


@pytest.mark.parametrize("change", [{"cpu": "b"}, {"kernel_path": "generic"}, {"numpy": "3"}])
def test_another_machine_is_not_judged(judged, change):
    """A false alarm on every machine but one."""
    code, printed = judged({"a": (1.0, 1.0)}, {"a": (5.0, 5.0)}, **change)
    (key, value), = change.items()
    assert code == 0 and "not judged" in printed.out and f"{key} is {value}" in printed.out
    assert "5.00" in printed.out


def test_another_commit_is_judged(judged):
    """A baseline that only its own commit can be compared with."""
    assert judged({"a": (1.0, 1.0)}, {"a": (5.0, 5.0)}, commit="def")[0] == 1


def test_new_and_missing_benchmarks_are_named(judged):
    """A benchmark that vanished together with its slowness."""
    code, printed = judged({"a": (1.0, 1.0), "gone": (1.0, 1.0)}, {"a": (1.0, 1.0), "b": (1, 1)})
    assert code == 0 and "| gone | – | – | missing |" in printed.out and "| b | – | – | new |" in (
        printed.out
    )


def test_bound_is_stated_and_can_be_set(judged):
    """A bound that nobody sees."""
    code, printed = judged({"a": (1.0, 1.0)}, {"a": (1.2, 1.2)}, "--bound", "1.1")
    assert code == 1 and "by more than 1.1 times" in printed.out


def test_saved_baseline_is_small_and_reads_back(tmp_path, capsys):
    """A baseline with thousands of times, or one that cannot be compared with."""
    run, kept = made(tmp_path / "r.json", {"a": (2.0, 2.1)}), tmp_path / "baseline.json"
    assert main([str(run), "--baseline", str(kept), "--save"]) == 0
    assert load(kept) == load(run) and "data" not in kept.read_text()
    assert main([str(run), "--baseline", str(kept)]) == 0
    assert reduced(json.loads(run.read_text())) == json.loads(kept.read_text())


@pytest.mark.parametrize(
    "text, words",
    [("{", "is no run"), ("[]", "is no run"), ("{}", "has no 'machine_info'"),
     (json.dumps({"machine_info": MACHINE, "benchmarks": []}), "no ratios above 0"),
     (json.dumps({"machine_info": MACHINE, "benchmarks": [{"name": "a", "extra_info": {}}]}),
      "has no 'ratio'")],
)  # fmt: skip
def test_damaged_run_is_one_sentence(tmp_path, capsys, text, words):
    """A traceback, or a run without figures that is called fine."""
    path = tmp_path / "r.json"
    path.write_text(text)
    assert main([str(path)]) == 2 and words in capsys.readouterr().err
    assert main([str(tmp_path / "none")]) == 2 and "make bench" in capsys.readouterr().err


def test_committed_baseline_has_every_shape_of_the_table():
    """A baseline of other benchmarks than those that run."""
    if not BASELINE.exists():
        pytest.skip("no baseline has been kept yet")
    names = load(BASELINE)[1]
    text = (ROOT / "tests/benchmarks/bench_kernels.py").read_text()
    shapes = [line.split('"')[1] for line in text.splitlines() if line.startswith('    ("')]
    assert len(shapes) == 11
    assert all(f"bench_product[{shape}-M16]" in names for shape in shapes)
