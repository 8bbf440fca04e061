// dQ = dS_hat k_hat * scale, one CTA per 128 queries of a head; also the amax of dS over every 128x128 tile, which dkv casts with.
//
// dS = P (dP_hat - delta) is cast per warp slab (16 rows x one key tile) at 448 / amax, the ratio of the tile's two K scales
// folded in; a tile is one chain on the tensor core from zero, then one FP32 promotion. 2^-E and the softmax scale come last.
#pragma once
#include "../../common/copy.h"
#include "../../common/e4m3.h"
#include "../../common/mask.h"
#include "../../common/softmax.h"
#include "../../common/store.h"
#include "../../common/turns.h"
#include "config.h"
#include "kernel.h"
#include "probe.cuh"

namespace dm::sm90 {

template <typename C>
struct DqBarriers {
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

template <typename C>
__device__ __forceinline__ void dq_produce(const DqParams& p, Work work, int tiles, uint32_t smem, DqBarriers<C> bars) {
  const Shape& shape = p.shape;
  const int batch = work.bh / shape.heads, head = work.bh - batch * shape.heads;
  const int64_t unit0 = (int64_t(batch) * shape.kv_heads + head / (shape.heads / shape.kv_heads)) * shape.n_k;
  const int64_t query = (int64_t(work.bh) * shape.n_q + work.unit) * C::Q::kBytes;
  barrier_expect(bars.q_full(), 2 * C::Q::kBytes);
  bulk_copy(smem + C::kQ, p.q_row + query, C::Q::kBytes, bars.q_full());
  bulk_copy(smem + C::kDo, p.do_row + query, C::Q::kBytes, bars.q_full());
  Ring<C::kStages> ring;
#pragma unroll 1
  for (int tile = tiles - 1; tile >= 0; tile--, ring.next()) {
    const int s = ring.stage;
    const int64_t unit = unit0 + tile / (kUnit / C::kTile);
    const int half = tile % (kUnit / C::kTile);
    const float2 v_scale = *reinterpret_cast<const float2*>(p.v_scale + 2 * unit);
    const int64_t at = unit * (kUnit * C::D);
    barrier_wait(bars.empty(s), ring.parity ^ 1);
    const uint32_t scalars = smem + C::kScalars + s * C::kScalarBytes;
    store_shared2(scalars + 32, v_scale.x, v_scale.y);
    barrier_expect(bars.full(s), 2 * C::K::kBytes + C::KT::kBytes + 32);
    bulk_copy(scalars, p.k_fold + unit * kFoldFloats, 32, bars.full(s));
#pragma unroll
    for (int panel = 0; panel < C::K::kPanels; panel++) {
      const int64_t from = at + half * C::K::kPanelBytes + panel * (kUnit * C::K::kRowBytes);
      const uint32_t to = s * C::K::kBytes + panel * C::K::kPanelBytes;
      bulk_copy(smem + C::kK + to, p.k_row + from, C::K::kPanelBytes, bars.full(s));
      bulk_copy(smem + C::kV + to, p.v_row + from, C::K::kPanelBytes, bars.full(s));
    }
    bulk_copy(smem + C::kKT + s * C::KT::kBytes, p.k_t + at + half * C::KT::kBytes, C::KT::kBytes, bars.full(s));
  }
}

template <typename C>
__device__ __forceinline__ void dq_store(const DqParams& p, int section, const float (&acc)[C::D / 2]) {
  const Shape& shape = p.shape;
  const Work work = pick_work(fresh_block(), shape.n_q, shape.batch * shape.heads, section, shape.causal != 0);
  const int thread = fresh_thread() - 128, t = thread % 4;
  const int row0 = kUnit * work.unit + thread / 32 * 16 + thread % 32 / 4;
  const int batch = work.bh / shape.heads, head = work.bh - batch * shape.heads;
  const float scale = p.e_pow[int64_t(work.bh) * shape.n_q + work.unit] * shape.softmax_scale;
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const int row = row0 + 8 * r;
    uint16_t* out = row_of(p.dq, batch, row, head);
#pragma unroll
    for (int group = 0; group < C::D / 32; group++)
      store_row32(out + 32 * group, row < shape.t_q, t,
                  [&](int j, int e) { return acc[16 * group + 4 * j + 2 * r + e] * scale; });
  }
}

template <typename C, bool Probe>
__device__ __forceinline__ void dq_consume(const DqParams& p, Work work, int section, int tiles, uint32_t smem,
                                           DqBarriers<C> bars, int wg) {
  constexpr int D = C::D, kHalves = C::kTile / 64, kChunks = D / C::kChunk, kScores = C::kTile / 2;
  constexpr bool kEarly = C::kEarly && !Probe;
  constexpr int kParts = kEarly ? 1 : 2;  // product flights that there are registers for
  const Shape& shape = p.shape;
  const int lane = threadIdx.x % 32, t = lane % 4;
  const int local_row = 64 * wg + 16 * (threadIdx.x % 128 / 32) + lane / 4;
  const bool leader = threadIdx.x % 32 == 0;  // a lane of every warp: plain loads of a stage are not ordered across warps
  const int wg_limit = key_limit(shape, kUnit * work.unit + 64 * wg);
  const int base0 = row_base(shape, kUnit * work.unit + local_row);
  const int64_t unit = int64_t(work.bh) * shape.n_q + work.unit, at = unit * kUnit + local_row;
  const float lambda[2] = {p.lambda[at], p.lambda[at + 8]}, delta[2] = {p.delta[at], p.delta[at + 8]};
  const float query = query_factor(p.q_scale[unit], shape.softmax_scale_log2), do_scale = p.do_scale[unit];
  uint32_t* amax_row = p.tile_amax + unit * shape.n_k;

  const uint32_t q_op = operand(smem + C::kQ + 64 * wg * C::Q::kRowBytes);
  const uint32_t do_op = operand(smem + C::kDo + 64 * wg * C::Q::kRowBytes);
  const uint32_t k_op = operand(smem + C::kK), v_op = operand(smem + C::kV), kt_op = operand(smem + C::kKT);

  float acc[D / 2];
#pragma unroll
  for (int i = 0; i < D / 2; i++) acc[i] = 0.f;
  RowProbe rows[Probe ? 2 : 1];
  CodeProbe ds_count, p_count;

  // One turn at the tensor core is a tile's dQ and the next tile's scores: S right behind dQ, into registers that dQ leaves free;
  // dP, which has no registers until dQ is promoted, last.
  const Turns turns(wg, kEarly && tiles > 0);
  Ring<C::kStages> ring;
  float s[kScores], dp[kScores];
  auto renew = [](auto& x) {
    if constexpr (kEarly)
      discard_regs(x);
    else
      fence_regs(x);
  };
  auto issue_s = [&]() {
    renew(s);
    wgmma_fence();
    issue_scores<typename C::Q, typename C::K>(s, q_op, advance(k_op, ring.stage * C::K::kBytes));
    wgmma_commit();
  };
  auto issue_dp = [&]() {
    renew(dp);
    wgmma_fence();
    issue_scores<typename C::Q, typename C::K>(dp, do_op, advance(v_op, ring.stage * C::K::kBytes));
    wgmma_commit();
  };
  barrier_wait(bars.q_full(), 0);
  if (kEarly && tiles > 0) {
    barrier_wait(bars.full(0), 0);
    turns.take();
    issue_s();
    issue_dp();
    turns.give(false);
    wgmma_wait<1>();
    fence_regs(s);
  }
#pragma unroll 1
  for (int tile = tiles - 1; tile >= 0; tile--) {
    if constexpr (!kEarly) {
      barrier_wait(bars.full(ring.stage), ring.parity);
      issue_s();
      issue_dp();
    }
    const uint32_t scalars = smem + C::kScalars + ring.stage * C::kScalarBytes;
    const float4 k_scale = load_shared4(scalars);
    const float2 v_scale = load_shared2(scalars + 32);
    float c[kHalves], cd[kHalves], rho[kHalves], weight[kHalves];
    bool folded = true;
    if constexpr (kHalves == 2) {
      folded = load_shared(scalars + 28) != 0.f;
      c[0] = score_factor(query, k_scale.x), c[1] = score_factor(query, k_scale.y);
      cd[0] = dp_factor(do_scale, v_scale.x), cd[1] = dp_factor(do_scale, v_scale.y);
      rho[0] = k_scale.w, rho[1] = load_shared(scalars + 16);
      weight[0] = k_scale.x, weight[1] = folded ? k_scale.z : k_scale.y;
    } else {
      weight[0] = tile & 1 ? k_scale.y : k_scale.x;
      c[0] = score_factor(query, weight[0]);
      cd[0] = dp_factor(do_scale, tile & 1 ? v_scale.y : v_scale.x);
      rho[0] = 1.f;
    }
    const bool masked = (tile + 1) * C::kTile > wg_limit;
    if constexpr (!kEarly) {
      wgmma_wait<1>();
      fence_regs(s);
    }

#pragma unroll
    for (int i = 0; i < kScores; i++) {
      if constexpr (Probe) {
        const int r = i >> 1 & 1;
        const bool seen = !masked || 8 * (i / 4) + (i & 1) < limit_of(base0 + 8 * r, shape) - tile * C::kTile - 2 * t;
        const float x = log2_p(s[i], c[i / 32], -lambda[r]);
        s[i] = exp2_approx(x);
        if (seen) {
          rows[r].top = fmaxf(rows[r].top, s[i]);
          rows[r].p += s[i];
          if (s[i] != 0.f) rows[r].p_log += s[i] * x;
          p_count.count(s[i], s[i]);
        }
      } else {
        s[i] = p_value(s[i], c[i / 32], -lambda[i >> 1 & 1]);
      }
    }
    wgmma_wait<0>();
    fence_regs(dp);
    if (masked) {
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const int visible = limit_of(base0 + 8 * r, shape) - tile * C::kTile - 2 * t;
#pragma unroll
        for (int j = 0; j < C::kTile / 8; j++)
#pragma unroll
          for (int e = 0; e < 2; e++)
            if (8 * j + e >= visible) s[4 * j + 2 * r + e] = dp[4 * j + 2 * r + e] = 0.f;
      }
    }
    float amax = 0.f;
#pragma unroll
    for (int i = 0; i < kScores; i++) {
      dp[i] = __fmul_rn(s[i], dp_minus(dp[i], cd[i / 32], -delta[i >> 1 & 1]));
      amax = fmaxf(amax, fabsf(dp[i]));
    }
    const uint32_t bits = __reduce_max_sync(~0u, __float_as_uint(amax));
    if (lane == 0) atomicMax(amax_row + tile / (kUnit / C::kTile), bits);
    amax = __uint_as_float(bits);
    const float inverse = code_factor(amax);
    if constexpr (Probe) {
#pragma unroll
      for (int r = 0; r < 2; r++) {
        float sum = 0.f;
#pragma unroll
        for (int i = 0; i < kScores; i++)
          if ((i >> 1 & 1) == r) {
            sum += dp[i];
            rows[r].ds_abs += fabsf(dp[i]);
            ds_count.count(dp[i] * (inverse * rho[i / 32]), dp[i]);
          }
        rows[r].ds.add(sum);
      }
    }
    uint32_t codes[C::kTile / 8];
#pragma unroll
    for (int g = 0; g < kHalves; g++) {
      const float factor = inverse * rho[g];
#pragma unroll
      for (int i = 32 * g; i < 32 * g + 32; i++) dp[i] *= factor;
      pack_codes(dp + 32 * g, codes + 8 * g);
      weight[g] *= amax * (1.f / kMaxE4m3);
      if constexpr (Probe) {
        const float back = factor > 0.f ? __fdiv_rn(1.f, factor) : 0.f;
#pragma unroll
        for (int r = 0; r < 2; r++) {
          float sum = 0.f, abs_sum = 0.f;
#pragma unroll
          for (int k = 0; k < 4; k++) {
            float v[4];
            from_e4m3x4(codes[8 * g + 2 * k + r], v);
#pragma unroll
            for (int i = 0; i < 4; i++) sum += v[i], abs_sum += fabsf(v[i]);
          }
          rows[r].cast.add(sum * back);
          rows[r].cast_abs += abs_sum * back;
        }
      }
    }
    fence_regs(codes);

    const uint32_t kt = advance(kt_op, ring.stage * C::KT::kBytes);
    auto promote = [&](int chunk, float (&part)[C::kChunk / 2], float w) {
      fence_regs(part);
#pragma unroll
      for (int i = 0; i < C::kChunk / 2; i++) {
        float& out = acc[chunk * (C::kChunk / 2) + i];
        out = fmaf(part[i], w, out);
      }
    };
    if constexpr (kHalves == 2) {
      if (!folded) {  // the two K scales are too far apart: the first half is promoted alone, then contributes zeros
#pragma unroll
        for (int chunk = 0; chunk < kChunks; chunk++) {
          float part[C::kChunk / 2];
          fence_regs(part);
          wgmma_fence();
#pragma unroll
          for (int k = 0; k < 2; k++)
            mma_rs(part, codes + 4 * k, C::KT::desc(advance(kt, chunk * C::kChunk * C::KT::kRowBytes + 32 * k)), k != 0);
          wgmma_commit();
          wgmma_wait<0>();
          promote(chunk, part, weight[0]);
        }
#pragma unroll
        for (int i = 0; i < 8; i++) codes[i] = 0;
      }
    }
    fence_regs(codes);
    const uint32_t empty = bars.empty(ring.stage);
    if constexpr (kEarly) {
      ring.next();
      if (tile > 0) barrier_wait(bars.full(ring.stage), ring.parity);
      turns.take();
    }
    float part[kParts][C::kChunk / 2];
    auto issue_dq = [&](int chunk) {
      auto& x = part[chunk % kParts];
      renew(x);
      wgmma_fence();
      issue_product<typename C::KT>(x, codes, kt, chunk * C::kChunk);
      wgmma_commit();
    };
#pragma unroll
    for (int chunk = 0; chunk < kParts && chunk < kChunks; chunk++) issue_dq(chunk);
    if constexpr (kEarly && kChunks <= kParts) issue_s();  // past the last tile nobody reads its result
#pragma unroll
    for (int chunk = 0; chunk < kChunks; chunk++) {
      constexpr int kAhead = kParts - 1;
      const bool product_out = kAhead && chunk + 1 < kChunks, s_out = kEarly && chunk + kParts >= kChunks;
      if (product_out && s_out)
        wgmma_wait<2>();
      else if (product_out || s_out)
        wgmma_wait<1>();
      else
        wgmma_wait<0>();
      promote(chunk, part[chunk % kParts], weight[kHalves - 1]);
      if (chunk + kParts < kChunks) issue_dq(chunk + kParts);
      if (kEarly && chunk + kParts + 1 == kChunks) issue_s();
    }
    __syncwarp();
    if (leader) barrier_arrive(empty);
    if constexpr (kEarly) {
      fence_regs(acc);
      issue_dp();
      turns.give(tile == 0);
      wgmma_wait<1>();
      fence_regs(s);
    } else {
      ring.next();
    }
  }
  if constexpr (kEarly) {
    wgmma_wait<0>();
    fence_regs(dp);
  }

