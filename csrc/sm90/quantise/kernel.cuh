// amax over the block's finite values; scale = amax/448, inv = 448/amax (RN); code = E4M3(x * inv), RN-even, saturating, NaN for a
// non-finite x; amax = 0 or 448/amax not finite: scale 1. The images are built in shared memory and leave as two bulk copies.
#pragma once
#include <cuda_bf16.h>

#include <cstdint>

#include "kernel.h"

namespace dm::sm90 {
namespace quantise {

constexpr uint32_t kInfBits = 0x7f800000u;

__device__ __forceinline__ float low_half(uint32_t x) { return __uint_as_float(x << 16); }
__device__ __forceinline__ float high_half(uint32_t x) { return __uint_as_float(x & 0xffff0000u); }
__device__ __forceinline__ uint32_t magnitude(float x) { return __float_as_uint(x) & 0x7fffffffu; }
__device__ __forceinline__ bool finite(float x) { return magnitude(x) < kInfBits; }

__device__ __forceinline__ uint16_t encode2(float low, float high) {
  uint16_t out;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(out) : "f"(high), "f"(low));
  return out;
}

__device__ __forceinline__ float2 decode2(uint16_t codes) {
  uint32_t half2;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(half2) : "h"(codes));
  float low, high;
  asm("{.reg .b16 a, b; mov.b32 {a, b}, %2; cvt.f32.f16 %0, a; cvt.f32.f16 %1, b;}" : "=f"(low), "=f"(high) : "r"(half2));
  return {low, high};
}

// Eight channels of one token.
struct Chunk {
  uint32_t w[4];
};

template <class P>
__device__ __forceinline__ Chunk load_chunk(const P& p, int64_t batch, int64_t head, int64_t token, int channel) {
  const auto* x = static_cast<const uint16_t*>(p.x) + batch * p.batch_stride + head * p.head_stride + token * p.token_stride;
  Chunk c;
  if (p.vectors) {
    const uint4 v = __ldg(reinterpret_cast<const uint4*>(x + channel));
    c.w[0] = v.x, c.w[1] = v.y, c.w[2] = v.z, c.w[3] = v.w;
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t low = __ldg(x + (channel + 2 * i) * p.channel_stride);
      const uint32_t high = __ldg(x + (channel + 2 * i + 1) * p.channel_stride);
      c.w[i] = low | high << 16;
    }
  }
  return c;
}

__device__ __forceinline__ void unpack(const Chunk& c, float (&v)[8]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) v[2 * i] = low_half(c.w[i]), v[2 * i + 1] = high_half(c.w[i]);
}

// Byte address of (token, channel) in a row image.
template <int D>
__device__ __forceinline__ uint32_t row_address(uint32_t token, uint32_t channel) {
  if constexpr (D == 64) {
    const uint32_t a = token * 64 + channel;
    return a ^ (((a >> 7) & 3) << 4);
  } else {
    const uint32_t a = (channel >> 7) * (kUnit * 128) + token * 128 + (channel & 127);
    return a ^ (((a >> 7) & 7) << 4);
  }
}

// Byte address of the 16 token positions 16*c.. of a channel in a token image; Halves: two images of 64 tokens.
template <int D, bool Halves>
__device__ __forceinline__ uint32_t token_address(uint32_t channel, uint32_t c) {
  if constexpr (Halves) {
    const uint32_t a = (c >> 2) * (D * 64) + channel * 64 + (c & 3) * 16;
    return a ^ (((a >> 7) & 3) << 4);
  } else {
    const uint32_t a = channel * 128 + c * 16;
    return a ^ (((a >> 7) & 7) << 4);
  }
}

// 4 words (tokens) of 4 bytes (channels) -> 4 words (channels) of 4 bytes (tokens).
__device__ __forceinline__ void transpose4(uint32_t a, uint32_t b, uint32_t c, uint32_t d, uint32_t (&out)[4]) {
  const uint32_t ab_low = __byte_perm(a, b, 0x5140), ab_high = __byte_perm(a, b, 0x7362);
  const uint32_t cd_low = __byte_perm(c, d, 0x5140), cd_high = __byte_perm(c, d, 0x7362);
  out[0] = __byte_perm(ab_low, cd_low, 0x5410), out[1] = __byte_perm(ab_low, cd_low, 0x7632);
  out[2] = __byte_perm(ab_high, cd_high, 0x5410), out[3] = __byte_perm(ab_high, cd_high, 0x7632);
}

