#include "../kernel.cuh"

template cudaError_t dm::sm90::launch_forward<128>(const dm::ForwardParams&, cudaStream_t);
