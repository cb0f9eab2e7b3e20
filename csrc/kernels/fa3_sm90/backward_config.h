// Facts of the backward kernels of fa3_sm90: tiles, roles, shared memory, barriers, declared once.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "kernels/fa3_sm90/backward_visits.cuh"
#include "kernels/fa3_sm90/features.h"
#include "kernels/fa3_sm90/ring.cuh"
#include "mma/wgmma_tile.cuh"

namespace jaxflash::fa3_sm90 {

// What the 16-bit parts of the statistics can hold; a head with a row beyond takes the masked
// steps, which use RowStatistics. Three parts are 24 bits in bfloat16 and 33 in float16, whose
// range is narrow: -delta is scaled up there, so that small gradients keep their bits.
template <class Element>
struct StatisticLimits;
template <>
struct StatisticLimits<__nv_bfloat16> {
  static constexpr float kDeltaUnit = 1.0f;
  static constexpr float kMaxStart = 1e30f;  // of lse / softmax_scale
  static constexpr float kMaxDelta = 1e30f;
  static constexpr float kMaxScale = 1e30f;
  static constexpr uint16_t kOne = 0x3F80, kDeltaSelector = 0x3F80;  // 1, 1 / kDeltaUnit
};
template <>
struct StatisticLimits<__half> {
  static constexpr float kDeltaUnit = 1024.0f;
  static constexpr float kMaxStart = 6e4f;
  static constexpr float kMaxDelta = 58.0f;
  static constexpr float kMaxScale = 64.0f;
  static constexpr uint16_t kOne = 0x3C00, kDeltaSelector = 0x1400;
};
// The difference S - lse / softmax_scale keeps an absolute error of about 2^-23 |lse| in the logit.
constexpr float kMaxLse = 1024.0f;

// A CTA owns kBlockKV keys and meets tiles of kBlockQ queries. Two consumer warpgroups own 64 keys
// each; a third feeds them and takes dQ away.
//
//   product            rows (M)             columns (N)            of a warpgroup
//   S^T = K Q^T        kBlockKV             kBlockQ                its 64 keys, all queries
//   dP^T = V dout^T    the same
//   dV += P^T dout     kBlockKV             head dim               its 64 keys, P^T from registers
//   dK += dS^T Q       the same, dS^T from registers
//   dQ^T = K^T dS^T    head dim             kBlockQ                64 x kColumnsDQ: half of either
// kIssuesEarly: dV is issued before dS is formed, which hides one product more and takes P^T and P
// in registers at once. Otherwise ptxas would move the wait for dP above the exponentials, and
// keep_before_wait() holds it back.
template <class Element_, int kHeadDim_, int kBlockQ_, bool kIssuesEarly_, Features kFeatures>
struct BackwardConfig {
  using Element = Element_;
  static constexpr bool kIsGeneral = kFeatures == Features::kGeneral;
  static constexpr bool kIsWide = false;
  static constexpr int kHeadDim = kHeadDim_;  // of q, k and of v, the smaller ones padded
  static constexpr int kHeadDimV = kHeadDim;
  static constexpr int kBlockQ = kBlockQ_;
  static constexpr int kBlockKV = 128;
  static constexpr bool kIssuesEarly = kIssuesEarly_;
  static constexpr int kCluster = 1;
  static constexpr int kBoxRowsQ = kBlockQ;  // that one load brings
  static constexpr int kStages = 2;          // of q and of dout
  static constexpr int kConsumers = 2;
  static constexpr int kThreads = 128 * (1 + kConsumers);
  static constexpr int kProducerRegisters = 24;
  static constexpr int kConsumerRegisters = 240;
  static constexpr int kSlabs = (kHeadDim + 63) / 64;
  static constexpr int kStoredHeadDim = 64 * kSlabs;  // in shared memory and among the sums of dQ
  // dQ^T: with two slabs a warpgroup takes the 64 features of one, else half of the queries.
  static constexpr int kColumnsDQ = kSlabs == 2 ? kBlockQ : kBlockQ / 2;
  static constexpr int kPartFloatsDQ = 64 * kColumnsDQ;
  static constexpr int kTileFloatsDQ = kConsumers * kPartFloatsDQ;
  static constexpr bool kIsTransposedDQ = true;  // features x queries

