// Forward at D = 64 and 128: O = (P_hat v_hat) / l, LSE2 = log2 sum 2^s, one CTA per 192 queries of a head.
//
// A producer thread streams key tiles (last visible first); three warpgroups of 160 registers own 64 query rows each, so that two
// of them can use the tensor core while the third takes exponentials. A tile's P is cast relative to the tile's own row maximum B:
// code = E4M3(2^(s - B) 448 rho_h), rho_h folding the two V scales of a 128-key tile into one promotion; the tensor core never
// accumulates across tiles: o += t * 2^(B - R) scale_v, R a lazily raised per-row reference. The product takes the registers of S.
#pragma once
#include "parts.cuh"

namespace dm::sm90 {

// Half unit (64 queries) of a warpgroup; one past the last unit has no rows and no tiles.
template <typename C>
__device__ __forceinline__ int forward_half(const Work& work, int wg) {
  return C::kWarpgroups * work.unit + wg;
}

// Key tiles that some row of a half unit sees.
template <typename C>
__device__ __forceinline__ int forward_tiles(const Shape& shape, int half) {
  if (64 * half >= shape.t_q) return 0;
  return (key_limit(shape, min(64 * half + 64, shape.t_q) - 1) + C::kTile - 1) / C::kTile;
}

// What a warpgroup reads of its work in the loop and after it, instead of keeping it in registers: head, half unit, keys that
// every row of it sees, query factor.
template <typename C>
__device__ __forceinline__ uint32_t forward_record(uint32_t smem, int wg) {
  return smem + C::kRecords + 16 * wg;
}
__device__ __forceinline__ int record_head(uint32_t record) { return __float_as_int(load_shared(record)); }
__device__ __forceinline__ int record_half(uint32_t record) { return __float_as_int(load_shared(record + 4)); }
__device__ __forceinline__ int record_keys(uint32_t record) { return __float_as_int(load_shared(record + 8)); }
__device__ __forceinline__ float record_query(uint32_t record) { return load_shared(record + 12); }

template <typename C>
__device__ __forceinline__ void forward_produce(const ForwardParams& p, Work work, int tiles, uint32_t smem,
                                                ForwardBarriers<C> bars) {
  const Shape& shape = p.shape;
  const int batch = work.bh / shape.heads, head = work.bh - batch * shape.heads;
  const int64_t unit0 = (int64_t(batch) * shape.kv_heads + head / (shape.heads / shape.kv_heads)) * shape.n_k;
  const int halves = min(C::kWarpgroups, 2 * shape.n_q - C::kWarpgroups * work.unit);
  barrier_expect(bars.q_full(), halves * 64 * C::D);
  bulk_copy(smem + C::kQ, p.q_row + (int64_t(work.bh) * shape.n_q * kUnit + 64 * C::kWarpgroups * work.unit) * C::D,
            halves * 64 * C::D, bars.q_full());
  Ring<C::kStages> ring;
#pragma unroll 1
  for (int tile = tiles - 1; tile >= 0; tile--, ring.next()) {
    const int s = ring.stage;
    const int64_t unit = unit0 + tile;
    const float2 k_scale = *reinterpret_cast<const float2*>(p.k_scale + 2 * unit);
    barrier_wait(bars.k_empty(s), ring.parity ^ 1);
    const uint32_t scalars = smem + C::kScalars + s * C::kScalarBytes;
    store_shared2(scalars + 32, k_scale.x, k_scale.y);
    barrier_expect(bars.k_full(s), C::K::kBytes + 32);
    bulk_copy(scalars, p.v_fold + unit * kFoldFloats, 32, bars.k_full(s));
    bulk_copy(smem + C::kK + s * C::K::kBytes, p.k_row + unit * C::K::kBytes, C::K::kBytes, bars.k_full(s));
    barrier_wait(bars.v_empty(s), ring.parity ^ 1);
    barrier_expect(bars.v_full(s), C::V::kBytes);
    bulk_copy(smem + C::kV + s * C::V::kBytes, p.v_t + unit * C::V::kBytes, C::V::kBytes, bars.v_full(s));
  }
}

template <typename C>
__device__ __forceinline__ void forward_consume(const ForwardParams& p, Work work, int all_tiles, uint32_t smem,
                                                ForwardBarriers<C> bars, int wg) {
  constexpr int D = C::D;
  const Shape& shape = p.shape;
  const bool leader = threadIdx.x % 32 == 0;  // a lane of every warp: plain loads of a stage are not ordered across warps
  const uint32_t q_op = operand(smem + C::kQ + 64 * wg * C::Q::kRowBytes);
  const uint32_t k_op = operand(smem + C::kK), v_op = operand(smem + C::kV);
  const uint32_t record = forward_record<C>(smem, wg);
  const int tiles = forward_tiles<C>(shape, forward_half<C>(work, wg));

  // One round: the values below then live in a scope of their own. Without it ptxas 13.0 finds too few registers and serialises
  // the products (C7511); csrc/build.py refuses such a build.
#pragma unroll 1
  for (int rounds = 1; rounds > 0; rounds--) {
    float o[D / 2], s[64], reference[2] = {-1e30f, -1e30f}, l[2] = {0.f, 0.f}, top[2] = {-INFINITY, -INFINITY};
    uint32_t codes[16];
#pragma unroll
    for (int i = 0; i < D / 2; i++) o[i] = 0.f;
    auto& s_low = reinterpret_cast<float (&)[32]>(s[0]);
    auto& s_high = reinterpret_cast<float (&)[32]>(s[32]);
    auto& product = reinterpret_cast<float (&)[D / 2]>(s[0]);

    auto issue_s = [&](int stage) {
      fence_regs(s);
      wgmma_fence();
      issue_scores<typename C::Q, typename C::K>(s, q_op, advance(k_op, stage * C::K::kBytes));
      wgmma_commit();
    };

    Ring<C::kStages> ring;
#pragma unroll 1
    for (int tile = all_tiles - 1; tile >= tiles; tile--, ring.next()) {  // tiles that only later warpgroups see
      barrier_wait(bars.k_full(ring.stage), ring.parity);
      barrier_wait(bars.v_full(ring.stage), ring.parity);
      __syncwarp();
      if (leader) {
        barrier_arrive(bars.k_empty(ring.stage));
        barrier_arrive(bars.v_empty(ring.stage));
      }
    }
    if (tiles > 0) {
      barrier_wait(bars.q_full(), 0);
      barrier_wait(bars.k_full(ring.stage), ring.parity);
      issue_s(ring.stage);
    }
#pragma unroll 1
    for (int tile = tiles - 1; tile >= 0; tile--) {
      wgmma_wait<0>();
      fence_regs(s);
      const ForwardScalars<C> x(smem + C::kScalars + ring.stage * C::kScalarBytes, record_query(record), tile);
      __syncwarp();
      if (leader) barrier_arrive(bars.k_empty(ring.stage));

      if ((tile + 1) * C::kTile > record_keys(record)) {
        const int thread = fresh_thread() % 128, t = thread % 4;
        const int base0 = row_base(shape, 64 * record_half(record) + thread / 32 * 16 + thread % 32 / 4);
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

      float base[2], weight[2];
#pragma unroll
      for (int r = 0; r < 2; r++) {
        base[r] = -INFINITY;
#pragma unroll
        for (int g = 0; g < 2; g++) {
          float m[2] = {-INFINITY, -INFINITY};
#pragma unroll
          for (int j = 8 * g; j < 8 * g + 8; j++) m[j & 1] = fmaxf(m[j & 1], fmaxf(s[4 * j + 2 * r], s[4 * j + 2 * r + 1]));
          base[r] = fmaxf(base[r], fmaxf(m[0], m[1]) * x.c[g]);
        }
      }
#pragma unroll
      for (int d = 1; d < 3; d++) {
        const float a = __shfl_xor_sync(~0u, base[0], d), b = __shfl_xor_sync(~0u, base[1], d);
        base[0] = fmaxf(base[0], a), base[1] = fmaxf(base[1], b);
      }
      if (base[0] > reference[0] + 32.f || base[1] > reference[1] + 32.f) {
#pragma unroll
        for (int r = 0; r < 2; r++)
          if (base[r] > reference[r] + 32.f) {
            const float shrink = exp2_approx(reference[r] - base[r]);
            l[r] *= shrink;
#pragma unroll
            for (int j = 0; j < D / 8; j++) o[4 * j + 2 * r] *= shrink, o[4 * j + 2 * r + 1] *= shrink;
            reference[r] = base[r];
          }
      }
#pragma unroll
      for (int r = 0; r < 2; r++) {
        top[r] = fmaxf(top[r], base[r]);
        weight[r] = exp2_approx(base[r] - reference[r]);  // 0 where this tile shows the row no key
        base[r] = kLog2MaxE4m3 - (base[r] == -INFINITY ? 0.f : base[r]);
      }
#pragma unroll
      for (int g = 0; g < 2; g++) {
        float sum[2] = {0.f, 0.f};
        const float offset[2] = {base[0] + x.log2_rho[g], base[1] + x.log2_rho[g]};
#pragma unroll
        for (int j = 8 * g; j < 8 * g + 8; j++)
#pragma unroll
          for (int i = 0; i < 4; i++) {
            float& v = s[4 * j + i];
            v = exp2_approx(__fmaf_rn(v, x.c[g], offset[i / 2]));
            sum[i / 2] += v;
          }
#pragma unroll
        for (int r = 0; r < 2; r++) l[r] = fmaf(sum[r], weight[r] * x.inv_rho[g], l[r]);
        pack_codes(s + 32 * g, codes + 8 * g);
      }
      fence_regs(codes);

      const uint32_t v = advance(v_op, ring.stage * C::V::kBytes);
      float w0 = weight[0], w1 = weight[1];
      barrier_wait(bars.v_full(ring.stage), ring.parity);
      auto promote = [&](int first, float (&acc)[32], float a, float b) {
        fence_regs(acc);
#pragma unroll
        for (int i = 0; i < 32; i++) o[first + i] = fmaf(acc[i], i & 2 ? b : a, o[first + i]);
      };
      if (!x.folded) {  // the two V scales are too far apart: the first half is promoted alone, then contributes zeros
#pragma unroll
        for (int chunk = 0; chunk < D / 64; chunk++) {
          fence_regs(s_low);
          wgmma_fence();
#pragma unroll
          for (int k = 0; k < 2; k++)
            mma_rs(s_low, codes + 4 * k, C::V::desc(advance(v, chunk * 64 * C::V::kRowBytes + 32 * k)), k != 0);
          wgmma_commit();
          wgmma_wait<0>();
          promote(32 * chunk, s_low, w0 * x.v_scale[0], w1 * x.v_scale[0]);
        }
#pragma unroll
        for (int i = 0; i < 8; i++) codes[i] = 0;
      }
      w0 *= x.v_scale[1];
      w1 *= x.v_scale[1];
      fence_regs(codes);
      const Ring<C::kStages> now = ring;
      ring.next();
      fence_regs(product);
      wgmma_fence();
      issue_product<typename C::V>(product, codes, v, 0);
      wgmma_commit();
      wgmma_wait<0>();
      __syncwarp();
      if (leader) barrier_arrive(bars.v_empty(now.stage));
      promote(0, s_low, w0, w1);
      if constexpr (D == 128) promote(32, s_high, w0, w1);
      if (tile > 0) {
        barrier_wait(bars.k_full(ring.stage), ring.parity);
        issue_s(ring.stage);
      }
    }
    wgmma_wait<0>();
    fence_regs(s);
    const int half = record_half(record);
    if (half < 2 * shape.n_q) forward_store<C>(p, record_head(record), half, o, reference, l, top);
  }
}

template <int D>
__global__ void __launch_bounds__(ForwardConfig<D>::kThreads, 1)
    forward_kernel(const __grid_constant__ ForwardParams p, const int section) {
  using C = ForwardConfig<D>;
  extern __shared__ __align__(1024) uint8_t shared[];
  const uint32_t smem = shared_address(shared);
  const ForwardBarriers<C> bars{smem + C::kBarriers};
  const Shape& shape = p.shape;
  const int blocks = (2 * shape.n_q + C::kWarpgroups - 1) / C::kWarpgroups;
  const Work work = pick_work(blockIdx.x, blocks, shape.batch * shape.heads, section, shape.causal != 0);
  int tiles = 0;  // of the warpgroup that sees most
  for (int wg = 0; wg < C::kWarpgroups; wg++) tiles = max(tiles, forward_tiles<C>(shape, forward_half<C>(work, wg)));
  if (threadIdx.x == 0) bars.init();
  if (threadIdx.x < C::kWarpgroups) {
    const int half = forward_half<C>(work, threadIdx.x);
    const float scale = p.q_scale[int64_t(work.bh) * shape.n_q + min(half / 2, shape.n_q - 1)];
    store_shared4(forward_record<C>(smem, threadIdx.x), __int_as_float(work.bh), __int_as_float(half),
                  __int_as_float(key_limit(shape, 64 * half)), query_factor(scale, shape.softmax_scale_log2));
  }
  __syncthreads();
  const int wg = __shfl_sync(~0u, threadIdx.x / 128, 0);
  if (wg == 0) {
    set_max_registers_down<32>();
    if (threadIdx.x == 0 && tiles > 0) forward_produce<C>(p, work, tiles, smem, bars);
  } else {
    set_max_registers_up<160>();
    forward_consume<C>(p, work, tiles, smem, bars, wg - 1);
  }
}

template <int D>
cudaError_t launch_forward(const ForwardParams& params, cudaStream_t stream) {
  using C = ForwardConfig<D>;
  const Shape& s = params.shape;
  const int n_bh = s.batch * s.heads;
  if (s.n_q == 0 || n_bh == 0) return cudaSuccess;
  const int blocks = (2 * s.n_q + C::kWarpgroups - 1) / C::kWarpgroups;
  const int section = heads_of_section(2 * int64_t(s.n_k) * kUnit * D, s.heads / s.kv_heads, blocks, n_bh);
  cudaError_t error = cudaFuncSetAttribute(forward_kernel<D>, cudaFuncAttributeMaxDynamicSharedMemorySize, C::kBytes);
  if (error != cudaSuccess) return error;
  forward_kernel<D><<<dim3(unsigned(blocks) * unsigned(n_bh)), C::kThreads, C::kBytes, stream>>>(params, section);
  return cudaGetLastError();
}

}  // namespace dm::sm90
