// One seeded fault per kernel: the test of the emulator. All launch 64 threads on float a[64].
extern "C" __global__ void correct(float* a, int n) {
  __shared__ float s[64];
  int t = threadIdx.x;
  s[t] = a[t];
  __syncthreads();
  float v = s[63 - t];
  v += __shfl_xor_sync(~0u, v, 1);
  a[t] = v + n;
}

extern "C" __global__ void missing_barrier(float* a, int n) {
  __shared__ float s[64];
  int t = threadIdx.x;
  s[t] = a[t];
  a[t] = s[t ^ 33];
}

extern "C" __global__ void missing_second_barrier(float* a, int n) {
  __shared__ float s[64];
  int t = threadIdx.x;
  float v = 0;
  for (int i = 0; i < 4; i++) {
    s[t] = a[t] + i;
    __syncthreads();
    v += s[t ^ 33];
  }
  a[t] = v;
}

extern "C" __global__ void missing_syncwarp(float* a, int n) {
  __shared__ float s[64];
  int t = threadIdx.x;
  s[t] = a[t];
  a[t] = s[t ^ 1];
}

extern "C" __global__ void divergent_shuffle(float* a, int n) {
  int t = threadIdx.x;
  float v = a[t];
  if (t % 32 < 16) v += __shfl_xor_sync(~0u, v, 1);
  a[t] = v;
}

extern "C" __global__ void shuffle_outside_mask(float* a, int n) {
  int t = threadIdx.x;
  float v = a[t];
  if (t % 32 < 16) v += __shfl_xor_sync(0xffffu, v, 16);
  a[t] = v;
}

extern "C" __global__ void shuffle_after_return(float* a, int n) {
  int t = threadIdx.x;
  if (t == 40) return;
  float v = a[t];
  a[t] = v + __shfl_xor_sync(~0u, v, 1);
}

extern "C" __global__ void barrier_in_a_branch(float* a, int n) {
  if (threadIdx.x < 32) __syncthreads();
  a[threadIdx.x] = 1;
}

extern "C" __global__ void barrier_at_two_places(float* a, int n) {
  if (threadIdx.x < 32) {
    __syncthreads();
  } else {
    __syncthreads();
  }
  a[threadIdx.x] = 1;
}

extern "C" __global__ void barrier_after_return(float* a, int n) {
  if (threadIdx.x >= 60) return;
  __syncthreads();
  a[threadIdx.x] = 1;
}

extern "C" __global__ void unwritten_shared(float* a, int n) {
  __shared__ float s[64];
  int t = threadIdx.x;
  if (t & 1) s[t] = a[t];
  __syncthreads();
  a[t] = s[t];
}

extern "C" __global__ void shared_past_the_end(float* a, int n) {
  __shared__ float s[64];
  int t = threadIdx.x;
  s[t] = a[t];
  __syncthreads();
  a[t] = s[t + 4096 + n];
}

extern "C" __global__ void global_read_past_the_end(float* a, int n) {
  float v = a[threadIdx.x == 9 ? 64 + n : threadIdx.x];
  a[threadIdx.x] = v;
}

extern "C" __global__ void global_write_past_the_end(float* a, int n) {
  if (threadIdx.x == 0) a[64 + n] = 1;
}

extern "C" __global__ void misaligned(float* a, int n) {
  if (threadIdx.x == 0) *reinterpret_cast<float4*>(a + 1 + n) = make_float4(1, 2, 3, 4);
}

extern "C" __global__ void two_blocks_one_address(float* a, int n) {
  if (blockIdx.x == 0) {
    a[threadIdx.x] = 1;
  } else {
    a[threadIdx.x] += 2;
  }
}

extern "C" __global__ void shift_too_far(float* a, int n) {
  a[threadIdx.x] = 1 << (threadIdx.x + n);
}

extern "C" __global__ void products(float* a, int n) {
  // subnormals, contraction: a * b + c in two roundings and in one
  a[0] = a[1] * a[2] + a[3];
  a[4] = __fmaf_rn(a[1], a[2], a[3]);
  a[5] = a[6] * a[7];
  a[8] = a[9] * (float)(1 + n);
}

extern "C" __global__ void strided_read(float* a, int n) {
  float v = threadIdx.x < 32 ? a[2 * threadIdx.x] : 0;
  __syncthreads();
  a[threadIdx.x] = v;
}

extern "C" __global__ void read_off_by_a_sector(float* a, int n) {
  float v = threadIdx.x < 32 ? a[threadIdx.x + 4] : 0;
  __syncthreads();
  a[threadIdx.x] = v;
}

extern "C" __global__ void bank_conflict(float* a, int n) {
  __shared__ float s[32][32];
  int t = threadIdx.x;
  if (t < 32) s[t][0] = a[t];
  __syncthreads();
  a[t] = s[t % 32][0];
}

extern "C" __global__ void bank_conflict_of_16_bytes(float* a, int n) {
  __shared__ float4 s[64];
  int t = threadIdx.x;
  s[t] = make_float4(a[t], 1, 2, 3);
  __syncthreads();
  a[t] = s[8 * (t % 8)].x + s[t].y;
}
