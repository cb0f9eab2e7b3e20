// Facts of the backward kernels of fa2_sm80: tiles, warps and shared memory, declared once.
#pragma once

#include <cstdint>
#include <type_traits>

#include "mma/shared_tile.cuh"

namespace jaxflash::fa2_sm80 {

// The unit in which the workspace stores row statistics and dq: query rows of one or several steps.
constexpr int kBackwardBlockQ = 64;

// Statistics of one tile of queries, as the prepare kernel leaves them in the workspace.
struct RowStatistics {
  float lse_log2[kBackwardBlockQ];  // lse * log2(e); +inf for rows that take no part
  float delta[kBackwardBlockQ];
};

// One CTA owns a tile of K and V and meets every tile of queries. Its warps form a grid:
//
//   product            rows (M)             columns (N)          warp_kv picks   warp_d picks
//   S^T = K Q^T        kBlockKV             kBlockQ              kWarpRowsKV     kChunkQ columns
//   dV += P^T dout     kBlockKV             head dim             kWarpRowsKV     kWarpColumns
//   dK += dS^T Q       kBlockKV             head dim             kWarpRowsKV     kWarpColumns
//   dQ = dS K          kBlockQ              head dim             (kWarpsQ x kWarpsDQ, see below)
//
// With kWarpsD == 1 a warp's P^T and dS^T are already the left operands of its own products and
// stay in registers; with more they are exchanged through shared memory.
template <class Tiles>
struct BackwardConfig {
  static constexpr bool kHasRoles = false;
  using Stored = typename Tiles::Stored;            // an element in shared memory
  static constexpr int kHeadDim = Tiles::kHeadDim;  // of q, k and of v, the smaller one padded
  static constexpr int kBlockQ = Tiles::kBlockQ;
  static constexpr int kStepsPerSlot = kBackwardBlockQ / kBlockQ;  // query tiles of a slot
  static constexpr int kBlockKV = Tiles::kBlockKV;
  static constexpr int kWarpRowsKV = Tiles::kWarpRowsKV;
  static constexpr int kTilesM = kWarpRowsKV / 16;  // 16-row fragments of a warp
  static constexpr int kWarpsKV = kBlockKV / kWarpRowsKV;
  static constexpr int kWarpsD = Tiles::kWarpsD;
  static constexpr int kWarps = kWarpsKV * kWarpsD;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr bool kExchanges = kWarpsD > 1;
  // Query columns of S^T a warp has in registers at a time.
  static constexpr int kChunkQ = kExchanges ? kBlockQ / kWarpsD : 32;
  static constexpr int kNumChunks = kExchanges ? 1 : kBlockQ / kChunkQ;
  static constexpr int kWarpColumns = kHeadDim / kWarpsD;  // of dK and dV
  // The product dQ is split over 32 query rows and the rest over the head dim.
  static constexpr int kWarpsQ = kBlockQ / 32;
  static constexpr int kWarpsDQ = kWarps / kWarpsQ;
  static constexpr int kWarpColumnsDQ = kHeadDim / kWarpsDQ;
  static constexpr int kStages = Tiles::kStages;  // of q, dout and their statistics
  // Steps of 16 features unrolled in the products for S and dP.
  static constexpr int kUnroll = sizeof(Stored) == 2 || kHeadDim == 64 ? kHeadDim / 16 : 2;
  // Columns of dQ a warp forms at a time. With two parts its atomics come in two bursts, between
  // which other products run.
  static constexpr int kPartColumnsDQ = kWarpColumnsDQ < 32 ? kWarpColumnsDQ : 32;
  static constexpr int kPartsDQ = kWarpColumnsDQ / kPartColumnsDQ;

  static_assert(kHeadDim % 64 == 0 && kHeadDim <= 256, "rows are whole 128-byte groups");
  static_assert(kStepsPerSlot * kBlockQ == kBackwardBlockQ, "a slot is whole steps");
  static_assert(kChunkQ % 16 == 0, "a chunk is whole k steps of dV and dK");
  static_assert(kWarpColumns % 16 == 0 && kWarpColumnsDQ % kPartColumnsDQ == 0,
                "columns come two fragments at a time");
  static_assert(kPartsDQ <= 2, "the kernel names its parts");
  static_assert(kWarpsQ * kWarpsDQ == kWarps, "every warp takes part in dQ");

