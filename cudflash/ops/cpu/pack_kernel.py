"""Kernel that re-tiles raw rows: pure byte movement, 16 rows side by side word by word."""

from llvmlite import ir
from numba import types

from cudflash.ops.cpu import simd as S
from cudflash.ops.cpu.formats import FORMATS, TILE_ROWS


def _beside(word):
    """Intrinsic ``(source, stride, target)``: one word of 16 rows, ``stride`` bytes apart."""
    vector = ir.VectorType(word, TILE_ROWS)

    def emit(b, source, stride, target):
        out = ir.Constant(vector, ir.Undefined)
        for r in range(TILE_ROWS):
            at = b.add(source, b.mul(stride, ir.Constant(S.I64, r)))
            out = b.insert_element(out, S.load(b, at, word), ir.Constant(S.I32, r))
        S.store(b, out, target)

    return S._define("beside", types.none(types.int64, types.int64, types.int64), emit)


def build(name):
    """Python function of the kernel ``pack_<name>``.

    ``args`` is ``[raw, data, n rows, row bytes, blocks per row]``. Rows beyond ``n`` are zero.
    """
    from numba import njit

    fmt = FORMATS[name]
    offsets = tuple(f.offset for f in fmt.fields)
    widths = tuple(f.width for f in fmt.fields)
    counts = tuple(f.count for f in fmt.fields)
    spreads = tuple(f.spread for f in fmt.fields)
    n_fields, block_bytes = len(fmt.fields), fmt.block_bytes
    beside4, beside2 = _beside(S.I32), _beside(S.I16)

    @njit(inline="always")
    def spread(word):
        """Bit 4 j + i of ``word`` becomes bit j of byte i."""
        out = 0
        for bit in range(32):
            out |= ((word >> bit) & 1) << ((bit % 4) * 8 + bit // 4)
        return out

    def pack(args, tid, n_threads):
        raw, data = S.peek_i64(args), S.peek_i64(args + 8)
        n, row_bytes, blocks = (S.peek_i64(args + 16), S.peek_i64(args + 24),
                                S.peek_i64(args + 32))
        tiles = (n + 15) // 16
        for t in range(tiles * tid // n_threads, tiles * (tid + 1) // n_threads):
            lanes = min(16, n - 16 * t)
            for u in range(blocks):
                at = data + (t * blocks + u) * block_bytes * 16
                for f in range(n_fields):
                    for j in range(counts[f]):
                        width = widths[f]
                        if lanes == 16 and not spreads[f]:
                            source = (raw + 16 * t * row_bytes + u * block_bytes
                                      + offsets[f] + width * j)
                            if width == 4:
                                beside4(source, row_bytes, at)
                            else:
                                beside2(source, row_bytes, at)
                            at += 16 * width
                            continue
                        for r in range(16):
                            src = (raw + (16 * t + r) * row_bytes + u * block_bytes
                                   + offsets[f] + width * j)
                            if width == 4:
                                word = S.peek_i32(src) if r < lanes else 0
                                S.poke_i32(at + 4 * r, spread(word) if spreads[f] else word)
                            else:
                                S.poke_i16(at + 2 * r, S.peek_u16(src) if r < lanes else 0)
                        at += 16 * width

    return pack
