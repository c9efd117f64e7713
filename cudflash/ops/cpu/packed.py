"""Packed weights, quantised activation rows, and their product: the op-level functions."""

import numpy as np

from cudflash.errors import UsageError
from cudflash.ops.cpu import jit
from cudflash.ops.cpu.formats import FORMATS, n_slices, packed_nbytes
from cudflash.ops.cpu.rows import extent
from cudflash.ops.cpu.runtime import capture, empty, span_of, submit

ACTIVATIONS = ("int8", "int8x2")
# Rows of the largest register tile; scratch is padded so that a tile may read past the last row.
ROW_TILE = 8
# A matrix of at most this size stays in the second cache: threads may take rows of the product
# and read all of it each, which saves the barriers around it and leaves the results where the next
# step wants them.
_SHARED_BY_ROWS_BYTES = 256 << 10


class PackedMatrix:
    """A weight matrix in the CPU's tile order; the same bytes as in the file."""

    __slots__ = ("type", "n", "k", "data", "format", "span")

    def __init__(self, type_name, n, k, data):
        self.type, self.n, self.k, self.data = type_name, n, k, data
        self.format = FORMATS[type_name]
        self.span = span_of(data)

    @property
    def layout(self):
        """``f32``, ``q32`` or ``q256``: the form of activations this matrix multiplies."""
        return self.format.layout

    @property
    def nbytes(self):
        """Bytes held."""
        return self.data.nbytes


def _type_name(type_):
    name = getattr(type_, "name", type_)
    if name not in FORMATS:
        raise UsageError(
            f"weight type {name} has no matmul; supported are {', '.join(FORMATS)}")
    return name


