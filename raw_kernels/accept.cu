// Computes: the drafts that equal the target's own tokens, up to the first that does not or that is
//   a stop token, and the target's next token, none after a stop token.
// Shapes/dtypes: i32 throughout. best (n_drafts + 1,), drafts (n_drafts,), n_drafts at most 31,
//   finite (1,), stop_ids (n_stop,), ids below 0 are none; outcome (4 + n_drafts + 1,): finite,
//   drafts accepted, tokens, how it ended (0 no drafts, 1 bonus, 2 corrected, 3 stopped), the
//   tokens; the first four are 0 where finite is 0, the places after the tokens are left alone.
// Launch: one block of 32.
// Defines: none.
// Accumulates in: comparisons only.
// Reads/writes: a few hundred bytes.
// Twin: ops.cpu.accept_greedy; spec.acceptance.match over TokenRows.
// Source: own; the rule is Leviathan et al. 2023 at temperature 0.
#include "common/types.cuh"

extern "C" __global__ void __launch_bounds__(32)
accept_greedy(int* __restrict__ outcome, const int* __restrict__ drafts,
              const int* __restrict__ best, const int* __restrict__ finite,
              const int* __restrict__ stop_ids, int n_drafts, int n_stop) {
  int lane = threadIdx.x, n = n_drafts;
  if (*finite == 0) {
    if (lane < 4) outcome[lane] = 0;
    return;
  }
  bool rejected = false, stops = false;
  if (lane < n) {
    rejected = best[lane] != drafts[lane];
    for (int i = 0; i < n_stop; i++) stops = stops || best[lane] == stop_ids[i];
  }
  u32 rejections = __ballot_sync(~0u, rejected), ends = __ballot_sync(~0u, rejected || stops);
  int accepted = n, tokens = n + 1, end = n > 0;
  if (ends) {                                          // the lowest lane decides
    int first = __popc(~ends & (ends - 1));
    bool corrected = rejections >> first & 1;
    accepted = corrected ? first : first + 1, tokens = first + 1, end = corrected ? 2 : 3;
  }
  if (lane < tokens) outcome[4 + lane] = best[lane];
  if (lane == 0) outcome[0] = 1, outcome[1] = accepted, outcome[2] = tokens, outcome[3] = end;
}
