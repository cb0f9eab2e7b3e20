// What a task owns and how it finds its share: sequence, KV head, panels, scratch.
#pragma once

#include "kernels/cpu/dropout.h"
#include "kernels/cpu/mask.h"

namespace jaxflash::cpu::JF_CPU_ISA {

// Hands out pieces of a worker's slot, in floats, each aligned to 64 bytes.
class Scratch {
 public:
  explicit Scratch(float* slot) {
    const uintptr_t address = reinterpret_cast<uintptr_t>(slot);
    const uintptr_t misaligned = address % (kAlignmentFloats * sizeof(float));
    next_ = misaligned == 0 ? slot : slot + kAlignmentFloats - misaligned / sizeof(float);
  }
  float* take(int64_t floats) {
    float* piece = next_;
    next_ += round_up(floats, kAlignmentFloats);
    return piece;
  }

 private:
  float* next_;
};

// Flushes subnormals for the lifetime of a task, whichever thread runs it: results must not depend
// on the thread, and a subnormal probability costs a hundred times a normal one.
class FlushSubnormals {
 public:
#if defined(__SSE__)
  FlushSubnormals() : saved_(__builtin_ia32_stmxcsr()) {
    __builtin_ia32_ldmxcsr(saved_ | 0x8040);  // flush to zero, subnormals are zero
  }
  ~FlushSubnormals() { __builtin_ia32_ldmxcsr(saved_); }

 private:
  unsigned saved_;
#elif defined(__aarch64__)
  FlushSubnormals() {
    asm volatile("mrs %0, fpcr" : "=r"(saved_));
    asm volatile("msr fpcr, %0" : : "r"(saved_ | uint64_t{1} << 24));
  }
  ~FlushSubnormals() { asm volatile("msr fpcr, %0" : : "r"(saved_)); }

 private:
  uint64_t saved_;
#endif
};

// 64 consecutive owned rows of one head.
struct PanelRows {
  int64_t head;          // query head or KV head, whichever is owned
  int64_t begin;         // first row inside the sequence
  int64_t rows;          // rows to write, padding included
  int64_t visible_rows;  // rows before the sequence's length
  int64_t num_vectors;   // vectors that hold them
  Visibility see;        // of the query head (queries owned); keys take it per streamed head
  int64_t stream_begin, stream_end;
};

struct TaskLocation {
  const Sequence* sequence;
  int64_t kv_head;
  int64_t first_panel;
};

template <Owned kOwned>
inline int64_t first_task(const Sequence& sequence) {
  return kOwned == Owned::kQueries ? sequence.first_query_task : sequence.first_kv_task;
}

// Tasks are ordered by sequence, KV head, panel, so that workers share the streamed head; late
// panels come first because causal masks give them the most work.
template <Owned kOwned>
inline TaskLocation locate_task(const AttentionParams& params, int64_t task) {
  int64_t low = 0, high = params.num_sequences;
  while (high - low > 1) {
    const int64_t middle = low + (high - low) / 2;
    if (first_task<kOwned>(params.sequences[middle]) <= task) {
      low = middle;
    } else {
      high = middle;
    }
  }
  const Sequence& sequence = params.sequences[low];
  const int64_t local = task - first_task<kOwned>(sequence);
  const int64_t tasks =
      kOwned == Owned::kQueries
          ? tasks_per_kv_head(sequence.query_rows, params.group_size, params.panels_per_task)
          : tasks_per_kv_head(sequence.kv_rows, 1, params.panels_per_task);
  const int64_t tile = tasks - 1 - local % tasks;
  return {&sequence, local / tasks, tile * params.panels_per_task};
}

// Panel number index of a task's KV head; rows is 0 past the last one.
template <Owned kOwned>
inline PanelRows locate_panel(const AttentionParams& params, const TaskLocation& location,
                              int64_t index) {
  const bool owns_queries = kOwned == Owned::kQueries;
  const Sequence& sequence = *location.sequence;
  const int64_t heads = owns_queries ? params.group_size : 1;
  const int64_t owned_rows = owns_queries ? sequence.query_rows : sequence.kv_rows;
  const int64_t owned_len = owns_queries ? sequence.query_len : sequence.kv_len;
  PanelRows panel;
  panel.head = location.kv_head * heads + index % heads;
  panel.begin = index / heads * kPanelLanes;
  panel.rows = clamp(owned_rows - panel.begin, 0, kPanelLanes);
  panel.visible_rows = clamp(owned_len - panel.begin, 0, panel.rows);
  panel.num_vectors = ceil_div(panel.visible_rows, kLanes);
  panel.see = make_visibility(params, sequence, owns_queries ? panel.head : 0);
  stream_range<kOwned>(panel.see, panel.begin, panel.begin + panel.visible_rows,
                       &panel.stream_begin, &panel.stream_end);
  if (panel.visible_rows == 0) panel.stream_begin = panel.stream_end = 0;
  return panel;
}

inline RowsOf head_rows(const void* data, DataType dtype, int64_t first_row, int64_t heads,
                        int64_t head, int64_t features) {
  const int64_t offset = (first_row * heads + head) * features;
  return {element_address(data, dtype, offset), dtype, heads * features, features};
}

// Rows of one head of the query side (q, out, dout, dq) and of the KV side (k, v, dk, dv).
inline RowsOf query_rows(const AttentionParams& params, const Sequence& sequence, const void* data,
                         int64_t head, int64_t features) {
  return head_rows(data, params.dtype, sequence.batch * params.T + sequence.query_begin, params.N,
                   head, features);
}
inline RowsOf kv_rows(const AttentionParams& params, const Sequence& sequence, const void* data,
                      int64_t head, int64_t features) {
  return head_rows(data, params.dtype, sequence.batch * params.S + sequence.kv_begin, params.K,
                   head, features);
}

// The factor folded into q, whichever side q is on: scores then come out ready for exp, or for tanh
// under a soft cap, and bitwise the same in every pass, so that P = exp(x - lse) repeats forward's.
inline float folded_scale(const AttentionParams& params) {
  return params.logits_soft_cap > 0.0f ? params.softmax_scale / params.logits_soft_cap
                                       : params.softmax_scale;
}

// Place of (row 0, head) in a [B, T, N] array; the next row is N further.
inline int64_t statistics_offset(const AttentionParams& params, const Sequence& sequence,
                                 int64_t head) {
  return (sequence.batch * params.T + sequence.query_begin) * params.N + head;
}

// valid[i] = row begin + i is not padding by its segment id.
inline void fill_valid(const int32_t* ids, int64_t begin, int64_t count, bool* valid) {
  for (int64_t i = 0; i < count; ++i) valid[i] = ids == nullptr || ids[begin + i] >= 0;
}

template <Owned kOwned>
inline Box make_box(int64_t owned_begin, int64_t owned_count, int64_t stream_begin,
                    int64_t stream_count) {
  if (kOwned == Owned::kQueries) {
    return {owned_begin, owned_begin + owned_count, stream_begin, stream_begin + stream_count};
  }
  return {stream_begin, stream_begin + stream_count, owned_begin, owned_begin + owned_count};
}

}  // namespace jaxflash::cpu::JF_CPU_ISA
