// Computes: the tiles of a packed matrix from raw rows; bytes move, nothing is rounded.
// Shapes/dtypes: raw (N, row_bytes) u8, 2-byte aligned; tiles (ceil(N / rows), K / unit, words)
//   u32, 16-byte aligned, with rows and unit of the format's tile: 32 x 32 or 16 x 256. The order
//   inside a tile is in common/formats32.cuh and common/formats256.cuh. Rows past N are zeros.
// Launch: grid (K / unit, ceil(N / rows)), block 128.
// Defines: FORMAT, the format's name, as Q4_K; TILE_ROWS 32 (32-value formats) | 16 (256-value).
// Accumulates in: nothing.
// Reads/writes: the matrix read and written once; load time only.
// Twin: ops.cpu.pack (another order of the same bytes; tests compare products).
// Source: raw blocks as in ggml ggml-common.h.
#include "common/formats256.cuh"

#if !defined(FORMAT) || !defined(TILE_ROWS)
#error "FORMAT: name of the format; TILE_ROWS: 32 or 16"
#endif

extern "C" __global__ void __launch_bounds__(128)
retile(const u8* __restrict__ raw, i64 row_bytes, u32* __restrict__ tiles, int n) {
  int unit = blockIdx.x, tile = blockIdx.y, first = tile * TILE_ROWS;
  const int n_words = FORMAT::kTileBytes / 4;
  RawTile rows = {raw + first * row_bytes + static_cast<i64>(unit) * FORMAT::kRawBytes, row_bytes,
                  min(TILE_ROWS, n - first)};
  u32* out = tiles + (static_cast<i64>(tile) * gridDim.x + unit) * n_words;
  for (int w = threadIdx.x; w < n_words; w += blockDim.x) out[w] = FORMAT::tile_word(rows, w);
}
