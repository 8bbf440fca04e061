// Gradients of one attention call on E4M3 codes, given a delta a row.
#pragma once
#include <cuda_runtime_api.h>

#include "../../params.h"

namespace dm::sm90 {

// Head dimensions 64, 128, 256; anything else is cudaErrorInvalidValue. Launches on `stream`, never synchronises.
cudaError_t run_dq(const DqParams& params, cudaStream_t stream);    // dQ and the tile amax table
cudaError_t run_dkv(const DkvParams& params, cudaStream_t stream);  // dK and dV; after run_dq on the same stream

template <int D, bool Probe>
cudaError_t launch_dq(const DqParams& params, cudaStream_t stream);
template <int D, bool WithDv, bool WithDk, bool Probe>
cudaError_t launch_dkv(const DkvParams& params, cudaStream_t stream);

}  // namespace dm::sm90
