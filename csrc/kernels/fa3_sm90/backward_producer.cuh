// The producer warpgroup of the backward: one thread loads, one warp takes dQ away.
#pragma once

#include <cuda.h>

#include "kernels/fa3_sm90/backward_config.h"
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

// Loads what a step reads (lines 6, 8 and 9 of Algorithm 2).
template <class Config>
struct StepLoader {
  const BackwardMaps& maps;
  typename Config::SharedStorage& shared;
  Ring<Config::kStages> ring;

  // The stage of q is free; K and V come with the first step. statistics: columns, or rows in
  // float32. One thread.
  __device__ __forceinline__ void load(const void* statistics, int head, int tile,
                                       bool is_first) const {
    const auto& block = shared.block;
    const int stage = ring.stage, row = block.query_row(tile), key_row = block.key_row();
    constexpr int kStatisticBytes = sizeof(shared.statistics[0]);
    if (is_first) {
      ptx::mbarrier_arrive_expect(&shared.k_full, shared.k.kBytes);
      load_tile(&maps.k, block.batch, block.kv_head, key_row, &shared.k_full, shared.k);
    }
    uint64_t* full = &shared.q_full[stage];
    ptx::mbarrier_arrive_expect(full, shared.q[0].kBytes + kStatisticBytes);
    load_tile(&maps.q, block.batch, head, row, full, shared.q[stage]);
    ptx::bulk_load(shared.statistics[stage], statistics, kStatisticBytes, full);
    if (is_first) {
      ptx::mbarrier_arrive_expect(&shared.v_full, shared.v.kBytes);
      load_tile(&maps.v, block.batch, block.kv_head, key_row, &shared.v_full, shared.v);
    }
    full = &shared.dout_full[stage];
    ptx::mbarrier_wait(&shared.dout_empty[stage], ring.phase ^ 1);
    ptx::mbarrier_arrive_expect(full, shared.dout[0].kBytes);
    load_tile(&maps.dout, block.batch, head, row, full, shared.dout[stage]);
  }

  __device__ __forceinline__ void next() { ring.advance(); }
};

// Loads every tile that the window lets meet the keys. One thread.
template <class Config, class Loader>
__device__ __forceinline__ void run_loader(Loader loader, const BackwardWorkspace& workspace,
                                           int num_heads, typename Config::SharedStorage& shared) {
  const auto& block = shared.block;
  const auto& ring = loader.ring;
#pragma unroll 1
  for (int head = block.first_head; head < block.end_head; ++head) {
#pragma unroll 1
    for (int tile = block.first_tile; tile < block.end_tile; ++tile, loader.next()) {
      ptx::mbarrier_wait(&shared.q_empty[ring.stage], ring.phase ^ 1);
      const int64_t index = workspace.index_of(num_heads, block.batch, head, tile);
      loader.load(workspace.columns + index * Config::kBlockQ, head, tile,
                  head == block.first_head && tile == block.first_tile);
    }
  }
}

// Loads those tiles of which masks leave something, and says which they are. One warp, which
// classifies 32 tiles at a time.
template <class Config, class Loader>
__device__ __forceinline__ void run_masked_loader(Loader loader, const BackwardWorkspace& workspace,
                                                  int num_heads,
                                                  typename Config::SharedStorage& shared) {
  auto& block = shared.block;
  const auto& ring = loader.ring;
  const int lane_idx = threadIdx.x % 32;
  const Visit none = {0, 0, StepKind::kNone, false, false};
  bool is_first = true;
#pragma unroll 1
  for (int head = block.first_head; head < block.end_head; ++head) {
#pragma unroll 1
    for (int begin = block.first_tile; begin < block.end_tile; begin += 32) {
      Visit visit = none;
      if (begin + lane_idx < block.end_tile) {
        visit = block.classify(workspace, num_heads, head, begin + lane_idx);
      }
      unsigned left = __ballot_sync(0xFFFFFFFF, visit.kind != StepKind::kNone);
#pragma unroll 1
      for (; left != 0; left &= left - 1, loader.next(), is_first = false) {
        if (lane_idx == __ffs(left) - 1) {  // whose tile it is
          ptx::mbarrier_wait(&shared.q_empty[ring.stage], ring.phase ^ 1);
          block.loaded[ring.stage] = visit;
          const int64_t row =
              workspace.index_of(num_heads, block.batch, head, block.slot(visit.tile)) *
              Config::kBlockQ;
          const void* statistics = workspace.columns + row;
          if (visit.kind == StepKind::kExtreme) statistics = workspace.rows + row;
          loader.load(statistics, head, visit.tile, is_first);
        }
        __syncwarp();
      }
    }
  }
  if (lane_idx != 0) return;
  ptx::mbarrier_wait(&shared.q_empty[ring.stage], ring.phase ^ 1);
  block.loaded[ring.stage] = none;
  ptx::mbarrier_arrive(&shared.q_full[ring.stage]);
}

