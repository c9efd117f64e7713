// Formats of 32 values with one scale: how a tile lies in device memory, and how a lane reads it.
//
// A tile is 32 rows x 32 values. Planes, in this order: codes (16 bytes a lane), fifth bits (4
// bytes a lane), scales (rows g, g + 8, g + 16, g + 24 side by side, then their minima). Lane
// l = 4 g + t reads what its A fragments of mma.m16n8k32 need and nothing else: rows 16 i + g
// (a[i][0], a[i][2]) and 16 i + g + 8 (a[i][1], a[i][3]), values 4 t .. 4 t + 3 and 16 + 4 t ..
// 16 + 4 t + 3.
//
// Each format: kRawBytes, kTileBytes, kHasMin, and kStartShift: the sum of products starts at
// (-8 * sum of x) << kStartShift, which takes the bias of the codes off; -1 where there is none.
#pragma once
#include "numerics.cuh"
#include "ptx.cuh"
#include "types.cuh"

// Word of the scale plane: two rows of a field, or of two fields where the tile has minima.
__device__ __forceinline__ u32 scale_word(const RawTile& raw, int w, int d_at) {
  int row = (w >> 1) + 16 * (w & 1);
  return raw.half(row, d_at) | raw.half(row + 8, d_at) << 16;
}
__device__ __forceinline__ u32 scale_min_word(const RawTile& raw, int w, int d_at, int m_at) {
  int row = (w >> 2) + 16 * (w & 1), at = w & 2 ? m_at : d_at;
  return raw.half(row, at) | raw.half(row + 8, at) << 16;
}

// Word of a plane of nibbles: low nibbles are values 4 t .., high nibbles values 16 + 4 t ...
__device__ __forceinline__ u32 nibble_word(const RawTile& raw, int w, int at) {
  return raw.word((w >> 4) + 8 * (w & 3), at + (w >> 2 & 3) * 4);
}

// Lane's word of fifth bits: bit 8 b + f belongs to byte b of fragment register f = 4 i + r.
__device__ __forceinline__ u32 fifth_word(const RawTile& raw, int lane, int at) {
  u32 out = 0;
  for (int f = 0; f < 8; f++) {
    u32 bits = raw.word((lane >> 2) + 8 * (f & 1) + 16 * (f >> 2), at);
    for (int b = 0; b < 4; b++) {
      out |= (bits >> ((lane & 3) * 4 + b + 16 * (f >> 1 & 1)) & 1) << (8 * b + f);
    }
  }
  return out;
}

// The same nibbles sorted for a table: bits 0 .. 15 hold values 4 t .., bits 16 .. 31 the others.
__device__ __forceinline__ u32 sorted_nibbles(u32 word) {
  u32 out = 0;
  for (int i = 0; i < 4; i++) {
    out |= (word >> (8 * i) & 15) << (4 * i) | (word >> (8 * i + 4) & 15) << (16 + 4 * i);
  }
  return out;
}

__device__ __forceinline__ void two_halves(u32 word, float& x, float& y) {
  x = half_to_float(static_cast<u16>(word & 0xffff));
  y = half_to_float(static_cast<u16>(word >> 16));
}

__device__ __forceinline__ void load_scales(const u8* plane, int lane, float (&d)[4]) {
  uint2 v = __ldg(reinterpret_cast<const uint2*>(plane) + (lane >> 2));
  two_halves(v.x, d[0], d[1]);
  two_halves(v.y, d[2], d[3]);
}
__device__ __forceinline__ void load_scales(const u8* plane, int lane, float (&d)[4],
                                            float (&m)[4]) {
  uint4 v = __ldg(reinterpret_cast<const uint4*>(plane) + (lane >> 2));
  two_halves(v.x, d[0], d[1]);
  two_halves(v.y, d[2], d[3]);
  two_halves(v.z, m[0], m[1]);
  two_halves(v.w, m[2], m[3]);
}

// A fragments from a plane of nibbles.
__device__ __forceinline__ void load_nibbles(const u8* plane, int lane, u32 (&a)[2][4]) {
  uint4 v = __ldg(reinterpret_cast<const uint4*>(plane) + lane);
  const u32 rows[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 4; i++) {
    a[i >> 1][i & 1] = rows[i] & 0x0f0f0f0fu;
    a[i >> 1][2 + (i & 1)] = rows[i] >> 4 & 0x0f0f0f0fu;
  }
}

__device__ __forceinline__ void add_fifth_bits(const u8* plane, int lane, u32 (&a)[2][4]) {
  u32 bits = __ldg(reinterpret_cast<const u32*>(plane) + lane);
#pragma unroll
  for (int f = 0; f < 8; f++) a[f >> 2][f & 3] |= (bits >> f & 0x01010101u) << 4;
}

