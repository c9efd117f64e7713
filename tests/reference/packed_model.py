"""The packed matmul of docs/NUMERICS.md as plain NumPy: integers, then stated float steps.

Shares nothing with the op set. Codes and integer scales are read from the raw blocks as the block
tables of ``spec`` describe them (ggml ``ggml-common.h``); sums are int64, so an overflow of the
kernels' int32 would show as a difference.
"""

import numpy as np

BLOCK = {
    "Q4_0": (32, 18), "Q4_1": (32, 20), "Q5_0": (32, 22), "Q5_1": (32, 24), "Q8_0": (32, 34),
    "IQ4_NL": (32, 18), "Q2_K": (256, 84), "Q3_K": (256, 110), "Q4_K": (256, 144),
    "Q5_K": (256, 176), "Q6_K": (256, 210), "IQ4_XS": (256, 136),
}
IQ4 = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113])


def fma(a, b, c):
    """Float32 fused multiply-add: exact product and sum in 64-bit mantissas, one rounding.

    The product of two float32 is exact; the sum is rounded to 64 bits and then to 24, which
    differs from one rounding only on a 2^-40 chance per step (fixed seeds either hit it or not).
    """
    wide = np.longdouble
    return (a.astype(wide) * b.astype(wide) + np.asarray(c).astype(wide)).astype(np.float32)


def _half(raw, at):
    return raw[..., at:at + 2].copy().view(np.float16)[..., 0].astype(np.float32)


def decode(name, raw):
    """Codes and scales of raw blocks.

    Parameters
    ----------
    raw : ndarray of shape (..., block_bytes), uint8

    Returns
    -------
    codes : ndarray of shape (..., block), int64
        Signed integer values before scaling.
    scales : ndarray of shape (..., block), int64
        Integer scale of each element (1 for 32-element formats).
    mins : ndarray of shape (..., block), int64, or None
    d, m : float32 arrays of shape (...,), m is None without a minimum
    """
    return globals()["_" + name.lower()](raw.astype(np.int64), raw)


def _nibbles(qs):
    return np.concatenate([qs & 15, qs >> 4], -1)


def _fifth(bits):
    e = np.arange(32)
    word = sum(bits[..., i] << (8 * i) for i in range(4))
    return ((word[..., None] >> e) & 1) << 4


def _ones(codes):
    return np.ones_like(codes)


def _q4_0(b, raw):
    codes = _nibbles(b[..., 2:18]) - 8
    return codes, _ones(codes), None, _half(raw, 0), None


def _q4_1(b, raw):
    codes = _nibbles(b[..., 4:20])
    return codes, _ones(codes), _ones(codes), _half(raw, 0), _half(raw, 2)


def _q5_0(b, raw):
    codes = _nibbles(b[..., 6:22]) + _fifth(b[..., 2:6]) - 16
    return codes, _ones(codes), None, _half(raw, 0), None


def _q5_1(b, raw):
    codes = _nibbles(b[..., 8:24]) + _fifth(b[..., 4:8])
    return codes, _ones(codes), _ones(codes), _half(raw, 0), _half(raw, 2)


def _q8_0(b, raw):
    codes = raw[..., 2:34].view(np.int8).astype(np.int64)
    return codes, _ones(codes), None, _half(raw, 0), None


def _iq4_nl(b, raw):
    codes = IQ4[_nibbles(b[..., 2:18])]
    return codes, _ones(codes), None, _half(raw, 0), None


def _per(values, n):
    return np.repeat(values, n, -1)


def _six_bit(s):
    sc = [s[..., j] & 63 for j in range(4)]
    mn = [s[..., j + 4] & 63 for j in range(4)]
    for j in range(4, 8):
        sc.append((s[..., j + 4] & 15) | ((s[..., j - 4] >> 6) << 4))
        mn.append((s[..., j + 4] >> 4) | ((s[..., j] >> 6) << 4))
    return np.stack(sc, -1), np.stack(mn, -1)


def _chunks(qs):
    """Low then high nibbles of each run of 32 bytes: 64 elements a run."""
    runs = qs.reshape(*qs.shape[:-1], 4, 32)
    return np.concatenate([runs & 15, runs >> 4], -1).reshape(*qs.shape[:-1], 256)


def _q4_k(b, raw):
    sc, mn = _six_bit(b[..., 4:16])
    return _chunks(b[..., 16:144]), _per(sc, 32), _per(mn, 32), _half(raw, 0), _half(raw, 2)


