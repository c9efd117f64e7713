"""Gated delta net: convolution, gates, recurrence and state; the contract is ``ops.cpu.recurrent``'s.

Kernels: ``recurrent_open.cu``, ``short_conv.cu``, ``delta_gates.cu``, ``delta_rule.cu``.
Letters: M rows, T taps, C channels of the convolution, Hk key heads, Hv value heads, Dk and Dv
their dimensions, B the rows of the largest small block, n slots.
"""

import numpy as np

from cudflash.errors import UsageError
from cudflash.ops.cuda.checks import check_contiguous, check_rows, check_shape
from cudflash.ops.cuda.launch import Long

PLAN_WORDS, CONTROL_WORDS = 8, 8  # PlanWord and ControlWord in common/recurrent.cuh
_MAX_TAPS = 16
_MAX_HEAD_DIM = 256
_MAX_BLOCK = 32
_CHANNELS, _GATES, _COLUMNS = 128, 64, 16  # of a block of threads


def recurrent_open(self, plan, control, at, n_rows, block_rows, source=-1, target=-1):
    """Decide where a pass reads and writes the recurrent state; as ``ops.cpu.recurrent_open``.

    Parameters
    ----------
    plan : array of shape (8,), int32
        Overwritten.
    control : array of shape (8 + n,), int32
        Updated.
    at : array, int32
        ``at[0]`` is the position of the pass's first row.
    n_rows, block_rows : int
    source, target : int
    """
    op = "recurrent_open"
    for name, array in (("plan", plan), ("control", control), ("at", at)):
        check_rows(op, name, array, np.int32)
    check_shape(op, "plan", plan, (PLAN_WORDS,))
    n_slots = len(control) - CONTROL_WORDS
    if n_slots < 2:
        raise UsageError(f"{op}: control has {len(control)} words, expected at least 10")
    if n_rows < 0 or block_rows < 1:
        raise UsageError(f"{op}: {n_rows} rows in blocks of {block_rows}, expected 0 and 1 at least")
    if not (-1 <= source < n_slots and -1 <= target < n_slots) or (n_rows == 0) != (target >= 0):
        raise UsageError(f"{op}: {n_rows} rows from slot {source} into slot {target} of {n_slots}; "
                         "a pass without rows names its target, another one does not")
    self.start("recurrent_open", (), "recurrent_open", (1,), (1,),
               (plan, control, at, n_rows, block_rows, source, target))


def short_conv(self, out, x, weight, history, tape, plan):
    """Causal depthwise convolution over the rows, then SiLU; as ``ops.cpu.short_conv``.

    Parameters
    ----------
    out, x : array of shape (M, C), float32
        Different memory; M is the number of rows that the plan was made for.
    weight : array of shape (T, C), float32
        Tap 0 belongs to the oldest row.
    history : array of shape (n, T - 1, C), float32
    tape : array of shape (B, C), float32
    plan : array of shape (8,), int32
    """
    op = "short_conv"
    for name, array in (("out", out), ("x", x)):
        check_rows(op, name, array)
    n_rows, width = out.shape
    check_shape(op, "x", x, out.shape)
    n_taps = len(weight)
    check_shape(op, "weight", weight, (n_taps, width))
    check_contiguous(op, "weight", weight)
    _check_conv(op, history, tape, plan, n_taps, width)
    if n_rows == 0:
        return
    _convolve(self, out, x, weight, history, tape, plan)


def _check_conv(op, history, tape, plan, n_taps, width):
    check_shape(op, "history", history, (len(history), n_taps - 1, width))
    check_shape(op, "tape", tape, (len(tape), width))
    if width % 16 or not 2 <= n_taps <= _MAX_TAPS:
        raise UsageError(f"{op}: {width} channels and {n_taps} taps, expected a multiple of 16 "
                         f"and 2 to {_MAX_TAPS}")
    for name, array in (("history", history), ("tape", tape)):
        check_contiguous(op, name, array)
    _check_plan(op, plan)


