// The scratch that the kernels of one backward call hand to each other.
//
// Query rows are counted in tiles of kBackwardBlockQ per sequence; a tile's slot inside its batch
// entry is the tile number that device::locate_tile() takes. Each (batch entry, head, slot) has
//   RowStatistics                         written by the prepare kernel
//   float dq[kBackwardBlockQ x head dim]  cleared by the prepare kernel, added to by the key/value
//                                         kernel, read by the convert kernel; atomics only
// The sums of a bias gradient are float32, shaped as the bias; its own array where that is float32.
// A repeatable one has partial sums instead, a few such arrays one after the other.
// The sums of dq lie in the order of the fragments that are added (dq_offset), not in rows: a warp
// then adds 512 adjacent bytes at a time.
#pragma once

#include <cstdint>

#include "device/sequence.cuh"
#include "kernels/fa2_sm80/backward_config.h"
#include "ptx/reduce.cuh"

namespace jaxflash::fa2_sm80 {

struct BackwardWorkspace {
  RowStatistics* statistics;  // [B, N, slots]
  float* dq;     // [B, N, slots, kBackwardBlockQ * padded head dim]; nullptr = dq without atomics
  float* dbias;  // as the bias; nullptr = no gradient of it is wanted, or a repeatable one
  float* dbias_parts;  // [parts, as the bias]; nullptr = no repeatable gradient of it is wanted
  int slots;           // query tiles of one batch entry

  __device__ __forceinline__ int64_t index_of(const AttentionParams& params, int batch, int head,
                                              int slot) const {
    return (batch * params.N + head) * slots + slot;
  }
};

struct QueryTile {
  device::SequenceTile sequence;
  int head, slot;
};

// For kernels with the grid (batch entry, slot, head), heads fastest as in memory: what this CTA
// owns; row_begin >= query_rows = nothing.
__device__ __forceinline__ QueryTile locate_query_tile(const AttentionParams& params,
                                                       const SequenceInputs& inputs, int slots) {
  const int N = static_cast<int>(params.N);
  QueryTile place;
  place.head = blockIdx.x % N;
  place.slot = blockIdx.x / N % slots;
  place.sequence = device::locate_tile<true, kBackwardBlockQ>(params, inputs,
                                                              blockIdx.x / N / slots, place.slot);
  return place;
}

// Slot of the first query tile of a sequence that has keys and queries.
__device__ __forceinline__ int first_slot(const SequenceInputs& inputs,
                                          const device::SequenceTile& place) {
  if (inputs.query_offsets.data == nullptr) return 0;
  return place.query_begin / kBackwardBlockQ + place.index + 1;
}

// Place of the fragment of rows 16 i.. and columns 8 j.. among a tile's sums.
template <int kHeadDim>
__device__ __forceinline__ int dq_offset(int i, int j) {
  return (i * (kHeadDim / 8) + j) * 128;
}

// Place of a lane's element e inside a fragment.
__device__ __forceinline__ int dq_lane_offset(int lane_idx, int e) {
  return ptx::kHasVectorReduction ? lane_idx * 4 + e : e * 32 + lane_idx;
}

// place: of the lane's element 0.
__device__ __forceinline__ void add_dq(float* place, const float (&values)[4]) {
  if constexpr (ptx::kHasVectorReduction) {
    ptx::reduce_add_v4(place, values);
  } else {
#pragma unroll
    for (int e = 0; e < 4; ++e) ptx::reduce_add(place + dq_lane_offset(0, e), values[e]);
  }
}

// A lane's four elements of a fragment.
__device__ __forceinline__ void load_dq(const float* fragment, int lane_idx, float (&values)[4]) {
  if constexpr (ptx::kHasVectorReduction) {
    const float4 sums = reinterpret_cast<const float4*>(fragment)[lane_idx];
    values[0] = sums.x;
    values[1] = sums.y;
    values[2] = sums.z;
    values[3] = sums.w;
  } else {
#pragma unroll
    for (int e = 0; e < 4; ++e) values[e] = fragment[dq_lane_offset(lane_idx, e)];
  }
}

}  // namespace jaxflash::fa2_sm80
