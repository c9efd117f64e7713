"""ggml tensor types: ids, elements per block, bytes per block.

Owns the table every size computation in the loader goes through. A type id that is not in the
table is not an error here: ``inspect`` shows it by number, binding refuses it.

Source: ggml ``ggml/include/ggml.h`` (ids) and ``ggml/src/ggml-common.h`` (block layouts),
llama.cpp 0c1e57098bba.
"""

from __future__ import annotations

from enum import IntEnum


class GGMLType(IntEnum):
    """Tensor type ids of ggml; the numbers are the ones stored in GGUF files."""

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    Q8_1 = 9
    Q2_K = 10
    Q3_K = 11
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    Q8_K = 15
    IQ2_XXS = 16
    IQ2_XS = 17
    IQ3_XXS = 18
    IQ1_S = 19
    IQ4_NL = 20
    IQ3_S = 21
    IQ2_S = 22
    IQ4_XS = 23
    I8 = 24
    I16 = 25
    I32 = 26
    I64 = 27
    F64 = 28
    IQ1_M = 29
    BF16 = 30
    TQ1_0 = 34
    TQ2_0 = 35
    MXFP4 = 39
    NVFP4 = 40
    Q1_0 = 41
    Q2_0 = 42

    @property
    def block_size(self) -> int:
        """Elements per block."""
        return _LAYOUT[self][0]

    @property
    def type_size(self) -> int:
        """Bytes per block."""
        return _LAYOUT[self][1]


# type -> (elements per block, bytes per block)
_LAYOUT: dict[GGMLType, tuple[int, int]] = {
    GGMLType.F32: (1, 4),
    GGMLType.F16: (1, 2),
    GGMLType.Q4_0: (32, 18),
    GGMLType.Q4_1: (32, 20),
    GGMLType.Q5_0: (32, 22),
    GGMLType.Q5_1: (32, 24),
    GGMLType.Q8_0: (32, 34),
    GGMLType.Q8_1: (32, 36),
    GGMLType.Q2_K: (256, 84),
    GGMLType.Q3_K: (256, 110),
    GGMLType.Q4_K: (256, 144),
    GGMLType.Q5_K: (256, 176),
    GGMLType.Q6_K: (256, 210),
    GGMLType.Q8_K: (256, 292),
    GGMLType.IQ2_XXS: (256, 66),
    GGMLType.IQ2_XS: (256, 74),
    GGMLType.IQ3_XXS: (256, 98),
    GGMLType.IQ1_S: (256, 50),
    GGMLType.IQ4_NL: (32, 18),
    GGMLType.IQ3_S: (256, 110),
    GGMLType.IQ2_S: (256, 82),
    GGMLType.IQ4_XS: (256, 136),
    GGMLType.I8: (1, 1),
    GGMLType.I16: (1, 2),
    GGMLType.I32: (1, 4),
    GGMLType.I64: (1, 8),
    GGMLType.F64: (1, 8),
    GGMLType.IQ1_M: (256, 56),
    GGMLType.BF16: (1, 2),
    GGMLType.TQ1_0: (256, 54),
    GGMLType.TQ2_0: (256, 66),
    GGMLType.MXFP4: (32, 17),
    GGMLType.NVFP4: (64, 36),
    GGMLType.Q1_0: (128, 18),
    GGMLType.Q2_0: (64, 18),
}

# Weight types the op set multiplies with; everything else is refused when binding.
SUPPORTED: frozenset[GGMLType] = frozenset(
    {
        GGMLType.F32,
        GGMLType.F16,
        GGMLType.BF16,
        GGMLType.Q4_0,
        GGMLType.Q4_1,
        GGMLType.Q5_0,
        GGMLType.Q5_1,
        GGMLType.Q8_0,
        GGMLType.Q2_K,
        GGMLType.Q3_K,
        GGMLType.Q4_K,
        GGMLType.Q5_K,
        GGMLType.Q6_K,
        GGMLType.IQ4_NL,
        GGMLType.IQ4_XS,
    }
)

# Types a norm, a bias or a table of RoPE factors may have: all convert to float32 exactly.
VECTOR_TYPES: frozenset[GGMLType] = frozenset({GGMLType.F32, GGMLType.F16, GGMLType.BF16})


def known_type(type_id: int) -> GGMLType | None:
    """Return the type with this id, or None when the table does not have it."""
    try:
        return GGMLType(type_id)
    except ValueError:
        return None


def type_name(type_id: int) -> str:
    """Return the type's name, or ``type 99`` for an id that is not in the table."""
    known = known_type(type_id)
    return known.name if known is not None else f"type {type_id}"


def row_bytes(type: GGMLType, n: int) -> int:
    """Return the bytes of one row of ``n`` elements.

    Raises
    ------
    ValueError
        If ``n`` is not a multiple of the type's block size.
    """
    if n % type.block_size:
        raise ValueError(
            f"a row of {n} values is not a multiple of the {type.block_size}-value block of "
            f"{type.name}"
        )
    return n // type.block_size * type.type_size
