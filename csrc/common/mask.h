// Which keys a query sees, which tiles a block needs, and in which order blocks run.
#pragma once
#include <cstdint>

#include "../params.h"

namespace dm::sm90 {

// Keys [0, limit) are visible to query i. May be <= 0; never above Tk.
__device__ __forceinline__ int key_limit(const Shape& s, int i) {
  if (!s.causal) return s.t_k;
  const int64_t limit = int64_t(i) + s.causal_offset + 1;
  return limit < 0 ? 0 : limit > s.t_k ? s.t_k : int(limit);
}

// The same for a thread's rows row0 + n: limit_of(row_base(s, row0) + n, s), one register across a loop.
__device__ __forceinline__ int row_base(const Shape& s, int row0) {
  if (!s.causal) return 1 << 30;
  const int64_t limit = int64_t(row0) + s.causal_offset + 1;
  return limit < -(1 << 30) ? -(1 << 30) : limit > (1 << 30) ? (1 << 30) : int(limit);
}
__device__ __forceinline__ int limit_of(int base, const Shape& s) { return min(base, s.t_k); }

// First query that sees key j; Tq when none does.
__device__ __forceinline__ int first_query(const Shape& s, int j) {
  if (!s.causal) return 0;
  const int64_t first = int64_t(j) - s.causal_offset;
  return first < 0 ? 0 : first > s.t_q ? s.t_q : int(first);
}

// The same without the clamp to [0, Tq], for comparisons only; one uniform register.
__device__ __forceinline__ int first_query_base(const Shape& s, int j) {
  if (!s.causal) return -(1 << 30);
  const int64_t first = int64_t(j) - s.causal_offset;
  return first < -(1 << 30) ? -(1 << 30) : first > (1 << 30) ? (1 << 30) : int(first);
}

// Work of one CTA: unit `unit` of sequence-and-head `bh`. Heads run in sections whose streamed operands fit in L2;
// inside a section the longest rows of work come first.
struct Work {
  int bh, unit;
};
__device__ __forceinline__ Work pick_work(int index, int n_units, int n_bh, int section, bool last_first) {
  const int per_section = section * n_units;
  const int which = index / per_section, rest = index - which * per_section;
  const int first = which * section;
  const int here = min(section, n_bh - first);
  const int rank = rest / here;
  return {first + rest - rank * here, last_first ? n_units - 1 - rank : rank};
}

// Indices read anew: an epilogue that calls these keeps no index registers alive through the main loop.
__device__ __forceinline__ int fresh_thread() {
  int x;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
  return x;
}
__device__ __forceinline__ int fresh_block() {
  int x;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(x));
  return x;
}

// Heads of one section: as many as keep the streamed operands near 16 MiB, in whole groups that share a stream, but enough for
// 16 CTAs an SM, so that a section's last CTAs are a small part of it.
inline int heads_of_section(int64_t bytes_a_stream, int heads_a_stream, int n_units, int n_bh) {
  const int64_t streams = (int64_t(16) << 20) / (bytes_a_stream > 0 ? bytes_a_stream : 1);
  const int64_t enough = (16 * 132 + int64_t(n_units) * heads_a_stream - 1) / (int64_t(n_units) * heads_a_stream);
  const int64_t heads = (streams < enough ? enough : streams) * heads_a_stream;
  return int(heads < n_bh ? heads : n_bh);
}

}  // namespace dm::sm90