def pack(raw, type_, k):
    """Re-tile raw rows for the matmul kernels.

    Parameters
    ----------
    raw : ndarray of shape (n, row_bytes), uint8
        Rows as they lie in the file.
    type_ : GGMLType or str
    k : int
        Elements in a row.

    Returns
    -------
    PackedMatrix
    """
    name = _type_name(type_)
    fmt = FORMATS[name]
    n = len(raw)
    if k % fmt.block or raw.shape[1] != k // fmt.block * fmt.block_bytes:
        raise UsageError(
            f"raw rows have {raw.shape[1]} bytes, but {k} elements of {name} need "
            f"{k / fmt.block * fmt.block_bytes:g}")
    data = empty(packed_nbytes(name, n, k), np.uint8)
    raw = np.ascontiguousarray(raw)
    submit(_pack_kernel(name), [raw, data, n, raw.shape[1], k // fmt.block],
           reads=[raw], writes=[data])
    return PackedMatrix(name, n, k, data)


def pack_all(items):
    """:func:`pack` for several matrices, in one start of the threads.

    Parameters
    ----------
    items : iterable of (raw, type_, k)

    Returns
    -------
    list of PackedMatrix
    """
    with capture() as graph:
        packed = [pack(*item) for item in items]
    graph.launch()
    return packed


def _pack_kernel(name):
    def build():
        from cudflash.ops.cpu.pack_kernel import build as build_pack

        return build_pack(name)

    return jit.register(f"pack_{name.lower()}", build)


class QuantizedRows:
    """Scratch for activation rows in int8, in the form one weight layout needs.

    Attributes
    ----------
    q : ndarray of shape (planes, rows, k), int8
        Plane 0 alone (``int8``), or low and high terms, x = 256 * high + low (``int8x2``).
    d : ndarray of shape (rows, k / unit), float32
        Scale of each 32 (q32) or 256 (q256) elements.
    a, b, c : ndarray
        q32: -8 * sum(x) as int32 and d * sum(x) as float32 per 32 elements. q256: exponent of
        every 32 elements as int32, sums of every 16 and every 32 as int16, shifted by it.
    """

    def __init__(self, max_rows, k, layout, activations):
        if layout not in ("q32", "q256"):
            raise UsageError(f"activation layout is {layout!r}, expected q32 or q256")
        if activations not in ACTIVATIONS:
            raise UsageError(
                f"activations is {activations!r}, expected one of {', '.join(ACTIVATIONS)}")
        unit = 32 if layout == "q32" else 256
        if k % unit:
            raise UsageError(f"rows of {k} elements cannot be quantised by {unit}")
        self.k, self.layout, self.activations = k, layout, activations
        self.planes = 1 if activations == "int8" else 2
        self.max_rows = max_rows
        rows = -(-max_rows // ROW_TILE) * ROW_TILE
        self.q = empty((self.planes, rows, k), np.int8)
        self.d = empty((rows, k // unit), np.float32)
        if layout == "q32":
            self.a = empty((rows, k // 32), np.int32)
            self.b = empty((1, rows, k // 32), np.float32)
            self.c = empty((1, rows, 1), np.int16)
        else:
            self.a = empty((rows, k // 32), np.int32)
            self.b = empty((self.planes, rows, k // 16), np.int16)
            self.c = empty((self.planes, rows, k // 32), np.int16)
        for array in self.arrays:
            array.fill(0)
        self.m = max_rows
        self._spans = {}  # by rows; addresses take most of the time of recording a product
        q, d, a, b, c = ((span_of(array)[0], array.strides[-2], array.strides[0])
                         for array in self.arrays)
        self.inputs = (*q, *d[:2], *a[:2], *b, *c)  # as the kernel of a product wants them

    @property
    def arrays(self):
        """All buffers."""
        return self.q, self.d, self.a, self.b, self.c

    @property
    def spans(self):
        """Spans of the parts of the buffers that ``m`` rows use."""
        found = self._spans.get(self.m)
        if found is None:
            parts = [self.d[:self.m], self.a[:self.m]]
            for array in (self.q, self.b, self.c):
                parts += [plane[:self.m] for plane in array]
            found = self._spans[self.m] = [span_of(part) for part in parts]
        return found

    @property
    def nbytes(self):
        """Bytes held."""
        return sum(array.nbytes for array in self.arrays)

    def rows(self, m):
        """The same scratch, taken as ``m`` rows."""
        if not 1 <= m <= self.max_rows:
            raise UsageError(f"scratch of {self.max_rows} rows cannot hold {m}")
        view = object.__new__(QuantizedRows)
        view.__dict__.update(self.__dict__, m=m)
        return view


def quantized_rows(max_rows, k, layout, activations):
    """Make :class:`QuantizedRows` scratch."""
    return QuantizedRows(max_rows, k, layout, activations)


def quantize_rows(xq, x):
    """Quantise float rows; see docs/NUMERICS.md, "Activations".

    Parameters
    ----------
    xq : QuantizedRows
        Overwritten.
    x : ndarray of shape (xq.m, k), float32
    """
    if x.shape != (xq.m, xq.k):
        raise UsageError(f"rows of shape {x.shape} do not fit scratch of ({xq.m}, {xq.k})")

    def build():
        from cudflash.ops.cpu.quantize_kernel import build as build_quantize

        return build_quantize(xq.layout, xq.planes)

    kernel = jit.register(f"quantize_{xq.layout}_{xq.activations}", build)
    spans = xq.spans
    submit(kernel, [x, x.strides[0], xq.m, xq.k, *xq.inputs], reads=[x], writes=spans, keep=(xq,),
           rows=xq.m, by_rows=[x, *spans])


def matmul(out, x, w):
    """``out[r] = W x[r]`` for every row, the reduction in the order of docs/NUMERICS.md.

    Parameters
    ----------
    out : ndarray of shape (M, N), float32
    x : QuantizedRows, or ndarray of shape (M, K), float32, when ``w.layout`` is ``"f32"``
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
    fmt, tile = w.format, row_tile(w.layout, m, x.planes if quantized else 1)
    units = k // fmt.block
    slices = min(n_slices(k), units)  # an empty slice adds nothing, to no bit
    values = [out, out.strides[0], m, n, w.span[0], units * fmt.tile_block_bytes, units, slices]
    inputs = x.spans if quantized else [extent(x)]
    values += x.inputs if quantized else [x, x.strides[0]] + [0] * 11
    planes = x.planes if quantized else 1
    shares = m // tile if m % tile == 0 and w.data.nbytes <= _SHARED_BY_ROWS_BYTES else 0
    values.append(shares)
    # every second row takes about as long as the bytes of the matrix
    touched = w.data.nbytes * ((m + 2) // 2) + out.nbytes
    submit(matmul_kernel(w.type, tile, planes), values, reads=[*inputs, w.span],
           writes=[extent(out)], keep=(x, w), touched=touched, rows=shares, by_rows=[*inputs, out])


def row_tile(layout, m, planes):
    """Activation rows of a register tile for a call of ``m`` rows; never changes a bit.

    Eight rows share the unpacking where the last tile is more than half full. Formats of 256
    elements have registers for that under AVX-512 with one term alone, and take just eight rows in
    two tiles of four: so two threads may share them out.
    """
    if m == 1:
        return 1
    full = m % 8 > 4 or m % 8 == 0 or m >= 64
    wide = layout == "q256" and planes == 1 and m > 8 and jit.isa() == "avx512vnni"
    return 8 if full and (wide or layout == "q32") else 4


def matmul_kernel(type_name, rows, planes):
    """The kernel of one format, register tile and precision, on the instruction set in use."""
    path = jit.isa()

    def build():
        from cudflash.ops.cpu.matmul_kernel import build as build_matmul

        return build_matmul(type_name, rows, planes, path)

    return jit.register(f"matmul_{type_name.lower()}_r{rows}p{planes}_{path}", build)


