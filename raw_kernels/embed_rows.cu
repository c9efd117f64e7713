// Computes: rows of a packed table, expanded in ggml's order and multiplied by `scale`, one
//   rounding for each written operation; an id outside the table gives a row of NaNs.
// Shapes/dtypes: out (M, K) f32, rows out_stride elements apart; raw (N, row_bytes) u8 as in the
//   file, 2-byte aligned (F32: 4-byte); ids (M,) i32.
// Launch: grid (ceil(K / 256), M), block 256.
// Defines: FORMAT, the format's name: F32, F16, BF16, Q4_0 ... IQ4_XS.
// Accumulates in: nothing; every element alone.
// Reads/writes: M rows of the table read, M K 4 written.
// Twin: ops.cpu.embed_rows (docs/NUMERICS.md, 4).
// Source: expansion order of ggml ggml-quants.c (dequantize_row_*), blocks of ggml-common.h.
#include "common/expand.cuh"

#ifndef FORMAT
#error "FORMAT: name of the format"
#endif

extern "C" __global__ void __launch_bounds__(256)
embed_rows(float* __restrict__ out, i64 out_stride, const u8* __restrict__ raw, i64 row_bytes,
           int n, const int* __restrict__ ids, int k, float scale) {
  int i = blockIdx.x * 256 + threadIdx.x, id = ids[blockIdx.y];
  if (i >= k) return;
  float value = quiet_nan();
  if (id >= 0 && id < n) {
    const u8* block = raw + id * row_bytes + static_cast<i64>(i / FORMAT::kBlock) * FORMAT::kBytes;
    value = mul_rn(FORMAT::value(block, i % FORMAT::kBlock), scale);
  }
  out[blockIdx.y * out_stride + i] = value;
}
