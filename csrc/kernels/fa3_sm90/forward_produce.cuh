// The producer warpgroup of the FlashAttention-3 forward: one thread each of four warps.
//
//   scheduler   decides which tile comes next and tells all warps
//   keys        fetches K block after block
//   values      fetches V block after block
//   rows        sends a finished tile's output from its queries' place, fetches the next queries
//   there
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

// Sends 64 staged rows on their way.
template <class Config>
__device__ __forceinline__ void send_rows(const CUtensorMap& map,
                                          const typename Config::QueryTile& staged, int row,
                                          int head, int batch) {
#pragma unroll
  for (int slab = 0; slab < Config::ValueTile::kNumSlabs; ++slab) {
    ptx::tma_store(&map, staged.slabs[slab], 64 * slab, row, head, batch);
  }
  ptx::bulk_commit();
}

// General: the row of the array from which on TMA may not write for this tile, because rows of
// another sequence follow.
template <class Tile>
__device__ __forceinline__ int end_of_copies(const Tile& tile, int num_rows) {
  const int end = tile.query_begin + tile.query_rows;
  return end < num_rows ? end : INT32_MAX;
}

template <class Config>
class Producer {
  using Storage = typename Config::SharedStorage;
  static constexpr int kStages = Config::kNumStages;
  static constexpr int kNumQueryBuffers = Config::kNumQueryBuffers;

 public:
  __device__ __forceinline__ Producer(const AttentionParams& params, const ForwardMaps& maps,
                                      Storage* shared)
      : params_(params), maps_(maps), shared_(*shared) {}

  __device__ __forceinline__ void schedule(const SequenceInputs& inputs,
                                           const Schedule& schedule) const {
    int index = blockIdx.x;
#pragma unroll 1
    for (int t = 0;; ++t) {
      const int slot = t % Config::kNumTileSlots;
      const WorkTile tile = locate<Config>(params_, inputs, schedule, index);
      ptx::mbarrier_wait(&shared_.tile_empty[slot], (t / Config::kNumTileSlots & 1) ^ 1);
      shared_.tiles[slot] = tile;
      ptx::mbarrier_arrive(&shared_.tile_full[slot]);
      if (tile.row_begin < 0) return;
      index = static_cast<int>(gridDim.x) +
              (schedule.drawn == nullptr ? index : atomicAdd(schedule.drawn, 1));
    }
  }

