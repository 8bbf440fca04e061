// What the two forward kernels share: barriers, the scalars of a tile, the epilogue.
#pragma once
#include "../../common/copy.h"
#include "../../common/e4m3.h"
#include "../../common/mask.h"
#include "../../common/softmax.h"
#include "../../common/store.h"
#include "config.h"
#include "kernel.h"

namespace dm::sm90 {

template <typename C>
struct ForwardBarriers {
  uint32_t base;
  __device__ __forceinline__ uint32_t k_full(int s) const { return base + 8 * s; }
  __device__ __forceinline__ uint32_t v_full(int s) const { return base + 8 * (C::kStages + s); }
  __device__ __forceinline__ uint32_t k_empty(int s) const { return base + 8 * (2 * C::kStages + s); }
  __device__ __forceinline__ uint32_t v_empty(int s) const { return base + 8 * (3 * C::kStages + s); }
  __device__ __forceinline__ uint32_t q_full() const { return base + 8 * (4 * C::kStages); }
  __device__ __forceinline__ void init() const {
    for (int s = 0; s < C::kStages; s++) {
      barrier_init(k_full(s), 1);
      barrier_init(v_full(s), 1);
      barrier_init(k_empty(s), 4 * C::kWarpgroups);  // every warp
      barrier_init(v_empty(s), 4 * C::kWarpgroups);  // every warp
    }
    barrier_init(q_full(), 1);
    barrier_init_fence();
  }
};

// Scalars of one tile: score factors, log2 of the fold ratios, reciprocal ratios; v_scale: of a folded tile its larger scale
// in the last place, otherwise one a half.
template <typename C>
struct ForwardScalars {
  static constexpr int kHalves = C::kTile / 64;
  float c[kHalves], log2_rho[kHalves], inv_rho[kHalves], v_scale[kHalves];
  bool folded;
  __device__ __forceinline__ ForwardScalars(uint32_t a, float query, int tile) {
    const float2 k_scale = load_shared2(a + 32);
    const float4 scale = load_shared4(a);
    if constexpr (kHalves == 2) {
      const float4 rho = load_shared4(a + 16);
      folded = rho.w != 0.f;
      c[0] = score_factor(query, k_scale.x), c[1] = score_factor(query, k_scale.y);
      inv_rho[0] = reciprocal_approx(scale.w), inv_rho[1] = reciprocal_approx(rho.x);
      log2_rho[0] = rho.y, log2_rho[1] = rho.z;
      v_scale[0] = scale.x, v_scale[1] = folded ? scale.z : scale.y;
    } else {
      folded = true;
      c[0] = score_factor(query, tile & 1 ? k_scale.y : k_scale.x);
      inv_rho[0] = 1.f, log2_rho[0] = 0.f, v_scale[0] = tile & 1 ? scale.y : scale.x;
    }
#pragma unroll
    for (int g = 0; g < kHalves; g++) c[g] = fmaxf(c[g], 1.17549435e-38f);  // 0 * -inf of a masked score would be NaN
  }
};

// The 64 query rows of half unit `half`, head `bh`. Rows past the end exist only in the vectors, as rows without a key.
template <typename C>
__device__ __forceinline__ void forward_store(const ForwardParams& p, int bh, int half, const float (&o)[C::D / 2],
                                              const float (&reference)[2], float (&l)[2], const float (&top)[2]) {
  constexpr int D = C::D;
  const Shape& shape = p.shape;
  const int thread = fresh_thread() % 128, t = thread % 4, local_row = thread / 32 * 16 + thread % 32 / 4;
  const int row0 = 64 * half + local_row;
  const int batch = bh / shape.heads, head = bh - batch * shape.heads;
  const float* mean = p.v_mean ? p.v_mean + (int64_t(batch) * shape.kv_heads + head / (shape.heads / shape.kv_heads)) * D : nullptr;
  const Bf16View centred = {p.o_centred, int64_t(shape.t_q) * shape.heads * D, int64_t(shape.heads) * D, D};
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const int row = row0 + 8 * r;
    const bool exists = row < shape.t_q;
    l[r] = quad_sum(l[r]);
    const bool empty = top[r] == -INFINITY && l[r] == 0.f;
    const float inv = empty ? 0.f : __fdiv_rn(1.f, l[r]);
    if (t == 0) {
      const int64_t at = int64_t(bh) * shape.n_q * kUnit + row;
      p.lse2[at] = exists && !empty ? reference[r] + log2f(l[r]) - kLog2MaxE4m3 : -INFINITY;
      p.m2[at] = exists ? top[r] : -INFINITY;
    }
    uint16_t* out = row_of(p.o, batch, row, head);
    uint16_t* saved = row_of(centred, batch, row, head);
#pragma unroll
    for (int group = 0; group < D / 32; group++) {
      auto value = [&](int j, int e) { return o[16 * group + 4 * j + 2 * r + e] * inv; };
      if (p.o_centred) store_row32(saved + 32 * group, exists, t, value);
      if (mean && !empty) {
        store_row32(out + 32 * group, exists, t, [&](int j, int e) { return value(j, e) + mean[32 * group + 8 * j + 2 * t + e]; });
      } else {
        store_row32(out + 32 * group, exists, t, value);
      }
    }
  }
}

}  // namespace dm::sm90
