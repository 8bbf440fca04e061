// Checks and small helpers shared by the torch-facing entries. Only files in api/ include torch headers (the stable ABI).
#pragma once
#include <cuda_runtime.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <string>
#include <vector>

#include "params.h"
#include "sm90/quantise/kernel.h"

namespace dm::api {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// The current stream of torch on a device, from the libtorch_cuda that is loaded already.
cudaStream_t current_stream(int32_t device);

std::string shape_text(const Tensor& x);
void check_cuda(cudaError_t error, const char* what);

// "q has dtype float16, want bfloat16": the tensor, what came, what is wanted.
void check_input(const Tensor& x, const char* name, const Tensor& like, const char* like_name);
void check_scratch(const Tensor& x, const char* name, ScalarType dtype, std::vector<int64_t> sizes, const Tensor& like);
void check_arch(const Tensor& x);

// New tensors beside `like`; "out of memory" in words when the allocator fails.
Tensor empty(const Tensor& like, const std::vector<int64_t>& sizes, ScalarType dtype);
Tensor zeros(const Tensor& like, const std::vector<int64_t>& sizes, ScalarType dtype);

template <class T>
T* data(const Tensor& x) {
  return x.numel() ? static_cast<T*>(x.data_ptr()) : nullptr;
}

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Strides, alignment and sizes of x [B,T,heads,D] for the pre-pass.
template <class P>
void describe(P& p, const Tensor& x) {
  p.x = x.data_ptr();
  p.batch_stride = x.stride(0), p.token_stride = x.stride(1), p.head_stride = x.stride(2), p.channel_stride = x.stride(3);
  p.batch = static_cast<int32_t>(x.size(0)), p.tokens = static_cast<int32_t>(x.size(1));
  p.heads = static_cast<int32_t>(x.size(2)), p.head_dim = static_cast<int32_t>(x.size(3));
  const auto by8 = [&](int axis) { return x.size(axis) == 1 || x.stride(axis) % 8 == 0; };
  p.vectors = x.stride(3) == 1 && reinterpret_cast<uintptr_t>(p.x) % 16 == 0 && by8(0) && by8(1) && by8(2);
}

// One quantised operand and what its pre-pass also made; tensors that were not asked for are empty.
struct Quantised {
  Tensor row, token, scale, fold, dot, stats;
};

struct QuantiseOptions {
  sm90::Operand operand;
  const Tensor* mean = nullptr;      // key_value: subtracted first, unless it is empty
  bool row = true, token = true, probe = false;
  const Tensor* key_mean = nullptr;  // query: also <x, key_mean>
};

// FP32 [B, heads, D], or an empty tensor when center is not set.
Tensor token_mean(const Tensor& x, bool center, cudaStream_t stream);

Quantised quantise(const Tensor& x, const QuantiseOptions& options, cudaStream_t stream);

struct Grad {
  Tensor row, token, scale, d0_stale, d0_cons, lambda, e_pow, stats;
};

Grad quantise_grad(const Tensor& grad, const Tensor& o, const Tensor& lse2, const Tensor& m2, bool probe, cudaStream_t stream);

}  // namespace dm::api