struct Q4_0 {
  static const int kRawBytes = sizeof(block_q4_0), kTileBytes = 576, kStartShift = 0;
  static const bool kHasMin = false;
  static __device__ u32 tile_word(const RawTile& raw, int w) {
    if (w < 128) return nibble_word(raw, w, FIELD(block_q4_0, qs));
    return scale_word(raw, w - 128, 0);
  }
  static __device__ __forceinline__ void load(const u8* tile, int lane, u32 (&a)[2][4],
                                              float (&d)[4], float (&)[4]) {
    load_nibbles(tile, lane, a);
    load_scales(tile + 512, lane, d);
  }
};

struct Q4_1 {
  static const int kRawBytes = sizeof(block_q4_1), kTileBytes = 640, kStartShift = -1;
  static const bool kHasMin = true;
  static __device__ u32 tile_word(const RawTile& raw, int w) {
    if (w < 128) return nibble_word(raw, w, FIELD(block_q4_1, qs));
    return scale_min_word(raw, w - 128, 0, 2);
  }
  static __device__ __forceinline__ void load(const u8* tile, int lane, u32 (&a)[2][4],
                                              float (&d)[4], float (&m)[4]) {
    load_nibbles(tile, lane, a);
    load_scales(tile + 512, lane, d, m);
  }
};

struct Q5_0 {
  static const int kRawBytes = sizeof(block_q5_0), kTileBytes = 704, kStartShift = 1;
  static const bool kHasMin = false;
  static __device__ u32 tile_word(const RawTile& raw, int w) {
    if (w < 128) return nibble_word(raw, w, FIELD(block_q5_0, qs));
    if (w < 160) return fifth_word(raw, w - 128, FIELD(block_q5_0, qh));
    return scale_word(raw, w - 160, 0);
  }
  static __device__ __forceinline__ void load(const u8* tile, int lane, u32 (&a)[2][4],
                                              float (&d)[4], float (&)[4]) {
    load_nibbles(tile, lane, a);
    add_fifth_bits(tile + 512, lane, a);
    load_scales(tile + 640, lane, d);
  }
};

struct Q5_1 {
  static const int kRawBytes = sizeof(block_q5_1), kTileBytes = 768, kStartShift = -1;
  static const bool kHasMin = true;
  static __device__ u32 tile_word(const RawTile& raw, int w) {
    if (w < 128) return nibble_word(raw, w, FIELD(block_q5_1, qs));
    if (w < 160) return fifth_word(raw, w - 128, FIELD(block_q5_1, qh));
    return scale_min_word(raw, w - 160, 0, 2);
  }
  static __device__ __forceinline__ void load(const u8* tile, int lane, u32 (&a)[2][4],
                                              float (&d)[4], float (&m)[4]) {
    load_nibbles(tile, lane, a);
    add_fifth_bits(tile + 512, lane, a);
    load_scales(tile + 640, lane, d, m);
  }
};

struct Q8_0 {  // codes: two planes of 16 rows, the lane's 16 bytes are its fragment
  static const int kRawBytes = sizeof(block_q8_0), kTileBytes = 1088, kStartShift = -1;
  static const bool kHasMin = false;
  static __device__ u32 tile_word(const RawTile& raw, int w) {
    if (w >= 256) return scale_word(raw, w - 256, 0);
    int lane = w >> 2 & 31;
    return raw.word((lane >> 2) + 8 * (w & 1) + 16 * (w >> 7),
                    FIELD(block_q8_0, qs) + (lane & 3) * 4 + 16 * (w >> 1 & 1));
  }
  static __device__ __forceinline__ void load(const u8* tile, int lane, u32 (&a)[2][4],
                                              float (&d)[4], float (&)[4]) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      uint4 v = __ldg(reinterpret_cast<const uint4*>(tile) + 32 * i + lane);
      a[i][0] = v.x, a[i][1] = v.y, a[i][2] = v.z, a[i][3] = v.w;
    }
    load_scales(tile + 1024, lane, d);
  }
};

struct IQ4_NL {
  static const int kRawBytes = sizeof(block_iq4_nl), kTileBytes = 576, kStartShift = -1;
  static const bool kHasMin = false;
  static __device__ u32 tile_word(const RawTile& raw, int w) {
    if (w < 128) return sorted_nibbles(nibble_word(raw, w, FIELD(block_iq4_nl, qs)));
    return scale_word(raw, w - 128, 0);
  }
  static __device__ __forceinline__ void load(const u8* tile, int lane, u32 (&a)[2][4],
                                              float (&d)[4], float (&)[4]) {
    uint4 v = __ldg(reinterpret_cast<const uint4*>(tile) + lane);
    const u32 rows[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
      a[i >> 1][i & 1] = iq4_values(rows[i]);
      a[i >> 1][2 + (i & 1)] = iq4_values(rows[i] >> 16);
    }
    load_scales(tile + 512, lane, d);
  }
};
