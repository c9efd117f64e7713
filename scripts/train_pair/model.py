"""The target in torch: muse-glimmer, as `tests/reference/forward.py` states it, batched for training.

Rotation is split-half here and interleaved in the file; `export.interleave` reorders the rows.
Letters in shape comments: B sequences, S tokens, C hidden width, H query heads, G key/value heads,
D head width, N chunks of W tokens (W the sliding window).
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from scripts.train_pair import shapes


def rms(x, weight, eps):
    """RMS norm in float32; ``weight`` None: no weight."""
    x = x.float()
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return y if weight is None else y * weight


def linear(x, weight):
    """Matrix product in bfloat16, where the tile instructions are."""
    return F.linear(x.bfloat16(), weight.bfloat16())


def rotate(x, cos, sin):
    """x (..., D) with cos and sin (..., D / 2): element i pairs with i + D / 2."""
    low, high = x.float().chunk(2, -1)
    return torch.cat((low * cos - high * sin, low * sin + high * cos), -1)


def rope_table(n, dim, base):
    """Cos and sin of positions 0 to n - 1: two of (n, dim / 2), float32."""
    frequency = base ** (-torch.arange(dim // 2, dtype=torch.float64) / (dim // 2))
    angle = torch.arange(n, dtype=torch.float64)[:, None] * frequency
    return angle.cos().float(), angle.sin().float()


def init_target(shape, seed):
    """Random parameters by the trainer's names."""
    g = torch.Generator().manual_seed(seed)
    C = shape.hidden_dim

    def matrix(n, k, gain=1.0):
        return torch.randn(n, k, generator=g) * (gain / math.sqrt(k))

    params = {
        "embedding": torch.randn(shape.vocab_size, C, generator=g),
        "head": matrix(shape.vocab_size, C, 0.3),
        "output_norm": torch.ones(C),
    }
    for layer in range(shape.n_layers):
        name = f"layers.{layer}."
        params |= {
            name + "attn_q": matrix(shape.q_dim, C), name + "attn_k": matrix(shape.kv_dim, C),
            name + "attn_v": matrix(shape.kv_dim, C), name + "attn_gate": matrix(shape.q_dim, C),
            name + "attn_output": matrix(C, shape.q_dim),
            name + "ffn_gate": matrix(shape.ffn_dim, C), name + "ffn_up": matrix(shape.ffn_dim, C),
            name + "ffn_down": matrix(C, shape.ffn_dim),
            name + "attn_norm": torch.ones(C), name + "ffn_norm": torch.ones(C),
            # small, so that a deep stack starts close to its embedding
            name + "post_attention_norm": torch.full((C,), 0.3),
            name + "post_ffw_norm": torch.full((C,), 0.3),
            name + "attn_q_norm": torch.ones(shape.head_dim),
            name + "attn_k_norm": torch.ones(shape.head_dim),
        }  # fmt: skip
    return {k: v.requires_grad_() for k, v in params.items()}


def grow(params, period, n_layers):
    """Make a stack deeper without changing what it computes, see ``shapes.grown_from``.

    Added layers add nothing until they have learnt to, since the norms behind their branches start
    at 0.

    Parameters
    ----------
    params : dict of str to Tensor
    period, n_layers : int
        As in ``shapes.grown_from``.

    Returns
    -------
    dict of str to Tensor
        New leaves.
    """
    grown = {k: v for k, v in params.items() if not k.startswith("layers.")}
    sources = shapes.grown_from(n_layers_of(params), n_layers, period)
    for layer, (source, silent) in enumerate(sources):
        for short, w in layer_weights(params, source).items():
            mute = silent and short in ("post_attention_norm", "post_ffw_norm")
            grown[f"layers.{layer}.{short}"] = torch.zeros_like(w) if mute else w
    return {k: v.detach().clone().requires_grad_() for k, v in grown.items()}


def n_layers_of(params):
    """Layers of a set of parameters."""
    return 1 + max(int(name.split(".")[1]) for name in params if name.startswith("layers."))


def sliding_attention(q, k, v, window):
    """Causal attention with a window, in chunks of one window.

    Parameters
    ----------
    q : Tensor of shape (B, S, H, D)
        S a multiple of ``window``.
    k, v : Tensor of shape (B, S, G, D)

    Returns
    -------
    Tensor of shape (B, S, H, D), bfloat16
    """
    B, S, H, D = q.shape
    G, W = k.shape[2], window
    N, R = S // W, H // G
    q = q.view(B, N, W, G, R, D).permute(0, 1, 3, 4, 2, 5).reshape(B, N, G, R * W, D).bfloat16()

    def with_previous(t):
        t = t.view(B, N, W, G, D).permute(0, 1, 3, 2, 4).bfloat16()  # (B, N, G, W, D)
        before = F.pad(t[:, :-1], (0, 0, 0, 0, 0, 0, 1, 0))
        return torch.cat((before, t), 3)

    k, v = with_previous(k), with_previous(v)  # (B, N, G, 2 W, D)
    row = torch.arange(W)[:, None]
    distance = row + W - torch.arange(2 * W)[None, :]  # (W, 2 W): query minus key position
    visible = (distance >= 0) & (distance < W)
    first = visible & (torch.arange(2 * W)[None, :] >= W)  # nothing before the first chunk
    mask = torch.stack([first] + [visible] * (N - 1))[None, :, None, None]  # (1, N, 1, 1, W, 2 W)
    scores = (q @ k.mT).float().view(B, N, G, R, W, 2 * W) * D**-0.5
    weights = scores.masked_fill(~mask, float("-inf")).softmax(-1).bfloat16()
    out = weights.view(B, N, G, R * W, 2 * W) @ v
    return out.view(B, N, G, R, W, D).permute(0, 1, 4, 2, 3, 5).reshape(B, S, H, D)


