// The operators of dm_plugin and the pre-pass entries; attention.cpp registers the attention ones.
#include "api/common.h"

#include <tuple>

#ifndef DM_BUILD_INFO
#error "build with csrc/build.py, which defines DM_BUILD_INFO"
#endif

// JSON text: compiler, flags, torch headers, hash of the sources.
extern "C" __attribute__((visibility("default"))) const char* dm_plugin_build_info() { return DM_BUILD_INFO; }

namespace dm::api {

using Seven = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;
using Eight = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

// row, token, scale, fold, mean, dot, stats; what was not asked for is empty. keys: 64-token scale blocks and fold records.
Seven quantise_entry(const Tensor& x, bool keys, bool center, const std::optional<Tensor>& key_mean, bool row, bool token, bool probe) {
  check_input(x, "x", x, "x");
  STD_TORCH_CHECK(keys || !center, "center is set for a query operand, want it for keys and values only");
  STD_TORCH_CHECK(!keys || !key_mean, "key_mean is given for a key operand, want it for queries only");
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  check_arch(x);
  if (key_mean) {
    STD_TORCH_CHECK(key_mean->dim() == 3 && key_mean->size(1) > 0 && x.size(2) % key_mean->size(1) == 0, "key_mean has shape ",
                    shape_text(*key_mean), ", want (batch, key heads, head_dim)");
    check_scratch(*key_mean, "key_mean", ScalarType::Float, {x.size(0), key_mean->size(1), x.size(3)}, x);
  }
  const cudaStream_t stream = current_stream(x.get_device_index());
  const Tensor mean = token_mean(x, center, stream);
  const QuantiseOptions options{keys ? sm90::Operand::key_value : sm90::Operand::query, &mean, row, token, probe, key_mean ? &*key_mean : nullptr};
  const Quantised out = quantise(x, options, stream);
  return {out.row, out.token, out.scale, out.fold, mean, out.dot, out.stats};
}

// row, token, scale, d0_stale, d0_cons, lambda, e_pow, stats.
Eight quantise_grad_entry(const Tensor& grad, const Tensor& o, const Tensor& lse2, const Tensor& m2, bool probe) {
  check_input(grad, "dO", grad, "dO");
  const torch::stable::accelerator::DeviceGuard guard(grad.get_device_index());
  check_arch(grad);
  const int64_t rows = ceil_div(grad.size(1), kUnit) * kUnit;
  check_scratch(o, "o", ScalarType::BFloat16, {grad.size(0), grad.size(1), grad.size(2), grad.size(3)}, grad);
  check_scratch(lse2, "lse2", ScalarType::Float, {grad.size(0), grad.size(2), rows}, grad);
  check_scratch(m2, "m2", ScalarType::Float, {grad.size(0), grad.size(2), rows}, grad);
  const Grad g = quantise_grad(grad, o, lse2, m2, probe, current_stream(grad.get_device_index()));
  return {g.row, g.token, g.scale, g.d0_stale, g.d0_cons, g.lambda, g.e_pow, g.stats};
}

STABLE_TORCH_LIBRARY(dm_plugin, m) {
  m.def("quantise(Tensor x, bool keys, bool center, Tensor? key_mean, bool row, bool token, bool probe)"
        " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
  m.def("quantise_grad(Tensor grad, Tensor o, Tensor lse2, Tensor m2, bool probe)"
        " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
  m.def("attention_forward(Tensor q, Tensor k, Tensor v, float softmax_scale, bool causal, int causal_offset, bool center_k, bool center_v,"
        " int mode, bool keep, bool probe) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor,"
        " Tensor, Tensor, Tensor, Tensor)");
  m.def("attention_backward(Tensor grad, Tensor o, Tensor lse2, Tensor m2, Tensor q_row, Tensor q_t, Tensor q_scale, Tensor k_row, Tensor k_t,"
        " Tensor k_scale, Tensor k_fold, Tensor v_row, Tensor v_scale, int t_k, float softmax_scale, bool causal, int causal_offset, int mode,"
        " bool probe) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(dm_plugin, CUDA, m) {
  m.impl("quantise", TORCH_BOX(&quantise_entry));
  m.impl("quantise_grad", TORCH_BOX(&quantise_grad_entry));
}

}  // namespace dm::api
