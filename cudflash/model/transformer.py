"""The forward pass of every supported target, written once over the op set.

Owns the order of operations. Must not know which backend runs them, caches' transactions, or
sampling. Configuration decides between the architectures; there is no branch on a name. Invariant:
no step reads a number that changes between two passes of the same shape except from a buffer, and
every row is computed alone, so a row's bits do not depend on the rows beside it.

Letters: M rows, C hidden_dim, H heads, G key/value heads, D head_dim, F ffn_dim, V vocab_size.

Source of the graphs: llama.cpp 0c1e57098bba, ``src/models/{llama,qwen2,qwen3,gemma3,muse-glimmer,
qwen35}.cpp``.
"""

import math
from functools import partial

import numpy as np

from cudflash.model import inputs as row_inputs
from cudflash.model.repeats import Repeats

ALL, LAST, NONE = "all", "last", "none"  # rows that leave the last layer


def selected_rows(n_rows, which):
    """Slice of an M-row pass for one of ALL, LAST, NONE."""
    return {ALL: slice(0, n_rows), LAST: slice(n_rows - 1, n_rows), NONE: slice(0, 0)}[which]


def layer_repeats(ops, model, cache):
    """Repeats of the layers of a model with their caches."""
    return Repeats(ops, model.config.layers, tuple(zip(model.layers, cache.layers, strict=True)))


