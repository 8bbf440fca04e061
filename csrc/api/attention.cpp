#include "api/common.h"
#include "sm90/delta/kernel.h"
#include "sm90/forward/kernel.h"
#include "sm90/gradient/kernel.h"

#include <cmath>
#include <tuple>

namespace dm::api {

namespace {

using sm90::Operand;

enum Mode : int64_t { kStale = 0, kConsistent = 1, kMatched = 2 };

Bf16View view(const Tensor& x) { return {x.data_ptr(), x.stride(0), x.stride(1), x.stride(2)}; }

Shape make_shape(const Tensor& q, int64_t kv_heads, int64_t t_k, double softmax_scale, bool causal, int64_t causal_offset) {
  STD_TORCH_CHECK(std::isfinite(softmax_scale), "softmax_scale is ", softmax_scale, ", want a finite number");
  Shape s{};
  s.batch = static_cast<int32_t>(q.size(0)), s.t_q = static_cast<int32_t>(q.size(1));
  s.heads = static_cast<int32_t>(q.size(2)), s.head_dim = static_cast<int32_t>(q.size(3));
  s.kv_heads = static_cast<int32_t>(kv_heads), s.t_k = static_cast<int32_t>(t_k);
  s.n_q = static_cast<int32_t>(ceil_div(s.t_q, kUnit)), s.n_k = static_cast<int32_t>(ceil_div(t_k, kUnit));
  s.causal = causal, s.causal_offset = causal_offset;
  s.softmax_scale = static_cast<float>(softmax_scale);
  s.softmax_scale_log2 = static_cast<float>(softmax_scale * 1.4426950408889634);
  return s;
}

void check_heads(const Tensor& q, const Tensor& k, const Tensor& v) {
  STD_TORCH_CHECK(q.size(0) == k.size(0), "k has batch ", k.size(0), ", want q's ", q.size(0));
  STD_TORCH_CHECK(q.size(3) == k.size(3), "k has head_dim ", k.size(3), ", want q's ", q.size(3));
  for (int64_t i = 0; i < 4; ++i) STD_TORCH_CHECK(k.size(i) == v.size(i), "v has shape ", shape_text(v), ", want k's ", shape_text(k));
  STD_TORCH_CHECK(q.size(2) % k.size(2) == 0, "q has ", q.size(2), " heads and k ", k.size(2), ", want a number of query heads that the key heads divide");
}

void check_mode(int64_t mode) { STD_TORCH_CHECK(mode >= kStale && mode <= kMatched, "mode is ", mode, ", want 0 (stale), 1 (consistent) or 2 (matched)"); }

Tensor or_none(const Tensor& like, ScalarType dtype) { return empty(like, {0}, dtype); }

}  // namespace

using Forward = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

// o, o_centred, lse2, m2, q_row, q_t, q_scale, k_row, k_t, k_scale, k_fold, v_row, v_scale, k_mean, v_mean, q_dot, stats.
// keep: also what backward reads; otherwise those tensors are empty. mode: the delta of the backward that autograd will run.
Forward attention_forward(const Tensor& q, const Tensor& k, const Tensor& v, double softmax_scale, bool causal, int64_t causal_offset,
                          bool center_k, bool center_v, int64_t mode, bool keep, bool probe) {
  check_input(q, "q", q, "q"), check_input(k, "k", q, "q"), check_input(v, "v", q, "q");
  check_heads(q, k, v);
  check_mode(mode);
  const torch::stable::accelerator::DeviceGuard guard(q.get_device_index());
  check_arch(q);
  const cudaStream_t stream = current_stream(q.get_device_index());
  const Shape shape = make_shape(q, k.size(2), k.size(1), softmax_scale, causal, causal_offset);

  // Q, the longest, starts as early as it can: the host's work for the others then hides behind it.
  const Tensor k_mean = token_mean(k, center_k, stream);
  const Quantised qq = quantise(q, {Operand::query, nullptr, true, keep, probe, center_k ? &k_mean : nullptr}, stream);
  const Quantised kq = quantise(k, {Operand::key_value, &k_mean, true, keep, probe}, stream);
  const Tensor v_mean = token_mean(v, center_v, stream);
  const Quantised vq = quantise(v, {Operand::key_value, &v_mean, keep, true, probe}, stream);

  const int64_t rows = int64_t{shape.n_q} * kUnit;
  const auto bf16 = ScalarType::BFloat16, f32 = ScalarType::Float;
  const std::vector<int64_t> like_q{q.size(0), q.size(1), q.size(2), q.size(3)};
  Tensor o = empty(q, like_q, bf16);
  Tensor o_centred = keep && center_v ? empty(q, like_q, bf16) : or_none(q, bf16);
  Tensor lse2 = empty(q, {q.size(0), q.size(2), rows}, f32), m2 = empty(q, {q.size(0), q.size(2), rows}, f32);
  Tensor stats = probe ? empty(q, {3, 4}, ScalarType::Long) : or_none(q, ScalarType::Long);

  ForwardParams p{};
  p.shape = shape;
  p.q_row = data<uint8_t>(qq.row), p.k_row = data<uint8_t>(kq.row), p.v_t = data<uint8_t>(vq.token);
  p.q_scale = data<float>(qq.scale), p.k_scale = data<float>(kq.scale), p.v_fold = data<float>(vq.fold), p.v_mean = data<float>(v_mean);
  p.o = view(o), p.o_centred = data<void>(o_centred), p.lse2 = data<float>(lse2), p.m2 = data<float>(m2);
  if (probe) {
    auto* table = data<unsigned long long>(stats);
    const Tensor* parts[3] = {&qq.stats, &kq.stats, &vq.stats};
    for (int i = 0; i < 3; ++i)
      check_cuda(cudaMemcpyAsync(table + 4 * i, parts[i]->data_ptr(), 4 * sizeof(*table), cudaMemcpyDeviceToDevice, stream), "copying code statistics");
  }
  check_cuda(sm90::run_forward(p, stream), "the forward kernel");
  return {o, o_centred, lse2, m2, qq.row, qq.token, qq.scale, kq.row, kq.token, kq.scale, kq.fold, vq.row, vq.scale, k_mean, v_mean, qq.dot, stats};
}

using Backward = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

// dq, dk, dv, delta (matched; else empty), d0_stale, d0_cons, and for the probe: rows [6,B,H,NQ*128] (row_sum, row_abs_sum, both after
// the cast, top_p, entropy), columns [2,B,G,2*NK,D], tile_amax [B,H,NQ,NK], e_pow [B,H,NQ], stats [3,4] of dO, dS, P
// (amax of the first alone).
Backward attention_backward(const Tensor& grad, const Tensor& o, const Tensor& lse2, const Tensor& m2, const Tensor& q_row, const Tensor& q_t,
                            const Tensor& q_scale, const Tensor& k_row, const Tensor& k_t, const Tensor& k_scale, const Tensor& k_fold,
                            const Tensor& v_row, const Tensor& v_scale, int64_t t_k, double softmax_scale, bool causal, int64_t causal_offset,
                            int64_t mode, bool probe) {
  check_input(grad, "dO", grad, "dO");
  STD_TORCH_CHECK(k_row.dim() == 4 && t_k > 0, "k_row has shape ", shape_text(k_row), ", want (batch, key heads, units, bytes)");
  check_mode(mode);
  const torch::stable::accelerator::DeviceGuard guard(grad.get_device_index());
  check_arch(grad);
  const cudaStream_t stream = current_stream(grad.get_device_index());
  const int64_t kv_heads = k_row.size(1);
  const Shape shape = make_shape(grad, kv_heads, t_k, softmax_scale, causal, causal_offset);
  const int64_t b = shape.batch, h = shape.heads, d = shape.head_dim, n_q = shape.n_q, n_k = shape.n_k;
  STD_TORCH_CHECK(kv_heads > 0 && h % kv_heads == 0, "dO has ", h, " heads and k ", kv_heads, ", want a number of query heads that the key heads divide");
  const auto bf16 = ScalarType::BFloat16, f32 = ScalarType::Float, u8 = ScalarType::Byte;
  const std::vector<int64_t> rows{b, h, n_q * kUnit}, q_image{b, h, n_q, kUnit * d}, k_image{b, kv_heads, n_k, kUnit * d};
  check_scratch(o, "o", bf16, {b, shape.t_q, h, d}, grad);
  check_scratch(lse2, "lse2", f32, rows, grad), check_scratch(m2, "m2", f32, rows, grad);
  check_scratch(q_row, "q_row", u8, q_image, grad), check_scratch(q_t, "q_t", u8, q_image, grad), check_scratch(q_scale, "q_scale", f32, {b, h, n_q}, grad);
  check_scratch(k_row, "k_row", u8, k_image, grad), check_scratch(k_t, "k_t", u8, k_image, grad), check_scratch(v_row, "v_row", u8, k_image, grad);
  check_scratch(k_scale, "k_scale", f32, {b, kv_heads, 2 * n_k}, grad), check_scratch(v_scale, "v_scale", f32, {b, kv_heads, 2 * n_k}, grad);
  check_scratch(k_fold, "k_fold", f32, {b, kv_heads, n_k, kFoldFloats}, grad);

  const Grad g = quantise_grad(grad, o, lse2, m2, probe, stream);
  Tensor delta = mode == kMatched ? empty(grad, rows, f32) : or_none(grad, f32);
  if (mode == kMatched) {
    DeltaParams p{};
    p.shape = shape;
    p.q_row = data<uint8_t>(q_row), p.do_row = data<uint8_t>(g.row), p.k_row = data<uint8_t>(k_row), p.v_row = data<uint8_t>(v_row);
    p.q_scale = data<float>(q_scale), p.do_scale = data<float>(g.scale), p.k_scale = data<float>(k_scale), p.v_scale = data<float>(v_scale);
    p.lambda = data<float>(g.lambda), p.d0 = data<float>(g.d0_cons), p.delta = data<float>(delta);
    check_cuda(sm90::run_delta(p, stream), "the delta kernel");
  }
  const float* used = data<float>(mode == kMatched ? delta : mode == kStale ? g.d0_stale : g.d0_cons);

  Tensor dq = empty(grad, {b, shape.t_q, h, d}, bf16), dk = empty(grad, {b, t_k, kv_heads, d}, bf16), dv = empty(grad, {b, t_k, kv_heads, d}, bf16);
  Tensor tile_amax = empty(grad, {b, h, n_q, n_k}, ScalarType::Int);
  check_cuda(cudaMemsetAsync(tile_amax.data_ptr(), 0, tile_amax.numel() * sizeof(int32_t), stream), "clearing the tile table");
  const auto when = [&](std::vector<int64_t> sizes, ScalarType dtype) { return probe ? empty(grad, sizes, dtype) : or_none(grad, dtype); };
  Tensor row_stats = when({6, b, h, n_q * kUnit}, f32), columns = when({2, b, kv_heads, 2 * n_k, d}, f32);
  Tensor stats = probe ? zeros(grad, {3, 4}, ScalarType::Long) : or_none(grad, ScalarType::Long);

  DqParams p{};
  p.shape = shape;
  p.q_row = data<uint8_t>(q_row), p.do_row = data<uint8_t>(g.row), p.k_row = data<uint8_t>(k_row), p.v_row = data<uint8_t>(v_row), p.k_t = data<uint8_t>(k_t);
  p.q_scale = data<float>(q_scale), p.do_scale = data<float>(g.scale), p.k_scale = data<float>(k_scale), p.v_scale = data<float>(v_scale);
  p.k_fold = data<float>(k_fold), p.lambda = data<float>(g.lambda), p.delta = used, p.e_pow = data<float>(g.e_pow);
  p.dq = view(dq), p.tile_amax = data<uint32_t>(tile_amax), p.probe = probe;
  if (probe) {
    const int64_t n = b * h * n_q * kUnit;
    float* r = data<float>(row_stats);
    p.row_sum = r, p.row_abs_sum = r + n, p.row_sum_cast = r + 2 * n, p.row_abs_sum_cast = r + 3 * n, p.top_p = r + 4 * n, p.entropy = r + 5 * n;
    auto* table = data<unsigned long long>(stats);
    check_cuda(cudaMemcpyAsync(table, g.stats.data_ptr(), 4 * sizeof(*table), cudaMemcpyDeviceToDevice, stream), "copying code statistics");
    p.ds_codes = table + 4, p.p_codes = table + 8;
  }
  check_cuda(sm90::run_dq(p, stream), "the dQ kernel");

  DkvParams w{};
  w.shape = shape;
  w.q_row = p.q_row, w.do_row = p.do_row, w.q_t = data<uint8_t>(q_t), w.do_t = data<uint8_t>(g.token), w.k_row = p.k_row, w.v_row = p.v_row;
  w.q_scale = p.q_scale, w.do_scale = p.do_scale, w.k_scale = p.k_scale, w.v_scale = p.v_scale;
  w.lambda = p.lambda, w.delta = used, w.e_pow = p.e_pow, w.tile_amax = p.tile_amax, w.dk = view(dk), w.dv = view(dv), w.probe = probe;
  if (probe) w.dk_col_sum = data<float>(columns), w.dk_col_abs = w.dk_col_sum + b * kv_heads * 2 * n_k * d;
  check_cuda(sm90::run_dkv(w, stream), "the dK, dV kernel");
  return {dq, dk, dv, delta, g.d0_stale, g.d0_cons, row_stats, columns, probe ? tile_amax : or_none(grad, ScalarType::Int), probe ? g.e_pow : or_none(grad, f32), stats};
}
STABLE_TORCH_LIBRARY_IMPL(dm_plugin, CUDA, m) {
  m.impl("attention_forward", TORCH_BOX(&attention_forward));
  m.impl("attention_backward", TORCH_BOX(&attention_backward));
}

}  // namespace dm::api
