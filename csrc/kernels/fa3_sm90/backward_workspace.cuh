// The scratch that the kernels of one backward call hand to each other.
//
// Query rows are counted in tiles of kBlockQ. Each (batch entry, head, tile) has, written by the
// prepare kernel unless said otherwise:
//   StatisticColumns[kBlockQ], RowStatistics[kBlockQ]     -lse and -delta, twice
//   (backward_config.h) float dq[kBlockQ x padded head dim]   cleared; added to by the main kernel,
//   read by the convert
//                                         kernel; in the order of the fragments that are added
//   int is_extreme                        whether a row exceeds what StatisticColumns can hold
//   int turn                              cleared; CTAs that have added their dq (deterministic)
#pragma once

#include <cstdint>

#include "device/visibility.cuh"
#include "kernels/fa3_sm90/backward_config.h"

namespace jaxflash::fa3_sm90 {

struct BackwardWorkspace {
  StatisticColumns* columns;  // [B, N, tiles, kBlockQ]
  RowStatistics* rows;        // [B, N, tiles, kBlockQ]
  float* dq;                  // [B, N, tiles, kBlockQ * padded head dim]
  int* is_extreme;            // [B, N, tiles]
  int* turn;                  // [B, N, tiles]
  int tiles;                  // of kBlockQ queries in one batch entry

  __device__ __forceinline__ int64_t index_of(int64_t num_heads, int batch, int head,
                                              int tile) const {
    return (batch * num_heads + head) * tiles + tile;
  }
};

// Floats of all parts for `count` tiles. Every part is a multiple of 16 bytes.
inline int64_t backward_workspace_floats(int64_t count, int block_q, int head_dim) {
  const int64_t statistics = 4 * block_q + 4 * block_q,
                dq = static_cast<int64_t>(block_q) * head_dim;
  return count * (statistics + dq + 2);
}

// The parts, in the order in which they lie.
inline BackwardWorkspace make_backward_workspace(float* data, int64_t count, int block_q,
                                                 int head_dim, int tiles) {
  BackwardWorkspace workspace;
  workspace.columns = reinterpret_cast<StatisticColumns*>(data);
  workspace.rows = reinterpret_cast<RowStatistics*>(workspace.columns + count * block_q);
  workspace.dq = reinterpret_cast<float*>(workspace.rows + count * block_q);
  workspace.is_extreme = reinterpret_cast<int*>(workspace.dq + count * block_q * head_dim);
  workspace.turn = workspace.is_extreme + count;
  workspace.tiles = tiles;
  return workspace;
}

// Where four sums of dQ lie in a tile: thread t of consumer c holds, of fragment columns 8 j..,
// features d, d, d + 8, d + 8 of queries q, q + 1, q, q + 1.
template <class Config>
struct PlaceDQ {
  int offset;  // of the four floats
  int query, feature;

  __device__ __forceinline__ PlaceDQ(int c, int j, int thread_idx) {
    offset = c * Config::kPartFloatsDQ + (j * 128 + thread_idx) * 4;
    const int lane_idx = thread_idx % 32;
    query = 8 * j + 2 * (lane_idx % 4) + (Config::kSlabs == 2 ? 0 : c * Config::kColumnsDQ);
    feature = thread_idx / 32 * 16 + lane_idx / 4 + (Config::kSlabs == 2 ? c * 64 : 0);
  }
};

}  // namespace jaxflash::fa3_sm90
