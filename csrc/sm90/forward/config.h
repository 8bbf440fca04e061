// Tiles and shared-memory map of the forward kernel.
#pragma once
#include "../../common/image.h"
#include "../../params.h"

namespace dm::sm90 {

template <int D_>
struct ForwardConfig {
  static constexpr int D = D_;
  static constexpr int kWarpgroups = D == 256 ? 2 : 3;  // consumers, 64 query rows each
  static constexpr int kThreads = 128 * (kWarpgroups + 1);
  static constexpr int kTile = D == 256 ? 64 : 128;    // keys of one promotion window
  static constexpr int kStages = D == 256 ? 4 : 3;
  static constexpr int kChunk = D == 256 ? 32 : 64;    // columns of O of one product flight
  using Q = RowImage<D, 64 * kWarpgroups>;
  using K = RowImage<D, kTile>;
  using V = TokenImage<D, kTile>;

  static constexpr int kQ = 0;
  static constexpr int kK = kQ + Q::kBytes;
  static constexpr int kV = kK + kStages * K::kBytes;
  static constexpr int kScalars = kV + kStages * V::kBytes;  // a stage: V fold record, 2 K scales, 2 unused
  static constexpr int kScalarBytes = 48;
  static constexpr int kRecords = kScalars + kStages * kScalarBytes;  // 16 bytes a warpgroup (kernel.cuh)
  static constexpr int kBarriers = kRecords + 48;
  static constexpr int kBytes = kBarriers + 8 * (4 * kStages + 1);
  static_assert(kBytes <= 232448, "shared memory of one SM");
};

}  // namespace dm::sm90
