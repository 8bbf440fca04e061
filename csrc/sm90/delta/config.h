// Tiles and shared-memory map of the delta pass.
#pragma once
#include "../../common/image.h"
#include "../../params.h"

namespace dm::sm90 {

template <int D_>
struct DeltaConfig {
  static constexpr int D = D_;
  static constexpr int kWarpgroups = 3;               // consumers, 64 query rows each; few registers, so three fit
  static constexpr int kRegisters = 160;              // of a consumer thread
  static constexpr int kRows = 64 * kWarpgroups;      // queries of a CTA: consecutive halves of 128-token units
  static constexpr int kThreads = 128 * (kWarpgroups + 1);
  static constexpr int kTile = 128;                   // keys
  static constexpr int kStages = D == 256 ? 2 : 3;
  using Q = RowImage<D, 64>;                          // one a warpgroup
  using K = RowImage<D, kTile>;

  static constexpr int kQ = 0;
  static constexpr int kDo = kQ + kWarpgroups * Q::kBytes;
  static constexpr int kK = kDo + kWarpgroups * Q::kBytes;
  static constexpr int kV = kK + kStages * K::kBytes;
  static constexpr int kScalars = kV + kStages * K::kBytes;  // a stage: 2 k scales, 2 v scales
  static constexpr int kScalarBytes = 16;
  static constexpr int kBarriers = kScalars + kStages * kScalarBytes;
  static constexpr int kBytes = kBarriers + 8 * (2 * kStages + 1);
  static_assert(kBytes <= 232448, "shared memory of one SM");
};

}  // namespace dm::sm90
