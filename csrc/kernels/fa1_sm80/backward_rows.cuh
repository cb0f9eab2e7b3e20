// What goes before and after the loops of the FlashAttention-1 backward, row by row.
//
//   prepare   delta = sum(dout out) - dlse (the paper's D), lse in the log2 domain, dQ = 0 in HBM
//   convert   dQ = softmax_scale * its sums, rounded; zeros for rows of padding
//
// One CTA owns kRowUnit rows of one head in both. Only rows that see a key take part: out and dout
// of the others are not read, their delta is 0 and their lse is +inf, which makes every P zero.
#pragma once

#include "device/visibility.cuh"
#include "kernels/fa1_sm80/config.h"
#include "mma/fragment.cuh"
#include "ptx/math.cuh"

namespace jaxflash::fa1_sm80 {

// Scratch of a backward call; need not be initialised.
struct BackwardWorkspace {
  RowStatistics* rows;  // [B, N, padded_rows]
  float* dq;  // [B, N, padded_rows / kRowUnit, kRowUnit * padded head dim], each tile in the order
              // of sums_offset()
  int64_t padded_rows;  // T in whole kRowUnits
};

constexpr int kRowThreads = 8;  // that share a row of the prepare kernel
constexpr int kPassThreads = 128;

// Place of the fragment of rows 16 i.. and columns 8 j.. among the sums of a tile; a lane's four
// elements are adjacent there.
template <int kHeadDim>
__device__ __forceinline__ int sums_offset(int i, int j, int lane_idx) {
  return (i * (kHeadDim / 8) + j) * 128 + 4 * lane_idx;
}

// Writes two adjacent elements of a row, as one word where rows start on 4 bytes.
template <class Element>
__device__ __forceinline__ void store_pair(float first, float second, int column, int num_columns,
                                           Element* row) {
  if (num_columns % 2 == 0) {
    if (column >= num_columns) return;
    *reinterpret_cast<uint32_t*>(row + column) = ptx::pack<Element>(first, second);
  } else {
    if (column < num_columns) row[column] = static_cast<Element>(first);
    if (column + 1 < num_columns) row[column + 1] = static_cast<Element>(second);
  }
}

// This thread's share of the product of two rows of count elements.
template <class Element>
__device__ __forceinline__ float dot_share(const Element* left, const Element* right, int count) {
  const int part = threadIdx.x % kRowThreads;
  float sum = 0.0f;
  if (count % 8 == 0) {
    for (int i = part; i < count / 8; i += kRowThreads) {
      const uint4 a = reinterpret_cast<const uint4*>(left)[i];
      const uint4 b = reinterpret_cast<const uint4*>(right)[i];
      const auto* x = reinterpret_cast<const Element*>(&a);
      const auto* y = reinterpret_cast<const Element*>(&b);
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        sum = fmaf(static_cast<float>(x[e]), static_cast<float>(y[e]), sum);
      }
    }
  } else {
    for (int i = part; i < count; i += kRowThreads) {
      sum = fmaf(static_cast<float>(left[i]), static_cast<float>(right[i]), sum);
    }
  }
  return sum;
}

// Rows of one CTA: heads fastest, as in memory.
struct RowUnit {
  int batch, head, unit;
};
__device__ __forceinline__ RowUnit locate_unit(const AttentionParams& params,
                                               const BackwardWorkspace& workspace) {
  const int N = static_cast<int>(params.N);
  const int units = static_cast<int>(workspace.padded_rows / kRowUnit);
  const int place = blockIdx.x / N;
  return {place / units, static_cast<int>(blockIdx.x) % N, place % units};
}

template <class Element, int kHeadDim>
__global__ void __launch_bounds__(kPassThreads)
    backward_prepare_kernel(const __grid_constant__ BackwardParams params,
                            const __grid_constant__ SequenceInputs inputs,
                            const __grid_constant__ BackwardWorkspace workspace) {
  const AttentionParams& attention = params.attention;
  const RowUnit place = locate_unit(attention, workspace);
  const int T = static_cast<int>(attention.T), Hv = static_cast<int>(attention.Hv);
  const int query_len = device::length_of(inputs.query_lengths, attention, place.batch, T);
  const int64_t first =
      (place.batch * attention.N + place.head) * workspace.padded_rows + place.unit * kRowUnit;
  for (int row = threadIdx.x / kRowThreads; row < kRowUnit; row += kPassThreads / kRowThreads) {
    const int position = place.unit * kRowUnit + row;
    const int64_t index = (place.batch * attention.T + position) * attention.N + place.head;
    const float lse = position < query_len ? params.lse[index] : -device::kInfinity;
    const bool takes_part = lse != -device::kInfinity;
    float delta = 0.0f;
    if (takes_part) {
      delta = dot_share(static_cast<const Element*>(params.out) + index * Hv,
                        static_cast<const Element*>(params.dout) + index * Hv, Hv);
    }
#pragma unroll
    for (int step = 1; step < kRowThreads; step *= 2) {
      delta += __shfl_xor_sync(0xFFFFFFFF, delta, step);
    }
    if (threadIdx.x % kRowThreads != 0) continue;
    float lse_log2 = device::kInfinity;
    if (takes_part) {
      if (params.dlse != nullptr) delta -= params.dlse[index];
      lse_log2 = fmaf(lse, device::kLog2E, params.lse_low[index] * device::kLog2E);
    }
    if (position < T) params.delta[index] = delta;
    workspace.rows[first + row] = {lse_log2, delta};
  }
  float4* sums = reinterpret_cast<float4*>(workspace.dq + first * kHeadDim);
  for (int i = threadIdx.x; i < kRowUnit * kHeadDim / 4; i += kPassThreads) {
    sums[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  }
}

template <class Element, int kHeadDim>
__global__ void __launch_bounds__(kPassThreads)
    backward_convert_kernel(const __grid_constant__ BackwardParams params,
                            const __grid_constant__ SequenceInputs inputs,
                            const __grid_constant__ BackwardWorkspace workspace) {
  const AttentionParams& attention = params.attention;
  const RowUnit place = locate_unit(attention, workspace);
  const int T = static_cast<int>(attention.T), H = static_cast<int>(attention.H);
  const int query_len = device::length_of(inputs.query_lengths, attention, place.batch, T);
  const int64_t first =
      (place.batch * attention.N + place.head) * workspace.padded_rows + place.unit * kRowUnit;
  const float* sums = workspace.dq + first * kHeadDim;
  const int lane_idx = threadIdx.x % 32;
  constexpr int kFragments = kRowUnit / 16 * (kHeadDim / 8);
#pragma unroll 4
  for (int fragment = threadIdx.x / 32; fragment < kFragments; fragment += kPassThreads / 32) {
    const int i = fragment / (kHeadDim / 8), j = fragment % (kHeadDim / 8);
    const float4 sum =
        *reinterpret_cast<const float4*>(sums + sums_offset<kHeadDim>(i, j, lane_idx));
    const float values[4] = {sum.x, sum.y, sum.z, sum.w};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int position = place.unit * kRowUnit + 16 * i + mma::fragment_row(lane_idx, 2 * half);
      if (position >= T) continue;
      const float factor = position < query_len ? attention.softmax_scale : 0.0f;
      const int64_t index = (place.batch * attention.T + position) * attention.N + place.head;
      store_pair(factor * values[2 * half], factor * values[2 * half + 1],
                 8 * j + mma::fragment_column(lane_idx, 0), H,
                 static_cast<Element*>(params.dq) + index * H);
    }
  }
}

}  // namespace jaxflash::fa1_sm80
