// Facts of the backward kernel for head dims above 128: tiles, roles, shared memory, barriers.
#pragma once

#include "kernels/fa3_sm90/backward_config.h"

namespace jaxflash::fa3_sm90 {

// A pair of CTAs (a cluster) owns 128 keys, 64 each, and meets tiles of 64 queries, which each of
// them loads a half of for both. dK and dV of 64 keys fill the accumulators of two warpgroups, so
// these share the work of a CTA by product instead of by keys:
//
//   product            rows (M)   columns (N)   summed over     by
//   S^T = K Q^T        64 keys    64 queries    H               values
//   dP^T = V dout^T    64 keys    64 queries    Hv              keys
//   dV += P^T dout     64 keys    Hv            64 queries      values, P^T from registers
//   dK += dS^T Q       64 keys    H             64 queries      keys, dS^T from registers
//   dQ = dS K          64 queries a part of H   the pair's 128  all four, see FeaturesDQ
//
// The CTAs exchange dS, so that dQ of 128 keys is summed before it goes to L2: that traffic, and
// the loads of q and dout, are what a CTA of 64 keys would wait for.
enum class Role {
  kValues,  // consumer 0: S, P, dV
  kKeys,    // consumer 1: dP, dS, dK
};

template <class Element_, int kHeadDim_, int kHeadDimV_, Features kFeatures>
struct BackwardWideConfig {
  using Element = Element_;
  static constexpr bool kIsGeneral = kFeatures == Features::kGeneral;
  static constexpr bool kIsWide = true;
  static constexpr int kHeadDim = kHeadDim_;    // of q and k, padded
  static constexpr int kHeadDimV = kHeadDimV_;  // of v and dout, padded
  static constexpr int kStoredHeadDim = kHeadDim;
  static constexpr int kBlockQ = 64;
  static constexpr int kKeys = 64;  // of a CTA
  static constexpr int kCluster = 2;
  static constexpr int kBlockKV = kCluster * kKeys;
  static constexpr int kBoxRowsQ = kBlockQ / kCluster;
  static constexpr int kStages = 2;  // of q
  static constexpr int kStagesDout = kHeadDim == 256 ? 1 : 2;
  static constexpr int kConsumers = 2;
  static constexpr int kThreads = 128 * (1 + kConsumers);
  static constexpr int kProducerRegisters = 24;
  static constexpr int kConsumerRegisters = 240;
  static constexpr int kTileFloatsDQ = kBlockQ * kHeadDim;
  static constexpr bool kIsTransposedDQ = false;
  // P is handed over, and is the operand of dV, as 2^kProbabilityShift P: in float16 the
  // probabilities of long rows would lose bits otherwise.
  static constexpr int kProbabilityShift = std::is_same_v<Element, __half> ? 15 : 0;
  // Slabs of K that a CTA needs of its partner's keys: those whose dQ it forms.
  static constexpr int kSlabsDQ = 2;

  static_assert(kHeadDim == 192 || kHeadDim == 256, "others run in BackwardConfig");
  static_assert(kHeadDimV % 64 == 0 && kHeadDimV <= 256, "whole slabs");

