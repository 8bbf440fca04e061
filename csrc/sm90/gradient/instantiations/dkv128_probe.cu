#include "../dkv.cuh"

template cudaError_t dm::sm90::launch_dkv<128, true, true, true>(const dm::DkvParams&, cudaStream_t);
