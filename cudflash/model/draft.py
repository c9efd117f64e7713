"""The forward passes of DFlash and DFlash2 drafts, written once over the op set.

Owns the order of operations. Must not know which backend runs them, transactions, or sampling.
Configuration decides; there is no branch on a kind but for the tensors that a kind has. Invariant:
no step reads a number that changes between two passes of the same shape except from a buffer.

Context rows: ``c = norm(fc [tap, tap, ..])``, once; keys and values of every layer from ``c``, with
neither that layer's input norm nor its convolution. Block rows: [anchor, mask, ...], raw embedding
rows of the target, through all layers; they see the context and one another as their layer says.

Letters: M rows, C hidden_dim, H heads, G key/value heads, D head_dim, F ffn_dim, V vocab_size,
T draft rows, K candidates, R width of the codebooks.

Source: z-lab dflash 0.1.0 ``dflash/model.py``; llama.cpp 0c1e57098bba ``src/models/dflash.cpp``
(409-562 convolution and selector, 567-856 both modes).
"""

from functools import partial

from cudflash.model import inputs as row_inputs


class _Pass:
    """What both passes do with rows."""

    def __init__(self, ops, model, work):
        self.ops, self.model, self.config, self.work = ops, model, model.config, work

    def quantize(self, x, matrices):
        """Inputs of the matrices by layout: x itself, or x quantised once per layout."""
        return row_inputs.quantized(self.ops, self.work, x, matrices)

    def activated(self, gate, up, matrix):
        """Inputs of the matrix from act(gate) * up; gate is overwritten."""
        return row_inputs.activated(self.ops, self.work, gate, up, self.config.activation, matrix)

    def linear(self, out, inputs, matrix):
        """out = inputs @ matrix.T."""
        self.ops.matmul(out, inputs[matrix.layout], matrix)

    def heads(self, x):
        """(M, heads * D) as (M, heads, D)."""
        return x.reshape(x.shape[0], -1, self.config.head_dim)

    def norm_and_rotate(self, x, weight, positions):
        """Head norm, then rotation to absolute positions; in place."""
        config = self.config
        flat = x.reshape(-1, config.head_dim)
        self.ops.rms_norm(flat, flat, weight, config.rms_eps)
        self.ops.rope(
            self.heads(x), positions, self.model.rope_table, config.rope.style, config.rope.n_dims
        )


class ContextPass(_Pass):
    """Keys and values of M committed rows, from the target's taps.

    Parameters
    ----------
    ops, model, work
    context : DraftContext
    positions : int32 buffers (all, ring, sink) of shape (M,)
        Absolute positions; those at and past the sink; those in the sink. -1: not written.
    recorder : Recorder
        Of the layers.
    """

    def __init__(self, ops, model, work, context, positions, recorder):
        super().__init__(ops, model, work)
        self.context, self.recorder = context, recorder
        self.positions, self.ring, self.sink = positions

    def run(self):
        """Read ``work``'s "taps" (M, n_taps * C), write all layers' caches."""
        ops, work, config = self.ops, self.work, self.config
        n, n_kv = len(self.positions), config.n_kv_heads * config.head_dim
        taps = work.view("taps", n, len(config.taps) * config.hidden_dim)
        fused, c = (work.view(name, n, config.hidden_dim) for name in ("fused", "c"))
        self.linear(fused, self.quantize(taps, [self.model.fc]), self.model.fc)
        ops.rms_norm(c, fused, self.model.hidden_norm, config.rms_eps)
        projections = [m for layer in self.model.layers for m in (layer.attn_k, layer.attn_v)]
        inputs = self.quantize(c, projections)
        k, v = work.view("context_k", n, n_kv), work.view("context_v", n, n_kv)
        layers = zip(self.model.layers, self.context.layers, strict=True)
        for index, (layer, cache) in enumerate(layers):
            self.recorder.record(index, None, partial(self.layer, layer, cache, inputs, k, v))

    def layer(self, layer, cache, inputs, k, v):
        """Keys and values of one layer."""
        self.linear(k, inputs, layer.attn_k)
        self.linear(v, inputs, layer.attn_v)
        self.norm_and_rotate(k, layer.attn_k_norm, self.positions)
        k3, v3 = self.heads(k), self.heads(v)
        if cache.sink_k is None:
            self.ops.kv_write(cache.k, cache.v, k3, v3, self.positions)
        else:
            self.ops.kv_write(cache.k, cache.v, k3, v3, self.ring)
            self.ops.kv_write(cache.sink_k, cache.sink_v, k3, v3, self.sink)


