"""Embedding rows, looked up in the file's own bytes on the device; kernel in ``embed_rows.cu``."""

import numpy as np

from cudflash.errors import UsageError
from cudflash.ops.cuda.checks import check_rows, check_shape
from cudflash.ops.cuda.formats import format_of
from cudflash.ops.cuda.launch import Long

_BLOCK = 256


class EmbeddingTable:
    """Rows of a table as they lie in the file, in device memory.

    Attributes
    ----------
    type : str
    n, k : int
        Rows, elements in a row.
    raw : array of shape (n, row bytes), uint8
    """

    __slots__ = ("type", "n", "k", "raw")

    def __init__(self, type_name, n, k, raw):
        self.type, self.n, self.k, self.raw = type_name, n, k, raw

    @property
    def nbytes(self):
        """Bytes allocated."""
        return self.raw.nbytes


def embedding_table(self, raw, type_, k):
    """Copy raw rows to the device for :func:`embed_rows`.

    Parameters
    ----------
    raw : ndarray of shape (n, row bytes), uint8
        Host rows.
    type_ : GGMLType or str
    k : int
        Elements in a row.
    """
    fmt = format_of(type_, "an embedding table cannot be expanded")
    if k % fmt.block or raw.shape[1] != k // fmt.block * fmt.block_bytes:
        raise UsageError(
            f"raw rows have {raw.shape[1]} bytes, but {k} elements of {fmt.name} need "
            f"{k / fmt.block * fmt.block_bytes:g}")
    check_rows("embedding_table", "raw", raw, np.uint8)
    return EmbeddingTable(fmt.name, len(raw), k, self.upload(raw))


def embed_rows(self, out, table, ids, scale):
    """``out[r] = expand(table[ids[r]]) * scale``; as ``ops.cpu.embed_rows``.

    Parameters
    ----------
    out : array of shape (M, k), float32
    table : EmbeddingTable
    ids : array of shape (M,), int32
        An id outside the table makes its row NaN.
    scale : float
    """
    check_rows("embed_rows", "out", out)
    check_rows("embed_rows", "ids", ids, np.int32)
    check_shape("embed_rows", "ids", ids, (len(out),))
    check_shape("embed_rows", "out", out, (len(out), table.k))
    if len(out) == 0:
        return
    self.start("embed_rows", (f"FORMAT={table.type}",), "embed_rows",
               (-(-table.k // _BLOCK), len(out)), (_BLOCK,),
               (out, Long(out.strides[0] // 4), table.raw, Long(table.raw.strides[0]), table.n, ids,
                table.k, float(scale)))
