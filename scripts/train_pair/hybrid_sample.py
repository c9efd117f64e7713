"""The hybrid writing many sequences at once: caches of its attention layers, states of the others."""

from __future__ import annotations

import torch

from scripts.train_pair import hybrid_model, model, sample

FLOAT32 = ("ssm_alpha", "ssm_beta", "ssm_conv")


class Writer(sample.Writer):
    """As ``sample.Writer``; a layer's cache is keys and values, or history and delta state."""

    def __init__(self, params, shape, taps):
        super().__init__(params, shape, taps)
        for layer, w in enumerate(self.layers):  # what the recurrence is steered by stays float32
            w |= {k: params[f"layers.{layer}.{k}"] for k in w if k in FLOAT32}
        self.rope = hybrid_model.rope(shape)

    def caches(self, n, length):
        """Empty caches of ``n`` sequences of at most ``length`` tokens."""
        size = (n, self.shape.n_kv_heads, length, self.shape.head_dim)
        return [
            [torch.zeros(size, dtype=torch.bfloat16) for _ in range(2)]
            if self.shape.is_full(layer)
            else list(hybrid_model.empty_state(self.shape, n))
            for layer in range(self.shape.n_layers)
        ]

    def embed(self, ids):
        """Rows that enter the first layer."""
        return self.params["embedding"][ids].float()

    @torch.no_grad()
    def run(self, ids, caches=None):
        """As in ``sample.Writer``."""
        shape, S = self.shape, ids.shape[1]
        cos_sin = tuple(t[:S, None, :] for t in self.rope)
        caches = self.caches(len(ids), S) if caches is None else caches
        x, tapped = self.embed(ids), []
        for layer, (w, cache) in enumerate(zip(self.layers, caches)):
            if shape.is_full(layer):
                y = model.rms(x, w["attn_norm"], shape.rms_eps)
                q, gate, k, v = hybrid_model.attention_inputs(w, shape, y, cos_sin)
                for held, rows in zip(cache, (k, v)):
                    held[:, :, :S] = rows.transpose(1, 2)
                attended = model.full_attention(q, k, v)
                x = x + hybrid_model.attention_output(w, attended, gate)
            else:
                added, *cache[:] = hybrid_model.delta_net(w, shape, x, *cache)
                x = x + added
            x = x + hybrid_model.feed_forward(w, shape, x)
            if layer in self.taps:
                tapped.append(x)
        hidden = model.rms(x, self.params["output_norm"], shape.rms_eps)
        return hidden, torch.stack(tapped, 2)

    @torch.no_grad()
    def step(self, ids, at, caches):
        """As in ``sample.Writer``."""
        shape = self.shape
        B, G, D = len(ids), shape.n_kv_heads, shape.head_dim
        cos_sin = tuple(t[at : at + 1, None, :] for t in self.rope)
        x = self.embed(ids)[:, None]
        for layer, (w, cache) in enumerate(zip(self.layers, caches)):
            if shape.is_full(layer):
                y = model.rms(x, w["attn_norm"], shape.rms_eps)
                q, gate, k, v = hybrid_model.attention_inputs(w, shape, y, cos_sin)
                for held, row in zip(cache, (k, v)):
                    held[:, :, at] = row[:, 0]
                keys, values = (held[:, :, : at + 1] for held in cache)
                q = q.view(B, G, -1, D).bfloat16()
                weights = ((q @ keys.mT).float() * D**-0.5).softmax(-1).bfloat16()
                attended = (weights @ values).reshape(B, 1, -1, D)
                x = x + hybrid_model.attention_output(w, attended, gate)
            else:
                added, *cache[:] = hybrid_model.delta_net(w, shape, x, *cache)
                x = x + added
            x = x + hybrid_model.feed_forward(w, shape, x)
        hidden = model.rms(x[:, 0], self.params["output_norm"], shape.rms_eps)
        return model.head_logits(hidden, self.params["head"], shape)
