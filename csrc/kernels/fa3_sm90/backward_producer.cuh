// The producer warpgroup of the backward: one thread loads, one warp takes dQ away.
#pragma once

#include <cuda.h>

#include "kernels/fa3_sm90/backward_workspace.cuh"
#include "ptx/acquire_release.cuh"
#include "ptx/bulk_reduce.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/named_barrier.cuh"
#include "ptx/tma.cuh"
#include "ptx/warpgroup.cuh"

namespace jaxflash::fa3_sm90 {

// Of [B, rows, heads, features]; boxes of 64 features and as many rows as the tile has. What lies
// beyond the features or rows is read as zeros and not written.
struct BackwardMaps {
  CUtensorMap q, k, v, dout, dk, dv;
};

template <class Tile>
__device__ __forceinline__ void load_tile(const CUtensorMap* map, int batch, int head, int row,
                                          uint64_t* full, Tile& tile) {
#pragma unroll
  for (int slab = 0; slab < Tile::kNumSlabs; ++slab) {
    ptx::tma_load(tile.slabs[slab], map, full, 64 * slab, row, head, batch);
  }
}

// Lines 6, 8 and 9 of Algorithm 2. One thread.
template <class Config>
__device__ __forceinline__ void run_loader(const BackwardMaps& maps,
                                           const BackwardWorkspace& workspace, int num_heads,
                                           typename Config::SharedStorage& shared) {
  const auto& block = shared.block;
  if (block.first_head == block.end_head) return;
  ptx::mbarrier_arrive_expect(&shared.k_full, Config::TileKV::kBytes);
  load_tile(&maps.k, block.batch, block.kv_head, block.first_key, &shared.k_full, shared.k);
  Ring<Config::kStages> ring;
#pragma unroll 1
  for (int head = block.first_head; head < block.end_head; ++head) {
#pragma unroll 1
    for (int tile = block.first_tile; tile < block.end_tile; ++tile, ring.next()) {
      const int stage = ring.stage, row = tile * Config::kBlockQ;
      uint64_t* full = &shared.q_full[stage];
      ptx::mbarrier_wait(&shared.q_empty[stage], ring.phase ^ 1);
      constexpr int kStatisticBytes = sizeof(shared.statistics[0]);
      ptx::mbarrier_arrive_expect(full, Config::TileQ::kBytes + kStatisticBytes);
      load_tile(&maps.q, block.batch, head, row, full, shared.q[stage]);
      const int64_t index = workspace.index_of(num_heads, block.batch, head, tile);
      ptx::bulk_load(shared.statistics[stage], workspace.columns + index * Config::kBlockQ,
                     kStatisticBytes, full);
      if (head == block.first_head && tile == block.first_tile) {
        ptx::mbarrier_arrive_expect(&shared.v_full, Config::TileKV::kBytes);
        load_tile(&maps.v, block.batch, block.kv_head, block.first_key, &shared.v_full, shared.v);
      }
      full = &shared.dout_full[stage];
      ptx::mbarrier_wait(&shared.dout_empty[stage], ring.phase ^ 1);
      ptx::mbarrier_arrive_expect(full, Config::TileQ::kBytes);
      load_tile(&maps.dout, block.batch, head, row, full, shared.dout[stage]);
    }
  }
}

// Adds each step's dQ to the workspace, a half from each consumer (line 15). With kIsOrdered the
// key blocks take turns, so that the order of the additions, and their rounding, repeats. A CTA
// waits only for CTAs of smaller index, which were started before it.
// One warp.
template <class Config, bool kIsOrdered>
__device__ __forceinline__ void run_dq_writer(const BackwardWorkspace& workspace, int num_heads,
                                              bool is_reversed,
                                              typename Config::SharedStorage& shared) {
  constexpr int kThreads = 128 + 32;
  const auto& block = shared.block;
  const bool is_leader = threadIdx.x % 32 == 0;
#pragma unroll 1
  for (int c = 0; c < Config::kConsumers; ++c) {
    ptx::named_barrier_arrive(kBarrierTaken + c, kThreads);
  }
#pragma unroll 1
  for (int head = block.first_head; head < block.end_head; ++head) {
#pragma unroll 1
    for (int tile = block.first_tile; tile < block.end_tile; ++tile) {
      const int64_t index = workspace.index_of(num_heads, block.batch, head, tile);
      float* sums = workspace.dq + index * Config::kTileFloatsDQ;
      if (kIsOrdered && is_leader) {
        const int turn = block.turn(tile, is_reversed);
        while (ptx::load_acquire(workspace.turn + index) != turn) {
        }
        ptx::fence_async_proxy_global();
      }
      __syncwarp();
#pragma unroll 1
      for (int c = 0; c < Config::kConsumers; ++c) {
        ptx::named_barrier_sync(kBarrierFormed + c, kThreads);
        if (is_leader) {
          ptx::bulk_reduce_add(sums + c * Config::kPartFloatsDQ, shared.dq[c],
                               sizeof(shared.dq[c]));
          ptx::bulk_commit();
        }
      }
      if (is_leader) ptx::bulk_wait_read<1>();
      __syncwarp();
      ptx::named_barrier_arrive(kBarrierTaken, kThreads);
      if (is_leader) ptx::bulk_wait_read<0>();
      __syncwarp();
      ptx::named_barrier_arrive(kBarrierTaken + 1, kThreads);
      if (kIsOrdered && is_leader) {
        ptx::bulk_wait<0>();
        ptx::fence_async_proxy_global();
        ptx::add_release(workspace.turn + index, 1);
      }
    }
  }
  if (is_leader) ptx::bulk_wait<0>();
}

}  // namespace jaxflash::fa3_sm90
