"""Gated delta net: the op-level functions of its convolution, gates, recurrence and state.

Letters: M rows, T taps, C channels of the convolution, Hk key heads, Hv value heads (value head h
uses key head h % Hk), Dk and Dv their dimensions, B the rows of the largest small block, n slots.

A state is stored at one position and carried on by a *tape*: what the last small block has added,
row by row. The position of a pass's first row says how many rows of the tape were kept; the pass
applies them while it reads the state anyway. So keeping some rows of a block and dropping the
others writes nothing. Slots 0 and 1 hold the sequence (a large block reads one and writes the
other, a small block stays in one), the others hold checkpoints. The state at position 0 is zero
whatever a slot holds, so nothing is ever cleared.
"""

import numpy as np

from cudflash.errors import UsageError
from cudflash.ops.cpu import jit
from cudflash.ops.cpu.rows import check_rows, check_shape, extent, stride
from cudflash.ops.cpu.runtime import submit

PLAN_WORDS, CONTROL_WORDS = 8, 8  # a control block has one more word for each slot
_MAX_TAPS = 16
_MAX_HEAD_DIM = 256
_MAX_BLOCK = 32


def _builder(module, name):
    def build():
        from cudflash.ops.cpu import delta_kernel, recurrent_kernel

        modules = {"delta": delta_kernel, "recurrent": recurrent_kernel}
        return getattr(modules[module], name)()

    return build


_OPEN = jit.register("recurrent_open", _builder("recurrent", "build_open"))
_SHORT_CONV = jit.register("short_conv", _builder("recurrent", "build_conv"))
_DELTA_GATES = jit.register("delta_gates", _builder("recurrent", "build_gates"))
_DELTA_RULE = jit.register("delta_rule", _builder("delta", "build"))


