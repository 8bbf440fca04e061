#include "../kernel.cuh"

template cudaError_t dm::sm90::launch_delta<128>(const dm::DeltaParams&, cudaStream_t);
