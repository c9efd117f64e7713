"""A directory of safetensors files, seen like the tensor directory of a GGUF file.

Owns the container (one file or shards). The safetensors library checks each header; this module
only maps the files, so that a projection stays where it is. Must not know what a tensor means.
Invariant: no tensor data is read on opening, and every view lies inside its file.

Source: the safetensors format, huggingface/safetensors README "Format".
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from cudflash.loader.ggml_types import VECTOR_TYPES, GGMLType, row_bytes

from cudflash.errors import FormatError, UnsupportedError

_TYPES = {"F32": GGMLType.F32, "F16": GGMLType.F16, "BF16": GGMLType.BF16}
AGAIN = "download the file again"


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of the directory."""

    name: str  # as stored
    shape: tuple[int, ...]  # row-major, (n_out, n_in)
    type: GGMLType | None  # None: a type no weight may have
    type_name: str  # as stored
    file: str  # path
    offset: int  # bytes from the start of the file
    n_bytes: int


class SafetensorsDir:
    """All safetensors files of a directory; made by ``open_safetensors_dir``.

    Attributes
    ----------
    path : str
        The directory.
    files : tuple of str
        Paths, sorted.
    tensors : Mapping of str to StoredTensor
    """

    def __init__(self, path: str, files: tuple[str, ...], tensors: dict[str, StoredTensor]):
        self.path = path
        self.files = files
        self.tensors: Mapping[str, StoredTensor] = MappingProxyType(tensors)
        self._maps = {file: np.frombuffer(_map(file), np.uint8) for file in files}

    def data(self, name: str) -> np.ndarray:
        """Return a tensor's bytes as a read-only view: (n_rows, row_bytes), uint8."""
        info = self.tensors[name]
        n_row = row_bytes(info.type, info.shape[-1] if info.shape else 1)
        raw = self._maps[info.file][info.offset : info.offset + info.n_bytes]
        return raw.reshape(-1, n_row)

    def array_f32(self, name: str) -> np.ndarray:
        """Return a tensor as float32, exactly converted: a read-only copy of its shape."""
        info = self.tensors[name]
        if info.type not in VECTOR_TYPES:
            raise UnsupportedError(
                f"{self.path}: tensor {name} has type {info.type_name}, expected F32, F16 or BF16; "
                "use another file of the draft"
            )
        raw = self.data(name).tobytes()
        if info.type is GGMLType.BF16:
            values = (np.frombuffer(raw, "<u2").astype(np.uint32) << 16).view(np.float32)
        else:
            kind = "<f4" if info.type is GGMLType.F32 else "<f2"
            values = np.frombuffer(raw, kind).astype(np.float32)
        values = values.reshape(info.shape)
        values.flags.writeable = False
        return values


def open_safetensors_dir(path: str | os.PathLike) -> SafetensorsDir:
    """Open every safetensors file of a directory.

    Parameters
    ----------
    path : str or path-like
        Directory.

    Returns
    -------
    SafetensorsDir

    Raises
    ------
    FormatError
        If there is no such file, one is damaged, a shard named by the index is missing, or two
        files hold the same tensor.
    """
    path = os.fspath(path)
    names = sorted(name for name in os.listdir(path) if name.endswith(".safetensors"))
    if not names:
        raise FormatError(
            f"{path}: holds no .safetensors file, expected the draft's weights; download them too"
        )
    _check_index(path, names)
    tensors: dict[str, StoredTensor] = {}
    files = tuple(os.path.join(path, name) for name in names)
    for file in files:
        if not os.path.isfile(file):  # a FIFO would never end
            raise FormatError(f"{file}: not a regular file, expected a safetensors file")
        for tensor in _read_header(file):
            if tensor.name in tensors:
                raise FormatError(
                    f"{path}: tensor {tensor.name} is in {tensors[tensor.name].file} and in {file},"
                    " expected it once; remove the file that does not belong to the draft"
                )
            tensors[tensor.name] = tensor
    return SafetensorsDir(path, files, tensors)


def _check_index(path: str, names: list[str]) -> None:
    index = os.path.join(path, "model.safetensors.index.json")
    if not os.path.exists(index):
        return
    weight_map = read_json(index).get("weight_map")
    shards = weight_map.values() if isinstance(weight_map, dict) else ()
    missing = sorted({str(shard) for shard in shards} - set(names))
    if missing:
        raise FormatError(
            f"{index}: names {missing[0]}, which is not in the directory ({len(missing)} files "
            "missing), expected all shards; download them too"
        )


def read_json(path: str) -> dict:
    """Read a JSON object.

    Raises
    ------
    FormatError
        If the file cannot be read or is not a JSON object.
    """
    if os.path.exists(path) and not os.path.isfile(path):  # a FIFO would never end
        raise FormatError(f"{path}: not a regular file, expected a JSON file")
    try:
        with open(path, "rb") as file:
            value = json.loads(file.read().decode("utf-8"))
    except OSError as err:
        raise FormatError(
            f"{path}: cannot be read ({err.strerror}), expected a JSON file; check the path"
        ) from None
    except (ValueError, RecursionError) as err:
        raise FormatError(f"{path}: not JSON ({err}), expected a JSON object; {AGAIN}") from None
    if not isinstance(value, dict):
        raise FormatError(
            f"{path}: holds a JSON {type(value).__name__}, expected an object; {AGAIN}"
        )
    return value


def _read_header(file: str) -> list[StoredTensor]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="np"):  # checks sizes, offsets and overlaps
            pass
        with open(file, "rb") as stream:
            n_header = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(n_header))
    except (SafetensorError, OSError) as err:
        raise FormatError(
            f"{file}: not a sound safetensors file ({err}), expected one; {AGAIN}"
        ) from None
    header.pop("__metadata__", None)
    return [
        StoredTensor(
            name=name,
            shape=tuple(entry["shape"]),
            type=_TYPES.get(entry["dtype"]),
            type_name=entry["dtype"],
            file=file,
            offset=8 + n_header + entry["data_offsets"][0],
            n_bytes=entry["data_offsets"][1] - entry["data_offsets"][0],
        )
        for name, entry in header.items()
    ]


def _map(file: str) -> mmap.mmap:
    with open(file, "rb") as stream:
        return mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
