// Computes: accept_greedy: the drafts that equal the target's own tokens, up to the first that does
//   not or that is a stop token, and the target's next token, none after a stop token.
//   commit_rows: positions of the committed rows for the draft's context pass, and its new length.
// Shapes/dtypes: i32 throughout. best (n_drafts + 1,), drafts (n_drafts,), n_drafts (1,) at most 31,
//   finite (1,), stop_ids (n_stop,) or null; outcome (5 + n_drafts,): finite, drafts accepted,
//   tokens, how it ended (0 no drafts, 1 bonus, 2 corrected, 3 stopped), the tokens; all of the
//   first four and count (1,) are 0 where finite is 0; count: rows to commit, the tokens' number.
//   all, ring, pinned (n_rows,), n_rows <= 32, length (1,): row i < count gets position
//   length + i, in `pinned` before `sink` and in `ring` from there; every other place gets -1.
// Launch: one block of 32 for each.
// Defines: none.
// Accumulates in: comparisons only.
// Reads/writes: a few hundred bytes.
// Twin: spec.acceptance.match over TokenRows; model.draft_runner positions.
// Source: own; the rule is Leviathan et al. 2023 at temperature 0.
#include "common/types.cuh"

extern "C" __global__ void __launch_bounds__(32)
accept_greedy(int* __restrict__ outcome, int* __restrict__ count, const int* __restrict__ drafts,
              const int* __restrict__ best, const int* __restrict__ finite,
              const int* __restrict__ n_drafts, const int* __restrict__ stop_ids, int n_stop) {
  int lane = threadIdx.x, n = *n_drafts;
  if (*finite == 0) {
    if (lane < 4) outcome[lane] = 0;
    if (lane == 0) *count = 0;
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
  if (lane == 0) {
    outcome[0] = 1, outcome[1] = accepted, outcome[2] = tokens, outcome[3] = end;
    *count = tokens;
  }
}

extern "C" __global__ void __launch_bounds__(32)
commit_rows(int* __restrict__ all, int* __restrict__ ring, int* __restrict__ pinned,
            int* __restrict__ length, const int* __restrict__ count, int sink, int n_rows) {
  int row = threadIdx.x, start = *length, n = *count;
  __syncwarp();                                        // every lane has read it
  int position = row < n ? start + row : -1;
  if (row < n_rows) {
    all[row] = position;
    pinned[row] = position < sink ? position : -1;
    ring[row] = position < sink ? -1 : position;
  }
  if (row == 0) *length = start + n;
}
