"""Puts the object file of a kernel into executable memory, without LLVM.

Our kernels need one kind of relocation, the full address of something of their own or of a function
of the C library, and no writable data. For such files on x86-64 this module is the whole linker;
any other is left to LLVM's. Memory that kernels lie in is never given back: a worker may still wait
inside one of them when the process ends.

Source: System V ABI, chapter 4 (object files), and its AMD64 supplement, 4.4 (relocations).
"""

import ctypes
import mmap
import os
import platform
import struct
from functools import cache

# What compiled kernels may call; anything else would need a runtime that is not loaded.
ALLOWED_SYMBOLS = {"memset", "memcpy", "memmove", "usleep", "syscall", "fmaf", "rintf", "sqrtf"}

_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")  # name, type, flags, address, offset, size, link, info, ...
_SYMBOL = struct.Struct("<IBBHQQ")  # name, info, other, section, value, size
_RELOCATION = struct.Struct("<QQq")  # offset, symbol << 32 | type, addend
_IDENT = b"\x7fELF\x02\x01\x01"  # 64 bits, little-endian, version 1
_OBJECT, _X86_64 = 1, 62
_PROGBITS, _SYMTAB, _RELA, _NOBITS, _REL = 1, 2, 4, 8, 9
_WRITE, _ALLOC, _TLS = 1, 2, 0x400
_R_X86_64_64 = 1
_UNDEFINED = 0


class _Unsupported(Exception):
    """The file needs a linker that can do more."""


def place(code, name):
    """Entry point of the function ``name`` of an object file, None where LLVM has to link it.

    Parameters
    ----------
    code : bytes
        An ELF object file as LLVM writes it.
    name : str

    Returns
    -------
    int or None
    """
    try:
        image = _Image(code)
        entry = image.value_of(name)
        return None if entry is None else _map(image) + entry
    except (_Unsupported, struct.error, IndexError):
        return None


class _Image:
    """The sections of an object file at the places they get, and what is to be filled in.

    Attributes
    ----------
    content : bytearray
    inner : list of (int, int)
        Offset of an address, and offset of what it is the address of.
    outer : list of (int, str, int)
        Offset of an address, name of a C function, what is added to it.
    """

    def __init__(self, code):
        self._code = code
        ident, kind, machine, *_, n_sections, _ = header = _HEADER.unpack_from(code)
        if not ident.startswith(_IDENT) or (kind, machine) != (_OBJECT, _X86_64):
            raise _Unsupported
        first = header[6]
        table = code[first : first + n_sections * _SECTION.size]
        self._sections = list(_SECTION.iter_unpack(table))
        self.content, self._places = bytearray(), {}
        self._place_sections()
        self._read_symbols()
        self.inner, self.outer = [], []
        for section in self._sections:
            if section[1] == _REL:
                raise _Unsupported
            if section[1] == _RELA and section[7] in self._places:
                self._relocations(section)

    def _bytes(self, section):
        return self._code[section[4] : section[4] + section[5]]

    def _place_sections(self):
        for index, (_, kind, flags, _, _, size, _, _, align, _) in enumerate(self._sections):
            if not flags & _ALLOC or kind not in (_PROGBITS, _NOBITS) or not size:
                continue  # stack unwinding among them: kernels raise nothing
            if kind == _NOBITS or flags & (_WRITE | _TLS) or align > mmap.PAGESIZE:
                raise _Unsupported
            self.content += bytes(-len(self.content) % max(align, 1))
            self._places[index] = len(self.content)
            self.content += self._bytes(self._sections[index])

    def _read_symbols(self):
        table = next((s for s in self._sections if s[1] == _SYMTAB), None)
        if table is None:
            raise _Unsupported
        self._symbols = list(_SYMBOL.iter_unpack(self._bytes(table)))
        self._names = self._bytes(self._sections[table[6]])

    def _name(self, symbol):
        return self._names[symbol[0] : self._names.index(b"\0", symbol[0])].decode()

    def value_of(self, name):
        """Offset of a function, None if it is not there."""
        for symbol in self._symbols:
            if symbol[3] in self._places and self._name(symbol) == name:
                return self._places[symbol[3]] + symbol[4]
        return None

    def _relocations(self, section):
        start = self._places[section[7]]
        for offset, info, addend in _RELOCATION.iter_unpack(self._bytes(section)):
            symbol = self._symbols[info >> 32]
            if info & 0xFFFFFFFF != _R_X86_64_64:
                raise _Unsupported
            if symbol[3] in self._places:
                self.inner.append((start + offset, self._places[symbol[3]] + symbol[4] + addend))
            elif symbol[3] == _UNDEFINED and (name := self._name(symbol)) in ALLOWED_SYMBOLS:
                self.outer.append((start + offset, name, addend))
            else:
                raise _Unsupported


def _map(image):
    """Address of the image in memory, filled in, readable and executable but not writable."""
    libc = _libc()
    words = [(offset, _function(libc, name) + addend) for offset, name, addend in image.outer]
    size = len(image.content)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    base = libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
    if base in (None, ctypes.c_void_p(-1).value):
        raise _Unsupported
    words += [(offset, base + target) for offset, target in image.inner]
    for offset, value in words:
        struct.pack_into("<Q", image.content, offset, value)
    ctypes.memmove(base, bytes(image.content), size)
    if libc.mprotect(base, size, mmap.PROT_READ | mmap.PROT_EXEC) != 0:
        libc.munmap(base, size)
        raise _Unsupported
    return base


def _function(libc, name):
    try:
        return ctypes.cast(getattr(libc, name), ctypes.c_void_p).value
    except AttributeError:
        raise _Unsupported from None


@cache
def _libc():
    """The C library of the process."""
    if os.name != "posix" or platform.machine() != "x86_64":
        raise _Unsupported
    libc = ctypes.CDLL(None)
    pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    libc.mmap.argtypes = (pointer, size, number, number, number, ctypes.c_long)
    libc.mmap.restype = pointer
    libc.mprotect.argtypes, libc.munmap.argtypes = (pointer, size, number), (pointer, size)
    return libc