// Position k of 16 holds token pi(k) (params.h); positions 4t..4t+3 are tokens 2t, 2t+1, 2t+8, 2t+9.
template <int D, bool Halves>
__device__ __forceinline__ void build_token_image(const uint8_t* row, uint8_t* token) {
  using C = QuantiseConfig<D>;
  for (int task = threadIdx.x; task < D / 4 * 8; task += C::kThreads) {
    const uint32_t channel = task % (D / 4) * 4, c = task / (D / 4);
    uint32_t out[4][4];
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      uint32_t w[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t source = c * 16 + 2 * t + (i & 1) + (i >> 1) * 8;
        w[i] = *reinterpret_cast<const uint32_t*>(row + row_address<D>(source, channel));
      }
      uint32_t columns[4];
      transpose4(w[0], w[1], w[2], w[3], columns);
#pragma unroll
      for (int i = 0; i < 4; ++i) out[i][t] = columns[i];
    }
#pragma unroll
    for (int i = 0; i < 4; ++i)
      *reinterpret_cast<uint4*>(token + token_address<D, Halves>(channel + i, c)) = make_uint4(out[i][0], out[i][1], out[i][2], out[i][3]);
  }
}

__device__ __forceinline__ void bulk_store(void* global, const void* shared, uint32_t bytes) {
  const uint32_t s = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global), "r"(s), "r"(bytes) : "memory");
}

struct Scale {
  float scale, inv;
};

__device__ __forceinline__ Scale block_scale(uint32_t amax_bits) {
  const float amax = __uint_as_float(amax_bits);
  Scale s{__fdiv_rn(amax, 448.f), __fdiv_rn(448.f, amax)};
  if (amax_bits == 0) s = {1.f, 1.f};
  if (!finite(s.inv)) s = {1.f, 0.f};
  return s;
}

// The two 64-key scales of a unit folded into one promotion; an empty half takes no part.
__device__ __forceinline__ void write_fold(float* fold, const Scale (&s)[2], const uint32_t (&amax)[2]) {
  const bool filled[2] = {amax[0] != 0 && s[0].inv != 0.f, amax[1] != 0 && s[1].inv != 0.f};
  const bool both = filled[0] && filled[1];
  const float high = both ? fmaxf(s[0].scale, s[1].scale) : filled[0] ? s[0].scale : filled[1] ? s[1].scale : 1.f;
  const float low = both ? fminf(s[0].scale, s[1].scale) : high;
  const bool folded = high <= 16.f * low;
  float rho[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) rho[i] = folded && filled[i] ? __fdiv_rn(s[i].scale, high) : 1.f;
  reinterpret_cast<float4*>(fold)[0] = make_float4(s[0].scale, s[1].scale, high, rho[0]);
  reinterpret_cast<float4*>(fold)[1] = make_float4(rho[1], log2f(rho[0]), log2f(rho[1]), folded ? 1.f : 0.f);
}

struct RowSums {
  float stale[kUnit], consistent[kUnit];
};

// lambda, E and the two saved-output deltas of a 128-query block, by the first 128 threads.
__device__ __forceinline__ void finish_grad(const QuantiseParams& p, const RowSums& sums, float scale, int64_t unit, float* warp_min) {
  const int row = threadIdx.x;
  const int64_t at = unit * kUnit + row;
  float lse2 = 0.f;
  if (row < kUnit) {
    lse2 = p.lse2[at];
    const float gap = lse2 - p.m2[at];
    float low = finite(gap) ? gap : INFINITY;
#pragma unroll
    for (int d = 16; d; d >>= 1) low = fminf(low, __shfl_xor_sync(~0u, low, d));
    if (row % 32 == 0) warp_min[row / 32] = low;
  }
  __syncthreads();
  if (row >= kUnit) return;
  const float low = fminf(fminf(warp_min[0], warp_min[1]), fminf(warp_min[2], warp_min[3]));
  const float e = 8.f + (isinf(low) ? 0.f : fmaxf(0.f, floorf(low)));
  const bool empty = lse2 == -INFINITY;
  p.lambda[at] = empty ? INFINITY : __fsub_rn(lse2, e);
  p.d0_stale[at] = empty ? 0.f : sums.stale[row];
  p.d0_cons[at] = empty ? 0.f : __fmul_rn(sums.consistent[row], scale);
  if (row == 0) p.e_pow[unit] = ldexpf(1.f, -static_cast<int>(e));
}

