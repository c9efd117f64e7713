"""Independent forward of qwen35: gated delta nets, gated attention, and the MTP block.

Written from the functional description of llama.cpp's graphs (src/models/qwen35.cpp and
delta-net-base.cpp at commit 0c1e57098bba), for reading, not for speed. It shares no line with
`cudflash.model`, `cudflash.ops` or `cudflash.loader`, and only the file reader with
`tests/reference/forward.py`.

The recurrence runs token by token, head by head. Letters in shape comments: T tokens, C hidden
width, H query heads, G key/value heads, D head width, P = key heads and Q = value heads of a delta
net, S their width, W taps of the convolution, V vocabulary.
"""

from dataclasses import dataclass

import numpy as np

from tests.reference.gguf_tensors import GGUFTensors


@dataclass(frozen=True)
class HybridForward:
    """Result of one pass."""

    logits: np.ndarray  # (T, V)
    layer_inputs: np.ndarray  # (L + 1, T, C): [l] enters layer l; [L] leaves the last layer
    hidden: np.ndarray  # (T, C) after the final norm: what the MTP block is given
    states: dict  # layer -> (delta state (Q, S, S) [key, value], last W - 1 rows that are convolved)


class HybridReference:
    """One qwen35 model.

    Parameters
    ----------
    path : str or Path
    dtype : numpy float type
    kv_dtype : numpy float type, optional
        Keys and values are rounded to this type and back, as a cache of that type would.
    """

    def __init__(self, path, dtype=np.float64, kv_dtype=None):
        self.file = GGUFTensors(path, dtype)
        self.dtype, self.kv_dtype = np.dtype(dtype), kv_dtype
        if self.file.arch != "qwen35":
            raise ValueError(f"{path}: this reference does not know architecture {self.file.arch}")
        key = self.file.arch_key
        self.n_layers = int(key("block_count")) - int(key("nextn_predict_layers", 0))
        self.n_heads = int(key("attention.head_count"))
        self.n_kv_heads = int(key("attention.head_count_kv"))
        self.head_dim = int(key("attention.key_length"))
        self.eps = float(key("attention.layer_norm_rms_epsilon"))
        self.n_k, self.n_v = int(key("ssm.group_count")), int(key("ssm.time_step_rank"))
        self.width, self.taps = int(key("ssm.state_size")), int(key("ssm.conv_kernel"))
        self.head_name = "output.weight" if "output.weight" in self.file else "token_embd.weight"
        self._made = {}

    # ---- the passes -----------------------------------------------------------------------------

    def forward(self, tokens):
        """Run `tokens` (T,) from an empty state."""
        x = self.file.rows("token_embd.weight", np.asarray(tokens, np.int64))  # (T, C)
        inputs, states = [x], {}
        for layer in range(self.n_layers):
            name = f"blk.{layer}."
            h = self._rms(x, self._w(name + "attn_norm.weight"))
            if self.is_recurrent(layer):
                mixed, states[layer] = self._delta_net(h, name)
            else:
                mixed = self._attention(h, name, np.arange(len(x)))
            x = x + mixed
            x = x + self._ffn(x, name)
            inputs.append(x)
        hidden = self._rms(x, self._w("output_norm.weight"))
        logits = hidden @ self._w(self.head_name).T
        return HybridForward(logits, np.stack(inputs), hidden, states)

    def mtp(self, tokens, hidden, positions):
        """Run the MTP block over rows (token, hidden row before it), all in one causal sequence.

        Parameters
        ----------
        tokens : (T,) ids whose embedding is joined
        hidden : (T, C) rows after the final norm of the target (or of this block)
        positions : (T,)

        Returns
        -------
        (logits (T, V), hidden (T, C)) after the block's own final norm
        """
        name = f"blk.{self.n_layers}."
        own = name + "nextn."
        table = own + "embed_tokens.weight"
        table = table if table in self.file else "token_embd.weight"
        e = self.file.rows(table, np.asarray(tokens, np.int64))
        joined = np.concatenate(
            [self._rms(e, self._w(own + "enorm.weight")),
             self._rms(np.asarray(hidden, self.dtype), self._w(own + "hnorm.weight"))], axis=1,
        )  # fmt: skip
        x = joined @ self._w(own + "eh_proj.weight").T  # (T, 2 C) -> (T, C)
        h = self._rms(x, self._w(name + "attn_norm.weight"))
        x = x + self._attention(h, name, np.asarray(positions))
        x = x + self._ffn(x, name)
        norm = own + "shared_head_norm.weight"
        out = self._rms(x, self._w(norm if norm in self.file else "output_norm.weight"))
        head = own + "shared_head_head.weight"
        return out @ self._w(head if head in self.file else self.head_name).T, out

    def draft(self, tokens, hidden, anchor, k):
        """Greedy MTP drafts after committed `tokens` (n,) with target rows `hidden` (n, C).

        Row p joins the token at p + 1 with the hidden row at p, at position p; a drafted token joins
        with the block's own output, one position on.
        """
        ids, rows = [*list(tokens[1:]), anchor], list(hidden)
        found = []
        for _ in range(k):
            logits, out = self.mtp(ids, np.stack(rows), np.arange(len(ids)))
            found.append(int(np.argmax(logits[-1])))
            ids.append(found[-1])
            rows.append(out[-1])
        return found

    # ---- layers ---------------------------------------------------------------------------------

    def is_recurrent(self, layer):
        """Whether a layer is a delta net."""
        pattern = self.file.arch_key("attention.recurrent_layers", None)
        if pattern is not None:
            return bool(pattern[layer])
        return (layer + 1) % int(self.file.arch_key("full_attention_interval")) != 0

    def _delta_net(self, h, name):
        """h (T, C) -> (what joins the residual stream (T, C), state after the last token)."""
        n_tokens, P, Q, S = len(h), self.n_k, self.n_v, self.width
        u = h @ self._w(name + "attn_qkv.weight").T  # (T, 2 P S + Q S)
        z = (h @ self._w(name + "attn_gate.weight").T).reshape(n_tokens, Q, S)
        beta = _sigmoid(h @ self._w(name + "ssm_beta.weight").T)  # (T, Q)
        rate = h @ self._w(name + "ssm_alpha.weight").T + self._w(name + "ssm_dt.bias")
        decay = np.exp(self._w(name + "ssm_a") * np.logaddexp(0, rate))  # (T, Q), below 1

        padded = np.concatenate([np.zeros((self.taps - 1, u.shape[1]), u.dtype), u])
        taps = self._w(name + "ssm_conv1d.weight")  # (channels, W), oldest row first
        c = np.stack([(padded[t : t + self.taps] * taps.T).sum(0) for t in range(n_tokens)])
        c = c * _sigmoid(c)
        q, k, v = np.split(c, [P * S, 2 * P * S], axis=1)
        q, k = (self._unit(part.reshape(n_tokens, P, S)) for part in (q, k))
        v = v.reshape(n_tokens, Q, S)

        state = np.zeros((Q, S, S), self.dtype)  # [value head, key dimension, value dimension]
        out = np.empty((n_tokens, Q, S), self.dtype)
        for t in range(n_tokens):
            for j in range(Q):
                key, query = k[t, j % P], q[t, j % P]
                state[j] *= decay[t, j]
                wrong = v[t, j] - key @ state[j]
                state[j] += np.outer(key, beta[t, j] * wrong)
                out[t, j] = query @ state[j] / np.sqrt(S)
        out = self._rms(out, self._w(name + "ssm_norm.weight")) * (z * _sigmoid(z))
        joined = out.reshape(n_tokens, Q * S) @ self._w(name + "ssm_out.weight").T
        return joined, (state, padded[n_tokens:])

    def _attention(self, h, name, positions):
        """h (T, C) -> what joins the residual stream (T, C)."""
        T, H, G, D = len(h), self.n_heads, self.n_kv_heads, self.head_dim
        pairs = (h @ self._w(name + "attn_q.weight").T).reshape(T, H, 2, D)
        q, gate = pairs[:, :, 0], pairs[:, :, 1]
        k = (h @ self._w(name + "attn_k.weight").T).reshape(T, G, D)
        v = (h @ self._w(name + "attn_v.weight").T).reshape(T, G, D)
        q = self._rotate(self._rms(q, self._w(name + "attn_q_norm.weight")), positions)
        k = self._rotate(self._rms(k, self._w(name + "attn_k_norm.weight")), positions)
        if self.kv_dtype is not None:
            k, v = (part.astype(self.kv_dtype).astype(self.dtype) for part in (k, v))
        scale = float(self.file.arch_key("attention.scale", 0.0)) or D**-0.5
        out = np.empty((T, H, D), self.dtype)
        future = np.arange(T)[:, None] < np.arange(T)[None, :]
        for head in range(H):
            scores = q[:, head] @ k[:, head // (H // G)].T * scale
            scores[future] = -np.inf
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            weights /= weights.sum(axis=1, keepdims=True)
            out[:, head] = weights @ v[:, head // (H // G)]
        out = out * _sigmoid(gate)
        return out.reshape(T, H * D) @ self._w(name + "attn_output.weight").T

    def _ffn(self, x, name):
        h = self._rms(x, self._w(name + "post_attention_norm.weight"))
        gate = h @ self._w(name + "ffn_gate.weight").T
        up = h @ self._w(name + "ffn_up.weight").T
        return (gate * _sigmoid(gate) * up) @ self._w(name + "ffn_down.weight").T

    # ---- pieces ---------------------------------------------------------------------------------

    def _w(self, name):
        if name not in self._made:
            self._made[name] = self.file.array(name)
        return self._made[name]

    def _rms(self, x, weight):
        return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + self.eps) * weight

    def _unit(self, x):
        return x / np.sqrt(np.sum(x * x, axis=-1, keepdims=True) + self.eps)

    def _rotate(self, x, positions):
        """x (T, heads, D): element i turns with i + n / 2; the rest of a head stays."""
        n = int(self.file.arch_key("rope.dimension_count"))
        base = float(self.file.arch_key("rope.freq_base"))
        sections = self.file.arch_key("rope.dimension_sections")
        frequency = base ** (-2.0 * np.arange(n // 2) / n)
        for pair in range(n // 2):  # pairs are dealt to three axes; text moves along all of them
            turn = pair % sum(sections)
            if turn >= 3 * sections[turn % 3]:
                frequency[pair] = 0.0  # a fourth axis, on which text stands still
        angle = np.asarray(positions, np.float64)[:, None] * frequency
        cos, sin = (f(angle).astype(self.dtype)[:, None, :] for f in (np.cos, np.sin))
        low, high = x[..., : n // 2], x[..., n // 2 : n]
        return np.concatenate(
            [low * cos - high * sin, low * sin + high * cos, x[..., n:]], axis=-1
        )


def _sigmoid(x):
    e = np.exp(-np.abs(x))  # by sign, so that exp never overflows
    return np.where(x >= 0, 1.0, e).astype(x.dtype) / (1 + e)
