"""Ctrl-C: at once where that is safe, before the next kernel where it is not.

The compiler of kernels calls back into Python; an exception raised in such a call is printed and
lost. So a Ctrl-C that arrives while a kernel is compiled is kept, and raised before the next one.
Must not import the compiler: ``--help`` is quick.
"""

import signal
import threading
from contextlib import contextmanager

_COMPILER = "cudflash.ops.cpu.jit"
_state = {"kept": False, "listening": False}


class KeptInterrupt(KeyboardInterrupt):
    """A Ctrl-C that was kept until now."""


@contextmanager
def safe_interrupts(last=False):
    """Within the block Ctrl-C raises KeyboardInterrupt as usual, but never inside the compiler.

    Parameters
    ----------
    last : bool
        The process ends after the block: from then on Ctrl-C is ignored, so that one more press
        changes neither the exit code nor what stands on the terminal.
    """
    mine = threading.current_thread() is threading.main_thread()
    if not mine or signal.getsignal(signal.SIGINT) != signal.default_int_handler:
        yield  # signals belong to the main thread; one that is ignored (nohup) stays so
        return

    def handler(signum, frame):
        if not keep(frame):
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN if last else signal.default_int_handler)
        forget_kept()


@contextmanager
def held_interrupts():
    """Within the block a Ctrl-C waits; it is raised when the block has ended without an error.

    For what must not be cut in the middle, such as the one object that a program reads.
    """
    mine = threading.current_thread() is threading.main_thread()
    if not mine or not callable(signal.getsignal(signal.SIGINT)):
        yield  # nothing would be raised here
        return
    pressed = []
    previous = signal.signal(signal.SIGINT, lambda signum, frame: pressed.append(True))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
    if pressed:
        raise KeyboardInterrupt


def keep(frame=None):
    """Keep a Ctrl-C if it arrived inside the compiler, or without a frame in any case.

    Returns
    -------
    bool
        Whether it was kept.
    """
    inside = frame is None or _inside_compiler(frame)
    _state["kept"] = _state["kept"] or inside
    return inside


def raise_kept(name=None):
    """Raise a Ctrl-C that was kept; also the listener that the compiler calls before a kernel.

    Raises
    ------
    KeptInterrupt
    """
    if _state["kept"]:
        forget_kept()
        raise KeptInterrupt


def forget_kept():
    """Drop a Ctrl-C that was kept: it has had its effect."""
    _state["kept"] = False


def listen():
    """Have the compiler look for a kept Ctrl-C before each kernel."""
    from cudflash.ops import store

    if not _state["listening"]:
        _state["listening"] = True
        store.on_compile(raise_kept)


def _inside_compiler(frame):
    while frame is not None:
        if frame.f_globals.get("__name__") == _COMPILER:
            return True
        frame = frame.f_back
    return False