def _convolve(self, out, x, weight, history, tape, plan):
    """Launch; ``out``, ``x`` and ``weight`` None copy the state."""
    _, n_before, width = history.shape
    n_rows = 0 if out is None else len(out)
    self.start("short_conv", (f"TAPS={n_before + 1}",), "short_conv", (-(-width // _CHANNELS),),
               (_CHANNELS,), (*_row_args(out, x), weight, history, tape, plan, n_rows, width))


def delta_gates(self, decay, beta, alpha, b, a, dt):
    """``exp(a * softplus(alpha + dt))`` and ``sigmoid(b)``; as ``ops.cpu.delta_gates``.

    Parameters
    ----------
    decay, beta, alpha, b : array of shape (M, Hv), float32
        Rows contiguous; ``decay`` may be ``alpha`` and ``beta`` may be ``b``.
    a, dt : array of shape (Hv,), float32
    """
    op = "delta_gates"
    for name, array in zip(("decay", "beta", "alpha", "b"), (decay, beta, alpha, b)):
        check_rows(op, name, array)
        check_shape(op, name, array, decay.shape)
    n_rows, n_heads = decay.shape
    for name, array in (("a", a), ("dt", dt)):
        check_rows(op, name, array)
        check_shape(op, name, array, (n_heads,))
    if decay.size == 0:
        return
    self.start("delta_gates", (), "delta_gates", (-(-n_heads // _GATES), n_rows), (_GATES,),
               (*_row_args(decay, beta, alpha, b), a, dt, n_heads))


def delta_rule(self, out, q, k, v, decay, beta, scale, states, tape_k, tape_d, tape_decay, plan):
    """Gated delta rule, row after row; as ``ops.cpu.delta_rule``.

    Parameters
    ----------
    out, v : array of shape (M, Hv, Dv), float32
        ``out[r]`` and ``v[r]`` contiguous; Dv is a multiple of 16. M as in the plan.
    q, k : array of shape (M, Hk, Dk), float32
        Already normalised; Dk is a multiple of 8, both dimensions at most 256.
    decay, beta : array of shape (M, Hv), float32
    scale : float
    states : array of shape (n, Hv, Dv / 16, Dk, 16), float32
    tape_k : array of shape (2, B, Hk, Dk), float32
        B is at most 32.
    tape_d : array of shape (B, Hv, Dv), float32
    tape_decay : array of shape (2, B, Hv), float32
    plan : array of shape (8,), int32
    """
    op = "delta_rule"
    for name, array in (("out", out), ("q", q), ("k", k), ("v", v), ("decay", decay),
                        ("beta", beta)):
        check_rows(op, name, array)
    n_rows, n_k, d_k = q.shape
    _, n_v, d_v = out.shape
    check_shape(op, "out", out, (n_rows, n_v, d_v))
    check_shape(op, "v", v, out.shape)
    check_shape(op, "k", k, q.shape)
    for name, array in (("decay", decay), ("beta", beta)):
        check_shape(op, name, array, (n_rows, n_v))
    _check_delta(op, states, tape_k, tape_d, tape_decay, plan, n_k, n_v, d_k, d_v)
    if n_rows == 0:
        return
    _apply_rule(self, out, (q, k, v, decay, beta), scale, states, tape_k, tape_d, tape_decay, plan)


def _check_delta(op, states, tape_k, tape_d, tape_decay, plan, n_k, n_v, d_k, d_v):
    block_rows = len(tape_d)
    check_shape(op, "states", states, (len(states), n_v, d_v // 16, d_k, 16))
    check_shape(op, "tape_k", tape_k, (2, block_rows, n_k, d_k))
    check_shape(op, "tape_d", tape_d, (block_rows, n_v, d_v))
    check_shape(op, "tape_decay", tape_decay, (2, block_rows, n_v))
    for name, array in (("states", states), ("tape_k", tape_k), ("tape_d", tape_d),
                        ("tape_decay", tape_decay)):
        check_contiguous(op, name, array)
    _check_plan(op, plan)
    fits = 0 < min(n_k, d_k, d_v) and not (d_k % 8 or d_v % 16 or n_v % n_k)
    if not fits or max(d_k, d_v) > _MAX_HEAD_DIM or block_rows > _MAX_BLOCK:
        raise UsageError(
            f"{op}: {n_k} key heads of {d_k}, {n_v} value heads of {d_v}, a tape of {block_rows} "
            f"rows; expected multiples of 8 and 16 up to {_MAX_HEAD_DIM}, key heads that divide "
            f"value heads, and at most {_MAX_BLOCK} rows")


def _apply_rule(self, out, rows, scale, states, tape_k, tape_d, tape_decay, plan):
    """Launch; ``out`` None copies the state."""
    _, n_v, n_tiles, d_k, _ = states.shape
    self.start("delta_rule", (f"K_DIM={d_k}",), "delta_rule", (n_tiles, n_v), (4 * _COLUMNS,),
               (*_row_args(out, *rows), states, tape_k, tape_d, tape_decay, plan,
                0 if out is None else len(out), tape_k.shape[2], len(tape_d), float(scale)))


def recurrent_copy(self, history, tape, states, tape_k, tape_d, tape_decay, plan):
    """Put one layer's state into the target slot of a plan made for no rows.

    Parameters
    ----------
    history, tape : array
        As :func:`short_conv` takes them.
    states, tape_k, tape_d, tape_decay : array
        As :func:`delta_rule` takes them.
    plan : array of shape (8,), int32
    """
    op = "recurrent_copy"
    n_slots, n_before, width = history.shape
    _, n_v, n_tiles, d_k, _ = states.shape
    block_rows, n_k = len(tape_d), tape_k.shape[2]
    check_shape(op, "tape", tape, (block_rows, width))
    check_shape(op, "states", states, (n_slots, n_v, n_tiles, d_k, 16))
    _check_conv(op, history, tape, plan, n_before + 1, width)
    _check_delta(op, states, tape_k, tape_d, tape_decay, plan, n_k, n_v, d_k, 16 * n_tiles)
    _convolve(self, None, None, None, history, tape, plan)
    _apply_rule(self, None, (None,) * 5, 1.0, states, tape_k, tape_d, tape_decay, plan)


def _row_args(*arrays):
    """Pointer and distance of rows in elements, for each array; a null pointer for None."""
    for array in arrays:
        yield array
        yield Long(0 if array is None else array.strides[0] // 4)


def _check_plan(op, plan):
    check_rows(op, "plan", plan, np.int32)
    check_shape(op, "plan", plan, (PLAN_WORDS,))
