"""Embedding rows: looked up in the file's own bytes and expanded, the op-level functions."""

import numpy as np

from cudflash.errors import UsageError
from cudflash.ops.cpu import jit
from cudflash.ops.cpu.formats import FORMATS
from cudflash.ops.cpu.rows import check_rows, check_shape, extent, stride
from cudflash.ops.cpu.runtime import submit


class EmbeddingTable:
    """Rows of a table as they lie in the file; mapped memory, not copied.

    Attributes
    ----------
    type : str
    n, k : int
        Rows, elements in a row.
    raw : ndarray of shape (n, row bytes), uint8
    """

    __slots__ = ("type", "n", "k", "raw")

    def __init__(self, type_name, n, k, raw):
        self.type, self.n, self.k, self.raw = type_name, n, k, raw

    @property
    def nbytes(self):
        """Bytes allocated: none."""
        return 0


def embedding_table(raw, type_, k):
    """Wrap raw rows for :func:`embed_rows`.

    Parameters
    ----------
    raw : ndarray of shape (n, row bytes), uint8
        Kept, not copied.
    type_ : GGMLType or str
    k : int
        Elements in a row.
    """
    name = getattr(type_, "name", type_)
    if name not in FORMATS:
        raise UsageError(
            f"embedding type {name} cannot be expanded; supported are {', '.join(FORMATS)}")
    fmt = FORMATS[name]
    if k % fmt.block or raw.shape[1] != k // fmt.block * fmt.block_bytes:
        raise UsageError(
            f"raw rows have {raw.shape[1]} bytes, but {k} elements of {name} need "
            f"{k / fmt.block * fmt.block_bytes:g}")
    check_rows("embedding_table", "raw", raw, np.uint8)
    return EmbeddingTable(name, len(raw), k, raw)


def embedding_nbytes(type_, n, k):
    """Bytes that :func:`embedding_table` allocates for an (n, k) table: none, rows stay mapped."""
    return 0


def embed_rows(out, table, ids, scale):
    """``out[r] = expand(table[ids[r]]) * scale``.

    Parameters
    ----------
    out : ndarray of shape (M, k), float32
    table : EmbeddingTable
    ids : ndarray of shape (M,), int32
        An id outside the table makes its row NaN, which ``check_finite`` reports; a recorded op
        cannot raise, and another row would be a wrong answer without a sign.
    scale : float
        Rounded to float32; the product is rounded once (subnormal values are flushed to zero).

    Notes
    -----
    Expansion in ggml's order: the products d * scale and dmin * min first, each rounded, then
    (d * scale) * code, then the subtraction; see ``cudflash.quant``.
    """
    check_rows("embed_rows", "out", out)
    check_rows("embed_rows", "ids", ids, np.int32)
    check_shape("embed_rows", "ids", ids, (len(out),))
    check_shape("embed_rows", "out", out, (len(out), table.k))
    if len(out) == 0:
        return
    name = table.type

    def build():
        from cudflash.ops.cpu.embed_kernel import build

        return build(name)

    submit(jit.register(f"embed_{name.lower()}", build),
           [out, stride(out), table.raw, stride(table.raw), table.n,
            table.k // FORMATS[name].block, ids, len(out), float(scale)],
           reads=[ids], writes=[extent(out)], keep=(table,),
           rows=len(out), by_rows=[out])
