#include "../dkv.cuh"

template cudaError_t dm::sm90::launch_dkv<256, false, true, false>(const dm::DkvParams&, cudaStream_t);
