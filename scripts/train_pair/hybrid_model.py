"""The hybrid in torch: qwen35 and its MTP block, as `tests/reference/hybrid.py` states them.

Names and order of rows are the file's already. Letters in shape comments: B sequences, S tokens,
C hidden width, H query heads, G key/value heads, D head width; P key heads and Q value heads of a
delta net, E their width, N chunks of L tokens.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from scripts.train_pair.model import (
    full_attention,
    head_logits,
    layer_weights,
    linear,
    output_loss,
    rms,
    rope_table,
    rotate,
)

CHUNK = 64  # tokens whose recurrence is solved at once; never changes what is computed
BRANCH_GAIN = 0.5  # of what joins the stream at first
DECAY_RANGE, STEP_RANGE = (1.0, 16.0), (1e-3, 0.1)  # of exp(log_a), and of the softplus


def init_target(shape, seed):
    """Random parameters by the trainer's names."""
    g = torch.Generator().manual_seed(seed)
    C = shape.hidden_dim
    params = {
        "embedding": torch.randn(shape.vocab_size, C, generator=g),
        "head": _matrix(g, shape.vocab_size, C, 0.3),
        "output_norm": torch.ones(C),
    }
    for layer in range(shape.n_layers):
        make = _init_attention if shape.is_full(layer) else _init_delta
        params |= {f"layers.{layer}.{k}": v for k, v in make(shape, g).items()}
    return {k: v.requires_grad_() for k, v in params.items()}


def init_mtp(shape, seed):
    """Random parameters of the MTP block; it starts as a map of the embedding and hidden row."""
    g = torch.Generator().manual_seed(seed)
    C = shape.hidden_dim
    params = _init_attention(shape, g) | {"eh_proj": _matrix(g, C, 2 * C)}
    params |= {name: torch.ones(C) for name in ("enorm", "hnorm", "shared_head_norm")}
    return {k: v.requires_grad_() for k, v in params.items()}


def _matrix(g, n, k, gain=1.0):
    return torch.randn(n, k, generator=g) * (gain / math.sqrt(k))


def _init_ffn(shape, g):
    C = shape.hidden_dim
    return {
        "attn_norm": torch.ones(C), "post_attention_norm": torch.ones(C),
        "ffn_gate": _matrix(g, shape.ffn_dim, C), "ffn_up": _matrix(g, shape.ffn_dim, C),
        "ffn_down": _matrix(g, C, shape.ffn_dim, BRANCH_GAIN),
    }  # fmt: skip


def _init_attention(shape, g):
    C = shape.hidden_dim
    return _init_ffn(shape, g) | {
        "attn_q": _matrix(g, 2 * shape.q_dim, C), "attn_k": _matrix(g, shape.kv_dim, C),
        "attn_v": _matrix(g, shape.kv_dim, C),
        "attn_output": _matrix(g, C, shape.q_dim, BRANCH_GAIN),
        "attn_q_norm": torch.ones(shape.head_dim), "attn_k_norm": torch.ones(shape.head_dim),
    }  # fmt: skip


def _init_delta(shape, g):
    C, Q = shape.hidden_dim, shape.n_delta_v_heads

    def uniform(low, high):
        return low + (high - low) * torch.rand(Q, generator=g)

    step = uniform(*(math.log(v) for v in STEP_RANGE)).exp()
    return _init_ffn(shape, g) | {
        "attn_qkv": _matrix(g, shape.conv_width, C),
        "attn_gate": _matrix(g, shape.delta_v_width, C),
        "ssm_out": _matrix(g, C, shape.delta_v_width, BRANCH_GAIN),
        "ssm_alpha": _matrix(g, Q, C), "ssm_beta": _matrix(g, Q, C),
        "ssm_conv": _matrix(g, shape.conv_width, shape.conv_taps),
        "ssm_dt": step + torch.log(-torch.expm1(-step)),  # the inverse of softplus
        "log_a": uniform(*DECAY_RANGE).log(),
        "ssm_norm": torch.ones(shape.delta_dim),
    }  # fmt: skip


# ---- layers -------------------------------------------------------------------------------------


