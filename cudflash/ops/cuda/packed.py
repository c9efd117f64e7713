"""Packed weights, quantised activation rows, and their product.

Kernels: ``retile.cu``, ``quantize_q32.cu``, ``quantize_q256.cu``, ``matmul_q32.cu``,
``matmul_q256.cu``, ``matmul_float.cu``. How many rows a launch takes at a time is chosen here, by
the number of rows and the size of the matrix; it never changes a bit.
"""

import numpy as np

from cudflash.errors import UsageError
from cudflash.ops.cuda.formats import FORMATS, format_of, n_slices, packed_nbytes
from cudflash.ops.cuda.launch import MAX_GRID_YZ, Long

ACTIVATIONS = ("int8", "int8x2")
SPLIT_ROWS = 16  # up to here eight warps share the slices of K; longer calls have rows for all
# Weight rows of a warp (in tiles of 16) and groups of warps in a block, up to SPLIT_ROWS rows of
# activations and above.
ROW_TILES, ROW_GROUPS = 2, 1
PREFILL_ROW_TILES, PREFILL_ROW_GROUPS = 1, 4
_UNIT = {"q32": 32, "q256": 256}


class PackedMatrix:
    """A weight matrix in the device's tile order.

    Attributes
    ----------
    type : str
    n, k : int
    data : array of shape (n_bytes,), uint8
    """

    __slots__ = ("type", "n", "k", "data", "format")

    def __init__(self, type_name, n, k, data):
        self.type, self.n, self.k, self.data = type_name, n, k, data
        self.format = FORMATS[type_name]

    @property
    def layout(self):
        """``f32``, ``q32`` or ``q256``: the form of activations this matrix multiplies."""
        return self.format.layout

    @property
    def nbytes(self):
        """Bytes held."""
        return self.data.nbytes