template <int D, Operand kOperand, bool kProbe>
__global__ void __launch_bounds__(QuantiseConfig<D>::kThreads) quantise_kernel(const __grid_constant__ QuantiseParams p) {
  using C = QuantiseConfig<D>;
  constexpr int kBlocks = kOperand == Operand::key_value ? 2 : 1;  // scale blocks in a unit
  constexpr bool kHalves = D == 256 && kOperand != Operand::grad;
  extern __shared__ __align__(1024) uint8_t images[];
  __shared__ uint32_t warp_amax[kBlocks][C::kWarps];
  __shared__ RowSums sums;
  __shared__ float warp_min[4];
  uint8_t *row_image = images, *token_image = images + C::kImage;

  const int64_t head = blockIdx.x % p.heads;
  const int64_t index = blockIdx.x / p.heads % p.units;
  const int64_t batch = blockIdx.x / (p.heads * p.units);
  const int64_t unit = (batch * p.heads + head) * p.units + index;
  const int chunk = threadIdx.x % C::kChunks, first_row = threadIdx.x / C::kChunks, channel = chunk * 8;

  Chunk x[C::kPasses];
#pragma unroll
  for (int i = 0; i < C::kPasses; ++i) {
    const int64_t token = index * kUnit + i * C::kRowsPerPass + first_row;
    x[i] = token < p.tokens ? load_chunk(p, batch, head, token, channel) : Chunk{};
  }
  float mean[8] = {};
  if (kOperand == Operand::key_value && p.mean) {
#pragma unroll
    for (int j = 0; j < 8; ++j) mean[j] = p.mean[(batch * p.heads + head) * D + channel + j];
  }
  const auto values = [&](int i, float (&v)[8]) {  // the numbers to be quantised: centred, padding 0
    unpack(x[i], v);
    if constexpr (kOperand == Operand::key_value) {
      const bool real = index * kUnit + i * C::kRowsPerPass + first_row < p.tokens;
#pragma unroll
      for (int j = 0; j < 8; ++j) v[j] = real ? __fsub_rn(v[j], mean[j]) : 0.f;
    }
  };

  uint32_t amax[kBlocks] = {};
#pragma unroll
  for (int i = 0; i < C::kPasses; ++i) {
    float v[8];
    values(i, v);
    uint32_t m = 0;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const uint32_t bits = magnitude(v[j]);
      m = max(m, bits < kInfBits ? bits : 0u);
    }
    amax[i * kBlocks / C::kPasses] = max(amax[i * kBlocks / C::kPasses], m);
  }
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
    const uint32_t m = __reduce_max_sync(~0u, amax[b]);
    if (threadIdx.x % 32 == 0) warp_amax[b][threadIdx.x / 32] = m;
  }
  __syncthreads();
  Scale scale[kBlocks];
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
    amax[b] = 0;
#pragma unroll
    for (int w = 0; w < C::kWarps; ++w) amax[b] = max(amax[b], warp_amax[b][w]);
    scale[b] = block_scale(amax[b]);
  }

  // Otherwise the compiler keeps every centred value in FP32 across the barrier: 128 registers at D=128 and 255 at D=256.
  if constexpr (kOperand == Operand::key_value) {
#pragma unroll
    for (int i = 0; i < C::kPasses; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) asm volatile("" : "+r"(x[i].w[j]));
  }

  uint32_t saturated = 0, underflowed = 0, nonfinite = 0;
