// The quantise pre-pass: BF16 tensors -> E4M3 images and FP32 scales (formats: params.h).
#pragma once
#include <cuda_runtime.h>

#include "config.h"

namespace dm::sm90 {

// x [B,T,heads,D] with any strides, in elements. Outputs that are null are not made.
struct QuantiseParams {
  const void* x;
  int64_t batch_stride, token_stride, head_stride, channel_stride;
  int32_t batch, heads, tokens, units, head_dim;
  int32_t vectors;               // 1: channel_stride is 1 and every row starts on 16 bytes
  int32_t probe;                 // 1: fill `stats`
  const float* mean;             // [B,heads,D] subtracted from x, or null
  uint8_t *row, *token;          // images [B,heads,units], 128*D bytes each
  float* scale;                  // query, grad [B,heads,units]; key_value [B,heads,2*units]
  float* fold;                   // key_value: [B,heads,units,8]
  unsigned long long* stats;     // [4] saturated, underflowed, non-finite: added to; amax bits: maximum. Zeroed by the caller
  // query: dot[b,h,i] = <x_i, key_mean[b, h / group]>, padding 0
  const float* key_mean;         // [B,heads/group,D] or null
  float* dot;                    // [B,heads,units*128]
  int32_t group;
  // grad: x is dO
  const void* o;                 // bf16 [B,T,heads,D] contiguous, 16-byte aligned: the centred O
  const float *lse2, *m2;        // [B,heads,units*128]
  float *d0_stale, *d0_cons;     // [B,heads,units*128] <dO,O>, <dO_hat,O>; 0 for rows without a key and padding
  float* lambda;                 // [B,heads,units*128] LSE2 - E; +inf for rows without a key and padding
  float* e_pow;                  // [B,heads,units] 2^-E
};

cudaError_t run_quantise(const QuantiseParams& p, Operand operand, cudaStream_t stream);

// Mean over tokens, non-finite entries counted as 0. partial: FP32 [B,heads,ceil(T/64),D] scratch; mean [B,heads,D].
struct MeanParams {
  const void* x;
  int64_t batch_stride, token_stride, head_stride, channel_stride;
  int32_t batch, heads, tokens, head_dim, vectors;
  float *partial, *mean;
};

cudaError_t run_mean(const MeanParams& p, cudaStream_t stream);

template <int D>
cudaError_t launch_quantise(const QuantiseParams& p, Operand operand, cudaStream_t stream);
template <int D>
cudaError_t launch_mean(const MeanParams& p, cudaStream_t stream);

}  // namespace dm::sm90
