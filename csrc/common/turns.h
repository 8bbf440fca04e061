// Two warpgroups take turns: while one issues tensor-core products and promotes them, the other does its arithmetic.
// Named barriers 1 and 2, 256 threads each; both warpgroups call take() and give() equally often.
#pragma once
#include <cstdint>

namespace dm::sm90 {

struct Turns {
  int wg;
  // any: at least one turn will be taken. The first one is the first warpgroup's.
  __device__ __forceinline__ Turns(int wg, bool any) : wg(wg) {
    if (wg == 1 && any) asm volatile("bar.arrive 1, 256;" ::: "memory");
  }
  __device__ __forceinline__ void take() const {
    asm volatile(
        "{ .reg .pred p; setp.eq.s32 p, %0, 0;\n"
        "@p bar.sync 1, 256;\n"
        "@!p bar.sync 2, 256; }" ::"r"(wg)
        : "memory");
  }
  // last: this warpgroup gives for the last time. The second warpgroup's last turn has no taker.
  __device__ __forceinline__ void give(bool last) const {
    asm volatile(
        "{ .reg .pred p, q; setp.eq.s32 p, %0, 0; setp.eq.s32 q, %1, 1;\n"
        "@p bar.arrive 2, 256;\n"
        "@q bar.arrive 1, 256; }" ::"r"(wg), "r"(wg & int(!last))
        : "memory");
  }
};

}  // namespace dm::sm90
