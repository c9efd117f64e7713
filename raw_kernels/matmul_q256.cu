// Computes: out[r] = W x[r]; per 256 values, in int32, s = sum_j scale_j * (sum(code * q) << e_j)
//   and t = sum_j min_j * (sum(q) << e_j); acc = fma(v(s), d_w * d, acc), with minima then
//   acc = fma(-v(t), dmin_w * d, acc); v is f32, or fma(f32(s_high), 256, f32(s_low)).
// Shapes/dtypes: out (M, N) f32, rows out_stride elements apart; tiles from retile; codes, d,
//   exponents and sums from quantize_q256.
// Launch: grid (ceil(N / ROWS), ceil(M / TOKENS)), block 256 * ROW_GROUPS;
//   ROWS = 16 * ROW_TILES * ROW_GROUPS.
// Defines: FORMAT (Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_XS), PLANES 1 | 2, TOKEN_TILES 1 | 2,
//   ROW_TILES 1 | 2, ROW_GROUPS 1 | 2, SLICES 8 | 16 (16 from K = 16,384, then ROWS <= 32).
// Accumulates in: int32 by tensor cores, then float32, units of a slice in order, slices in order;
//   a row's result depends on the row and K alone.
// Reads/writes: N K kTileBytes / 4096 of weights once for each group of tokens; activations once
//   for each block of rows.
// Twin: ops.cpu.matmul (docs/NUMERICS.md, 3).
// Source: own; blocks as in ggml ggml-common.h. The minimum and the bias go through the tensor
//   cores too, as one product of 16 scales with the 16 sums of x, cut in two bytes.
#include "common/activations.cuh"
#include "common/formats256.cuh"
#include "common/slices.cuh"

#if !defined(FORMAT) || !defined(ROW_TILES) || !defined(ROW_GROUPS)
#error "FORMAT: name of the format; ROW_TILES and ROW_GROUPS: 1 or 2"
#endif
#define ROWS (16 * ROW_TILES * ROW_GROUPS)
#define HALVES (32 / FORMAT::kSub)                     // scales of 32 values
// ptxas: without a stated minimum of blocks (0) it keeps to 128 registers and spills in the lighter
// builds; with one it hoists loads up to 255 and spills in the heaviest.
#define MIN_BLOCKS (PLANES * TOKEN_TILES == 4 && (FORMAT::kHasMin || FORMAT::kSub == 16) ? 0 : 1)

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

extern "C" __global__ void __launch_bounds__(256 * ROW_GROUPS, MIN_BLOCKS)
matmul_q256(float* __restrict__ out, i64 out_stride, const u8* __restrict__ tiles,
            const Fragment* __restrict__ codes, const float* __restrict__ d,
            const u16* __restrict__ exponents, const Fragment* __restrict__ sums, int m, int n,
            int k) {
  __shared__ float part[SLICES][ROWS][TOKENS + 1];
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  int group = warp / SLICE_WARPS, units = k / 256, n_tiles = (n + 15) / 16;
  i64 tile_stride = static_cast<i64>(units) * FORMAT::kTileBytes;
  // tiles past the last one: the last is computed again and nothing is stored
  int tile = min((static_cast<int>(blockIdx.x) * ROW_GROUPS + group) * ROW_TILES, n_tiles - 1);
  tiles += tile * tile_stride;
  if (tile + ROW_TILES > n_tiles) tile_stride = 0;
  i64 first_unit = static_cast<i64>(blockIdx.y) * units;
  codes += first_unit * 8 * TOKEN_TILES * 32 + lane;
  sums += first_unit * TOKEN_TILES * 32 + lane;
  d += first_unit * TOKENS, exponents += first_unit * TOKENS;
  for (int slice = warp % SLICE_WARPS; slice < SLICES; slice += SLICE_WARPS) {
    float acc[ROW_TILES][TOKEN_TILES][4] = {};
    int last = slice_begin(units, slice + 1);
    for (int u = slice_begin(units, slice); u < last; u++) {
      add_unit(tiles + static_cast<i64>(u) * FORMAT::kTileBytes, tile_stride,
               codes + u * 8 * TOKEN_TILES * 32, d + u * TOKENS, exponents + u * TOKENS,
               sums + u * TOKEN_TILES * 32, acc);
    }
#pragma unroll
    for (int i = 0; i < ROW_TILES; i++) {
#pragma unroll
      for (int j = 0; j < TOKEN_TILES; j++) {
#pragma unroll
        for (int e = 0; e < 4; e++) {
          int row = 16 * (group * ROW_TILES + i) + (lane >> 2) + 8 * (e >> 1);
          part[slice][row][8 * j + 2 * (lane & 3) + (e & 1)] = acc[i][j][e];
        }
      }
    }
  }
  __syncthreads();
  add_slices(part, TOKENS, out, out_stride, blockIdx.x * ROWS, n, blockIdx.y * TOKENS, m);
}
