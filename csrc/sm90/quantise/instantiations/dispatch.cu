#include "sm90/quantise/kernel.h"

cudaError_t dm::sm90::run_quantise(const QuantiseParams& p, Operand operand, cudaStream_t stream) {
  switch (p.head_dim) {
    case 64: return launch_quantise<64>(p, operand, stream);
    case 128: return launch_quantise<128>(p, operand, stream);
    case 256: return launch_quantise<256>(p, operand, stream);
    default: return cudaErrorInvalidValue;
  }
}

cudaError_t dm::sm90::run_mean(const MeanParams& p, cudaStream_t stream) {
  switch (p.head_dim) {
    case 64: return launch_mean<64>(p, stream);
    case 128: return launch_mean<128>(p, stream);
    case 256: return launch_mean<256>(p, stream);
    default: return cudaErrorInvalidValue;
  }
}
