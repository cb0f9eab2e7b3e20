// The producer warpgroup of the FlashAttention-3 forward: one thread each of three warps.
//
//   scheduler   decides which tile comes next and tells all warps of the cluster
//   keys        fetches the next tile's queries in the middle of a tile, and K block after block
//   values      fetches V block after block
//
// In a cluster every CTA fetches a part of each K and V block and multicasts it to all.
#pragma once

#include "kernels/fa3_sm90/config.h"
#include "kernels/fa3_sm90/schedule.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/tma.cuh"
#include "ptx/warpgroup.cuh"

namespace jaxflash::fa3_sm90 {

struct ForwardMaps {
  CUtensorMap q;    // [B, T, N, H], boxes of 64 rows
  CUtensorMap k;    // [B, S, K, H], boxes of part_rows() rows
  CUtensorMap v;    // [B, S, K, Hv]
  CUtensorMap out;  // [B, T, N, Hv], boxes of 64 rows
};

// A CTA of a cluster fetches whole slabs of a block where there are enough, else rows of each.
template <class Config>
__host__ __device__ constexpr bool shares_by_slabs() {
  return Config::KVTile::kNumSlabs % Config::kCluster == 0;
}
template <class Config>
__host__ __device__ constexpr int part_rows() {
  return shares_by_slabs<Config>() ? Config::kBlockKV : Config::kBlockKV / Config::kCluster;
}

template <class Config>
class Producer {
  using Storage = typename Config::SharedStorage;
  using KVTile = typename Config::KVTile;
  static constexpr int kStages = Config::kNumStages;

 public:
  __device__ __forceinline__ Producer(const ForwardMaps& maps, Storage* shared)
      : maps_(maps), shared_(*shared) {}

  __device__ __forceinline__ void schedule(const AttentionParams& params,
                                           const SequenceInputs& inputs,
                                           const Schedule& schedule) const {
    const int num_clusters = gridDim.x / Config::kCluster;
    int index = blockIdx.x / Config::kCluster;
#pragma unroll 1
    for (int t = 0;; ++t) {
      const int slot = t % Config::kNumTileSlots;
      const WorkTile tile = locate<Config>(params, inputs, schedule, index);
      ptx::mbarrier_wait(&shared_.tile_empty[slot], (t / Config::kNumTileSlots & 1) ^ 1);
#pragma unroll 1
      for (int cta = 0; cta < Config::kCluster; ++cta) {
        ptx::mbarrier_arrive_expect_cluster(&shared_.tile_full[slot], sizeof(WorkTile), cta);
        int4* destination = reinterpret_cast<int4*>(&shared_.tiles[slot]);
        uint64_t* full = &shared_.tile_full[slot];
        ptx::store_async_v4(destination, full,
                            {tile.row_begin, tile.head, tile.batch, tile.kv_head}, cta);
        ptx::store_async_v4(destination + 1, full, {tile.block_begin, tile.block_end, 0, 0}, cta);
        ptx::store_async_v4(
            destination + 2, full,
            {tile.see.query_len, tile.see.kv_len, tile.see.window_low, tile.see.window_high}, cta);
      }
      if (tile.row_begin < 0) return;
      index = schedule.drawn == nullptr ? index + num_clusters
                                        : num_clusters + atomicAdd(schedule.drawn, 1);
    }
  }

  __device__ __forceinline__ void load_queries_and_keys() const {
    Ring<kStages> ring;
    Stream now = open(0, true);
#pragma unroll 1
    for (int t = 1; now.blocks >= 0; ++t) {
      // Early enough that the queries are there when the next tile begins, late enough that the
      // output of the tile before this one has left their place.
      const int half = now.blocks / 2;
      load_blocks(half, shared_.k, maps_.k, shared_.k_full, shared_.k_empty, &ring, &now);
      const Stream next = open(t, true);
      load_blocks(0, shared_.k, maps_.k, shared_.k_full, shared_.k_empty, &ring, &now);
      now = next;
    }
  }

  __device__ __forceinline__ void load_values() const {
    Ring<kStages> ring;
#pragma unroll 1
    for (int t = 0;; ++t) {
      Stream now = open(t, false);
      if (now.blocks < 0) return;
      load_blocks(0, shared_.v, maps_.v, shared_.v_full, shared_.v_empty, &ring, &now);
    }
  }