  // The general instance's, by a whole warp. A tile is handed out before its blocks are known.
  __device__ __forceinline__ void schedule_masked(const SequenceInputs& inputs,
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
          has_rows = locate_masked<Config>(params_, inputs, schedule, index, tile);
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

  __device__ __forceinline__ void load_keys() const {
    load_tiles(shared_.k, maps_.k, shared_.k_full, shared_.k_empty);
  }
  __device__ __forceinline__ void load_values() const {
    load_tiles(shared_.v, maps_.v, shared_.v_full, shared_.v_empty);
  }

  // The queries of tile t take the place of tile t - kNumQueryBuffers when its output has left.
  __device__ __forceinline__ void move_rows() const {
    RowTile waiting[kNumQueryBuffers];  // tiles t - 1 and, with two buffers, t - 2
#pragma unroll 1
    for (int t = 0;; ++t) {
      const RowTile tile = open_rows(t);
#pragma unroll 1
      for (int consumer = 0; consumer < Config::kNumConsumers; ++consumer) {
        if (t >= kNumQueryBuffers) {
          send_output(waiting[kNumQueryBuffers - 1], t - kNumQueryBuffers, consumer);
        }
        if (tile.first >= 0) load_queries(tile, t, consumer);
      }
      if (tile.first < 0) {
        if (kNumQueryBuffers == 2 && t > 0) {
#pragma unroll 1
          for (int consumer = 0; consumer < Config::kNumConsumers; ++consumer) {
            send_output(waiting[0], t - 1, consumer);
          }
        }
        ptx::bulk_wait<0>();
        return;
      }
      waiting[kNumQueryBuffers - 1] = waiting[0];
      waiting[0] = tile;
    }
  }

 private:
  // What is left to load of a tile: blocks block, block - 1, ... of one KV head.
  struct Stream {
    int blocks;  // -1 = no more work; the general instance's words tell otherwise
    int block, kv_head, batch;
    int first_key;  // of the sequence
  };

  // A tile's rows of the arrays of queries and outputs.
  struct RowTile {
    int first;  // -1 = no more work
    int head, batch;
    int end;  // general: rows from here on are another sequence's
  };

  // Tile number t, whose slot is given back when `read` has read it.
  template <class Read>
  __device__ __forceinline__ auto open(int t, const Read& read) const {
    const int slot = t % Config::kNumTileSlots;
    ptx::mbarrier_wait(&shared_.tile_full[slot], t / Config::kNumTileSlots & 1);
    const auto result = read(shared_.tiles[slot]);
    ptx::mbarrier_arrive(&shared_.tile_empty[slot]);
    return result;
  }

  __device__ __forceinline__ Stream open_blocks(int t) const {
    return open(t, [](const typename Config::Tile& tile) -> Stream {
      if (tile.row_begin < 0) return {-1, 0, 0, 0, 0};
      if constexpr (Config::kIsGeneral) {
        return {0, 0, tile.kv_head, tile.batch, tile.kv_begin};
      } else {
        return {tile.block_end - tile.block_begin, tile.block_end - 1, tile.kv_head, tile.batch, 0};
      }
    });
  }

  __device__ __forceinline__ RowTile open_rows(int t) const {
    return open(t, [&](const typename Config::Tile& tile) -> RowTile {
      if (tile.row_begin < 0) return {-1, 0, 0, 0};
      if constexpr (Config::kIsGeneral) {
        return {tile.query_begin + tile.row_begin, tile.head, tile.batch,
                end_of_copies(tile, static_cast<int>(params_.T))};
      } else {
        return {tile.row_begin, tile.head, tile.batch, INT32_MAX};
      }
    });
  }

  __device__ __forceinline__ void load_queries(const RowTile& tile, int t, int consumer) const {
    const int buffer = t % kNumQueryBuffers;
    uint64_t* full = &shared_.q_full[buffer][consumer];
    ptx::mbarrier_arrive_expect(full, Config::QueryTile::kBytes);
#pragma unroll
    for (int slab = 0; slab < Config::QueryTile::kNumSlabs; ++slab) {
      ptx::tma_load(shared_.q[buffer][consumer].slabs[slab], &maps_.q, full, 64 * slab,
                    tile.first + 64 * consumer, tile.head, tile.batch);
    }
  }

  // Returns when the output has been read. Where the rows are not all the tile's own, the consumer
  // has written them itself.
  __device__ __forceinline__ void send_output(const RowTile& tile, int t, int consumer) const {
    const int buffer = t % kNumQueryBuffers, row = tile.first + 64 * consumer;
    ptx::mbarrier_wait(&shared_.output_staged[buffer][consumer], t / kNumQueryBuffers & 1);
    if (Config::kIsGeneral && row + 64 > tile.end) return;
    send_rows<Config>(maps_.out, shared_.q[buffer][consumer], row, tile.head, tile.batch);
    ptx::bulk_wait_read<0>();
  }

  // Loads K or V, tile after tile.
  template <class KVTile>
  __device__ __forceinline__ void load_tiles(KVTile (&tiles)[kStages], const CUtensorMap& map,
                                             uint64_t (&full)[kStages],
                                             uint64_t (&empty)[kStages]) const {
    Ring<kStages> ring;
    BlockReader<Config, 1> blocks;  // general: whatever blocks the scheduler's words name
#pragma unroll 1
    for (int t = 0;; ++t) {
      Stream stream = open_blocks(t);
      if (stream.blocks < 0) return;
      const auto load = [&](int block) {
        const int stage = ring.stage;
        ptx::mbarrier_wait(&empty[stage], ring.phase ^ 1);
        ptx::mbarrier_arrive_expect(&full[stage], KVTile::kBytes);
#pragma unroll
        for (int slab = 0; slab < KVTile::kNumSlabs; ++slab) {
          ptx::tma_load(tiles[stage].slabs[slab], &map, &full[stage], 64 * slab,
                        stream.first_key + block * Config::kBlockKV, stream.kv_head, stream.batch);
        }
        ring.advance();
      };
      if constexpr (Config::kIsGeneral) {
#pragma unroll 1
        while (blocks.next(&shared_, 0)) load(blocks.block());
      } else {
#pragma unroll 1
        for (; stream.blocks > 0; --stream.blocks, --stream.block) load(stream.block);
      }
    }
  }

  const AttentionParams& params_;
  const ForwardMaps& maps_;
  Storage& shared_;
};

}  // namespace jaxflash::fa3_sm90
