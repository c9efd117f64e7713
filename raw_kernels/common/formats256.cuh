// Formats of 256 values with integer sub-scales: how a tile lies in device memory, and how a lane
// reads it.
//
// A tile is 16 rows x 256 values. A plane holds 32 bytes of every row, 16 bytes a lane: lane
// l = 4 g + t has rows g and g + 8, bytes 4 t .. 4 t + 3 and 16 + 4 t .. 16 + 4 t + 3 (the order
// g, g + 8, g, g + 8), which are the registers of an A fragment of mma.m16n8k32. Then come the
// headers, row by row. Planes in this order: codes, high bits, headers.
//
// Each format: kRawBytes, kTileBytes; kSub, the values that share an integer scale; kBias, taken
// off the codes through the sums of x; kHasMin. A loaded format gives `codes` (fragment of values
// 32 j .. 32 j + 31), `factors` (scales as signed bytes and minima, of row g or g + 8), d and dmin.
#pragma once
#include "formats32.cuh"

// Word `w` of the planes that begin at byte `at` of the raw block.
__device__ __forceinline__ u32 plane_word(const RawTile& raw, int w, int at) {
  int lane = w >> 2 & 31;
  return raw.word((lane >> 2) + 8 * (w & 1),
                  at + 32 * (w >> 7) + (lane & 3) * 4 + 16 * (w >> 1 & 1));
}

template <int N>
__device__ __forceinline__ void load_planes(const u8* tile, int lane, u32 (&planes)[N][4]) {
#pragma unroll
  for (int p = 0; p < N; p++) {
    uint4 v = __ldg(reinterpret_cast<const uint4*>(tile) + 32 * p + lane);
    planes[p][0] = v.x, planes[p][1] = v.y, planes[p][2] = v.z, planes[p][3] = v.w;
  }
}

// 16-byte headers of the lane's two rows.
__device__ __forceinline__ void load_heads(const u8* heads, int lane, u32 (&head)[2][4]) {
#pragma unroll
  for (int i = 0; i < 2; i++) {
    uint4 v = __ldg(reinterpret_cast<const uint4*>(heads) + (lane >> 2) + 8 * i);
    head[i][0] = v.x, head[i][1] = v.y, head[i][2] = v.z, head[i][3] = v.w;
  }
}

// Bytes minus 32 in each byte of a word of values 0 .. 63, as signed bytes.
__device__ __forceinline__ u32 minus_32(u32 word) {
  return ((word | 0x80808080u) - 0x20202020u) ^ 0x80808080u;
}

__device__ __forceinline__ float low_half(u32 word) {
  return half_to_float(static_cast<u16>(word & 0xffff));
}
__device__ __forceinline__ float high_half(u32 word) {
  return half_to_float(static_cast<u16>(word >> 16));
}

// The 12 bytes of 6-bit scales and minima of Q4_K and Q5_K, as bytes.
__device__ __forceinline__ void six_bits(const u32 (&head)[4], u32 (&scale)[4], u32 (&min)[4]) {
  scale[0] = head[1] & 0x3f3f3f3fu;
  min[0] = head[2] & 0x3f3f3f3fu;
  scale[1] = (head[3] & 0x0f0f0f0fu) | (head[1] >> 2 & 0x30303030u);
  min[1] = (head[3] >> 4 & 0x0f0f0f0fu) | (head[2] >> 2 & 0x30303030u);
}

struct Q4_K {  // 4 planes of nibbles; header: d, dmin, scales
  static const int kRawBytes = sizeof(block_q4_K), kTileBytes = 2304, kSub = 32, kBias = 0;
  static const bool kHasMin = true;
  u32 q[4][4], head[2][4];
  static __device__ u32 tile_word(const RawTile& raw, int w) {
    if (w < 512) return plane_word(raw, w, FIELD(block_q4_K, qs));
    return raw.word((w - 512) >> 2, 4 * (w & 3));
  }
  __device__ __forceinline__ void load(const u8* tile, int lane) {
    load_planes(tile, lane, q);
    load_heads(tile + 2048, lane, head);
  }
  __device__ __forceinline__ void codes(int j, u32 (&a)[4]) const {
#pragma unroll
    for (int r = 0; r < 4; r++) a[r] = q[j >> 1][r] >> (4 * (j & 1)) & 0x0f0f0f0fu;
  }
  __device__ __forceinline__ void factors(int i, u32 (&scale)[4], u32 (&min)[4]) const {
    six_bits(head[i], scale, min);
  }
  __device__ __forceinline__ float d(int i) const { return low_half(head[i][0]); }
  __device__ __forceinline__ float dmin(int i) const { return high_half(head[i][0]); }
};

