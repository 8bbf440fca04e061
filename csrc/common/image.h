// Operand images in shared memory (params.h describes their bytes): sizes, k-steps, descriptors.
#pragma once
#include <cstdint>

#include "wgmma.h"

namespace dm::sm90 {

// ROWS tokens of a row image: [panels][ROWS][ROW_BYTES].
template <int D, int ROWS>
struct RowImage {
  static constexpr int kRowBytes = D < 128 ? D : 128;
  static constexpr int kPanels = D / kRowBytes;
  static constexpr int kPanelBytes = ROWS * kRowBytes;
  static constexpr int kBytes = ROWS * D;
  static constexpr int kSteps = D / 32;  // wgmma k-steps
  __device__ static __forceinline__ constexpr int step(int k) {
    return (k * 32 / kRowBytes) * kPanelBytes + (k * 32) % kRowBytes;
  }
  __device__ static __forceinline__ uint64_t desc(uint32_t operand) { return descriptor<kRowBytes>(operand); }
};

// TOKENS tokens of a token image: [D][TOKENS bytes]; rows d, contraction over tokens.
template <int D, int TOKENS>
struct TokenImage {
  static constexpr int kRowBytes = TOKENS;
  static constexpr int kBytes = TOKENS * D;
  static constexpr int kSteps = TOKENS / 32;
  __device__ static __forceinline__ uint64_t desc(uint32_t operand) { return descriptor<kRowBytes>(operand); }
};

// Starts acc = A[64 rows] B[N rows]^T over D, both row images in shared memory; the caller commits.
template <typename ImageA, typename ImageB, int R>
__device__ __forceinline__ void issue_scores(float (&acc)[R], uint32_t a, uint32_t b) {
#pragma unroll
  for (int k = 0; k < ImageA::kSteps; k++)
    mma_ss(acc, ImageA::desc(advance(a, ImageA::step(k))), ImageB::desc(advance(b, ImageB::step(k))), k != 0);
}

// Starts acc = codes[64 rows] XT[rows d0.. of a token image]^T over the window's tokens; the caller commits.
template <typename Image, int R>
__device__ __forceinline__ void issue_product(float (&acc)[R], const uint32_t* codes, uint32_t b, int d0) {
#pragma unroll
  for (int k = 0; k < Image::kSteps; k++)
    mma_rs(acc, codes + 4 * k, Image::desc(advance(b, d0 * Image::kRowBytes + 32 * k)), k != 0);
}

}  // namespace dm::sm90
