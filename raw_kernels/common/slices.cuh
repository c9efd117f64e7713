// The split of the reduced dimension: contiguous slices, a function of K only, added in order.
#pragma once
#include "types.cuh"

#ifndef SLICES
#error "SLICES: 8, or 16 from K = 16384"
#endif
static_assert(SLICES == 8 || SLICES == 16, "SLICES is 8 or 16");

// Warps that share the slices of one group of rows.
#define SLICE_WARPS 8

// First unit of slice `s`.
__device__ __forceinline__ int slice_begin(int units, int s) {
  return static_cast<int>(static_cast<i64>(units) * s / SLICES);
}

// out[token][row] = ((0 + slice 0) + slice 1) + ... for the rows and tokens of this block.
template <int ROWS, int COLUMNS>
__device__ __forceinline__ void add_slices(const float (*part)[ROWS][COLUMNS], int n_columns,
                                           float* out, i64 out_stride, int first_row, int n,
                                           int first_token, int m) {
  for (int o = threadIdx.x; o < ROWS * n_columns; o += blockDim.x) {
    int row = o % ROWS, token = o / ROWS;
    if (first_row + row >= n || first_token + token >= m) continue;
    float sum = 0.0f;
#pragma unroll
    for (int s = 0; s < SLICES; s++) sum = add_rn(sum, part[s][row][token]);
    out[(first_token + token) * out_stride + first_row + row] = sum;
  }
}

// Store a finished accumulator fragment of 16 rows and 8 tokens.
__device__ __forceinline__ void store_fragment(const float (&v)[4], float* out, i64 out_stride,
                                               int first_row, int n, int first_token, int m) {
  int lane = threadIdx.x & 31;
#pragma unroll
  for (int e = 0; e < 4; e++) {
    int row = first_row + (lane >> 2) + 8 * (e >> 1), token = first_token + 2 * (lane & 3) + (e & 1);
    if (row < n && token < m) out[token * out_stride + row] = v[e];
  }
}