  static_assert(kHeadDim <= 128, "one or two slabs");
  static_assert(kBlockQ % 16 == 0 && kColumnsDQ % 8 == 0, "whole k steps");
  static_assert(kTileFloatsDQ == kBlockQ * kStoredHeadDim, "the parts make up the tile");
  static_assert((kProducerRegisters + kConsumers * kConsumerRegisters) * 128 <= 504 * 128,
                "384 threads start with 168 registers each");

  using TileKV = mma::WgmmaTile<kBlockKV, kHeadDim>;
  using TileK = TileKV;
  using TileQ = mma::WgmmaTile<kBlockQ, kHeadDim>;
  struct SharedStorage {
    TileKV k;  // dK at the end
    TileKV v;  // dV at the end
    TileQ q[kStages];
    TileQ dout[kStages];
    mma::WgmmaTile<kBlockQ, kBlockKV> dscores[2];  // dS, by parity of the step
    // NOTE: not near the end. Products read the same bytes of these several times, through strides
    // of zero; memcheck takes an operand for contiguous, up to 4 KiB, and would see it leave.
    // In a general instance they are RowStatistics where the step is extreme.
    alignas(128) StatisticColumns statistics[kStages][kBlockQ];
    alignas(128) uint32_t selectors[3][32];            // see kSelect...
    alignas(128) float dq[kConsumers][kPartFloatsDQ];  // in the order of PlaceDQ
    uint64_t k_full, v_full, q_full[kStages], q_empty[kStages], dout_full[kStages],
        dout_empty[kStages];
    std::conditional_t<kIsGeneral, MaskedKeyBlock<kBlockQ, kBlockKV, kStages>,
                       KeyBlock<kBlockQ, kBlockKV>>
        block;
  };
  static constexpr int kSharedBytes = sizeof(SharedStorage);
  static_assert(kSharedBytes <= 227 * 1024, "sm_90 gives a CTA 227 KiB");
  static_assert(sizeof(SharedStorage::dq) >= 64 * 16 * 2 + kBlockQ * 16 * 2,
                "a whole operand of a product fits behind selectors and statistics");
};

// Rows of SharedStorage::selectors: the left operand that picks -delta or -lse from the columns.
constexpr int kSelectDelta = 0, kSelectLse = 1, kSelectNothing = 2;

// Named barriers of a CTA (0 is __syncthreads); "+ c" = of consumer warpgroup c.
//
// barrier            threads                    protects
// kBarrierConsumers  both consumers             dS of a step is written, rows of padding are zeros,
//                                               K and V are read before dK and dV replace them
// kBarrierTaken + c  consumer c, dQ writer      the previous dQ has left sDQ[c]
// kBarrierFormed + c consumer c, dQ writer      dQ of this step lies in sDQ[c]; general, c = 0: and
//                                               block.formed says which step it is, or the end
// kBarrierStaged + c consumer c                 dK and dV lie in shared memory
//
// mbarrier           arrives                    waits           protects
// k_full, v_full     TMA                        consumers       sK, sV filled
// q_full[st]         TMA, with the statistics   consumers       sQ[st] filled; general: and
//                                                               block.loaded[st], or the end
// q_empty[st]        a thread of each consumer  loader          sQ[st] read by S and dK
// dout_full[st]      TMA                        consumers       sdO[st] filled
// dout_empty[st]     a thread of each consumer  loader          sdO[st] read by dP and dV
constexpr int kBarrierConsumers = 1, kBarrierTaken = 2, kBarrierFormed = 4, kBarrierStaged = 6;

template <class Element, Features kFeatures>
using BackwardConfig64 = BackwardConfig<Element, 64, 128, false, kFeatures>;
template <class Element, Features kFeatures>
using BackwardConfig96 = BackwardConfig<Element, 96, 64, true, kFeatures>;
template <class Element, Features kFeatures>
using BackwardConfig128 = BackwardConfig<Element, 128, 64, true, kFeatures>;

}  // namespace jaxflash::fa3_sm90
