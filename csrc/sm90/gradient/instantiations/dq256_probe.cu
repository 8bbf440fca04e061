#include "../dq.cuh"

template cudaError_t dm::sm90::launch_dq<256, true>(const dm::DqParams&, cudaStream_t);