  using QTile = mma::SharedTile<Stored, kBlockQ, kHeadDim>;
  using KvTile = mma::SharedTile<Stored, kBlockKV, kHeadDim>;
  using ScoreTile = mma::SharedTile<Stored, kBlockKV, kBlockQ>;

  struct Exchange {
    ScoreTile probabilities;  // P^T
  };
  struct NoExchange {};
  // A base, because an empty member would cost a CTA of sm_80 at head dim 64.
  struct SharedStorage : std::conditional_t<kExchanges, Exchange, NoExchange> {
    KvTile k;
    KvTile v;
    QTile q[kStages];
    QTile dout[kStages];
    ScoreTile dscores;  // dS^T
    RowStatistics statistics[kStages];
  };
  static constexpr int kSharedBytes = sizeof(SharedStorage);
  static_assert(kSharedBytes <= 227 * 1024, "sm_90 gives a CTA 227 KiB");
  // CTAs of one SM, on sm_90 with its 228 KiB, of which each CTA costs one more.
  static constexpr int kCtasPerSm = 2 * (kSharedBytes + 1024) <= 228 * 1024 ? 2 : 1;
};

// The key/value kernel of plain 16-bit calls at head dims over 64. Its warps have two roles, of
// kRoleWarps each; a warp of role 0 forms P and dV, its partner of role 1 dS and dK:
//
//   product                         rows (M)   columns (N)   a warp's share
//   S^T = K Q^T or dP^T = V dout^T  kBlockKV   kBlockQ       32 rows x kChunkQ columns
//   dV += P^T dout or dK += dS^T Q  kBlockKV   head dim      32 rows x kWarpColumns
//   dQ = dS K                       kBlockQ    head dim      32 rows x kWarpColumnsDQ, all warps
//
// With kWarpsD == 1 what a warp forms of P^T or dS^T is all that its dV or dK needs, and stays in
// registers; with more, the warps of the same keys also read each other's from shared memory.
template <int kHeadDim_, int kBlockKV_, int kWarpsD_>
struct BackwardRolesConfig {
  static constexpr bool kHasRoles = true;
  using Stored = uint16_t;  // either type
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kBlockQ = kBackwardBlockQ;
  static constexpr int kBlockKV = kBlockKV_;
  static constexpr int kWarpRowsKV = 32;
  static constexpr int kTilesM = kWarpRowsKV / 16;  // 16-row fragments of a warp
  static constexpr int kWarpsKV = kBlockKV / kWarpRowsKV;
  static constexpr int kWarpsD = kWarpsD_;
  static constexpr int kRoleWarps = kWarpsKV * kWarpsD;
  static constexpr int kWarps = 2 * kRoleWarps;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr bool kExchanges = kWarpsD > 1;
  static constexpr int kChunkQ = kBlockQ / kWarpsD;
  static constexpr int kWarpColumns = kHeadDim / kWarpsD;
  static constexpr int kWarpsQ = kBlockQ / 32;
  static constexpr int kWarpsDQ = kWarps / kWarpsQ;
  static constexpr int kWarpColumnsDQ = kHeadDim / kWarpsDQ;
  static constexpr int kStages = 2;   // of q, dout and their statistics
  static constexpr int kBuffers = 2;  // of dS: dQ follows one step later
  static constexpr int kCtasPerSm = 1;
  static constexpr int kUnroll = kHeadDim / 16;  // steps of the products for S and dP

  using QTile = mma::SharedTile<Stored, kBlockQ, kHeadDim>;
  using KvTile = mma::SharedTile<Stored, kBlockKV, kHeadDim>;
  using ScoreTile = mma::SharedTile<Stored, kBlockKV, kBlockQ>;

