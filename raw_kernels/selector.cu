// Computes: lattice[t, a, b] = unary[t, b] + sum over r of (pred[t, a, r] * gate[t, r]) *
//   succ[t, b, r]; the walk takes in every row the best successor of the candidate chosen before
//   (first of equals; a NaN only where it comes first), confidence 1 / sum_b exp(s_b - chosen).
// Shapes/dtypes: lattice (T, K, K), succ and pred (T, K, R), gate (T, R), unary (T, K) f32;
//   tokens, index (T,) i32; scores, confidence (T,) f32; candidate_ids (T, K) i32; contiguous.
// Launch: selector_lattice: grid (K, T), block 256; selector_walk: grid 1, block 32.
// Defines: none.
// Accumulates in: float32. Product: 16 lanes, lane l takes r = l, l + 16, ... in order, then a
//   halving tree. Confidence: b in ascending order.
// Reads/writes: T K R 8 and, for each predecessor, the successors of its row from cache.
// Twin: ops.cpu.selector_lattice, selector_walk.
// Source: own order.
#include "common/special.cuh"
#include "common/types.cuh"

extern "C" __global__ void __launch_bounds__(256)
selector_lattice(float* __restrict__ out, const float* __restrict__ succ,
                 const float* __restrict__ pred, const float* __restrict__ gate,
                 const float* __restrict__ unary, int k, int rank) {
  i64 t = blockIdx.y, at = t * k + blockIdx.x;
  int lane = threadIdx.x & 15;
  pred += at * rank, gate += t * rank;
  for (int first = 0; first < k; first += 16) {        // the same turns for all: shuffles below
    int b = min(first + static_cast<int>(threadIdx.x >> 4), k - 1);
    const float* to = succ + (t * k + b) * rank;
    float acc = 0.0f;
    for (int r = lane; r < rank; r += 16) acc = fma_rn(mul_rn(pred[r], gate[r]), to[r], acc);
#pragma unroll
    for (int half = 8; half > 0; half /= 2) acc = add_rn(acc, __shfl_xor_sync(~0u, acc, half));
    if (lane == 0 && first + static_cast<int>(threadIdx.x >> 4) < k) {
      out[at * k + b] = add_rn(unary[t * k + b], acc);
    }
  }
}

extern "C" __global__ void __launch_bounds__(32)
selector_walk(int* __restrict__ tokens, int* __restrict__ index, float* __restrict__ scores,
              float* __restrict__ confidence, const float* __restrict__ lattice,
              const int* __restrict__ candidate_ids, int n_rows, int k) {
  int lane = threadIdx.x, previous = 0;
  for (int t = 0; t < n_rows; t++) {
    const float* row = lattice + (static_cast<i64>(t) * k + previous) * k;
    float first = row[0], top = -infinity();
    int best = 0x7fffffff;
    for (int b = lane; b < k; b += 32) {
      if (row[b] > top || (row[b] == top && b < best)) top = row[b], best = b;
    }
#pragma unroll
    for (int flip = 16; flip > 0; flip /= 2) {
      float other = __shfl_xor_sync(~0u, top, flip);
      int other_best = __shfl_xor_sync(~0u, best, flip);
      if (other > top || (other == top && other_best < best)) top = other, best = other_best;
    }
    if (!(top > first)) top = first, best = 0;         // nothing is larger than a NaN at the start
    float sum = 0.0f;
    for (int begin = 0; begin < k; begin += 32) {
      int b = min(begin + lane, k - 1), n = min(32, k - begin);
      float p = exp_f32(sub_rn(row[b], top));
      for (int i = 0; i < n; i++) sum = add_rn(sum, __shfl_sync(~0u, p, i));
    }
    if (lane == 0) {
      tokens[t] = candidate_ids[static_cast<i64>(t) * k + best], index[t] = best;
      scores[t] = top, confidence[t] = div_rn(1.0f, sum);
    }
    previous = best;
  }
}
