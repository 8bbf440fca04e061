// Tiles and shared memory of the quantise pre-pass: one CTA holds one 128-token unit of one head in registers as BF16.
#pragma once
#include "params.h"

namespace dm::sm90 {

enum class Operand { query, key_value, grad };  // which scale blocks, means and row products a unit needs

template <int D>
struct QuantiseConfig {
  static_assert(D == 64 || D == 128 || D == 256);
  static constexpr int kThreads = 256;
  static constexpr int kWarps = kThreads / 32;
  static constexpr int kChunks = D / 8;                       // 16-byte loads in a token row
  static constexpr int kRowsPerPass = kThreads / kChunks;     // tokens loaded at once
  static constexpr int kPasses = kUnit / kRowsPerPass;        // packed registers: 4 * kPasses
  static constexpr int kImage = kUnit * D;                    // bytes of an image
  static constexpr int kSmem = 2 * kImage;                    // row image, token image
};

// Means: one CTA sums 64 tokens; a second kernel adds the partial sums of a head in a fixed order.
template <int D>
struct MeanConfig {
  static constexpr int kThreads = 256;
  static constexpr int kTokens = 64;
  static constexpr int kChunks = D / 8;
  static constexpr int kRows = kThreads / kChunks;
  static constexpr int kPasses = kTokens / kRows;
  static constexpr int kGroups = 1024 / D;                    // second kernel: threads = kGroups * D = 1024
};

}  // namespace dm::sm90
