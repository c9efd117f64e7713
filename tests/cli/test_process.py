"""A command as a process of its own: what it saves at its start, and how it leaves."""

import os
import subprocess
import sys

import pytest

_LEAVING = """
import atexit, sys
from cudflash.cli import process
process.begin()
atexit.register(print, "handler")
{}
"""


def leaving(lines, **how):
    """Run lines after `process.begin()`; returns the finished process."""
    command = [sys.executable, "-c", _LEAVING.format(lines)]
    return subprocess.run(command, capture_output=True, text=True, check=False, **how)


def test_exit_handlers_and_buffers_come_before_the_end():
    """Catches an exit that loses text, a handler, or the exit code."""
    done = leaving("sys.stdout.write('text'); sys.exit(process.end(7))")
    assert (done.returncode, done.stdout, done.stderr) == (7, "texthandler\n", "")


def test_nothing_is_taken_apart_after_the_last_handler():
    """Catches the teardown of the interpreter, a tenth of a short command."""
    lines = (
        "class Last:\n"
        "    def __del__(self): print('taken apart')\n"
        "last = Last(); sys.exit(process.end(0))"
    )
    assert leaving(lines).stdout == "handler\n"


def test_an_exception_on_its_way_out_is_shown():
    """Catches an exit code of 0 for a program that fell over."""
    done = leaving("raise RuntimeError('not caught')")
    assert done.returncode == 1 and "not caught" in done.stderr and done.stdout == "handler\n"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /dev/full")
def test_an_output_that_cannot_be_written_is_still_told():
    """Catches a full disk that looks like success."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with open("/dev/full", "w", encoding="utf-8") as full:
        command = [sys.executable, "-c", _LEAVING.format("sys.exit(process.end(0))")]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, env=env, check=False)
    assert done.returncode == 120 and b"No space left" in done.stderr


def test_garbage_is_collected_as_usual_once_the_model_is_loaded():
    """Catches a conversation that never collects, or a start that does all the time."""
    lines = (
        "import gc\n"
        "start = gc.get_threshold()[0]\n"
        "process.loaded()\n"
        "print(start > 20 * gc.get_threshold()[0], gc.get_threshold(), gc.get_freeze_count() > 0)\n"
        "process.loaded()\n"
        "print(gc.get_threshold())"
    )
    usual = subprocess.run(
        [sys.executable, "-c", "import gc; print(gc.get_threshold())"],
        capture_output=True, text=True, check=True,
    ).stdout.strip()  # fmt: skip
    assert leaving(lines).stdout == f"True {usual} True\n{usual}\nhandler\n"


def test_a_guest_changes_nothing_of_the_process():
    """Catches settings of the whole process made by importing the package or by `load`."""
    lines = (
        "import gc, os\n"
        "before = gc.get_threshold(), dict(os.environ)\n"
        "import cudflash, cudflash.engine, cudflash.cli.running\n"
        "cudflash.cli.running.process.loaded()\n"
        "print((gc.get_threshold(), dict(os.environ)) == before, gc.get_freeze_count())"
    )
    done = subprocess.run([sys.executable, "-c", lines], capture_output=True, text=True, check=True)
    assert done.stdout == "True 0\n"
