// FlashAttention-2 backward (arXiv:2307.08691, Algorithm 2): what goes before and after the loop.
//
//   prepare   delta = sum(dout out) - dlse (line 4), the statistics of the loop, sums of dQ = 0
//   convert   dQ = softmax_scale * sums, rounded
//
// One CTA owns one query tile of one head in both. Only rows that see a key take part: out and dout
// of the others are not read, their delta is 0, and the loop hides their pairs.
#pragma once

#include "device/visibility.cuh"
#include "kernels/fa3_sm90/backward_config.h"
#include "kernels/fa3_sm90/backward_workspace.cuh"
#include "ptx/math.cuh"

namespace jaxflash::fa3_sm90 {

constexpr int kPrepareThreads = 256;

template <class Element>
__device__ __forceinline__ float dot_packed(uint32_t left, uint32_t right) {
  const auto* a = reinterpret_cast<const Element*>(&left);
  const auto* b = reinterpret_cast<const Element*>(&right);
  return static_cast<float>(a[0]) * static_cast<float>(b[0]) +
         static_cast<float>(a[1]) * static_cast<float>(b[1]);
}

// parts[0] + parts[1] + parts[2] = value as nearly as Element allows.
template <class Element>
__device__ __forceinline__ void split_in_three(float value, uint16_t* parts) {
#pragma unroll
  for (int i = 0; i < 3; ++i) {
    const Element part = static_cast<Element>(value);
    parts[i] = *reinterpret_cast<const uint16_t*>(&part);
    value -= static_cast<float>(part);
  }
}

// Whether StatisticColumns cannot hold the row; NaN counts.
template <class Element>
__device__ __forceinline__ bool is_beyond_columns(float softmax_scale, const RowStatistics& row) {
  using Limits = StatisticLimits<Element>;
  return !(fabsf(row.lse) < kMaxLse && fabsf(row.lse / softmax_scale) < Limits::kMaxStart &&
           fabsf(row.delta) < Limits::kMaxDelta && fabsf(softmax_scale) < Limits::kMaxScale);
}

// The ranges of segment ids: of the tile's queries, once for all heads, and of key blocks, which
// are dealt out to the CTAs. One warp.
template <class Config>
__device__ __forceinline__ void find_id_ranges(const AttentionParams& params,
                                               const SequenceInputs& inputs, const QueryTile& owned,
                                               const BackwardWorkspace& workspace) {
  const int lane_idx = threadIdx.x % 32;
  const device::SequenceTile& sequence = owned.sequence;
  const auto find = [&](const BroadcastArray& ids, int batch, int begin, int end,
                        device::IdRange* range) {
    const device::IdRange found =
        device::id_range(device::batch_data<int32_t>(ids, params, batch), begin, end, lane_idx);
    if (lane_idx == 0) *range = found;
  };
  if (owned.head == 0) {
    find(params.query_segment_ids, sequence.batch, sequence.row_begin,
         min(sequence.row_begin + Config::kBlockQ, sequence.query_len),
         workspace.query_ids +
             (static_cast<int64_t>(sequence.batch) * workspace.slots + owned.slot));
  }
  const int64_t num_blocks = params.B * workspace.blocks;
#pragma unroll 1
  for (int64_t i = blockIdx.x; i < num_blocks; i += gridDim.x) {
    const int batch = static_cast<int>(i / workspace.blocks);
    const int begin = static_cast<int>(i % workspace.blocks) * Config::kBlockKV;
    const int kv_len =
        device::length_of(inputs.kv_lengths, params, batch, static_cast<int>(params.S));
    find(params.kv_segment_ids, batch, begin, min(begin + Config::kBlockKV, kv_len),
         workspace.kv_ids + i);
  }
}

template <class Config>
__global__ void __launch_bounds__(kPrepareThreads)
    backward_prepare_kernel(const __grid_constant__ BackwardParams params,
                            const __grid_constant__ SequenceInputs inputs,
                            const __grid_constant__ BackwardWorkspace workspace) {
  using Element = typename Config::Element;
  constexpr int kBlockQ = Config::kBlockQ;
  constexpr int kRowThreads = Config::kHeadDimV <= 64 ? 8 : Config::kHeadDimV <= 128 ? 16 : 32;
  const AttentionParams& attention = params.attention;
  const QueryTile owned = locate_query_tile<kBlockQ>(attention, inputs, workspace);
  if (owned.num_rows <= 0) return;
  const int chunks = static_cast<int>(attention.Hv) / 8;
  const int part = threadIdx.x % kRowThreads;  // 16 bytes of a row each
  bool is_extreme = false, has_idle_rows = false, has_rows = false;
#pragma unroll
  for (int pass = 0; pass < kBlockQ * kRowThreads / kPrepareThreads; ++pass) {
    const int row = pass * (kPrepareThreads / kRowThreads) + threadIdx.x / kRowThreads;
    const int64_t place = owned.place_of(attention, row);
    const float lse = row < owned.num_valid ? params.lse[place] : -device::kInfinity;
    const bool takes_part = lse != -device::kInfinity;
    float delta = 0.0f;
    if (takes_part && part < chunks) {
      const uint4 a = static_cast<const uint4*>(params.out)[place * chunks + part];
      const uint4 b = static_cast<const uint4*>(params.dout)[place * chunks + part];
      delta = dot_packed<Element>(a.x, b.x) + dot_packed<Element>(a.y, b.y) +
              dot_packed<Element>(a.z, b.z) + dot_packed<Element>(a.w, b.w);
    }
#pragma unroll
    for (int step = 1; step < kRowThreads; step *= 2) {
      delta += __shfl_xor_sync(0xFFFFFFFF, delta, step);
    }
    if (part != 0) continue;
    RowStatistics statistics = {device::kInfinity, 0.0f, 0.0f, 0.0f};
    StatisticColumns columns = {};
    if (takes_part) {
      if (params.dlse != nullptr) delta -= params.dlse[place];
      statistics = {lse, params.lse_low[place], delta, 0.0f};
      if (is_beyond_columns<Element>(attention.softmax_scale, statistics)) {
        is_extreme = true;
      } else {
        split_in_three<Element>(-(lse + statistics.lse_low) / attention.softmax_scale,
                                columns.parts);
        split_in_three<Element>(-delta * StatisticLimits<Element>::kDeltaUnit, columns.parts + 3);
      }
    }
    (takes_part ? has_rows : has_idle_rows) = true;
    if (row < owned.num_rows) params.delta[place] = delta;
    workspace.rows[owned.index * kBlockQ + row] = statistics;
    workspace.columns[owned.index * kBlockQ + row] = columns;
  }
  float4* sums = reinterpret_cast<float4*>(workspace.dq + owned.index * Config::kTileFloatsDQ);
#pragma unroll
  for (int i = 0; i < Config::kTileFloatsDQ / 4 / kPrepareThreads; ++i) {
    sums[i * kPrepareThreads + threadIdx.x] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  }
  int marks = __syncthreads_or(is_extreme) ? kMarkIsExtreme : 0;
  if constexpr (Config::kIsGeneral) {
    if (__syncthreads_or(has_idle_rows)) marks |= kMarkHasIdleRows;
    if (!__syncthreads_or(has_rows)) marks |= kMarkIsIdle;
    if (attention.query_segment_ids.data != nullptr && threadIdx.x < 32) {
      find_id_ranges<Config>(attention, inputs, owned, workspace);
    }
  }
  if (threadIdx.x == 0) {
    workspace.marks[owned.index] = marks;
    workspace.turn[owned.index] = 0;
  }
}

template <class Config>
__global__ void __launch_bounds__(kPrepareThreads)
    backward_convert_kernel(const __grid_constant__ BackwardParams params,
                            const __grid_constant__ SequenceInputs inputs,
                            const __grid_constant__ BackwardWorkspace workspace) {
  using Element = typename Config::Element;
  constexpr int kBlockQ = Config::kBlockQ, kHeadDim = Config::kStoredHeadDim;
  constexpr int kRowElements = kHeadDim + 8;  // keeps the writes out of each other's banks
  __shared__ alignas(16) Element rows[kBlockQ * kRowElements];
  const AttentionParams& attention = params.attention;
  const QueryTile owned = locate_query_tile<kBlockQ>(attention, inputs, workspace);
  if (owned.num_rows <= 0) return;
  const float* sums = workspace.dq + owned.index * Config::kTileFloatsDQ;
  const float scale = attention.softmax_scale;
  constexpr int kNear = Config::kIsTransposedDQ ? kRowElements : 1;
  constexpr int kFar = Config::kIsTransposedDQ ? 8 : 8 * kRowElements;
#pragma unroll
  for (int i = 0; i < Config::kTileFloatsDQ / 4 / kPrepareThreads; ++i) {
    const int index = i * kPrepareThreads + threadIdx.x;
    const PlaceDQ<Config> place(index);
    const float4 sum = reinterpret_cast<const float4*>(sums)[index];
    Element* first = rows + place.query * kRowElements + place.feature;
    first[0] = static_cast<Element>(sum.x * scale);
    first[kNear] = static_cast<Element>(sum.y * scale);
    first[kFar] = static_cast<Element>(sum.z * scale);
    first[kNear + kFar] = static_cast<Element>(sum.w * scale);
  }
  __syncthreads();
  constexpr int kRowChunks = kHeadDim / 8;
  const int chunks = static_cast<int>(attention.H) / 8;
#pragma unroll
  for (int pass = 0; pass < kBlockQ * kRowChunks / kPrepareThreads; ++pass) {
    const int index = pass * kPrepareThreads + threadIdx.x;
    const int row = index / kRowChunks, chunk = index % kRowChunks;
    if (row >= owned.num_rows || chunk >= chunks) continue;
    static_cast<uint4*>(params.dq)[owned.place_of(attention, row) * chunks + chunk] =
        *reinterpret_cast<const uint4*>(rows + row * kRowElements + 8 * chunk);
  }
}

}  // namespace jaxflash::fa3_sm90
