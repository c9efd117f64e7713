// Short integer names, and ggml's blocks as they lie in a file.
//
// Block layouts and field order: ggml ggml-common.h (block_q4_0 ... block_iq4_xs). Blocks are only
// 2-byte aligned in a row, so raw bytes are read by halves (RawTile below).
#pragma once

typedef signed char i8;
typedef unsigned char u8;
typedef unsigned short u16;
typedef short i16;
typedef unsigned int u32;
typedef long long i64;

struct block_q4_0 { u16 d; u8 qs[16]; };
struct block_q4_1 { u16 d, m; u8 qs[16]; };
struct block_q5_0 { u16 d; u8 qh[4], qs[16]; };
struct block_q5_1 { u16 d, m; u8 qh[4], qs[16]; };
struct block_q8_0 { u16 d; i8 qs[32]; };
struct block_iq4_nl { u16 d; u8 qs[16]; };
struct block_q2_K { u8 scales[16], qs[64]; u16 d, dmin; };
struct block_q3_K { u8 hmask[32], qs[64], scales[12]; u16 d; };
struct block_q4_K { u16 d, dmin; u8 scales[12], qs[128]; };
struct block_q5_K { u16 d, dmin; u8 scales[12], qh[32], qs[128]; };
struct block_q6_K { u8 ql[128], qh[64]; i8 scales[16]; u16 d; };
struct block_iq4_xs { u16 d, scales_h; u8 scales_l[4], qs[128]; };

static_assert(sizeof(block_q4_0) == 18, "block_q4_0");
static_assert(sizeof(block_q4_1) == 20, "block_q4_1");
static_assert(sizeof(block_q5_0) == 22, "block_q5_0");
static_assert(sizeof(block_q5_1) == 24, "block_q5_1");
static_assert(sizeof(block_q8_0) == 34, "block_q8_0");
static_assert(sizeof(block_iq4_nl) == 18, "block_iq4_nl");
static_assert(sizeof(block_q2_K) == 84, "block_q2_K");
static_assert(sizeof(block_q3_K) == 110, "block_q3_K");
static_assert(sizeof(block_q4_K) == 144, "block_q4_K");
static_assert(sizeof(block_q5_K) == 176, "block_q5_K");
static_assert(sizeof(block_q6_K) == 210, "block_q6_K");
static_assert(sizeof(block_iq4_xs) == 136, "block_iq4_xs");

// Byte offset of a field of a block.
#define FIELD(block, name) ((int)__builtin_offsetof(block, name))

// One raw block of each row of a tile; rows past the matrix read as zero.
struct RawTile {
  const u8* first;     // the block in the tile's first row
  i64 row_bytes;
  int n_rows;          // rows of the tile that exist

  __device__ u32 half(int row, int byte) const {
    return row < n_rows ? *reinterpret_cast<const u16*>(first + row * row_bytes + byte) : 0u;
  }
  __device__ u32 word(int row, int byte) const {
    return half(row, byte) | half(row, byte + 2) << 16;
  }
};
