// Facts of the backward kernels of fa2_sm80: tiles, warps and shared memory, declared once.
#pragma once

#include <cstdint>
#include <type_traits>

#include "mma/shared_tile.cuh"

namespace jaxflash::fa2_sm80 {

// Query rows of one step: the unit in which the workspace stores row statistics and dq.
constexpr int kBackwardBlockQ = 64;

// Statistics of one tile of queries, as the prepare kernel leaves them in the workspace.
struct RowStatistics {
  float lse_log2[kBackwardBlockQ];  // lse * log2(e); +inf for rows that take no part
  float delta[kBackwardBlockQ];
};

// One CTA owns a tile of K and V and meets every tile of queries. Its warps form a grid:
//
//   product            rows (M)             columns (N)          warp_kv picks   warp_d picks
//   S^T = K Q^T        kBlockKV             kBlockQ              32 rows         kChunkQ columns
//   dV += P^T dout     kBlockKV             head dim             32 rows         kWarpColumns
//   dK += dS^T Q       kBlockKV             head dim             32 rows         kWarpColumns
//   dQ = dS K          kBlockQ              head dim             (kWarpsQ x kWarpsDQ, see below)
//
// With kWarpsD == 1 a warp's P^T and dS^T are already the left operands of its own products and
// stay in registers; with more they are exchanged through shared memory.
template <int kHeadDim_, int kBlockKV_, int kWarpsD_, int kStages_>
struct BackwardConfig {
  static constexpr int kHeadDim = kHeadDim_;  // of q, k and of v, the smaller one padded
  static constexpr int kBlockQ = kBackwardBlockQ;
  static constexpr int kBlockKV = kBlockKV_;
  static constexpr int kWarpRowsKV = 32;
  static constexpr int kWarpsKV = kBlockKV / kWarpRowsKV;
  static constexpr int kWarpsD = kWarpsD_;
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
  static constexpr int kStages = kStages_;  // of q, dout and their statistics
  // Columns of dQ a warp forms at a time. With two parts its atomics come in two bursts, between
  // which other products run.
  static constexpr int kPartColumnsDQ = 32;
  static constexpr int kPartsDQ = kWarpColumnsDQ / kPartColumnsDQ;

  static_assert(kHeadDim % 64 == 0 && kHeadDim <= 256, "rows are whole 128-byte groups");
  static_assert(kChunkQ % 16 == 0, "a chunk is whole k steps of dV and dK");
  static_assert(kWarpColumns % 16 == 0 && kWarpColumnsDQ % kPartColumnsDQ == 0,
                "columns come two fragments at a time");
  static_assert(kPartsDQ <= 2, "the kernel names its parts");
  static_assert(kWarpsQ * kWarpsDQ == kWarps, "every warp takes part in dQ");

  struct Exchange {
    mma::SharedTile<kBlockKV, kBlockQ> probabilities;  // P^T
  };
  struct NoExchange {};
  // A base, because an empty member would cost a CTA of sm_80 at head dim 64.
  struct SharedStorage : std::conditional_t<kExchanges, Exchange, NoExchange> {
    mma::SharedTile<kBlockKV, kHeadDim> k;
    mma::SharedTile<kBlockKV, kHeadDim> v;
    mma::SharedTile<kBlockQ, kHeadDim> q[kStages];
    mma::SharedTile<kBlockQ, kHeadDim> dout[kStages];
    mma::SharedTile<kBlockKV, kBlockQ> dscores;  // dS^T
    RowStatistics statistics[kStages];
  };
  static constexpr int kSharedBytes = sizeof(SharedStorage);
  static_assert(kSharedBytes <= 227 * 1024, "sm_90 gives a CTA 227 KiB");
  // CTAs of one SM, on sm_90 with its 228 KiB, of which each CTA costs one more.
  static constexpr int kCtasPerSm = 2 * (kSharedBytes + 1024) <= 228 * 1024 ? 2 : 1;
};

// The kernel for repeatable dQ: one CTA owns a tile of queries, each warp 16 of its rows.
template <int kHeadDim_>
struct BackwardQueryConfig {
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kBlockQ = kBackwardBlockQ;
  static constexpr int kBlockKV = 64;
  static constexpr int kWarps = kBlockQ / 16;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kStages = kHeadDim <= 128 ? 2 : 1;  // of k and v

  struct SharedStorage {
    mma::SharedTile<kBlockQ, kHeadDim> q;
    mma::SharedTile<kBlockQ, kHeadDim> dout;
    mma::SharedTile<kBlockKV, kHeadDim> k[kStages];
    mma::SharedTile<kBlockKV, kHeadDim> v[kStages];
  };
  static constexpr int kSharedBytes = sizeof(SharedStorage);
  static_assert(kSharedBytes <= 163 * 1024, "sm_80 gives a CTA 163 KiB");
};

using BackwardConfig64 = BackwardConfig<64, 128, 1, 2>;
using BackwardConfig128 = BackwardConfig<128, 64, 2, 2>;
using BackwardConfig256 = BackwardConfig<256, 64, 4, 2>;       // needs the shared memory of sm_90
using BackwardConfig256Small = BackwardConfig<256, 64, 4, 1>;  // fits sm_80
static_assert(BackwardConfig64::kSharedBytes <= 163 * 1024 &&
                  BackwardConfig128::kSharedBytes <= 163 * 1024 &&
                  BackwardConfig256Small::kSharedBytes <= 163 * 1024,
              "every head dim must have an instance for sm_80");
static_assert(2 * (BackwardConfig64::kSharedBytes + 1024) <= 164 * 1024,
              "two CTAs must fit one multiprocessor of compute capability 8.0");

}  // namespace jaxflash::fa2_sm80