struct Q5_K {  // 4 planes of nibbles, 1 of fifth bits; header as Q4_K
  static const int kRawBytes = sizeof(block_q5_K), kTileBytes = 2816, kSub = 32, kBias = 0;
  static const bool kHasMin = true;
  u32 q[4][4], h[1][4], head[2][4];
  static __device__ u32 tile_word(const RawTile& raw, int w) {
    if (w < 512) return plane_word(raw, w, FIELD(block_q5_K, qs));
    if (w < 640) return plane_word(raw, w - 512, FIELD(block_q5_K, qh));
    return raw.word((w - 640) >> 2, 4 * (w & 3));
  }
  __device__ __forceinline__ void load(const u8* tile, int lane) {
    load_planes(tile, lane, q);
    load_planes(tile + 2048, lane, h);
    load_heads(tile + 2560, lane, head);
  }
  __device__ __forceinline__ void codes(int j, u32 (&a)[4]) const {
#pragma unroll
    for (int r = 0; r < 4; r++) {
      a[r] = (q[j >> 1][r] >> (4 * (j & 1)) & 0x0f0f0f0fu) | (h[0][r] >> j & 0x01010101u) << 4;
    }
  }
  __device__ __forceinline__ void factors(int i, u32 (&scale)[4], u32 (&min)[4]) const {
    six_bits(head[i], scale, min);
  }
  __device__ __forceinline__ float d(int i) const { return low_half(head[i][0]); }
  __device__ __forceinline__ float dmin(int i) const { return high_half(head[i][0]); }
};

struct Q6_K {  // 4 planes of nibbles, 2 of high bits; scales by row, then d of rows g and g + 8
  static const int kRawBytes = sizeof(block_q6_K), kTileBytes = 3360, kSub = 16, kBias = 32;
  static const bool kHasMin = false;
  u32 q[4][4], h[2][4], head[2][4], dd;
  static __device__ u32 tile_word(const RawTile& raw, int w) {
    if (w < 512) return plane_word(raw, w, FIELD(block_q6_K, ql));
    if (w < 768) return plane_word(raw, w - 512, FIELD(block_q6_K, qh));
    if (w < 832) return raw.word((w - 768) >> 2, FIELD(block_q6_K, scales) + 4 * (w & 3));
    return raw.half(w - 832, FIELD(block_q6_K, d)) |
           raw.half(w - 824, FIELD(block_q6_K, d)) << 16;
  }
  __device__ __forceinline__ void load(const u8* tile, int lane) {
    load_planes(tile, lane, q);
    load_planes(tile + 2048, lane, h);
    load_heads(tile + 3072, lane, head);
    dd = __ldg(reinterpret_cast<const u32*>(tile + 3328) + (lane >> 2));
  }
  __device__ __forceinline__ void codes(int j, u32 (&a)[4]) const {
#pragma unroll
    for (int r = 0; r < 4; r++) {
      a[r] = (q[j >> 2 << 1 | (j & 1)][r] >> (4 * (j >> 1 & 1)) & 0x0f0f0f0fu) |
             (h[j >> 2][r] >> (2 * (j & 3)) & 0x03030303u) << 4;
    }
  }
  __device__ __forceinline__ void factors(int i, u32 (&scale)[4], u32 (&)[4]) const {
#pragma unroll
    for (int w = 0; w < 4; w++) scale[w] = head[i][w];
  }
  __device__ __forceinline__ float d(int i) const { return i ? high_half(dd) : low_half(dd); }
  __device__ __forceinline__ float dmin(int) const { return 0.0f; }
};

struct Q2_K {  // 2 planes of two-bit codes; scales and minima by row, then d and dmin by row
  static const int kRawBytes = sizeof(block_q2_K), kTileBytes = 1344, kSub = 16, kBias = 0;
  static const bool kHasMin = true;
  u32 q[2][4], head[2][4], dd[2];
  static __device__ u32 tile_word(const RawTile& raw, int w) {
    if (w < 256) return plane_word(raw, w, FIELD(block_q2_K, qs));
    if (w < 320) return raw.word((w - 256) >> 2, 4 * (w & 3));
    return raw.word(w - 320, FIELD(block_q2_K, d));
  }
  __device__ __forceinline__ void load(const u8* tile, int lane) {
    load_planes(tile, lane, q);
    load_heads(tile + 1024, lane, head);
#pragma unroll
    for (int i = 0; i < 2; i++) {
      dd[i] = __ldg(reinterpret_cast<const u32*>(tile + 1280) + (lane >> 2) + 8 * i);
    }
  }
  __device__ __forceinline__ void codes(int j, u32 (&a)[4]) const {
#pragma unroll
    for (int r = 0; r < 4; r++) a[r] = q[j >> 2][r] >> (2 * (j & 3)) & 0x03030303u;
  }
  __device__ __forceinline__ void factors(int i, u32 (&scale)[4], u32 (&min)[4]) const {
#pragma unroll
    for (int w = 0; w < 4; w++) {
      scale[w] = head[i][w] & 0x0f0f0f0fu;
      min[w] = head[i][w] >> 4 & 0x0f0f0f0fu;
    }
  }
  __device__ __forceinline__ float d(int i) const { return low_half(dd[i]); }
  __device__ __forceinline__ float dmin(int i) const { return high_half(dd[i]); }
};

