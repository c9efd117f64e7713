"""A target's weights on a backend: packed matrices, norms, RoPE tables.

Owns the way from bound tensors to device buffers, a few tensors at a time: each is packed straight
from the memory map and its pages are given back to the system soon after, so that loading never
holds the file and the packed copy together. Must not know the order of the forward pass.
"""

import mmap
from dataclasses import dataclass

import numpy as np

from cudflash.model.rope import rope_table

MATRICES = ("attn_q", "attn_k", "attn_v", "attn_output", "attn_gate",
            "ffn_gate", "ffn_up", "ffn_down", "attn_qkv", "ssm_alpha", "ssm_beta",
           "ssm_out")  # fmt: skip
VECTORS = ("attn_norm", "attn_q_bias", "attn_k_bias", "attn_v_bias", "attn_q_norm",
           "attn_k_norm", "attn_output_bias", "post_attention_norm", "ffn_norm",
           "post_ffw_norm", "ssm_conv", "ssm_dt", "ssm_a", "ssm_norm")  # fmt: skip


@dataclass(frozen=True)
class DeviceLayer:
    """One layer; fields are named and shaped as in ``loader.bind.LayerWeights``."""

    attn_norm: object
    attn_q: object | None  # PackedMatrix, as the other projections
    attn_k: object | None
    attn_v: object | None
    attn_q_bias: object | None
    attn_k_bias: object | None
    attn_v_bias: object | None
    attn_q_norm: object | None
    attn_k_norm: object | None
    attn_output: object | None
    attn_output_bias: object | None
    attn_gate: object | None
    post_attention_norm: object | None
    ffn_norm: object
    ffn_gate: object
    ffn_up: object
    ffn_down: object
    post_ffw_norm: object | None
    attn_qkv: object | None
    ssm_conv: object | None
    ssm_alpha: object | None
    ssm_beta: object | None
    ssm_dt: object | None
    ssm_a: object | None
    ssm_norm: object | None
    ssm_out: object | None
    rope_table: object | None  # (n_ctx, n_dims / 2, 2) float32, shared by equal layers


@dataclass(frozen=True)
class TargetModel:
    """Everything a forward pass reads but caches and scratch."""

    config: object  # TargetConfig
    embedding: object  # EmbeddingTable
    output_norm: object  # (hidden_dim,) float32
    output: object  # PackedMatrix (vocab_size, hidden_dim)
    layers: tuple[DeviceLayer, ...]

    def matrices(self):
        """Yield every packed matrix."""
        for layer in self.layers:
            yield from present(layer, MATRICES)
        yield self.output


def load_target(ops, target, n_ctx, allocator, progress=None):
    """Pack and upload a bound target.

    Parameters
    ----------
    ops : module
    target : loader.bind.Target
    n_ctx : int
        Positions the RoPE tables cover.
    allocator : Allocator
    progress : callable, optional
        Called with (bytes read, bytes of all tensors) after each few tensors.

    Returns
    -------
    TargetModel
    """
    config, weights = target.config, target.weights
    packer = Packer(ops, allocator, weight_bytes(weights), progress)
    tables = _RopeTables(allocator, n_ctx, weights.rope_freqs)
    embd = weights.token_embd
    embedding = ops.embedding_table(embd.raw, embd.type, embd.shape[1])
    allocator.count("embedding", embedding)
    layers = tuple(
        load_layer(packer, layer, tables.get(layer_config.rope))
        for layer, layer_config in zip(weights.layers, config.layers, strict=True)
    )
    return TargetModel(
        config, embedding, packer.vector(weights.output_norm), packer.matrix(weights.output), layers
    )


def load_layer(packer, layer, rope_table):
    """Pack one ``loader.bind.LayerWeights``."""
    matrices = packer.matrices([getattr(layer, name) for name in MATRICES])
    return DeviceLayer(
        **dict(zip(MATRICES, matrices, strict=True)),
        **{name: packer.vector(getattr(layer, name)) for name in VECTORS},
        rope_table=rope_table,
    )


def present(layer, names):
    """Yield those of the named fields of a layer that are not None."""
    yield from (part for name in names if (part := getattr(layer, name)) is not None)


def weight_refs(weights):
    """Yield every projection that is packed, the output head last."""
    for layer in weights.layers:
        yield from present(layer, MATRICES)
    yield weights.output


