"""Ops of a gated delta net: convolution, gates, delta rule, norms, and where a pass finds its state.

Every comparison of values is on integer views, against a model of the stated order; formulas are
held against float64 with a bound.
"""

import numpy as np
import pytest

from cudflash.errors import UsageError
from cudflash.ops import cpu as ops
from cudflash.ops.cpu import program, special
from tests.helpers import exact_f32 as E
from tests.helpers.delta_net import F32, Model, Rows, Shape, State, conv_weight, lane_sum
from tests.helpers.ops_checks import (
    ROW_COUNTS,
    THREAD_COUNTS,
    assert_close,
    assert_same_bits,
    check_row_independence,
    check_writes_only,
    poisoned,
    replay,
)

SHAPES = {
    "two key heads": Shape(),
    "one head, wide": Shape(n_k=1, n_v=1, d_k=128, d_v=128),
    "three value heads a key head, few dims, two taps": Shape(2, 6, 8, 16, 2),
    "as many key heads": Shape(3, 3, 32, 48, 5),
}
SCALE = 0.25


@pytest.fixture(params=THREAD_COUNTS, autouse=True)
def n_threads(request, monkeypatch):
    monkeypatch.setattr(program, "_SERIAL_BYTES", -1)
    ops.set_threads(request.param)


def expected(shape, weight, rows, scale=SCALE):
    """The model's outputs for all rows of a sequence."""
    model = Model(shape, weight)
    return model.conv(rows.u), model.delta(rows.q, rows.k, rows.v, rows.decay, rows.beta, scale)


def run_blocks(state, rows, blocks):
    """Outputs of consecutive blocks that are all kept."""
    outs, position = [], 0
    for n in blocks:
        outs.append(state.run(position, rows[position:position + n], SCALE))
        position += n
    return [np.concatenate(parts) for parts in zip(*outs)]


# -- convolution and delta rule ---------------------------------------------------------------------


@pytest.mark.parametrize("name", SHAPES)
def test_a_sequence_equals_the_model(name):
    """Catches a tap or lane order, a head paired with the wrong key head, a rounding left out.

    Blocks of one row, of several, and of more than the tape holds, so that rows before a block come
    from the history, from the tape and from both.
    """
    shape = SHAPES[name]
    weight, rows = conv_weight(shape), Rows.random(shape, 45)
    found = run_blocks(State(shape, weight, block_rows=8), rows, [1, 2, 8, 3, 12, 1, 9, 1, 8])
    for a, b in zip(found, expected(shape, weight, rows)):
        assert_same_bits(a, b)


