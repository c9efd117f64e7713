// One super-block of ROW_TILES x 16 weight rows times TOKENS tokens; order: docs/NUMERICS.md, 3.
//
// The minimum and the bias go through the tensor cores too, as one product of 16 scales with the 16
// sums of x, cut in two bytes.
#pragma once
#include "activations.cuh"
#include "formats256.cuh"
#include "slices.cuh"

#if !defined(FORMAT) || !defined(ROW_TILES) || !defined(ROW_GROUPS)
#error "FORMAT: name of the format; ROW_TILES: 16 rows each a warp; ROW_GROUPS: warps beside"
#endif
#define ROWS (16 * ROW_TILES * ROW_GROUPS)
#define HALVES (32 / FORMAT::kSub)                     // scales of 32 values

// Integer sums of one super-block: 16 rows x 8 tokens a row tile and token tile.
struct Sums {
  int main[PLANES][4], min[PLANES][4];
};

// Word t of four bytes each: factors 4 t .. 4 t + 3 of 16, those of 32 values taken twice.
__device__ __forceinline__ u32 factor_word(const u32 (&w)[4], int t) {
  if (FORMAT::kSub == 32) return __byte_perm(t & 2 ? w[1] : w[0], 0, t & 1 ? 0x3322 : 0x1100);
  return t & 2 ? (t & 1 ? w[3] : w[2]) : (t & 1 ? w[1] : w[0]);
}

// sum += scale * (products << e) for 32 values; `first` is the first of their HALVES scales.
__device__ __forceinline__ void add_products(const u32 (&a)[4], const u32 (&scale)[2][4], int first,
                                             const u32* x, const int (&shift)[2], int (&sum)[4]) {
  const int zero[4] = {0, 0, 0, 0};
#pragma unroll
  for (int half = 0; half < HALVES; half++) {
    int s[4];
    if (HALVES == 1) {
      mma_m16n8k32_s8(s, a, {x[0], x[1]}, zero);
    } else {
      mma_m16n8k16_s8(s, {a[2 * half], a[2 * half + 1]}, x[half], zero);
    }
#pragma unroll
    for (int e = 0; e < 4; e++) {
      int by = signed_byte(scale[e >> 1][(first + half) >> 2], (first + half) & 3);
      if (PLANES == 1) by *= 1 << shift[e & 1];
      sum[e] += by * s[e];
    }
  }
}

// Sum of factor * sum(x) over the 16 runs of 16.
__device__ __forceinline__ void weighted_sums(const u32 (&a)[2], const u32* bytes, int (&sum)[4]) {
  const int zero[4] = {0, 0, 0, 0};
  int high[4];
  mma_m16n8k16_s8(sum, a, bytes[0], zero);
  mma_m16n8k16_s8(high, a, bytes[1], zero);
#pragma unroll
  for (int e = 0; e < 4; e++) sum[e] += 256 * high[e];
}

__device__ __forceinline__ float value_of(const int (&s)[PLANES][4], int e) {
  if (PLANES == 1) return from_int(s[0][e]);
  return fma_rn(from_int(s[PLANES - 1][e]), 256.0f, from_int(s[0][e]));
}

// One super-block of ROW_TILES row tiles into their accumulators.
__device__ __forceinline__ void add_unit(const u8* tile, i64 tile_stride, const Fragment* codes,
                                         const float* d, const u16* exponents, const Fragment* sums,
                                         float (&acc)[ROW_TILES][TOKEN_TILES][4]) {
  int lane = threadIdx.x & 31, t = lane & 3;
  FORMAT w[ROW_TILES];
  u32 scale[ROW_TILES][2][4], min[ROW_TILES][2][4];
  Sums total[ROW_TILES][TOKEN_TILES] = {};
  u32 shifts[TOKEN_TILES] = {};
#pragma unroll
  for (int i = 0; i < ROW_TILES; i++) w[i].load(tile + i * tile_stride, lane);
#pragma unroll
  for (int i = 0; i < ROW_TILES; i++) {
#pragma unroll
    for (int h = 0; h < 2; h++) w[i].factors(h, scale[i][h], min[i][h]);
  }
#pragma unroll
  for (int j = 0; j < TOKEN_TILES; j++) {
    if (PLANES == 1) shifts[j] = __ldg(reinterpret_cast<const u32*>(exponents + 8 * j + 2 * t));
  }
#pragma unroll
  for (int r = 0; r < 8; r++) {
    Fragment x[TOKEN_TILES];
#pragma unroll
    for (int j = 0; j < TOKEN_TILES; j++) x[j] = load_fragment(codes + (r * TOKEN_TILES + j) * 32);
#pragma unroll
    for (int i = 0; i < ROW_TILES; i++) {
      u32 a[4];
      w[i].codes(r, a);
#pragma unroll
      for (int j = 0; j < TOKEN_TILES; j++) {
        const int shift[2] = {static_cast<int>(shifts[j] >> (2 * r) & 3),
                              static_cast<int>(shifts[j] >> (16 + 2 * r) & 3)};
#pragma unroll
        for (int p = 0; p < PLANES; p++) {
          add_products(a, scale[i], HALVES * r, x[j].words + 2 * p, shift, total[i][j].main[p]);
        }
      }
    }
  }
#pragma unroll
  for (int j = 0; j < TOKEN_TILES; j++) {
    Fragment x = {};
    if (FORMAT::kHasMin || FORMAT::kBias) x = load_fragment(sums + 32 * j);
    float2 xd = __ldg(reinterpret_cast<const float2*>(d + 8 * j + 2 * t));
#pragma unroll
    for (int i = 0; i < ROW_TILES; i++) {
#pragma unroll
      for (int p = 0; p < PLANES; p++) {
        if (FORMAT::kHasMin) {
          weighted_sums({factor_word(min[i][0], t), factor_word(min[i][1], t)}, x.words + 2 * p,
                        total[i][j].min[p]);
        }
        if (FORMAT::kBias) {
          int off[4];
          weighted_sums({factor_word(scale[i][0], t), factor_word(scale[i][1], t)},
                        x.words + 2 * p, off);
#pragma unroll
          for (int e = 0; e < 4; e++) total[i][j].main[p][e] -= FORMAT::kBias * off[e];
        }
      }
#pragma unroll
      for (int e = 0; e < 4; e++) {
        float x_d = e & 1 ? xd.y : xd.x;
        float& to = acc[i][j][e];
        to = fma_rn(value_of(total[i][j].main, e), mul_rn(w[i].d(e >> 1), x_d), to);
        if (FORMAT::kHasMin) {
          to = fma_rn(-value_of(total[i][j].min, e), mul_rn(w[i].dmin(e >> 1), x_d), to);
        }
      }
    }
  }
}