class Pass:
    """One forward over M rows: buffers bound to names, so that the steps read as a recipe.

    Parameters
    ----------
    ops : module
    model : TargetModel
    work : Workspace
    cache : TargetCache
    ids, positions : int32 buffers of shape (M,)
    repeats : Repeats, optional
        Of model and cache, where several passes share them.
    """

    def __init__(self, ops, model, work, cache, ids, positions, repeats=None):
        self.ops, self.model, self.config = ops, model, model.config
        self.repeats = repeats
        self.work, self.cache = work, cache
        self.ids, self.positions = ids, positions
        self.n_rows = len(ids)
        self.x = work.view("x", self.n_rows, self.config.hidden_dim)  # (M, C) residual stream
        self.h = work.view("h", self.n_rows, self.config.hidden_dim)
        self.y = work.view("y", self.n_rows, self.config.hidden_dim)

    def forward(self, which=LAST, taps=(), taps_out=None):
        """Run all layers; the selected rows of ``x`` hold the final residual afterwards.

        Parameters
        ----------
        which : {"all", "last", "none"}
            Rows that are needed after the last layer. The others still write their keys and
            values there, but skip its attention and feed-forward.
        taps : tuple of int
            Layers (0-based) whose output residual is wanted.
        taps_out : float32 buffer of shape (M, len(taps), C), optional
            Filled in the order of ``taps``; owned by the caller.
        """
        config, n_layers = self.config, len(self.model.layers)
        if n_layers - 1 in taps:
            which = ALL
        self.cache.open(self.positions)
        self.embed()
        repeats = self.repeats or layer_repeats(self.ops, self.model, self.cache)
        recorder = repeats.recorder()
        for index, layer in enumerate(self.model.layers):
            last = index == n_layers - 1
            rows = selected_rows(self.n_rows, which if last else ALL)
            cache = self.cache.layers[index]
            steps = partial(self.layer, config.layers[index], layer, cache, rows)
            recorder.record(index, (rows.start, rows.stop), steps)
            for slot, tapped in enumerate(taps):
                if tapped == index:
                    self.ops.copy(taps_out[:, slot], self.x)

    def layer(self, config, layer, cache, rows):
        """One layer; without rows that leave it, its keys, values and states alone."""
        mix = self.attention if config.delta is None else self.delta_net
        mix(config, layer, cache, rows)
        if rows.start != rows.stop:
            self.feed_forward(config, layer, rows)

    def embed(self):
        """x = embedding rows, scaled or normed where the architecture says so."""
        ops, config = self.ops, self.config
        out = self.h if config.embedding_norm else self.x
        ops.embed_rows(out, self.model.embedding, self.ids, config.embedding_scale)
        if config.embedding_norm:
            ops.rms_norm(self.x, self.h, None, config.rms_eps)

    def attention(self, config, layer, cache, rows):
        """x[rows] += W_o (attention(q, cache) [* sigmoid(gate)]); keys and values of all rows."""
        ops, work, n, d = self.ops, self.work, self.n_rows, self.config.head_dim
        n_q, n_kv = config.n_heads * d, config.n_kv_heads * d
        k, v = work.view("k", n, n_kv), work.view("v", n, n_kv)
        projections = (layer.attn_q, layer.attn_k, layer.attn_v, layer.attn_gate)
        inputs = self.normed(self.h, self.x, layer.attn_norm, projections)
        self.linear(k, inputs, layer.attn_k, layer.attn_k_bias)
        self.linear(v, inputs, layer.attn_v, layer.attn_v_bias)
        k, v = (t.reshape(n, -1, d) for t in (k, v))  # (M, G, D)
        self.head_norm(k, layer.attn_k_norm)
        self.rotate(k, config, layer)
        ops.kv_write(cache.k, cache.v, k, v, self.positions)
        if rows.start == rows.stop:
            return
        q, gate = self.queries(inputs, layer, n_q)
        q, a = (t.reshape(n, -1, d) for t in (q, work.view("a", n, n_q)))  # (M, H, D)
        self.rotate(q, config, layer)
        ops.attention(
            a[rows], q[rows], cache.k, cache.v, self.positions[rows],
            config.window or 0, self.config.attn_scale, self.config.attn_softcap or 0.0,
        )  # fmt: skip
        a = a.reshape(n, n_q)[rows]
        if gate is None:
            inputs = self.quantize(a, (layer.attn_output,))
        else:
            inputs = row_inputs.gated(ops, work, a, gate[rows], layer.attn_output)
        self.linear(self.y[rows], inputs, layer.attn_output, layer.attn_output_bias)
        self.add_branch(layer.post_attention_norm, rows)

    def rotate(self, heads, config, layer):
        """RoPE in place, where the layer has positions."""
        if config.rope is not None:
            self.ops.rope(
                heads, self.positions, layer.rope_table, config.rope.style, config.rope.n_dims
            )

    def queries(self, inputs, layer, n_q):
        """(q, gate): q (M, H * D), normed; gate a view (M, H, D), or None without one."""
        work, n, d = self.work, self.n_rows, self.config.head_dim
        q, gate = work.view("q", n, n_q), None
        if self.config.fused_q_gate:
            both = work.view("q_gate", n, 2 * n_q)
            self.linear(both, inputs, layer.attn_q)
            pairs = both.reshape(n, -1, 2 * d)  # per head: its queries, then its gates
            self.ops.rms_norm(
                q.reshape(-1, d), pairs.reshape(-1, 2 * d)[:, :d], layer.attn_q_norm,
                self.config.rms_eps,
            )  # fmt: skip
            return q, pairs[:, :, d:]
        self.linear(q, inputs, layer.attn_q, layer.attn_q_bias)
        if layer.attn_gate is not None:
            gate = work.view("attn_gate", n, n_q)
            self.linear(gate, inputs, layer.attn_gate)
            gate = gate.reshape(n, -1, d)
        self.head_norm(q.reshape(n, -1, d), layer.attn_q_norm)
        return q, gate

    def delta_net(self, config, layer, state, rows):
        """x[rows] += W_out (norm(delta rule of the convolved h) * silu(z)); the state of all rows.

        Source: llama.cpp 0c1e57098bba, ``src/models/{qwen35,delta-net-base}.cpp``.
        """
        ops, work, n, delta = self.ops, self.work, self.n_rows, config.delta
        eps = self.config.rms_eps
        u, c = (work.view(name, n, delta.conv_width) for name in ("conv_in", "conv_out"))
        z, o = (work.view(name, n, delta.v_width) for name in ("delta_gate", "delta_out"))
        decay, beta = (work.view(name, n, delta.n_v_heads) for name in ("decay", "beta"))
        projections = (layer.attn_qkv, layer.attn_gate, layer.ssm_alpha, layer.ssm_beta)
        inputs = self.normed(self.h, self.x, layer.attn_norm, projections)
        for out, matrix in zip((u, z, decay, beta), projections, strict=True):
            self.linear(out, inputs, matrix)
        ops.delta_gates(decay, beta, decay, beta, layer.ssm_a, layer.ssm_dt)
        ops.short_conv(c, u, layer.ssm_conv, *state.conv)
        split = 2 * delta.k_width
        qk = c[:, :split].reshape(n, 2 * delta.n_k_heads, delta.k_dim)
        ops.l2_norm(qk, qk, eps)
        v, o3 = (t.reshape(n, delta.n_v_heads, delta.v_dim) for t in (c[:, split:], o))
        ops.delta_rule(
            o3, qk[:, : delta.n_k_heads], qk[:, delta.n_k_heads :], v, decay, beta,
            1.0 / math.sqrt(delta.v_dim), *state.delta,
        )  # fmt: skip
        if rows.start == rows.stop:
            return
        heads = o[rows].reshape(-1, delta.v_dim)
        gates = z[rows].reshape(-1, delta.v_dim)
        ops.gated_rms_norm(heads, heads, gates, layer.ssm_norm, eps)
        inputs = self.quantize(o[rows], (layer.ssm_out,))
        self.linear(self.y[rows], inputs, layer.ssm_out)
        self.add_branch(layer.post_attention_norm, rows)

    def feed_forward(self, config, layer, rows):
        """x[rows] += W_down (act(W_gate h) * (W_up h))."""
        n = rows.stop - rows.start
        gate = self.work.view("ffn_gate", n, config.ffn_dim)
        up = self.work.view("ffn_up", n, config.ffn_dim)
        inputs = self.normed(
            self.h[rows], self.x[rows], layer.ffn_norm, (layer.ffn_gate, layer.ffn_up)
        )
        self.linear(gate, inputs, layer.ffn_gate)
        self.linear(up, inputs, layer.ffn_up)
        self.linear(self.y[rows], self.activated(gate, up, layer.ffn_down), layer.ffn_down)
        self.add_branch(layer.post_ffw_norm, rows)

    def head(self, rows, top=0):
        """work.logits[:len(rows)] = logits of the selected rows of x; tells the outcome of them.

        Parameters
        ----------
        rows : slice
        top : int
            Largest logits of each row that the outcome tells, 0 for none.
        """
        ops, work, config = self.ops, self.work, self.config
        n = rows.stop - rows.start
        logits = work.logits[:n]
        inputs = self.normed(
            self.h[rows], self.x[rows], self.model.output_norm, (self.model.output,)
        )
        self.linear(logits, inputs, self.model.output)
        if config.logit_scale != 1.0:
            ops.scale(logits, logits, config.logit_scale)
        if config.final_softcap is not None:
            ops.softcap(logits, logits, config.final_softcap)
        ops.check_finite(work.outcome.finite, logits)
        ops.argmax(work.outcome.next_ids[:n], logits)
        if top:
            ops.top_k(*work.outcome.candidates(n, top), logits)

    # -- parts used by several steps ----------------------------------------------------------

    def quantize(self, x, matrices):
        """Inputs of the matrices by layout: x itself, or x quantised once per layout."""
        return row_inputs.quantized(self.ops, self.work, x, matrices)

    def normed(self, h, x, weight, matrices):
        """Inputs of the matrices from normed rows of x; h holds the rows only where one needs them."""
        return row_inputs.normed(
            self.ops, self.work, h, x, weight, self.config.rms_eps, matrices
        )

    def activated(self, gate, up, matrix):
        """Inputs of the matrix from act(gate) * up; gate is overwritten."""
        return row_inputs.activated(self.ops, self.work, gate, up, self.config.activation, matrix)

    def linear(self, out, inputs, matrix, bias=None):
        """out = inputs @ matrix.T [+ bias]."""
        self.ops.matmul(out, inputs[matrix.layout], matrix)
        if bias is not None:
            self.ops.add_bias(out, out, bias)

    def head_norm(self, heads, weight):
        """RMS norm of every head, in place."""
        if weight is not None:
            flat = heads.reshape(-1, self.config.head_dim)  # (M * H, D)
            self.ops.rms_norm(flat, flat, weight, self.config.rms_eps)

    def add_branch(self, post_norm, rows):
        """x[rows] += y[rows], normed first where the architecture has a post norm."""
        branch = self.y[rows]
        if post_norm is not None:
            branch = self.h[rows]
            self.ops.rms_norm(branch, self.y[rows], post_norm, self.config.post_norm_eps)
        self.ops.add(self.x[rows], self.x[rows], branch)


def tap_buffer(allocator, max_rows, n_taps, hidden_dim):
    """Buffer for ``forward(taps_out=...)`` of up to ``max_rows`` rows."""
    return allocator.empty("taps", (max_rows, n_taps, hidden_dim), np.float32)