def recurrent_open(plan, control, at, n_rows, block_rows, source=-1, target=-1):
    """Decide where a pass reads and writes the recurrent state, and note what it will leave.

    Run once at the start of a pass, before any op that takes ``plan``.

    Parameters
    ----------
    plan : ndarray of shape (8,), int32
        Overwritten: sound, source slot, target slot, tape rows to apply, tape half to read, tape
        half to write, whether the rows of this pass go to the tape, whether the source is zero.
    control : ndarray of shape (8 + n,), int32
        Updated: current slot, slot, position and rows of the tape, tape half last written, three
        unused; the position of the state in every slot, -1 for none.
    at : ndarray, int32
        ``at[0]`` is the position of the pass's first row.
    n_rows, block_rows : int
        Rows of the pass; up to ``block_rows`` they go to the tape. 0 rows: for
        :func:`recurrent_copy`, which puts the state at ``at[0]`` into slot ``target``.
    source, target : int
        With 0 rows: the slot to copy from (-1: wherever the state at ``at[0]`` is found; a slot
        given is a checkpoint, and its copy becomes the current state) and the slot to write.

    Notes
    -----
    The source is the current slot if ``at[0]`` is 0 or its position, or lies before it by no more rows
    than the tape of that slot holds; else the other one of slots 0 and 1 on the same terms; else
    the plan is not sound, ``control`` stays, and the ops write NaN rows.
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
    submit(_OPEN, [plan, control, at, n_rows, block_rows, source, target],
           reads=[at, control], writes=[plan, control], touched=0)


def short_conv(out, x, weight, history, tape, plan):
    """Causal depthwise convolution over the rows of a sequence, then SiLU.

    ``out[r, c] = silu(sum over j of weight[j, c] * x[r + j - T + 1, c])``; rows before row 0 are
    those of the state.

    Parameters
    ----------
    out, x : ndarray of shape (M, C), float32
        Different memory; M is the number of rows that the plan was made for.
    weight : ndarray of shape (T, C), float32
        Tap 0 belongs to the oldest row.
    history : ndarray of shape (n, T - 1, C), float32
        The rows before the position of every slot, oldest first.
    tape : ndarray of shape (B, C), float32
    plan : ndarray of shape (8,), int32

    Notes
    -----
    acc = weight[0] * oldest; then acc = fma(weight[j], row, acc) for j = 1 .. T - 1; silu(acc).
    """
    op = "short_conv"
    for name, array in (("out", out), ("x", x), ("weight", weight), ("history", history),
                        ("tape", tape)):
        check_rows(op, name, array)
    n_rows, width = out.shape
    n_taps = len(weight)
    check_shape(op, "x", x, out.shape)
    check_shape(op, "weight", weight, (n_taps, width))
    check_shape(op, "history", history, (len(history), n_taps - 1, width))
    check_shape(op, "tape", tape, (len(tape), width))
    if width % 16 or not 2 <= n_taps <= _MAX_TAPS:
        raise UsageError(f"{op}: {width} channels and {n_taps} taps, expected a multiple of 16 "
                         f"and 2 to {_MAX_TAPS}")
    _check_whole(op, weight=weight, history=history, tape=tape)
    _check_plan(op, plan)
    if n_rows == 0:
        return
    rows = min(n_rows, len(tape)) + 2 * n_taps
    submit(_SHORT_CONV,
           [out, stride(out), x, stride(x), weight, history, tape, plan, n_rows, width, n_taps],
           reads=[extent(x), weight, plan], writes=[extent(out), history, tape],
           touched=4 * width * (2 * n_rows + rows))


def delta_gates(decay, beta, alpha, b, a, dt):
    """Decay and write strength of every head: ``exp(a * softplus(alpha + dt))`` and ``sigmoid(b)``.

    Parameters
    ----------
    decay, beta, alpha, b : ndarray of shape (M, Hv), float32
        Rows contiguous; ``decay`` may be ``alpha`` and ``beta`` may be ``b``.
    a, dt : ndarray of shape (Hv,), float32
        The (negative) rate and the bias of every head.

    Notes
    -----
    One rounding for every written operation; the functions are those of ``special.py``.
    """
    op = "delta_gates"
    names = ("decay", "beta", "alpha", "b")
    for name, array in zip(names, (decay, beta, alpha, b)):
        check_rows(op, name, array)
        check_shape(op, name, array, decay.shape)
    n_rows, n_heads = decay.shape
    for name, array in (("a", a), ("dt", dt)):
        check_rows(op, name, array)
        check_shape(op, name, array, (n_heads,))
    if decay.size == 0:
        return
    submit(_DELTA_GATES,
           [decay, stride(decay), beta, stride(beta), alpha, stride(alpha), b, stride(b), a, dt,
            n_rows, n_heads],
           reads=[extent(alpha), extent(b), a, dt], writes=[extent(decay), extent(beta)],
           touched=16 * decay.size)


def delta_rule(out, q, k, v, decay, beta, scale, states, tape_k, tape_d, tape_decay, plan):
    """Gated delta rule, row after row: decay the state, correct it at k towards v, read it at q.

    For every value head, with S of shape (Dk, Dv): ``d = beta * (v - decay * S^T k)``,
    ``S = decay * S + k d^T``, ``out = scale * S^T q``.

    Parameters
    ----------
    out, v : ndarray of shape (M, Hv, Dv), float32
        ``out[r]`` and ``v[r]`` contiguous; Dv is a multiple of 16. M as in the plan.
    q, k : ndarray of shape (M, Hk, Dk), float32
        Already normalised; Dk is a multiple of 8, both dimensions at most 256.
    decay, beta : ndarray of shape (M, Hv), float32
    scale : float
    states : ndarray of shape (n, Hv, Dv / 16, Dk, 16), float32
        16 neighbouring value columns lie side by side for every key index.
    tape_k : ndarray of shape (2, B, Hk, Dk), float32
        B is at most 32.
    tape_d : ndarray of shape (B, Hv, Dv), float32
    tape_decay : ndarray of shape (2, B, Hv), float32
    plan : ndarray of shape (8,), int32
        From :func:`recurrent_open`.

    Notes
    -----
    p[j] = 8 lanes, lane l adding fma(S[i, j], k[i], lane) for i = l, l + 8, ... from 0, then the
    halving tree (l, l + 4), (l, l + 2), (0, 1). d = (v - decay * p) * beta, one rounding for every
    operation. S[i, j] = fma(k[i], d[j], decay * S[i, j]). o[j] = the same lanes and tree over
    fma(S[i, j], q[i], lane) with the new S; out = o * scale. Applying a row of the tape is the
    line for S with the k, d and decay kept, so its bits are those of the first time.
    """
    op = "delta_rule"
    for name, array in (("out", out), ("q", q), ("k", k), ("v", v), ("decay", decay),
                        ("beta", beta), ("states", states), ("tape_k", tape_k),
                        ("tape_d", tape_d), ("tape_decay", tape_decay)):
        check_rows(op, name, array)
    n_rows, n_k, d_k = q.shape
    _, n_v, d_v = out.shape
    block_rows = len(tape_d)
    check_shape(op, "out", out, (n_rows, n_v, d_v))
    check_shape(op, "v", v, out.shape)
    check_shape(op, "k", k, q.shape)
    for name, array in (("decay", decay), ("beta", beta)):
        check_shape(op, name, array, (n_rows, n_v))
    check_shape(op, "states", states, (len(states), n_v, d_v // 16, d_k, 16))
    check_shape(op, "tape_k", tape_k, (2, block_rows, n_k, d_k))
    check_shape(op, "tape_d", tape_d, (block_rows, n_v, d_v))
    check_shape(op, "tape_decay", tape_decay, (2, block_rows, n_v))
    _check_whole(op, states=states, tape_k=tape_k, tape_d=tape_d, tape_decay=tape_decay)
    _check_plan(op, plan)
    fits = not (d_k % 8 or d_v % 16 or n_v % n_k) and 0 < min(d_k, d_v)
    if not fits or max(d_k, d_v) > _MAX_HEAD_DIM or block_rows > _MAX_BLOCK:
        raise UsageError(
            f"{op}: {n_k} key heads of {d_k}, {n_v} value heads of {d_v}, a tape of {block_rows} "
            f"rows; expected multiples of 8 and 16 up to {_MAX_HEAD_DIM}, key heads that divide "
            f"value heads, and at most {_MAX_BLOCK} rows")
    if n_rows == 0:
        return
    submit(_DELTA_RULE,
           [out, stride(out), q, stride(q), k, stride(k), v, stride(v), decay, stride(decay),
            beta, stride(beta), states, tape_k, tape_d, tape_decay, plan, n_rows, n_k, n_v, d_k,
            d_v, block_rows, float(scale)],
           reads=[extent(a) for a in (q, k, v, decay, beta)] + [plan],
           writes=[extent(out), states, tape_k, tape_d, tape_decay],
           touched=8 * n_v * d_k * d_v)


def recurrent_copy(history, tape, states, tape_k, tape_d, tape_decay, plan):
    """Put one layer's state into the target slot of a plan made for no rows.

    Parameters
    ----------
    history, tape : ndarray
        As :func:`short_conv` takes them.
    states, tape_k, tape_d, tape_decay : ndarray
        As :func:`delta_rule` takes them.
    plan : ndarray of shape (8,), int32
    """
    op = "recurrent_copy"
    n_slots, n_before, width = history.shape
    _, n_v, n_tiles, d_k, _ = states.shape
    block_rows, n_k = len(tape_d), tape_k.shape[2]
    check_shape(op, "tape", tape, (block_rows, width))
    check_shape(op, "states", states, (n_slots, n_v, n_tiles, d_k, 16))
    check_shape(op, "tape_k", tape_k, (2, block_rows, n_k, d_k))
    check_shape(op, "tape_d", tape_d, (block_rows, n_v, 16 * n_tiles))
    check_shape(op, "tape_decay", tape_decay, (2, block_rows, n_v))
    _check_whole(op, history=history, tape=tape, states=states, tape_k=tape_k, tape_d=tape_d,
                 tape_decay=tape_decay)
    _check_plan(op, plan)
    nothing = (0, 0)  # an address and a stride that no row uses
    submit(_SHORT_CONV, [*nothing, *nothing, 0, history, tape, plan, 0, width, n_before + 1],
           reads=[tape, plan], writes=[history])
    submit(_DELTA_RULE,
           [*nothing * 6, states, tape_k, tape_d, tape_decay, plan, 0, n_k, n_v, d_k,
            16 * n_tiles, block_rows, 1.0],
           reads=[tape_k, tape_d, tape_decay, plan], writes=[states])


def _check_whole(op, **arrays):
    """Raise unless the arrays have no gaps: the kernels know no strides for them."""
    for name, array in arrays.items():
        if not array.flags.c_contiguous:
            raise UsageError(f"{op}: {name} of shape {array.shape} is not contiguous")


def _check_plan(op, plan):
    check_rows(op, "plan", plan, np.int32)
    check_shape(op, "plan", plan, (PLAN_WORDS,))