def weight_vectors(weights):
    """Yield every norm and bias."""
    for layer in weights.layers:
        yield from present(layer, VECTORS)
    yield weights.output_norm


def weight_bytes(weights):
    """Bytes of all packed projections in the file."""
    return sum(ref.raw.nbytes for ref in weight_refs(weights))


class Packer:
    """Packs and uploads tensors, and tells how far it is."""

    def __init__(self, ops, allocator, total, progress):
        self._ops, self._allocator = ops, allocator
        self._done, self._total, self._progress = 0, total, progress
        self._pages = MappedPages()

    def matrix(self, ref):
        """Packed matrix of a projection, None for None."""
        return self.matrices([ref])[0]

    def matrices(self, refs):
        """Packed matrices of projections, None for None.

        Starting all threads for each would take as long as packing a small one, so they are packed
        together as far as ``MappedPages.PORTION`` allows.
        """
        packed = [None] * len(refs)
        for places in _portions(refs):
            items = [(refs[i].raw, refs[i].type, refs[i].shape[1]) for i in places]
            for i, matrix in zip(places, self._ops.pack_all(items), strict=True):
                packed[i] = self._allocator.count("weights", matrix)
                self._pages.release(refs[i].raw)
                self._done += refs[i].raw.nbytes
            if self._progress is not None:
                self._progress(self._done, self._total)
        return packed

    def vector(self, array):
        """Uploaded norm or bias, None for None."""
        return None if array is None else self._allocator.upload("norms", array)


def _portions(refs):
    """Yield lists of places of projections that are packed together."""
    places, n_bytes = [], 0
    for i, ref in enumerate(refs):
        if ref is None:
            continue
        if places and n_bytes + ref.raw.nbytes > MappedPages.PORTION:
            yield places
            places, n_bytes = [], 0
        places.append(i)
        n_bytes += ref.raw.nbytes
    if places:
        yield places


class _RopeTables:
    def __init__(self, allocator, n_ctx, freq_factors):
        self._allocator, self._n_ctx, self._factors = allocator, n_ctx, freq_factors
        self._made = {}

    def get(self, rope):
        if rope is None:
            return None
        if rope not in self._made:
            table = rope_table(rope, self._n_ctx, self._factors)
            self._made[rope] = self._allocator.upload("rope", table)
        return self._made[rope]


class MappedPages:
    """Gives the pages of memory maps back to the system, in portions; they are read again if needed.

    A call to the system for every matrix costs as much as packing a small one, so spans are
    collected up to ``PORTION`` and neighbours are given back together.
    """

    PORTION = 32 << 20  # bytes that may stay resident beside the packed copy
    _NEAR = 1 << 20  # spans closer than this are one: what lies between is read again if needed

    def __init__(self):
        self._pending, self._n_bytes = [], 0

    def release(self, raw):
        """Take note of a view that is not needed any more.

        Does nothing for arrays that are not on a memory map, and where the system has no
        ``madvise``.
        """
        base = raw
        while isinstance(base, np.ndarray) and base.base is not None:
            base = base.base
        base = base.obj if isinstance(base, memoryview) else base
        if not isinstance(base, mmap.mmap) or not hasattr(mmap, "MADV_DONTNEED"):
            return
        self._pending.append((id(base), raw.ctypes.data, raw.nbytes, base))
        self._n_bytes += raw.nbytes
        if self._n_bytes >= self.PORTION:
            self.flush()

    def flush(self):
        """Give back what has been collected."""
        spans = []
        for _, start, n_bytes, base in sorted(self._pending, key=lambda entry: entry[:2]):
            if spans and spans[-1][2] is base and start - spans[-1][1] <= self._NEAR:
                spans[-1][1] = max(spans[-1][1], start + n_bytes)
            else:
                spans.append([start, start + n_bytes, base])
        self._pending, self._n_bytes = [], 0
        for start, end, base in spans:
            origin = np.frombuffer(base, np.uint8).ctypes.data
            # only whole pages inside: neighbours keep theirs
            first = -(-(start - origin) // mmap.PAGESIZE) * mmap.PAGESIZE
            last = (end - origin) // mmap.PAGESIZE * mmap.PAGESIZE
            if last > first:
                base.madvise(mmap.MADV_DONTNEED, first, last - first)
