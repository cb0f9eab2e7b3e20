// The copies of the backward kernels: rows that must not be observed become zeros.
#pragma once

#include "device/visibility.cuh"
#include "kernels/fa2_sm80/backward_config.h"
#include "kernels/fa2_sm80/load.cuh"

namespace jaxflash::fa2_sm80 {

// Rows of one head from position 0 of a sequence on, first_row of all rows. data: [batch entries,
// rows, heads, features]. Stored: uint16_t stands for either 16-bit type.
template <class Stored>
__device__ __forceinline__ Rows<Stored> head_rows(const void* data, int64_t first_row,
                                                  int64_t num_heads, int head, int64_t features) {
  const auto* elements = static_cast<const Stored*>(data);
  return {elements + (first_row * num_heads + head) * features, num_heads * features,
          static_cast<int>(features)};
}

// The plain instances are launched only where rows can be copied 16 bytes at a time.
template <bool kIsGeneral, int kThreads, class IsValid, class Tile>
__device__ __forceinline__ void load_rows(const Rows<typename Tile::Element>& rows, int begin,
                                          int end, const IsValid& is_valid, Tile& tile) {
  if (!kIsGeneral || rows.features % Tile::kChunk == 0) {
    load_rows_async<kThreads>(rows, begin, end, is_valid, &tile);
  } else if constexpr (kIsGeneral) {
    load_rows_elementwise<kThreads>(rows, begin, end, is_valid, &tile);
  }
}

// Keys first_key.. of the sequence and their values.
template <bool kIsGeneral, int kThreads, class Tile>
__device__ __forceinline__ void load_keys(const AttentionParams& params,
                                          const device::SequenceTile& place, int kv_head,
                                          int first_key, Tile& k, Tile& v) {
  using Stored = typename Tile::Element;
  const int64_t first_row = place.batch * params.S + place.kv_begin;
  const int32_t* ids = nullptr;
  if constexpr (kIsGeneral) {
    ids = device::batch_data<int32_t>(params.kv_segment_ids, params, place.batch);
  }
  const auto is_valid = [&](int key) { return ids == nullptr || ids[key] >= 0; };
  load_rows<kIsGeneral, kThreads>(
      head_rows<Stored>(params.k, first_row, params.K, kv_head, params.H), first_key, place.kv_len,
      is_valid, k);
  load_rows<kIsGeneral, kThreads>(
      head_rows<Stored>(params.v, first_row, params.K, kv_head, params.Hv), first_key, place.kv_len,
      is_valid, v);
}

// Queries first_row.. of the sequence and their dout. Rows that take no part, because they are
// padding or see no key, become zeros: NaN in them must not reach dK and dV. lse_log2: of the rows
// from first_query on.
template <bool kIsGeneral, int kThreads, class Tile>
__device__ __forceinline__ void load_queries(const BackwardParams& params,
                                             const device::Window& see,
                                             const device::SequenceTile& place,
                                             const float* lse_log2, int head, int first_query,
                                             Tile& q, Tile& dout) {
  using Stored = typename Tile::Element;
  const AttentionParams& attention = params.attention;
  const int64_t first_row = place.batch * attention.T + place.query_begin;
  // Without other masks the rows that see a key are an interval.
  const int low = -see.window_high;
  const int high = min(see.query_len, see.kv_len - see.window_low);
  const auto is_valid = [&](int query) {
    if constexpr (kIsGeneral) {
      return lse_log2[query - first_query] != device::kInfinity;
    }
    return query >= low;
  };
  load_rows<kIsGeneral, kThreads>(
      head_rows<Stored>(attention.q, first_row, attention.N, head, attention.H), first_query, high,
      is_valid, q);
  load_rows<kIsGeneral, kThreads>(
      head_rows<Stored>(params.dout, first_row, attention.N, head, attention.Hv), first_query, high,
      is_valid, dout);
}

}  // namespace jaxflash::fa2_sm80
