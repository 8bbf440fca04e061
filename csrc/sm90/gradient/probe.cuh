// Row statistics of dS, P and their codes: only in the probe instantiation of dq.
#pragma once
#include <cstdint>

#include "../../common/e4m3.h"
#include "../../common/softmax.h"
#include "../../params.h"

namespace dm::sm90 {

// A running FP32 sum with its rounding error kept, so that a row sum near zero is measured and not made of round-off.
struct CompensatedSum {
  float value = 0.f, error = 0.f;
  __device__ __forceinline__ void add(float x) {
    const float sum = __fadd_rn(value, x), shadow = __fsub_rn(sum, value);
    error = __fadd_rn(error, __fadd_rn(__fsub_rn(value, __fsub_rn(sum, shadow)), __fsub_rn(x, shadow)));
    value = sum;
  }
  __device__ __forceinline__ float total() const { return value + error; }
};

struct RowProbe {
  CompensatedSum ds, cast;
  float ds_abs = 0.f, cast_abs = 0.f, p = 0.f, p_log = 0.f, top = 0.f;
};

struct CodeProbe {
  uint32_t saturated = 0, underflowed = 0, nonfinite = 0;
  __device__ __forceinline__ void count(float scaled, float value) {
    saturated += fabsf(scaled) >= kRoundsToMax;
    underflowed += fabsf(scaled) <= kRoundsToZero && value != 0.f;
    nonfinite += !(fabsf(scaled) <= 3e38f);
  }
  __device__ __forceinline__ void flush(unsigned long long* out) const {
    const uint32_t x[3] = {saturated, underflowed, nonfinite};
#pragma unroll
    for (int i = 0; i < 3; i++) {
      const uint32_t sum = __reduce_add_sync(~0u, x[i]);
      if (threadIdx.x % 32 == 0 && sum) atomicAdd(out + i, static_cast<unsigned long long>(sum));
    }
  }
};

// Row totals over the quad to the output vectors; everything in units of normalised P.
__device__ __forceinline__ void store_row_probe(const DqParams& p, RowProbe& x, int64_t at, int t, float e_pow) {
  CompensatedSum ds, cast;
#pragma unroll
  for (int lane = 0; lane < 4; lane++) {  // fixed order over the quad
    ds.add(__shfl_sync(~0u, x.ds.value, lane, 4));
    ds.add(__shfl_sync(~0u, x.ds.error, lane, 4));
    cast.add(__shfl_sync(~0u, x.cast.value, lane, 4));
    cast.add(__shfl_sync(~0u, x.cast.error, lane, 4));
  }
  const float ds_abs = quad_sum(x.ds_abs), cast_abs = quad_sum(x.cast_abs), top = quad_max(x.top);
  const float p_sum = quad_sum(x.p), p_log = quad_sum(x.p_log);
  if (t != 0) return;
  p.row_sum[at] = ds.total() * e_pow;
  p.row_abs_sum[at] = ds_abs * e_pow;
  p.row_sum_cast[at] = cast.total() * e_pow;
  p.row_abs_sum_cast[at] = cast_abs * e_pow;
  p.top_p[at] = top * e_pow;
  // log2 P = log2 p' + log2 e_pow
  p.entropy[at] = p_sum == 0.f ? 0.f : -0.69314718056f * e_pow * (p_log + p_sum * log2f(e_pow));
}

}  // namespace dm::sm90
