// dK = dS_hat^T q_hat * scale and dV = P_hat^T do_hat, one CTA per 128 keys of a key head, over all query heads of its group.
//
// Works on S^T (keys are rows), so P^T and dS^T leave the accumulators as A operands. Windows of 128 queries (64 for dK at
// D = 256): P is cast at 2^E of the query block, dS at 448 / amax of its 128x128 tile (from dq's table), each window is one
// chain on the tensor core from zero, then one FP32 promotion. Query heads and windows come in a fixed order: no atomics.
#pragma once
#include "../../common/copy.h"
#include "../../common/e4m3.h"
#include "../../common/mask.h"
#include "../../common/softmax.h"
#include "../../common/store.h"
#include "../../common/turns.h"
#include "config.h"
#include "kernel.h"

namespace dm::sm90 {

template <typename C>
struct DkvBarriers {
  uint32_t base;
  __device__ __forceinline__ uint32_t full(int s) const { return base + 8 * s; }
  __device__ __forceinline__ uint32_t empty(int s) const { return base + 8 * (C::kStages + s); }
  __device__ __forceinline__ uint32_t kv_full() const { return base + 8 * (2 * C::kStages); }
  __device__ __forceinline__ void init() const {
    for (int s = 0; s < C::kStages; s++) {
      barrier_init(full(s), 2);  // images and vectors
      barrier_init(empty(s), 4 * C::kWarpgroups);  // every warp
    }
    barrier_init(kv_full(), 1);
    barrier_init_fence();
  }
};

// Query windows [first, last) of one key unit, the same for every query head; from `edge` on every query sees every key.
template <typename C>
struct DkvRange {
  int first, edge, last;
  __device__ __forceinline__ DkvRange(const Shape& shape, int unit) {
    last = (shape.t_q + C::kWindow - 1) / C::kWindow;
    first = min(first_query(shape, kUnit * unit) / C::kWindow, last);
    edge = min((first_query(shape, kUnit * unit + kUnit - 1) + C::kWindow - 1) / C::kWindow, last);
  }
};

// Calls body(unit, half, ring) for every window of every query head of the group, in order.
template <typename C, typename Body>
__device__ __forceinline__ void dkv_for_windows(const Shape& shape, Work work, Body body) {
  const int group = shape.heads / shape.kv_heads;
  const DkvRange<C> range(shape, work.unit);
  Ring<C::kStages> ring;
#pragma unroll 1
  for (int h = 0; h < group; h++) {
    const int unit0 = (work.bh * group + h) * shape.n_q;  // (b, kv head, h) is b * heads + head; fits, as grids do
#pragma unroll 1
    for (int window = range.first; window < range.last; window++, ring.next())
      body(unit0 + window / (kUnit / C::kWindow), window % (kUnit / C::kWindow), ring);
  }
}

// One thread: the operand images.
template <typename C>
__device__ __forceinline__ void dkv_produce_images(const DkvParams& p, Work work, uint32_t smem, DkvBarriers<C> bars) {
  const int64_t key_unit = (int64_t(work.bh) * p.shape.n_k + work.unit) * C::K::kBytes;
  barrier_expect(bars.kv_full(), C::kDk ? 2 * C::K::kBytes : C::K::kBytes);
  bulk_copy(smem + C::kK, p.k_row + key_unit, C::K::kBytes, bars.kv_full());
  if constexpr (C::kDk) bulk_copy(smem + C::kV, p.v_row + key_unit, C::K::kBytes, bars.kv_full());
  dkv_for_windows<C>(p.shape, work, [&](int unit, int half, const Ring<C::kStages>& ring) {
    const int s = ring.stage;
    barrier_wait(bars.empty(s), ring.parity ^ 1);
    barrier_expect(bars.full(s), C::Q::kBytes + (C::kDk ? C::Q::kBytes + C::QT::kBytes : 0) + (C::kDv ? C::QT::kBytes : 0));
    const int64_t at = int64_t(unit) * (kUnit * C::D);
#pragma unroll
    for (int panel = 0; panel < C::Q::kPanels; panel++) {
      const int64_t from = at + half * C::Q::kPanelBytes + panel * (kUnit * C::Q::kRowBytes);
      const uint32_t to = s * C::Q::kBytes + panel * C::Q::kPanelBytes;
      bulk_copy(smem + C::kQ + to, p.q_row + from, C::Q::kPanelBytes, bars.full(s));
      if constexpr (C::kDk) bulk_copy(smem + C::kDo + to, p.do_row + from, C::Q::kPanelBytes, bars.full(s));
    }
    const uint32_t to = s * C::QT::kBytes;
    if constexpr (C::kDv) bulk_copy(smem + C::kDoT + to, p.do_t + at + half * C::QT::kBytes, C::QT::kBytes, bars.full(s));
    if constexpr (C::kDk) bulk_copy(smem + C::kQT + to, p.q_t + at + half * C::QT::kBytes, C::QT::kBytes, bars.full(s));
  });
}

// One warp: the vectors and scalars of a window, ready to use. Vector layout: the 16 columns of a thread (t = lane % 4) in a
// 64-column half are contiguous, 80 bytes a t, so that a thread reads them as four 16-byte words without bank conflicts.
template <typename C>
__device__ __forceinline__ void dkv_produce_vectors(const DkvParams& p, Work work, uint32_t smem, DkvBarriers<C> bars) {
  const Shape& shape = p.shape;
  const int lane = threadIdx.x % 32;
  const int64_t key_scale = int64_t(work.bh) * shape.n_k + work.unit;
  const float k_scale = p.k_scale[2 * key_scale + lane % 2], v_scale = C::kDk ? p.v_scale[2 * key_scale + lane % 2] : 0.f;
  const uint32_t place = lane / 16 * C::kHalfVector + 80 * (lane % 2 * 2) + 8 * (lane % 16 / 2);
  const bool active = lane < C::kWindow / 4;
  dkv_for_windows<C>(shape, work, [&](int unit, int half, const Ring<C::kStages>& ring) {
    const float q_scale = p.q_scale[unit], do_scale = p.do_scale[unit], e_pow = p.e_pow[unit];
    const int64_t row = int64_t(unit) * kUnit + half * C::kWindow;
    float4 lambda = {0.f, 0.f, 0.f, 0.f}, delta = lambda;
    if (active) lambda = reinterpret_cast<const float4*>(p.lambda + row)[lane];
    float to_code = 0.f, k_weight = 0.f;
    if constexpr (C::kDk) {
      if (active) delta = reinterpret_cast<const float4*>(p.delta + row)[lane];
      const float amax = __uint_as_float(p.tile_amax[int64_t(unit) * shape.n_k + work.unit]);
      to_code = code_factor(amax);
      k_weight = q_scale * (amax * (1.f / kMaxE4m3)) * e_pow;
    }
    barrier_wait(bars.empty(ring.stage), ring.parity ^ 1);
    const uint32_t vectors = smem + C::kVectors + ring.stage * C::kVectorBytes + place;
    if (active) {
      store_shared2(vectors, -lambda.x, -lambda.y);
      store_shared2(vectors + 80, -lambda.z, -lambda.w);
      if constexpr (C::kDk) {
        store_shared2(vectors + C::kHalves * C::kHalfVector, -delta.x * to_code, -delta.y * to_code);
        store_shared2(vectors + C::kHalves * C::kHalfVector + 80, -delta.z * to_code, -delta.w * to_code);
      }
    }
    if (lane < 2)  // a warpgroup: score factor, dP factor times 448 / amax, weights of dV and dK
      store_shared4(smem + C::kScalars + ring.stage * C::kScalarBytes + 16 * lane,
                    fmaxf(score_factor(query_factor(q_scale, shape.softmax_scale_log2), k_scale),
                          1.17549435e-38f),  // 0 * -inf of a hidden score would be NaN
                    dp_factor(do_scale, v_scale) * to_code, do_scale * e_pow, k_weight);
    __syncwarp();
    if (lane == 0) barrier_arrive(bars.full(ring.stage));
  });
}

// One gradient of this warpgroup's 64 keys to its BF16 rows.
template <typename C>
__device__ __forceinline__ void dkv_store(const Shape& shape, const Bf16View& out, int section, const float (&acc)[C::D / 2],
                                          float scale) {
  const Work work = pick_work(fresh_block(), shape.n_k, shape.batch * shape.kv_heads, section, false);
  const int thread = fresh_thread() - 128, t = thread % 4;
  const int row0 = kUnit * work.unit + thread / 32 * 16 + thread % 32 / 4;
  const int batch = work.bh / shape.kv_heads, head = work.bh - batch * shape.kv_heads;
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const int row = row0 + 8 * r;
    uint16_t* to = row_of(out, batch, row, head);
#pragma unroll
    for (int group = 0; group < C::D / 32; group++)
      store_row32(to + 32 * group, row < shape.t_k, t, [&](int j, int e) { return acc[16 * group + 4 * j + 2 * r + e] * scale; });
  }
}

