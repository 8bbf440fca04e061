// O and LSE of one attention call on E4M3 codes.
#pragma once
#include <cuda_runtime_api.h>

#include "../../params.h"

namespace dm::sm90 {

// Head dimensions 64, 128, 256; anything else is cudaErrorInvalidValue. Launches on `stream`, never synchronises.
cudaError_t run_forward(const ForwardParams& params, cudaStream_t stream);

template <int D>
cudaError_t launch_forward(const ForwardParams& params, cudaStream_t stream);     // 64, 128
template <int D>
cudaError_t launch_forward256(const ForwardParams& params, cudaStream_t stream);

}  // namespace dm::sm90
