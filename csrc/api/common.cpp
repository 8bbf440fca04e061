#include "api/common.h"

#include <dlfcn.h>

#include <algorithm>
#include <exception>

namespace dm::api {

namespace {

std::string dtype_text(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::BFloat16: return "bfloat16";
    case ScalarType::Half: return "float16";
    case ScalarType::Float: return "float32";
    case ScalarType::Double: return "float64";
    case ScalarType::Byte: return "uint8";
    case ScalarType::Int: return "int32";
    case ScalarType::Long: return "int64";
    default: return "dtype number " + std::to_string(static_cast<int>(dtype));
  }
}

int32_t dtype_number(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::BFloat16: return aoti_torch_dtype_bfloat16();
    case ScalarType::Float: return aoti_torch_dtype_float32();
    case ScalarType::Byte: return aoti_torch_dtype_uint8();
    case ScalarType::Int: return aoti_torch_dtype_int32();
    default: return aoti_torch_dtype_int64();
  }
}

std::string list_text(const std::vector<int64_t>& sizes) {
  std::string text = "(";
  for (size_t i = 0; i < sizes.size(); ++i) text += (i ? ", " : "") + std::to_string(sizes[i]);
  return text + ")";
}

std::string device_text(const Tensor& x) { return x.is_cuda() ? "cuda:" + std::to_string(x.get_device_index()) : x.is_cpu() ? "cpu" : "another device"; }

using StreamGetter = int32_t (*)(int32_t, void**);

StreamGetter stream_getter() {
  static const StreamGetter getter = [] {
    void* library = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
    STD_TORCH_CHECK(library != nullptr, "this torch has no CUDA (libtorch_cuda.so is not loaded); install a CUDA build of torch >= 2.11");
    auto* found = reinterpret_cast<StreamGetter>(dlsym(library, "aoti_torch_get_current_cuda_stream"));
    STD_TORCH_CHECK(found != nullptr, "libtorch_cuda.so has no aoti_torch_get_current_cuda_stream; install torch >= 2.11");
    return found;
  }();
  return getter;
}

template <class Make>
Tensor allocate(const std::vector<int64_t>& sizes, const Make& make) {
  try {
    return make();
  } catch (const std::exception&) {
    STD_TORCH_CHECK(false, "CUDA out of memory: a tensor of shape ", list_text(sizes), " for dm_plugin's attention was refused by the allocator; free memory, or use fewer tokens or heads in a call");
  }
}

}  // namespace

// The C entry directly: a call makes some twenty tensors, and the dispatcher would cost more than their kernels at small sizes.
Tensor empty(const Tensor& like, const std::vector<int64_t>& sizes, ScalarType dtype) {
  return allocate(sizes, [&] {
    std::vector<int64_t> strides(sizes.size(), 1);
    for (size_t i = sizes.size(); i-- > 1;) strides[i - 1] = strides[i] * std::max<int64_t>(sizes[i], 1);
    AtenTensorHandle handle = nullptr;
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(), dtype_number(dtype),
                                                           aoti_torch_device_type_cuda(), like.get_device_index(), &handle));
    return Tensor(handle);
  });
}

Tensor zeros(const Tensor& like, const std::vector<int64_t>& sizes, ScalarType dtype) {
  return allocate(sizes, [&] { return torch::stable::new_zeros(like, sizes, dtype); });
}

cudaStream_t current_stream(int32_t device) {
  void* stream = nullptr;
  STD_TORCH_CHECK(stream_getter()(device, &stream) == 0, "torch gave no current stream for cuda:", device);
  return static_cast<cudaStream_t>(stream);
}

std::string shape_text(const Tensor& x) {
  std::vector<int64_t> sizes;
  for (int64_t i = 0; i < x.dim(); ++i) sizes.push_back(x.size(i));
  return list_text(sizes);
}

void check_cuda(cudaError_t error, const char* what) {
  STD_TORCH_CHECK(error == cudaSuccess, what, " failed: ", cudaGetErrorString(error));
}

void check_input(const Tensor& x, const char* name, const Tensor& like, const char* like_name) {
  STD_TORCH_CHECK(x.is_cuda(), name, " is on ", device_text(x), ", want a CUDA tensor; move it to the GPU");
  STD_TORCH_CHECK(x.get_device_index() == like.get_device_index(), name, " is on ", device_text(x), ", want ", device_text(like), " like ", like_name, "; put all on one device");
  STD_TORCH_CHECK(x.scalar_type() == ScalarType::BFloat16, name, " has dtype ", dtype_text(x.scalar_type()), ", want bfloat16; cast it");
  STD_TORCH_CHECK(x.dim() == 4, name, " has shape ", shape_text(x), ", want 4 dimensions (batch, tokens, heads, head_dim)");
  for (int64_t i = 0; i < 4; ++i) STD_TORCH_CHECK(x.size(i) > 0, name, " has shape ", shape_text(x), ", want no empty dimension");
  const int64_t d = x.size(3);
  STD_TORCH_CHECK(d == 64 || d == 128 || d == 256, name, " has head_dim ", d, ", want 64, 128 or 256; pad it or use another backend");
  STD_TORCH_CHECK(x.size(1) <= (1 << 20), name, " has ", x.size(1), " tokens, want at most 1048576");
  STD_TORCH_CHECK(reinterpret_cast<uintptr_t>(x.data_ptr()) % 2 == 0, name, " starts at an odd address, want 2-byte alignment");
}

void check_scratch(const Tensor& x, const char* name, ScalarType dtype, std::vector<int64_t> sizes, const Tensor& like) {
  STD_TORCH_CHECK(x.is_cuda() && x.get_device_index() == like.get_device_index(), name, " is on ", device_text(x), ", want ", device_text(like));
  STD_TORCH_CHECK(x.scalar_type() == dtype, name, " has dtype ", dtype_text(x.scalar_type()), ", want ", dtype_text(dtype));
  bool same = x.dim() == static_cast<int64_t>(sizes.size());
  for (size_t i = 0; same && i < sizes.size(); ++i) same = x.size(i) == sizes[i];
  STD_TORCH_CHECK(same, name, " has shape ", shape_text(x), ", want ", list_text(sizes));
  STD_TORCH_CHECK(x.is_contiguous(), name, " is not contiguous, want the tensor that the forward or pre-pass returned");
  STD_TORCH_CHECK(reinterpret_cast<uintptr_t>(x.data_ptr()) % 16 == 0, name, " is misaligned, want a base address that 16 divides");
}

void check_arch(const Tensor& x) {
  int major = 0, minor = 0;
  const int device = x.get_device_index();
  check_cuda(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "reading the compute capability");
  check_cuda(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device), "reading the compute capability");
  STD_TORCH_CHECK(major == 9 && minor == 0, "cuda:", device, " is sm_", major, minor, ", want sm_90 (H100, H200); use another backend there");
}

}  // namespace dm::api
