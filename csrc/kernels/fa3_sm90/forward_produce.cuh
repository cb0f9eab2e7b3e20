// The producer warpgroup of the FlashAttention-3 forward: one thread each of three warps.
//
//   scheduler   decides which tile comes next and tells all warps
//   keys        fetches the next tile's queries in the middle of a tile, and K block after block
//   values      fetches V block after block
//
// In the general instance the whole warp of the scheduler works, and decides as well which blocks
// the tile meets (forward_blocks.cuh).
#pragma once

#include "kernels/fa3_sm90/config.h"
#include "kernels/fa3_sm90/schedule.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/tma.cuh"
#include "ptx/warpgroup.cuh"

namespace jaxflash::fa3_sm90 {

struct ForwardMaps {
  CUtensorMap q;    // [B, T, N, H], boxes of 64 rows
  CUtensorMap k;    // [B, S, K, H], boxes of kBlockKV rows
  CUtensorMap v;    // [B, S, K, Hv]
  CUtensorMap out;  // [B, T, N, Hv], boxes of 64 rows
};

template <class Config>
class Producer {
  using Storage = typename Config::SharedStorage;
  static constexpr int kStages = Config::kNumStages;

 public:
  __device__ __forceinline__ Producer(const ForwardMaps& maps, Storage* shared)
      : maps_(maps), shared_(*shared) {}

  __device__ __forceinline__ void schedule(const AttentionParams& params,
                                           const SequenceInputs& inputs,
                                           const Schedule& schedule) const {
    int index = blockIdx.x;
#pragma unroll 1
    for (int t = 0;; ++t) {
      const int slot = t % Config::kNumTileSlots;
      const WorkTile tile = locate<Config>(params, inputs, schedule, index);
      ptx::mbarrier_wait(&shared_.tile_empty[slot], (t / Config::kNumTileSlots & 1) ^ 1);
      shared_.tiles[slot] = tile;
      ptx::mbarrier_arrive(&shared_.tile_full[slot]);
      if (tile.row_begin < 0) return;
      index = static_cast<int>(gridDim.x) +
              (schedule.drawn == nullptr ? index : atomicAdd(schedule.drawn, 1));
    }
  }

  // The general instance's, by a whole warp. A tile is handed out before its blocks are known.
  __device__ __forceinline__ void schedule_masked(const AttentionParams& params,
                                                  const SequenceInputs& inputs,
                                                  const Schedule& schedule) const {
    const int lane_idx = threadIdx.x % 32;
    BlockWriter<Config> blocks(&shared_);
    // Drawn one tile ahead, so that nobody waits for it.
    int drawn = static_cast<int>(blockIdx.x) - static_cast<int>(gridDim.x);
#pragma unroll 1
    for (int t = 0;; ++t) {
      const int slot = t % Config::kNumTileSlots;
      typename Config::Tile* tile = &shared_.tiles[slot];
      ptx::mbarrier_wait(&shared_.tile_empty[slot], (t / Config::kNumTileSlots & 1) ^ 1);
      if (lane_idx == 0) {
        bool has_rows;
        do {
          const int index = static_cast<int>(gridDim.x) + drawn;
          drawn = atomicAdd(schedule.drawn, 1);
          has_rows = locate_masked<Config>(params, inputs, schedule, index, tile);
        } while (!has_rows);
      }
      __syncwarp();  // lane 0 has written the tile
      const bool is_end = tile->row_begin < 0;
      if (!is_end) blocks.find_query_ids(tile);
      if (lane_idx == 0) ptx::mbarrier_arrive(&shared_.tile_full[slot]);
      if (is_end) return;
      blocks.write(*tile);
    }
  }

  __device__ __forceinline__ void load_queries_and_keys() const {
    if constexpr (Config::kIsGeneral) {
      load_masked(shared_.k, maps_.k, shared_.k_full, shared_.k_empty, true);
      return;
    }
    Ring<kStages> ring;
    Stream now = open(0, true);
#pragma unroll 1
    for (int t = 1; now.blocks >= 0; ++t) {
      // Early enough that the queries are there when the next tile begins, late enough that the
      // output of the tile before this one has left their place.
      const int half = Config::kNumQueryBuffers == 2 ? now.blocks / 2 : 0;
      load_blocks(half, shared_.k, maps_.k, shared_.k_full, shared_.k_empty, &ring, &now);
      const Stream next = open(t, true);
      load_blocks(0, shared_.k, maps_.k, shared_.k_full, shared_.k_empty, &ring, &now);
      now = next;
    }
  }

