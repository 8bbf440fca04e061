#include "../kernel.cuh"

template cudaError_t dm::sm90::launch_delta<256>(const dm::DeltaParams&, cudaStream_t);
