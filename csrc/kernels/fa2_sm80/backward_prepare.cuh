// FlashAttention-2 backward (arXiv:2307.08691, Algorithm 2): what goes before and after the loop.
//
//   prepare   delta = sum(dout out) - dlse (line 4), lse in the log2 domain, sums of dQ = 0
//   convert   dQ = softmax_scale * sums, rounded; zeros for rows of padding
//
// One CTA owns one query tile of one head in both. Only rows that see a key take part: out and dout
// of the others are not read, their delta is 0 and their lse is +inf, which makes every P zero.
#pragma once

#include "device/visibility.cuh"
#include "kernels/fa2_sm80/backward_products.cuh"
#include "kernels/fa2_sm80/backward_workspace.cuh"

namespace jaxflash::fa2_sm80 {

constexpr int kRowThreads = 8;        // threads that share a row of the prepare kernel
constexpr int kPrepareThreads = 128;  // of both kernels: a warp for 16 rows of a fragment
static_assert(kPrepareThreads / 32 * 16 == kBackwardBlockQ, "convert gives a warp 16 rows");

template <class Element>
__device__ __forceinline__ float dot_packed(uint32_t left, uint32_t right) {
  const auto* a = reinterpret_cast<const Element*>(&left);
  const auto* b = reinterpret_cast<const Element*>(&right);
  return static_cast<float>(a[0]) * static_cast<float>(b[0]) +
         static_cast<float>(a[1]) * static_cast<float>(b[1]);
}

// This thread's share of the product of two rows of count elements.
template <class Element>
__device__ __forceinline__ float dot_share(const Element* left, const Element* right, int count,
                                           int part) {
  float sum = 0.0f;
  if (count % 8 == 0) {
    for (int i = part; i < count / 8; i += kRowThreads) {
      const uint4 a = reinterpret_cast<const uint4*>(left)[i];
      const uint4 b = reinterpret_cast<const uint4*>(right)[i];
      sum += dot_packed<Element>(a.x, b.x) + dot_packed<Element>(a.y, b.y) +
             dot_packed<Element>(a.z, b.z) + dot_packed<Element>(a.w, b.w);
    }
  } else {
    for (int i = part; i < count; i += kRowThreads) {
      sum += static_cast<float>(left[i]) * static_cast<float>(right[i]);
    }
  }
  return sum;
}

// kHeadDim: the padded head dim of the key/value kernel. workspace.dq is nullptr when there are no
// sums of dQ.
template <class Element, int kHeadDim>
__global__ void __launch_bounds__(kPrepareThreads)
    backward_prepare_kernel(const __grid_constant__ BackwardParams params,
                            const __grid_constant__ SequenceInputs inputs,
                            const __grid_constant__ BackwardWorkspace workspace) {
  const AttentionParams& attention = params.attention;
  const QueryTile place = locate_query_tile(attention, inputs, workspace.slots);
  const device::SequenceTile& sequence = place.sequence;
  if (sequence.row_begin >= sequence.query_rows) return;
  const int64_t index = workspace.index_of(attention, sequence.batch, place.head, place.slot);
  const int Hv = static_cast<int>(attention.Hv);
  const int part = threadIdx.x % kRowThreads;
  for (int row = threadIdx.x / kRowThreads; row < kBackwardBlockQ;
       row += kPrepareThreads / kRowThreads) {
    const int position = sequence.row_begin + row;
    const int64_t place_of_row =
        (sequence.batch * attention.T + sequence.query_begin + position) * attention.N + place.head;
    const bool is_real = position < sequence.query_len;
    const float lse = is_real ? params.lse[place_of_row] : -device::kInfinity;
    const bool takes_part = lse != -device::kInfinity;
    float delta = 0.0f;
    if (takes_part) {
      delta = dot_share(static_cast<const Element*>(params.out) + place_of_row * Hv,
                        static_cast<const Element*>(params.dout) + place_of_row * Hv, Hv, part);
    }
#pragma unroll
    for (int step = 1; step < kRowThreads; step *= 2) {
      delta += __shfl_xor_sync(0xFFFFFFFF, delta, step);
    }
    if (part != 0) continue;
    float lse_log2 = device::kInfinity;
    if (takes_part) {
      if (params.dlse != nullptr) delta -= params.dlse[place_of_row];
      lse_log2 = fmaf(lse, device::kLog2E, params.lse_low[place_of_row] * device::kLog2E);
    }
    if (position < sequence.query_rows) params.delta[place_of_row] = delta;
    workspace.statistics[index].lse_log2[row] = lse_log2;
    workspace.statistics[index].delta[row] = delta;
  }
  if (workspace.dq != nullptr) {
    constexpr int kSums = kBackwardBlockQ * kHeadDim;
    float4* sums = reinterpret_cast<float4*>(workspace.dq + index * kSums);
    for (int i = threadIdx.x; i < kSums / 4; i += kPrepareThreads) {
      sums[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
  }
}

template <class Element, int kHeadDim>
__global__ void __launch_bounds__(kPrepareThreads)
    backward_convert_kernel(const __grid_constant__ BackwardParams params,
                            const __grid_constant__ SequenceInputs inputs,
                            const __grid_constant__ BackwardWorkspace workspace) {
  const AttentionParams& attention = params.attention;
  const QueryTile place = locate_query_tile(attention, inputs, workspace.slots);
  const device::SequenceTile& sequence = place.sequence;
  if (sequence.row_begin >= sequence.query_rows) return;
  const int64_t index = workspace.index_of(attention, sequence.batch, place.head, place.slot);
  const float* sums = workspace.dq + index * (kBackwardBlockQ * kHeadDim);
  const int H = static_cast<int>(attention.H);
  const int warp_idx = threadIdx.x / 32, lane_idx = threadIdx.x % 32;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int position = sequence.row_begin + 16 * warp_idx + 8 * half + lane_idx / 4;
    if (position >= sequence.query_rows) continue;
    const float factor = position < sequence.query_len ? attention.softmax_scale : 0.0f;
    const int64_t row =
        (sequence.batch * attention.T + sequence.query_begin + position) * attention.N + place.head;
    Element* destination = static_cast<Element*>(params.dq) + row * H;
#pragma unroll 4
    for (int j = 0; j < kHeadDim / 8; ++j) {
      const int column = 8 * j + lane_idx % 4 * 2;
      const float* fragment = sums + dq_offset<kHeadDim>(warp_idx, j);
      const float first = fragment[dq_lane_offset(lane_idx, 2 * half)];
      const float second = fragment[dq_lane_offset(lane_idx, 2 * half + 1)];
      store_pair(factor * first, factor * second, column, H, destination);
    }
  }
}

// dbias = sums, rounded; [count] in the order of the bias.
template <class Element>
__global__ void __launch_bounds__(kPrepareThreads)
    backward_bias_kernel(const float* sums, Element* dbias, int64_t count) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * kPrepareThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kPrepareThreads + threadIdx.x; i < count;
       i += step) {
    dbias[i] = static_cast<Element>(sums[i]);
  }
}

}  // namespace jaxflash::fa2_sm80
