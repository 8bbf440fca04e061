#include "sm90/quantise/kernel.cuh"
template cudaError_t dm::sm90::launch_quantise<256>(const QuantiseParams&, Operand, cudaStream_t);
template cudaError_t dm::sm90::launch_mean<256>(const MeanParams&, cudaStream_t);
