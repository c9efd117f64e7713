"""Kernels of ``recurrent_open``, ``short_conv`` and ``delta_gates``; orders in ``recurrent.py``."""

import numpy as np

from cudflash.ops.cpu import simd as S
from cudflash.ops.cpu import special_kernel as F

# Words (int32) of the plan of a pass.
SOUND, SOURCE, TARGET, N_TAPE, READ, WRITE, KEEP_TAPE, AT_ZERO = range(8)
PLAN_WORDS = 8
# Words of the control block; the position of slot s is word BASES + s.
CURRENT, TAPE_SLOT, TAPE_BASE, TAPE_ROWS, PARITY = range(5)
BASES = 8
MAX_TAPS = 16
_SPAN = 256  # channels of one unit of work
_GATE_SPAN = 64


def build_open():
    """Python function of the kernel ``recurrent_open``.

    ``args`` is ``[plan, control, at, n_rows, block_rows, source, target]``.
    """
    from numba import njit

    @njit(inline="always")
    def word(block, i):
        return np.int64(S.peek_i32(block + 4 * i))

    @njit(inline="always")
    def put(block, i, value):
        S.poke_i32(block + 4 * i, np.int32(value))

    @njit(inline="always")
    def tape_rows_to(control, slot, position):
        """Tape rows between the slot's state and ``position``; -1 if they do not lead there."""
        base = word(control, BASES + slot)
        if position == 0:
            return np.int64(0)  # the start of any sequence: zeros, whatever the slot holds
        if base < 0 or base > position:
            return np.int64(-1)
        if base == position:
            return np.int64(0)
        fits = (slot == word(control, TAPE_SLOT) and base == word(control, TAPE_BASE)
                and position - base <= word(control, TAPE_ROWS))
        return position - base if fits else np.int64(-1)

    @njit(inline="always")
    def note_block(plan, control, source, position, n_rows):
        """A small block: its first position becomes the stored one, its rows go to the tape."""
        parity = word(control, PARITY)
        put(plan, TARGET, source)
        put(plan, READ, parity)
        put(plan, WRITE, 1 - parity)
        put(plan, KEEP_TAPE, 1)
        put(control, PARITY, 1 - parity)
        put(control, CURRENT, source)
        put(control, TAPE_SLOT, source)
        put(control, TAPE_BASE, position)
        put(control, TAPE_ROWS, n_rows)
        put(control, BASES + source, position)
        if word(control, BASES + 1 - source) > position:
            put(control, BASES + 1 - source, -1)  # the rows that it was made of are gone

    @njit(inline="always")
    def note_chunk(plan, control, source, position, n_rows):
        """A large block: its last state goes to the other slot; the tape stays for a rollback."""
        target = 1 - source
        put(plan, TARGET, target)
        put(plan, READ, word(control, PARITY))
        put(control, CURRENT, target)
        put(control, BASES + target, position + n_rows)
        if word(control, BASES + source) > position:  # at the start of another sequence
            put(control, BASES + source, -1)
        left = min(position - word(control, TAPE_BASE), word(control, TAPE_ROWS))
        put(control, TAPE_ROWS, max(left, np.int64(0)))

    def recurrent_open(args, tid, n_threads):
        plan, control = S.peek_i64(args), S.peek_i64(args + 8)
        at, n_rows, block_rows = (S.peek_i64(args + 16), S.peek_i64(args + 24),
                                  S.peek_i64(args + 32))
        source, target = S.peek_i64(args + 40), S.peek_i64(args + 48)
        if tid != 0:
            return
        position = np.int64(S.peek_i32(at))
        restore = source >= 0
        if not restore:
            source = word(control, CURRENT)
        n_tape = tape_rows_to(control, source, position)
        if n_tape < 0 and not restore:
            source = 1 - source
            n_tape = tape_rows_to(control, source, position)
        for i in range(PLAN_WORDS):
            put(plan, i, 0)
        if position < 0 or n_tape < 0 or source == target:
            return
        if position == 0:
            put(control, BASES + source, 0)
        put(plan, SOUND, 1)
        put(plan, SOURCE, source)
        put(plan, N_TAPE, n_tape)
        put(plan, AT_ZERO, 1 if word(control, BASES + source) == 0 else 0)
        if n_rows > block_rows:
            note_chunk(plan, control, source, position, n_rows)
        elif n_rows > 0:
            note_block(plan, control, source, position, n_rows)
        else:
            put(plan, TARGET, target)
            put(plan, READ, word(control, PARITY))
            put(control, BASES + target, position)
            if restore:
                put(control, CURRENT, target)
                put(control, BASES + 1 - target, -1)
                put(control, TAPE_ROWS, 0)

    return recurrent_open


