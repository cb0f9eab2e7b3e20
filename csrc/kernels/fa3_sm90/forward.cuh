// FlashAttention-3 forward (arXiv:2407.08608, Algorithms 1 and 2) with TMA and wgmma, for sm_90a.
//
// A CTA owns kBlockQ query rows of one head at a time and streams the K/V blocks they see, last
// first. One warpgroup produces (forward_produce.cuh); each of the others consumes
// (forward_consume.cuh): 64 rows, all in its own registers. Per block j (lines of Algorithm 2):
//
//   S(j)  = Q K(j)^T                     issue_scores     in flight together with
//   O    += P(j+1) V(j+1)                issue_output     the product of the block before
//   S     = capped S                     Rows::cap        with a soft cap
//   S     = masked S                     Rows::hide       only on blocks that need it
//   m     = reference                    Rows::take_exact_reference, or settle: rarely
//   P     = exp2(S - m); l += sum P      Rows::exponentiate
//
// The consumers take turns to issue, so that the softmax of one runs under the products of another
// (ping-pong), and inside a consumer the softmax of block j under the product of block j + 1:
//
//   tensor cores | S0' O1' | S0" O1" | S1' O0' | ...       ' and " are two consumers
//   consumer '   | issue   | softmax of S0'    | issue ...
//
// CTAs stay for many tiles. The output of a tile leaves while the next one begins.
//
// The general instance (features.h) streams the blocks that its scheduler finds to be visible
// (forward_blocks.cuh); in a block that a row does not see whole, the mask is found as bits before
// the products are issued (forward_mask.cuh).
//
// barrier              arrives                        waits       protects
// tile_full[s]         scheduler                      all         tiles[s] filled
// tile_empty[s]        consumers' warps, keys,        scheduler   tiles[s] may be overwritten
//                      values, rows
// q_full[b][c]         TMA (tx bytes)                 consumer c  q[b][c] holds the queries
// output_staged[b][c]  consumer c's warps             rows        q[b][c] holds the output
// k_full[s]            TMA (tx bytes)                 consumers   k[s] filled
// k_empty[s]           consumers                      keys        k[s] may be overwritten
// v_full[s]            TMA (tx bytes)                 consumers   v[s] filled
// v_empty[s]           consumers                      values      v[s] may be overwritten
//
// NOTE: one thread gives a K or V stage back for its warpgroup, which is valid because only wgmma
// reads them, and its wait is the whole warpgroup's.
//
// Limits: H <= kHeadDim, Hv <= kHeadDimV, multiples of 8; a positive scale; T, S < 2^30; no mask,
// bias or dropout.
#pragma once

#include "kernels/fa3_sm90/config.h"
#include "kernels/fa3_sm90/forward_consume.cuh"
#include "kernels/fa3_sm90/forward_produce.cuh"
#include "kernels/fa3_sm90/schedule.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/warpgroup.cuh"

namespace jaxflash::fa3_sm90 {

template <class Config>
__device__ __forceinline__ void init_barriers(typename Config::SharedStorage* shared) {
  constexpr int kConsumers = Config::kNumConsumers;
  for (int slot = 0; slot < Config::kNumTileSlots; ++slot) {
    ptx::mbarrier_init(&shared->tile_full[slot], 1);
    ptx::mbarrier_init(&shared->tile_empty[slot], 4 * kConsumers + 3);
  }
  for (int i = 0; i < Config::kNumQueryBuffers * kConsumers; ++i) {
    ptx::mbarrier_init(&shared->q_full[i / kConsumers][i % kConsumers], 1);
    ptx::mbarrier_init(&shared->output_staged[i / kConsumers][i % kConsumers], 4);
  }
  for (int stage = 0; stage < Config::kNumStages; ++stage) {
    ptx::mbarrier_init(&shared->k_full[stage], 1);
    ptx::mbarrier_init(&shared->v_full[stage], 1);
    ptx::mbarrier_init(&shared->k_empty[stage], kConsumers);
    ptx::mbarrier_init(&shared->v_empty[stage], kConsumers);
  }
  if constexpr (Config::kIsGeneral) {
    for (int word = 0; word < Config::kNumWords; ++word) {
      ptx::mbarrier_init(&shared->word_full[word], 1);
      ptx::mbarrier_init(&shared->word_empty[word], 4 * kConsumers + 2);
    }
  }
  ptx::mbarrier_init_fence();
}

// Grid: no more CTAs than run at once.
template <class Config>
__global__ void __launch_bounds__(Config::kNumThreads, 1)
    forward_kernel(const __grid_constant__ ForwardParams params,
                   const __grid_constant__ SequenceInputs inputs,
                   const __grid_constant__ ForwardMaps maps,
                   const __grid_constant__ Schedule schedule, float scale_log2) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) char shared_bytes[];
  auto* shared = reinterpret_cast<typename Config::SharedStorage*>(shared_bytes);
  if (threadIdx.x == 0) init_barriers<Config>(shared);
  __syncthreads();

  const int warpgroup_idx = __shfl_sync(kAllLanes, threadIdx.x / 128, 0);
  if (warpgroup_idx == 0) {
    ptx::shrink_registers<Config::kProducerRegisters>();
    const Producer<Config> producer(params.attention, maps, shared);
    if (threadIdx.x == 0) {
      producer.load_keys();
    } else if (threadIdx.x / 32 == 1) {
      if constexpr (Config::kIsGeneral) {
        producer.schedule_masked(inputs, schedule);
      } else if (threadIdx.x == 32) {
        producer.schedule(inputs, schedule);
      }
    } else if (threadIdx.x == 64) {
      producer.load_values();
    } else if (threadIdx.x == 96) {
      producer.move_rows();
    }
  } else {
    ptx::grow_registers<Config::kConsumerRegisters>();
    Consumer<Config>(params, scale_log2, warpgroup_idx - 1, shared).run();
  }
#else
  __trap();  // compiled for another architecture than sm_90a
#endif
}

}  // namespace jaxflash::fa3_sm90
