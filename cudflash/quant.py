"""Expand packed weights to float32: the 15 GGUF formats the op set multiplies with.

NumPy only, exact: the bits are those of ggml's ``to_float``. Multi-byte fields are little-endian,
f16 is the IEEE half. In every formula the product with the scale is rounded first, then the product
with the code, then the difference; all but the last are exact, so contraction cannot change a bit.

Block layouts: ggml ``ggml/src/ggml-common.h``; values and order: ``ggml/src/ggml-quants.c``
(``dequantize_row_*``), llama.cpp 0c1e57098bba.
"""

import numpy as np

from cudflash.errors import UsageError
from cudflash.loader.ggml_types import SUPPORTED, GGMLType, known_type

# Values of the 4-bit non-linear codes (ggml ``kvalues_iq4nl``).
_IQ4 = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113],
                np.float32)


def dequantize(raw, type):  # noqa: A002 - the name is part of the public interface
    """Expand packed rows.

    Parameters
    ----------
    raw : ndarray of shape (..., n_bytes), uint8
        Whole blocks along the last axis.
    type : GGMLType, str or int
        Format: the type, its name or its ggml id.

    Returns
    -------
    ndarray of shape (..., n), float32

    Raises
    ------
    UsageError
        If the format is not supported, or the bytes are not whole blocks.
    """
    kind = _resolve(type)
    raw = np.ascontiguousarray(raw)
    if raw.dtype != np.uint8 or raw.ndim == 0:
        raise UsageError(
            f"packed data is {raw.dtype} of shape {raw.shape}, expected uint8 rows of bytes")
    if raw.shape[-1] % kind.type_size:
        raise UsageError(
            f"packed rows have {raw.shape[-1]} bytes, expected a multiple of the "
            f"{kind.type_size}-byte block of {kind.name}")
    blocks = raw.reshape(-1, kind.type_size)
    with np.errstate(all="ignore"):  # random scales may overflow; ggml's result is kept
        values = _EXPAND[kind](blocks)
    n = raw.shape[-1] // kind.type_size * kind.block_size
    return np.ascontiguousarray(values, np.float32).reshape(*raw.shape[:-1], n)


def _resolve(type_):
    if isinstance(type_, str):
        kind = GGMLType.__members__.get(type_.upper())
    else:
        kind = known_type(int(type_))
    if kind not in SUPPORTED:
        known = ", ".join(t.name for t in sorted(SUPPORTED))
        shown = kind.name if kind is not None else type_
        raise UsageError(f"format {shown} cannot be expanded; supported are {known}")
    return kind


# -- fields ---------------------------------------------------------------------------------------


def _half(b, at):
    """f16 field at byte ``at``: (n, 1) float32."""
    return b[:, at:at + 2].copy().view("<f2").astype(np.float32)


def _nibbles(q):
    """Low nibbles of all bytes, then the high ones: (n, 2 * bytes)."""
    return np.concatenate([q & 15, q >> 4], axis=1)


def _bits(words, n_bits, per_byte):
    """Codes of ``n_bits`` each: the lowest of all bytes first; words (..., bytes)."""
    shifts = (n_bits * np.arange(per_byte, dtype=np.uint8))[:, None]
    return (words[..., None, :] >> shifts) & np.uint8((1 << n_bits) - 1)


def _fifth_bits(b, at):
    """32 bits of ``qh`` as 0 or 16, element e from bit e: (n, 32)."""
    return np.unpackbits(b[:, at:at + 4], axis=1, bitorder="little") << 4


def _scale_min(s):
    """Eight 6-bit scales and minima of 12 bytes (Q4_K, Q5_K): two (n, 8) float32.

    j < 4: low 6 bits of bytes j and j + 4. j >= 4: nibbles of byte j + 4, topped by the high 2 bits
    of bytes j - 4 and j.
    """
    first, second, third = s[:, :4], s[:, 4:8], s[:, 8:]
    scale = np.concatenate([first & 63, (third & 15) | (first >> 6 << 4)], axis=1)
    minimum = np.concatenate([second & 63, (third >> 4) | (second >> 6 << 4)], axis=1)
    return scale.astype(np.float32), minimum.astype(np.float32)


def _signed(b):
    return b.view(np.int8).astype(np.float32)


# -- formats; b is (n blocks, bytes of a block) ---------------------------------------------------


def _f32(b):
    """x f32."""
    return b.view("<f4")


def _f16(b):
    """x f16."""
    return b.view("<f2").astype(np.float32)


def _bf16(b):
    """The upper half of an f32."""
    return (b.view("<u2").astype(np.uint32) << 16).view(np.float32)


def _q4_0(b):
    """d f16, qs[16]: (code - 8) * d; low nibbles are elements 0-15, high ones 16-31."""
    return (_nibbles(b[:, 2:]).astype(np.float32) - 8) * _half(b, 0)


def _q4_1(b):
    """d f16, m f16, qs[16]: code * d + m."""
    return _nibbles(b[:, 4:]).astype(np.float32) * _half(b, 0) + _half(b, 2)


def _q5_0(b):
    """d f16, qh[4], qs[16]: (code - 16) * d; bit e of qh is the fifth bit of element e."""
    code = _nibbles(b[:, 6:]) | _fifth_bits(b, 2)
    return (code.astype(np.float32) - 16) * _half(b, 0)


