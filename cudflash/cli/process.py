"""What a process that is nothing but one command saves at its start and at its end.

A start makes a hundred thousand objects that stay, so looking for garbage among them finds none;
NumPy's BLAS starts threads that spin for a while, and nothing here multiplies with it; taking the
interpreter apart at the end frees what the system frees anyway. Must not be used where cudflash is
a guest: all three are settings of the whole process.
"""

import atexit
import gc
import os
import sys

_START_OBJECTS = 200_000  # more than a start makes; the interpreter would look every 700
_usual = []  # thresholds of the garbage collection before ``begin``
_exit_code = []


def begin():
    """Call once, before NumPy is imported."""
    _usual[:] = gc.get_threshold()
    gc.set_threshold(_START_OBJECTS, *_usual[1:])
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    atexit.register(_leave)  # the first one registered is the last one called


def loaded():
    """Collect garbage as usual again, but not among what the start has made."""
    if _usual:
        gc.freeze()
        gc.set_threshold(*_usual)
        _usual.clear()


def end(code):
    """Leave with this exit code as soon as every exit handler has run."""
    _exit_code[:] = [code]
    return code


def _leave():
    if not _exit_code:  # an exception is on its way to the user
        return
    try:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
    except (OSError, ValueError):
        return  # the interpreter reports it, and exits with its code
    os._exit(_exit_code[0])