def full_attention(q, k, v):
    """Causal attention over everything; shapes as in ``sliding_attention``."""
    repeat = q.shape[2] // k.shape[2]
    q, k, v = (t.bfloat16().transpose(1, 2) for t in (q, k, v))
    k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def attention_inputs(w, shape, y, cos_sin):
    """Project, norm and rotate: q (B, S, H, D), k and v (B, S, G, D)."""
    B, S, _ = y.shape
    D = shape.head_dim
    q = linear(y, w["attn_q"]).view(B, S, -1, D)
    k = linear(y, w["attn_k"]).view(B, S, -1, D)
    v = linear(y, w["attn_v"]).view(B, S, -1, D)
    q, k = rms(q, w["attn_q_norm"], shape.rms_eps), rms(k, w["attn_k_norm"], shape.rms_eps)
    if cos_sin is not None:
        q, k = rotate(q, *cos_sin), rotate(k, *cos_sin)
    return q, k, v


def after_attention(w, shape, x, y, attended):
    """Gate, project, norm and add; then the feed-forward branch."""
    gate = torch.sigmoid(linear(y, w["attn_gate"]).float())
    a = attended.reshape(*x.shape[:-1], -1).float() * gate
    o = linear(a, w["attn_output"])
    x = x + rms(o, w["post_attention_norm"], shape.post_norm_eps)
    y = rms(x, w["ffn_norm"], shape.rms_eps)
    h = F.silu(linear(y, w["ffn_gate"]).float()) * linear(y, w["ffn_up"]).float()
    f = linear(h, w["ffn_down"])
    return x + rms(f, w["post_ffw_norm"], shape.post_norm_eps)


def target_layer(w, shape, x, cos_sin, full):
    """One layer: x (B, S, C) -> (B, S, C); ``w`` holds the layer's own weights."""
    y = rms(x, w["attn_norm"], shape.rms_eps)
    q, k, v = attention_inputs(w, shape, y, None if full else cos_sin)
    a = full_attention(q, k, v) if full else sliding_attention(q, k, v, shape.window)
    return after_attention(w, shape, x, y, a)


def layer_weights(params, layer):
    """The weights of one layer by their short names."""
    start = f"layers.{layer}."
    return {k.removeprefix(start): v for k, v in params.items() if k.startswith(start)}


def target_hidden(p, shape, ids, rope, taps=(), layer_of=target_layer):
    """Run the layers.

    Parameters
    ----------
    ids : Tensor of shape (B, S), int64
        S a multiple of the window.
    rope : (cos, sin), each of shape (at least S, D / 2)
    taps : sequence of int
        Layers whose output is returned too.
    layer_of : callable
        ``target_layer``, or a compiled form of it: two graphs do for all layers.

    Returns
    -------
    hidden : Tensor of shape (B, S, C)
        After the final norm.
    tapped : list of Tensor of shape (B, S, C)
    """
    S = ids.shape[1]
    cos_sin = tuple(t[:S, None, :] for t in rope)
    x = rms(F.embedding(ids, p["embedding"]), None, shape.rms_eps)
    tapped = []
    for layer in range(shape.n_layers):
        x = layer_of(layer_weights(p, layer), shape, x, cos_sin, shape.is_full(layer))
        if layer in taps:
            tapped.append(x)
    return rms(x, p["output_norm"], shape.rms_eps), tapped


def head_logits(hidden, head, shape):
    """Scale, then cap if the shape says so: (..., C) -> (..., V), float32."""
    z = linear(hidden, head).float() * shape.logit_scale
    return z if shape.softcap is None else shape.softcap * torch.tanh(z / shape.softcap)


def output_loss(hidden, head, shape, labels):
    """Mean cross entropy in nats; hidden (B, S, C), labels (B, S)."""
    logits = head_logits(hidden, head, shape)
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class TargetLoss:
    """Mean cross entropy of ids[:, 1:] given what is before; compiled piece by piece.

    Parameters
    ----------
    params, shape
        Of the target.
    """

    def __init__(self, params, shape):
        torch._dynamo.config.cache_size_limit = 64  # lengths x kinds of layer x with gradients
        self.params, self.shape = params, shape
        self.rope = rope_table(shape.context_length, shape.head_dim, shape.rope_base)
        self.layer = torch.compile(target_layer, dynamic=False)
        self.output = torch.compile(output_loss, dynamic=False)

    def __call__(self, ids):
        """ids (B, S + 1)."""
        hidden, _ = target_hidden(
            self.params, self.shape, ids[:, :-1], self.rope, layer_of=self.layer
        )
        return self.output(hidden, self.params["head"], self.shape, ids[:, 1:])
