"""`make device-check` on the emulated card: every part runs, and a wrong bit would be seen."""

import json
import subprocess
import sys

import numpy as np
import pytest

from cudflash.ops import cpu
from scripts import device_check
from scripts.device import parts
from scripts.device.shapes import TINY
from scripts.device.twins import compare
from tests.emulation.cuda import emulated_ops
from tests.emulation.host_module import unavailable

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))


def test_every_part_runs_and_the_report_can_be_resumed(tmp_path):
    """A script that fails in its first minute on a card that was lent for fifteen."""
    ops, _ = emulated_ops()
    path, said = tmp_path / "report.json", []

    def save(report):
        path.write_text(json.dumps(report))

    device_check.run(ops, cpu, TINY, {}, only=("twins", "products"), few=True, save=save,
                     say=said.append)
    report = json.loads(path.read_text())
    assert list(report["parts"]) == ["twins", "products"]
    device_check.run(ops, cpu, TINY, report, few=True, save=save, say=said.append)
    report = json.loads(path.read_text())
    assert set(report["parts"]) == set(device_check.parts())
    assert sum("twins" in line for line in said) == 1
    for name, part in report["parts"].items():
        assert part["faults"] == [] and part["rows"], name
        assert not any("skipped" in row for row in part["rows"]), part["rows"]
    text = device_check.table(report)
    assert "emulated device" in text and "copy bandwidth" in text and "target" in text


def test_wrong_bit_is_a_fault(monkeypatch):
    """A check that cannot fail."""
    ops, _ = emulated_ops()
    right = type(ops).download

    def wrong(self, buffer):
        out = right(self, buffer)
        if out.dtype == np.float32 and out.size:
            out.reshape(-1).view(np.uint32)[0] ^= 1
        return out

    monkeypatch.setattr(type(ops), "download", wrong)
    assert not all(row["equal"] for row in compare(ops, cpu, few=True))
    found = parts.independence(ops, cpu, TINY)
    assert any("CPU" in fault for fault in found["faults"])


def test_part_that_breaks_does_not_cost_the_others(monkeypatch):
    """One exception after which a lent card has measured nothing."""
    def broken(*args):
        raise RuntimeError("no luck")

    monkeypatch.setattr(device_check, "parts", lambda: {"a": broken, "b": parts.twins})
    ops, _ = emulated_ops()
    report = device_check.run(ops, cpu, TINY, {}, few=True, say=lambda text: None)
    assert "no luck" in report["parts"]["a"]["faults"][0] and report["parts"]["b"]["rows"]


def test_parts_after_the_time_limit_are_left_out():
    """A run that is cut off in the middle of its last part and leaves no report."""
    ops, _ = emulated_ops()
    times = iter([0.0] + [1e6] * 100)
    report = device_check.run(ops, cpu, TINY, {}, few=True, clock=lambda: next(times),
                              say=lambda text: None)
    assert report["parts"] == {}


def test_machine_without_a_card_is_told_so(capsys):
    """A traceback where a sentence would do."""
    code = device_check.main(["--only", "twins"])
    assert code in (0, 6)
    if code == 6:
        assert capsys.readouterr().err.count("cudflash doctor") == 1


def test_checkout_that_is_not_installed_is_enough():
    """A machine without a network, where nothing can be installed: the script ends at its imports."""
    root = device_check.ROOT
    code = (
        "import sys\n"
        "sys.meta_path[:] = [f for f in sys.meta_path if 'ditable' not in repr(f)]\n"
        "from scripts.device_check import parts, use_checkout; use_checkout()\n"
        "from cudflash.ops.cuda.source import spliced; assert 'rope(' in spliced('rope')\n"
        "import cudflash.loader.gguf as found; print(found.__file__, *parts())")
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True,
                          text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.startswith(str(root / "loader")) and "whole" in done.stdout
