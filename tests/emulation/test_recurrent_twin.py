"""The recurrent state of a hybrid target against the CPU's ops, pass after pass, bit for bit.

The shipped .cu files run in emulation (README.md).
"""

import numpy as np
import pytest

from cudflash.errors import UsageError
from cudflash.ops import cpu as ops
from tests.emulation.cuda import emulated_ops
from tests.emulation.host_module import aligned, to_device, unavailable
from tests.emulation.device_ops import kernel
from tests.emulation.test_op_twins import SCHEDULES, normal
from tests.helpers.ops_checks import assert_same_bits, poisoned

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))

N_K, N_V, BLOCK, SLOTS, TAPS = 2, 4, 8, 3, 4


def same(found, expected):
    """Equality of bits, any NaN being like any other."""
    assert np.array_equal(np.isnan(found), np.isnan(expected))
    assert_same_bits(np.nan_to_num(found, nan=0), np.nan_to_num(expected, nan=0))


class State:
    """The state of one layer; every buffer begins as NaN."""

    def __init__(self, make, d_k, d_v, width):
        self.plan, self.control = make((8,), np.int32), make((8 + SLOTS,), np.int32)
        self.plan[...], self.control[...] = -7, 0
        self.control[8:] = -1
        shapes = {"history": (SLOTS, TAPS - 1, width), "tape": (BLOCK, width),
                  "states": (SLOTS, N_V, d_v // 16, d_k, 16), "tape_k": (2, BLOCK, N_K, d_k),
                  "tape_d": (BLOCK, N_V, d_v), "tape_decay": (2, BLOCK, N_V)}
        self.buffers = {name: make(shape, np.float32) for name, shape in shapes.items()}
        for buffer in self.buffers.values():
            buffer.fill(np.nan)

    def of(self, *names):
        return [self.buffers[name] for name in names]


DELTA = ("states", "tape_k", "tape_d", "tape_decay")


def on_cpu(state, at, rows, target=-1, source=-1):
    """One pass by the CPU's ops: (convolved rows, out)."""
    n = 0 if rows is None else len(rows["x"])
    ops.recurrent_open(state.plan, state.control, np.array([at], np.int32), n, BLOCK, source, target)
    if rows is None:
        ops.recurrent_copy(*state.of("history", "tape", *DELTA), state.plan)
        return ()
    conv, out = poisoned(rows["x"].shape), poisoned(rows["v"].shape)
    ops.short_conv(conv, rows["x"], rows["weight"], *state.of("history", "tape"), state.plan)
    ops.delta_rule(out, *(rows[name] for name in ("q", "k", "v", "decay", "beta")), 0.25,
                   *state.of(*DELTA), state.plan)
    return conv, out


def on_card(state, at, rows, target=-1, source=-1, *, mode="fast", **how):
    """The same pass by the kernels."""
    n = 0 if rows is None else len(rows["x"])
    width, (_, _, tiles, d_k, _) = state.buffers["tape"].shape[1], state.buffers["states"].shape
    kernel("recurrent_open", mode=mode)(
        (1,), (1,), (state.plan, state.control, to_device(np.array([at], np.int32)), np.int32(n),
                     np.int32(BLOCK), np.int32(source), np.int32(target)), **how)
    made, given, weight = [None, None], {}, None
    if n:
        made = [aligned(rows[name].shape, np.float32) for name in ("x", "v")]
        given = {name: to_device(value) for name, value in rows.items()}
        weight = given["weight"]
    else:
        weight = aligned((TAPS, width), np.float32, 0)
    kernel("short_conv", f"TAPS={TAPS}", mode=mode)(
        (-(-width // 128),), (128,),
        (made[0], np.int64(width), given.get("x"), np.int64(width), weight,
         *state.of("history", "tape"), state.plan, np.int32(n), np.int32(width)), **how)
    strided = []
    for name, stride in (("q", N_K * d_k), ("k", N_K * d_k), ("v", N_V * tiles * 16),
                         ("decay", N_V), ("beta", N_V)):
        strided += [given.get(name), np.int64(stride)]
    kernel("delta_rule", f"K_DIM={d_k}", mode=mode)(
        (tiles, N_V), (64,),
        (made[1], np.int64(N_V * tiles * 16), *strided, *state.of(*DELTA), state.plan, np.int32(n),
         np.int32(N_K), np.int32(BLOCK), np.float32(0.25)), **how)
    return tuple(made) if n else ()


def rows_of(n, d_k, d_v, width, seed):
    """Inputs of n rows."""
    q, k = (normal((n, N_K, d_k), 10 * seed + i, d_k**-0.5) for i in (0, 1))
    decay = np.exp(-np.abs(normal((n, N_V), 10 * seed + 2)))
    beta = 1 / (1 + np.exp(normal((n, N_V), 10 * seed + 3)))
    return {"x": normal((n, width), 10 * seed + 4), "weight": normal((TAPS, width), 5),
            "q": q, "k": k, "v": normal((n, N_V, d_v), 10 * seed + 6), "decay": decay, "beta": beta}


# position, rows (0: a copy), target, source
PASSES = [
    (0, 20, -1, -1),  # a prompt: more rows than a block
    (20, 17, -1, -1),  # its second part
    (37, 5, -1, -1),  # a block, of which
    (39, 8, -1, -1),  # two rows were kept; then all of this one, and one row
    (47, 1, -1, -1),
    (47, 4, -1, -1),  # the row was dropped
    (49, 0, 2, -1),  # a checkpoint in the middle of a block
    (51, 9, -1, -1),  # a larger block after a part of a tape
    (51, 3, -1, -1),  # rolled back to before it
    (49, 0, 0, 2),  # the checkpoint again
    (49, 2, -1, -1),
    (40, 2, -1, -1),  # a position that no state leads to
    (0, 3, -1, -1),  # from the start, whatever lies there
    (2, 1, -1, -1),
]


@pytest.mark.parametrize("mode,d_k,d_v,width", [
    ("fast", 128, 32, 272), ("fast", 8, 16, 16), ("fast", 24, 48, 144), ("check", 16, 32, 48)])
def test_passes_have_the_cpus_bits_in_rows_and_state(mode, d_k, d_v, width):
    """A tape row applied twice or in another order, a stale slot, a state that is stored too soon."""
    cpu, card = State(poisoned, d_k, d_v, width), State(aligned, d_k, d_v, width)
    for i, (at, n, target, source) in enumerate(PASSES):
        rows = rows_of(n, d_k, d_v, width, i + 1) if n else None
        expected = on_cpu(cpu, at, rows, target, source)
        schedule, seed = SCHEDULES[i % len(SCHEDULES)]
        found = on_card(card, at, rows, target, source, mode=mode, schedule=schedule, seed=seed)
        assert np.array_equal(card.plan, cpu.plan), PASSES[i]
        assert np.array_equal(card.control, cpu.control), PASSES[i]
        assert np.isnan(expected[1]).all() == (at == 40) if n else not expected
        for a, b in zip(found, expected):
            same(a, b)
        for name, buffer in card.buffers.items():
            same(buffer, cpu.buffers[name])


@pytest.mark.parametrize("m,n_heads", [(1, 5), (2, 64), (17, 48), (40, 65)])
def test_gates_have_the_cpus_bits(m, n_heads):
    """A rounding more or less, a head past the last."""
    alpha, b = normal((m, n_heads), 1, 4), normal((m, n_heads), 2, 4)
    a, dt = -np.abs(normal(n_heads, 3, 3)), normal(n_heads, 4)
    decay, beta = poisoned(alpha.shape), poisoned(alpha.shape)
    ops.delta_gates(decay, beta, alpha, b, a, dt)
    found = to_device(alpha), to_device(b)  # in place
    stride = np.int64(n_heads)
    kernel("delta_gates")((-(-n_heads // 64), m), (64,), (
        found[0], stride, found[1], stride, found[0], stride, found[1], stride, to_device(a),
        to_device(dt), np.int32(n_heads)))
    assert_same_bits(found[0], decay)
    assert_same_bits(found[1], beta)


@pytest.mark.parametrize("d", [1, 31, 32, 128, 256, 257, 640])
def test_norms_of_heads_have_the_cpus_bits_whatever_rows_there_are(d):
    """Another number of lanes, another tree, the mean in place of the sum, a row that is not alone."""
    x, z = normal((9, 3, d), d) * np.exp(normal((9, 3, 1), 1) * 4), normal((27, d), 2, 4)
    weight, expected = normal(d, 3), [poisoned(x.shape), poisoned(z.shape)]
    ops.l2_norm(expected[0], x, 1e-6)
    ops.gated_rms_norm(expected[1], x.reshape(27, d), z, weight, 1e-6)
    for schedule, seed in SCHEDULES:
        card, _ = emulated_ops(schedule=schedule, seed=seed)
        for rows in (slice(0, 9), slice(4, 5)):
            heads = card.upload(x[rows])
            card.l2_norm(heads, heads, 1e-6)
            assert_same_bits(card.download(heads), expected[0][rows])
            gated = card.upload(x[rows].reshape(-1, d))
            flat = slice(3 * rows.start, 3 * rows.stop)
            card.gated_rms_norm(gated, gated, card.upload(z[flat]), card.upload(weight), 1e-6)
            assert_same_bits(card.download(gated), expected[1][flat])


def test_ops_of_the_card_refuse_what_does_not_fit():
    """A launch that reads past the end of a state, a tape or a plan of another layer."""
    card, _ = emulated_ops()
    make = lambda *shape: card.empty(shape, np.float32)  # noqa: E731
    plan, control, at = (card.empty((n,), np.int32) for n in (8, 11, 1))
    for wrong in ((0, 16), (3, 16, -1, 1), (-1, 16), (3, 0)):
        with pytest.raises(UsageError, match="recurrent_open"):
            card.recurrent_open(plan, control, at, *wrong)
    conv = [make(3, 64), make(3, 64), make(4, 64), make(2, 3, 64), make(8, 64), plan]
    for i, wrong in ((1, make(2, 64)), (2, make(3, 64)), (3, make(2, 2, 64)), (4, make(8, 48)),
                     (5, control)):
        with pytest.raises(UsageError, match="short_conv"):
            card.short_conv(*conv[:i], wrong, *conv[i + 1:])
    delta = [make(3, 4, 16), make(3, 2, 8), make(3, 2, 8), make(3, 4, 16), make(3, 4), make(3, 4), 1.0,
             make(2, 4, 1, 8, 16), make(2, 8, 2, 8), make(8, 4, 16), make(2, 8, 4), plan]
    for i, wrong in ((1, make(2, 2, 8)), (2, make(3, 1, 8)), (3, make(3, 4, 32)), (4, make(3, 3)),
                     (7, make(2, 4, 2, 8, 16)), (8, make(1, 8, 2, 8)), (9, make(4, 4, 16)),
                     (10, make(2, 8, 3)), (11, control)):
        with pytest.raises(UsageError, match="delta_rule"):
            card.delta_rule(*delta[:i], wrong, *delta[i + 1:])
    with pytest.raises(UsageError, match="recurrent_copy"):
        card.recurrent_copy(make(2, 3, 64), make(7, 64), *delta[7:])
    for op, args in (("l2_norm", (make(2, 8), make(2, 8), 1e-6)),
                     ("l2_norm", (make(2, 1, 8), make(2, 1, 8), 0.0)),
                     ("gated_rms_norm", (make(2, 8), make(2, 8), make(2, 8), make(7), 1e-6)),
                     ("delta_gates", (*[make(2, 8)] * 4, make(8), make(7)))):
        with pytest.raises(UsageError, match=op):
            getattr(card, op)(*args)
