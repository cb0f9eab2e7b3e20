// Plain data handed from the FFI handlers to the kernels: pointers, sizes, strides, scalars.
//
// Sizes use the names of the public API: batch B (all leading dims flattened), query length T, key
// length S, query heads N, KV heads K, head dim H, value head dim Hv. All strides are in elements.
// Logits live in the natural domain (no log2 folding) and in float32.
#pragma once

#include <cstdint>

namespace jaxflash {

enum class DataType : int32_t { kFloat32, kBFloat16, kFloat16 };

// Leading batch dims that a GPU kernel can index an operand by.
constexpr int kMaxBatchDims = 4;

// An optional operand that may be broadcast over any dim; strides are 0 where it is.
struct BroadcastArray {
  const void* data;                     // nullptr when the operand is absent
  const int64_t* batch_offset;          // [B] offset of each batch entry; host memory
  int64_t batch_stride[kMaxBatchDims];  // of AttentionParams::batch_dims; GPU kernels
  int64_t head_stride;
  int64_t row_stride;
  int64_t column_stride;
  DataType dtype;  // bias only; the other operands have one dtype each
};

// One sequence of one batch entry. Without packing a batch entry is one sequence; with packing it
// is split at its offsets, and the rows before the first and after the last offset form sequences
// of length 0 so that every output row is owned by exactly one sequence.
struct Sequence {
  int64_t batch;        // flattened batch entry
  int64_t index;        // position inside a packed batch entry, 0 without packing
  int64_t query_begin;  // first query row inside the batch entry
  int64_t query_rows;   // query rows owned, padding included
  int64_t query_len;    // rows that are not padding
  int64_t kv_begin;     // the same three for keys
  int64_t kv_rows;
  int64_t kv_len;
  int64_t diagonal_offset;   // row t is aligned with key t + diagonal_offset
  int64_t first_query_task;  // tasks of all earlier sequences, owned tile = query rows
  int64_t first_kv_task;     // the same, owned tile = keys
};

// The operands that define the sequences of a batch. Absent lengths mean the full T and S; absent
// offsets mean that nothing is packed.
struct SequenceInputs {
  BroadcastArray query_lengths;  // [B] int32
  BroadcastArray kv_lengths;     // [B] int32
  BroadcastArray query_offsets;  // [B, num_sequences + 1] int32
  BroadcastArray kv_offsets;     // [B, num_sequences + 1] int32
  int64_t num_sequences;         // per batch entry, packed only
  bool is_bottom_right;  // align the last row with the last key, not the first with the first
};

struct AttentionParams {
  int64_t B, T, S, N, K, H, Hv;
  int64_t batch_dims[kMaxBatchDims];  // their product is B; leading 1s where there are fewer
  int64_t group_size;                 // N / K; query head n reads KV head n / group_size

  const void* q;  // [B, T, N, H]
  const void* k;  // [B, S, K, H]
  const void* v;  // [B, S, K, Hv]
  DataType dtype;

  float softmax_scale;
  float logits_soft_cap;  // 0 = none
  int64_t window_left;    // keys kept before the aligned diagonal, -1 = unbounded
  int64_t window_right;   // keys kept after it, -1 = unbounded

  BroadcastArray bias;        // [B, N, T, S] float
  BroadcastArray mask;        // [B, N, T, S] bool, true = visible
  BroadcastArray block_mask;  // [B, N, ceil(T / mask_block_q), ceil(S / mask_block_kv)] bool
  int64_t mask_block_q;
  int64_t mask_block_kv;
  BroadcastArray query_segment_ids;  // [B, T] int32, negative = padding
  BroadcastArray kv_segment_ids;     // [B, S] int32

  BroadcastArray dropout_batch;  // [B, 3] uint32: seed, seed, global batch index
  BroadcastArray dropout_heads;  // [B, N] uint32: global head index
  int32_t dropout_threshold;     // an element is dropped when its 16 bits are below; 0 = no dropout
  float dropout_scale;           // factor on the elements that are kept

  // The task table of the CPU kernels.
  const Sequence* sequences;  // [num_sequences], sorted by first_query_task and by first_kv_task
  int64_t num_sequences;
  int64_t panels_per_task;  // owned panels of 64 rows that share one load of the streamed tiles
  int64_t num_query_tasks;
  int64_t num_kv_tasks;
};

struct ForwardParams {
  AttentionParams attention;
  BroadcastArray sinks;  // [B, N] float32
  void* out;             // [B, T, N, Hv]
  float* lse;            // [B, T, N]
  float* lse_low;        // [B, T, N] what float32 lse could not hold
};

// Gradient of the bias, summed over the dims the bias is broadcast over.
struct BiasGradient {
  void* data;  // [num_batches, num_heads, num_rows, num_columns], nullptr = not wanted
  int64_t num_batches;
  int64_t num_heads;            // N or 1
  int64_t num_rows;             // T or 1
  int64_t num_columns;          // S or 1
  const int64_t* first_member;  // [num_batches + 1] into members
  const int64_t* members;       // [B] batch entries, grouped by the bias entry they read
  int64_t num_tasks;
};

struct BackwardParams {
  AttentionParams attention;
  const void* out;       // [B, T, N, Hv]
  const float* lse;      // [B, T, N]
  const float* lse_low;  // [B, T, N]
  const void* dout;      // [B, T, N, Hv] cotangent of out
  const float* dlse;     // [B, T, N] cotangent of lse, nullptr = 0
  float* delta;          // [B, T, N] result: sum(dout * out) - dlse, 0 for rows that take no part
  void* dq;              // [B, T, N, H]
  void* dk;              // [B, S, K, H]
  void* dv;              // [B, S, K, Hv]
  BiasGradient dbias;
};

}  // namespace jaxflash
