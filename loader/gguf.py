"""Open a GGUF file: header, metadata, tensor directory, and views on the packed data.

Owns the container format (versions 2 and 3, little-endian) and typed access to metadata. Must not
know what a key or a tensor means. Invariant: when ``open_gguf`` returns, every tensor of a known
type lies inside the file, is aligned, and overlaps no other; no tensor data has been read.

Source: llama.cpp 0c1e57098bba, ``ggml/include/gguf.h`` and ``ggml/src/gguf.cpp``.
"""

from __future__ import annotations

import itertools
import math
import mmap
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from cudflash.loader.ggml_types import VECTOR_TYPES, GGMLType, known_type, row_bytes, type_name
from cudflash.loader.gguf_values import (
    AGAIN,
    MAX_NAME_BYTES,
    U32,
    U64,
    Cursor,
    StringArray,
    shown,
)

from cudflash.errors import FormatError, UnsupportedError

MIN_KEY_BYTES = 13  # empty key (8), type (4), one byte of value
MIN_TENSOR_BYTES = 32  # empty name (8), n_dims (4), one dim (8), type (4), offset (8)
MAX_DIMS = 4  # ggml's own limit
MAX_ELEMENTS = 1 << 63
DEFAULT_ALIGNMENT = 32

# What other files people pass by mistake begin with.
_FOREIGN = (
    (b"FUGG", "a big-endian GGUF file"),
    (b"lmgg", "a GGML file older than GGUF"),
    (b"fmgg", "a GGMF file older than GGUF"),
    (b"tjgg", "a GGJT file older than GGUF"),
    (b"PK\x03\x04", "a zip archive (PyTorch checkpoint?)"),
    (b"BZh", "a bzip2 archive"),
    (b"\xfd7zXZ", "an xz archive"),
    (b"\x1f\x8b", "a gzip archive"),
    (b"version https://git-lfs", "a Git LFS pointer, not the file itself"),
    (b"<", "a web page"),
)


@dataclass(frozen=True)
class TensorInfo:
    """One entry of the tensor directory."""

    name: str
    shape: tuple[int, ...]  # row-major, (n_out, n_in): ggml's ne reversed
    type_id: int  # as stored
    type: GGMLType | None  # None: an id this version does not know
    offset: int  # byte offset from the start of the file
    n_bytes: int | None  # None: unknown type

    @property
    def type_name(self) -> str:
        """Type for people, ``type 99`` when unknown."""
        return type_name(self.type_id)

    @property
    def n_elements(self) -> int:
        """Number of values."""
        return math.prod(self.shape)


_KINDS = {
    int: "an integer",
    float: "a floating-point number",
    str: "a string",
    bool: "a bool",
    StringArray: "an array of strings",
    np.ndarray: "an array of numbers",
}


