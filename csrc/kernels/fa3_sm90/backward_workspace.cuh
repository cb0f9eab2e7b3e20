// The scratch that the kernels of one backward call hand to each other.
//
// Query rows are counted in tiles of kBlockQ per sequence; a tile's slot inside its batch entry is
// the tile number that device::locate_tile() takes. Each (batch entry, head, slot) has, written by
// the prepare kernel unless said otherwise:
//   StatisticColumns[kBlockQ], RowStatistics[kBlockQ]     -lse and -delta, twice
//   float dq[kBlockQ x padded head dim]   cleared; added to by the main kernel, read by the convert
//                                         kernel; in the order of the fragments that are added
//   int marks                             see kMark...
//   int turn                              cleared; CTAs that have added their dq (deterministic)
// Where there are segment ids, smallest and largest of each query tile and of each block of keys.
#pragma once

#include <cstdint>

#include "device/visibility.cuh"

namespace jaxflash::fa3_sm90 {

// One row's statistics in float32, natural units, as the masked steps read them.
struct alignas(16) RowStatistics {
  float lse;  // +inf for rows that take no part
  float lse_low;
  float delta;
  float unused;
};

// The same as a row of eight 16-bit columns of a matrix that the products of S and dP take in as
// one more k step: three parts of -lse / softmax_scale, three of -delta, two zeros.
struct alignas(16) StatisticColumns {
  uint16_t parts[8];
};
static_assert(sizeof(StatisticColumns) == sizeof(RowStatistics), "one takes the other's place");

// What a step must know of its tile.
constexpr int kMarkIsExtreme = 1;    // a row exceeds what StatisticColumns can hold
constexpr int kMarkHasIdleRows = 2;  // general: some rows take no part
constexpr int kMarkIsIdle = 4;       // general: no row takes part

struct BackwardWorkspace {
  StatisticColumns* columns;   // [B, N, slots, kBlockQ]
  RowStatistics* rows;         // [B, N, slots, kBlockQ]
  float* dq;                   // [B, N, slots, kBlockQ * padded head dim]
  device::IdRange* query_ids;  // [B, slots]
  device::IdRange* kv_ids;     // [B, blocks]
  int* marks;                  // [B, N, slots]
  int* turn;                   // [B, N, slots]
  int slots;                   // query tiles of one batch entry
  int blocks;                  // the same of kBlockKV keys

  __device__ __forceinline__ int64_t index_of(int64_t num_heads, int batch, int head,
                                              int slot) const {
    return (batch * num_heads + head) * slots + slot;
  }
  __device__ __forceinline__ const device::IdRange& ids_of_queries(int batch, int slot) const {
    return query_ids[static_cast<int64_t>(batch) * slots + slot];
  }
  __device__ __forceinline__ const device::IdRange& ids_of_keys(int batch, int block) const {
    return kv_ids[static_cast<int64_t>(batch) * blocks + block];
  }
};

// Sizes of the workspace: `entries` batch entries of so many heads, slots and blocks.
struct BackwardWorkspaceSizes {
  int64_t entries, heads, slots, blocks;
  int block_q, head_dim;
};

// Floats of all parts.
inline int64_t backward_workspace_floats(const BackwardWorkspaceSizes& sizes) {
  const int64_t statistics = 4 * sizes.block_q + 4 * sizes.block_q,
                dq = static_cast<int64_t>(sizes.block_q) * sizes.head_dim;
  return sizes.entries *
         (sizes.heads * sizes.slots * (statistics + dq + 2) + 2 * (sizes.slots + sizes.blocks));
}

// The parts, in the order in which they lie; those of 16-byte elements first.
inline BackwardWorkspace make_backward_workspace(float* data, const BackwardWorkspaceSizes& sizes) {
  const int64_t count = sizes.entries * sizes.heads * sizes.slots;
  BackwardWorkspace workspace;
  workspace.columns = reinterpret_cast<StatisticColumns*>(data);
  workspace.rows = reinterpret_cast<RowStatistics*>(workspace.columns + count * sizes.block_q);
  workspace.dq = reinterpret_cast<float*>(workspace.rows + count * sizes.block_q);
  workspace.query_ids =
      reinterpret_cast<device::IdRange*>(workspace.dq + count * sizes.block_q * sizes.head_dim);
  workspace.kv_ids = workspace.query_ids + sizes.entries * sizes.slots;
  workspace.marks = reinterpret_cast<int*>(workspace.kv_ids + sizes.entries * sizes.blocks);
  workspace.turn = workspace.marks + count;
  workspace.slots = static_cast<int>(sizes.slots);
  workspace.blocks = static_cast<int>(sizes.blocks);
  return workspace;
}

// For kernels with the grid (batch entry, slot, head), heads fastest as in memory: what this CTA
// owns.
struct QueryTile {
  device::SequenceTile sequence;
  int head, slot;
  int64_t index;  // in the workspace
  int num_rows;   // of the batch entry's arrays, from the tile's first on; <= 0: nothing to do
  int num_valid;  // of them that are not padding

  // Where the tile's row lies in [B, T, N].
  __device__ __forceinline__ int64_t place_of(const AttentionParams& params, int row) const {
    const int position = sequence.query_begin + sequence.row_begin + row;
    return (sequence.batch * params.T + position) * params.N + head;
  }
};

template <int kBlockQ>
__device__ __forceinline__ QueryTile locate_query_tile(const AttentionParams& params,
                                                       const SequenceInputs& inputs,
                                                       const BackwardWorkspace& workspace) {
  const int N = static_cast<int>(params.N);
  QueryTile owned;
  owned.head = blockIdx.x % N;
  owned.slot = blockIdx.x / N % workspace.slots;
  owned.sequence = device::locate_tile<true, kBlockQ>(params, inputs,
                                                      blockIdx.x / N / workspace.slots, owned.slot);
  owned.index = workspace.index_of(N, owned.sequence.batch, owned.head, owned.slot);
  owned.num_rows = owned.sequence.query_rows - owned.sequence.row_begin;
  owned.num_valid = owned.sequence.query_len - owned.sequence.row_begin;
  return owned;
}

// Slot of the first query tile of a sequence that has keys and queries.
__device__ __forceinline__ int first_query_slot(const SequenceInputs& inputs,
                                                const device::SequenceTile& place, int block_q) {
  if (inputs.query_offsets.data == nullptr) return 0;
  return place.query_begin / block_q + place.index + 1;
}

// Which sums of dQ the four floats `index` of a tile are. With kIsTransposedDQ thread t of consumer
// c holds, of fragment columns 8 j.., features d, d, d + 8, d + 8 of queries q, q + 1, q, q + 1,
// else thread t of the consumer that has the features holds d, d + 1, d, d + 1 of q, q, q + 8, q
// + 8.
template <class Config>
struct PlaceDQ {
  int query, feature;

  __device__ __forceinline__ explicit PlaceDQ(int index) {
    const int lane_idx = index % 32, warp_idx = index / 32 % 4, j = index / 128;
    if constexpr (Config::kIsTransposedDQ) {
      constexpr int kPartOctets = Config::kColumnsDQ / 8;
      const int c = j / kPartOctets;
      query = 8 * (Config::kSlabs == 2 ? j % kPartOctets : j) + 2 * (lane_idx % 4);
      feature = warp_idx * 16 + lane_idx / 4 + (Config::kSlabs == 2 ? c * 64 : 0);
    } else {
      query = warp_idx * 16 + lane_idx / 4;
      feature = 8 * j + 2 * (lane_idx % 4);
    }
  }
};

}  // namespace jaxflash::fa3_sm90
