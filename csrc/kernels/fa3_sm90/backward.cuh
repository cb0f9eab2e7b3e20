// FlashAttention-3 backward (arXiv:2407.08608, section 3.3 and Algorithm 3): dK, dV and the sums of
// dQ. Lines are those of FlashAttention-2's Algorithm 2 (arXiv:2307.08691), which it keeps.
//
// One CTA owns 128 keys of one KV head (line 6) and meets, in a fixed order, every query tile of
// every query head of the group (line 7): dK and dV are sums over the group that one CTA forms
// alone, so they are bitwise repeatable. dQ is added to the workspace in L2.
//
//   warpgroup 0, warp 0   one thread loads K, V, then Q and dout with their statistics (2 stages)
//   warpgroup 0, warp 1   adds dQ of each step to the workspace
//   warpgroup 1, 2        64 keys each: S^T, dP^T, P, dS, dV, dK; and a half of dQ
//
//   a step of a consumer (head dim 128; at 64, dV is issued after dS)
//   S^T = K Q^T     ====                                                  | wgmma, in order
//   dP^T = V dout^T     ====                                              |
//   P = exp             ----                                              | this warpgroup's
//   threads dV += P^T dout          ====                                          | dS = P (dP - d)
//   ----B                                       | B: dS in shared memory dQ^T = K^T dS^T ==== | dK
//   += dS^T Q                      ====                                | dQ -> shared memory ---->
//   writer                        |
//
// Needs what the prepare kernel left in the workspace. H, Hv <= 128 and multiples of 8, any T and S
// below 2^30; compute capability 9.0. Barriers: backward_config.h.
#pragma once

#include "kernels/fa3_sm90/backward_consumer.cuh"

namespace jaxflash::fa3_sm90 {

// The left operands that pick a statistic.
template <class Config>
__device__ __forceinline__ void fill_selectors(typename Config::SharedStorage& shared) {
  using Limits = StatisticLimits<typename Config::Element>;
  if (threadIdx.x < 96) {  // eight rows of eight columns, two in a word
    const int row = threadIdx.x / 32, pair = threadIdx.x % 4;
    constexpr uint32_t kOne = Limits::kOne, kDelta = Limits::kDeltaSelector;
    uint32_t word = 0;
    if (row == kSelectLse) word = pair == 0 ? kOne << 16 | kOne : pair == 1 ? kOne : 0;
    if (row == kSelectDelta)
      word = pair == 1 ? kDelta << 16 : pair == 2 ? kDelta << 16 | kDelta : 0;
    shared.selectors[row][threadIdx.x % 32] = word;
    ptx::fence_async_proxy();
  }
}

template <class Config>
__device__ __forceinline__ void init_shared(const AttentionParams& params,
                                            const SequenceInputs& inputs, const KeyGrid& grid,
                                            bool is_reversed,
                                            typename Config::SharedStorage& shared) {
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(&shared.k_full, 1);
    ptx::mbarrier_init(&shared.v_full, 1);
    for (int stage = 0; stage < Config::kStages; ++stage) {
      ptx::mbarrier_init(&shared.q_full[stage], 1);
      ptx::mbarrier_init(&shared.dout_full[stage], 1);
      ptx::mbarrier_init(&shared.q_empty[stage], Config::kConsumers);
      ptx::mbarrier_init(&shared.dout_empty[stage], Config::kConsumers);
    }
    ptx::mbarrier_init_fence();
    shared.block.locate(params, inputs, blockIdx.x, grid, is_reversed);
  }
  fill_selectors<Config>(shared);
  __syncthreads();
}

// Grid: blocks of keys in the order of KeyGrid, for causal calls the longest first; with kIsOrdered
// and is_reversed the shortest first, in which order their dq comes without waiting.
template <class Config, bool kIsOrdered>
__global__ void __launch_bounds__(Config::kThreads, 1)
    backward_kernel(const __grid_constant__ BackwardMaps maps,
                    const __grid_constant__ BackwardParams params,
                    const __grid_constant__ SequenceInputs inputs,
                    const __grid_constant__ BackwardWorkspace workspace,
                    const __grid_constant__ KeyGrid grid,
                    const __grid_constant__ bool is_reversed) {
  extern __shared__ __align__(1024) char shared_memory[];
  auto& shared = *reinterpret_cast<typename Config::SharedStorage*>(shared_memory);
  init_shared<Config>(params.attention, inputs, grid, kIsOrdered && is_reversed, shared);
  if constexpr (Config::kIsGeneral) {
    if (shared.block.num_rows <= 0) return;
  }
  if (threadIdx.x < 128) {
    ptx::shrink_registers<Config::kProducerRegisters>();
    const int num_heads = static_cast<int>(params.attention.N);
    const int warp_idx = __shfl_sync(0xFFFFFFFF, threadIdx.x / 32, 0);
    if (warp_idx == 0) {
      run_loader_warp<Config>(StepLoader<Config>{maps, shared, {}}, workspace, num_heads, shared);
    }
    if (warp_idx == 1) {
      if constexpr (Config::kIsGeneral) {
        run_masked_dq_writer<Config, kIsOrdered>(workspace, num_heads, is_reversed, shared);
      } else {
        run_dq_writer<Config, kIsOrdered>(workspace, num_heads, is_reversed, shared);
      }
    }
  } else {
    ptx::grow_registers<Config::kConsumerRegisters>();
    Consumer<Config>(params, workspace, shared).run(maps);
  }
}

}  // namespace jaxflash::fa3_sm90