#pragma unroll
  for (int i = 0; i < C::kPasses; ++i) {
    const int row = i * C::kRowsPerPass + first_row;
    const float inv = scale[i * kBlocks / C::kPasses].inv;
    float v[8], y[8];
    values(i, v);
    uint32_t codes[2];
#pragma unroll
    for (int j = 0; j < 8; ++j) y[j] = finite(v[j]) ? __fmul_rn(v[j], inv) : __uint_as_float(0x7fffffffu);
#pragma unroll
    for (int j = 0; j < 2; ++j)
      codes[j] = encode2(y[4 * j], y[4 * j + 1]) | static_cast<uint32_t>(encode2(y[4 * j + 2], y[4 * j + 3])) << 16;
    *reinterpret_cast<uint2*>(row_image + row_address<D>(row, channel)) = make_uint2(codes[0], codes[1]);
    if constexpr (kProbe) {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const uint32_t code = codes[j / 4] >> (j % 4 * 8) & 0x7f;
        saturated += code == 0x7e, nonfinite += code == 0x7f, underflowed += code == 0 && magnitude(v[j]) != 0;
      }
    }
    if constexpr (kOperand == Operand::grad) {
      const int64_t token = index * kUnit + row;
      float o[8] = {}, stale = 0.f, consistent = 0.f;
      if (token < p.tokens) {
        const uint4 w = __ldg(reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(p.o) + ((batch * p.tokens + token) * p.heads + head) * D + channel));
        unpack(Chunk{{w.x, w.y, w.z, w.w}}, o);
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float2 hat = decode2(static_cast<uint16_t>(codes[j / 2] >> (j % 2 * 16)));
        stale = __fmaf_rn(v[2 * j], o[2 * j], stale), stale = __fmaf_rn(v[2 * j + 1], o[2 * j + 1], stale);
        consistent = __fmaf_rn(hat.x, o[2 * j], consistent), consistent = __fmaf_rn(hat.y, o[2 * j + 1], consistent);
      }
#pragma unroll
      for (int d = C::kChunks / 2; d; d >>= 1) stale += __shfl_xor_sync(~0u, stale, d), consistent += __shfl_xor_sync(~0u, consistent, d);
      if (chunk == 0) sums.stale[row] = stale, sums.consistent[row] = consistent;
    }
    if constexpr (kOperand == Operand::query) {
      if (p.dot) {
        const float* m = p.key_mean + (batch * (p.heads / p.group) + head / p.group) * D + channel;
        float dot = 0.f;
#pragma unroll
        for (int j = 0; j < 8; ++j) dot = __fmaf_rn(v[j], __ldg(m + j), dot);
#pragma unroll
        for (int d = C::kChunks / 2; d; d >>= 1) dot += __shfl_xor_sync(~0u, dot, d);
        if (chunk == 0) p.dot[unit * kUnit + row] = dot;
      }
    }
  }
  if (threadIdx.x == 0) {
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) p.scale[unit * kBlocks + b] = scale[b].scale;
    if constexpr (kOperand == Operand::key_value) write_fold(p.fold + unit * kFoldFloats, scale, amax);
  }
  if constexpr (kProbe) {
    saturated = __reduce_add_sync(~0u, saturated), underflowed = __reduce_add_sync(~0u, underflowed), nonfinite = __reduce_add_sync(~0u, nonfinite);
    if (threadIdx.x % 32 == 0) {
      if (saturated) atomicAdd(p.stats, saturated);
      if (underflowed) atomicAdd(p.stats + 1, underflowed);
      if (nonfinite) atomicAdd(p.stats + 2, nonfinite);
      if (threadIdx.x == 0) atomicMax(p.stats + 3, static_cast<unsigned long long>(max(amax[0], amax[kBlocks - 1])));
    }
  }
  __syncthreads();
  if (p.token) build_token_image<D, kHalves>(row_image, token_image);
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncthreads();
  if (threadIdx.x == 0) {
    if (p.row) bulk_store(p.row + unit * C::kImage, row_image, C::kImage);
    if (p.token) bulk_store(p.token + unit * C::kImage, token_image, C::kImage);
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
    asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
  }
  if constexpr (kOperand == Operand::grad) finish_grad(p, sums, scale[0].scale, unit, warp_min);
}