def build_conv():
    """Python function of the kernel ``short_conv``.

    ``args`` is ``[out, out_stride, x, x_stride, weight, history, tape, plan, n_rows, width,
    n_taps]``. One unit of work is a span of channels of all rows.
    """
    from numba import njit

    f32 = np.float32
    window = S.stack(4 * _SPAN * MAX_TAPS)

    @njit(inline="always")
    def copy(to, source, n_bytes):
        for i in range(0, n_bytes, 64):
            S.store_f32(to + i, S.load_f32(source + i))

    @njit(inline="always")
    def near(out, x, x_stride, before, weight, r, n_taps, width):
        """16 channels of a row r < n_taps - 1; ``before`` holds the rows before row 0."""
        acc = S.vmul(S.load_f32(weight), S.load_f32(before + 4 * _SPAN * r))
        for j in range(1, n_taps):
            at = r + j - n_taps + 1
            row = x + at * x_stride
            if at < 0:
                row = before + 4 * _SPAN * (r + j)
            acc = S.vfma(S.load_f32(weight + 4 * width * j), S.load_f32(row), acc)
        S.store_f32(out, F.vsilu(acc))

    @njit(inline="always")
    def far(out, oldest, x_stride, weight, n_taps, width):
        """16 channels of a row whose window begins at ``oldest``, inside the block."""
        acc = S.vmul(S.load_f32(weight), S.load_f32(oldest))
        for j in range(1, n_taps):
            acc = S.vfma(S.load_f32(weight + 4 * width * j), S.load_f32(oldest + j * x_stride),
                         acc)
        S.store_f32(out, F.vsilu(acc))

    def short_conv(args, tid, n_threads):
        out0, out_stride = S.peek_i64(args), S.peek_i64(args + 8)
        x0, x_stride = S.peek_i64(args + 16), S.peek_i64(args + 24)
        weight0, history0, tape0 = (S.peek_i64(args + 32), S.peek_i64(args + 40),
                                    S.peek_i64(args + 48))
        plan, n_rows = S.peek_i64(args + 56), S.peek_i64(args + 64)
        width, n_taps = S.peek_i64(args + 72), S.peek_i64(args + 80)
        n_before, row_bytes = n_taps - 1, 4 * width
        sound = S.peek_i32(plan + 4 * SOUND) != 0
        keep = S.peek_i32(plan + 4 * KEEP_TAPE) != 0
        at_zero = S.peek_i32(plan + 4 * AT_ZERO) != 0
        n_tape = np.int64(S.peek_i32(plan + 4 * N_TAPE))
        source = history0 + np.int64(S.peek_i32(plan + 4 * SOURCE)) * n_before * row_bytes
        target = history0 + np.int64(S.peek_i32(plan + 4 * TARGET)) * n_before * row_bytes
        before = window()
        n_spans = (width + _SPAN - 1) // _SPAN
        for span in range(n_spans * tid // n_threads, n_spans * (tid + 1) // n_threads):
            first = 4 * _SPAN * span
            n_bytes = min(4 * _SPAN, row_bytes - first)
            if not sound:
                for r in range(n_rows):
                    for i in range(0, n_bytes, 64):
                        S.store_f32(out0 + r * out_stride + first + i, S.splat_f32(f32(np.nan)))
                continue
            for j in range(n_before):
                old = n_tape + j
                row = source + old * row_bytes
                if old >= n_before:
                    row = tape0 + (old - n_before) * row_bytes
                if at_zero and old < n_before:
                    for i in range(0, n_bytes, 64):
                        S.store_f32(before + 4 * _SPAN * j + i, S.splat_f32(f32(0.0)))
                else:
                    copy(before + 4 * _SPAN * j, row + first, n_bytes)
            x = x0 + first
            for r in range(min(n_rows, n_before)):
                for i in range(0, n_bytes, 64):
                    near(out0 + r * out_stride + first + i, x + i, x_stride, before + i,
                         weight0 + first + i, r, n_taps, width)
            for r in range(n_before, n_rows):
                for i in range(0, n_bytes, 64):
                    far(out0 + r * out_stride + first + i, x + i + (r - n_before) * x_stride,
                        x_stride, weight0 + first + i, n_taps, width)
            # what lies before the next block: the rows before this one, or its own last ones
            passed = 0 if keep else n_rows
            for j in range(n_before):
                row = before + 4 * _SPAN * (passed + j)
                if passed + j >= n_before:
                    row = x + (passed + j - n_before) * x_stride
                copy(target + j * row_bytes + first, row, n_bytes)
            if keep:
                for r in range(n_rows):
                    copy(tape0 + r * row_bytes + first, x + r * x_stride, n_bytes)

    return short_conv


def build_gates():
    """Python function of the kernel ``delta_gates``.

    ``args`` is ``[decay, decay_stride, beta, beta_stride, alpha, alpha_stride, b, b_stride, a, dt,
    n_rows, n_heads]``.
    """
    from numba import njit

    @njit(inline="always")
    def sixteen(decay, beta, alpha, b, a, dt):
        rate = F.vsoftplus(S.vadd(S.load_f32(alpha), S.load_f32(dt)))
        written = F.vsigmoid(S.load_f32(b))
        S.store_f32(decay, F.vexp(S.vmul(S.load_f32(a), rate)))
        S.store_f32(beta, written)

    @njit(inline="always")
    def one(decay, beta, alpha, b, a, dt):
        rate = F.softplus(S.peek_f32(alpha) + S.peek_f32(dt))
        written = F.sigmoid(S.peek_f32(b))
        S.poke_f32(decay, F.exp(S.peek_f32(a) * rate))
        S.poke_f32(beta, written)

    def delta_gates(args, tid, n_threads):
        decay0, decay_stride = S.peek_i64(args), S.peek_i64(args + 8)
        beta0, beta_stride = S.peek_i64(args + 16), S.peek_i64(args + 24)
        alpha0, alpha_stride = S.peek_i64(args + 32), S.peek_i64(args + 40)
        b0, b_stride = S.peek_i64(args + 48), S.peek_i64(args + 56)
        a, dt = S.peek_i64(args + 64), S.peek_i64(args + 72)
        n_rows, n_heads = S.peek_i64(args + 80), S.peek_i64(args + 88)
        n_spans = (n_heads + _GATE_SPAN - 1) // _GATE_SPAN
        n_units = n_rows * n_spans
        for unit in range(n_units * tid // n_threads, n_units * (tid + 1) // n_threads):
            r, first = unit // n_spans, unit % n_spans * _GATE_SPAN
            last = min(n_heads, first + _GATE_SPAN)
            decay, beta = decay0 + r * decay_stride, beta0 + r * beta_stride
            alpha, b = alpha0 + r * alpha_stride, b0 + r * b_stride
            whole = last - (last - first) % 16
            for i in range(4 * first, 4 * whole, 64):
                sixteen(decay + i, beta + i, alpha + i, b + i, a + i, dt + i)
            for i in range(4 * whole, 4 * last, 4):
                one(decay + i, beta + i, alpha + i, b + i, a + i, dt + i)

    return delta_gates