// Column sums of dK over this warpgroup's 64 keys, signed and absolute, in a fixed order through shared memory.
template <typename C>
__device__ __forceinline__ void dkv_probe(const DkvParams& p, Work work, int wg, const float (&dk)[C::D / 2], float* scratch) {
  const Shape& shape = p.shape;
  const int lane = threadIdx.x % 32, t = lane % 4, warp = threadIdx.x % 128 / 32;
  const int row0 = kUnit * work.unit + 64 * wg + 16 * warp + lane / 4;
  float* mine = scratch + (4 * wg + warp) * 2 * C::D;
#pragma unroll
  for (int i = 0; i < C::D / 8; i++)
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const float x = row0 < shape.t_k ? dk[4 * i + e] * shape.softmax_scale : 0.f;
      const float y = row0 + 8 < shape.t_k ? dk[4 * i + 2 + e] * shape.softmax_scale : 0.f;
      float sum = x + y, abs_sum = fabsf(x) + fabsf(y);
#pragma unroll
      for (int step = 4; step < 32; step *= 2) {
        sum += __shfl_xor_sync(~0u, sum, step);
        abs_sum += __shfl_xor_sync(~0u, abs_sum, step);
      }
      if (lane < 4) {
        mine[8 * i + 2 * t + e] = sum;
        mine[C::D + 8 * i + 2 * t + e] = abs_sum;
      }
    }
  asm volatile("bar.sync %0, 128;" ::"r"(4 + wg) : "memory");
  const float* ours = scratch + 4 * wg * 2 * C::D;
  const int64_t at = ((int64_t(work.bh) * shape.n_k + work.unit) * 2 + wg) * C::D;
  for (int d = threadIdx.x % 128; d < C::D; d += 128) {
    float sum = 0.f, abs_sum = 0.f;
#pragma unroll
    for (int w = 0; w < 4; w++) sum += ours[w * 2 * C::D + d], abs_sum += ours[w * 2 * C::D + C::D + d];
    p.dk_col_sum[at + d] = sum;
    p.dk_col_abs[at + d] = abs_sum;
  }
}

