// Merges what the chunks of forward_split.cuh left of a row: out, lse and lse_low.
//
// With m the largest of the chunks' references m_i:
//
//   l = sum exp(m_i - m) l_i      O = sum exp(m_i - m) O_i      out = O / l      lse = m + log l
//
// A CTA owns a row. Every warp finds m and l; the warps then share out the chunks, each lane
// summing 4 columns of O at a time, and meet in shared memory. Each sum has one order, whatever the
// batch and the device. Limits: Hv <= kCombineMaxColumns.
#pragma once

#include "device/row_result.cuh"
#include "device/sequence.cuh"
#include "device/visibility.cuh"
#include "kernels/fa2_sm80/split_config.h"
#include "ptx/math.cuh"

namespace jaxflash::fa2_sm80 {

constexpr int kCombineMaxWarps = 16;
constexpr int kCombineMaxColumns = 256;

// Warps of a CTA: enough that each has few chunks to read.
inline int combine_warps(int64_t num_chunks) {
  const int64_t warps = (num_chunks + 3) / 4;
  return static_cast<int>(warps < kCombineMaxWarps ? warps : kCombineMaxWarps);
}

// The chunks of one row.
class RowMerge {
  static constexpr int kReads = 4;  // outputs under way at once in a lane

 public:
  __device__ __forceinline__ RowMerge(const SplitPlan& plan, int row, int head_dim, bool is_log2)
      : partials_(plan.partials + static_cast<int64_t>(row) * plan.num_chunks),
        outputs_(plan.outputs + static_cast<int64_t>(row) * plan.num_chunks * head_dim),
        num_chunks_(plan.num_chunks),
        head_dim_(head_dim),
        to_log2_(is_log2 ? 1.0f : device::kLog2E) {
    const int lane_idx = threadIdx.x % 32;
    row_max_ = -device::kInfinity;
    for (int chunk = lane_idx; chunk < num_chunks_; chunk += 32) {
      row_max_ = fmaxf(row_max_, partials_[chunk].row_max);
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
      row_max_ = fmaxf(row_max_, __shfl_xor_sync(0xFFFFFFFF, row_max_, step));
    }
    row_sum_ = 0.0f;
    for (int chunk = lane_idx; chunk < num_chunks_; chunk += 32) {
      row_sum_ += weight(chunk) * partials_[chunk].row_sum;
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
      row_sum_ += __shfl_xor_sync(0xFFFFFFFF, row_sum_, step);
    }
  }

  // This warp's share of the output's columns `column`..`column` + 3.
  __device__ __forceinline__ float4 sum_output(int column) const {
    const int num_warps = blockDim.x / 32;
    float4 total = {0.0f, 0.0f, 0.0f, 0.0f};
    for (int first = threadIdx.x / 32; first < num_chunks_; first += kReads * num_warps) {
      float factors[kReads];
      float4 parts[kReads];
#pragma unroll
      for (int i = 0; i < kReads; ++i) {
        const int chunk = first + i * num_warps;
        factors[i] = chunk < num_chunks_ ? weight(chunk) : 0.0f;
        parts[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (factors[i] == 0.0f) continue;  // perhaps never written
        parts[i] = *reinterpret_cast<const float4*>(outputs_ + chunk * head_dim_ + column);
      }
#pragma unroll
      for (int i = 0; i < kReads; ++i) {
        total.x += factors[i] * parts[i].x;
        total.y += factors[i] * parts[i].y;
        total.z += factors[i] * parts[i].z;
        total.w += factors[i] * parts[i].w;
      }
    }
    return total;
  }

  __device__ __forceinline__ float row_max() const { return row_max_; }
  __device__ __forceinline__ float row_sum() const { return row_sum_; }

 private:
  __device__ __forceinline__ float weight(int chunk) const {
    const float row_max = partials_[chunk].row_max;
    if (row_max == -device::kInfinity) return 0.0f;
    return ptx::exp2_approx((row_max - row_max_) * to_log2_);
  }

  const RowPartial* partials_;  // [num_chunks]
  const float* outputs_;        // [num_chunks, head_dim]
  const int num_chunks_, head_dim_;
  const float to_log2_;
  float row_max_, row_sum_;
};

// is_log2: the unit of the chunks' references, which are natural otherwise. Grid: B * T * N.
template <class Element>
__global__ void __launch_bounds__(32 * kCombineMaxWarps)
    forward_combine_kernel(const __grid_constant__ ForwardParams params,
                           const __grid_constant__ SequenceInputs inputs,
                           const __grid_constant__ SplitPlan plan, int head_dim, bool is_log2) {
  __shared__ __align__(16) float sums[kCombineMaxWarps][kCombineMaxColumns];
  const AttentionParams& attention = params.attention;
  const int N = static_cast<int>(attention.N), T = static_cast<int>(attention.T);
  const int Hv = static_cast<int>(attention.Hv);
  const int row = blockIdx.x;
  const int head = row % N, position = row / N % T, batch = row / N / T;
  const device::SequenceTile place = device::locate_tile<true, 1>(attention, inputs, batch, 0);
  const int32_t* ids = device::batch_data<int32_t>(attention.query_segment_ids, attention, batch);
  const bool is_valid = position < place.query_len && (ids == nullptr || ids[position] >= 0);
  const float* sinks = device::batch_data<float>(params.sinks, attention, batch);
  const float sink = sinks == nullptr ? -device::kInfinity : sinks[head * params.sinks.head_stride];

  const RowMerge merge(plan, row, head_dim, is_log2);
  const int num_warps = blockDim.x / 32;
  for (int column = threadIdx.x % 32 * 4; column < Hv; column += 128) {
    *reinterpret_cast<float4*>(&sums[threadIdx.x / 32][column]) = merge.sum_output(column);
  }
  __syncthreads();  // the sums of all warps are visible
  device::RowResult result = {-device::kInfinity, 0.0f, 0.0f};
  if (is_valid) result = device::finish_softmax(merge.row_max(), merge.row_sum(), sink, is_log2);
  if (attention.dropout_threshold > 0) result.factor *= attention.dropout_scale;
  if (threadIdx.x == 0) {
    params.lse[row] = result.lse;
    params.lse_low[row] = result.lse_low;
  }
  for (int column = threadIdx.x; column < Hv; column += blockDim.x) {
    float total = 0.0f;
    for (int warp = 0; warp < num_warps; ++warp) total += sums[warp][column];
    const float out = result.factor == 0.0f ? 0.0f : total * result.factor;
    static_cast<uint16_t*>(params.out)[static_cast<int64_t>(row) * Hv + column] =
        static_cast<uint16_t>(ptx::pack<Element>(out, 0.0f));
  }
}

}  // namespace jaxflash::fa2_sm80
