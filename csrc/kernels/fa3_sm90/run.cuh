// Launches one instance of the forward; everything about the launch derives from Config.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>

#include "base/launch_kernel.cuh"
#include "kernels/fa3_sm90/forward.cuh"
#include "kernels/fa3_sm90/tensor_map.h"

namespace jaxflash::fa3_sm90 {

template <class Config>
cudaError_t encode_forward_maps(const ForwardParams& params, ForwardMaps* maps) {
  const AttentionParams& p = params.attention;
  struct Map {
    HeadArray array;
    int box_rows;
    CUtensorMap* map;
  };
  const Map all[] = {
      {{p.q, p.dtype, p.B, p.T, p.N, p.H}, 64, &maps->q},
      // Without keys there is no array to describe, and none is read.
      {{p.S > 0 ? p.k : p.q, p.dtype, p.B, p.S, p.K, p.H}, Config::kBlockKV, &maps->k},
      {{p.S > 0 ? p.v : p.q, p.dtype, p.B, p.S, p.K, p.Hv}, Config::kBlockKV, &maps->v},
      {{params.out, p.dtype, p.B, p.T, p.N, p.Hv}, 64, &maps->out},
  };
  for (const Map& map : all) {
    const cudaError_t error = encode_tensor_map(map.array, map.box_rows, map.map);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

// Multiprocessors, of which each runs one CTA. Asked once: a wrong answer on another device costs
// speed alone.
inline cudaError_t count_multiprocessors(int* result) {
  static std::atomic<int> known{0};
  *result = known.load();
  if (*result > 0) return cudaSuccess;
  int device;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(result, cudaDevAttrMultiProcessorCount, device);
  }
  if (error == cudaSuccess) known.store(*result);
  return error;
}

// Heads of a section where tiles differ in length. Long tiles need many others beside them to end
// together: about 2,048 tiles, 15 for each CTA. But with more than so many KV heads at a time no
// two CTAs read the same keys, and L2 does not help (measured on an H200,
// docs/kernels/fa3_sm90.md).
template <class Config>
int count_section_heads(const AttentionParams& params, const Schedule& schedule) {
  constexpr int64_t kTiles = 2048, kMaxKvHeads = 8192 / Config::kHeadDim;
  const int64_t group_tiles = schedule.tiles_per_head * params.group_size;
  const int64_t kv_heads =
      std::clamp<int64_t>(kTiles / std::max<int64_t>(group_tiles, 1), 1, kMaxKvHeads);
  const int64_t heads = kv_heads * params.group_size;
  const int64_t sections = std::max<int64_t>((schedule.num_heads + heads / 2) / heads, 1);
  const int64_t even = (schedule.num_heads + sections - 1) / sections;
  return static_cast<int>((even + params.group_size - 1) / params.group_size * params.group_size);
}

template <class Config>
Schedule make_schedule(const AttentionParams& params, const SequenceInputs& inputs, int* drawn) {
  Schedule schedule = {};
  schedule.tiles_per_head = static_cast<int>(device::tiles_per_batch(
      params.T, inputs.num_sequences, inputs.query_offsets.data != nullptr, Config::kBlockQ));
  schedule.num_heads = static_cast<int>(params.B * params.N);
  schedule.num_tiles = schedule.tiles_per_head * schedule.num_heads;
  schedule.section_heads = 1;
  const bool tiles_differ = params.window_right >= 0 || params.window_left >= 0 ||
                            inputs.query_lengths.data != nullptr ||
                            inputs.kv_lengths.data != nullptr;
  if (tiles_differ) schedule.section_heads = count_section_heads<Config>(params, schedule);
  if (tiles_differ || Config::kIsGeneral) schedule.drawn = drawn;
  return schedule;
}

// drawn: one int of scratch.
template <class Config>
cudaError_t run_forward(const ForwardParams& params, const SequenceInputs& inputs, int* drawn,
                        cudaStream_t stream) {
  const AttentionParams& attention = params.attention;
  if (attention.B * attention.N * attention.T == 0) return cudaSuccess;
  const int64_t num_tiles = device::tiles_per_batch(attention.T, inputs.num_sequences,
                                                    inputs.query_offsets.data != nullptr, 64);
  if (attention.B * attention.N * num_tiles > INT32_MAX) return cudaErrorInvalidConfiguration;
  ForwardMaps maps;
  int num_multiprocessors;
  cudaError_t error = encode_forward_maps<Config>(params, &maps);
  if (error == cudaSuccess) error = count_multiprocessors(&num_multiprocessors);
  if (error != cudaSuccess) return error;
  const Schedule schedule = make_schedule<Config>(attention, inputs, drawn);
  if (schedule.drawn != nullptr) {
    error = cudaMemsetAsync(schedule.drawn, 0, sizeof(int), stream);
    if (error != cudaSuccess) return error;
  }
  // A parameter is an operand of instructions where a product would take a register.
  const float scale_log2 =
      device::kLog2E *
      (attention.logits_soft_cap > 0.0f ? attention.logits_soft_cap : attention.softmax_scale);
  return launch_kernel(forward_kernel<Config>, std::min(num_multiprocessors, schedule.num_tiles),
                       Config::kNumThreads, sizeof(typename Config::SharedStorage), stream, params,
                       inputs, maps, schedule, scale_log2);
}

}  // namespace jaxflash::fa3_sm90
