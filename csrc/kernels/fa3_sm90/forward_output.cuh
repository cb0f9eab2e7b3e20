// What a consumer warpgroup of the FlashAttention-3 forward owns of a tile, where that lies in the
// arrays, and how its results leave.
#pragma once

#include "device/row_result.cuh"
#include "kernels/fa3_sm90/config.h"
#include "kernels/fa3_sm90/forward_produce.cuh"
#include "kernels/fa3_sm90/forward_rows.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/named_barrier.cuh"
#include "ptx/stmatrix.cuh"
#include "ptx/tma.cuh"

namespace jaxflash::fa3_sm90 {

template <class Config>
class ConsumerTile {
 protected:
  using Element = typename Config::Element;
  using Storage = typename Config::SharedStorage;
  using QueryTile = typename Config::QueryTile;
  using Tile = typename Config::Tile;
  static constexpr int kHeadDimV = Config::kHeadDimV;

  __device__ __forceinline__ ConsumerTile(const ForwardParams& params, int consumer_idx,
                                          Storage* shared)
      : params_(params),
        shared_(*shared),
        consumer_idx_(consumer_idx),
        thread_idx_(threadIdx.x % 128),
        warp_idx_(threadIdx.x % 128 / 32),
        lane_idx_(threadIdx.x % 32) {}

  // O / l to the place of the tile's own queries, for TMA to read when all warps have arrived at
  // `staged`; lse. The fence would wait for lse on its way to memory, so that comes last.
  __device__ __forceinline__ void stage_output(const Tile& tile, uint64_t* staged) {
    const AttentionParams& attention = params_.attention;
    const float* sinks = device::batch_data<float>(params_.sinks, attention, tile.batch);
    const float sink = sinks == nullptr ? -kInfinity : sinks[tile.head * params_.sinks.head_stride];
    float factor[2], lse[2], lse_low[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = row_begin_ + 16 * warp_idx_ + lane_idx_ / 4 + 8 * r;
      device::RowResult result =
          device::finish_softmax(rows_.reference[r], quad_sum(rows_.row_sum[r]), sink, true);
      if (!is_row_valid(tile, row)) result = {-kInfinity, 0.0f, 0.0f};
      factor[r] = result.factor;
      lse[r] = result.lse;
      lse_low[r] = result.lse_low;
    }
    group_sync();  // all four warps are done with the queries
#pragma unroll
    for (int j = 0; j < kHeadDimV / 8; j += 2) {  // 16 features at a time
      uint32_t pairs[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* pair = &rows_.output[4 * j + 2 * i];
        const bool is_zero = factor[i % 2] == 0.0f;  // whatever the accumulator holds
        pairs[i] = ptx::pack<Element>(is_zero ? 0.0f : pair[0] * factor[i % 2],
                                      is_zero ? 0.0f : pair[1] * factor[i % 2]);
      }
      ptx::stmatrix_x4(queries_->chunk_address(16 * warp_idx_ + lane_idx_ % 16, j + lane_idx_ / 16),
                       pairs[0], pairs[1], pairs[2], pairs[3]);
    }
    if constexpr (Config::kIsGeneral) {
      const int end = end_of_copies(tile, static_cast<int>(attention.T));
      if (tile.query_begin + row_begin_ + 64 > end) store_owned_rows(tile);
    }
    ptx::fence_async_proxy();
    __syncwarp();  // the warp's rows are staged
    if (lane_idx_ == 0) ptx::mbarrier_arrive(staged);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = row_begin_ + 16 * warp_idx_ + lane_idx_ / 4 + 8 * r;
      if (lane_idx_ % 4 == 0 && row < query_rows(tile)) {
        const int64_t index = (first_query(tile) + row) * attention.N + tile.head;
        params_.lse[index] = lse[r];
        params_.lse_low[index] = lse_low[r];
      }
    }
  }

  // The staged rows that belong to the tile's sequence; TMA would write its neighbour's as well.
  __device__ __forceinline__ void store_owned_rows(const Tile& tile) {
    const AttentionParams& attention = params_.attention;
    group_sync();  // all warps have staged theirs
    const int chunks = static_cast<int>(attention.Hv) / 8;
    const int rows = min(tile.query_rows - row_begin_, 64);
    Element* out = static_cast<Element*>(params_.out) +
                   ((first_query(tile) + row_begin_) * attention.N + tile.head) * attention.Hv;
#pragma unroll 1
    for (int i = thread_idx_; i < rows * chunks; i += 128) {
      const int row = i / chunks, chunk = i - row * chunks;
      *reinterpret_cast<uint4*>(out + row * attention.N * attention.Hv + 8 * chunk) =
          *queries_->chunk_at(row, chunk);
    }
  }

  // --- Positions --------------------------------------------------------------------------------

  __device__ __forceinline__ int lane_row() const {
    return row_begin_ + 16 * warp_idx_ + lane_idx_ / 4;
  }

  __device__ __forceinline__ static int query_begin(const Tile& tile) {
    if constexpr (Config::kIsGeneral) return tile.query_begin;
    return 0;
  }
  __device__ __forceinline__ static int kv_begin(const Tile& tile) {
    if constexpr (Config::kIsGeneral) return tile.kv_begin;
    return 0;
  }
  __device__ __forceinline__ int query_rows(const Tile& tile) const {
    if constexpr (Config::kIsGeneral) return tile.query_rows;
    return params_.attention.T;
  }
  __device__ __forceinline__ int64_t first_query(const Tile& tile) const {
    return tile.batch * params_.attention.T + query_begin(tile);
  }
  __device__ __forceinline__ static bool is_row_valid(const Tile& tile, int row) {
    if constexpr (Config::kIsGeneral) return device::is_query_valid(tile.see, row);
    return row < tile.see.query_len;
  }

  // --- Synchronisation --------------------------------------------------------------------------

  __device__ __forceinline__ void group_sync() const {
    ptx::named_barrier_sync(static_cast<int>(NamedBarrier::kGroup) + consumer_idx_, 128);
  }

  // Zeroes the rows from `first` on, which TMA has filled with padding: 0 * NaN would reach
  // results.
  template <class SharedTile>
  __device__ __forceinline__ void clear_padding(SharedTile* tile, int first) const {
    constexpr int kRowChunks = SharedTile::kNumColumns / 8;
    for (int i = max(first, 0) * kRowChunks + thread_idx_; i < SharedTile::kNumRows * kRowChunks;
         i += 128) {
      *tile->chunk_at(i / kRowChunks, i % kRowChunks) = {0, 0, 0, 0};
    }
    ptx::fence_async_proxy();
    group_sync();  // the zeros are complete before any warp's wgmma reads them
  }

  const ForwardParams& params_;
  Storage& shared_;
  const int consumer_idx_, thread_idx_, warp_idx_, lane_idx_;
  QueryTile* queries_;
  int row_begin_;  // of this warpgroup, inside the sequence
  Rows<Config> rows_;
};

}  // namespace jaxflash::fa3_sm90
