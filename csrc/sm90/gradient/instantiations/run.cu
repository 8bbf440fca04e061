#include "../kernel.h"

namespace dm::sm90 {

cudaError_t run_dq(const DqParams& params, cudaStream_t stream) {
  const bool probe = params.probe != 0;
  switch (params.shape.head_dim) {
    case 64: return probe ? launch_dq<64, true>(params, stream) : launch_dq<64, false>(params, stream);
    case 128: return probe ? launch_dq<128, true>(params, stream) : launch_dq<128, false>(params, stream);
    case 256: return probe ? launch_dq<256, true>(params, stream) : launch_dq<256, false>(params, stream);
    default: return cudaErrorInvalidValue;
  }
}

cudaError_t run_dkv(const DkvParams& params, cudaStream_t stream) {
  const bool probe = params.probe != 0;
  switch (params.shape.head_dim) {
    case 64: return probe ? launch_dkv<64, true, true, true>(params, stream) : launch_dkv<64, true, true, false>(params, stream);
    case 128: return probe ? launch_dkv<128, true, true, true>(params, stream) : launch_dkv<128, true, true, false>(params, stream);
    case 256: {
      const cudaError_t error = launch_dkv<256, true, false, false>(params, stream);
      if (error != cudaSuccess) return error;
      return probe ? launch_dkv<256, false, true, true>(params, stream) : launch_dkv<256, false, true, false>(params, stream);
    }
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace dm::sm90
