#include "../kernel.h"

namespace dm::sm90 {

cudaError_t run_forward(const ForwardParams& params, cudaStream_t stream) {
  switch (params.shape.head_dim) {
    case 64: return launch_forward<64>(params, stream);
    case 128: return launch_forward<128>(params, stream);
    case 256: return launch_forward256<256>(params, stream);
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace dm::sm90
