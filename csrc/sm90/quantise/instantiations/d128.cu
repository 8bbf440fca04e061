#include "sm90/quantise/kernel.cuh"
template cudaError_t dm::sm90::launch_quantise<128>(const QuantiseParams&, Operand, cudaStream_t);
template cudaError_t dm::sm90::launch_mean<128>(const MeanParams&, cudaStream_t);
