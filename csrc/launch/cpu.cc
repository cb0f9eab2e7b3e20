#include "launch/cpu.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "kernels/cpu/config.h"
#include "launch/cpu_isa.h"

namespace jaxflash::launch {
namespace {

// Below this many multiply-adds one thread finishes before a second has woken up.
constexpr double kSerialWork = 4e6;

const int32_t* integers(const BroadcastArray& array, int64_t batch) {
  return static_cast<const int32_t*>(array.data) + array.batch_offset[batch];
}

int64_t length_of(const BroadcastArray& lengths, int64_t batch, int64_t full) {
  if (lengths.data == nullptr) return full;
  return std::clamp<int64_t>(*integers(lengths, batch), 0, full);
}

// Splits [0, total) at monotone offsets: a gap, the sequences, a gap.
std::vector<int64_t> split_points(const BroadcastArray& offsets, int64_t batch,
                                  int64_t num_sequences, int64_t total) {
  std::vector<int64_t> points = {0};
  for (int64_t i = 0; i <= num_sequences; ++i) {
    points.push_back(std::clamp<int64_t>(integers(offsets, batch)[i], points.back(), total));
  }
  points.push_back(total);
  return points;
}

std::vector<Sequence> make_sequences(const AttentionParams& params, const SequenceInputs& inputs) {
  std::vector<Sequence> sequences;
  const auto add = [&](Sequence sequence) {
    if (inputs.is_bottom_right) sequence.diagonal_offset = sequence.kv_len - sequence.query_len;
    sequences.push_back(sequence);
  };
  for (int64_t batch = 0; batch < params.B; ++batch) {
    Sequence sequence = {};
    sequence.batch = batch;
    if (inputs.query_offsets.data == nullptr) {
      sequence.query_rows = params.T;
      sequence.query_len = length_of(inputs.query_lengths, batch, params.T);
      sequence.kv_rows = params.S;
      sequence.kv_len = length_of(inputs.kv_lengths, batch, params.S);
      add(sequence);
      continue;
    }
    const auto rows = split_points(inputs.query_offsets, batch, inputs.num_sequences, params.T);
    const auto keys = split_points(inputs.kv_offsets, batch, inputs.num_sequences, params.S);
    const int64_t last = inputs.num_sequences + 1;
    for (int64_t i = 0; i <= last; ++i) {
      const bool is_gap = i == 0 || i == last;
      sequence.index = is_gap ? 0 : i - 1;
      sequence.query_begin = rows[i];
      sequence.query_rows = rows[i + 1] - rows[i];
      sequence.query_len = is_gap ? 0 : sequence.query_rows;
      sequence.kv_begin = keys[i];
      sequence.kv_rows = keys[i + 1] - keys[i];
      sequence.kv_len = is_gap ? 0 : sequence.kv_rows;
      add(sequence);
    }
  }
  return sequences;
}

// Multiply-adds of one matrix product over all logits, masks ignored.
double product_work(const AttentionParams& params, const std::vector<Sequence>& sequences) {
  double logits = 0;
  for (const Sequence& sequence : sequences) {
    logits += static_cast<double>(sequence.query_len) * static_cast<double>(sequence.kv_len);
  }
  return logits * static_cast<double>(params.N) * static_cast<double>(params.H + params.Hv) / 2;
}

int64_t count_workers(double work, const Workspace& workspace, int64_t num_threads) {
  if (work < kSerialWork) return 1;
  return std::max<int64_t>(1, std::min(workspace.num_slots, num_threads));
}

// Numbers the tasks. Panels share a task only while every worker still gets several tasks.
void number_tasks(AttentionParams* params, std::vector<Sequence>* sequences, int64_t num_workers) {
  int64_t panels = 0;
  for (const Sequence& sequence : *sequences) {
    panels += cpu::ceil_div(sequence.query_rows, cpu::kPanelLanes) * params->N;
  }
  constexpr int64_t kTasksPerWorker = 8;
  params->panels_per_task =
      std::clamp<int64_t>(panels / (num_workers * kTasksPerWorker), 1, cpu::kMaxPanels);
  int64_t query_tasks = 0, kv_tasks = 0;
  for (Sequence& sequence : *sequences) {
    sequence.first_query_task = query_tasks;
    sequence.first_kv_task = kv_tasks;
    query_tasks += params->K * cpu::tasks_per_kv_head(sequence.query_rows, params->group_size,
                                                      params->panels_per_task);
    kv_tasks += params->K * cpu::tasks_per_kv_head(sequence.kv_rows, 1, params->panels_per_task);
  }
  params->num_query_tasks = query_tasks;
  params->num_kv_tasks = kv_tasks;
  params->sequences = sequences->data();
  params->num_sequences = static_cast<int64_t>(sequences->size());
}

class ForwardJob : public Job {
 public:
  ForwardJob(ForwardParams params, const SequenceInputs& inputs, OffsetTables tables,
             Workspace workspace, int64_t num_threads)
      : params_(params) {
    set_up(&params_.attention, inputs, std::move(tables), workspace, 2, num_threads);
    set_num_tasks(params_.attention.num_query_tasks);
  }

