// Accumulator fragments to BF16 rows in global memory, 16 bytes a lane.
#pragma once
#include <cstdint>

#include "../params.h"

namespace dm::sm90 {

__device__ __forceinline__ uint32_t to_bf16x2(float lo, float hi) {
  uint32_t r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
  return r;
}

// 4x4 transposition over the quad: on return a[k] is what lane k of the quad held in a[t], t this lane's place.
__device__ __forceinline__ void quad_transpose(uint32_t (&a)[4], int t) {
  const bool odd = t & 1, high = t & 2;
  uint32_t x = __shfl_xor_sync(~0u, odd ? a[0] : a[1], 1), y = __shfl_xor_sync(~0u, odd ? a[2] : a[3], 1);
  if (odd) {
    a[0] = x;
    a[2] = y;
  } else {
    a[1] = x;
    a[3] = y;
  }
  x = __shfl_xor_sync(~0u, high ? a[0] : a[2], 2), y = __shfl_xor_sync(~0u, high ? a[1] : a[3], 2);
  if (high) {
    a[0] = x;
    a[1] = y;
  } else {
    a[2] = x;
    a[3] = y;
  }
}

__device__ __forceinline__ uint16_t* row_of(const Bf16View& v, int b, int token, int head) {
  return static_cast<uint16_t*>(v.data) + b * v.batch_stride + token * v.token_stride + head * v.head_stride;
}

// Stores 32 columns (4 blocks of 8) of one row: value(j, e) is column 8*j + 2*t + e of the fragment.
template <typename Value>
__device__ __forceinline__ void store_row32(uint16_t* row, bool valid, int t, Value value) {
  uint32_t a[4];
#pragma unroll
  for (int j = 0; j < 4; j++) a[j] = to_bf16x2(value(j, 0), value(j, 1));
  quad_transpose(a, t);
  if (valid) *reinterpret_cast<uint4*>(row + 8 * t) = make_uint4(a[0], a[1], a[2], a[3]);
}

}  // namespace dm::sm90
