// FlashAttention-3 backward (arXiv:2407.08608, section 3.3) for head dims above 128: dK, dV and the
// sums of dQ. Lines are those of FlashAttention-2's Algorithm 2 (arXiv:2307.08691).
//
// The work of a CTA of backward.cuh, by a pair of CTAs with 64 keys each (line 6). In a CTA one
// consumer warpgroup forms S and keeps dV, the other forms dP and keeps dK; P is handed over as it
// lies in registers. dS goes to the partner, so that each of the four consumers forms a quarter of
// dQ over all 128 keys, one step late, and adds it to the workspace in L2 from its registers.
//
//   warpgroup 0, warp 0   one thread loads K, V, then its half of Q and dout for both CTAs
//   warpgroup 1, values   S^T, P, dV, a quarter of dQ
//   warpgroup 2, keys     dP^T, dS, dK, a quarter of dQ
//
//   values   S^T ====  dQ ==             dV ====
//                 P ----     |                + dQ ----
//   keys     dP^T ====  dQ ==v                dK ====
//                             dS ----         | + dQ ----
//                                    partner <'
//
// Needs what the prepare kernel left in the workspace. H, Hv <= 256 and multiples of 8, any T and S
// below 2^30; compute capability 9.0. Barriers: backward_wide_config.h.
#pragma once

#include "kernels/fa3_sm90/backward.cuh"
#include "kernels/fa3_sm90/backward_wide_consumer.cuh"

namespace jaxflash::fa3_sm90 {

// This CTA's rows of a tile, into both CTAs.
template <class Config, class Tile>
__device__ __forceinline__ void load_half_tile(const CUtensorMap* map, int batch, int head, int row,
                                               uint64_t* full, Tile& tile) {
  const int first = ptx::cluster_rank() * Config::kBoxRowsQ;
#pragma unroll
  for (int slab = 0; slab < Tile::kNumSlabs; ++slab) {
    ptx::tma_load_multicast(tile.slabs[slab] + first * 64, map, full, 64 * slab, row + first, head,
                            batch, (1 << Config::kCluster) - 1);
  }
}

// StepLoader of a pair of CTAs: each brings its half of q and dout to both.
template <class Config>
struct WideStepLoader {
  const BackwardMaps& maps;
  typename Config::SharedStorage& shared;
  Ring<Config::kStages> ring;
  Ring<Config::kStagesDout> dout_ring;

  __device__ __forceinline__ void load(const void* statistics, int head, int tile,
                                       bool is_first) const {
    const auto& block = shared.block;
    const int rank = ptx::cluster_rank(), row = block.query_row(tile);
    const int key_row = block.key_row() + rank * Config::kKeys;
    constexpr int kStatisticBytes = sizeof(shared.statistics[0]);
    if (is_first) {
      ptx::mbarrier_arrive_expect(&shared.k_full, shared.k.kBytes + shared.other_k.kBytes);
      load_tile(&maps.k, block.batch, block.kv_head, key_row, &shared.k_full, shared.k);
    }
    uint64_t* full = &shared.q_full[ring.stage];
    ptx::mbarrier_arrive_expect(full, shared.q[0].kBytes + kStatisticBytes);
    load_half_tile<Config>(&maps.q, block.batch, head, row, full, shared.q[ring.stage]);
    ptx::bulk_load(shared.statistics[ring.stage], statistics, kStatisticBytes, full);
    if (is_first) {
      const int first_slab = FeaturesDQ<Config, Role::kKeys>::first_slab(rank);
      ptx::mbarrier_arrive_expect(&shared.v_full, shared.v.kBytes);
      load_tile(&maps.v, block.batch, block.kv_head, key_row, &shared.v_full, shared.v);
#pragma unroll
      for (int slab = 0; slab < Config::kSlabsDQ; ++slab) {
        ptx::tma_load(shared.other_k.slabs[slab], &maps.k, &shared.k_full, 64 * (first_slab + slab),
                      block.key_row() + (rank ^ 1) * Config::kKeys, block.kv_head, block.batch);
      }
    }
    full = &shared.dout_full[dout_ring.stage];
    ptx::mbarrier_wait(&shared.dout_empty[dout_ring.stage], dout_ring.phase ^ 1);
    ptx::mbarrier_arrive_expect(full, shared.dout[0].kBytes);
    load_half_tile<Config>(&maps.dout, block.batch, head, row, full, shared.dout[dout_ring.stage]);
  }