class GGUFFile:
    """An opened GGUF file; made by ``open_gguf``.

    Attributes
    ----------
    path : str
    version : int
        2 or 3.
    alignment : int
        Bytes; ``general.alignment`` or 32.
    size_bytes : int
        Size of the file.
    metadata : Mapping of str to value
        Scalars are Python numbers, bools and strings; string arrays are ``StringArray`` (a
        sequence decoded on first use); numeric and bool arrays are read-only 1-D ndarrays.
    tensors : Mapping of str to TensorInfo
        In the file's order.
    """

    def __init__(self, path, version, alignment, metadata, tensors, buf):
        self.path: str = path
        self.version: int = version
        self.alignment: int = alignment
        self.size_bytes: int = len(buf)
        self.metadata: Mapping[str, object] = MappingProxyType(metadata)
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType(tensors)
        self._bytes = np.frombuffer(buf, np.uint8)

    def __repr__(self) -> str:
        return f"<GGUFFile {self.path}: {len(self.metadata)} keys, {len(self.tensors)} tensors>"

    def get(self, key: str, default=None, type: type | None = None):
        """Return a metadata value, or ``default`` when the key is absent.

        Parameters
        ----------
        key : str
        default : object
            Returned when the key is absent; not type-checked.
        type : {int, float, str, bool, StringArray, numpy.ndarray}, optional
            Required Python type of the value. ``int`` does not accept a bool, nor ``float`` an
            integer: a converter that stores the wrong type may have stored the wrong thing.

        Raises
        ------
        FormatError
            If the key is present with another type.
        """
        if key not in self.metadata:
            return default
        value = self.metadata[key]
        if type is not None and not _is_a(value, type):
            raise FormatError(
                f"{self.path}: metadata key {key} is {_kind_of(value)}, expected {_KINDS[type]}; "
                "convert the model again"
            )
        return value

    def require(self, key: str, type: type):
        """Return a metadata value of the given type; see ``get`` for the types.

        Raises
        ------
        FormatError
            If the key is absent or has another type.
        """
        if key not in self.metadata:
            raise FormatError(
                f"{self.path}: metadata key {key} is missing, expected {_KINDS[type]}; "
                "convert the model again"
            )
        return self.get(key, type=type)

    def tensor(self, name: str) -> TensorInfo:
        """Return the directory entry of a tensor.

        Raises
        ------
        FormatError
            If there is no such tensor.
        """
        if name not in self.tensors:
            raise FormatError(
                f"{self.path}: tensor {name} is missing among {len(self.tensors)} tensors; "
                "convert the model again"
            )
        return self.tensors[name]

    def data(self, name: str) -> np.ndarray:
        """Return a tensor's packed bytes as a read-only view on the memory map.

        Returns
        -------
        ndarray of shape (n_rows, row_bytes), uint8
            All leading dimensions are folded into rows; a 1-D tensor is one row.

        Raises
        ------
        FormatError, UnsupportedError
            If the tensor is absent, or has a type of unknown size.
        """
        info = self.tensor(name)
        if info.type is None:
            raise UnsupportedError(
                f"{self.path}: tensor {name} has {info.type_name}, which this version does not "
                "know; use a file with another quantisation"
            )
        n_row = row_bytes(info.type, info.shape[-1])
        return self._bytes[info.offset : info.offset + info.n_bytes].reshape(-1, n_row)

    def array_f32(self, name: str) -> np.ndarray:
        """Return an F32, F16 or BF16 tensor as float32: norms, biases, RoPE factors.

        Returns
        -------
        ndarray of the tensor's shape, float32, contiguous, read-only
            A copy; the conversion is exact.

        Raises
        ------
        FormatError, UnsupportedError
            If the tensor is absent, or has another type.
        """
        info = self.tensor(name)
        if info.type not in VECTOR_TYPES:
            raise UnsupportedError(
                f"{self.path}: tensor {name} has type {info.type_name}, expected F32, F16 or BF16; "
                "use a file whose norms and biases are not quantised"
            )
        raw = self.data(name).reshape(-1)
        if info.type is GGMLType.F32:
            values = raw.view("<f4").astype(np.float32)
        elif info.type is GGMLType.F16:
            values = raw.view("<f2").astype(np.float32)
        else:
            values = (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)
        values = values.reshape(info.shape)
        values.flags.writeable = False
        return values