struct Q3_K {  // 2 planes of two-bit codes, 1 of third bits; header: scales, d, two bytes of zero
  static const int kRawBytes = sizeof(block_q3_K), kTileBytes = 1792, kSub = 16, kBias = 4;
  static const bool kHasMin = false;
  u32 q[2][4], h[1][4], head[2][4];
  static __device__ u32 tile_word(const RawTile& raw, int w) {
    if (w < 256) return plane_word(raw, w, FIELD(block_q3_K, qs));
    if (w < 384) return plane_word(raw, w - 256, FIELD(block_q3_K, hmask));
    int row = (w - 384) >> 2;
    if ((w & 3) == 3) return raw.half(row, FIELD(block_q3_K, d));
    return raw.word(row, FIELD(block_q3_K, scales) + 4 * (w & 3));
  }
  __device__ __forceinline__ void load(const u8* tile, int lane) {
    load_planes(tile, lane, q);
    load_planes(tile + 1024, lane, h);
    load_heads(tile + 1536, lane, head);
  }
  __device__ __forceinline__ void codes(int j, u32 (&a)[4]) const {
#pragma unroll
    for (int r = 0; r < 4; r++) {
      a[r] = (q[j >> 2][r] >> (2 * (j & 3)) & 0x03030303u) | (h[0][r] >> j & 0x01010101u) << 2;
    }
  }
  __device__ __forceinline__ void factors(int i, u32 (&scale)[4], u32 (&)[4]) const {
#pragma unroll
    for (int w = 0; w < 4; w++) {
      u32 low = head[i][w & 1] >> (4 * (w >> 1)) & 0x0f0f0f0fu;
      scale[w] = minus_32(low | (head[i][2] >> (2 * w) & 0x03030303u) << 4);
    }
  }
  __device__ __forceinline__ float d(int i) const { return low_half(head[i][3]); }
  __device__ __forceinline__ float dmin(int) const { return 0.0f; }
};

// 4 planes of sorted nibbles, a lane's 16 bytes being two runs of 32 values (rows g, g + 8 of the
// first, then of the second); header: d, high bits of the scales, low bits of the scales.
struct IQ4_XS {
  static const int kRawBytes = sizeof(block_iq4_xs), kTileBytes = 2176, kSub = 32, kBias = 0;
  static const bool kHasMin = false;
  u32 q[4][4], head[2][2];
  static __device__ u32 tile_word(const RawTile& raw, int w) {
    if (w >= 512) return raw.word((w - 512) >> 1, 4 * (w & 1));
    int lane = w >> 2 & 31, run = 2 * (w >> 7) + (w >> 1 & 1);
    int at = FIELD(block_iq4_xs, qs) + 16 * run + 4 * (lane & 3);
    return sorted_nibbles(raw.word((lane >> 2) + 8 * (w & 1), at));
  }
  __device__ __forceinline__ void load(const u8* tile, int lane) {
    load_planes(tile, lane, q);
#pragma unroll
    for (int i = 0; i < 2; i++) {
      uint2 v = __ldg(reinterpret_cast<const uint2*>(tile + 2048) + (lane >> 2) + 8 * i);
      head[i][0] = v.x, head[i][1] = v.y;
    }
  }
  __device__ __forceinline__ void codes(int j, u32 (&a)[4]) const {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      u32 run = q[j >> 1][2 * (j & 1) + r];
      a[r] = iq4_values(run);
      a[2 + r] = iq4_values(run >> 16);
    }
  }
  __device__ __forceinline__ void factors(int i, u32 (&scale)[4], u32 (&)[4]) const {
#pragma unroll
    for (int w = 0; w < 2; w++) {
      u32 bytes = 0;
#pragma unroll
      for (int b = 0; b < 4; b++) {
        int j = 4 * w + b;
        u32 six = (head[i][1] >> (4 * j) & 15u) | (head[i][0] >> (16 + 2 * j) & 3u) << 4;
        bytes |= six << (8 * b);
      }
      scale[w] = minus_32(bytes);
    }
  }
  __device__ __forceinline__ float d(int i) const { return low_half(head[i][0]); }
  __device__ __forceinline__ float dmin(int) const { return 0.0f; }
};
