// Forward at D = 256: one CTA per 128 queries, two consumer warpgroups of 240 registers, tiles of 64 keys (one V scale each).
//
// The arithmetic of kernel.cuh; scores of the next tile are issued before the product of this one.
#pragma once
#include "parts.cuh"

namespace dm::sm90 {

template <typename C>
__device__ __forceinline__ void forward256_produce(const ForwardParams& p, Work work, int tiles, uint32_t smem,
                                                ForwardBarriers<C> bars) {
  const Shape& shape = p.shape;
  const int batch = work.bh / shape.heads, head = work.bh - batch * shape.heads;
  const int64_t kv = int64_t(batch) * shape.kv_heads + head / (shape.heads / shape.kv_heads);
  const int64_t unit0 = kv * shape.n_k;
  barrier_expect(bars.q_full(), C::Q::kBytes);
  bulk_copy(smem + C::kQ, p.q_row + (int64_t(work.bh) * shape.n_q + work.unit) * C::Q::kBytes, C::Q::kBytes, bars.q_full());
  Ring<C::kStages> ring;
#pragma unroll 1
  for (int tile = tiles - 1; tile >= 0; tile--, ring.next()) {
    const int s = ring.stage;
    const int64_t unit = unit0 + tile / (kUnit / C::kTile);
    const int half = tile % (kUnit / C::kTile);
    const float2 k_scale = *reinterpret_cast<const float2*>(p.k_scale + 2 * unit);
    const uint8_t* k = p.k_row + unit * (kUnit * C::D) + half * C::K::kPanelBytes;
    barrier_wait(bars.k_empty(s), ring.parity ^ 1);
    const uint32_t scalars = smem + C::kScalars + s * C::kScalarBytes;
    store_shared2(scalars + 32, k_scale.x, k_scale.y);
    barrier_expect(bars.k_full(s), C::K::kBytes + 32);
    bulk_copy(scalars, p.v_fold + unit * kFoldFloats, 32, bars.k_full(s));
#pragma unroll
    for (int panel = 0; panel < C::K::kPanels; panel++)
      bulk_copy(smem + C::kK + s * C::K::kBytes + panel * C::K::kPanelBytes, k + panel * (kUnit * C::K::kRowBytes),
                C::K::kPanelBytes, bars.k_full(s));
    barrier_wait(bars.v_empty(s), ring.parity ^ 1);
    barrier_expect(bars.v_full(s), C::V::kBytes);
    bulk_copy(smem + C::kV + s * C::V::kBytes, p.v_t + unit * (kUnit * C::D) + half * C::V::kBytes, C::V::kBytes,
              bars.v_full(s));
  }
}

template <typename C>
__device__ __forceinline__ void forward256_consume(const ForwardParams& p, Work work, int section, int tiles, uint32_t smem,
                                                ForwardBarriers<C> bars, int wg) {
  constexpr int D = C::D, kChunks = D / C::kChunk;
  const Shape& shape = p.shape;
  const int lane = threadIdx.x % 32, t = lane % 4;
  const int local_row = 64 * wg + 16 * (threadIdx.x % 128 / 32) + lane / 4;
  const int row0 = kUnit * work.unit + local_row;
  const bool leader = threadIdx.x % 32 == 0;  // a lane of every warp: plain loads of a stage are not ordered across warps
  const int wg_limit = key_limit(shape, kUnit * work.unit + 64 * wg);  // keys that every row of this warpgroup sees
  const int base0 = row_base(shape, row0);

  const uint32_t q_op = operand(smem + C::kQ + 64 * wg * C::Q::kRowBytes);
  const uint32_t k_op = operand(smem + C::kK), v_op = operand(smem + C::kV);
  const float query = query_factor(p.q_scale[int64_t(work.bh) * shape.n_q + work.unit], shape.softmax_scale_log2);

  float o[D / 2], s[C::kTile / 2], reference[2] = {-1e30f, -1e30f}, l[2] = {0.f, 0.f}, top[2] = {-INFINITY, -INFINITY};
  uint32_t codes[C::kTile / 8];
#pragma unroll
  for (int i = 0; i < D / 2; i++) o[i] = 0.f;

  auto issue_s = [&](int stage) {
    fence_regs(s);
    wgmma_fence();
    issue_scores<typename C::Q, typename C::K>(s, q_op, advance(k_op, stage * C::K::kBytes));
    wgmma_commit();
  };

  Ring<C::kStages> ring;
  if (tiles > 0) {
    barrier_wait(bars.q_full(), 0);
    barrier_wait(bars.k_full(0), 0);
    issue_s(0);
  }
#pragma unroll 1
  for (int tile = tiles - 1; tile >= 0; tile--) {
    wgmma_wait<0>();
    fence_regs(s);
    const ForwardScalars<C> x(smem + C::kScalars + ring.stage * C::kScalarBytes, query, tile);
    __syncwarp();
    if (leader) barrier_arrive(bars.k_empty(ring.stage));

    if ((tile + 1) * C::kTile > wg_limit) {
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const int visible = limit_of(base0 + 8 * r, shape) - tile * C::kTile - 2 * t;
#pragma unroll
        for (int j = 0; j < C::kTile / 8; j++)
#pragma unroll
          for (int e = 0; e < 2; e++)
            if (8 * j + e >= visible) s[4 * j + 2 * r + e] = -INFINITY;
      }
    }

    float weight[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
      float base = -INFINITY;
#pragma unroll
      for (int j = 0; j < 8; j++) base = fmaxf(base, fmaxf(s[4 * j + 2 * r], s[4 * j + 2 * r + 1]));
      base = quad_max(base * x.c[0]);
      top[r] = fmaxf(top[r], base);
      if (base > reference[r] + 32.f) {
        const float shrink = exp2_approx(reference[r] - base);
        l[r] *= shrink;
#pragma unroll
        for (int j = 0; j < D / 8; j++) o[4 * j + 2 * r] *= shrink, o[4 * j + 2 * r + 1] *= shrink;
        reference[r] = base;
      }
      weight[r] = exp2_approx(base - reference[r]);  // 0 where this tile shows the row no key
      const float offset = kLog2MaxE4m3 - (base == -INFINITY ? 0.f : base);
      float sum = 0.f;
#pragma unroll
      for (int j = 0; j < 8; j++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
          float& v = s[4 * j + 2 * r + e];
          v = exp2_approx(__fmaf_rn(v, x.c[0], offset));
          sum += v;
        }
      l[r] = fmaf(sum, weight[r], l[r]);
    }
    pack_codes(s, codes);
    fence_regs(codes);

    const Ring<C::kStages> now = ring;
    ring.next();
    const uint32_t v = advance(v_op, now.stage * C::V::kBytes);
    auto promote = [&](int chunk, float (&acc)[C::kChunk / 2], float w0, float w1) {
      fence_regs(acc);
#pragma unroll
      for (int i = 0; i < C::kChunk / 2; i++) {
        float& out = o[chunk * (C::kChunk / 2) + i];
        out = fmaf(acc[i], i & 2 ? w1 : w0, out);
      }
    };
    float w0 = weight[0], w1 = weight[1];
    w0 *= x.v_scale[0];
    w1 *= x.v_scale[0];
    fence_regs(codes);
    if (tile > 0) {
      barrier_wait(bars.k_full(ring.stage), ring.parity);
      issue_s(ring.stage);
    }
    barrier_wait(bars.v_full(now.stage), now.parity);
    float part[2][C::kChunk / 2];
    auto issue_pv = [&](int chunk, float (&acc)[C::kChunk / 2]) {
      fence_regs(acc);
      wgmma_fence();
      issue_product<typename C::V>(acc, codes, v, chunk * C::kChunk);
      wgmma_commit();
    };
    issue_pv(0, part[0]);
    issue_pv(1, part[1]);
#pragma unroll
    for (int chunk = 0; chunk < kChunks; chunk++) {
      if (chunk + 1 < kChunks)
        wgmma_wait<1>();
      else
        wgmma_wait<0>();
      promote(chunk, part[chunk & 1], w0, w1);
      if (chunk + 2 < kChunks) issue_pv(chunk + 2, part[chunk & 1]);
    }
    __syncwarp();
    if (leader) barrier_arrive(bars.v_empty(now.stage));
  }
  wgmma_wait<0>();
  fence_regs(s);

