"""How each weight format lies in device memory: tiles that a lane reads by 16 bytes.

The order inside a tile is in ``raw_kernels/common/formats32.cuh`` and ``formats256.cuh``; a tile of
a float format is 32 rows by 16 bytes. Sizes are those of the file with the rows rounded up to a
tile, but for Q3_K: 112 bytes a block instead of 110.
"""

from dataclasses import dataclass

from cudflash.errors import UsageError


@dataclass(frozen=True)
class Format:
    """A weight format as the kernels see it."""

    name: str
    layout: str  # "f32": float products; "q32", "q256": int8 activations by 32 or 256
    block: int  # elements in a block of the file
    block_bytes: int  # of the file
    tile_rows: int
    tile_block_bytes: int  # of one block column of a tile


def _formats():
    q32 = {"Q4_0": 18, "Q4_1": 20, "Q5_0": 22, "Q5_1": 24, "Q8_0": 34, "IQ4_NL": 18}
    q256 = {"Q2_K": 84, "Q3_K": 110, "Q4_K": 144, "Q5_K": 176, "Q6_K": 210, "IQ4_XS": 136}
    yield from (Format(n, "f32", 1, size, 32, 32 * size)
                for n, size in (("F32", 4), ("F16", 2), ("BF16", 2)))
    yield from (Format(n, "q32", 32, size, 32, 32 * size) for n, size in q32.items())
    for n, size in q256.items():
        yield Format(n, "q256", 256, size, 16, 16 * (112 if n == "Q3_K" else size))


FORMATS = {fmt.name: fmt for fmt in _formats()}


def format_of(type_, purpose):
    """Format of a GGMLType or name; raises UsageError for one that has no kernel."""
    name = getattr(type_, "name", type_)
    if name not in FORMATS:
        raise UsageError(f"{purpose}; supported are {', '.join(FORMATS)}, found {name}")
    return FORMATS[name]


def n_slices(k):
    """Number S of contiguous slices of the reduced dimension; a function of ``k`` alone."""
    return 8 if k < 16384 else 16


def packed_nbytes(format_name, n, k):
    """Bytes of a packed (n, k) matrix on the device."""
    fmt = FORMATS[format_name]
    tiles = -(-n // fmt.tile_rows)
    if fmt.layout == "f32":
        per_step = 16 // fmt.block_bytes
        return tiles * -(-k // per_step) * fmt.tile_rows * 16
    return tiles * (k // fmt.block) * fmt.tile_block_bytes


def embedding_nbytes(type_, n, k):
    """Bytes of an (n, k) table of which rows are looked up: those of the file, on the device."""
    fmt = format_of(type_, "an embedding table cannot be expanded")
    return n * (k // fmt.block) * fmt.block_bytes
