"""The recurrence of a gated delta net in float32, operation by operation: the tests' model.

Written from docs/NUMERICS.md alone, over :mod:`tests.helpers.exact_f32`; plain lists of rows, no
slots and no tape, so that it shows what a state must be and not how it is kept.
"""

from dataclasses import dataclass

import numpy as np

from cudflash.ops import cpu as ops
from cudflash.ops.cpu import special
from tests.helpers import exact_f32 as E

F32 = np.float32


@dataclass(frozen=True)
class Shape:
    """Sizes of one delta layer."""

    n_k: int = 2
    n_v: int = 4
    d_k: int = 24
    d_v: int = 32
    n_taps: int = 4

    @property
    def width(self):
        """Channels of the convolution."""
        return 2 * self.n_k * self.d_k + self.n_v * self.d_v


class Model:
    """Convolution and delta rule of one layer, row after row from the start of a sequence."""

    def __init__(self, shape, weight):
        self.shape, self.weight = shape, weight
        self.before = np.zeros((shape.n_taps - 1, shape.width), F32)
        self.state = np.zeros((shape.n_v, shape.d_k, shape.d_v), F32)

    def conv(self, x):
        """silu(convolution) of rows (M, C)."""
        rows = np.concatenate([self.before, x])
        out = np.empty_like(x)
        for r in range(len(x)):
            acc = E.mul(self.weight[0], rows[r])
            for j in range(1, self.shape.n_taps):
                acc = E.fma(self.weight[j], rows[r + j], acc)
            out[r] = special.silu(E.Arithmetic, acc)
        self.before = rows[len(x):]
        return out

    def delta(self, q, k, v, decay, beta, scale):
        """Outputs (M, Hv, Dv)."""
        out = np.empty_like(v)
        head = np.arange(self.shape.n_v) % self.shape.n_k
        for r in range(len(v)):
            a, kk, qq = decay[r][:, None], k[r][head], q[r][head]
            p = lane_sum(self.state, kk)
            d = E.mul(E.sub(v[r], E.mul(a, p)), beta[r][:, None])
            self.state = E.fma(kk[:, :, None], d[:, None, :], E.mul(a[:, :, None], self.state))
            out[r] = E.mul(lane_sum(self.state, qq), F32(scale))
        return out


def lane_sum(state, x):
    """Sum over i of state[h, i, j] * x[h, i] in 8 lanes and a halving tree."""
    n_heads, d_k, d_v = state.shape
    lanes = np.zeros((n_heads, d_v, 8), F32)
    for i in range(d_k):
        lanes[..., i % 8] = E.fma(
            state[:, i], x[:, i, None], np.ascontiguousarray(lanes[..., i % 8])
        )
    return E.halving_tree(lanes)


@dataclass
class Rows:
    """Random inputs of many rows; ``rows[a:b]`` are copies on the backend."""

    u: np.ndarray
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    decay: np.ndarray
    beta: np.ndarray

    @classmethod
    def random(cls, shape, n, seed=0):
        """``n`` rows with normed keys and queries and decays near 1."""
        rng = np.random.default_rng([seed, n, shape.width])

        def normal(*dims):
            return rng.standard_normal(dims).astype(F32)

        def unit(x):
            return (x / np.linalg.norm(x, axis=-1, keepdims=True)).astype(F32)

        return cls(
            normal(n, shape.width), unit(normal(n, shape.n_k, shape.d_k)),
            unit(normal(n, shape.n_k, shape.d_k)), normal(n, shape.n_v, shape.d_v),
            np.exp(-0.3 * rng.random((n, shape.n_v))).astype(F32),
            rng.random((n, shape.n_v)).astype(F32),
        )  # fmt: skip

    def __getitem__(self, at):
        return Rows(*(ops.upload(a[at]) for a in vars(self).values()))

    def __len__(self):
        return len(self.u)


class State:
    """Buffers of one layer as the ops take them, with ``n_slots`` slots and a tape."""

    def __init__(self, shape, weight, block_rows=16, n_slots=2, poison=True):
        self.shape, self.weight, self.block_rows = shape, ops.upload(weight), block_rows
        fill = (lambda a: a.fill(np.nan)) if poison else (lambda a: None)
        self.history = ops.zeros((n_slots, shape.n_taps - 1, shape.width), F32)
        self.states = ops.zeros((n_slots, shape.n_v, shape.d_v // 16, shape.d_k, 16), F32)
        self.tape_u = ops.zeros((block_rows, shape.width), F32)
        self.tape_k = ops.zeros((2, block_rows, shape.n_k, shape.d_k), F32)
        self.tape_d = ops.zeros((block_rows, shape.n_v, shape.d_v), F32)
        self.tape_decay = ops.zeros((2, block_rows, shape.n_v), F32)
        for array in (self.tape_u, self.tape_k, self.tape_d, self.tape_decay, self.history,
                      self.states):
            fill(array)
        self.plan = ops.zeros((8,), np.int32)
        self.control = ops.zeros((8 + n_slots,), np.int32)
        self.control[8:] = -1
        self.at = ops.zeros((1,), np.int32)

    def run(self, position, rows, scale=0.25):
        """One pass over ``rows`` (a Rows on the backend): (conv output, delta output)."""
        n = len(rows)
        self.at[0] = position
        c = ops.empty((n, self.shape.width), F32)
        o = ops.empty((n, self.shape.n_v, self.shape.d_v), F32)
        c.fill(np.nan), o.fill(np.nan)
        ops.recurrent_open(self.plan, self.control, self.at, n, self.block_rows)
        ops.short_conv(c, rows.u, self.weight, self.history, self.tape_u, self.plan)
        ops.delta_rule(o, rows.q, rows.k, rows.v, rows.decay, rows.beta, scale, self.states,
                       self.tape_k, self.tape_d, self.tape_decay, self.plan)
        return c, o

    def copy(self, position, target, source=-1):
        """Put the state at a position into a slot."""
        self.at[0] = position
        ops.recurrent_open(self.plan, self.control, self.at, 0, self.block_rows, source, target)
        ops.recurrent_copy(self.history, self.tape_u, self.states, self.tape_k, self.tape_d,
                           self.tape_decay, self.plan)

    def at_position(self, position):
        """(history, state) at a position, copied into the slot that is not in use."""
        spare = int(1 - self.control[0])
        if self.control[8 + self.control[0]] > position:
            spare = 1 - spare  # the newest slot is ahead and is not the source
        self.copy(position, spare)
        assert self.plan[0] == 1, f"no state at {position}"
        s = self.states[spare].transpose(0, 2, 1, 3)  # (Hv, Dk, tiles, 16)
        return self.history[spare].copy(), s.reshape(s.shape[0], s.shape[1], -1).copy()


def conv_weight(shape, seed=1):
    """Random taps (T, C)."""
    rng = np.random.default_rng([seed, shape.width])
    return rng.standard_normal((shape.n_taps, shape.width)).astype(F32)
