// Tiles and shared-memory maps of the gradient kernels.
#pragma once
#include "../../common/image.h"
#include "../../params.h"

namespace dm::sm90 {

// dQ: 128 queries stay, keys stream.
template <int D_>
struct DqConfig {
  static constexpr int D = D_;
  static constexpr int kWarpgroups = 2;               // consumers, 64 query rows each
  static constexpr int kThreads = 128 * (kWarpgroups + 1);
  static constexpr int kTile = D == 256 ? 64 : 128;   // keys of one promotion window
  static constexpr int kStages = 3;
  static constexpr int kChunk = D == 256 ? 32 : 64;   // columns of dQ of one product flight
  static constexpr bool kEarly = D != 256;            // scores of the next tile behind this tile's product (not with a probe)
  using Q = RowImage<D, kUnit>;
  using K = RowImage<D, kTile>;
  using KT = TokenImage<D, kTile>;

  static constexpr int kQ = 0;
  static constexpr int kDo = kQ + Q::kBytes;
  static constexpr int kK = kDo + Q::kBytes;
  static constexpr int kV = kK + kStages * K::kBytes;
  static constexpr int kKT = kV + kStages * K::kBytes;
  static constexpr int kScalars = kKT + kStages * KT::kBytes;  // a stage: K fold record, 2 v scales, 2 unused
  static constexpr int kScalarBytes = 48;
  static constexpr int kBarriers = kScalars + kStages * kScalarBytes;
  static constexpr int kBytes = kBarriers + 8 * (2 * kStages + 1);
  static_assert(kBytes <= 232448, "shared memory of one SM");
};

// dK, dV: 128 keys stay, query windows stream. D = 256 runs one kernel for each (registers); WITH_DK, WITH_DV say which.
template <int D_, bool WITH_DV, bool WITH_DK>
struct DkvConfig {
  static constexpr int D = D_;
  static constexpr bool kDv = WITH_DV, kDk = WITH_DK;
  static constexpr int kWarpgroups = 2;               // consumers, 64 key rows each
  static constexpr int kThreads = 128 * (kWarpgroups + 1);
  static constexpr int kWindow = D == 256 && kDk ? 64 : 128;  // queries of one promotion window
  static constexpr int kHalves = kWindow / 64;
  static constexpr int kStages = D == 64 || (D == 256 && kDk) ? 3 : 2;
  static constexpr int kChunk = D == 256 && kDk ? 32 : 64;  // columns of dK, dV of one product flight
  using K = RowImage<D, kUnit>;
  using Q = RowImage<D, kWindow>;
  using QT = TokenImage<D, kWindow>;

  static constexpr int kK = 0;
  static constexpr int kV = kK + K::kBytes;
  static constexpr int kQ = kV + (kDk ? K::kBytes : 0);
  static constexpr int kDo = kQ + kStages * Q::kBytes;
  static constexpr int kQT = kDo + (kDk ? kStages * Q::kBytes : 0);
  static constexpr int kDoT = kQT + (kDk ? kStages * QT::kBytes : 0);
  static constexpr int kHalfVector = 4 * 80;          // 64 columns of a vector: 4 lanes' 16 floats, padded
  static constexpr int kVectors = kDoT + (kDv ? kStages * QT::kBytes : 0);  // a stage: -lambda, -delta * 448 / amax
  static constexpr int kVectorBytes = 2 * kHalves * kHalfVector;
  // D = 128 has no registers for the first half's codes of P through the second half: each thread parks its own here.
  static constexpr bool kPark = D == 128;
  static constexpr int kParked = kVectors + kStages * kVectorBytes;
  static constexpr int kScalars = kParked + (kPark ? 2 * 4096 : 0);  // a stage: 4 floats a warpgroup
  static constexpr int kScalarBytes = 32;
  static constexpr int kBarriers = kScalars + kStages * kScalarBytes;
  static constexpr int kBytes = kBarriers + 8 * (2 * kStages + 1);
  static_assert(kBytes <= 232448, "shared memory of one SM");
};

}  // namespace dm::sm90
