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

template <class Config>
Schedule make_schedule(const AttentionParams& params, const SequenceInputs& inputs, int* drawn) {
  constexpr int64_t kSectionBytes = 32 << 20;  // of keys and values, about half of L2
  Schedule schedule = {};
  schedule.tiles_per_head = static_cast<int>(device::tiles_per_batch(
      params.T, inputs.num_sequences, inputs.query_offsets.data != nullptr, Config::kBlockQ));
  schedule.num_heads = static_cast<int>(params.B * params.N);
  schedule.num_tiles = schedule.tiles_per_head * schedule.num_heads;
  schedule.section_heads = 1;
  const bool tiles_differ = params.window_right >= 0 || params.window_left >= 0 ||
                            inputs.query_lengths.data != nullptr ||
                            inputs.kv_lengths.data != nullptr;
  if (tiles_differ) {
    const int64_t head_bytes = std::max<int64_t>(2 * params.S * (params.H + params.Hv), 1);
    const int64_t kv_heads = std::max<int64_t>(kSectionBytes / head_bytes, 1);
    schedule.section_heads =
        static_cast<int>(std::min<int64_t>(kv_heads * params.group_size, schedule.num_heads));
  }
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
  return launch_kernel(forward_kernel<Config>, std::min(num_multiprocessors, schedule.num_tiles),
                       Config::kNumThreads, sizeof(typename Config::SharedStorage), stream, params,
                       inputs, maps, schedule);
}

}  // namespace jaxflash::fa3_sm90