  struct SharedStorage {
    KvTile k;
    KvTile v;
    QTile q[kStages];
    QTile dout[kStages];
    ScoreTile probabilities;      // P^T
    ScoreTile dscores[kBuffers];  // dS^T
    RowStatistics statistics[kStages];
  };
  static constexpr int kSharedBytes = sizeof(SharedStorage);
  static_assert(kSharedBytes <= 227 * 1024, "sm_90 gives a CTA 227 KiB");
};

// The kernel for repeatable dQ: one CTA owns a tile of queries, each warp 16 of its rows.
template <class Stored, int kHeadDim_>
struct BackwardQueryConfig {
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kBlockQ = kBackwardBlockQ;
  static constexpr int kBlockKV = sizeof(Stored) == 2 ? 64 : 64 * 64 / kHeadDim;
  static constexpr int kWarps = kBlockQ / 16;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kStages = kHeadDim <= 128 ? 2 : 1;  // of k and v
  // Steps of 16 features unrolled in the products for S and dP.
  static constexpr int kUnroll = sizeof(Stored) == 2 ? kHeadDim / 16 : 2;

  using QTile = mma::SharedTile<Stored, kBlockQ, kHeadDim>;
  using KvTile = mma::SharedTile<Stored, kBlockKV, kHeadDim>;

  struct SharedStorage {
    QTile q;
    QTile dout;
    KvTile k[kStages];
    KvTile v[kStages];
  };
  static constexpr int kSharedBytes = sizeof(SharedStorage);
  static_assert(kSharedBytes <= 163 * 1024, "sm_80 gives a CTA 163 KiB");
};

// Tiles of 16-bit elements, and of floats.
template <int kHeadDim_, int kBlockKV_, int kWarpsD_, int kStages_>
struct HalfTiles {
  using Stored = uint16_t;  // either type
  static constexpr int kHeadDim = kHeadDim_, kBlockQ = 64, kBlockKV = kBlockKV_;
  static constexpr int kWarpRowsKV = 32, kWarpsD = kWarpsD_, kStages = kStages_;
};
template <int kHeadDim_, int kBlockQ_, int kBlockKV_, int kWarpsD_, int kStages_>
struct FloatTiles {
  using Stored = float;
  static constexpr int kHeadDim = kHeadDim_, kBlockQ = kBlockQ_, kBlockKV = kBlockKV_;
  static constexpr int kWarpRowsKV = 16, kWarpsD = kWarpsD_, kStages = kStages_;
};
using BackwardConfig64 = BackwardConfig<HalfTiles<64, 128, 1, 2>>;
using BackwardConfig128 = BackwardConfig<HalfTiles<128, 64, 2, 2>>;
using BackwardConfig256 = BackwardConfig<HalfTiles<256, 64, 4, 2>>;       // sm_90's shared memory
using BackwardConfig256Small = BackwardConfig<HalfTiles<256, 64, 4, 1>>;  // fits sm_80
// Plain calls, where a CTA may have the shared memory of sm_90.
using BackwardRolesConfig128 = BackwardRolesConfig<128, 128, 1>;
using BackwardRolesConfig256 = BackwardRolesConfig<256, 64, 2>;
using BackwardConfigFloat64 = BackwardConfig<FloatTiles<64, 64, 64, 1, 1>>;
using BackwardConfigFloat128 = BackwardConfig<FloatTiles<128, 32, 64, 2, 2>>;
using BackwardConfigFloat256 = BackwardConfig<FloatTiles<256, 64, 32, 4, 1>>;
using BackwardConfigFloat256Small = BackwardConfig<FloatTiles<256, 32, 32, 2, 1>>;
static_assert(BackwardConfig64::kSharedBytes <= 163 * 1024 &&
                  BackwardConfig128::kSharedBytes <= 163 * 1024 &&
                  BackwardConfig256Small::kSharedBytes <= 163 * 1024 &&
                  BackwardConfigFloat64::kSharedBytes <= 163 * 1024 &&
                  BackwardConfigFloat128::kSharedBytes <= 163 * 1024 &&
                  BackwardConfigFloat256Small::kSharedBytes <= 163 * 1024,
              "every head dim must have an instance for sm_80");
static_assert(2 * (BackwardConfig64::kSharedBytes + 1024) <= 164 * 1024,
              "two CTAs must fit one multiprocessor of compute capability 8.0");

}  // namespace jaxflash::fa2_sm80
