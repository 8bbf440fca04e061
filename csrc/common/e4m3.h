// E4M3 casts of accumulator fragments.
#pragma once
#include <cstdint>

namespace dm::sm90 {

constexpr float kMaxE4m3 = 448.0f;
constexpr float kLog2MaxE4m3 = 8.807354922057604f;  // log2(448)
constexpr float kRoundsToMax = 432.0f;              // |x| >= this becomes the code 448
constexpr float kRoundsToZero = 9.765625e-4f;       // |x| <= 2^-10 becomes the code 0
constexpr float kSmallestAmax = 1.32e-36f;          // below it 448 / amax is not finite: the block is stored as zeros

// 448 / amax, correctly rounded but for rare last-bit cases, without a call; 0 where it would not be finite.
__device__ __forceinline__ float code_factor(float amax) {
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(amax));
  const float q = kMaxE4m3 * r;
  return amax > kSmallestAmax ? __fmaf_rn(__fmaf_rn(-q, amax, kMaxE4m3), r, q) : 0.f;
}

// Codes of a0..a3 in bytes 0..3: round to nearest even, saturating, NaN stays NaN.
__device__ __forceinline__ uint32_t to_e4m3x4(float a0, float a1, float a2, float a3) {
  uint32_t r;  // one block: the halves stay together and ptxas merges them without a PRMT
  asm("{ .reg .b16 lo, hi;\n"
      "cvt.rn.satfinite.e4m3x2.f32 lo, %2, %1;\n"
      "cvt.rn.satfinite.e4m3x2.f32 hi, %4, %3;\n"
      "mov.b32 %0, {lo, hi}; }"
      : "=r"(r)
      : "f"(a0), "f"(a1), "f"(a2), "f"(a3));
  return r;
}

// The four values of a code register.
__device__ __forceinline__ void from_e4m3x4(uint32_t code, float (&v)[4]) {
  uint16_t lo, hi;
  asm("mov.b32 {%0, %1}, %2;" : "=h"(lo), "=h"(hi) : "r"(code));
  uint32_t h[2];
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(h[0]) : "h"(lo));
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(h[1]) : "h"(hi));
#pragma unroll
  for (int i = 0; i < 2; i++)
    asm("{ .reg .b16 a, b; mov.b32 {a, b}, %2; cvt.f32.f16 %0, a; cvt.f32.f16 %1, b; }"
        : "=f"(v[2 * i]), "=f"(v[2 * i + 1])
        : "r"(h[i]));
}

// 64 columns of an accumulator (32 values a thread) -> the A fragments of two k-steps of 32. The position of column
// c inside the A operand is pi^-1(c): operand images hold their tokens in pi order (params.h), so no data moves.
// codes[4*k + 2*half + row]: k-step k, columns 16*half.. of it, row (+8).
__device__ __forceinline__ void pack_codes(const float* s, uint32_t* codes) {
#pragma unroll
  for (int k = 0; k < 2; k++) {
    const float* x = s + 16 * k;
    codes[4 * k + 0] = to_e4m3x4(x[0], x[1], x[4], x[5]);
    codes[4 * k + 1] = to_e4m3x4(x[2], x[3], x[6], x[7]);
    codes[4 * k + 2] = to_e4m3x4(x[8], x[9], x[12], x[13]);
    codes[4 * k + 3] = to_e4m3x4(x[10], x[11], x[14], x[15]);
  }
}

}  // namespace dm::sm90
