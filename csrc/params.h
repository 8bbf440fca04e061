// Host-device contract of the sm90 attention kernels: plain structs, shapes in comments.
//
// Names: B batch, H query heads, G key heads (H % G == 0), Tq/Tk tokens, D head dim (64, 128 or 256),
// NQ = ceil(Tq/128), NK = ceil(Tk/128). A "unit" is 128 tokens; tokens past the end are zero codes.
//
// Images: the exact shared-memory bytes of a K-major wgmma operand, 128*D bytes per unit, unit-contiguous,
// the base 1024-byte aligned (16 suffices for the copies; 1024 keeps units aligned to swizzle atoms).
//   row image   X[token][d]:  D=128, 256: [D/128 panels][128 tokens][128 bytes of d], 128B swizzle
//                             D=64:       [128 tokens][64 bytes of d], 64B swizzle
//   token image XT[d][p]:     [D][128 bytes of tokens], 128B swizzle, tokens in pi order inside each group of 32;
//                             D=256 for v_t, k_t and q_t only: [2 halves of 64 tokens][D][64 bytes], 64B swizzle
//                             (do_t keeps the 128-token form at every D).
//   Swizzle of byte address a inside a unit: 128B: a ^= ((a >> 7) & 7) << 4;  64B: a ^= ((a >> 7) & 3) << 4.
//   pi(k) = (k & 16) + 2*((k & 15) >> 2) + (k & 1) + 8*((k >> 1) & 1): position k of a group of 32 holds token pi(k).
// Scales are FP32; x_hat = code * scale. Fold records, one per 128-key unit (FP32[8]):
//   {scale0, scale1, max, rho0, rho1, log2 rho0, log2 rho1, fold}; fold = 1: rho_h = scale_h / max (1 for an all-zero
//   or padding half, which max ignores); fold = 0: the halves differ too much, rho_h = 1, log2 rho_h = 0.
// Mask: key j is visible to query i iff j < Tk and (not causal or j <= i + causal_offset).
#pragma once
#include <cstdint>

namespace dm {

constexpr int kUnit = 128;        // tokens per image unit
constexpr int kScaleBlock = 64;   // keys per K/V scale
constexpr int kFoldFloats = 8;    // floats per fold record

struct Shape {
  int32_t batch, heads, kv_heads, head_dim;
  int32_t t_q, t_k;               // tokens
  int32_t n_q, n_k;               // units: ceil(t / 128)
  int32_t causal;                 // 0: full, 1: causal with causal_offset
  int64_t causal_offset;          // key j visible to query i iff j <= i + causal_offset
  float softmax_scale;            // multiplies q.k
  float softmax_scale_log2;       // fl32(softmax_scale * log2(e))
};

// A BF16 output [B, T, heads, D] with element strides; the last dimension is contiguous. Written in 16-byte pieces:
// data 16-byte aligned, strides multiples of 8.
struct Bf16View {
  void* data;
  int64_t batch_stride, token_stride, head_stride;
};

struct ForwardParams {
  Shape shape;
  const uint8_t* q_row;           // [B,H,NQ] units
  const uint8_t* k_row;           // [B,G,NK]
  const uint8_t* v_t;             // [B,G,NK]; codes of V - v_mean when V is centred
  const float* q_scale;           // [B,H,NQ]
  const float* k_scale;           // [B,G,2*NK]
  const float* v_fold;            // [B,G,NK,8]
  const float* v_mean;            // [B,G,D] or null (V not centred): added to the returned O only
  Bf16View o;                     // [B,Tq,H,D] = bf16(O_centred + v_mean); rows without a key are 0
  void* o_centred;                // bf16 [B,Tq,H,D] contiguous, before v_mean: what the deltas use; null: not stored
  float* lse2;                    // [B,H,NQ*128] log2-sum-exp2 of the (centred) scaled scores; -inf: no key, or padding row
  float* m2;                      // [B,H,NQ*128] row maximum of the same, in log2 units; -inf likewise
};

// delta = d0 + sum_j P (dP_hat - d0) / sum_j P
struct DeltaParams {
  Shape shape;
  const uint8_t *q_row, *do_row;  // [B,H,NQ]
  const uint8_t *k_row, *v_row;   // [B,G,NK]
  const float *q_scale, *do_scale;  // [B,H,NQ]
  const float *k_scale, *v_scale;   // [B,G,2*NK]
  const float* lambda;            // [B,H,NQ*128] LSE2 - E_I; +inf for rows without a key and padding rows
  const float* d0;                // [B,H,NQ*128] <dO_hat, O_centred>
  float* delta;                   // [B,H,NQ*128] out; 0 for rows without a key and padding rows
};

struct DqParams {
  Shape shape;
  const uint8_t *q_row, *do_row;  // [B,H,NQ]
  const uint8_t *k_row, *v_row;   // [B,G,NK]
  const uint8_t* k_t;             // [B,G,NK]
  const float *q_scale, *do_scale;  // [B,H,NQ]
  const float *k_scale, *v_scale;   // [B,G,2*NK]
  const float* k_fold;            // [B,G,NK,8]
  const float *lambda, *delta;    // [B,H,NQ*128]; delta 0 where lambda is +inf
  const float* e_pow;             // [B,H,NQ] 2^-E_I
  Bf16View dq;                    // [B,Tq,H,D]
  uint32_t* tile_amax;            // [B,H,NQ,NK] bits of max |2^E dS| over a 128x128 tile; zeroed by the caller
  // probe == 1 only, each [B,H,NQ*128], all or none (dS here is P (dP_hat - delta), P normalised):
  float *row_sum, *row_abs_sum;   // sum_j dS, sum_j |dS| before the cast
  float *row_sum_cast, *row_abs_sum_cast;  // the same of the decoded dQ codes
  float *top_p, *entropy;         // max_j P; -sum_j P ln P (nats)
  unsigned long long* ds_codes;   // [3] += saturated (|code| = 448), underflowed (code 0 of dS != 0), non-finite; visible
  unsigned long long* p_codes;    // [3] += the same of the codes of P 2^E that dV contracts; visible elements
  int32_t probe;
};

struct DkvParams {
  Shape shape;
  const uint8_t *q_row, *do_row;  // [B,H,NQ]
  const uint8_t *q_t, *do_t;      // [B,H,NQ]
  const uint8_t *k_row, *v_row;   // [B,G,NK]
  const float *q_scale, *do_scale;  // [B,H,NQ]
  const float *k_scale, *v_scale;   // [B,G,2*NK]
  const float *lambda, *delta;    // [B,H,NQ*128]
  const float* e_pow;             // [B,H,NQ] 2^-E_I
  const uint32_t* tile_amax;      // [B,H,NQ,NK] as written by dq
  Bf16View dk, dv;                // [B,Tk,G,D]
  // probe == 1 only: partial column sums of dK in FP32 before rounding, one row per 64 keys, to be added in order
  float *dk_col_sum, *dk_col_abs;  // [B,G,2*NK,D]
  int32_t probe;
};

}  // namespace dm