def pack(self, raw, type_, k):
    """Copy raw rows to the device, re-tiled for the matmul kernels.

    Parameters
    ----------
    raw : ndarray of shape (n, row_bytes), uint8
        Host rows as they lie in the file.
    type_ : GGMLType or str
    k : int
        Elements in a row.

    Returns
    -------
    PackedMatrix
    """
    fmt = format_of(type_, "a weight type without a matmul")
    n = len(raw)
    if k % fmt.block or raw.shape[1] != k // fmt.block * fmt.block_bytes:
        raise UsageError(
            f"raw rows have {raw.shape[1]} bytes, but {k} elements of {fmt.name} need "
            f"{k / fmt.block * fmt.block_bytes:g}")
    if fmt.layout == "f32" and k % 4:
        raise UsageError(f"a {fmt.name} matrix has rows of {k} elements, expected a multiple of 4")
    matrix = PackedMatrix(fmt.name, n, k, self.empty((packed_nbytes(fmt.name, n, k),), np.uint8))
    # a chunk of rows becomes whole tiles of every unit of K
    per_tile = matrix.nbytes // max(1, -(-n // fmt.tile_rows))

    def retile(rows, first):
        tiles = -(-len(rows) // fmt.tile_rows)
        at = first // fmt.tile_rows * per_tile
        target = matrix.data[at:at + tiles * per_tile]
        if fmt.layout == "f32":
            per_step = 16 // fmt.block_bytes
            self.start("matmul_float", _float_defines(fmt.name, 1, k), "retile_float",
                       (-(-k // per_step), tiles), (32 * per_step,), (rows, target, len(rows), k))
        else:
            self.start("retile", (f"FORMAT={fmt.name}", f"TILE_ROWS={fmt.tile_rows}"), "retile",
                       (k // fmt.block, tiles), (128,),
                       (rows, Long(rows.strides[0]), target, len(rows)))

    self.loader.stream(raw, fmt.tile_rows, retile)
    return matrix


def pack_all(self, items):
    """:func:`pack` for several matrices, as (raw, type_, k)."""
    return [self.pack(*item) for item in items]


def _float_defines(name, tokens, k):
    return f"FORMAT={name}", f"TOKENS={tokens}", f"SLICES={n_slices(k)}"


class QuantizedRows:
    """Scratch for activation rows in int8, in the order in which the tensor cores read it.

    Attributes
    ----------
    max_rows, k : int
    layout : {"q32", "q256"}
    m : int
        Rows this view is taken as.
    """

    def __init__(self, ops, max_rows, k, layout, activations):
        if layout not in _UNIT:
            raise UsageError(f"activation layout is {layout!r}, expected q32 or q256")
        if activations not in ACTIVATIONS:
            raise UsageError(
                f"activations is {activations!r}, expected one of {', '.join(ACTIVATIONS)}")
        unit = _UNIT[layout]
        if k % unit:
            raise UsageError(f"rows of {k} elements cannot be quantised by {unit}")
        self.k, self.layout, self.activations = k, layout, activations
        self.planes = 1 if activations == "int8" else 2
        self.max_rows = self.m = max_rows
        # whole groups of whatever size fewer rows are taken in
        group = 8 * token_tiles(max_rows)
        rows = max(16, -(-max_rows // group) * group)
        flat = rows * (k // unit)
        self.codes = ops.zeros((rows * k * self.planes,), np.int8)
        self.d = ops.zeros((flat,), np.float32)
        if layout == "q32":  # -8 * sum(q); d * sum(q)
            self.more = ops.zeros((flat,), np.int32), ops.zeros((flat,), np.float32)
        else:  # exponents of 8 runs of 32; sums of 16 runs of 16, in two bytes each
            sums = ops.zeros((rows * (k // 256) * 32 * self.planes,), np.int8)
            self.more = ops.zeros((flat,), np.uint16), sums

    @property
    def arrays(self):
        """All buffers, in the order in which the kernels take them."""
        return self.codes, self.d, *self.more

    @property
    def nbytes(self):
        """Bytes held."""
        return sum(array.nbytes for array in self.arrays)

    @property
    def token_tiles(self):
        """Tiles of 8 rows that go through a product together."""
        return token_tiles(self.m)

    @property
    def padded(self):
        """Rows of whole groups of ``token_tiles``: those past ``m`` are zeros."""
        tokens = 8 * self.token_tiles
        return -(-self.m // tokens) * tokens

    def rows(self, m):
        """The same scratch, taken as ``m`` rows."""
        if not 1 <= m <= self.max_rows:
            raise UsageError(f"scratch of {self.max_rows} rows cannot hold {m}")
        view = object.__new__(QuantizedRows)
        view.__dict__.update(self.__dict__, m=m)
        return view


def token_tiles(m):
    """Tiles of 8 rows that a product of ``m`` rows takes at a time."""
    return 1 if m <= 8 else 2 if m <= SPLIT_ROWS else 4


def quantized_rows(self, max_rows, k, layout, activations):
    """Make :class:`QuantizedRows` scratch."""
    return QuantizedRows(self, max_rows, k, layout, activations)


def check_aligned(op, x):
    """Raise unless every row of ``x`` can be read by 16 bytes."""
    if x.address % 16 or x.strides[0] % 16:
        raise UsageError(
            f"{op}: rows at address {x.address:#x}, {x.strides[0]} bytes apart, are not aligned to "
            "16 bytes")


def quantize_rows(self, xq, x):
    """Quantise float rows; see docs/NUMERICS.md, "Activations".

    Parameters
    ----------
    xq : QuantizedRows
        Overwritten.
    x : array of shape (xq.m, k), float32
    """
    if x.shape != (xq.m, xq.k) or x.dtype != np.float32:
        raise UsageError(f"{x.dtype} rows of shape {x.shape} do not fit scratch of "
                         f"({xq.m}, {xq.k})")
    check_aligned("quantize_rows", x)
    self.start(f"quantize_{xq.layout}", (f"PLANES={xq.planes}", f"TOKEN_TILES={xq.token_tiles}"),
               f"quantize_{xq.layout}", (-(-xq.k // 1024), xq.padded), (128,),
               (x, Long(x.strides[0] // 4), *xq.arrays, xq.m, xq.k))


def matmul(self, out, x, w):
    """``out[r] = W x[r]`` for every row, the reduction in the order of docs/NUMERICS.md.

    Parameters
    ----------
    out : array of shape (M, N), float32
    x : QuantizedRows, or array of shape (M, K), float32, when ``w.layout`` is ``"f32"``
    w : PackedMatrix of shape (N, K)
    """
    m, n = out.shape
    quantized = isinstance(x, QuantizedRows)
    layout = x.layout if quantized else "f32"
    k = x.k if quantized else x.shape[1]
    rows = x.m if quantized else x.shape[0]
    if layout != w.layout or k != w.k or n != w.n or rows != m:
        raise UsageError(
            f"matmul of {layout} rows ({rows}, {k}) with a {w.type} matrix ({w.n}, {w.k}) of "
            f"layout {w.layout} does not give an output of ({m}, {n})")
    out_stride = Long(out.strides[0] // 4)
    if not quantized:
        check_aligned("matmul", x)
        tokens = next((t for t in (1, 2, 4, 8) if m <= t), 16)
        _check_groups(m, tokens)
        self.start("matmul_float", _float_defines(w.type, tokens, k), "matmul_float",
                   (-(-n // 32), -(-m // tokens)), (256,),
                   (out, out_stride, w.data, x, Long(x.strides[0] // 4), m, n, k))
        return
    _check_groups(m, 8 * x.token_tiles)
    kernel, block_rows, threads, defines = _product(w, x)
    self.start(kernel, defines, kernel, (-(-n // block_rows), -(-m // (8 * x.token_tiles))),
               (threads,), (out, out_stride, w.data, *x.arrays, m, n, k))


def _product(w, x):
    """Kernel of a packed product: (name, weight rows of a block, threads of a block, defines)."""
    few = x.m <= SPLIT_ROWS
    tiles, groups = (ROW_TILES, ROW_GROUPS) if few else (PREFILL_ROW_TILES, PREFILL_ROW_GROUPS)
    defines = [f"FORMAT={w.type}", f"PLANES={x.planes}", f"TOKEN_TILES={x.token_tiles}",
               f"ROW_GROUPS={groups}", f"SLICES={n_slices(w.k)}"]
    block_rows = 32 * groups
    if w.layout == "q256":
        defines.append(f"ROW_TILES={tiles}")
        block_rows = 16 * tiles * groups
    threads = (256 if few else 32) * groups
    return f"{'matmul' if few else 'prefill'}_{w.layout}", block_rows, threads, tuple(defines)


def _check_groups(m, tokens):
    if -(-m // tokens) > MAX_GRID_YZ:
        raise UsageError(f"matmul of {m} rows is too large for one launch")
