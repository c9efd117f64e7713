"""Metadata values of a GGUF file: a bounds-checked cursor and lazily decoded string arrays.

Owns the encoding of scalars, strings and arrays. Must not know what any key means. Invariant: no
byte outside the file is read and nothing is allocated from a length or count before it has been
checked against the bytes that are left.

Source: GGUF layout, ggml ``ggml/include/gguf.h`` lines 42-66, llama.cpp 0c1e57098bba.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence

import numpy as np

from cudflash.errors import FormatError, UnsupportedError

# Value type tags of the container.
U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)

# tag -> (name in messages, struct format, NumPy dtype), all little-endian
SCALARS: dict[int, tuple[str, str, str]] = {
    U8: ("u8", "<B", "<u1"),
    I8: ("i8", "<b", "<i1"),
    U16: ("u16", "<H", "<u2"),
    I16: ("i16", "<h", "<i2"),
    U32: ("u32", "<I", "<u4"),
    I32: ("i32", "<i", "<i4"),
    F32: ("f32", "<f", "<f4"),
    BOOL: ("bool", "<B", "<u1"),
    U64: ("u64", "<Q", "<u8"),
    I64: ("i64", "<q", "<i8"),
    F64: ("f64", "<d", "<f8"),
}

MAX_NAME_BYTES = 65535  # longest key or tensor name; the GGUF text allows keys of 2^16 - 1 bytes
_WINDOW_BYTES = 1 << 20  # strings in so many bytes are looked for at once
_FEW_STRINGS = 256  # fewer than that, and the next ones are taken one by one
MAX_STRING_ITEMS = 1 << 24  # longest string array: 64 times the largest published vocabulary

_U64 = struct.Struct("<Q")
AGAIN = "the file is truncated or damaged, download or convert it again"


def shown(text: str) -> str:
    """Quote a name from a file for a message, cut to a readable length."""
    return repr(text if len(text) <= 80 else text[:77] + "...")


class StringArray(Sequence):
    """A string array that is decoded on first use, in one pass.

    A vocabulary has hundreds of thousands of entries and ``inspect`` needs only their number, so
    opening a file checks the bounds of every entry but makes no string.

    Parameters
    ----------
    path, key : str
        For messages only.
    buf : memory map
    start : int
        Byte offset of the first entry (its u64 length).
    ends : ndarray of int64
        Byte offset behind each entry, where the length of the next one lies; checked.
    """

    __slots__ = ("_buf", "_count", "_ends", "_items", "_key", "_path", "_start")

    def __init__(self, path: str, key: str, buf, start: int, ends: np.ndarray):
        self._path, self._key = path, key
        self._buf, self._start, self._ends, self._count = buf, start, ends, len(ends)
        self._items: list[str] | None = None

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index):
        return self._decoded()[index]

    def __iter__(self) -> Iterator[str]:
        return iter(self._decoded())

    def __eq__(self, other) -> bool:
        if isinstance(other, StringArray | list | tuple):
            return len(self) == len(other) and all(a == b for a, b in zip(self, other))
        return NotImplemented

    __hash__ = None

    def __repr__(self) -> str:
        return f"<StringArray {self._key} of {self._count} strings>"

    @property
    def is_decoded(self) -> bool:
        """Whether the strings have been made (what a test of laziness looks at)."""
        return self._items is not None

    def raw(self) -> list[bytes]:
        """Return the entries as bytes, undecoded, in file order."""
        buf, begin = self._buf, self._start + 8
        items = []
        for end in self._ends.tolist():
            items.append(buf[begin:end])
            begin = end + 8
        return items

    def _decoded(self) -> list[str]:
        if self._items is None:
            items = self.raw()
            try:
                self._items = [item.decode("utf-8") for item in items]
            except UnicodeDecodeError:
                for index, item in enumerate(items):
                    decode_text(self._path, item, f"entry {index} of {self._key}")
                raise
        return self._items


def decode_text(path: str, data: bytes, what: str) -> str:
    """Decode UTF-8 or raise FormatError naming the object and the offending byte."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as err:
        raise FormatError(
            f"{path}: {what} is not UTF-8 (byte 0x{data[err.start]:02x} at position {err.start} of "
            f"{len(data)}), expected text; {AGAIN}"
        ) from None