 private:
  // What is left to load of a tile: blocks block, block - 1, ... of one KV head.
  struct Stream {
    int blocks;  // -1 = no more work
    int block, kv_head, batch;
  };

  // Reads tile number t and gives its slot back.
  __device__ __forceinline__ Stream open(int t, bool loads_queries) const {
    const int slot = t % Config::kNumTileSlots;
    ptx::mbarrier_wait(&shared_.tile_full[slot], t / Config::kNumTileSlots & 1);
    const WorkTile& tile = shared_.tiles[slot];
    if (tile.row_begin < 0) return {-1, 0, 0, 0};
    if (loads_queries) load_queries(tile, t);
    const Stream stream = {tile.block_end - tile.block_begin, tile.block_end - 1, tile.kv_head,
                           tile.batch};
    ptx::mbarrier_arrive_cluster(&shared_.tile_empty[slot], 0);
    return stream;
  }

  __device__ __forceinline__ void load_queries(const WorkTile& tile, int t) const {
    const int buffer = t % 2;
    int row = tile.row_begin;
    if constexpr (Config::kCluster > 1) row += ptx::cluster_rank() * Config::kBlockQ;
#pragma unroll 1
    for (int consumer = 0; consumer < Config::kNumConsumers; ++consumer, row += 64) {
      uint64_t* full = &shared_.q_full[buffer][consumer];
      ptx::mbarrier_wait(&shared_.q_empty[buffer][consumer], (t / 2 & 1) ^ 1);
      ptx::mbarrier_arrive_expect(full, Config::QueryTile::kBytes);
#pragma unroll
      for (int slab = 0; slab < Config::QueryTile::kNumSlabs; ++slab) {
        ptx::tma_load(shared_.q[buffer][consumer].slabs[slab], &maps_.q, full, 64 * slab, row,
                      tile.head, tile.batch);
      }
    }
  }

  // Loads until `left` blocks of the stream are left.
  __device__ __forceinline__ void load_blocks(int left, KVTile (&tiles)[kStages],
                                              const CUtensorMap& map, uint64_t (&full)[kStages],
                                              uint64_t (&empty)[kStages], Ring<kStages>* ring,
                                              Stream* stream) const {
#pragma unroll 1
    for (; stream->blocks > left; --stream->blocks, --stream->block) {
      const int stage = ring->stage;
      ptx::mbarrier_wait(&empty[stage], ring->phase ^ 1);
      ptx::mbarrier_arrive_expect(&full[stage], KVTile::kBytes);
      load_part(&tiles[stage], map, &full[stage], *stream);
      ring->advance();
    }
  }

  __device__ __forceinline__ void load_part(KVTile* tile, const CUtensorMap& map, uint64_t* full,
                                            const Stream& stream) const {
    const int row = stream.block * Config::kBlockKV;
    if constexpr (Config::kCluster == 1) {
#pragma unroll
      for (int slab = 0; slab < KVTile::kNumSlabs; ++slab) {
        ptx::tma_load(tile->slabs[slab], &map, full, 64 * slab, row, stream.kv_head, stream.batch);
      }
    } else {
      constexpr uint16_t kAllCtas = (1 << Config::kCluster) - 1;
      constexpr int kSlabs =
          shares_by_slabs<Config>() ? KVTile::kNumSlabs / Config::kCluster : KVTile::kNumSlabs;
      const int rank = ptx::cluster_rank();
      const int first_slab = shares_by_slabs<Config>() ? rank * kSlabs : 0;
      const int first_row = shares_by_slabs<Config>() ? 0 : rank * part_rows<Config>();
#pragma unroll
      for (int i = 0; i < kSlabs; ++i) {
        const int slab = first_slab + i;
        ptx::tma_load_multicast(tile->slabs[slab] + 64 * first_row, &map, full, 64 * slab,
                                row + first_row, stream.kv_head, stream.batch, kAllCtas);
      }
    }
  }

  const ForwardMaps& maps_;
  Storage& shared_;
};

}  // namespace jaxflash::fa3_sm90