def _q5_k(b, raw):
    sc, mn = _six_bit(b[..., 4:16])
    e = np.arange(256)
    fifth = (b[..., 16:48][..., e % 32] >> (e // 32)) & 1
    return (_chunks(b[..., 48:176]) + 16 * fifth, _per(sc, 32), _per(mn, 32),
            _half(raw, 0), _half(raw, 2))


def _q6_k(b, raw):
    e = np.arange(256)
    h, r = e // 128, e % 128
    t, lane = r // 32, r % 32
    low = (b[..., :128][..., 64 * h + lane + 32 * (t & 1)] >> np.where(t < 2, 0, 4)) & 15
    top = (b[..., 128:192][..., 32 * h + lane] >> (2 * t)) & 3
    scales = raw[..., 192:208].view(np.int8).astype(np.int64)
    return low + 16 * top - 32, _per(scales, 16), None, _half(raw, 208), None


def _two_bits(qs):
    e = np.arange(256)
    return (qs[..., 32 * (e // 128) + e % 32] >> (2 * (e % 128 // 32))) & 3


def _q2_k(b, raw):
    s = b[..., :16]
    return (_two_bits(b[..., 16:80]), _per(s & 15, 16), _per(s >> 4, 16),
            _half(raw, 80), _half(raw, 82))


def _q3_k(b, raw):
    e = np.arange(256)
    bit = 4 * (e // 128) + e % 128 // 32
    third = (b[..., :32][..., e % 32] >> bit) & 1
    s = b[..., 96:108]
    j = np.arange(16)
    low = np.where(j < 8, s[..., j % 8] & 15, s[..., j % 8] >> 4)
    high = (s[..., 8 + j % 4] >> (2 * (j // 4))) & 3
    scales = (low | (high << 4)) - 32
    return _two_bits(b[..., 32:96]) - 4 * (1 - third), _per(scales, 16), None, _half(raw, 108), None


def _iq4_xs(b, raw):
    high_word = b[..., 2] | (b[..., 3] << 8)
    j = np.arange(8)
    low = (b[..., 4:8][..., j // 2] >> (4 * (j % 2))) & 15
    high = (high_word[..., None] >> (2 * j)) & 3
    runs = b[..., 8:136].reshape(*b.shape[:-1], 8, 16)
    codes = IQ4[np.concatenate([runs & 15, runs >> 4], -1)].reshape(*b.shape[:-1], 256)
    return codes, _per((low | (high << 4)) - 32, 32), None, _half(raw, 0), None


def quantize(x, unit, activations):
    """Activation rows as the contract has them.

    Returns
    -------
    q : ndarray of shape (M, K), int64
        Codes, 127 or 32,512 at most.
    e : ndarray of shape (M, K), int64
        Exponent of each element's group of 32.
    d : ndarray of shape (M, K / unit), float32
    """
    m, k = x.shape
    groups = x.reshape(m, k // unit, unit)
    top = np.abs(groups).max(-1)
    limit = np.float32(127 if activations == "int8" else 32512)
    with_exponent = unit == 256 and activations == "int8"
    finest = np.float32(1016) if with_exponent else limit
    live = (top >= np.float32(1e-30)) & np.isfinite(top)
    safe = np.where(live, top, np.float32(1))
    d = np.where(live, safe / finest, np.where(np.isfinite(top), np.float32(0), np.float32("nan")))
    inverse = np.where(live, finest / safe, np.float32(0))
    e = np.zeros((m, k // 32), np.int64)
    if with_exponent:
        part = np.abs(x.reshape(m, k // unit, 8, 32)).max(-1)
        whole = top[..., None]
        e = ((part > whole * np.float32(0.125)).astype(np.int64)
             + (part > whole * np.float32(0.25)) + (part > whole * np.float32(0.5)))
        e = e.reshape(m, k // 32)
    step = np.repeat(inverse, unit // 32, -1) * np.float32(2.0) ** -e.astype(np.float32)
    step = np.repeat(step, 32, -1)
    q = np.rint(np.where(step > 0, x, np.float32(0)) * step).astype(np.int64)
    return q, np.repeat(e, 32, -1), d


def matmul(name, raw, x, activations):
    """Rows ``x`` (M, K) float32 times raw packed rows (N, bytes), in the contract's order."""
    block, block_bytes = BLOCK[name]
    n, k = len(raw), x.shape[1]
    units = k // block
    codes, scales, mins, d, m = decode(name, raw.reshape(n, units, block_bytes))
    q, e, xd = quantize(x, block, activations)
    q = (q << e).reshape(len(x), units, block)
    low = ((q + 128) % 256) - 128
    high = (q - low) // 256
    n_slices = 8 if k < 16384 else 16
    out = np.zeros((len(x), n), np.float32)
    for r in range(len(x)):
        total = np.zeros(n, np.float32)
        for s in range(n_slices):
            acc = np.zeros(n, np.float32)
            for u in range(units * s // n_slices, units * (s + 1) // n_slices):
                acc = _unit(acc, block, activations, codes[:, u] * scales[:, u],
                            None if mins is None else mins[:, u], d[:, u],
                            None if m is None else m[:, u],
                            q[r, u], low[r, u], high[r, u], xd[r, u])
            total = total + acc
        out[r] = total
    return out


def _unit(acc, block, activations, weights, mins, d, m, q, low, high, xd):
    if block == 256 and activations == "int8x2":
        # Two exact sums, joined by one fused step: an int32 could not hold the whole.
        def value(w):
            return fma((w @ high).astype(np.float32), np.float32(256),
                       (w @ low).astype(np.float32))
    else:
        def value(w):
            return (w @ q).astype(np.float32)
    acc = fma(value(weights), d * xd, acc)
    if mins is None:
        return acc
    if block == 256:
        return fma(-value(mins), m * xd, acc)
    return fma(m, np.broadcast_to(xd * np.float32(q.sum()), m.shape), acc)
