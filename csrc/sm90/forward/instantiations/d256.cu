#include "../kernel256.cuh"

template cudaError_t dm::sm90::launch_forward256<256>(const dm::ForwardParams&, cudaStream_t);
