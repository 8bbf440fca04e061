#include "../dq.cuh"

template cudaError_t dm::sm90::launch_dq<128, false>(const dm::DqParams&, cudaStream_t);