template <typename C, bool Probe>
__device__ __forceinline__ void dkv_consume(const DkvParams& p, Work work, int section, uint8_t* shared, uint32_t smem,
                                            DkvBarriers<C> bars, int wg) {
  constexpr int D = C::D, kChunks = D / C::kChunk;
  const Shape& shape = p.shape;
  const int t = threadIdx.x % 4;
  const bool leader = threadIdx.x % 32 == 0;  // a lane of every warp: plain loads of a stage are not ordered across warps
  const DkvRange<C> range(shape, work.unit);
  const int first_base = first_query_base(shape, kUnit * work.unit);
  const Turns turns(wg, range.first < range.last);

  const uint32_t k_op = operand(smem + C::kK + 64 * wg * C::K::kRowBytes);
  const uint32_t v_op = operand(smem + C::kV + 64 * wg * C::K::kRowBytes);
  const uint32_t q_op = operand(smem + C::kQ), do_op = operand(smem + C::kDo);
  const uint32_t qt_op = operand(smem + C::kQT), dot_op = operand(smem + C::kDoT);

  float dk[C::kDk ? D / 2 : 1], dv[C::kDv ? D / 2 : 1];
#pragma unroll
  for (int i = 0; i < (C::kDk ? D / 2 : 1); i++) dk[i] = 0.f;
#pragma unroll
  for (int i = 0; i < (C::kDv ? D / 2 : 1); i++) dv[i] = 0.f;

  Ring<C::kStages> ring;
  barrier_wait(bars.kv_full(), 0);
  auto step = [&](int window, bool last) {
    barrier_wait(bars.full(ring.stage), ring.parity);
    const uint32_t scalars = smem + C::kScalars + ring.stage * C::kScalarBytes + 16 * wg;
    const uint32_t vectors = smem + C::kVectors + ring.stage * C::kVectorBytes + 80 * t;
    // Hides scores of 64-query half u from keys that their query does not see.
    auto hide = [&](float* x, int u) {
      if (window >= range.edge) return;
      const int thread = fresh_thread() - 128;
      const int first = first_base - C::kWindow * window - 64 * u + thread / 32 * 16 + thread % 32 / 4 - 2 * (thread % 4);
#pragma unroll
      for (int i = 0; i < 32; i++)
        if (8 * (i / 4) + (i & 1) < first + 8 * (i >> 1 & 1)) x[i] = -INFINITY;
    };
    uint32_t p_codes[C::kDv ? 8 * C::kHalves : 1], ds_codes[C::kDk ? 8 * C::kHalves : 1];
#pragma unroll
    for (int u = 0; u < C::kHalves; u++) {
      float s[32], dp[C::kDk ? 32 : 1];
      const int rows = 64 * u * C::Q::kRowBytes;
      fence_regs(s);
      fence_regs(dp);
      wgmma_fence();
      issue_scores<typename C::K, typename C::Q>(s, k_op, advance(q_op, ring.stage * C::Q::kBytes + rows));
      wgmma_commit();
      if constexpr (C::kDk) {
        issue_scores<typename C::K, typename C::Q>(dp, v_op, advance(do_op, ring.stage * C::Q::kBytes + rows));
        wgmma_commit();
        wgmma_wait<1>();
      } else {
        wgmma_wait<0>();
      }
      fence_regs(s);
      hide(s, u);
      const float c = load_shared(scalars);
#pragma unroll
      for (int j = 0; j < 8; j += 2) {
        const float4 neg_lambda = load_shared4(vectors + u * C::kHalfVector + 8 * j);
#pragma unroll
        for (int i = 0; i < 8; i++) {
          const float x = i & 4 ? (i & 1 ? neg_lambda.w : neg_lambda.z) : (i & 1 ? neg_lambda.y : neg_lambda.x);
          s[4 * j + i] = p_value(s[4 * j + i], c, x);
        }
      }
      if constexpr (C::kDv) {
        pack_codes(s, p_codes + 8 * u);
        if (C::kPark && u == 0) {
          const uint32_t parked = smem + C::kParked + 16 * (fresh_thread() - 128);  // this thread's, 4096 bytes apart
          store_shared4(parked, p_codes);
          store_shared4(parked + 4096, p_codes + 4);
        }
      }
      if constexpr (C::kDk) {
        wgmma_wait<0>();
        fence_regs(dp);
        const float cd = load_shared(scalars + 4);
#pragma unroll
        for (int j = 0; j < 8; j += 2) {
          const float4 neg_delta = load_shared4(vectors + (C::kHalves + u) * C::kHalfVector + 8 * j);
#pragma unroll
          for (int i = 0; i < 8; i++) {
            const float x = i & 4 ? (i & 1 ? neg_delta.w : neg_delta.z) : (i & 1 ? neg_delta.y : neg_delta.x);
            dp[4 * j + i] = s[4 * j + i] * dp_minus(dp[4 * j + i], cd, x);
          }
        }
        pack_codes(dp, ds_codes + 8 * u);
      }
    }

    constexpr int kParts = kChunks * (int(C::kDv) + int(C::kDk));
    float part[2][C::kChunk / 2];
    auto issue = [&](int n, float (&x)[C::kChunk / 2]) {
      fence_regs(x);
      wgmma_fence();
      const int d0 = n % kChunks * C::kChunk;
      if (C::kDv && n < kChunks)
        issue_product<typename C::QT>(x, p_codes, advance(dot_op, ring.stage * C::QT::kBytes), d0);
      else
        issue_product<typename C::QT>(x, ds_codes, advance(qt_op, ring.stage * C::QT::kBytes), d0);
      wgmma_commit();
    };
    auto promote = [&](int n, float (&x)[C::kChunk / 2]) {
      fence_regs(x);
      const int d0 = n % kChunks * (C::kChunk / 2);
      const bool is_dv = C::kDv && n < kChunks;
      const float weight = load_shared(scalars + (is_dv ? 8 : 12));
#pragma unroll
      for (int i = 0; i < C::kChunk / 2; i++) {
        float& out = is_dv ? dv[C::kDv ? d0 + i : 0] : dk[C::kDk ? d0 + i : 0];
        out = fmaf(x[i], weight, out);
      }
    };
    if constexpr (C::kPark) {
      const uint32_t parked = smem + C::kParked + 16 * (fresh_thread() - 128);
#pragma unroll
      for (int i = 0; i < 2; i++) load_shared4(parked + 4096 * i, p_codes + 4 * i);
    }
    if constexpr (C::kDv) fence_regs(p_codes);
    if constexpr (C::kDk) fence_regs(ds_codes);
    turns.take();
    issue(0, part[0]);
    issue(1, part[1]);
    if constexpr (kParts == 2) turns.give(last);
#pragma unroll
    for (int n = 0; n < kParts; n++) {
      if (n + 1 < kParts)
        wgmma_wait<1>();
      else
        wgmma_wait<0>();
      promote(n, part[n & 1]);
      if (n + 2 < kParts) issue(n + 2, part[n & 1]);
      if (n + 3 == kParts) turns.give(last);
    }
    __syncwarp();
    if (leader) barrier_arrive(bars.empty(ring.stage));
    ring.next();
  };
#pragma unroll 1
  for (int heads = shape.heads / shape.kv_heads; heads > 0; heads--) {
#pragma unroll 1
    for (int window = range.first; window < range.last; window++) step(window, heads == 1 && window + 1 == range.last);
  }

  if constexpr (Probe && C::kDk) {
    asm volatile("bar.sync 3, 256;" ::: "memory");  // the stages are free: every window has been consumed
    dkv_probe<C>(p, work, wg, dk, reinterpret_cast<float*>(shared + C::kQ));
  }
  if constexpr (C::kDk) dkv_store<C>(shape, p.dk, section, dk, shape.softmax_scale);
  if constexpr (C::kDv) dkv_store<C>(shape, p.dv, section, dv, 1.f);
}