template <int D>
__global__ void __launch_bounds__(MeanConfig<D>::kThreads) partial_sum_kernel(const __grid_constant__ MeanParams p) {
  using C = MeanConfig<D>;
  __shared__ float rows[C::kRows][D];
  const int64_t blocks = (p.tokens + C::kTokens - 1) / C::kTokens;
  const int64_t head = blockIdx.x % p.heads, index = blockIdx.x / p.heads % blocks, batch = blockIdx.x / (p.heads * blocks);
  const int row = threadIdx.x / C::kChunks, channel = threadIdx.x % C::kChunks * 8;
  float sum[8] = {};
#pragma unroll
  for (int i = 0; i < C::kPasses; ++i) {
    const int64_t token = index * C::kTokens + i * C::kRows + row;
    if (token >= p.tokens) break;
    float v[8];
    unpack(load_chunk(p, batch, head, token, channel), v);
#pragma unroll
    for (int j = 0; j < 8; ++j) sum[j] += finite(v[j]) ? v[j] : 0.f;
  }
#pragma unroll
  for (int j = 0; j < 8; ++j) rows[row][channel + j] = sum[j];
  __syncthreads();
  if (threadIdx.x < D) {
    float total = 0.f;
    for (int r = 0; r < C::kRows; ++r) total += rows[r][threadIdx.x];
    p.partial[((batch * p.heads + head) * blocks + index) * D + threadIdx.x] = total;
  }
}

template <int D>
__global__ void __launch_bounds__(1024) mean_kernel(const __grid_constant__ MeanParams p) {
  using C = MeanConfig<D>;
  __shared__ float groups[C::kGroups][D];
  const int64_t blocks = (p.tokens + C::kTokens - 1) / C::kTokens;
  const int channel = threadIdx.x % D, group = threadIdx.x / D;
  const float* partial = p.partial + static_cast<int64_t>(blockIdx.x) * blocks * D + channel;
  float sum = 0.f;
#pragma unroll 8
  for (int64_t i = group; i < blocks; i += C::kGroups) sum += partial[i * D];
  groups[group][channel] = sum;
  __syncthreads();
  if (group == 0) {
    for (int g = 1; g < C::kGroups; ++g) sum += groups[g][channel];
    p.mean[static_cast<int64_t>(blockIdx.x) * D + channel] = __fdiv_rn(sum, static_cast<float>(p.tokens));
  }
}

template <int D, Operand kOperand, bool kProbe>
cudaError_t launch(const QuantiseParams& p, cudaStream_t stream) {
  using C = QuantiseConfig<D>;
  auto* kernel = &quantise_kernel<D, kOperand, kProbe>;
  if (C::kSmem > 48 * 1024) {
    const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, C::kSmem);
    if (error != cudaSuccess) return error;
  }
  kernel<<<static_cast<unsigned>(static_cast<int64_t>(p.batch) * p.heads * p.units), C::kThreads, C::kSmem, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace quantise

template <int D>
cudaError_t launch_quantise(const QuantiseParams& p, Operand operand, cudaStream_t stream) {
  switch (operand) {
    case Operand::query:
      return p.probe ? quantise::launch<D, Operand::query, true>(p, stream) : quantise::launch<D, Operand::query, false>(p, stream);
    case Operand::key_value:
      return p.probe ? quantise::launch<D, Operand::key_value, true>(p, stream) : quantise::launch<D, Operand::key_value, false>(p, stream);
    default:
      return p.probe ? quantise::launch<D, Operand::grad, true>(p, stream) : quantise::launch<D, Operand::grad, false>(p, stream);
  }
}

template <int D>
cudaError_t launch_mean(const MeanParams& p, cudaStream_t stream) {
  using C = MeanConfig<D>;
  const int64_t blocks = (p.tokens + C::kTokens - 1) / C::kTokens;
  quantise::partial_sum_kernel<D><<<static_cast<unsigned>(static_cast<int64_t>(p.batch) * p.heads * blocks), C::kThreads, 0, stream>>>(p);
  if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess) return error;
  quantise::mean_kernel<D><<<static_cast<unsigned>(p.batch * p.heads), C::kGroups * D, 0, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace dm::sm90