  const Work again = pick_work(fresh_block(), shape.n_q, shape.batch * shape.heads, section, shape.causal != 0);
  forward_store<C>(p, again.bh, 2 * again.unit + fresh_thread() / 128 - 1, o, reference, l, top);
}

template <int D>
__global__ void __launch_bounds__(ForwardConfig<D>::kThreads, 1)
    forward256_kernel(const __grid_constant__ ForwardParams p, const int section) {
  using C = ForwardConfig<D>;
  extern __shared__ __align__(1024) uint8_t shared[];
  const uint32_t smem = shared_address(shared);
  const ForwardBarriers<C> bars{smem + C::kBarriers};
  const Shape& shape = p.shape;
  const Work work = pick_work(blockIdx.x, shape.n_q, shape.batch * shape.heads, section, shape.causal != 0);
  const int last_row = min(kUnit * work.unit + kUnit, shape.t_q) - 1;
  const int tiles = (key_limit(shape, last_row) + C::kTile - 1) / C::kTile;
  if (threadIdx.x == 0) bars.init();
  __syncthreads();
  const int wg = __shfl_sync(~0u, threadIdx.x / 128, 0);
  if (wg == 0) {
    set_max_registers_down<24>();
    if (threadIdx.x == 0 && tiles > 0) forward256_produce<C>(p, work, tiles, smem, bars);
  } else {
    set_max_registers_up<240>();
    forward256_consume<C>(p, work, section, tiles, smem, bars, wg - 1);
  }
}

template <int D>
cudaError_t launch_forward256(const ForwardParams& params, cudaStream_t stream) {
  using C = ForwardConfig<D>;
  const Shape& s = params.shape;
  const int n_bh = s.batch * s.heads;
  if (s.n_q == 0 || n_bh == 0) return cudaSuccess;
  const int section = heads_of_section(2 * int64_t(s.n_k) * kUnit * D, s.heads / s.kv_heads, s.n_q, n_bh);
  cudaError_t error = cudaFuncSetAttribute(forward256_kernel<D>, cudaFuncAttributeMaxDynamicSharedMemorySize, C::kBytes);
  if (error != cudaSuccess) return error;
  forward256_kernel<D><<<dim3(unsigned(s.n_q) * unsigned(n_bh)), C::kThreads, C::kBytes, stream>>>(params, section);
  return cudaGetLastError();
}

}  // namespace dm::sm90