  __device__ __forceinline__ void load_values() const {
    if constexpr (Config::kIsGeneral) {
      load_masked(shared_.v, maps_.v, shared_.v_full, shared_.v_empty, false);
      return;
    }
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
    int blocks;  // -1 = no more work; the general instance's words tell otherwise
    int block, kv_head, batch;
    int first_key;  // of the sequence
  };

  // Reads tile number t and gives its slot back.
  __device__ __forceinline__ Stream open(int t, bool loads_queries) const {
    const int slot = t % Config::kNumTileSlots;
    ptx::mbarrier_wait(&shared_.tile_full[slot], t / Config::kNumTileSlots & 1);
    const typename Config::Tile& tile = shared_.tiles[slot];
    if (tile.row_begin < 0) return {-1, 0, 0, 0, 0};
    if (loads_queries) load_queries(tile, t);
    Stream stream = {0, 0, tile.kv_head, tile.batch, 0};
    if constexpr (Config::kIsGeneral) {
      stream.first_key = tile.kv_begin;
    } else {
      stream.blocks = tile.block_end - tile.block_begin;
      stream.block = tile.block_end - 1;
    }
    ptx::mbarrier_arrive(&shared_.tile_empty[slot]);
    return stream;
  }

  __device__ __forceinline__ void load_queries(const typename Config::Tile& tile, int t) const {
    const int buffer = t % Config::kNumQueryBuffers;
    int row = tile.row_begin;
    if constexpr (Config::kIsGeneral) row += tile.query_begin;
#pragma unroll 1
    for (int consumer = 0; consumer < Config::kNumConsumers; ++consumer, row += 64) {
      uint64_t* full = &shared_.q_full[buffer][consumer];
      ptx::mbarrier_wait(&shared_.q_empty[buffer][consumer],
                         (t / Config::kNumQueryBuffers & 1) ^ 1);
      ptx::mbarrier_arrive_expect(full, Config::QueryTile::kBytes);
#pragma unroll
      for (int slab = 0; slab < Config::QueryTile::kNumSlabs; ++slab) {
        ptx::tma_load(shared_.q[buffer][consumer].slabs[slab], &maps_.q, full, 64 * slab, row,
                      tile.head, tile.batch);
      }
    }
  }

  // Loads until `left` blocks of the stream are left.
  template <class KVTile>
  __device__ __forceinline__ void load_blocks(int left, KVTile (&tiles)[kStages],
                                              const CUtensorMap& map, uint64_t (&full)[kStages],
                                              uint64_t (&empty)[kStages], Ring<kStages>* ring,
                                              Stream* stream) const {
#pragma unroll 1
    for (; stream->blocks > left; --stream->blocks, --stream->block) {
      const int stage = ring->stage;
      ptx::mbarrier_wait(&empty[stage], ring->phase ^ 1);
      ptx::mbarrier_arrive_expect(&full[stage], KVTile::kBytes);
      load_block(&tiles[stage], map, &full[stage], stream->block, *stream);
      ring->advance();
    }
  }

  // The general instance: whatever blocks the scheduler's words name, tile after tile.
  template <class KVTile>
  __device__ __forceinline__ void load_masked(KVTile (&tiles)[kStages], const CUtensorMap& map,
                                              uint64_t (&full)[kStages], uint64_t (&empty)[kStages],
                                              bool loads_queries) const {
    Ring<kStages> ring;
    BlockReader<Config, 1> blocks;
#pragma unroll 1
    for (int t = 0;; ++t) {
      const Stream now = open(t, loads_queries);
      if (now.blocks < 0) return;
#pragma unroll 1
      while (blocks.next(&shared_, 0)) {
        ptx::mbarrier_wait(&empty[ring.stage], ring.phase ^ 1);
        ptx::mbarrier_arrive_expect(&full[ring.stage], KVTile::kBytes);
        load_block(&tiles[ring.stage], map, &full[ring.stage], blocks.block(), now);
        ring.advance();
      }
    }
  }

  template <class KVTile>
  __device__ __forceinline__ void load_block(KVTile* tile, const CUtensorMap& map, uint64_t* full,
                                             int block, const Stream& stream) const {
    const int row = stream.first_key + block * Config::kBlockKV;
#pragma unroll
    for (int slab = 0; slab < KVTile::kNumSlabs; ++slab) {
      ptx::tma_load(tile->slabs[slab], &map, full, 64 * slab, row, stream.kv_head, stream.batch);
    }
  }

  const ForwardMaps& maps_;
  Storage& shared_;
};

}  // namespace jaxflash::fa3_sm90
