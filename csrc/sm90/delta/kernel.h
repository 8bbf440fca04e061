// The matched delta of one attention call.
#pragma once
#include <cuda_runtime_api.h>

#include "../../params.h"

namespace dm::sm90 {

// Head dimensions 64, 128, 256; anything else is cudaErrorInvalidValue. Launches on `stream`, never synchronises.
cudaError_t run_delta(const DeltaParams& params, cudaStream_t stream);

template <int D>
cudaError_t launch_delta(const DeltaParams& params, cudaStream_t stream);

}  // namespace dm::sm90
