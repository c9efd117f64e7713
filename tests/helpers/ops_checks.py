"""Checks every op must pass, so that an op's own test is a few lines.

Comparisons of exact things are on integer views: -0 and 0 differ, and a NaN equals itself.
"""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np

from cudflash.ops import cpu as ops
from cudflash.ops.cpu import program

ROOT = Path(__file__).resolve().parents[2]
ROW_COUNTS = (1, 2, 3, 7, 8, 16, 33)
THREAD_COUNTS = (1, 2)


def poisoned(shape, dtype=np.float32):
    """Output buffer filled with NaNs, or with -77 for integers: an unwritten element shows."""
    out = ops.empty(shape, dtype)
    out.fill(np.nan if np.issubdtype(dtype, np.floating) else -77)
    return out


def assert_same_bits(found, expected):
    """Equality of all bits, with the first difference in the message."""
    found, expected = np.ascontiguousarray(found), np.ascontiguousarray(expected)
    assert found.shape == expected.shape, f"shape {found.shape} instead of {expected.shape}"
    assert found.dtype == expected.dtype, f"dtype {found.dtype} instead of {expected.dtype}"
    width = f"i{found.dtype.itemsize}"
    differ = found.view(width) != expected.view(width)
    if differ.any():
        where = tuple(np.argwhere(differ)[0])
        raise AssertionError(
            f"{differ.sum()} of {differ.size} values differ, first at {where}: "
            f"{found[where]!r} instead of {expected[where]!r}")


def assert_close(found, expected, bound):
    """|found - expected| <= bound everywhere; expected and bound in float64."""
    error = np.abs(np.asarray(found, np.float64) - expected)
    excess = error - bound
    where = np.unravel_index(np.nanargmax(excess), excess.shape)
    times = error[where] / np.broadcast_to(bound, error.shape)[where]
    assert np.isfinite(error).all() and (excess <= 0).all(), (
        f"error {error[where]:.3g} at {where} is {times:.3g} "
        f"times the bound; found {np.asarray(found)[where]!r}, expected {expected[where]!r}")


def check_row_independence(run):
    """Every row of an M-row call has the bits of the 1-row call, for all M and thread counts.

    Parameters
    ----------
    run : callable
        ``run(rows)`` evaluates a slice of the test's 33 rows into a poisoned output and returns it.

    Returns
    -------
    ndarray
        The rows, evaluated one by one.
    """
    n_rows = max(ROW_COUNTS)
    before, serial = ops.threads(), program._SERIAL_BYTES
    try:
        program._SERIAL_BYTES = -1  # share out even the smallest launch
        ops.set_threads(1)
        single = np.concatenate([run(slice(r, r + 1)) for r in range(n_rows)])
        for n_threads in THREAD_COUNTS:
            ops.set_threads(n_threads)
            for m in ROW_COUNTS:
                for start in {0, n_rows - m}:
                    assert_same_bits(run(slice(start, start + m)), single[start:start + m])
    finally:
        ops.set_threads(before)
        program._SERIAL_BYTES = serial
    return single


def check_writes_only(call, shape, dtype=np.float32):
    """``call(out)`` fills a strided view and nothing around it; returns what it wrote.

    The view lies inside a larger buffer, with a guard before, after, and between the rows.
    """
    width = int(np.prod(shape[1:], dtype=int))
    guarded = ops.empty((shape[0] + 2, width + 24), dtype)
    guarded.fill(7)
    out = guarded[1:-1, 8:8 + width]
    call(np.lib.stride_tricks.as_strided(
        out, shape, (guarded.strides[0], *np.empty(shape[1:], dtype).strides)))
    assert (guarded[[0, -1]] == 7).all(), "wrote before the first or after the last row"
    assert (guarded[:, :8] == 7).all() and (guarded[:, 8 + width:] == 7).all(), (
        "wrote between the rows")
    return out.reshape(shape)


def replay(call):
    """Record ``call()`` into a graph and launch it twice: ops must work without Python."""
    with ops.capture() as graph:
        call()
    graph.launch()
    graph.launch()


def digest(*arrays):
    """SHA-256 over the bytes of arrays."""
    total = hashlib.sha256()
    for array in arrays:
        total.update(np.ascontiguousarray(array).tobytes())
    return total.hexdigest()


_NARROW = """
import llvmlite.binding as llvm
features = llvm.get_host_cpu_features()
for name in features:
    if name.startswith({prefixes!r}):
        features[name] = False
llvm.get_host_cpu_features = lambda: features
llvm.get_host_cpu_name = lambda: "x86-64"
"""


def digest_in_subprocess(function, *, isa=None, without_features=()):
    """Result of ``module:function`` (no arguments, returns str) in a fresh process.

    Parameters
    ----------
    isa : str, optional
        CUDFLASH_CPU_ISA of that process.
    without_features : tuple of str
        Prefixes of processor features to compile without: ("avx512",) splits every vector in two.
    """
    module, name = function.split(":")
    code = _NARROW.format(prefixes=tuple(without_features)) if without_features else ""
    code += f"from {module} import {name}\nprint({name}())\n"
    env = dict(os.environ)
    if isa is not None:
        env["CUDFLASH_CPU_ISA"] = isa
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True,
                          text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()
