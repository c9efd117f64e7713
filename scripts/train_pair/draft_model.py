"""The drafts in torch: many blocks of many sequences at once, with a window of context each.

Same forward as `tests/reference/draft.py`; what differs is the batching. Blocks of one sequence
start ``STRIDE`` tokens apart, so that their windows are shifted views of one array of context rows.
Letters in shape comments: B sequences, N blocks each, R rows per block, W window, C hidden width,
H query heads, G key/value heads, D head width, S sink rows, T context rows of a sequence.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from scripts.train_pair.model import head_logits, layer_weights, linear, rms, rotate

STRIDE = 8  # tokens between the anchors of a sequence


def init_draft(shape, seed):
    """Random parameters by the trainer's names; DFlash2's additions change nothing at first."""
    g = torch.Generator().manual_seed(seed)
    C = shape.hidden_dim

    def matrix(n, k, gain=1.0):
        return torch.randn(n, k, generator=g) * (gain / math.sqrt(k))

    params = {
        "fc": matrix(C, len(shape.taps) * C),
        "hidden_norm": torch.ones(C),
        "output_norm": torch.ones(C),
    }
    for layer in range(shape.n_layers):
        name = f"layers.{layer}."
        params |= {
            name + "attn_q": matrix(shape.q_dim, C), name + "attn_k": matrix(shape.kv_dim, C),
            name + "attn_v": matrix(shape.kv_dim, C),
            name + "attn_output": matrix(C, shape.q_dim, 0.5),
            name + "ffn_gate": matrix(shape.ffn_dim, C), name + "ffn_up": matrix(shape.ffn_dim, C),
            name + "ffn_down": matrix(C, shape.ffn_dim, 0.5),
            name + "attn_norm": torch.ones(C), name + "ffn_norm": torch.ones(C),
            name + "attn_q_norm": torch.ones(shape.head_dim),
            name + "attn_k_norm": torch.ones(shape.head_dim),
        }  # fmt: skip
    if shape.is_dflash2:
        params |= init_dflash2(shape, matrix)
    return {k: v.requires_grad_() for k, v in params.items()}


def init_dflash2(shape, matrix):
    """Convolutions that pass their input, and a selector that adds nothing."""
    C, k, params = shape.hidden_dim, shape.conv_kernel, {}
    for layer in range(shape.n_layers):
        for part in ("attn", "ffn"):
            base = torch.zeros(2, k, C)
            base[:, 0] = 1.0
            name = f"layers.{layer}.{part}_conv_"
            params[name + "base"] = base
            params[name + "proj"] = torch.zeros(2 * k * (C // shape.conv_group), C)
    params["selector_predecessor"] = matrix(shape.vocab_size, shape.selector_rank)
    params["selector_successor"] = torch.zeros(shape.vocab_size, shape.selector_rank)
    params["selector_hidden"] = matrix(shape.selector_rank, C)
    return params


def fuse(params, shape, taps):
    """Rows of the target (..., n_taps * C) -> context rows (..., C)."""
    return rms(linear(taps, params["fc"]), params["hidden_norm"], shape.rms_eps)


def convolve(y, kernels, base, side):
    """out[t] = sum over o of (base[side, o] + kernels[t, side, o]) * y[t - o], 0 before the block.

    Parameters
    ----------
    y : Tensor of shape (B, N, R, C)
    kernels : Tensor of shape (B, N, R, 2, taps, groups)
    base : Tensor of shape (2, taps, C)
    """
    groups = kernels.shape[-1]
    y = y.float()
    out = 0.0
    for o in range(base.shape[1]):
        dynamic = kernels[:, :, :, side, o].repeat_interleave(y.shape[-1] // groups, -1)
        shifted = y if o == 0 else F.pad(y[:, :, :-o], (0, 0, o, 0))
        out = out + (base[side, o] + dynamic) * shifted
    return out


def kernels_of(w, part, shape, y):
    """Dynamic kernels (B, N, R, 2, taps, groups) of a branch, from its unconvolved input."""
    return linear(y, w[part + "_conv_proj"]).float().view(
        *y.shape[:3], 2, shape.conv_kernel, shape.hidden_dim // shape.conv_group
    )


def windows_of(rows, n_blocks, window):
    """Context rows (B, T, G, D) -> the window before every block (B, N, G, W, D)."""
    B, T, G, D = rows.shape
    chunks = rows.view(B, T // STRIDE, STRIDE, G, D)
    shifted = [chunks[:, i : i + n_blocks] for i in range(window // STRIDE)]
    found = torch.stack(shifted, 2)  # (B, N, W / STRIDE, STRIDE, G, D)
    return found.permute(0, 1, 4, 2, 3, 5).reshape(B, n_blocks, G, window, D)


def attend(q, k, v, context_k, context_v, shape, n_sink):
    """Attention of block rows over sink, window and block.

    Parameters
    ----------
    q : Tensor of shape (B, N, R, H, D)
    k, v : Tensor of shape (B, N, R, G, D)
    context_k, context_v : Tensor of shape (B, S + T, G, D)
    n_sink : int
        S, the first context rows; they are seen from everywhere.

    Returns
    -------
    Tensor of shape (B, N, R, H * D), bfloat16
    """
    B, N, R, H, D = q.shape
    G, W = k.shape[3], shape.window
    M = H // G * R
    q = q.view(B, N, R, G, H // G, D).permute(0, 1, 3, 4, 2, 5).reshape(B, N, G, M, D).bfloat16()
    k, v = (t.transpose(2, 3).bfloat16() for t in (k, v))  # (B, N, G, R, D)
    near_k, near_v = (windows_of(t[:, n_sink:].bfloat16(), N, W) for t in (context_k, context_v))
    row = torch.arange(R)
    # window key i lies W - i before the anchor: row r sees it iff r + W - i < W
    mask = [torch.arange(W)[None, :] > row[:, None]]
    inside = row[None, :] <= row[:, None] if shape.causal else torch.ones(R, R, dtype=torch.bool)
    mask.append(inside)
    scores = [q @ near_k.mT, q @ k.mT]
    if n_sink:
        sink_k, sink_v = (t[:, :n_sink].bfloat16().transpose(1, 2) for t in (context_k, context_v))
        flat = q.transpose(1, 2).reshape(B, G, N * M, D)
        scores.append((flat @ sink_k.mT).view(B, G, N, M, n_sink).transpose(1, 2))
        mask.append(torch.ones(R, n_sink, dtype=torch.bool))
    scores = torch.cat([s.float() for s in scores], -1) * D**-0.5
    mask = torch.cat(mask, -1).repeat(H // G, 1)  # (M, keys)
    weights = scores.masked_fill(~mask, float("-inf")).softmax(-1).bfloat16()
    out = weights[..., :W] @ near_v + weights[..., W : W + R] @ v
    if n_sink:
        far = weights[..., W + R :].transpose(1, 2).reshape(B, G, N * M, n_sink)
        out = out + (far @ sink_v).view(B, G, N, M, D).transpose(1, 2)
    return out.view(B, N, G, H // G, R, D).permute(0, 1, 4, 2, 3, 5).reshape(B, N, R, H * D)


def draft_layer(w, shape, x, context, context_rope, block_rope, n_sink):
    """One layer of the block side, with the keys and values of its context.

    Parameters
    ----------
    w : dict
        The layer's own weights.
    x : Tensor of shape (B, N, R, C)
    context : Tensor of shape (B, S + T, C)
        Fused rows; no input norm and no convolution touches them.
    context_rope : (cos, sin) of shape (S + T, 1, D / 2)
    block_rope : (cos, sin) of shape (N, R, 1, D / 2)
    n_sink : int

    Returns
    -------
    Tensor of shape (B, N, R, C)
    """
    B, N, R, _ = x.shape
    D = shape.head_dim

    def key_value(rows, rope):
        k = linear(rows, w["attn_k"]).view(*rows.shape[:-1], -1, D)
        v = linear(rows, w["attn_v"]).view(*rows.shape[:-1], -1, D)
        return rotate(rms(k, w["attn_k_norm"], shape.rms_eps), *rope), v

    context_k, context_v = key_value(context, context_rope)
    y = rms(x, w["attn_norm"], shape.rms_eps)
    kernels = None
    if shape.is_dflash2:
        kernels = kernels_of(w, "attn", shape, y)
        y = convolve(y, kernels, w["attn_conv_base"], 0)
    q = linear(y, w["attn_q"]).view(B, N, R, -1, D)
    q = rotate(rms(q, w["attn_q_norm"], shape.rms_eps), *block_rope)
    k, v = key_value(y, block_rope)
    out = linear(attend(q, k, v, context_k, context_v, shape, n_sink), w["attn_output"])
    if shape.is_dflash2:
        out = convolve(out, kernels, w["attn_conv_base"], 1)
    x = x + out
    y = rms(x, w["ffn_norm"], shape.rms_eps)
    if shape.is_dflash2:
        kernels = kernels_of(w, "ffn", shape, y)
        y = convolve(y, kernels, w["ffn_conv_base"], 0)
    h = F.silu(linear(y, w["ffn_gate"]).float()) * linear(y, w["ffn_up"]).float()
    out = linear(h, w["ffn_down"])
    if shape.is_dflash2:
        out = convolve(out, kernels, w["ffn_conv_base"], 1)
    return x + out


class DraftForward:
    """Blocks of a draft, compiled layer by layer.

    Parameters
    ----------
    params, shape
        Of the draft.
    embedding : Tensor of shape (V, C)
        The target's, raw.
    rope : (cos, sin), each (positions, D / 2)
    compiled : bool
    """

    def __init__(self, params, shape, embedding, rope, compiled=True):
        torch._dynamo.config.cache_size_limit = 64
        self.params, self.shape, self.embedding, self.rope = params, shape, embedding, rope
        self.layer = torch.compile(draft_layer, dynamic=False) if compiled else draft_layer

    def __call__(self, taps, tokens, first, n_blocks, n_rows, n_sink, mask_token):
        """Run blocks whose anchors are at first, first + STRIDE, ...

        Parameters
        ----------
        taps : Tensor of shape (B, positions, n_taps * C)
        tokens : Tensor of shape (B, positions), int64
        first : int
            Position of the first anchor, at least sink + window.
        n_blocks, n_rows : int
        n_sink : int
        mask_token : int

        Returns
        -------
        Tensor of shape (B, N, R, C)
            Before the final norm.
        """
        shape = self.shape
        n_context = (n_blocks - 1) * STRIDE + shape.window
        start = first - shape.window
        rows = torch.cat((torch.arange(n_sink), torch.arange(start, start + n_context)))
        context = fuse(self.params, shape, taps[:, rows])
        context_rope = tuple(t[rows][:, None, :] for t in self.rope)
        anchors = first + STRIDE * torch.arange(n_blocks)
        places = anchors[:, None] + torch.arange(n_rows)  # (N, R)
        block_rope = tuple(t[places][:, :, None, :] for t in self.rope)
        ids = torch.full((len(tokens), n_blocks, n_rows), mask_token)
        ids[:, :, 0] = tokens[:, anchors]
        x = F.embedding(ids, self.embedding).float()
        for layer in range(shape.n_layers):
            w = layer_weights(self.params, layer)
            x = self.layer(w, shape, x, context, context_rope, block_rope, n_sink)
        return x


def soft_loss(x, output_norm, head, teacher, weights, shape, temperature):
    """Cross entropy against the target's distribution, both at one temperature.

    Parameters
    ----------
    x : Tensor of shape (B, N, R - 1, C)
        Rows 1 and on.
    teacher : Tensor of shape (B, N, R - 1, V)
        Probabilities.
    weights : Tensor of shape (R - 1,)

    Returns
    -------
    loss : Tensor ()
    choice : Tensor of shape (B, N, R - 1)
        Most likely token.
    """
    logits = head_logits(rms(x, output_norm, shape.rms_eps), head, shape)
    logp = (logits / temperature).log_softmax(-1)
    per_row = -(teacher * logp).sum(-1).mean((0, 1))
    return (per_row * weights).sum() / weights.sum(), logits.argmax(-1)


def selector_loss(x, w, head, previous, teacher, weights, shape, temperature):
    """As ``soft_loss``, of the scores given the true predecessor; and of the logits alone.

    Parameters
    ----------
    w : dict
        output_norm and the three selector matrices.
    previous : Tensor of shape (B, N, R - 1), int64
        Token before each row.

    Returns
    -------
    loss : Tensor ()
        Mean of both cross entropies, the scores' weighing twice.
    choice : Tensor of shape (B, N, R - 1)
        Best score given the true predecessor.
    """
    hidden = rms(x, w["output_norm"], shape.rms_eps)
    logits = head_logits(hidden, head, shape)
    gate = linear(hidden, w["selector_hidden"]).float()
    mixed = F.embedding(previous, w["selector_predecessor"]) * gate
    scores = logits + linear(mixed, w["selector_successor"]).float()
    total = 0.0
    for share, z in ((2 / 3, scores), (1 / 3, logits)):
        logp = (z / temperature).log_softmax(-1)
        per_row = -(teacher * logp).sum(-1).mean((0, 1))
        total = total + share * (per_row * weights).sum() / weights.sum()
    return total, scores.argmax(-1)
