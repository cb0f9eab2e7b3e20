// FlashAttention-2 forward (arXiv:2307.08691, Algorithm 1) on one CPU thread.
//
// A task owns up to kMaxPanels panels of 64 query rows that read the same KV head and streams the
// keys they see in tiles of 64. Per panel and tile, lanes running along the query rows:
//
//   scores[key][lane]   = K[key][:] . q[:][lane]           (scale folded into q)
//   row_max, row_sum    : online softmax, lane-wise
//   out[feature][lane] += V[:][feature] . P[:][lane]       (unnormalised; divided once at the end)
//
// Limits: none on T, S, H, Hv. Scratch: forward_slot_floats().
#pragma once

#include "kernels/cpu/matmul.h"
#include "kernels/cpu/panel.h"

namespace jaxflash::cpu::JF_CPU_ISA {

struct ForwardPanel {
  PanelRows rows;
  DropoutStream dropout;
  bool valid[kPanelLanes];
  float* q;        // [H][lane]
  float* out;      // [Hv][lane]
  float* row_max;  // [lane]
  float* row_sum;  // [lane]
};

struct ForwardBuffers {
  float* k;       // [key][H]
  float* v;       // [key][Hv]
  float* scores;  // [key][lane], then probabilities
  float* adjust;  // [key][lane]
  float* keep;    // [key][lane]
};

inline void start_panel(const ForwardParams& params, const TaskLocation& location, int64_t index,
                        Scratch* scratch, ForwardPanel* panel) {
  const AttentionParams& attention = params.attention;
  const Sequence& sequence = *location.sequence;
  panel->rows = locate_panel<Owned::kQueries>(attention, location, index);
  panel->q = scratch->take(attention.H * kPanelLanes);
  panel->out = scratch->take(attention.Hv * kPanelLanes);
  panel->row_max = scratch->take(kPanelLanes);
  panel->row_sum = scratch->take(kPanelLanes);
  const PanelRows& rows = panel->rows;
  if (rows.rows == 0) return;
  panel->dropout = make_dropout(attention, sequence, rows.head);
  fill_valid(rows.see.query_ids, rows.begin, rows.visible_rows, panel->valid);
  load_panel(query_rows(attention, sequence, attention.q, rows.head, attention.H), rows.begin,
             rows.visible_rows, panel->valid, folded_scale(attention), panel->q);
  __builtin_memset(panel->out, 0, attention.Hv * kPanelLanes * sizeof(float));
  for (int64_t lane = 0; lane < kPanelLanes; ++lane) {
    panel->row_max[lane] = -kInfinity;
    panel->row_sum[lane] = 0.0f;
  }
}

// Caps and adjusts the scores and returns the new row maximum of one vector of lanes.
inline Vector finish_scores(float* scores, int64_t num_keys, const float* adjust, float soft_cap,
                            Vector row_max) {
  for (int64_t key = 0; key < num_keys; ++key) {
    Vector x = load(scores + key * kPanelLanes);
    if (soft_cap > 0.0f) x = soft_cap * tanh(x);
    if (adjust != nullptr) x = apply_adjust(x, load(adjust + key * kPanelLanes));
    if (soft_cap > 0.0f || adjust != nullptr) store(scores + key * kPanelLanes, x);
    row_max = max_ignoring_nan(x, row_max);
  }
  return row_max;
}

// Turns scores into unnormalised probabilities and rescales out where the row maximum grew.
inline void online_softmax(const ForwardPanel& panel, float* scores, int64_t num_keys,
                           const float* adjust, float soft_cap, int64_t Hv) {
  for (int64_t v = 0; v < panel.rows.num_vectors; ++v) {
    const int64_t lane = v * kLanes;
    const Vector old_max = load(panel.row_max + lane);
    const Vector new_max = finish_scores(
        scores + lane, num_keys, adjust == nullptr ? nullptr : adjust + lane, soft_cap, old_max);
    // A lane that has seen no key yet keeps maximum -inf; 0 stands in so that exp sees no NaN.
    const Vector reference = new_max == -kInfinity ? Vector{} : new_max;
    Vector sum = {};
    for (int64_t key = 0; key < num_keys; ++key) {
      const Vector p = exp(load(scores + lane + key * kPanelLanes) - reference);
      sum += p;
      store(scores + lane + key * kPanelLanes, p);
    }
    const Vector rescale = exp(old_max - reference);
    store(panel.row_sum + lane, load(panel.row_sum + lane) * rescale + sum);
    store(panel.row_max + lane, new_max);
    int32_t has_grown = 0;
    const IntVector grown = new_max > old_max;
    for (int64_t i = 0; i < kLanes; ++i) has_grown |= grown[i];
    if (has_grown == 0) continue;
    for (int64_t feature = 0; feature < Hv; ++feature) {
      float* place = panel.out + lane + feature * kPanelLanes;
      store(place, load(place) * rescale);
    }
  }
}

inline void multiply_elementwise(float* values, const float* factors, int64_t num_rows) {
  for (int64_t i = 0; i < num_rows * kPanelLanes; i += kLanes) {
    store(values + i, load(values + i) * load(factors + i));
  }
}

inline void attend(const AttentionParams& params, const ForwardPanel& panel,
                   const ForwardBuffers& buffers, const Box& box, bool is_partial) {
  const int64_t num_keys = box.column_end - box.column_begin;
  const int64_t num_vectors = panel.rows.num_vectors;
  multiply({buffers.k, params.H, 1}, num_keys, panel.q, params.H, buffers.scores, num_vectors,
           Store::kOverwrite);
  online_softmax(panel, buffers.scores, num_keys, is_partial ? buffers.adjust : nullptr,
                 params.logits_soft_cap, params.Hv);
  if (panel.dropout.threshold > 0) {  // the row sum above stays free of dropout
    fill_keep<Owned::kQueries>(panel.dropout, box, buffers.keep);
    multiply_elementwise(buffers.scores, buffers.keep, num_keys);
  }
  multiply({buffers.v, 1, params.Hv}, params.Hv, buffers.scores, num_keys, panel.out, num_vectors,
           Store::kAccumulate);
}

// lse = reference + log_sum, and what its rounding lost: where logits are large, lse alone could no
// longer tell the backward the probabilities apart.
inline void store_lse(float reference, float log_sum, float* lse, float* lse_low) {
  *lse = reference + log_sum;
  *lse_low = log_sum - (*lse - reference);
}

// Normalises, adds the sink to the denominator, writes out and lse.
inline void finish_panel(const ForwardParams& params, const Sequence& sequence,
                         const ForwardPanel& panel) {
  const AttentionParams& attention = params.attention;
  const PanelRows& rows = panel.rows;
  const float* sinks = static_cast<const float*>(batch_data(params.sinks, sequence.batch, 4));
  const float sink = sinks == nullptr ? -kInfinity : sinks[rows.head * params.sinks.head_stride];
  const int64_t offset = statistics_offset(attention, sequence, rows.head);
  float scale[kPanelLanes];
  for (int64_t lane = 0; lane < rows.rows; ++lane) {
    float* lse = params.lse + offset + (rows.begin + lane) * attention.N;
    float* lse_low = params.lse_low + offset + (rows.begin + lane) * attention.N;
    scale[lane] = 0.0f;
    *lse = -kInfinity;
    *lse_low = 0.0f;
    if (lane >= rows.visible_rows || !panel.valid[lane]) continue;
    const float row_max = panel.row_max[lane], row_sum = panel.row_sum[lane];
    const bool is_empty = row_sum == 0.0f;
    if (sink == -kInfinity) {
      if (is_empty) continue;
      scale[lane] = 1.0f / row_sum;
      store_lse(row_max, __builtin_logf(row_sum), lse, lse_low);
    } else {
      const float top = is_empty || sink > row_max ? sink : row_max;
      const float keys_share = is_empty ? 0.0f : __builtin_expf(row_max - top);
      const float total = row_sum * keys_share + __builtin_expf(sink - top);
      scale[lane] = keys_share / total;
      store_lse(top, __builtin_logf(total), lse, lse_low);
    }
  }
  store_panel(panel.out, scale,
              query_rows(attention, sequence, params.out, rows.head, attention.Hv), rows.begin,
              rows.rows);
}

inline void forward_task(const ForwardParams& params, int64_t task, float* slot) {
  const AttentionParams& attention = params.attention;
  const FlushSubnormals flush;
  const TaskLocation location = locate_task<Owned::kQueries>(attention, task);
  const Sequence& sequence = *location.sequence;
  Scratch scratch(slot);
  ForwardBuffers buffers;
  buffers.k = scratch.take(kStreamRows * attention.H);
  buffers.v = scratch.take(kStreamRows * attention.Hv);
  buffers.scores = scratch.take(kTileFloats);
  buffers.adjust = scratch.take(kTileFloats);
  buffers.keep = scratch.take(kTileFloats);

  ForwardPanel panels[kMaxPanels];
  const int64_t num_panels = attention.panels_per_task;
  int64_t stream_begin = sequence.kv_len, stream_end = 0;
  for (int64_t p = 0; p < num_panels; ++p) {
    start_panel(params, location, location.first_panel + p, &scratch, &panels[p]);
    const PanelRows& rows = panels[p].rows;
    if (rows.stream_begin >= rows.stream_end) continue;
    stream_begin = rows.stream_begin < stream_begin ? rows.stream_begin : stream_begin;
    stream_end = rows.stream_end > stream_end ? rows.stream_end : stream_end;
  }

  const RowsOf k = kv_rows(attention, sequence, attention.k, location.kv_head, attention.H);
  const RowsOf v = kv_rows(attention, sequence, attention.v, location.kv_head, attention.Hv);
  // Tiles start at multiples of kStreamRows whatever the range, so that a row's result does not
  // depend on which rows share its task.
  for (int64_t begin = stream_begin / kStreamRows * kStreamRows; begin < stream_end;
       begin += kStreamRows) {
    const int64_t num_keys = clamp(sequence.kv_len - begin, 0, kStreamRows);
    bool is_loaded = false;
    for (int64_t p = 0; p < num_panels; ++p) {
      const ForwardPanel& panel = panels[p];
      const Box box =
          make_box<Owned::kQueries>(panel.rows.begin, panel.rows.visible_rows, begin, num_keys);
      const Tile tile = classify(panel.rows.see, box);
      if (tile == Tile::kHidden) continue;
      const bool is_partial = tile == Tile::kPartial;
      if (is_partial && !fill_adjust<Owned::kQueries>(panel.rows.see, box, buffers.adjust))
        continue;
      if (!is_loaded) {
        bool valid[kStreamRows];
        fill_valid(panel.rows.see.kv_ids, begin, num_keys, valid);
        load_tile(k, begin, num_keys, valid, 1.0f, buffers.k);
        load_tile(v, begin, num_keys, valid, 1.0f, buffers.v);
        is_loaded = true;
      }
      attend(attention, panel, buffers, box, is_partial);
    }
  }
  for (int64_t p = 0; p < num_panels; ++p) {
    if (panels[p].rows.rows > 0) finish_panel(params, sequence, panels[p]);
  }
}

}  // namespace jaxflash::cpu::JF_CPU_ISA
