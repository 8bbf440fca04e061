#include "../kernel.h"

namespace dm::sm90 {

cudaError_t run_delta(const DeltaParams& params, cudaStream_t stream) {
  switch (params.shape.head_dim) {
    case 64: return launch_delta<64>(params, stream);
    case 128: return launch_delta<128>(params, stream);
    case 256: return launch_delta<256>(params, stream);
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace dm::sm90