@pytest.mark.parametrize("block_rows", [1, 16, 32])
def test_a_block_of_rows_equals_single_rows(block_rows):
    """Catches rows that depend on how many are computed at once, convolution taps included."""
    shape = SHAPES["two key heads"]
    weight, rows = conv_weight(shape), Rows.random(shape, 70)
    single = run_blocks(State(shape, weight, block_rows), rows, [1] * 70)
    for m in ROW_COUNTS:
        blocks = [5, *([m] * (65 // m)), *([65 % m] if 65 % m else [])]
        for a, b in zip(run_blocks(State(shape, weight, block_rows), rows, blocks), single):
            assert_same_bits(a, b)


def test_the_delta_rule_is_close_to_float64():
    """Catches a wrong formula.

    Bound: each row rounds a state of magnitude below 8 a few times, and decays shrink what came
    before; 60 rows of at most 60 roundings of 2^-24 each, times 8.
    """
    shape = Shape(n_k=1, n_v=2, d_k=64, d_v=16)
    rows = Rows.random(shape, 60)
    _, found = run_blocks(State(shape, conv_weight(shape)), rows, [60])
    s = np.zeros((2, 64, 16))
    for r in range(60):
        s *= rows.decay[r].astype(np.float64)[:, None, None]
        k, q = rows.k[r, 0].astype(np.float64), rows.q[r, 0].astype(np.float64)
        d = rows.beta[r].astype(np.float64)[:, None] * (rows.v[r] - np.einsum("hij,i->hj", s, k))
        s += k[None, :, None] * d[:, None, :]
        assert_close(found[r], SCALE * np.einsum("hij,i->hj", s, q), 60 * 60 * 8 * 2.0**-24)
        assert np.abs(s).max() < 8


def test_strided_rows_and_nothing_written_around():
    """Catches strides taken for widths: q, k, v as parts of one row, outputs in a wider buffer."""
    shape = SHAPES["two key heads"]
    weight, rows = conv_weight(shape), Rows.random(shape, 7)
    want_c, want_o = expected(shape, weight, rows)
    n_q = shape.n_k * shape.d_k
    joined = np.concatenate([rows.q.reshape(7, -1), rows.k.reshape(7, -1),
                             rows.v.reshape(7, -1), rows.decay, rows.beta], 1)
    joined = ops.upload(joined)
    q, k = (joined[:, i * n_q:(i + 1) * n_q].reshape(7, shape.n_k, -1) for i in (0, 1))
    v = joined[:, 2 * n_q:shape.width].reshape(7, shape.n_v, -1)
    decay, beta = joined[:, shape.width:-shape.n_v], joined[:, -shape.n_v:]
    state = State(shape, weight)
    ops.recurrent_open(state.plan, state.control, state.at, 7, 16)
    wide = ops.upload(np.pad(rows.u, ((0, 0), (3, 5))))[:, 3:-5]
    found = check_writes_only(
        lambda out: ops.short_conv(out, wide, state.weight, state.history, state.tape_u,
                                   state.plan), rows.u.shape)
    assert_same_bits(found, want_c)
    found = check_writes_only(
        lambda out: ops.delta_rule(out, q, k, v, decay, beta, SCALE, state.states, state.tape_k,
                                   state.tape_d, state.tape_decay, state.plan), rows.v.shape)
    assert_same_bits(found, want_o)


def test_a_recorded_pass_reads_its_position_from_the_buffer():
    """Catches a position, a slot or a number of rows fixed when the pass was recorded."""
    shape = SHAPES["two key heads"]
    weight, rows = conv_weight(shape), Rows.random(shape, 24)
    want_c, want_o = expected(shape, weight, rows)
    state, block = State(shape, weight), rows[:4]
    c, o = poisoned((4, shape.width)), poisoned(block.v.shape)
    with ops.capture() as graph:
        ops.recurrent_open(state.plan, state.control, state.at, 4, 16)
        ops.short_conv(c, block.u, state.weight, state.history, state.tape_u, state.plan)
        ops.delta_rule(o, block.q, block.k, block.v, block.decay, block.beta, SCALE, state.states,
                       state.tape_k, state.tape_d, state.tape_decay, state.plan)
    for position in (0, 4, 5, 7, 11, 11, 15, 0, 1):
        ops.copy_in(state.at, np.array([position], np.int32))
        for to, source in zip(vars(block).values(), vars(rows[position:position + 4]).values()):
            ops.copy_in(to, source)
        graph.launch()
        assert_same_bits(c, want_c[position:position + 4])
        assert_same_bits(o, want_o[position:position + 4])


def test_a_state_that_cannot_be_reached_gives_nan_rows_and_stays():
    """Catches a pass that silently starts from the wrong state."""
    shape = SHAPES["two key heads"]
    rows = Rows.random(shape, 30)
    state = State(shape, conv_weight(shape), block_rows=8)
    run_blocks(state, rows, [8, 3])
    buffers = (state.history, state.states, state.tape_u, state.tape_k, state.tape_d,
               state.tape_decay, state.control)
    before = [array.copy() for array in buffers]
    for position in (-1, 1, 7, 12, 30):
        for n in (2, 9):
            c, o = state.run(position, rows[:n])
            assert np.isnan(c).all() and np.isnan(o).all()
            for now, then in zip(buffers, before):
                assert_same_bits(now, then)


def test_ops_refuse_what_does_not_fit():
    """Catches reading past the end of a state, a tape or a plan of another layer."""
    shape = SHAPES["two key heads"]
    state, rows = State(shape, conv_weight(shape)), Rows.random(shape, 3)[:]
    conv = [rows.u.copy(), rows.u, state.weight, state.history, state.tape_u, state.plan]
    for i, wrong in ((1, rows.u[:2]), (2, state.weight[:3]), (3, state.history[:, 1:]),
                     (4, state.tape_u[:, 16:]), (5, state.plan[:4])):
        with pytest.raises(UsageError, match="short_conv"):
            ops.short_conv(*conv[:i], wrong, *conv[i + 1:])
    delta = [rows.v.copy(), rows.q, rows.k, rows.v, rows.decay, rows.beta, 1.0, state.states,
             state.tape_k, state.tape_d, state.tape_decay, state.plan]
    for i, wrong in ((1, rows.q[:2]), (2, rows.k[:, :1]), (3, rows.v[:, :, :16]),
                     (4, rows.decay[:, :3]), (7, state.states[:, :, :1]), (8, state.tape_k[:1]),
                     (9, state.tape_d[:4]), (10, state.tape_decay[:, :4]), (11, state.plan[1:])):
        with pytest.raises(UsageError, match="delta_rule"):
            ops.delta_rule(*delta[:i], wrong, *delta[i + 1:])
    for extra in ((0, 16), (0, 16, -1, 2), (3, 16, -1, 1), (-1, 16), (3, 0)):
        with pytest.raises(UsageError, match="recurrent_open"):
            ops.recurrent_open(state.plan, state.control, state.at, *extra)


# -- gates and norms --------------------------------------------------------------------------------


@pytest.mark.parametrize("n_heads", [1, 16, 23, 100])
def test_delta_gates_equal_the_model(n_heads):
    """Catches a gate exchanged for the other, a lost bias, a tail that rounds differently."""
    rng = np.random.default_rng(n_heads)
    alpha, b = (ops.upload(rng.standard_normal((33, n_heads)).astype(F32) * 4) for _ in range(2))
    a = ops.upload(-np.exp(rng.standard_normal(n_heads)).astype(F32))
    dt = ops.upload(rng.standard_normal(n_heads).astype(F32))
    A = E.Arithmetic
    want_decay = special.exp(A, E.mul(a, special.softplus(A, E.add(alpha, dt))))
    want_beta = special.sigmoid(A, b)

    def run(rows):
        decay, beta = (poisoned(alpha[rows].shape) for _ in range(2))
        ops.delta_gates(decay, beta, alpha[rows], b[rows], a, dt)
        return np.concatenate([decay, beta], 1)

    assert_same_bits(check_row_independence(run), np.concatenate([want_decay, want_beta], 1))
    exact = np.exp(a.astype(np.float64) * np.logaddexp(0, alpha.astype(np.float64) + dt))
    # softplus 2.5 ulp, sum and product, times the largest exponent; exp itself 1.05 ulp
    bound = exact * (5 * np.abs(np.log(exact)) + 2) * 2.0**-23 + 2.0**-125
    assert_close(want_decay, exact, bound)
    ops.delta_gates(alpha, b, alpha, b, a, dt)
    assert_same_bits(alpha, want_decay)
    assert_same_bits(b, want_beta)


def sum_of_squares(x):
    lanes = np.zeros((*x.shape[:-1], 32 if x.shape[-1] <= 256 else 256), F32)
    n = lanes.shape[-1]
    for start in range(0, x.shape[-1], n):
        part = x[..., start:start + n]
        width = part.shape[-1]
        lanes[..., :width] = E.fma(part, part, lanes[..., :width])
    return E.halving_tree(lanes)


@pytest.mark.parametrize("d", [8, 24, 128, 272])
def test_l2_norm_equals_the_model_and_row_is_alone(d):
    """Catches a mean taken for a sum, an order of its own, a stride between rows ignored."""
    rng = np.random.default_rng(d)
    wide = ops.upload(rng.standard_normal((33, 3 * d + 5)).astype(F32))
    x = wide[:, 5:].reshape(33, 3, d)

    def run(rows):
        out = poisoned(x[rows].shape)
        ops.l2_norm(out, x[rows], 1e-6)
        return out

    want = E.mul(x, E.div(F32(1), E.sqrt(E.add(sum_of_squares(x), F32(1e-6))))[..., None])
    assert_same_bits(check_row_independence(run), want)
    assert_close(np.linalg.norm(want.astype(np.float64), axis=-1), np.ones((33, 3)), 1e-5)
    found = check_writes_only(lambda out: ops.l2_norm(out, x, 1e-6), x.shape)
    assert_same_bits(found, want)
    before = wide[:, :5].copy()
    ops.l2_norm(x, x, 1e-6)
    assert_same_bits(x, want)
    assert_same_bits(wide[:, :5], before)


@pytest.mark.parametrize("d", [16, 40, 128, 300])
def test_gated_rms_norm_equals_the_model_and_row_is_alone(d):
    """Catches the gate normed instead of the value, sigmoid for SiLU, the weight left out."""
    rng = np.random.default_rng(d)
    x, z = (ops.upload(rng.standard_normal((33, d)).astype(F32) * 3) for _ in range(2))
    weight = ops.upload(rng.standard_normal(d).astype(F32))

    def run(rows):
        out = poisoned(x[rows].shape)
        ops.gated_rms_norm(out, x[rows], z[rows], weight, 1e-6)
        return out

    factor = E.div(F32(1), E.sqrt(E.add(E.div(sum_of_squares(x), F32(d)), F32(1e-6))))
    want = E.mul(E.mul(E.mul(x, factor[:, None]), weight), special.silu(E.Arithmetic, z))
    assert_same_bits(check_row_independence(run), want)
    out = ops.upload(x)
    replay(lambda: ops.gated_rms_norm(out, x, z, weight, 1e-6))
    assert_same_bits(out, want)
    ops.gated_rms_norm(x, x, z, weight, 1e-6)
    assert_same_bits(x, want)


def test_norms_and_gates_refuse_what_does_not_fit():
    """Catches a weight or a bias of another width."""
    x, heads = np.zeros((2, 32), F32), np.zeros((2, 2, 16), F32)
    with pytest.raises(UsageError, match="l2_norm: eps"):
        ops.l2_norm(heads, heads, 0.0)
    with pytest.raises(UsageError, match="expected .rows, heads"):
        ops.l2_norm(x, x, 1e-6)
    with pytest.raises(UsageError, match="gated_rms_norm: weight"):
        ops.gated_rms_norm(x, x, x, x[0, :16], 1e-6)
    with pytest.raises(UsageError, match="delta_gates: dt"):
        ops.delta_gates(x, x, x, x, x[0], x[0, :16])


def test_the_models_sum_is_the_sum():
    """Catches a model that agrees with a wrong kernel: its lanes hold every index once."""
    state = np.arange(2 * 24 * 3, dtype=F32).reshape(2, 24, 3)
    x = np.arange(48, dtype=F32).reshape(2, 24)
    assert_same_bits(lane_sum(state, x), np.einsum("hij,hi->hj", state, x).astype(F32))
