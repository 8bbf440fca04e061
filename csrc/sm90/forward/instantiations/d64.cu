#include "../kernel.cuh"

template cudaError_t dm::sm90::launch_forward<64>(const dm::ForwardParams&, cudaStream_t);