// The loader's warp of a producer warpgroup.
template <class Config, class Loader>
__device__ __forceinline__ void run_loader_warp(const Loader& loader,
                                                const BackwardWorkspace& workspace, int num_heads,
                                                typename Config::SharedStorage& shared) {
  if constexpr (Config::kIsGeneral) {
    run_masked_loader<Config>(loader, workspace, num_heads, shared);
  } else {
    if (threadIdx.x == 0) run_loader<Config>(loader, workspace, num_heads, shared);
  }
}

// Waits until `turn` CTAs have added to dq of a tile. One thread.
__device__ __forceinline__ void wait_for_turn(const int* counter, int turn) {
  while (ptx::load_acquire(counter) != turn) {
  }
  ptx::fence_async_proxy_global();
}

// Adds a step's dQ to the tile's sums, a half from each consumer (line 15); that of consumer 0 is
// formed. With kIsOrdered the counter then grows by `turns`.
template <class Config, bool kIsOrdered>
__device__ __forceinline__ void add_dq(float* sums, int* counter, int turns, bool is_leader,
                                       typename Config::SharedStorage& shared) {
  constexpr int kThreads = 128 + 32;
#pragma unroll 1
  for (int c = 0; c < Config::kConsumers; ++c) {
    if (c > 0) ptx::named_barrier_sync(kBarrierFormed + c, kThreads);
    if (is_leader) {
      ptx::bulk_reduce_add(sums + c * Config::kPartFloatsDQ, shared.dq[c], sizeof(shared.dq[c]));
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
    ptx::add_release(counter, turns);
  }
}

// Adds each step's dQ to the workspace. With kIsOrdered the key blocks take turns, so that the
// order of the additions, and their rounding, repeats. A CTA waits only for CTAs of smaller index,
// which were started before it. One warp.
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
      if (kIsOrdered && is_leader) {
        wait_for_turn(workspace.turn + index, block.turn(tile, is_reversed));
      }
      __syncwarp();
      ptx::named_barrier_sync(kBarrierFormed, kThreads);
      add_dq<Config, kIsOrdered>(workspace.dq + index * Config::kTileFloatsDQ,
                                 workspace.turn + index, 1, is_leader, shared);
    }
  }
  if (is_leader) ptx::bulk_wait<0>();
}

// The same for the steps that masks leave, as consumer 0 names them. In the order a CTA takes the
// turns of those that leave the tile out, between it and the last that does not.
template <class Config, bool kIsOrdered>
__device__ __forceinline__ void run_masked_dq_writer(const BackwardWorkspace& workspace,
                                                     int num_heads, bool is_reversed,
                                                     typename Config::SharedStorage& shared) {
  constexpr int kThreads = 128 + 32;
  const auto& block = shared.block;
  const int lane_idx = threadIdx.x % 32;
#pragma unroll 1
  for (int c = 0; c < Config::kConsumers; ++c) {
    ptx::named_barrier_arrive(kBarrierTaken + c, kThreads);
  }
#pragma unroll 1
  for (;;) {
    ptx::named_barrier_sync(kBarrierFormed, kThreads);
    const int head = block.formed.head, tile = block.formed.tile;
    if (block.formed.kind == StepKind::kNone) break;
    const int64_t index = workspace.index_of(num_heads, block.batch, head, block.slot(tile));
    int* counter = workspace.turn + index;
    int turns = 1;
    if constexpr (kIsOrdered) {
      const int place = block.turn(tile, is_reversed);
      const int turn = block.turn_after(workspace, head, tile, place, is_reversed, lane_idx);
      turns = place + 1 - turn;
      if (lane_idx == 0) wait_for_turn(counter, turn);
      __syncwarp();
    }
    add_dq<Config, kIsOrdered>(workspace.dq + index * Config::kTileFloatsDQ, counter, turns,
                               lane_idx == 0, shared);
  }
  if (lane_idx == 0) ptx::bulk_wait<0>();
}

}  // namespace jaxflash::fa3_sm90