 protected:
  void run_task(int64_t task, float* scratch) const override {
    cpu_kernels().forward_task(params_, task, scratch);
  }

 private:
  ForwardParams params_;
};

class BackwardJob : public Job {
 public:
  BackwardJob(BackwardParams params, const SequenceInputs& inputs, OffsetTables tables,
              Workspace workspace, int64_t num_threads)
      : params_(params) {
    set_up(&params_.attention, inputs, std::move(tables), workspace, 7, num_threads);
    number_bias_tasks();
    set_num_tasks(params_.attention.num_kv_tasks + params_.attention.num_query_tasks +
                  params_.dbias.num_tasks);
  }

 protected:
  // The three kinds of task need nothing from each other and share one queue, longest kind first.
  void run_task(int64_t task, float* scratch) const override {
    const cpu::Kernels& kernels = cpu_kernels();
    if (task < params_.attention.num_kv_tasks) {
      return kernels.backward_kv_task(params_, task, scratch);
    }
    task -= params_.attention.num_kv_tasks;
    if (task < params_.attention.num_query_tasks) {
      return kernels.backward_query_task(params_, task, scratch);
    }
    kernels.backward_bias_task(params_, task - params_.attention.num_query_tasks, scratch);
  }

 private:
  void number_bias_tasks() {
    BiasGradient& dbias = params_.dbias;
    dbias.num_tasks = 0;
    if (dbias.data == nullptr) return;
    dbias.num_tasks = dbias.num_batches * dbias.num_heads *
                      cpu::ceil_div(dbias.num_rows, cpu::kStreamRows) *
                      cpu::ceil_div(dbias.num_columns, cpu::kPanelLanes);
  }

  BackwardParams params_;
};

}  // namespace

void Job::set_up(AttentionParams* params, const SequenceInputs& inputs, OffsetTables tables,
                 Workspace workspace, int num_products, int64_t num_threads) {
  tables_ = std::move(tables);
  workspace_ = workspace;
  sequences_ = make_sequences(*params, inputs);
  num_workers_ =
      count_workers(num_products * product_work(*params, sequences_), workspace, num_threads);
  number_tasks(params, &sequences_, num_workers_);
}

void Job::set_num_tasks(int64_t num_tasks) {
  num_tasks_ = num_tasks;
  num_workers_ = std::clamp<int64_t>(num_tasks, 1, num_workers_);
}

void Job::work(int64_t slot) {
  float* scratch = workspace_.data + slot * workspace_.slot_floats;
  for (;;) {
    const int64_t task = next_task_.fetch_add(1, std::memory_order_relaxed);
    if (task >= num_tasks_) return;
    run_task(task, scratch);
  }
}

std::shared_ptr<Job> prepare_forward(ForwardParams params, const SequenceInputs& inputs,
                                     OffsetTables tables, Workspace workspace,
                                     int64_t num_threads) {
  return std::make_shared<ForwardJob>(params, inputs, std::move(tables), workspace, num_threads);
}

std::shared_ptr<Job> prepare_backward(BackwardParams params, const SequenceInputs& inputs,
                                      OffsetTables tables, Workspace workspace,
                                      int64_t num_threads) {
  return std::make_shared<BackwardJob>(params, inputs, std::move(tables), workspace, num_threads);
}

int64_t cpu_forward_slot_floats(int64_t H, int64_t Hv) { return cpu::forward_slot_floats(H, Hv); }
int64_t cpu_backward_slot_floats(int64_t H, int64_t Hv) { return cpu::backward_slot_floats(H, Hv); }

}  // namespace jaxflash::launch