def _q5_1(b):
    """d f16, m f16, qh[4], qs[16]: code * d + m."""
    code = _nibbles(b[:, 8:]) | _fifth_bits(b, 4)
    return code.astype(np.float32) * _half(b, 0) + _half(b, 2)


def _q8_0(b):
    """d f16, qs[32] int8: code * d."""
    return _signed(b[:, 2:]) * _half(b, 0)


def _iq4_nl(b):
    """d f16, qs[16]: d * value[code]; nibbles as in Q4_0."""
    return _half(b, 0) * _IQ4[_nibbles(b[:, 2:])]


def _q2_k(b):
    """scales[16], qs[64], d f16, dmin f16: d * (scale & 15) * code - dmin * (scale >> 4).

    Half h of 128 elements: byte l of 32, its bits 2 s and 2 s + 1 are element 128 h + 32 s + l. One
    scale byte per 16 elements.
    """
    code = _bits(b[:, 16:80].reshape(-1, 2, 32), 2, 4).reshape(-1, 16, 16).astype(np.float32)
    scales = b[:, :16]
    scale = _half(b, 80) * (scales & 15).astype(np.float32)
    minimum = _half(b, 82) * (scales >> 4).astype(np.float32)
    return scale[..., None] * code - minimum[..., None]


def _q3_k(b):
    """hmask[32], qs[64], scales[12], d f16: d * (scale - 32) * (code - (0 if hmask bit else 4)).

    Codes as in Q2_K; bit 4 h + s of hmask[l] belongs to element 128 h + 32 s + l. Scale j: low
    nibble of bytes 0-7 for j < 8, high nibble for the others, topped by 2 bits of byte 8 + j % 4.
    """
    code = _bits(b[:, 32:96].reshape(-1, 2, 32), 2, 4).astype(np.int8).reshape(-1, 8, 32)
    high = _bits(b[:, :32], 1, 8).astype(np.int8)
    code = (code - 4 * (1 - high)).reshape(-1, 16, 16).astype(np.float32)
    low = _nibbles(b[:, 96:104])
    top = _bits(b[:, 104:108], 2, 4).reshape(-1, 16)
    scale = (low | top << 4).astype(np.float32) - 32
    return (_half(b, 108) * scale)[..., None] * code


def _q4_k(b):
    """d f16, dmin f16, scales[12], qs[128]: d * scale * code - dmin * min, per 32 elements.

    32 bytes hold 64 elements: the low nibbles first, then the high ones.
    """
    code = _bits(b[:, 16:].reshape(-1, 4, 32), 4, 2).reshape(-1, 8, 32)
    return _with_min(b, code)


def _q5_k(b):
    """d f16, dmin f16, scales[12], qh[32], qs[128]: as Q4_K, bit j of qh[l] tops 32 j + l."""
    code = _bits(b[:, 48:].reshape(-1, 4, 32), 4, 2).reshape(-1, 8, 32)
    return _with_min(b, code | _bits(b[:, 16:48], 1, 8) << 4)


def _with_min(b, code):
    scale, minimum = _scale_min(b[:, 4:16])
    scale, minimum = _half(b, 0) * scale, _half(b, 2) * minimum
    return scale[..., None] * code.astype(np.float32) - minimum[..., None]


def _q6_k(b):
    """ql[128], qh[64], scales[16] int8, d f16: d * scale * (code - 32), one scale per 16.

    Half h of 128 elements, quarter t of 32: the low 4 bits of element 128 h + 32 t + l are a nibble
    of ql[64 h + 32 (t & 1) + l], low for t < 2, high for the others; bits 2 t and 2 t + 1 of
    qh[32 h + l] are its upper 2.
    """
    low = _bits(b[:, :128].reshape(-1, 2, 64), 4, 2).reshape(-1, 2, 4, 32)
    high = _bits(b[:, 128:192].reshape(-1, 2, 32), 2, 4)
    code = (low | high << 4).reshape(-1, 16, 16).astype(np.float32) - 32
    return (_half(b, 208) * _signed(b[:, 192:208]))[..., None] * code


def _iq4_xs(b):
    """d f16, scales_h u16, scales_l[4], qs[128]: d * (scale - 32) * value[code], per 32 elements.

    Scale j: nibble j of scales_l, topped by bits 2 j and 2 j + 1 of scales_h. 16 bytes hold 32
    elements: the low nibbles first.
    """
    low = _bits(b[:, 4:8, None], 4, 2).reshape(-1, 8)
    high = _bits(b[:, 2:4, None], 2, 4).reshape(-1, 8)
    scale = (low | high << 4).astype(np.float32) - 32
    code = _bits(b[:, 8:].reshape(-1, 8, 16), 4, 2).reshape(-1, 8, 32)
    return (_half(b, 0) * scale)[..., None] * _IQ4[code]


_EXPAND = {
    GGMLType.F32: _f32, GGMLType.F16: _f16, GGMLType.BF16: _bf16, GGMLType.Q4_0: _q4_0,
    GGMLType.Q4_1: _q4_1, GGMLType.Q5_0: _q5_0, GGMLType.Q5_1: _q5_1, GGMLType.Q8_0: _q8_0,
    GGMLType.Q2_K: _q2_k, GGMLType.Q3_K: _q3_k, GGMLType.Q4_K: _q4_k, GGMLType.Q5_K: _q5_k,
    GGMLType.Q6_K: _q6_k, GGMLType.IQ4_NL: _iq4_nl, GGMLType.IQ4_XS: _iq4_xs,
}  # fmt: skip