  __device__ __forceinline__ void next() {
    ring.advance();
    dout_ring.advance();
  }
};

template <class Config>
__device__ __forceinline__ void init_wide_shared(const AttentionParams& params,
                                                 const SequenceInputs& inputs, const KeyGrid& grid,
                                                 bool is_reversed,
                                                 typename Config::SharedStorage& shared) {
  constexpr int kReaders = Config::kConsumers * Config::kCluster;
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(&shared.k_full, 1);
    ptx::mbarrier_init(&shared.v_full, 1);
    for (int stage = 0; stage < Config::kStages; ++stage) {
      ptx::mbarrier_init(&shared.q_full[stage], 1);
      ptx::mbarrier_init(&shared.q_empty[stage], kReaders);
    }
    for (int stage = 0; stage < Config::kStagesDout; ++stage) {
      ptx::mbarrier_init(&shared.dout_full[stage], 1);
      ptx::mbarrier_init(&shared.dout_empty[stage], kReaders);
    }
    for (int parity = 0; parity < 2; ++parity) {
      ptx::mbarrier_init(&shared.dscores_full[parity], 1);
      ptx::mbarrier_init(&shared.other_full[parity], 1);
      ptx::mbarrier_init(&shared.other_empty[parity], Config::kConsumers);
    }
    ptx::mbarrier_init_fence();
    shared.block.locate(params, inputs, blockIdx.x / Config::kCluster, grid, is_reversed);
  }
  constexpr int kChunks = Config::TileDscores::kBytes / sizeof(uint4);
  for (int i = threadIdx.x; i < kChunks; i += Config::kThreads) {  // of the step before the first
    reinterpret_cast<uint4*>(&shared.dscores[1])[i] = make_uint4(0, 0, 0, 0);
    reinterpret_cast<uint4*>(&shared.other_dscores[1])[i] = make_uint4(0, 0, 0, 0);
  }
  ptx::fence_async_proxy();
  fill_selectors<Config>(shared);
  ptx::cluster_sync();  // the partner may signal and write from here on
}

// Grid: as of backward_kernel, two CTAs for each key block.
template <class Config, bool kIsOrdered>
__global__ void __launch_bounds__(Config::kThreads, 1)
    backward_wide_kernel(const __grid_constant__ BackwardMaps maps,
                         const __grid_constant__ BackwardParams params,
                         const __grid_constant__ SequenceInputs inputs,
                         const __grid_constant__ BackwardWorkspace workspace,
                         const __grid_constant__ KeyGrid grid,
                         const __grid_constant__ bool is_reversed) {
  extern __shared__ __align__(1024) char shared_memory[];
  auto& shared = *reinterpret_cast<typename Config::SharedStorage*>(shared_memory);
  init_wide_shared<Config>(params.attention, inputs, grid, kIsOrdered && is_reversed, shared);
  if constexpr (Config::kIsGeneral) {
    if (shared.block.num_rows <= 0) return;
  }
  if (threadIdx.x < 128) {
    ptx::shrink_registers<Config::kProducerRegisters>();
    const int num_heads = static_cast<int>(params.attention.N);
    if (__shfl_sync(0xFFFFFFFF, threadIdx.x / 32, 0) == 0) {
      run_loader_warp<Config>(WideStepLoader<Config>{maps, shared, {}, {}}, workspace, num_heads,
                              shared);
    }
    __syncwarp();
  } else {
    ptx::grow_registers<Config::kConsumerRegisters>();
    if (__shfl_sync(0xFFFFFFFF, threadIdx.x / 128, 0) == 1) {
      WideConsumer<Config, Role::kValues, kIsOrdered>(params, workspace, is_reversed, shared)
          .run(maps);
    } else {
      WideConsumer<Config, Role::kKeys, kIsOrdered>(params, workspace, is_reversed, shared)
          .run(maps);
    }
    __syncwarp();
  }
  ptx::cluster_sync();  // the partner signals and writes no more
}

}  // namespace jaxflash::fa3_sm90
