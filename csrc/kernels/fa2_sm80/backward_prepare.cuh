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
  if constexpr (std::is_same_v<Element, float>) return a[0] * b[0];
  return static_cast<float>(a[0]) * static_cast<float>(b[0]) +
         static_cast<float>(a[1]) * static_cast<float>(b[1]);
}

// This thread's shares of the products of kRows pairs of rows of count <= kHeadDim elements: pair i
// begins at offset[i] of left and right and counts where is_read[i]. All loads are under way before
// the first product.
template <int kHeadDim, int kRows, class Element>
__device__ __forceinline__ void dot_shares(const Element* left, const Element* right,
                                           const int64_t (&offset)[kRows],
                                           const bool (&is_read)[kRows], int count, int part,
                                           float (&sums)[kRows]) {
  constexpr int kChunk = 16 / sizeof(Element);
  constexpr int kChunks = kHeadDim / kChunk / kRowThreads;
  if (count % kChunk != 0) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      for (int j = part; is_read[i] && j < count; j += kRowThreads) {
        sums[i] +=
            static_cast<float>(left[offset[i] + j]) * static_cast<float>(right[offset[i] + j]);
      }
    }
    return;
  }
  uint4 a[kRows][kChunks], b[kRows][kChunks];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      const int column = kChunk * (part + c * kRowThreads);
      a[i][c] = b[i][c] = make_uint4(0, 0, 0, 0);
      if (is_read[i] && column < count) {
        a[i][c] = *reinterpret_cast<const uint4*>(left + offset[i] + column);
        b[i][c] = *reinterpret_cast<const uint4*>(right + offset[i] + column);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      const uint4 x = a[i][c], y = b[i][c];
      sums[i] += dot_packed<Element>(x.x, y.x) + dot_packed<Element>(x.y, y.y) +
                 dot_packed<Element>(x.z, y.z) + dot_packed<Element>(x.w, y.w);
    }
  }
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
  const int part = threadIdx.x % kRowThreads;
  constexpr int kRowsPerPass = kPrepareThreads / kRowThreads;
  // Rows of a thread at a time: no more than 64 registers of elements.
  constexpr int kRowBytes = kHeadDim * sizeof(Element);
  constexpr int kRows = kRowBytes <= 256 ? 4 : 1024 / kRowBytes;
#pragma unroll 1
  for (int first = threadIdx.x / kRowThreads; first < kBackwardBlockQ;
       first += kRows * kRowsPerPass) {
    int64_t place_of_row[kRows], offset[kRows];
    float lse[kRows], delta[kRows] = {};
    bool takes_part[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int position = sequence.row_begin + first + i * kRowsPerPass;
      place_of_row[i] =
          (sequence.batch * attention.T + sequence.query_begin + position) * attention.N +
          place.head;
      offset[i] = place_of_row[i] * attention.Hv;
      lse[i] = position < sequence.query_len ? params.lse[place_of_row[i]] : -device::kInfinity;
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) takes_part[i] = lse[i] != -device::kInfinity;
    dot_shares<kHeadDim>(static_cast<const Element*>(params.out),
                         static_cast<const Element*>(params.dout), offset, takes_part,
                         static_cast<int>(attention.Hv), part, delta);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int step = 1; step < kRowThreads; step *= 2) {
        delta[i] += __shfl_xor_sync(0xFFFFFFFF, delta[i], step);
      }
      if (part != 0) continue;
      const int row = first + i * kRowsPerPass;
      float lse_log2 = device::kInfinity;
      if (takes_part[i]) {
        if (params.dlse != nullptr) delta[i] -= params.dlse[place_of_row[i]];
        lse_log2 = fmaf(lse[i], device::kLog2E, params.lse_low[place_of_row[i]] * device::kLog2E);
      }
      if (sequence.row_begin + row < sequence.query_rows) {
        params.delta[place_of_row[i]] = delta[i];
      }
      workspace.statistics[index].lse_log2[row] = lse_log2;
      workspace.statistics[index].delta[row] = delta[i];
    }
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
  // Four fragments at a time: a quad then holds 32 columns of a row, and each lane writes eight.
#pragma unroll
  for (int j = 0; j < kHeadDim / 8; j += 4) {
    float fragments[4][4];
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      load_dq(sums + dq_offset<kHeadDim>(warp_idx, j + n), lane_idx, fragments[n]);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int position = sequence.row_begin + 16 * warp_idx + 8 * half + lane_idx / 4;
      const float factor = position < sequence.query_len ? attention.softmax_scale : 0.0f;
      const int64_t row =
          (sequence.batch * attention.T + sequence.query_begin + position) * attention.N +
          place.head;
      store_quad(fragments, factor, half, 8 * j, H, position < sequence.query_rows, lane_idx,
                 static_cast<Element*>(params.dq) + row * H);
    }
  }
}

// dbias = sums, rounded. sums: [parts, count], count in the order of the bias.
template <class Element>
__global__ void __launch_bounds__(kPrepareThreads)
    backward_bias_kernel(const float* sums, Element* dbias, int64_t count, int parts) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * kPrepareThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kPrepareThreads + threadIdx.x; i < count;
       i += step) {
    float sum = sums[i];
    for (int part = 1; part < parts; ++part) sum += sums[part * count + i];
    dbias[i] = static_cast<Element>(sum);
  }
}

}  // namespace jaxflash::fa2_sm80