class BlockPass(_Pass):
    """One block of M rows and what its first ``n_tokens`` draft rows propose.

    Parameters
    ----------
    ops, model, work
    context : DraftContext
    inbox : InBox
    outbox : OutBox
    n_rows : int
        Rows of the block: the anchor and n_rows - 1 masks.
    n_tokens : int
        Draft rows whose logits are wanted.
    recorder : Recorder
        Of the layers.
    """

    def __init__(self, ops, model, work, context, inbox, outbox, n_rows, n_tokens, recorder):
        super().__init__(ops, model, work)
        self.context, self.inbox, self.outbox = context, inbox, outbox
        self.recorder = recorder
        self.n_rows, self.n_tokens = n_rows, n_tokens
        self.x, self.h, self.y = (
            work.view(name, n_rows, self.config.hidden_dim) for name in ("x", "h", "y")
        )
        self.positions = inbox.positions[:n_rows]

    def run(self):
        """Leaves "hidden" and logits in ``work``, tokens and scores in the outbox."""
        config = self.config
        self.ops.embed_rows(
            self.x, self.model.embedding, self.inbox.ids[: self.n_rows], config.embedding_scale
        )
        layers = zip(self.model.layers, self.context.layers, strict=True)
        for index, (layer, cache) in enumerate(layers):
            self.recorder.record(index, None, partial(self.layer, layer, cache))
        hidden = self.work.view("hidden", self.n_rows, config.hidden_dim)
        self.ops.rms_norm(hidden, self.x, self.model.output_norm, config.rms_eps)
        logits = self.head(hidden[: self.n_tokens + 1])
        if config.kind == "dflash2":
            self.ops.argmax(self.outbox.ids[:1], logits[:1])
            self.select(hidden[1 : self.n_tokens + 1], logits[1:])
        else:
            self.ops.argmax(self.outbox.ids[: self.n_tokens + 1], logits)

    def layer(self, layer, cache):
        """One layer of the block."""
        self.attention(layer, cache)
        self.feed_forward(layer)

    def attention(self, layer, cache):
        """x += finish(W_o attention(W_q, W_k, W_v of prepare(norm(x))))."""
        ops, work, config, n = self.ops, self.work, self.config, self.n_rows
        n_q, n_kv = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
        q, a = work.view("q", n, n_q), work.view("a", n, n_q)
        k, v = work.view("k", n, n_kv), work.view("v", n, n_kv)
        inputs, kernels = self.prepare(
            layer.attn_norm, layer.attn_conv_proj, layer.attn_conv_base,
            [layer.attn_q, layer.attn_k, layer.attn_v],
        )  # fmt: skip
        self.linear(q, inputs, layer.attn_q)
        self.linear(k, inputs, layer.attn_k)
        self.linear(v, inputs, layer.attn_v)
        self.norm_and_rotate(q, layer.attn_q_norm, self.positions)
        self.norm_and_rotate(k, layer.attn_k_norm, self.positions)
        ops.kv_write(cache.k, cache.v, self.heads(k), self.heads(v), self.positions)
        n_sink = None if cache.sink_k is None else self.inbox.n_sink
        spans = self.inbox.spans[cache.window, cache.causal][:n]
        ops.attention_span(
            self.heads(a), self.heads(q), cache.k, cache.v, cache.sink_k, cache.sink_v,
            spans, n_sink, config.attn_scale, 0.0,
        )  # fmt: skip
        self.linear(self.y, self.quantize(a, [layer.attn_output]), layer.attn_output)
        if config.value_scale != 1.0:
            ops.scale(self.y, self.y, config.value_scale)
        self.finish(kernels, layer.attn_conv_base)

    def feed_forward(self, layer):
        """x += finish(W_down (act(W_gate h) * (W_up h))), h = prepare(norm(x))."""
        config, n = self.config, self.n_rows
        gate = self.work.view("ffn_gate", n, config.ffn_dim)
        up = self.work.view("ffn_up", n, config.ffn_dim)
        inputs, kernels = self.prepare(
            layer.ffn_norm, layer.ffn_conv_proj, layer.ffn_conv_base,
            [layer.ffn_gate, layer.ffn_up],
        )  # fmt: skip
        self.linear(gate, inputs, layer.ffn_gate)
        self.linear(up, inputs, layer.ffn_up)
        self.linear(self.y, self.activated(gate, up, layer.ffn_down), layer.ffn_down)
        self.finish(kernels, layer.ffn_conv_base)

    def prepare(self, norm, projection, base, matrices):
        """(inputs of a branch's matrices, kernels of its convolution): of normed rows, convolved.

        Both sides' kernels come from the unconvolved input; None where the draft has none.
        """
        ops, work, config = self.ops, self.work, self.config
        if projection is None:
            return row_inputs.normed(
                ops, work, self.h, self.x, norm, config.rms_eps, matrices
            ), None
        ops.rms_norm(self.h, self.x, norm, config.rms_eps)
        kernels = work.view("kernels", self.n_rows, projection.n)
        self.linear(kernels, self.quantize(self.h, [projection]), projection)
        out = work.view("convolved", self.n_rows, config.hidden_dim)
        ops.dynamic_conv(out, self.h, kernels, base, 0, config.conv_group)
        return self.quantize(out, matrices), kernels

    def finish(self, kernels, base):
        """x += y, convolved first where the draft does that."""
        branch = self.y
        if kernels is not None:
            branch = self.work.view("convolved", self.n_rows, self.config.hidden_dim)
            self.ops.dynamic_conv(branch, self.y, kernels, base, 1, self.config.conv_group)
        self.ops.add(self.x, self.x, branch)

    def head(self, rows):
        """Logits of some hidden rows: the shared head with the draft's own scale and cap."""
        ops, config = self.ops, self.config
        logits = self.work.logits[: rows.shape[0]]
        self.linear(logits, self.quantize(rows, [self.model.head]), self.model.head)
        if config.logit_scale != 1.0:
            ops.scale(logits, logits, config.logit_scale)
        if config.final_softcap is not None:
            ops.softcap(logits, logits, config.final_softcap)
        ops.check_finite(self.outbox.finite[0], logits)
        return logits

    def select(self, rows, logits):
        """Walk through the best candidates of the draft rows."""
        ops, model, work, n = self.ops, self.model, self.work, self.n_tokens
        k, rank = self.config.selector_top_k, self.config.selector_rank
        candidates, unary = self.inbox.candidates, work.view("unary", n, k)
        ops.top_k(candidates[1 : n + 1], unary, logits)
        gate = work.view("gate", n, rank)
        self.linear(gate, self.quantize(rows, [model.selector_hidden]), model.selector_hidden)
        before, after = work.view("predecessors", n, k * rank), work.view("successors", n, k * rank)
        ops.embed_rows(
            before.reshape(n * k, rank), model.predecessor, candidates[:n].reshape(-1), 1.0
        )
        ops.embed_rows(
            after.reshape(n * k, rank), model.successor, candidates[1 : n + 1].reshape(-1), 1.0
        )
        lattice = work.view("lattice", n, k * k)
        ops.selector_lattice(
            lattice.reshape(n, k, k), after.reshape(n, k, rank), before.reshape(n, k, rank), gate,
            unary,
        )  # fmt: skip
        ops.check_finite(self.outbox.finite[1], lattice)
        ops.selector_walk(
            self.outbox.ids[1 : n + 1], self.outbox.index[:n], self.outbox.scores[:n],
            self.outbox.confidence[:n], lattice.reshape(n, k, k), candidates[1 : n + 1],
        )  # fmt: skip