  using TileK = mma::WgmmaTile<kKeys, kHeadDim>;
  using TileV = mma::WgmmaTile<kKeys, kHeadDimV>;
  using TileOtherK = mma::WgmmaTile<kKeys, 64 * kSlabsDQ>;
  using TileQ = mma::WgmmaTile<kBlockQ, kHeadDim>;
  using TileDout = mma::WgmmaTile<kBlockQ, kHeadDimV>;
  using TileDscores = mma::WgmmaTile<kBlockQ, kKeys>;
  struct SharedStorage {
    TileK k;  // dK at the end
    TileV v;  // dV at the end
    TileOtherK other_k;
    TileQ q[kStages];
    TileDout dout[kStagesDout];
    TileDscores dscores[2];        // dS, by parity of the step
    TileDscores other_dscores[2];  // of the partner, which writes it
    // NOTE: not near the end; see BackwardConfig.
    alignas(128) StatisticColumns statistics[kStages][kBlockQ];
    alignas(128) uint32_t selectors[3][32];               // see kSelect...
    alignas(128) uint4 probabilities[kBlockQ / 16][128];  // P^T as operand, by thread
    uint64_t k_full, v_full, q_full[kStages], q_empty[kStages], dout_full[kStagesDout],
        dout_empty[kStagesDout], dscores_full[2], other_full[2], other_empty[2];
    std::conditional_t<kIsGeneral, MaskedKeyBlock<kBlockQ, kBlockKV, kStages>,
                       KeyBlock<kBlockQ, kBlockKV>>
        block;
  };
  static constexpr int kSharedBytes = sizeof(SharedStorage);
  static_assert(kSharedBytes <= 227 * 1024, "sm_90 gives a CTA 227 KiB");
};

// The features of dQ that one consumer of a pair forms. Of four slabs each takes one; of three the
// CTAs' keys take the outer ones and their values a half of the middle one each.
template <class Config, Role kRole>
struct FeaturesDQ {
  static constexpr bool kIsHalf = Config::kHeadDim == 192 && kRole == Role::kValues;
  static constexpr int kCount = kIsHalf ? 32 : 64;

  // The first slab of K that CTA `rank` needs for dQ at all.
  __device__ __forceinline__ static int first_slab(int rank) {
    return rank * (Config::kHeadDim / 64 - Config::kSlabsDQ);
  }
  __device__ __forceinline__ static int slab(int rank) {
    if constexpr (Config::kHeadDim == 192) return kIsHalf ? 1 : 2 * rank;
    return 2 * rank + static_cast<int>(kRole);
  }
  __device__ __forceinline__ static int first(int rank) {
    return 64 * slab(rank) + (kIsHalf ? 32 * rank : 0);
  }
};

// Named barriers, in the place of those of the same numbers in backward_config.h (but for
// kBarrierConsumers).
//
// barrier              arrives            waits    protects
// kBarrierConsumers    both consumers              as there
// kBarrierProbability  values             keys     P of the step is written
// kBarrierRead         keys               values   P of the step before is read
// kBarrierStored       keys                        dS is written
// kBarrierStaged + c   consumer c                  its gradient lies in shared memory; turns
//
// mbarrier             arrives            waits    protects
// k_full, v_full       TMA                consumers  sK and the partner's, sV filled
// q_full[st]           TMA of both CTAs   consumers  sQ[st] and its statistics filled
// q_empty[st]          a thread of each consumer of both CTAs  loader  sQ[st] read
// dout_full, _empty    the same for dout
// dscores_full[parity] a thread of keys   values   dS of the step is written. It is read before
//                                                  the values hand over the next P but one
// other_full[parity]   partner's copy     consumers  the partner's dS has arrived
// other_empty[parity]  a thread of each consumer of the partner  keys  the partner has read dS
constexpr int kBarrierProbability = 2, kBarrierRead = 3, kBarrierStored = 4;

template <class Element, Features kFeatures>
using BackwardConfig192 = BackwardWideConfig<Element, 192, 192, kFeatures>;
template <class Element, Features kFeatures>
using BackwardConfig192x128 = BackwardWideConfig<Element, 192, 128, kFeatures>;
template <class Element, Features kFeatures>
using BackwardConfig256 = BackwardWideConfig<Element, 256, 256, kFeatures>;

// The configuration for padded head dims (instances.h).
template <class Element, class Dims, Features kFeatures>
using BackwardConfigFor = std::conditional_t<
    Dims::kHeadDim == 64, BackwardConfig64<Element, kFeatures>,
    std::conditional_t<
        Dims::kHeadDim == 96, BackwardConfig96<Element, kFeatures>,
        std::conditional_t<
            Dims::kHeadDim == 128, BackwardConfig128<Element, kFeatures>,
            BackwardWideConfig<Element, Dims::kHeadDim, Dims::kHeadDimV, kFeatures>>>>;

}  // namespace jaxflash::fa3_sm90
