// Turns checked parameters into a job: tables of sequences and tasks, the instruction set's
// kernels, and a queue that any number of workers may drain.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "params.h"

namespace jaxflash::launch {

// Tables that parameters point into; they live as long as the job.
class OffsetTables {
 public:
  const int64_t* add(std::vector<int64_t> table) {
    tables_.push_back(std::move(table));
    return tables_.back().data();
  }

 private:
  std::vector<std::vector<int64_t>> tables_;
};

// Scratch shared out among workers; rows of the workspace result.
struct Workspace {
  float* data;  // [num_slots, slot_floats]
  int64_t num_slots;
  int64_t slot_floats;
};

class Job {
 public:
  virtual ~Job() = default;

  // Workers worth starting; 1 when the problem is too small to be worth waking another thread.
  int64_t num_workers() const { return num_workers_; }

  // Runs tasks until none is left. Each worker needs a slot of its own, below num_workers().
  void work(int64_t slot);

 protected:
  virtual void run_task(int64_t task, float* scratch) const = 0;

  // The tables of sequences and tasks; num_products: matrix products of the direction.
  void set_up(AttentionParams* params, const SequenceInputs& inputs, OffsetTables tables,
              Workspace workspace, int num_products, int64_t num_threads);
  void set_num_tasks(int64_t num_tasks);

 private:
  std::vector<Sequence> sequences_;
  OffsetTables tables_;
  Workspace workspace_{};
  int64_t num_tasks_ = 0;
  int64_t num_workers_ = 1;
  std::atomic<int64_t> next_task_{0};
};

// The parameters arrive complete but for the sequence table and the task counts.
std::shared_ptr<Job> prepare_forward(ForwardParams params, const SequenceInputs& inputs,
                                     OffsetTables tables, Workspace workspace, int64_t num_threads);
std::shared_ptr<Job> prepare_backward(BackwardParams params, const SequenceInputs& inputs,
                                      OffsetTables tables, Workspace workspace,
                                      int64_t num_threads);

// Floats a slot must have for these head dims.
int64_t cpu_forward_slot_floats(int64_t H, int64_t Hv);
int64_t cpu_backward_slot_floats(int64_t H, int64_t Hv);

// Name of the instruction set chosen for this process: the best the CPU has, or a lesser one named
// by the environment variable JAXFLASH_CPU_ISA (for tests).
const char* cpu_isa();

}  // namespace jaxflash::launch
