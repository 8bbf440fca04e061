// Matched delta: delta_i = d0_i + sum_j P_ij (dP_hat_ij - d0_i) / sum_j P_ij, one CTA per 192 queries of a head.
//
// S and dP are recomputed from the codes, bit for bit what dq and dkv compute; sums are FP32, a tile's partial before the
// running sum, so that rows of dS add up to FP32 rounding.
#pragma once
#include "../../common/copy.h"
#include "../../common/mask.h"
#include "../../common/softmax.h"
#include "config.h"
#include "kernel.h"

namespace dm::sm90 {

template <typename C>
struct DeltaBarriers {
  uint32_t base;
  __device__ __forceinline__ uint32_t full(int s) const { return base + 8 * s; }
  __device__ __forceinline__ uint32_t empty(int s) const { return base + 8 * (C::kStages + s); }
  __device__ __forceinline__ uint32_t q_full() const { return base + 8 * (2 * C::kStages); }
  __device__ __forceinline__ void init() const {
    for (int s = 0; s < C::kStages; s++) {
      barrier_init(full(s), 1);
      barrier_init(empty(s), 4 * C::kWarpgroups);  // every warp
    }
    barrier_init(q_full(), 1);
    barrier_init_fence();
  }
};

// The 64-query half unit of a warpgroup; past the last one it repeats the last, and stores nothing.
template <typename C>
__device__ __forceinline__ int delta_half(const Shape& shape, int block, int wg) {
  return min(C::kWarpgroups * block + wg, 2 * shape.n_q - 1);
}

template <typename C>
__device__ __forceinline__ void delta_produce(const DeltaParams& p, Work work, int tiles, uint32_t smem,
                                              DeltaBarriers<C> bars) {
  const Shape& shape = p.shape;
  const int batch = work.bh / shape.heads, head = work.bh - batch * shape.heads;
  const int64_t unit0 = (int64_t(batch) * shape.kv_heads + head / (shape.heads / shape.kv_heads)) * shape.n_k;
  barrier_expect(bars.q_full(), 2 * C::kWarpgroups * C::Q::kBytes);
  for (int wg = 0; wg < C::kWarpgroups; wg++) {
    const int half = delta_half<C>(shape, work.unit, wg);
    const int64_t from = (int64_t(work.bh) * shape.n_q + half / 2) * (kUnit * C::D) + half % 2 * C::Q::kPanelBytes;
#pragma unroll
    for (int panel = 0; panel < C::Q::kPanels; panel++) {
      const int64_t at = from + panel * (kUnit * C::Q::kRowBytes);
      const uint32_t to = smem + wg * C::Q::kBytes + panel * C::Q::kPanelBytes;
      bulk_copy(to + C::kQ, p.q_row + at, C::Q::kPanelBytes, bars.q_full());
      bulk_copy(to + C::kDo, p.do_row + at, C::Q::kPanelBytes, bars.q_full());
    }
  }
  Ring<C::kStages> ring;
#pragma unroll 1
  for (int tile = tiles - 1; tile >= 0; tile--, ring.next()) {
    const int s = ring.stage;
    const int64_t unit = unit0 + tile;
    const float2 k_scale = *reinterpret_cast<const float2*>(p.k_scale + 2 * unit);
    const float2 v_scale = *reinterpret_cast<const float2*>(p.v_scale + 2 * unit);
    barrier_wait(bars.empty(s), ring.parity ^ 1);
    store_shared4(smem + C::kScalars + s * C::kScalarBytes, k_scale.x, k_scale.y, v_scale.x, v_scale.y);
    barrier_expect(bars.full(s), 2 * C::K::kBytes);
    bulk_copy(smem + C::kK + s * C::K::kBytes, p.k_row + unit * C::K::kBytes, C::K::kBytes, bars.full(s));
    bulk_copy(smem + C::kV + s * C::K::kBytes, p.v_row + unit * C::K::kBytes, C::K::kBytes, bars.full(s));
  }
}

template <typename C>
__device__ __forceinline__ void delta_consume(const DeltaParams& p, Work work, int tiles, uint32_t smem,
                                              DeltaBarriers<C> bars, int wg) {
  const Shape& shape = p.shape;
  const int lane = threadIdx.x % 32, t = lane % 4;
  const int half = delta_half<C>(shape, work.unit, wg);
  const int row0 = 64 * half + 16 * (threadIdx.x % 128 / 32) + lane / 4;
  const bool leader = threadIdx.x % 32 == 0;  // a lane of every warp: plain loads of a stage are not ordered across warps
  const int wg_limit = key_limit(shape, 64 * half);
  const int base0 = row_base(shape, row0);
  const int64_t at = int64_t(work.bh) * shape.n_q * kUnit + row0, unit = int64_t(work.bh) * shape.n_q + half / 2;
  const float lambda[2] = {p.lambda[at], p.lambda[at + 8]}, d0[2] = {p.d0[at], p.d0[at + 8]};
  const float query = query_factor(p.q_scale[unit], shape.softmax_scale_log2), do_scale = p.do_scale[unit];

  barrier_wait(bars.q_full(), 0);
  const uint32_t q_op = operand(smem + C::kQ + wg * C::Q::kBytes), do_op = operand(smem + C::kDo + wg * C::Q::kBytes);
  const uint32_t k_op = operand(smem + C::kK), v_op = operand(smem + C::kV);

  float e[2] = {0.f, 0.f}, z[2] = {0.f, 0.f};
  Ring<C::kStages> ring;
#pragma unroll 1
  for (int tile = tiles - 1; tile >= 0; tile--, ring.next()) {
    barrier_wait(bars.full(ring.stage), ring.parity);
    const uint32_t k = advance(k_op, ring.stage * C::K::kBytes), v = advance(v_op, ring.stage * C::K::kBytes);
    float s[C::kTile / 2], dp[C::kTile / 2];
    fence_regs(s);
    fence_regs(dp);
    wgmma_fence();
    issue_scores<typename C::Q, typename C::K>(s, q_op, k);
    wgmma_commit();
    issue_scores<typename C::Q, typename C::K>(dp, do_op, v);
    wgmma_commit();
    const float4 scale = load_shared4(smem + C::kScalars + ring.stage * C::kScalarBytes);
    const float c[2] = {score_factor(query, scale.x), score_factor(query, scale.y)};
    const float cd[2] = {dp_factor(do_scale, scale.z), dp_factor(do_scale, scale.w)};
    wgmma_wait<1>();
    fence_regs(s);
#pragma unroll
    for (int i = 0; i < C::kTile / 2; i++) s[i] = p_value(s[i], c[i / 32], -lambda[i >> 1 & 1]);
    wgmma_wait<0>();
    fence_regs(dp);
    __syncwarp();
    if (leader) barrier_arrive(bars.empty(ring.stage));
    if ((tile + 1) * C::kTile > wg_limit) {
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const int visible = limit_of(base0 + 8 * r, shape) - tile * C::kTile - 2 * t;
#pragma unroll
        for (int j = 0; j < C::kTile / 8; j++)
#pragma unroll
          for (int i = 0; i < 2; i++)
            if (8 * j + i >= visible) s[4 * j + 2 * r + i] = dp[4 * j + 2 * r + i] = 0.f;
      }
    }
#pragma unroll
    for (int g = 0; g < 2; g++) {
      float e_part[2] = {0.f, 0.f}, z_part[2] = {0.f, 0.f};
#pragma unroll
      for (int i = 32 * g; i < 32 * g + 32; i++) {
        const int r = i >> 1 & 1;
        e_part[r] = __fmaf_rn(s[i], dp_minus(dp[i], cd[g], -d0[r]), e_part[r]);
        z_part[r] += s[i];
      }
#pragma unroll
      for (int r = 0; r < 2; r++) e[r] += e_part[r], z[r] += z_part[r];
    }
  }

#pragma unroll
  for (int r = 0; r < 2; r++) {
    e[r] = quad_sum(e[r]);
    z[r] = quad_sum(z[r]);
    const bool empty = z[r] == 0.f || row0 + 8 * r >= shape.t_q;
    if (t == 0 && C::kWarpgroups * work.unit + wg == half) p.delta[at + 8 * r] = empty ? 0.f : d0[r] + __fdiv_rn(e[r], z[r]);
  }
}

