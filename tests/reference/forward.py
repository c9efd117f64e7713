"""Independent forward of the five target architectures: expand every weight, multiply plainly.

Written from the functional specification of llama.cpp's graphs (src/models/{llama,qwen2,qwen3,
gemma3,muse-glimmer}.cpp at commit 0c1e57098bba), for reading, not for speed. It shares no line
with `cudflash.model`, `cudflash.ops` or `cudflash.loader`: a wiring fault must not be able to
appear on both sides of a comparison.

It refuses to do: caches, batching, sampling, speed. The whole token sequence goes through every
layer at once.

Letters in shape comments: T tokens, C hidden width, H query heads, G key/value heads, D head
width, F feed-forward width, V vocabulary, L layers, R rows whose logits are wanted.
"""

from dataclasses import dataclass

import numpy as np

from tests.reference.gguf_tensors import GGUFTensors


@dataclass(frozen=True)
class Forward:
    """Result of one pass."""

    logits: np.ndarray  # (R, V), rows in the order asked for
    layer_inputs: np.ndarray  # (L + 1, T, C): [l] enters layer l; [L] leaves the last layer


class Reference:
    """One model.

    Parameters
    ----------
    path : str or Path
        GGUF file; packed weights are expanded to floats.
    dtype : numpy float type
        Arithmetic of the whole pass: float64 to judge others, float32 to see what rounding costs.
    kv_dtype : numpy float type, optional
        Keys and values are rounded to this type and back, as a cache of that type would.
    round_input : callable, optional
        ``round_input(x (M, K), ggml_type_name) -> (M, K)``, applied to the input of every matrix
        product; see `activation_rounding`.
    """

    def __init__(self, path, dtype=np.float64, kv_dtype=None, round_input=None):
        self.file = GGUFTensors(path, dtype)
        self.dtype = np.dtype(dtype)
        self.kv_dtype = kv_dtype
        self.round_input = round_input
        self.arch = self.file.arch
        if self.arch not in ("llama", "qwen2", "qwen3", "gemma3", "muse-glimmer"):
            raise ValueError(f"{path}: the reference does not know architecture {self.arch}")
        key = self.file.arch_key
        self.n_layers = int(key("block_count"))
        self.hidden_dim = int(key("embedding_length"))
        self.n_heads = int(key("attention.head_count"))
        self.n_kv_heads = int(key("attention.head_count_kv", self.n_heads))
        self.head_dim = int(key("attention.key_length", self.hidden_dim // self.n_heads))
        self.eps = float(key("attention.layer_norm_rms_epsilon"))
        # tied head: the embedding table is the output matrix
        self.head_name = "output.weight" if "output.weight" in self.file else "token_embd.weight"
        self._expanded = {}  # name -> float array, layers only

    # ---- the pass -------------------------------------------------------------------------------

    def forward(self, tokens, logit_rows=None):
        """Run `tokens` (T,) from an empty state.

        Parameters
        ----------
        tokens : sequence of int
        logit_rows : sequence of int, optional
            Positions whose logits are wanted (all by default; none for an empty sequence).

        Returns
        -------
        Forward
        """
        tokens = np.asarray(tokens, dtype=np.int64)
        x = self._embed(tokens)  # (T, C)
        layer_inputs = [x]
        for layer in range(self.n_layers):
            x = x + self._attention_branch(x, layer)
            x = x + self._ffn_branch(x, layer)
            layer_inputs.append(x)
        rows = np.arange(len(tokens)) if logit_rows is None else np.asarray(logit_rows, np.int64)
        return Forward(self.head(x[rows]), np.stack(layer_inputs))

    def _embed(self, tokens):
        x = self.file.rows("token_embd.weight", tokens)  # (T, C)
        if self.arch == "gemma3":
            x = x * self.dtype.type(np.sqrt(np.float32(self.hidden_dim)))  # float32 in the graph
        if self.arch == "muse-glimmer":
            x = self._rms(x, None, self.eps)  # no weight
        return x

    def _attention_branch(self, x, layer):
        """x (T, C) -> what attention adds to the residual stream (T, C)."""
        name = f"blk.{layer}."
        T, H, G, D = len(x), self.n_heads, self.n_kv_heads, self.head_dim
        h = self._rms(x, name + "attn_norm.weight", self.eps)  # (T, C)

        if name + "attn_qkv.weight" in self.file:  # fused: rows of q, then k, then v
            qkv = self._linear(h, name + "attn_qkv")  # (T, (H + 2 G) D)
            q, k, v = np.split(qkv, [H * D, (H + G) * D], axis=1)
        else:
            q = self._linear(h, name + "attn_q")  # (T, H D)
            k = self._linear(h, name + "attn_k")  # (T, G D)
            v = self._linear(h, name + "attn_v")  # (T, G D)
        q, k, v = q.reshape(T, H, D), k.reshape(T, G, D), v.reshape(T, G, D)

        if self.arch in ("qwen3", "gemma3", "muse-glimmer"):  # over D, before rotation
            q = self._rms(q, name + "attn_q_norm.weight", self.eps)
            k = self._rms(k, name + "attn_k_norm.weight", self.eps)

        window = self._window(layer)
        if self.arch != "muse-glimmer" or window is not None:  # muse: full layers do not rotate
            q, k = self._rotate(q, layer), self._rotate(k, layer)
        if self.kv_dtype is not None:
            k = k.astype(self.kv_dtype).astype(self.dtype)
            v = v.astype(self.kv_dtype).astype(self.dtype)

        a = self._attend(q, k, v, window).reshape(T, H * D)
        if self.arch == "muse-glimmer":  # gate from the normed input, before the projection
            a = a * _sigmoid(self._linear(h, name + "attn_gate"))
        out = self._linear(a, name + "attn_output")  # (T, C)
        return self._post_norm(out, name + "post_attention_norm.weight")

    def _attend(self, q, k, v, window):
        """Causal softmax attention, one head at a time. q (T, H, D), k and v (T, G, D)."""
        T = len(q)
        scale = self.dtype.type(self._attention_scale())
        distance = np.arange(T)[:, None] - np.arange(T)[None, :]  # query position - key position
        visible = distance >= 0
        if window is not None:
            visible &= distance < window
        out = np.empty_like(q)
        for head in range(self.n_heads):
            kv_head = head // (self.n_heads // self.n_kv_heads)
            scores = (q[:, head] @ k[:, kv_head].T) * scale  # (T, T)
            scores[~visible] = -np.inf
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            weights /= weights.sum(axis=1, keepdims=True)
            out[:, head] = weights @ v[:, kv_head]
        return out

    def _ffn_branch(self, x, layer):
        """x (T, C) -> what the feed-forward adds to the residual stream (T, C)."""
        name = f"blk.{layer}."
        h = self._rms(x, name + "ffn_norm.weight", self.eps)  # (T, C)
        gate = self._linear(h, name + "ffn_gate")  # (T, F)
        up = self._linear(h, name + "ffn_up")  # (T, F)
        act = _gelu_tanh(gate) if self.arch == "gemma3" else gate * _sigmoid(gate)
        out = self._linear(act * up, name + "ffn_down")  # (T, C)
        return self._post_norm(out, name + "post_ffw_norm.weight")

    def _post_norm(self, x, name):
        """Norm of a branch before it joins the stream (gemma3 and muse-glimmer only)."""
        if self.arch == "gemma3":
            return self._rms(x, name, self.eps)
        if self.arch == "muse-glimmer":
            return self._rms(x, name, 1e-8)  # constant of llama.cpp's graph, not in the file
        return x

    def head(self, x):
        """x (R, C) -> logits (R, V); the matrix is expanded a few thousand rows at a time."""
        logits = np.empty((len(x), self.file.shape(self.head_name)[0]), self.dtype)
        if len(x) == 0:
            return logits
        h = self._rms(x, "output_norm.weight", self.eps)
        h = self._rounded(h, self.head_name)
        for first, rows in self.file.row_blocks(self.head_name):
            logits[:, first : first + len(rows)] = h @ rows.T
        if "output.bias" in self.file:
            logits += self._weight("output.bias")
        if self.arch == "muse-glimmer":
            logits *= self.dtype.type(self.file.arch_key("logit_scale"))  # scale, then cap
        cap_default = 30.0 if self.arch == "muse-glimmer" else 0.0  # llama.cpp's when absent
        cap = float(self.file.arch_key("final_logit_softcapping", cap_default))
        if self.arch in ("gemma3", "muse-glimmer") and cap > 0:
            logits = cap * np.tanh(logits / cap)
        return logits

    # ---- pieces ---------------------------------------------------------------------------------

    def _weight(self, name):
        if name not in self._expanded:
            self._expanded[name] = self.file.array(name)
        return self._expanded[name]

    def _rounded(self, x, name):
        if self.round_input is None:
            return x
        return self.round_input(x, self.file.type_name(name)).astype(self.dtype)

    def _linear(self, x, name):
        """x (T, K) -> x W^T + b (T, N)."""
        y = self._rounded(x, name + ".weight") @ self._weight(name + ".weight").T
        if name + ".bias" in self.file:
            y = y + self._weight(name + ".bias")
        return y

    def _rms(self, x, name, eps):
        """x / sqrt(mean(x^2) + eps) over the last axis, times a weight unless `name` is None."""
        y = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + self.dtype.type(eps))
        return y if name is None else y * self._weight(name)

    def _window(self, layer):
        """Sliding window of a layer in tokens (the token itself included), or None."""
        if self.arch not in ("gemma3", "muse-glimmer"):
            return None
        window = int(self.file.arch_key("attention.sliding_window", 0))
        period = 6 if self.arch == "gemma3" else 4  # llama.cpp's when the key is absent
        pattern = self.file.arch_key("attention.sliding_window_pattern", period)
        if isinstance(pattern, (list, tuple)):
            slides = bool(pattern[layer])
        else:
            slides = int(pattern) == 0 or layer % int(pattern) < int(pattern) - 1
        return window if slides and window > 0 else None

    def _attention_scale(self):
        if self.arch == "gemma3" and self.n_layers == 62:  # the 27B: width per head, not head_dim
            return (self.hidden_dim // self.n_heads) ** -0.5
        default = self.head_dim**-0.5
        given = self.file.arch_key("attention.scale", 0.0) if self.arch == "llama" else 0.0
        return float(given) or default

    def _rotate(self, x, layer):
        """Rotary position encoding of x (T, heads, D) at positions 0..T-1."""
        n_dims = int(self.file.arch_key("rope.dimension_count", self.head_dim))
        angles, magnitude = self._rope_angles(len(x), n_dims, layer)  # (T, n_dims / 2)
        cos = (np.cos(angles) * magnitude).astype(self.dtype)[:, None, :]
        sin = (np.sin(angles) * magnitude).astype(self.dtype)[:, None, :]
        out = x.copy()  # elements from n_dims on pass through
        if self.arch in ("llama", "muse-glimmer"):  # neighbours (2i, 2i+1) form a pair
            even, odd = x[..., 0:n_dims:2], x[..., 1:n_dims:2]
            out[..., 0:n_dims:2] = even * cos - odd * sin
            out[..., 1:n_dims:2] = even * sin + odd * cos
        else:  # element i pairs with i + n_dims / 2
            half = n_dims // 2
            low, high = x[..., :half], x[..., half:n_dims]
            out[..., :half] = low * cos - high * sin
            out[..., half:n_dims] = low * sin + high * cos
        return out

    def _rope_angles(self, n_positions, n_dims, layer):
        """Angles (n_positions, n_dims / 2) in float64, and the factor on cos and sin."""
        key = self.file.arch_key
        base = float(key("rope.freq_base", 10000.0))
        scaling = key("rope.scaling.type", "none")
        if self._window(layer) is not None:
            local_default = 10000.0 if self.arch == "gemma3" else base
            base = float(key("rope.freq_base_swa", local_default))
            scaling = "none" if self.arch == "gemma3" else scaling  # local layers are not scaled
        pair = np.arange(n_dims // 2)
        frequency = base ** (-2.0 * pair / n_dims)  # (n_dims / 2,)
        if "rope_freqs.weight" in self.file:
            frequency = frequency / self._weight("rope_freqs.weight").astype(np.float64)
        magnitude = 1.0
        if scaling == "linear":
            frequency = frequency / float(key("rope.scaling.factor"))
        elif scaling == "yarn":
            frequency, magnitude = self._yarn(frequency, base, n_dims)
        elif scaling != "none":
            raise ValueError(f"{self.file.path}: the reference does not know RoPE {scaling}")
        return np.arange(n_positions, dtype=np.float64)[:, None] * frequency[None, :], magnitude

    def _yarn(self, frequency, base, n_dims):
        """Blend of scaled and unscaled frequencies, by how often a pair turns in the old context."""
        key = self.file.arch_key
        factor = float(key("rope.scaling.factor"))
        original = float(key("rope.scaling.original_context_length", key("context_length")))
        ext_factor = float(key("rope.scaling.yarn_ext_factor", 1.0))

        def pair_turning(times):
            return n_dims * np.log(original / (times * 2 * np.pi)) / (2 * np.log(base))

        low = max(0.0, np.floor(pair_turning(float(key("rope.scaling.yarn_beta_fast", 32.0)))))
        high = np.ceil(pair_turning(float(key("rope.scaling.yarn_beta_slow", 1.0))))
        high = min(n_dims - 1.0, high)
        ramp = np.clip((np.arange(n_dims // 2) - low) / max(0.001, high - low), 0.0, 1.0)
        keep = ext_factor * (1.0 - ramp)  # share of the unscaled frequency
        magnitude = (1.0 + 0.1 * np.log(factor)) * float(key("rope.scaling.attn_factor", 1.0))
        return frequency / factor * (1.0 - keep) + frequency * keep, magnitude


def _sigmoid(x):
    # by sign, so that exp never overflows
    e = np.exp(-np.abs(x))
    return np.where(x >= 0, 1.0, e).astype(x.dtype) / (1 + e)


def _gelu_tanh(x):
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi).astype(x.dtype) * (x + 0.044715 * x**3)))