  if constexpr (Probe) {
    const float e_pow = p.e_pow[unit];
#pragma unroll
    for (int r = 0; r < 2; r++) store_row_probe(p, rows[r], at + 8 * r, t, e_pow);
    ds_count.flush(p.ds_codes);
    p_count.flush(p.p_codes);
  }
  dq_store<C>(p, section, acc);
}

template <int D, bool Probe>
__global__ void __launch_bounds__(DqConfig<D>::kThreads, 1) dq_kernel(const __grid_constant__ DqParams p, const int section) {
  using C = DqConfig<D>;
  extern __shared__ __align__(1024) uint8_t shared[];
  const uint32_t smem = shared_address(shared);
  const DqBarriers<C> bars{smem + C::kBarriers};
  const Shape& shape = p.shape;
  const Work work = pick_work(blockIdx.x, shape.n_q, shape.batch * shape.heads, section, shape.causal != 0);
  const int last_row = min(kUnit * work.unit + kUnit, shape.t_q) - 1;
  const int tiles = (key_limit(shape, last_row) + C::kTile - 1) / C::kTile;
  if (threadIdx.x == 0) bars.init();
  __syncthreads();
  const int wg = __shfl_sync(~0u, threadIdx.x / 128, 0);
  if (wg == 0) {
    set_max_registers_down<24>();
    if (threadIdx.x == 0) dq_produce<C>(p, work, tiles, smem, bars);
  } else {
    set_max_registers_up<240>();
    dq_consume<C, Probe>(p, work, section, tiles, smem, bars, wg - 1);
  }
}

template <int D, bool Probe>
cudaError_t launch_dq(const DqParams& params, cudaStream_t stream) {
  using C = DqConfig<D>;
  const Shape& s = params.shape;
  const int n_bh = s.batch * s.heads;
  if (s.n_q == 0 || n_bh == 0) return cudaSuccess;
  const int section = heads_of_section(3 * int64_t(s.n_k) * kUnit * D, s.heads / s.kv_heads, s.n_q, n_bh);
  auto* kernel = dq_kernel<D, Probe>;
  cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, C::kBytes);
  if (error != cudaSuccess) return error;
  kernel<<<dim3(unsigned(s.n_q) * unsigned(n_bh)), C::kThreads, C::kBytes, stream>>>(params, section);
  return cudaGetLastError();
}

}  // namespace dm::sm90