template <int D>
__global__ void __launch_bounds__(DeltaConfig<D>::kThreads, 1)
    delta_kernel(const __grid_constant__ DeltaParams p, const int section) {
  using C = DeltaConfig<D>;
  extern __shared__ __align__(1024) uint8_t shared[];
  const uint32_t smem = shared_address(shared);
  const DeltaBarriers<C> bars{smem + C::kBarriers};
  const Shape& shape = p.shape;
  const int blocks = (2 * shape.n_q + C::kWarpgroups - 1) / C::kWarpgroups;
  const Work work = pick_work(blockIdx.x, blocks, shape.batch * shape.heads, section, shape.causal != 0);
  const int last_row = min(C::kRows * (work.unit + 1), shape.t_q) - 1;
  const int tiles = (key_limit(shape, last_row) + C::kTile - 1) / C::kTile;
  if (threadIdx.x == 0) bars.init();
  __syncthreads();
  const int wg = __shfl_sync(~0u, threadIdx.x / 128, 0);
  if (wg == 0) {
    set_max_registers_down<24>();
    if (threadIdx.x == 0) delta_produce<C>(p, work, tiles, smem, bars);
  } else {
    set_max_registers_up<C::kRegisters>();
    delta_consume<C>(p, work, tiles, smem, bars, wg - 1);
  }
}

template <int D>
cudaError_t launch_delta(const DeltaParams& params, cudaStream_t stream) {
  using C = DeltaConfig<D>;
  const Shape& s = params.shape;
  const int n_bh = s.batch * s.heads;
  if (s.n_q == 0 || n_bh == 0) return cudaSuccess;
  const int blocks = (2 * s.n_q + C::kWarpgroups - 1) / C::kWarpgroups;
  const int section = heads_of_section(2 * int64_t(s.n_k) * kUnit * D, s.heads / s.kv_heads, blocks, n_bh);
  cudaError_t error = cudaFuncSetAttribute(delta_kernel<D>, cudaFuncAttributeMaxDynamicSharedMemorySize, C::kBytes);
  if (error != cudaSuccess) return error;
  delta_kernel<D><<<dim3(unsigned(blocks) * unsigned(n_bh)), C::kThreads, C::kBytes, stream>>>(params, section);
  return cudaGetLastError();
}

}  // namespace dm::sm90
