"""Independent forward of DFlash and DFlash2 drafts: expand every weight, multiply plainly.

Written from z-lab dflash 0.1.0 (``dflash/model.py``) and the functional specification of
llama.cpp's graph (src/models/dflash.cpp at commit 0c1e57098bba). It shares no line with
`cudflash.model`, `cudflash.ops` or `cudflash.loader`, and reads its files with the `gguf` and
`safetensors` packages alone.

It refuses to do: caches (the whole context is given each time), sampling, speed. Pinned sink rows,
which neither of the two has, are one term of the mask, for tests that ask for them.

Letters in shape comments: N context rows, B block rows, n taps, C hidden width, H query heads,
G key/value heads, D head width, F feed-forward width, V vocabulary, K candidates, R codebook width,
k convolution taps, Z convolution groups, L layers.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors import deserialize

from tests.reference.gguf_tensors import GGUFTensors

# z-lab's name of a layer's part -> llama.cpp's
_LAYER_PARTS = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
    "attention_conv.base_kernel": "attn_conv_base",
    "attention_conv.kernel_projection.weight": "attn_conv_proj.weight",
    "mlp_conv.base_kernel": "ffn_conv_base",
    "mlp_conv.kernel_projection.weight": "ffn_conv_proj.weight",
}
_TOP_PARTS = {
    "fc.weight": "fc.weight",
    "hidden_norm.weight": "enc.output_norm.weight",
    "norm.weight": "output_norm.weight",
    "candidate_selector.predecessor_codebook": "selector_predecessor.weight",
    "candidate_selector.successor_codebook": "selector_successor.weight",
    "candidate_selector.hidden_projection.weight": "selector_hidden.weight",
}


@dataclass(frozen=True)
class Settings:
    """Numbers of one draft; `causal` per layer, `windows` per layer (None = full)."""

    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    eps: float
    rope_base: float
    block_size: int
    mask_token: int
    taps: tuple
    windows: tuple
    causal: tuple
    embedding_scale: float
    logit_scale: float
    softcap: float
    group: int  # channels per convolution group, 0 in DFlash
    top_k: int  # candidates, 0 in DFlash


@dataclass(frozen=True)
class Walk:
    """What the selector saw and chose, for block rows 1..B-1."""

    candidates: np.ndarray  # (B-1, K) token ids, best logit first
    unary: np.ndarray  # (B-1, K) their logits
    path_scores: np.ndarray  # (B-1, K) scores given the token chosen before
    lattice: np.ndarray  # (B-1, K, K) [predecessor candidate, successor]; [0]: anchor, repeated
    tokens: np.ndarray  # (B-1,)


class DraftReference:
    """One draft with the embedding and the head of its target.

    Parameters
    ----------
    path : str or Path
        GGUF file (mainline dialect) or z-lab directory.
    embedding, head : ndarray of shape (V, C)
        Of the target, raw: the draft takes no norm or scale of the target's.
    dtype : numpy float type
    is_causal : bool, None or "file"
        Replaces what the file says; None means the key is absent.
    sink : int
        First context rows that sliding layers see from anywhere.
    """

    def __init__(self, path, embedding, head, dtype=np.float64, is_causal="file", sink=0):
        self.dtype = np.dtype(dtype)
        self.sink = sink
        read = _read_directory if Path(path).is_dir() else _read_gguf
        self.weights, self.settings = read(path, self.dtype, is_causal)
        self.embedding = np.asarray(embedding, self.dtype)
        self.head = np.asarray(head, self.dtype)

    # ---- context side ---------------------------------------------------------------------------

    def fuse(self, taps):
        """taps (N, n, C), in the order of the tap list -> fused rows (N, C)."""
        rows = np.asarray(taps, self.dtype).reshape(len(taps), -1)
        return self._rms(rows @ self.weights["fc.weight"].T, "enc.output_norm.weight")

    def context(self, fused, positions):
        """Keys and values of committed tokens: two of (L, N, G, D). No input norm, no conv."""
        rows = [self._key_value(layer, fused, positions) for layer in range(self.settings.n_layers)]
        return np.stack([k for k, _ in rows]), np.stack([v for _, v in rows])

    # ---- block side -----------------------------------------------------------------------------

    def block(self, ids, context_k, context_v):
        """Run the block [anchor, mask, ...]; the context is positions 0..N-1, the anchor is at N.

        Returns
        -------
        ndarray of shape (B, C)
            After the final norm.
        """
        x = self.embedding[np.asarray(ids)] * self.dtype.type(self.settings.embedding_scale)
        for layer in range(self.settings.n_layers):
            x = x + self._attention_branch(x, layer, context_k[layer], context_v[layer])
            x = x + self._ffn_branch(x, layer)
        return self._rms(x, "output_norm.weight")

    def logits(self, hidden):
        """hidden (rows, C) -> logits (rows, V)."""
        z = hidden @ self.head.T * self.dtype.type(self.settings.logit_scale)
        cap = self.settings.softcap
        return cap * np.tanh(z / cap) if cap else z

    def select(self, hidden, logits, anchor):
        """Walk greedily through the candidates of rows 1..B-1 (DFlash2)."""
        K = self.settings.top_k
        candidates = np.argsort(-logits, axis=1, kind="stable")[:, :K]  # ties: lowest id first
        unary = np.take_along_axis(logits, candidates, axis=1)
        gates = hidden @ self.weights["selector_hidden.weight"].T  # (B-1, R)
        before = self.weights["selector_predecessor.weight"]  # (V, R)
        after = self.weights["selector_successor.weight"]  # (V, R)
        lattice, path_scores, tokens, previous = [], [], [], anchor
        for row, gate in enumerate(gates):
            earlier = candidates[row - 1] if row else np.full(K, anchor)

            def scores(predecessors, row=row, gate=gate):
                return (before[predecessors] * gate) @ after[candidates[row]].T + unary[row]

            lattice.append(scores(earlier))  # (K, K)
            path_scores.append(scores(np.array([previous]))[0])
            previous = candidates[row][np.argmax(path_scores[-1])]
            tokens.append(previous)
        return Walk(candidates, unary, np.stack(path_scores), np.stack(lattice), np.array(tokens))

    # ---- pieces ---------------------------------------------------------------------------------

    def _attention_branch(self, x, layer, context_k, context_v):
        s, name = self.settings, f"blk.{layer}."
        B, N = len(x), len(context_k)
        h = self._rms(x, name + "attn_norm.weight")  # (B, C)
        h, kernels = self._convolve_before(h, name + "attn_conv")
        positions = N + np.arange(B)
        q = (h @ self.weights[name + "attn_q.weight"].T).reshape(B, s.n_heads, s.head_dim)
        q = self._rotate(self._rms(q, name + "attn_q_norm.weight"), positions)
        k, v = self._key_value(layer, h, positions)
        k, v = np.concatenate([context_k, k]), np.concatenate([context_v, v])

        ahead = np.arange(N + B)[None, :] - positions[:, None]  # key position - query position
        visible = np.ones((B, N + B), bool)
        if s.causal[layer]:
            visible &= ahead <= 0
        if s.windows[layer] is not None:
            visible &= (-ahead < s.windows[layer]) | (np.arange(N + B) < min(self.sink, N))
        a = np.empty_like(q)
        for head in range(s.n_heads):
            kv_head = head // (s.n_heads // s.n_kv_heads)
            scores = (q[:, head] @ k[:, kv_head].T) * self.dtype.type(s.head_dim**-0.5)
            scores[~visible] = -np.inf
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            a[:, head] = weights / weights.sum(axis=1, keepdims=True) @ v[:, kv_head]
        out = a.reshape(B, -1) @ self.weights[name + "attn_output.weight"].T
        return self._convolve(out, kernels, name + "attn_conv", side=1)

    def _ffn_branch(self, x, layer):
        name = f"blk.{layer}."
        h = self._rms(x, name + "ffn_norm.weight")
        h, kernels = self._convolve_before(h, name + "ffn_conv")
        gate = h @ self.weights[name + "ffn_gate.weight"].T
        up = h @ self.weights[name + "ffn_up.weight"].T
        out = (gate / (1 + np.exp(-gate)) * up) @ self.weights[name + "ffn_down.weight"].T
        return self._convolve(out, kernels, name + "ffn_conv", side=1)

    def _key_value(self, layer, rows, positions):
        """rows (M, C) -> normed and rotated keys, plain values: two of (M, G, D)."""
        s, name = self.settings, f"blk.{layer}."
        shape = (len(rows), s.n_kv_heads, s.head_dim)
        k = (rows @ self.weights[name + "attn_k.weight"].T).reshape(shape)
        v = (rows @ self.weights[name + "attn_v.weight"].T).reshape(shape)
        return self._rotate(self._rms(k, name + "attn_k_norm.weight"), positions), v

    def _convolve_before(self, h, name):
        """Side 0, and the dynamic kernels both sides share, made from the unconvolved rows."""
        if not self.settings.group:
            return h, None
        B, C = h.shape
        n_taps = self.weights[name + "_base"].shape[1]
        kernels = h @ self.weights[name + "_proj.weight"].T  # (B, 2 k Z): side, tap, group
        kernels = kernels.reshape(B, 2, n_taps, C // self.settings.group)
        return self._convolve(h, kernels, name, side=0), kernels

    def _convolve(self, y, kernels, name, side):
        """out[t] = sum over o of (base[side, o] + kernels[t, side, o]) * y[t - o]; 0 before."""
        if kernels is None:
            return y
        out = np.zeros_like(y)
        for o in range(kernels.shape[2]):
            dynamic = np.repeat(kernels[:, side, o], self.settings.group, axis=1)  # (B, C)
            shifted = np.zeros_like(y)
            shifted[o:] = y[: len(y) - o]
            out += (self.weights[name + "_base"][side, o] + dynamic) * shifted
        return out

    def _rms(self, x, name):
        scale = np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + self.dtype.type(self.settings.eps))
        return x / scale * self.weights[name]

    def _rotate(self, x, positions):
        """Element i pairs with i + D/2. x (M, heads, D), positions (M,)."""
        half = self.settings.head_dim // 2
        frequency = self.settings.rope_base ** (-np.arange(half) / half)
        angle = np.asarray(positions, np.float64)[:, None] * frequency
        cos = np.cos(angle).astype(self.dtype)[:, None, :]
        sin = np.sin(angle).astype(self.dtype)[:, None, :]
        low, high = x[..., :half], x[..., half:]
        return np.concatenate([low * cos - high * sin, low * sin + high * cos], axis=-1)


def _read_gguf(path, dtype, is_causal):
    file = GGUFTensors(path, dtype)
    key = file.arch_key
    n_layers = int(key("block_count"))
    window = int(key("attention.sliding_window", 0))
    slides = key("attention.sliding_window_pattern", [False] * n_layers) if window else ()
    slides = list(slides) or [False] * n_layers
    stated = key("attention.causal", None) if is_causal == "file" else is_causal
    names = [*_TOP_PARTS.values()]
    names += [f"blk.{i}.{part}" for i in range(n_layers) for part in _LAYER_PARTS.values()]
    settings = Settings(
        n_layers=n_layers,
        n_heads=int(key("attention.head_count")),
        n_kv_heads=int(key("attention.head_count_kv")),
        head_dim=int(key("attention.key_length")),
        eps=float(key("attention.layer_norm_rms_epsilon")),
        rope_base=float(key("rope.freq_base")),
        block_size=int(key("block_size")),
        mask_token=int(file.key("tokenizer.ggml.mask_token_id")),
        taps=tuple(int(v) - 1 for v in key("target_layers")),  # the file counts layer inputs
        windows=tuple(window if s else None for s in slides),
        causal=(bool(stated),) * n_layers,  # absent: bidirectional
        embedding_scale=float(key("embedding_scale", 1.0)),
        logit_scale=float(key("logit_scale", 1.0)),
        softcap=float(key("final_logit_softcapping", 0.0)),
        group=int(key("conv_group_size", 0)),
        top_k=int(key("selector_top_k", 0)),
    )
    return {name: file.array(name) for name in names if name in file}, settings


def _read_directory(path, dtype, is_causal):
    config = json.loads(Path(path, "config.json").read_text())
    inner = config["dflash_config"]
    n_layers = config["num_hidden_layers"]
    types = config.get("layer_types") or ["full_attention"] * n_layers
    slides = [t == "sliding_attention" for t in types]
    stated = config.get("is_causal") if is_causal == "file" else is_causal
    settings = Settings(
        n_layers=n_layers,
        n_heads=config["num_attention_heads"],
        n_kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        eps=config["rms_norm_eps"],
        rope_base=config["rope_parameters"]["rope_theta"],
        block_size=inner.get("block_size", config.get("block_size")),
        mask_token=inner["mask_token_id"],
        taps=tuple(inner["target_layer_ids"]),
        windows=tuple(config["sliding_window"] if s else None for s in slides),
        causal=tuple(slides) if stated is None else (stated,) * n_layers,  # absent: as it slides
        embedding_scale=inner.get("input_embedding_scale", 1.0),
        logit_scale=inner.get("output_multiplier", 1.0),
        softcap=inner.get("final_logit_softcapping") or 0.0,
        group=inner.get("conv_group_size", 0),
        top_k=inner.get("selector_top_k", 0),
    )
    weights = {}
    for name, entry in deserialize(Path(path, "model.safetensors").read_bytes()):
        values = _expand(entry["dtype"], entry["data"]).reshape(entry["shape"]).astype(dtype)
        parts = name.split(".", 2)
        if parts[0] == "layers":
            weights[f"blk.{parts[1]}.{_LAYER_PARTS[parts[2]]}"] = values
        else:
            weights[_TOP_PARTS[name]] = values
    return weights, settings


def _expand(dtype, data):
    if dtype == "BF16":  # the upper half of a float32
        return (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(data, {"F32": "<f4", "F16": "<f2"}[dtype])