template <int D, bool WithDv, bool WithDk, bool Probe>
__global__ void __launch_bounds__(DkvConfig<D, WithDv, WithDk>::kThreads, 1)
    dkv_kernel(const __grid_constant__ DkvParams p, const int section) {
  using C = DkvConfig<D, WithDv, WithDk>;
  extern __shared__ __align__(1024) uint8_t shared[];
  const uint32_t smem = shared_address(shared);
  const DkvBarriers<C> bars{smem + C::kBarriers};
  const Shape& shape = p.shape;
  const Work work = pick_work(blockIdx.x, shape.n_k, shape.batch * shape.kv_heads, section, false);
  if (threadIdx.x == 0) bars.init();
  __syncthreads();
  const int wg = __shfl_sync(~0u, threadIdx.x / 128, 0);
  if (wg == 0) {
    set_max_registers_down<24>();
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
    if (warp == 0) {
      if (threadIdx.x == 0) dkv_produce_images<C>(p, work, smem, bars);
    } else if (warp == 1) {
      dkv_produce_vectors<C>(p, work, smem, bars);
    }
  } else {
    set_max_registers_up<240>();
    dkv_consume<C, Probe>(p, work, section, shared, smem, bars, wg - 1);
  }
}

template <int D, bool WithDv, bool WithDk, bool Probe>
cudaError_t launch_dkv(const DkvParams& params, cudaStream_t stream) {
  using C = DkvConfig<D, WithDv, WithDk>;
  const Shape& s = params.shape;
  const int n_bg = s.batch * s.kv_heads;
  if (s.n_k == 0 || n_bg == 0) return cudaSuccess;
  const int64_t stream_bytes = 4 * int64_t(s.n_q) * kUnit * D * (s.heads / s.kv_heads);
  const int section = heads_of_section(stream_bytes, 1, s.n_k, n_bg);
  auto* kernel = dkv_kernel<D, WithDv, WithDk, Probe>;
  cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, C::kBytes);
  if (error != cudaSuccess) return error;
  kernel<<<dim3(unsigned(s.n_k) * unsigned(n_bg)), C::kThreads, C::kBytes, stream>>>(params, section);
  return cudaGetLastError();
}

}  // namespace dm::sm90