class Cursor:
    """Reads values in file order; every read is checked against the end of the file first.

    Parameters
    ----------
    path : str
        For messages only.
    buf : memory map of the whole file
    """

    def __init__(self, path: str, buf):
        self.path = path
        self.buf = buf
        self.size = len(buf)
        self.pos = 0

    @property
    def left(self) -> int:
        """Bytes from here to the end of the file."""
        return self.size - self.pos

    def need(self, n_bytes: int, what: str) -> int:
        """Claim the next ``n_bytes`` and return where they begin."""
        if n_bytes > self.left:
            raise FormatError(
                f"{self.path}: {what} needs {n_bytes} bytes at byte {self.pos}, but the file ends "
                f"at byte {self.size}; {AGAIN}"
            )
        begin = self.pos
        self.pos += n_bytes
        return begin

    def scalar(self, tag: int, what: str):
        """Read one number or bool."""
        _, fmt, _ = SCALARS[tag]
        value = struct.unpack_from(fmt, self.buf, self.need(struct.calcsize(fmt), what))[0]
        if tag == BOOL:
            if value > 1:
                raise FormatError(
                    f"{self.path}: {what} is a bool stored as {value}, expected 0 or 1; {AGAIN}"
                )
            return bool(value)
        return value

    def text(self, what: str, max_bytes: int | None = None) -> str:
        """Read one string."""
        n_bytes = self.scalar(U64, f"the length of {what}")
        if n_bytes > self.left:
            raise FormatError(
                f"{self.path}: {what} claims {n_bytes} bytes at byte {self.pos}, but the file ends "
                f"at byte {self.size}; {AGAIN}"
            )
        if max_bytes is not None and n_bytes > max_bytes:
            raise FormatError(
                f"{self.path}: {what} is {n_bytes} bytes long, expected at most {max_bytes}; "
                f"{AGAIN}"
            )
        begin = self.need(n_bytes, what)
        return decode_text(self.path, self.buf[begin : self.pos], what)

    def value(self, tag: int, key: str):
        """Read the value of a metadata key.

        Returns
        -------
        int, float, bool, str, StringArray, or a read-only 1-D ndarray for numeric and bool arrays
        """
        what = f"metadata key {shown(key)}"
        if tag == STRING:
            return self.text(what)
        if tag == ARRAY:
            return self._array(key, what)
        if tag not in SCALARS:
            raise FormatError(
                f"{self.path}: {what} has value type {tag}, expected 0 to 12; {AGAIN}"
            )
        return self.scalar(tag, what)

    def _array(self, key: str, what: str):
        tag = self.scalar(U32, f"the element type of {what}")
        count = self.scalar(U64, f"the length of {what}")
        if tag == ARRAY:
            raise UnsupportedError(
                f"{self.path}: {what} is an array of arrays, expected numbers, bools or strings; "
                "remove the key or convert the file again"
            )
        if tag == STRING:
            item_bytes = 8
        elif tag in SCALARS:
            item_bytes = struct.calcsize(SCALARS[tag][1])
        else:
            raise FormatError(
                f"{self.path}: {what} has array element type {tag}, expected 0 to 12; {AGAIN}"
            )
        if count * item_bytes > self.left:
            raise FormatError(
                f"{self.path}: {what} claims an array of {count} elements of at least {item_bytes} "
                f"bytes at byte {self.pos}, but the file ends at byte {self.size}; {AGAIN}"
            )
        if tag == STRING:
            return self._strings(key, what, count)
        begin = self.need(count * item_bytes, what)
        if not count:  # frombuffer refuses an empty read at the end of the map
            return np.empty(0, np.bool_ if tag == BOOL else SCALARS[tag][2])
        values = np.frombuffer(self.buf, dtype=SCALARS[tag][2], count=count, offset=begin)
        if tag == BOOL:
            if int(values.max()) > 1:
                raise FormatError(
                    f"{self.path}: {what} has a bool stored as {int(values.max())}, expected 0 or "
                    f"1; {AGAIN}"
                )
            values = values.view(np.bool_)
        return values

    def _strings(self, key: str, what: str, count: int) -> StringArray:
        if count > MAX_STRING_ITEMS:
            raise FormatError(
                f"{self.path}: {what} claims {count} strings, expected at most "
                f"{MAX_STRING_ITEMS}; {AGAIN}"
            )
        begin = self.pos
        try:
            ends = self._walk(begin, count)
        except (struct.error, OverflowError):
            ends = None
        if ends is None or (count and int(ends[-1]) > self.size):
            self._report_string(what, begin, count)
        self.pos = int(ends[-1]) if count else begin
        return StringArray(self.path, key, self.buf, begin, ends)

    def _walk(self, pos: int, count: int) -> np.ndarray:
        """Return the offset behind each of ``count`` strings that begin at ``pos``.

        Only the last one can be outside the map: a length outside it is not read.

        Raises
        ------
        struct.error, OverflowError
            If a string after the first begins outside the map.
        """
        unpack, found, left = _U64.unpack_from, [], count
        while left:
            some = self._short_strings(pos)[:left]
            if len(some) < _FEW_STRINGS:
                some = []
                for _ in range(min(left, 16 * _FEW_STRINGS)):
                    pos += 8 + unpack(self.buf, pos)[0]
                    some.append(pos)
                some = np.array(some, np.int64)
            pos = int(some[-1])
            found.append(some)
            left -= len(some)
        return np.concatenate(found) if found else np.empty(0, np.int64)

    def _short_strings(self, pos: int) -> np.ndarray:
        """Return the offset behind each string from ``pos`` on, as far as that is seen at once.

        A length below 256 is a byte followed by seven zeros, which text does not hold. Where every
        string ends at the next such place, those places are the lengths. The whole cost of opening
        a file with a large vocabulary is this walk; going from string to string takes three times
        as long.
        """
        window = np.frombuffer(self.buf, np.uint8)[pos : pos + _WINDOW_BYTES]
        if len(window) < 8:
            return np.empty(0, np.int64)
        words = np.ndarray((len(window) - 7,), "<u8", window, strides=(1,))  # one at every byte
        starts = np.flatnonzero(words < 256)
        ends = starts + 8 + window[starts]
        wrong = np.flatnonzero(ends[:-1] != starts[1:])
        n_sound = int(wrong[0]) + 1 if len(wrong) else len(starts)
        return ends[:n_sound] + pos if n_sound and starts[0] == 0 else ends[:0]

    def _report_string(self, what: str, pos: int, count: int) -> None:
        """Walk again with checks and raise for the first entry that leaves the file."""
        self.pos = pos
        for index in range(count):
            entry = f"string {index} of {count} of {what}"
            n_bytes = self.scalar(U64, f"the length of {entry}")
            if n_bytes > self.left:
                raise FormatError(
                    f"{self.path}: {entry} claims {n_bytes} bytes at byte {self.pos}, but the "
                    f"file ends at byte {self.size}; {AGAIN}"
                )
            self.pos += n_bytes
        raise FormatError(f"{self.path}: {what} does not fit the file; {AGAIN}")
