"""Bit-exact ``std::mt19937`` and the uniform conversions of one named C++ library.

Owns the generator's words and how they become numbers in [0, 1). Must not know what is sampled.
Invariant: every number drawn is a function of (seed, count of 32-bit words drawn before it).
"""

import math
import os
from dataclasses import dataclass

import numpy as np

from cudflash.errors import UsageError

RANDOM_SEED = 0xFFFFFFFF  # llama.cpp's "choose a seed for me"

_N = 624
_M = 397
_MATRIX_A = np.uint32(0x9908B0DF)
_UPPER = np.uint32(0x80000000)
_LOWER = np.uint32(0x7FFFFFFF)
_BELOW_ONE_F64 = math.nextafter(1.0, 0.0)
_BELOW_ONE_F32 = np.nextafter(np.float32(1), np.float32(0))
_TWO_32 = 4294967296.0
_TWO_M64 = 2.0**-64


@dataclass(frozen=True)
class MtState:
    """A point of the stream: 624 key words (uint32, read-only) and how many are used up."""

    key: np.ndarray  # (624,) uint32, not writeable
    position: int  # 0..624 words of this key already drawn


class Mt19937:
    """``std::mt19937``: the same 32-bit words, floats and doubles as g++ 12 gives.

    The stream of ``Mt19937(seed)`` equals the output of this C++ program built with GCC 12 and
    its libstdc++::

        #include <random>
        std::mt19937 g(seed);
        g();                                                    // next_u32
        std::uniform_real_distribution<double>(0.0, 1.0)(g);    // uniform_double
        std::uniform_real_distribution<float>(0.0f, 1.0f)(g);   // uniform_float

    The first words of seed 42 are 1608637542, 3421126067, 4083286876, 787846414; the 10,000th
    word of seed 5489 is 4123659995, the value the C++ standard requires.

    **Library followed.** The standard fixes the words but not how words become reals. Here it is
    libstdc++ of GCC 12 (``generate_canonical``): a double takes two words, low word first,
    ``(low + high * 2**32) / 2**64`` in double arithmetic; a float takes one, ``word / 2**32`` in
    float arithmetic; a result that rounds up to 1 becomes the largest number below 1. libc++
    computes the same; libraries that implement C++ paper P0952, and MSVC, do not.

    Parameters
    ----------
    seed : int or None
        0 to 2**32 - 2. ``None``, -1 and 0xFFFFFFFF draw a seed from the operating system; the
        seed used is always in ``.seed``, so that any run can be repeated.

    Source
    ------
    Matsumoto and Nishimura, "Mersenne Twister" (1998), initialisation of 2002;
    ISO C++ [rand.predef]; conversions observed from libstdc++ 12 (``bits/random.tcc``).
    """

    __slots__ = ("_key", "_position", "_words", "seed")

    def __init__(self, seed=None):
        self.seed = resolve_seed(seed)
        self._key = _initial_key(self.seed)
        self._words = None
        self._position = _N

    def next_u32(self) -> int:
        """Return the next 32-bit word of the stream."""
        if self._position == _N:
            self._key = _twist(self._key)
            self._words = _temper(self._key).tolist()
            self._position = 0
        elif self._words is None:
            self._words = _temper(self._key).tolist()
        word = self._words[self._position]
        self._position += 1
        return word

    def uniform_double(self) -> float:
        """Return a double in [0, 1); takes two words, low word first."""
        low = self.next_u32()
        value = (low + self.next_u32() * _TWO_32) * _TWO_M64
        return value if value < 1.0 else _BELOW_ONE_F64

    def uniform_float(self) -> np.float32:
        """Return a float32 in [0, 1); takes one word."""
        value = np.float32(self.next_u32()) * np.float32(2.0**-32)
        return value if value < 1 else _BELOW_ONE_F32

    def state(self) -> MtState:
        """Return the present point of the stream; constant time, nothing is copied."""
        return MtState(self._key, self._position)

    def set_state(self, state: MtState) -> None:
        """Return to a point of the stream given by ``state()``.

        Raises
        ------
        UsageError
            When the state has not 624 words of 32 bits, an index outside 0..624, or only zeros.
        """
        key = np.asarray(state.key)
        if key.shape != (_N,):
            raise UsageError(
                f"generator state: found {key.size} words, expected {_N}; "
                "restore a state that Mt19937.state() returned"
            )
        if not 0 <= state.position <= _N:
            raise UsageError(
                f"generator state: found position {state.position}, expected 0 to {_N}; "
                "restore a state that Mt19937.state() returned"
            )
        if key.min() < 0 or key.max() > RANDOM_SEED or not key.any():
            raise UsageError(
                "generator state: words must be 32-bit and not all zero; "
                "restore a state that Mt19937.state() returned"
            )
        if key is not self._key:
            if key.dtype != np.uint32 or key.flags.writeable:
                key = key.astype(np.uint32)
                key.flags.writeable = False
            self._key = key
            self._words = None
        self._position = int(state.position)


def resolve_seed(seed) -> int:
    """Return the seed to use: ``seed`` itself, or one from the operating system for None, -1."""
    if seed is None or seed == -1 or seed == RANDOM_SEED:
        return int.from_bytes(os.urandom(4), "little") % RANDOM_SEED
    if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)):
        raise UsageError(f"seed: found {seed!r}, expected an integer from 0 to 4294967294 or None")
    if not 0 <= seed < RANDOM_SEED:
        raise UsageError(f"seed: found {seed}, expected an integer from 0 to 4294967294 or -1")
    return int(seed)


def _initial_key(seed: int) -> np.ndarray:
    words = [seed]
    for i in range(1, _N):
        previous = words[-1]
        words.append((1812433253 * (previous ^ (previous >> 30)) + i) & 0xFFFFFFFF)
    key = np.array(words, np.uint32)
    key.flags.writeable = False
    return key


def _twist(old: np.ndarray) -> np.ndarray:
    """Next key. Word i needs word i + 397 modulo 624, hence three slices, each reading the last."""
    new = np.empty(_N, np.uint32)
    mixed = (old[:-1] & _UPPER) | (old[1:] & _LOWER)
    turned = (mixed >> np.uint32(1)) ^ ((mixed & np.uint32(1)) * _MATRIX_A)
    split = _N - _M  # 227
    new[:split] = old[_M:] ^ turned[:split]
    new[split : 2 * split] = new[:split] ^ turned[split : 2 * split]
    new[2 * split : _N - 1] = new[split : _M - 1] ^ turned[2 * split :]
    last = (int(old[_N - 1]) & 0x80000000) | (int(new[0]) & 0x7FFFFFFF)
    new[_N - 1] = int(new[_M - 1]) ^ (last >> 1) ^ (0x9908B0DF if last & 1 else 0)
    new.flags.writeable = False
    return new


def _temper(key: np.ndarray) -> np.ndarray:
    y = key ^ (key >> np.uint32(11))
    y = y ^ ((y << np.uint32(7)) & np.uint32(0x9D2C5680))
    y = y ^ ((y << np.uint32(15)) & np.uint32(0xEFC60000))
    return y ^ (y >> np.uint32(18))
