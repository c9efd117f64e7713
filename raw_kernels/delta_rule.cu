// Computes: for every value head, row after row, with S of shape (K_DIM, Dv): d = beta * (v - decay
//   * S^T k), S = decay * S + k d^T, out = scale * S^T q; before the first row the kept rows of the
//   tape are applied to the stored state. A large block stores its last state; a small one the
//   state before it, and its own k, d and decay in the tape.
// Shapes/dtypes: out, v (M, Hv, Dv), q, k (M, Hk, K_DIM), decay, beta (M, Hv) f32, rows their
//   stride in elements apart; states (n, Hv, Dv / 16, K_DIM, 16), tape_k (2, B, Hk, K_DIM), tape_d
//   (B, Hv, Dv), tape_decay (2, B, Hv) f32; plan (8,) i32 from recurrent_open. Hk divides Hv.
// Launch: grid (Dv / 16, Hv), block 64; with 0 rows (row arrays null) the state is copied.
// Defines: K_DIM, a multiple of 8 up to 256.
// Accumulates in: float32. Sums over the key dimension: lane i mod 8, ascending, then a halving
//   tree. A thread has one column's elements i = 4 t + l: lanes l and l + 4.
// Reads/writes: the state once, in registers between; k and q of a row from cache for each tile.
// Twin: ops.cpu.delta_rule.
// Source: own; the rule is Yang et al., arXiv 2412.06464.
#include "common/numerics.cuh"
#include "common/recurrent.cuh"

#ifndef K_DIM
#error "K_DIM: key dimension of a head"
#endif
static_assert(K_DIM % 8 == 0 && K_DIM > 0 && K_DIM <= 256, "K_DIM");
#define OWN (K_DIM / 4)                                // elements of a thread

// Halving tree over 8 lanes: two in the thread, the others in its four neighbours.
__device__ __forceinline__ float lane_tree(float low, float high) {
  float sum = add_rn(low, high);
  sum = add_rn(sum, __shfl_xor_sync(~0u, sum, 2));
  return add_rn(sum, __shfl_xor_sync(~0u, sum, 1));
}

extern "C" __global__ void __launch_bounds__(64)
delta_rule(float* __restrict__ out, i64 out_stride, const float* __restrict__ q, i64 q_stride,
           const float* __restrict__ k, i64 k_stride, const float* __restrict__ v, i64 v_stride,
           const float* __restrict__ decay, i64 decay_stride, const float* __restrict__ beta,
           i64 beta_stride, float* states, float* tape_k, float* tape_d, float* tape_decay,
           const int* __restrict__ plan, int n_rows, int n_k_heads, int block_rows, float scale) {
  int l = threadIdx.x & 3, column = threadIdx.x >> 2;  // column of the tile of 16
  int head = blockIdx.y, n_heads = gridDim.y, key_head = head % n_k_heads;
  int at = blockIdx.x * 16 + column, d_v = gridDim.x * 16, n_tape = plan[N_TAPE];
  bool keep = plan[KEEP_TAPE];
  if (!plan[SOUND]) {
    for (int r = l; r < n_rows; r += 4) out[r * out_stride + head * d_v + at] = quiet_nan();
    return;                                            // the block leaves as one
  }
  i64 slot = static_cast<i64>(n_heads) * d_v * K_DIM;
  i64 place = (static_cast<i64>(head) * gridDim.x + blockIdx.x) * (K_DIM * 16) + l * 16 + column;
  const float* from = states + plan[SOURCE] * slot + place;
  float* to = states + plan[TARGET] * slot + place;
  float s[OWN];
#pragma unroll
  for (int t = 0; t < OWN; t++) s[t] = plan[AT_ZERO] ? 0.0f : from[64 * t];
  for (int r = 0; r < n_tape; r++) {
    i64 row = static_cast<i64>(plan[READ]) * block_rows + r;
    const float* row_k = tape_k + (row * n_k_heads + key_head) * K_DIM + l;
    float d = tape_d[(static_cast<i64>(r) * n_heads + head) * d_v + at];
    float by = tape_decay[row * n_heads + head];
#pragma unroll
    for (int t = 0; t < OWN; t++) s[t] = fma_rn(row_k[4 * t], d, mul_rn(by, s[t]));
  }
  if (n_tape > 0 || n_rows == 0) {
#pragma unroll
    for (int t = 0; t < OWN; t++) to[64 * t] = s[t];
  }
  __syncwarp();                                        // the tape is written from here on
  q += key_head * K_DIM + l, k += key_head * K_DIM + l;
  for (int r = 0; r < n_rows; r++) {
    const float *row_k = k + r * k_stride, *row_q = q + r * q_stride;
    float by = decay[r * decay_stride + head], strength = beta[r * beta_stride + head];
    float sums[2] = {0.0f, 0.0f};
#pragma unroll
    for (int t = 0; t < OWN; t++) sums[t & 1] = fma_rn(s[t], row_k[4 * t], sums[t & 1]);
    float p = lane_tree(sums[0], sums[1]);
    float d = mul_rn(sub_rn(v[r * v_stride + head * d_v + at], mul_rn(by, p)), strength);
    sums[0] = sums[1] = 0.0f;
#pragma unroll
    for (int t = 0; t < OWN; t++) {
      s[t] = fma_rn(row_k[4 * t], d, mul_rn(by, s[t]));
      sums[t & 1] = fma_rn(s[t], row_q[4 * t], sums[t & 1]);
    }
    float o = lane_tree(sums[0], sums[1]);
    if (l == 0) out[r * out_stride + head * d_v + at] = mul_rn(o, scale);
    if (!keep) continue;
    i64 row = static_cast<i64>(plan[WRITE]) * block_rows + r;
    if (l == 0) tape_d[(static_cast<i64>(r) * n_heads + head) * d_v + at] = d;
    if (blockIdx.x > 0) continue;                      // the first tile keeps what tiles share
    if (threadIdx.x == 0) tape_decay[row * n_heads + head] = by;
    if (head >= n_k_heads) continue;
    for (int i = threadIdx.x; i < K_DIM; i += 64) {
      tape_k[(row * n_k_heads + head) * K_DIM + i] = row_k[i - l];
    }
  }
  if (keep || n_rows == 0) return;
#pragma unroll
  for (int t = 0; t < OWN; t++) to[64 * t] = s[t];
}