def open_gguf(path: str | os.PathLike) -> GGUFFile:
    """Open a GGUF file, check its whole directory, and map its data without reading it.

    Parameters
    ----------
    path : str or path-like

    Returns
    -------
    GGUFFile

    Raises
    ------
    FormatError
        If the file cannot be opened, is truncated or is damaged; the message names the object,
        the numbers and the path.
    UnsupportedError
        If the file is sound but big-endian, version 1, newer than version 3, or one part of a
        split model.
    """
    path = os.fspath(path)
    buf = _map_file(path)
    cursor = Cursor(path, buf)
    version = _read_magic(cursor)
    n_tensors = cursor.scalar(U64, "the tensor count")
    n_keys = cursor.scalar(U64, "the metadata count")
    _check_counts(cursor, n_tensors, n_keys)
    metadata = _read_metadata(cursor, n_keys)
    alignment = _read_alignment(path, metadata)
    _refuse_split(path, metadata)
    entries = _read_directory(cursor, n_tensors)
    data_start = -(-cursor.pos // alignment) * alignment
    tensors = _place_tensors(path, entries, data_start, alignment, cursor.size)
    return GGUFFile(path, version, alignment, metadata, tensors, buf)


def _map_file(path: str) -> mmap.mmap:
    if not path:
        raise FormatError("the name of the file is empty, expected a GGUF file; check the path")
    try:
        with open(path, "rb", opener=_at_once) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise FormatError(f"{path}: not a regular file, expected a GGUF file")
            if status.st_size == 0:
                raise FormatError(f"{path}: the file is empty, expected a GGUF file; {AGAIN}")
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as err:  # ValueError: a NUL in the path, a file emptied meanwhile
        reason = getattr(err, "strerror", None) or str(err)
        raise FormatError(
            f"{path}: cannot be opened ({reason}), expected a readable GGUF file; check the path"
        ) from None


def _at_once(path, flags: int) -> int:
    """Open without waiting: a FIFO would otherwise last until somebody writes into it."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def _read_magic(cursor: Cursor) -> int:
    head = bytes(cursor.buf[:32])
    if head[:4] != b"GGUF":
        for magic, what in _FOREIGN:
            if head.startswith(magic):
                break
        else:
            what = f"a file beginning with {head[:4]!r}"
            if head[8:10] == b'{"' and int.from_bytes(head[:8], "little") < cursor.size:
                what = "a safetensors file"
        kind = UnsupportedError if head[:4] == b"FUGG" else FormatError
        raise kind(
            f"{cursor.path}: not a GGUF file but {what}, expected the bytes 'GGUF' at the start; "
            "pass a little-endian .gguf file"
        )
    cursor.need(4, "the magic")
    version = cursor.scalar(U32, "the version")
    if version in (2, 3):
        return version
    if version and version & 0xFFFF == 0:
        raise UnsupportedError(
            f"{cursor.path}: a big-endian GGUF file (version bytes {version:#010x}), expected "
            "little-endian; convert the model again on a little-endian machine"
        )
    if version == 1:
        raise UnsupportedError(
            f"{cursor.path}: GGUF version 1 (32-bit counts), expected version 2 or 3; convert the "
            "model again with a current converter"
        )
    raise UnsupportedError(
        f"{cursor.path}: GGUF version {version}, expected version 2 or 3; use a newer cudflash or "
        "download the file again if it is damaged"
    )


def _check_counts(cursor: Cursor, n_tensors: int, n_keys: int) -> None:
    for count, least, what in (
        (n_keys, MIN_KEY_BYTES, "metadata keys"),
        (n_tensors, MIN_TENSOR_BYTES, "tensors"),
    ):
        if count * least > cursor.left:
            raise FormatError(
                f"{cursor.path}: the header claims {count} {what} of at least {least} bytes each, "
                f"but only {cursor.left} bytes follow it; {AGAIN}"
            )


def _read_metadata(cursor: Cursor, n_keys: int) -> dict[str, object]:
    metadata: dict[str, object] = {}
    for index in range(n_keys):
        key = cursor.text(f"the name of metadata key {index}", MAX_NAME_BYTES)
        if not key:
            raise FormatError(
                f"{cursor.path}: metadata key {index} of {n_keys} has an empty name; {AGAIN}"
            )
        if key in metadata:
            raise FormatError(
                f"{cursor.path}: metadata key {shown(key)} appears twice, expected once; convert "
                "the model again"
            )
        tag = cursor.scalar(U32, f"the value type of metadata key {shown(key)}")
        metadata[key] = cursor.value(tag, key)
    return metadata


def _read_alignment(path: str, metadata: dict[str, object]) -> int:
    value = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if not _is_a(value, int) or value <= 0 or value & (value - 1):
        shown_value = value if isinstance(value, int | float) else _kind_of(value)
        raise FormatError(
            f"{path}: general.alignment is {shown_value}, expected an integer power of two; "
            "convert the model again"
        )
    return value


def _refuse_split(path: str, metadata: dict[str, object]) -> None:
    count = metadata.get("split.count", 0)
    if not _is_a(count, int):
        raise FormatError(
            f"{path}: metadata key split.count is {_kind_of(count)}, expected an integer; "
            "convert the model again"
        )
    if count > 1:
        number = metadata.get("split.no", "?")
        number = number + 1 if _is_a(number, int) else number
        raise UnsupportedError(
            f"{path}: part {number} of a model split into {count} files, expected one file; merge "
            "the parts first (llama-gguf-split --merge FIRST_PART OUTPUT)"
        )


def _read_directory(cursor: Cursor, n_tensors: int) -> list[tuple[str, tuple[int, ...], int, int]]:
    """Read (name, ne, type id, relative offset) of every tensor."""
    entries = []
    names = set()
    for index in range(n_tensors):
        name = cursor.text(f"the name of tensor {index}", MAX_NAME_BYTES)
        what = f"tensor {shown(name)}"
        if not name:
            raise FormatError(
                f"{cursor.path}: tensor {index} of {n_tensors} has an empty name; {AGAIN}"
            )
        if name in names:
            raise FormatError(
                f"{cursor.path}: {what} appears twice, expected once; convert the model again"
            )
        names.add(name)
        n_dims = cursor.scalar(U32, f"the number of dimensions of {what}")
        if not 1 <= n_dims <= MAX_DIMS:
            raise FormatError(
                f"{cursor.path}: {what} has {n_dims} dimensions, expected 1 to {MAX_DIMS}; {AGAIN}"
            )
        ne = tuple(cursor.scalar(U64, f"dimension {i} of {what}") for i in range(n_dims))
        type_id = cursor.scalar(U32, f"the type of {what}")
        offset = cursor.scalar(U64, f"the offset of {what}")
        entries.append((name, ne, type_id, offset))
    return entries


def _tensor_bytes(path: str, name: str, ne: tuple[int, ...], type_id: int) -> int | None:
    """Bytes of a tensor from type and shape; None for a type that is not in the table."""
    what = f"{path}: tensor {shown(name)} of shape {list(ne)} (ggml order)"
    if 0 in ne:
        raise FormatError(f"{what} has a dimension of 0, expected at least 1; {AGAIN}")
    if math.prod(ne) >= MAX_ELEMENTS:
        raise FormatError(f"{what} has {math.prod(ne)} elements, expected fewer than 2^63; {AGAIN}")
    kind = known_type(type_id)
    if kind is None:
        return None
    if ne[0] % kind.block_size:
        raise FormatError(
            f"{what} has rows of {ne[0]} values, expected a multiple of the "
            f"{kind.block_size}-value block of {kind.name}; {AGAIN}"
        )
    return row_bytes(kind, ne[0]) * math.prod(ne[1:])


def _place_tensors(path, entries, data_start, alignment, size) -> dict[str, TensorInfo]:
    """Check every tensor's place in the file and build the directory."""
    tensors = {}
    for name, ne, type_id, offset in entries:
        n_bytes = _tensor_bytes(path, name, ne, type_id)
        what = f"{path}: tensor {shown(name)}"
        if offset % alignment:
            raise FormatError(
                f"{what} begins at offset {offset}, expected a multiple of the alignment "
                f"{alignment}; {AGAIN}"
            )
        begin = data_start + offset
        # an unknown type still has to begin inside the file: it holds at least one byte
        end = begin + (1 if n_bytes is None else n_bytes)
        if end > size:
            held = "bytes of unknown number" if n_bytes is None else f"{n_bytes} bytes"
            raise FormatError(
                f"{what} has offset {offset} and {held}, so it ends at byte {end}, but the file "
                f"ends at byte {size}; {AGAIN}"
            )
        tensors[name] = TensorInfo(name, ne[::-1], type_id, known_type(type_id), begin, n_bytes)
    _refuse_overlap(path, tensors)
    return tensors


def _refuse_overlap(path: str, tensors: dict[str, TensorInfo]) -> None:
    ordered = sorted(tensors.values(), key=lambda t: t.offset)
    for before, after in itertools.pairwise(ordered):
        end = before.offset + (1 if before.n_bytes is None else before.n_bytes)
        if after.offset < end:
            raise FormatError(
                f"{path}: tensor {shown(after.name)} begins at byte {after.offset} inside tensor "
                f"{shown(before.name)}, which ends at byte {end}, expected no overlap; {AGAIN}"
            )


def _is_a(value, kind: type) -> bool:
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, kind)


def _kind_of(value) -> str:
    for kind, text in _KINDS.items():
        if _is_a(value, kind):
            return text
    return type(value).__name__
