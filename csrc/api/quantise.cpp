#include "api/common.h"

namespace dm::api {

Tensor token_mean(const Tensor& x, bool center, cudaStream_t stream) {
  const auto f32 = ScalarType::Float;
  if (!center) return empty(x, {0}, f32);
  sm90::MeanParams p{};
  describe(p, x);
  Tensor mean = empty(x, {p.batch, p.heads, p.head_dim}, f32);
  Tensor partial = empty(x, {p.batch, p.heads, ceil_div(p.tokens, 64), p.head_dim}, f32);
  p.partial = data<float>(partial), p.mean = data<float>(mean);
  check_cuda(sm90::run_mean(p, stream), "the mean over tokens");
  return mean;
}

Quantised quantise(const Tensor& x, const QuantiseOptions& options, cudaStream_t stream) {
  const bool keys = options.operand == sm90::Operand::key_value;
  sm90::QuantiseParams p{};
  describe(p, x);
  const int64_t batch = p.batch, heads = p.heads, d = p.head_dim, units = ceil_div(p.tokens, kUnit);
  p.units = static_cast<int32_t>(units), p.probe = options.probe;
  STD_TORCH_CHECK(batch * heads * units * 2 < (int64_t{1} << 31), "shape ", shape_text(x), " has too many blocks of 128 tokens, want fewer than 2^30");

  const std::vector<int64_t> none{0}, image{batch, heads, units, kUnit * d};
  const auto f32 = ScalarType::Float;
  Quantised out{
      empty(x, options.row ? image : none, ScalarType::Byte),
      empty(x, options.token ? image : none, ScalarType::Byte),
      empty(x, {batch, heads, keys ? 2 * units : units}, f32),
      empty(x, keys ? std::vector<int64_t>{batch, heads, units, kFoldFloats} : none, f32),
      empty(x, options.key_mean ? std::vector<int64_t>{batch, heads, units * kUnit} : none, f32),
      options.probe ? zeros(x, {4}, ScalarType::Long) : empty(x, none, ScalarType::Long),
  };
  if (options.mean) p.mean = data<float>(*options.mean);
  p.row = data<uint8_t>(out.row), p.token = data<uint8_t>(out.token);
  p.scale = data<float>(out.scale), p.fold = data<float>(out.fold), p.stats = data<unsigned long long>(out.stats);
  if (options.key_mean) {
    p.key_mean = data<float>(*options.key_mean), p.dot = data<float>(out.dot);
    p.group = static_cast<int32_t>(heads / options.key_mean->size(1));
  }
  check_cuda(sm90::run_quantise(p, options.operand, stream), "the quantise pre-pass");
  return out;
}

Grad quantise_grad(const Tensor& grad, const Tensor& o, const Tensor& lse2, const Tensor& m2, bool probe, cudaStream_t stream) {
  sm90::QuantiseParams p{};
  describe(p, grad);
  const int64_t batch = p.batch, heads = p.heads, d = p.head_dim, units = ceil_div(p.tokens, kUnit);
  p.units = static_cast<int32_t>(units), p.probe = probe;
  const std::vector<int64_t> image{batch, heads, units, kUnit * d}, rows{batch, heads, units * kUnit};
  const auto f32 = ScalarType::Float;
  Grad out{empty(grad, image, ScalarType::Byte), empty(grad, image, ScalarType::Byte),
           empty(grad, {batch, heads, units}, f32), empty(grad, rows, f32), empty(grad, rows, f32), empty(grad, rows, f32),
           empty(grad, {batch, heads, units}, f32), probe ? zeros(grad, {4}, ScalarType::Long) : empty(grad, {0}, ScalarType::Long)};
  p.row = data<uint8_t>(out.row), p.token = data<uint8_t>(out.token), p.scale = data<float>(out.scale);
  p.o = data<void>(o), p.lse2 = data<float>(lse2), p.m2 = data<float>(m2);
  p.d0_stale = data<float>(out.d0_stale), p.d0_cons = data<float>(out.d0_cons), p.lambda = data<float>(out.lambda);
  p.e_pow = data<float>(out.e_pow), p.stats = data<unsigned long long>(out.stats);
  check_cuda(sm90::run_quantise(p, sm90::Operand::grad, stream), "the dO pre-pass");
  return out;
}

}  // namespace dm::api
