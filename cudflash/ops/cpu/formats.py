"""How each packed format lies in memory: the raw block, and the CPU's 16-row tiles.

A tile holds 16 weight rows. Inside a tile every block is stored field by field, each field word by
word, each word for the 16 rows side by side, so one 64-byte load gives a SIMD register one word
of 16 rows. The bytes themselves are those of the file: the packed size equals the raw size, with
the row count rounded up to 16. Only ``qh`` of Q5_0 and Q5_1 has its 32 bits permuted (bit j of
byte i is element 4j + i), so that the fifth bits of four neighbours can be masked together.

Block layouts: ggml ``ggml-common.h`` (field names are ggml's).
"""

from dataclasses import dataclass

TILE_ROWS = 16


@dataclass(frozen=True)
class Field:
    """One field of a raw block: ``count`` words of ``width`` bytes from byte ``offset``."""

    name: str
    offset: int
    width: int
    count: int
    spread: bool = False  # permute the 32 bits of a fifth-bit word, see above


@dataclass(frozen=True)
class Format:
    """A weight format as the matmul kernels see it."""

    name: str
    layout: str            # "f32": float products; "q32", "q256": int8 activations by 32 or 256
    block: int             # elements in a block
    block_bytes: int
    fields: tuple
    sub: int = 32          # elements that share an integer scale (q256)
    bias: int = 0          # value = code - bias
    has_min: bool = False

    def field_offset(self, name):
        """Byte offset of a field inside one block of a tile."""
        at = 0
        for field in self.fields:
            if field.name == name:
                return at
            at += field.width * field.count * TILE_ROWS
        raise KeyError(name)

    @property
    def tile_block_bytes(self):
        """Bytes of one block of a tile."""
        return self.block_bytes * TILE_ROWS


def _format(name, layout, block, block_bytes, fields, **more):
    made = Format(name, layout, block, block_bytes, tuple(Field(*f) for f in fields), **more)
    covered = sum(f.width * f.count for f in made.fields)
    if covered != block_bytes:
        raise AssertionError(f"{name}: fields cover {covered} of {block_bytes} bytes")
    return made


_D, _M = ("d", 0, 2, 1), ("m", 2, 2, 1)

FORMATS = {f.name: f for f in (
    _format("F32", "f32", 1, 4, [("x", 0, 4, 1)]),
    _format("F16", "f32", 1, 2, [("x", 0, 2, 1)]),
    _format("BF16", "f32", 1, 2, [("x", 0, 2, 1)]),
    _format("Q4_0", "q32", 32, 18, [("qs", 2, 4, 4), _D], bias=8),
    _format("Q4_1", "q32", 32, 20, [("qs", 4, 4, 4), _D, _M], has_min=True),
    _format("Q5_0", "q32", 32, 22, [("qs", 6, 4, 4), ("qh", 2, 4, 1, True), _D], bias=16),
    _format("Q5_1", "q32", 32, 24, [("qs", 8, 4, 4), ("qh", 4, 4, 1, True), _D, _M],
            has_min=True),
    _format("Q8_0", "q32", 32, 34, [("qs", 2, 4, 8), _D], bias=128),
    _format("IQ4_NL", "q32", 32, 18, [("qs", 2, 4, 4), _D], bias=128),
    _format("Q2_K", "q256", 256, 84,
            [("qs", 16, 4, 16), ("scales", 0, 4, 4), ("d", 80, 2, 1), ("dmin", 82, 2, 1)],
            sub=16, has_min=True),
    _format("Q3_K", "q256", 256, 110,
            [("qs", 32, 4, 16), ("hmask", 0, 4, 8), ("scales", 96, 4, 3), ("d", 108, 2, 1)],
            sub=16, bias=4),
    _format("Q4_K", "q256", 256, 144,
            [("qs", 16, 4, 32), ("scales", 4, 4, 3), _D, ("dmin", 2, 2, 1)], has_min=True),
    _format("Q5_K", "q256", 256, 176,
            [("qs", 48, 4, 32), ("qh", 16, 4, 8), ("scales", 4, 4, 3), _D, ("dmin", 2, 2, 1)],
            has_min=True),
    _format("Q6_K", "q256", 256, 210,
            [("ql", 0, 4, 32), ("qh", 128, 4, 16), ("scales", 192, 4, 4), ("d", 208, 2, 1)],
            sub=16, bias=32),
    _format("IQ4_XS", "q256", 256, 136,
            [("qs", 8, 4, 32), ("scales_l", 4, 4, 1), ("scales_h", 2, 2, 1), _D], bias=128),
)}

# Values of the 4-bit non-linear codes (ggml ``kvalues_iq4nl``).
IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def n_slices(k):
    """Number S of contiguous slices of the reduced dimension; a function of ``k`` alone."""
    return 8 if k < 16384 else 16


def packed_nbytes(format_name, n, k):
    """Bytes of a packed (n, k) matrix."""
    fmt = FORMATS[format_name]
    tiles = -(-n // TILE_ROWS)
    return tiles * (k // fmt.block) * fmt.tile_block_bytes
