// FlashAttention-2 backward (arXiv:2307.08691, Algorithm 2): what goes before and after the loop.
//
//   prepare   delta = sum(dout out) - dlse (line 4), the statistics of the loop, sums of dQ = 0
//   convert   dQ = softmax_scale * sums, rounded
//
// One CTA owns one query tile of one head in both. Only rows that see a key take part: out and dout
// of the others are not read, their delta is 0, and the loop hides their pairs.
#pragma once

#include "device/visibility.cuh"
#include "kernels/fa3_sm90/backward_workspace.cuh"
#include "ptx/math.cuh"

namespace jaxflash::fa3_sm90 {

constexpr int kPrepareThreads = 256;

// Of the grid (batch entry, tile, head), heads fastest as in memory: what this CTA owns.
struct QueryTile {
  int batch, head, tile;
  int64_t index;  // in the workspace

  __device__ __forceinline__ QueryTile(const AttentionParams& params,
                                       const BackwardWorkspace& workspace) {
    const int N = static_cast<int>(params.N);
    head = blockIdx.x % N;
    tile = blockIdx.x / N % workspace.tiles;
    batch = blockIdx.x / N / workspace.tiles;
    index = workspace.index_of(N, batch, head, tile);
  }
};

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

template <class Config>
__global__ void __launch_bounds__(kPrepareThreads)
    backward_prepare_kernel(const __grid_constant__ BackwardParams params,
                            const __grid_constant__ SequenceInputs inputs,
                            const __grid_constant__ BackwardWorkspace workspace) {
  using Element = typename Config::Element;
  constexpr int kBlockQ = Config::kBlockQ;
  constexpr int kRowThreads = Config::kHeadDim / 8;  // 16 bytes of a row each
  const AttentionParams& attention = params.attention;
  const QueryTile owned(attention, workspace);
  const int T = static_cast<int>(attention.T), chunks = static_cast<int>(attention.Hv) / 8;
  const int query_len = device::length_of(inputs.query_lengths, attention, owned.batch, T);
  const int part = threadIdx.x % kRowThreads;
  bool is_extreme = false;
#pragma unroll
  for (int pass = 0; pass < kBlockQ * kRowThreads / kPrepareThreads; ++pass) {
    const int row = pass * (kPrepareThreads / kRowThreads) + threadIdx.x / kRowThreads;
    const int position = owned.tile * kBlockQ + row;
    const int64_t place =
        (static_cast<int64_t>(owned.batch) * T + position) * attention.N + owned.head;
    const float lse = position < query_len ? params.lse[place] : -device::kInfinity;
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
    if (position < T) params.delta[place] = delta;
    workspace.rows[owned.index * kBlockQ + row] = statistics;
    workspace.columns[owned.index * kBlockQ + row] = columns;
  }
  float4* sums = reinterpret_cast<float4*>(workspace.dq + owned.index * Config::kTileFloatsDQ);
#pragma unroll
  for (int i = 0; i < Config::kTileFloatsDQ / 4 / kPrepareThreads; ++i) {
    sums[i * kPrepareThreads + threadIdx.x] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  }
  const int any_extreme = __syncthreads_or(is_extreme);
  if (threadIdx.x == 0) {
    workspace.is_extreme[owned.index] = any_extreme;
    workspace.turn[owned.index] = 0;
  }
}

template <class Config>
__global__ void __launch_bounds__(kPrepareThreads)
    backward_convert_kernel(const __grid_constant__ BackwardParams params,
                            const __grid_constant__ BackwardWorkspace workspace) {
  using Element = typename Config::Element;
  constexpr int kBlockQ = Config::kBlockQ, kHeadDim = Config::kHeadDim;
  constexpr int kRowElements = kHeadDim + 8;  // keeps the writes out of each other's banks
  __shared__ alignas(16) Element rows[kBlockQ * kRowElements];
  const AttentionParams& attention = params.attention;
  const QueryTile owned(attention, workspace);
  const float* sums = workspace.dq + owned.index * Config::kTileFloatsDQ;
  const float scale = attention.softmax_scale;
#pragma unroll
  for (int j = 0; j < Config::kColumnsDQ / 8; ++j) {
    const PlaceDQ<Config> place(threadIdx.x / 128, j, threadIdx.x % 128);
    const float4 sum = *reinterpret_cast<const float4*>(sums + place.offset);
    Element* first = rows + place.query * kRowElements + place.feature;
    first[0] = static_cast<Element>(sum.x * scale);
    first[kRowElements] = static_cast<Element>(sum.y * scale);
    first[8] = static_cast<Element>(sum.z * scale);
    first[kRowElements + 8] = static_cast<Element>(sum.w * scale);
  }
  __syncthreads();
  constexpr int kRowChunks = kHeadDim / 8;
  const int T = static_cast<int>(attention.T), chunks = static_cast<int>(attention.H) / 8;
  const int chunk = threadIdx.x % kRowChunks;
#pragma unroll
  for (int pass = 0; pass < kBlockQ * kRowChunks / kPrepareThreads; ++pass) {
    const int row = pass * (kPrepareThreads / kRowChunks) + threadIdx.x / kRowChunks;
    const int position = owned.tile * kBlockQ + row;
    if (position >= T || chunk >= chunks) continue;
    const int64_t place =
        (static_cast<int64_t>(owned.batch) * T + position) * attention.N + owned.head;
    static_cast<uint4*>(params.dq)[place * chunks + chunk] =
        *reinterpret_cast<const uint4*>(rows + row * kRowElements + 8 * chunk);
  }
}

}  // namespace jaxflash::fa3_sm90
