// FlashAttention-2 backward (arXiv:2307.08691, Algorithm 2) on one CPU thread, owner computes.
//
// Two passes share this core, because the roles of q and k (and of dout and v) swap exactly:
//
//   owned      panel operands (lanes)   streamed tile (scalars)     accumulates
//   queries    q, dout                  k, v  of the KV head        dq
//   keys       k, v                     q, dout of every query      dk, dv
//                                       head of the group, in order
//
//   scores[s][lane]  = first_streamed . first_owned     (q.k; the scale is folded into q)
//   dscores[s][lane] = second_streamed . second_owned   (dout.v)
//   first gradient  += first_streamed^T . dS            second gradient += second_streamed^T . P
//
// Each pass recomputes P, which costs two extra products but writes every gradient once, from one
// thread, in a fixed order: no atomics, and results are bitwise the same for any thread count.
// Scratch: backward_slot_floats().
#pragma once

#include "kernels/cpu/gradient.h"

namespace jaxflash::cpu::JF_CPU_ISA {

struct BackwardPanel {
  PanelRows rows;
  bool valid[kPanelLanes];
  float* first;              // [H][lane] q or k
  float* second;             // [Hv][lane] dout or v
  float* first_gradient;     // [H][lane] dq without softmax_scale; dk from q that carries its scale
  float* second_gradient;    // [Hv][lane] dv; unused when queries are owned
  RowStatistics statistics;  // [lane], queries owned
};

struct BackwardBuffers {
  float* first;              // [stream][H] k or q
  float* second;             // [stream][Hv] v or dout
  RowStatistics statistics;  // [stream], keys owned
  float* scores;             // [stream][lane]
  float* dscores;            // [stream][lane]
  float* adjust;             // [stream][lane]
  float* keep;               // [stream][lane]
};

inline RowStatistics take_statistics(Scratch* scratch) {
  RowStatistics statistics;
  statistics.lse = scratch->take(kPanelLanes);
  statistics.lse_low = scratch->take(kPanelLanes);
  statistics.delta = scratch->take(kPanelLanes);
  return statistics;
}

inline BackwardBuffers take_buffers(const AttentionParams& params, Scratch* scratch) {
  BackwardBuffers buffers;
  buffers.first = scratch->take(kStreamRows * params.H);
  buffers.second = scratch->take(kStreamRows * params.Hv);
  buffers.statistics = take_statistics(scratch);
  buffers.scores = scratch->take(kTileFloats);
  buffers.dscores = scratch->take(kTileFloats);
  buffers.adjust = scratch->take(kTileFloats);
  buffers.keep = scratch->take(kTileFloats);
  return buffers;
}

template <Owned kOwned>
inline void start_panel(const BackwardParams& params, const TaskLocation& location, int64_t index,
                        Scratch* scratch, BackwardPanel* panel) {
  const AttentionParams& attention = params.attention;
  const Sequence& sequence = *location.sequence;
  const int64_t H = attention.H, Hv = attention.Hv;
  panel->rows = locate_panel<kOwned>(attention, location, index);
  panel->first = scratch->take(H * kPanelLanes);
  panel->second = scratch->take(Hv * kPanelLanes);
  panel->first_gradient = scratch->take(H * kPanelLanes);
  panel->second_gradient = scratch->take(Hv * kPanelLanes);
  panel->statistics = take_statistics(scratch);
  const PanelRows& rows = panel->rows;
  if (rows.rows == 0) return;
  RowsOf first, second;
  if (kOwned == Owned::kQueries) {
    load_statistics(params, sequence, rows.head, rows.see.query_ids, rows.begin, rows.visible_rows,
                    panel->valid, panel->statistics);
    first = query_rows(attention, sequence, attention.q, rows.head, H);
    second = query_rows(attention, sequence, params.dout, rows.head, Hv);
  } else {
    fill_valid(rows.see.kv_ids, rows.begin, rows.visible_rows, panel->valid);
    first = kv_rows(attention, sequence, attention.k, rows.head, H);
    second = kv_rows(attention, sequence, attention.v, rows.head, Hv);
  }
  const float scale = kOwned == Owned::kQueries ? folded_scale(attention) : 1.0f;
  load_panel(first, rows.begin, rows.visible_rows, panel->valid, scale, panel->first);
  load_panel(second, rows.begin, rows.visible_rows, panel->valid, 1.0f, panel->second);
  __builtin_memset(panel->first_gradient, 0, H * kPanelLanes * sizeof(float));
  __builtin_memset(panel->second_gradient, 0, Hv * kPanelLanes * sizeof(float));
}

template <Owned kOwned>
inline void load_stream(const BackwardParams& params, const Sequence& sequence,
                        const Visibility& see, int64_t head, int64_t begin, int64_t count,
                        const BackwardBuffers& buffers) {
  const AttentionParams& attention = params.attention;
  bool valid[kStreamRows];
  RowsOf first, second;
  if (kOwned == Owned::kQueries) {
    fill_valid(see.kv_ids, begin, count, valid);
    first = kv_rows(attention, sequence, attention.k, head, attention.H);
    second = kv_rows(attention, sequence, attention.v, head, attention.Hv);
  } else {
    load_statistics(params, sequence, head, see.query_ids, begin, count, valid, buffers.statistics);
    first = query_rows(attention, sequence, attention.q, head, attention.H);
    second = query_rows(attention, sequence, params.dout, head, attention.Hv);
  }
  const float scale = kOwned == Owned::kKeys ? folded_scale(attention) : 1.0f;
  load_tile(first, begin, count, valid, scale, buffers.first);
  load_tile(second, begin, count, valid, 1.0f, buffers.second);
}

template <Owned kOwned>
inline void accumulate_gradients(const AttentionParams& params, const BackwardPanel& panel,
                                 const BackwardBuffers& buffers, const DropoutStream& dropout,
                                 const Box& box, bool is_partial) {
  const bool owns_queries = kOwned == Owned::kQueries;
  const int64_t H = params.H, Hv = params.Hv, num_vectors = panel.rows.num_vectors;
  const int64_t stream =
      owns_queries ? box.column_end - box.column_begin : box.row_end - box.row_begin;
  multiply({buffers.first, H, 1}, stream, panel.first, H, buffers.scores, num_vectors,
           Store::kOverwrite);
  multiply({buffers.second, Hv, 1}, stream, panel.second, Hv, buffers.dscores, num_vectors,
           Store::kOverwrite);
  const bool has_dropout = dropout.threshold > 0;
  if (has_dropout) fill_keep<kOwned>(dropout, box, buffers.keep);
  const GradientTile tile = {buffers.scores,
                             buffers.dscores,
                             is_partial ? buffers.adjust : nullptr,
                             has_dropout ? buffers.keep : nullptr,
                             owns_queries ? panel.statistics : buffers.statistics,
                             params.logits_soft_cap};
  logits_gradient<kOwned, GradientOf::kUncapped>(tile, stream, num_vectors);
  multiply({buffers.first, 1, H}, H, buffers.dscores, stream, panel.first_gradient, num_vectors,
           Store::kAccumulate);
  if (owns_queries) return;
  multiply({buffers.second, 1, Hv}, Hv, buffers.scores, stream, panel.second_gradient, num_vectors,
           Store::kAccumulate);
}

template <Owned kOwned>
inline void finish_panel(const BackwardParams& params, const Sequence& sequence,
                         const BackwardPanel& panel) {
  const AttentionParams& attention = params.attention;
  const PanelRows& rows = panel.rows;
  const float soft_cap = attention.logits_soft_cap;
  const float scale = kOwned == Owned::kQueries ? attention.softmax_scale
                      : soft_cap > 0.0f         ? soft_cap  // q was scaled by softmax_scale / cap
                                                : 1.0f;
  float first_scale[kPanelLanes], second_scale[kPanelLanes];
  for (int64_t lane = 0; lane < rows.rows; ++lane) {
    const bool is_written = lane < rows.visible_rows && panel.valid[lane];
    first_scale[lane] = is_written ? scale : 0.0f;
    second_scale[lane] = is_written ? 1.0f : 0.0f;
  }
  if (kOwned == Owned::kQueries) {
    const int64_t offset = statistics_offset(attention, sequence, rows.head);
    for (int64_t lane = 0; lane < rows.rows; ++lane) {
      params.delta[offset + (rows.begin + lane) * attention.N] = panel.statistics.delta[lane];
    }
    store_panel(panel.first_gradient, first_scale,
                query_rows(attention, sequence, params.dq, rows.head, attention.H), rows.begin,
                rows.rows);
  } else {
    store_panel(panel.first_gradient, first_scale,
                kv_rows(attention, sequence, params.dk, rows.head, attention.H), rows.begin,
                rows.rows);
    store_panel(panel.second_gradient, second_scale,
                kv_rows(attention, sequence, params.dv, rows.head, attention.Hv), rows.begin,
                rows.rows);
  }
}

// Streams one head past the task's panels.
template <Owned kOwned>
inline void stream_head(const BackwardParams& params, const Sequence& sequence, int64_t head,
                        BackwardPanel* panels, const BackwardBuffers& buffers) {
  const AttentionParams& attention = params.attention;
  const bool owns_queries = kOwned == Owned::kQueries;
  const int64_t stream_len = owns_queries ? sequence.kv_len : sequence.query_len;
  int64_t stream_begin = stream_len, stream_end = 0;
  for (int64_t p = 0; p < attention.panels_per_task; ++p) {
    PanelRows& rows = panels[p].rows;
    if (!owns_queries) rows.see = make_visibility(attention, sequence, head);
    if (rows.stream_begin >= rows.stream_end) continue;
    stream_begin = rows.stream_begin < stream_begin ? rows.stream_begin : stream_begin;
    stream_end = rows.stream_end > stream_end ? rows.stream_end : stream_end;
  }
  for (int64_t begin = stream_begin / kStreamRows * kStreamRows; begin < stream_end;
       begin += kStreamRows) {
    const int64_t count = clamp(stream_len - begin, 0, kStreamRows);
    bool is_loaded = false;
    for (int64_t p = 0; p < attention.panels_per_task; ++p) {
      const BackwardPanel& panel = panels[p];
      const PanelRows& rows = panel.rows;
      const Box box = make_box<kOwned>(rows.begin, rows.visible_rows, begin, count);
      const Tile tile = classify(rows.see, box);
      if (tile == Tile::kHidden) continue;
      const bool is_partial = tile == Tile::kPartial;
      if (is_partial && !fill_adjust<kOwned>(rows.see, box, buffers.adjust)) continue;
      if (!is_loaded) load_stream<kOwned>(params, sequence, rows.see, head, begin, count, buffers);
      is_loaded = true;
      const DropoutStream dropout =
          make_dropout(attention, sequence, owns_queries ? rows.head : head);
      accumulate_gradients<kOwned>(attention, panel, buffers, dropout, box, is_partial);
    }
  }
}

template <Owned kOwned>
inline void backward_task(const BackwardParams& params, int64_t task, float* slot) {
  const AttentionParams& attention = params.attention;
  const FlushSubnormals flush;
  const TaskLocation location = locate_task<kOwned>(attention, task);
  const Sequence& sequence = *location.sequence;
  Scratch scratch(slot);
  const BackwardBuffers buffers = take_buffers(attention, &scratch);
  BackwardPanel panels[kMaxPanels];
  for (int64_t p = 0; p < attention.panels_per_task; ++p) {
    start_panel<kOwned>(params, location, location.first_panel + p, &scratch, &panels[p]);
  }
  if (kOwned == Owned::kQueries) {
    stream_head<kOwned>(params, sequence, location.kv_head, panels, buffers);
  } else {
    for (int64_t i = 0; i < attention.group_size; ++i) {
      const int64_t head = location.kv_head * attention.group_size + i;
      stream_head<kOwned>(params, sequence, head, panels, buffers);
    }
  }
  for (int64_t p = 0; p < attention.panels_per_task; ++p) {
    if (panels[p].rows.rows > 0) finish_panel<kOwned>(params, sequence, panels[p]);
  }
}

}  // namespace jaxflash::cpu::JF_CPU_ISA
