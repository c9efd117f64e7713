"""Read a GGUF file with the `gguf` package and nothing of ours.

Owns: metadata by key, tensors expanded to floats by name, single rows of big tables. A fault of
our loader or of our dequantisers cannot appear here, because neither is imported.
"""

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader
from gguf.quants import dequantize

_REQUIRED = object()
_ROWS_AT_ONCE = 8192  # of a vocabulary table: 8192 * 640 * 8 B = 42 MB in float64


class GGUFTensors:
    """One open file.

    Parameters
    ----------
    path : str or Path
    dtype : numpy float type
        Type every weight is returned in. Expansion itself is in float32, as in ggml; float64
        holds each float32 exactly.
    """

    def __init__(self, path, dtype=np.float64):
        self.path = str(path)
        self.dtype = np.dtype(dtype)
        self._reader = GGUFReader(self.path)
        self._tensors = {t.name: t for t in self._reader.tensors}
        self.arch = self.key("general.architecture")

    def key(self, name, default=_REQUIRED):
        """Value of a metadata key; `KeyError` when it is absent and has no default."""
        field = self._reader.fields.get(name)
        if field is not None:
            return field.contents()
        if default is _REQUIRED:
            raise KeyError(f"{self.path} has no metadata key {name}")
        return default

    def arch_key(self, name, default=_REQUIRED):
        """Value of ``<architecture>.<name>``."""
        return self.key(f"{self.arch}.{name}", default)

    def __contains__(self, name):
        return name in self._tensors

    def type_name(self, name):
        """ggml type of a tensor, e.g. ``"Q4_K"``."""
        return self._tensors[name].tensor_type.name

    def shape(self, name):
        """Shape in row-major order: (n_out, n_in) for a matrix."""
        return tuple(int(n) for n in reversed(self._tensors[name].shape))

    def array(self, name):
        """Return the whole tensor, expanded: (n_out, n_in), or (n,) for a vector."""
        return self._expand(self._tensors[name], slice(None)).reshape(self.shape(name))

    def rows(self, name, ids):
        """Return rows `ids` (M,) of a matrix, expanded: (M, n_in)."""
        return self._expand(self._tensors[name], np.asarray(ids))

    def row_blocks(self, name):
        """Yield (first_row, rows (<= 8192, n_in)) so that a large vocabulary never expands whole."""
        n_rows = self.shape(name)[0]
        for first in range(0, n_rows, _ROWS_AT_ONCE):
            yield first, self.rows(name, np.arange(first, min(first + _ROWS_AT_ONCE, n_rows)))

    def _expand(self, tensor, rows):
        data = tensor.data[rows]
        if tensor.tensor_type == GGMLQuantizationType.F32:
            return data.astype(self.dtype)
        return dequantize(data, tensor.tensor_type).astype(self.dtype)
