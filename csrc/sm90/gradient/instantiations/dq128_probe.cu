#include "../dq.cuh"

template cudaError_t dm::sm90::launch_dq<128, true>(const dm::DqParams&, cudaStream_t);
