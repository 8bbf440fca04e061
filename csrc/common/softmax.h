// The expressions that delta, dq and dkv must evaluate bit for bit alike: P and dS of one score.
//   p' = 2^E P = ex2(fma(s, c, -lambda))    c = fl(fl(scale_q * kappa) * scale_k)
//   dS' = p' * fma(dp, cd, -delta)          cd = fl(scale_do * scale_v)
#pragma once

namespace dm::sm90 {

__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float reciprocal_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float query_factor(float q_scale, float kappa) { return __fmul_rn(q_scale, kappa); }
__device__ __forceinline__ float score_factor(float query_factor, float k_scale) { return __fmul_rn(query_factor, k_scale); }
__device__ __forceinline__ float dp_factor(float do_scale, float v_scale) { return __fmul_rn(do_scale, v_scale); }

__device__ __forceinline__ float log2_p(float s, float c, float neg_lambda) { return __fmaf_rn(s, c, neg_lambda); }
__device__ __forceinline__ float p_value(float s, float c, float neg_lambda) { return exp2_approx(log2_p(s, c, neg_lambda)); }
__device__ __forceinline__ float dp_minus(float dp, float cd, float neg_delta) { return __fmaf_rn(dp, cd, neg_delta); }

// Reductions over the four lanes that share a row.
__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

}  // namespace dm::sm90