def unit(x, eps):
    """Scale rows to length 1."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)


def short_conv(u, before, weight):
    """Causal convolution of each channel, oldest row first in the kernel, then SiLU.

    Parameters
    ----------
    u : Tensor of shape (B, S, channels)
    before : Tensor of shape (B, W - 1, channels)
        Rows before them.
    weight : Tensor of shape (channels, W)
    """
    S, rows = u.shape[1], torch.cat((before, u), 1)
    return F.silu(sum(rows[:, i : i + S] * weight[:, i] for i in range(weight.shape[1])))


def delta_rule(q, k, v, beta, log_decay, state):
    """Run the recurrence of every head, a chunk at a time, in float32.

    Per token, with a = exp(log_decay): state = a state; d = beta (v - k state);
    state = state + k d^T; out = q state / sqrt(E).

    Parameters
    ----------
    q, k : Tensor of shape (B, S, Q, E)
    v : Tensor of shape (B, S, Q, E)
    beta, log_decay : Tensor of shape (B, S, Q)
    state : Tensor of shape (B, Q, E, E)
        [key dimension, value dimension].

    Returns
    -------
    out : Tensor of shape (B, S, Q, E)
    state : Tensor of shape (B, Q, E, E)
    """
    B, S, Q, E = q.shape
    L = min(CHUNK, S)
    q, k, v = (t.view(B, -1, L, Q, E).permute(0, 3, 1, 2, 4) for t in (q, k, v))  # (B, Q, N, L, E)
    beta, log_decay = (t.view(B, -1, L, Q).permute(0, 3, 1, 2) for t in (beta, log_decay))
    since = log_decay.cumsum(-1)  # log of the decay since the chunk began
    below = torch.ones(L, L, dtype=torch.bool).tril()
    ratio = since[..., :, None] - since[..., None, :]
    ratio = ratio.masked_fill(~below, float("-inf")).exp()
    q = q * E**-0.5
    # d of a token depends on those before it in the chunk: a triangular system, one for all chunks
    system = (beta[..., None] * ratio * (k @ k.mT)).tril(-1)
    grown = since.exp()[..., None]
    right = beta[..., None] * torch.cat((v, grown * k), -1)
    one = torch.eye(L)
    solved = torch.linalg.solve_triangular(system + one, right, upper=False, unitriangular=True)
    from_v, from_state = solved.split(E, -1)
    inside, q, left = ratio * (q @ k.mT), grown * q, (since[..., -1:] - since).exp()[..., None] * k
    out = []
    for n in range(S // L):
        d = from_v[:, :, n] - from_state[:, :, n] @ state
        out.append(q[:, :, n] @ state + inside[:, :, n] @ d)
        state = grown[:, :, n, -1:] * state + left[:, :, n].mT @ d
    out = torch.stack(out, 2)  # (B, Q, N, L, E)
    return out.permute(0, 2, 3, 1, 4).reshape(B, S, Q, E), state


def delta_net(w, shape, x, history, state):
    """What a delta net adds to the stream, and its state after the rows.

    Parameters
    ----------
    x : Tensor of shape (B, S, C)
    history : Tensor of shape (B, W - 1, channels)
        Rows that were convolved before.
    state : Tensor of shape (B, Q, E, E)
    """
    B, S, _ = x.shape
    P, Q, E, width = shape.n_delta_k_heads, shape.n_delta_v_heads, shape.delta_dim, shape.delta_k_width
    y = rms(x, w["attn_norm"], shape.rms_eps)
    u = linear(y, w["attn_qkv"]).float()
    c = short_conv(u, history, w["ssm_conv"])
    q, k, v = c.split((width, width, shape.delta_v_width), -1)
    q, k = (unit(t.reshape(B, S, P, E), shape.rms_eps).repeat(1, 1, Q // P, 1) for t in (q, k))
    beta = torch.sigmoid(F.linear(y, w["ssm_beta"]))
    rate = F.softplus(F.linear(y, w["ssm_alpha"]) + w["ssm_dt"])
    out, state = delta_rule(q, k, v.reshape(B, S, Q, E), beta, -w["log_a"].exp() * rate, state)
    z = linear(y, w["attn_gate"]).float().view(B, S, Q, E)
    out = rms(out, w["ssm_norm"], shape.rms_eps) * F.silu(z)
    history = torch.cat((history, u), 1)[:, S:]
    return linear(out.reshape(B, S, -1), w["ssm_out"]).float(), history, state


def attention_inputs(w, shape, y, cos_sin):
    """Project, norm and rotate: q and its gate (B, S, H, D), k and v (B, S, G, D)."""
    B, S, _ = y.shape
    D, n = shape.head_dim, shape.rope_dims
    q, gate = linear(y, w["attn_q"]).view(B, S, -1, 2, D).unbind(3)
    k, v = (linear(y, w[name]).view(B, S, -1, D) for name in ("attn_k", "attn_v"))

    def turn(t, norm):
        t = rms(t, norm, shape.rms_eps)
        return torch.cat((rotate(t[..., :n], *cos_sin), t[..., n:]), -1)

    return turn(q, w["attn_q_norm"]), gate, turn(k, w["attn_k_norm"]), v


def attention_output(w, attended, gate):
    """Gate and project: (B, S, H, D) -> (B, S, C)."""
    a = attended.float() * torch.sigmoid(gate.float())
    return linear(a.flatten(2), w["attn_output"]).float()


def feed_forward(w, shape, x):
    """What the feed-forward branch adds."""
    y = rms(x, w["post_attention_norm"], shape.rms_eps)
    h = F.silu(linear(y, w["ffn_gate"]).float()) * linear(y, w["ffn_up"]).float()
    return linear(h, w["ffn_down"]).float()


def delta_layer(w, shape, x):
    """A whole delta-net layer from an empty state: (B, S, C) -> (B, S, C)."""
    history, state = empty_state(shape, len(x))
    x = x + delta_net(w, shape, x, history, state)[0]
    return x + feed_forward(w, shape, x)


def attention_layer(w, shape, x, cos_sin):
    """A whole attention layer: (B, S, C) -> (B, S, C)."""
    q, gate, k, v = attention_inputs(w, shape, rms(x, w["attn_norm"], shape.rms_eps), cos_sin)
    x = x + attention_output(w, full_attention(q, k, v), gate)
    return x + feed_forward(w, shape, x)


def empty_state(shape, n):
    """History of the convolution and delta state of ``n`` sequences that have not begun."""
    E = shape.delta_dim
    return (torch.zeros(n, shape.conv_taps - 1, shape.conv_width),
            torch.zeros(n, shape.n_delta_v_heads, E, E))  # fmt: skip


def rope(shape):
    """Cos and sin of all positions: two of (positions, rope_dims / 2)."""
    return rope_table(shape.context_length, shape.rope_dims, shape.rope_base)


def target_hidden(p, shape, ids, table, taps=(), delta=delta_layer, attention=attention_layer):
    """Final rows (B, S, C) of ids (B, S), after the final norm; and those that leave the taps.

    S is a multiple of ``CHUNK``, or smaller.
    """
    cos_sin = tuple(t[: ids.shape[1], None, :] for t in table)
    x = F.embedding(ids, p["embedding"])
    tapped = []
    for layer in range(shape.n_layers):
        w = layer_weights(p, layer)
        x = attention(w, shape, x, cos_sin) if shape.is_full(layer) else delta(w, shape, x)
        if layer in taps:
            tapped.append(x)
    return rms(x, p["output_norm"], shape.rms_eps), tapped


class TargetLoss:
    """Mean cross entropy of ids[:, 1:] given what is before; compiled piece by piece.

    Parameters
    ----------
    params, shape
        Of the target.
    """

    def __init__(self, params, shape, compiled=True):
        def wrap(function):
            return torch.compile(function, dynamic=False) if compiled else function

        torch._dynamo.config.cache_size_limit = 64
        self.params, self.shape, self.table = params, shape, rope(shape)
        self.pieces = {"delta": wrap(delta_layer), "attention": wrap(attention_layer)}
        self.output = wrap(output_loss)

    def __call__(self, ids):
        """ids (B, S + 1)."""
        hidden, _ = target_hidden(
            self.params, self.shape, ids[:, :-1], self.table, **self.pieces
        )
        return self.output(hidden, self.params["head"], self.shape, ids[:, 1:])


# ---- the MTP block ------------------------------------------------------------------------------


def mtp_step(w, shape, embedding, tokens, hidden, cos_sin, earlier):
    """One depth of the block over all rows at once.

    Row i of depth d continues the chain that began at row i of depth 0: it sees the keys of depth 0
    up to its own start, then one key of every later depth of its chain.

    Parameters
    ----------
    tokens : Tensor of shape (B, S)
        Tokens that are joined.
    hidden : Tensor of shape (B, S, C)
        The target's final rows at depth 0, then the block's own.
    cos_sin : (cos, sin) of shape (S, 1, rope_dims / 2)
        Of the rows' positions.
    earlier : list of (k, v), each of shape (B, S, G, D)
        Of the depths before.

    Returns
    -------
    out : Tensor of shape (B, S, C)
        After the block's own norm.
    earlier : list
        With this depth.
    """
    e = F.embedding(tokens, embedding)
    both = (rms(e, w["enorm"], shape.rms_eps), rms(hidden, w["hnorm"], shape.rms_eps))
    x = linear(torch.cat(both, -1), w["eh_proj"]).float()
    y = rms(x, w["attn_norm"], shape.rms_eps)
    q, gate, k, v = attention_inputs(w, shape, y, cos_sin)
    earlier = [*earlier, (k, v)]
    x = x + attention_output(w, chain_attention(q, earlier), gate)
    x = x + feed_forward(w, shape, x)
    return rms(x, w["shared_head_norm"], shape.rms_eps), earlier


def chain_attention(q, depths):
    """Attention of the rows of the last of ``depths``; see ``mtp_step``. (B, S, H, D)."""
    B, S, H, D = q.shape
    repeat = H // depths[0][0].shape[2]
    q = q.transpose(1, 2).bfloat16()  # (B, H, S, D)
    heads = [tuple(t.transpose(1, 2).bfloat16().repeat_interleave(repeat, 1) for t in pair)
             for pair in depths]  # fmt: skip
    (k, v), own = heads[0], heads[1:]
    past = torch.ones(S, S, dtype=torch.bool).tril()
    scores = (q @ k.mT).float().masked_fill(~past, float("-inf"))
    scores = [scores, *((q * other).float().sum(-1, keepdim=True) for other, _ in own)]
    weights = (torch.cat(scores, -1) * D**-0.5).softmax(-1).bfloat16()
    out = weights[..., :S] @ v
    for i, (_, other) in enumerate(own):
        out = out + weights[..., S + i : S + i + 1] * other
    return out.transpose(1, 2)


def mtp_loss(out, head, shape, teacher, temperature):
    """Cross entropy against the target's distribution; and the likeliest tokens (B, S)."""
    logits = head_logits(out, head, shape)
    logp = (logits / temperature).log_softmax(-1)
    return -(teacher * logp).sum(-1).mean(), logits.argmax(-1)
