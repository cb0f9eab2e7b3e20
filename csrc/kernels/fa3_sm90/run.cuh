// Launches one instance of the forward; everything about the launch derives from Config.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>

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
      {{p.S > 0 ? p.k : p.q, p.dtype, p.B, p.S, p.K, p.H}, part_rows<Config>(), &maps->k},
      {{p.S > 0 ? p.v : p.q, p.dtype, p.B, p.S, p.K, p.Hv}, part_rows<Config>(), &maps->v},
      {{params.out, p.dtype, p.B, p.T, p.N, p.Hv}, 64, &maps->out},
  };
  for (const Map& map : all) {
    const cudaError_t error = encode_tensor_map(map.array, map.box_rows, map.map);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

// Clusters that the device runs at once. Asked once: a wrong answer on another device costs speed
// alone.
template <class Config>
cudaError_t resident_clusters(int* result) {
  static std::atomic<int> known{0};
  *result = known.load();
  if (*result > 0) return cudaSuccess;
  int device, num_sms;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device);
  }
  if (error != cudaSuccess) return error;
  *result = num_sms;
  if (Config::kCluster > 1) {
    cudaLaunchConfig_t launch = {};
    launch.gridDim = dim3(num_sms / Config::kCluster * Config::kCluster);
    launch.blockDim = dim3(Config::kNumThreads);
    launch.dynamicSmemBytes = sizeof(typename Config::SharedStorage);
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {Config::kCluster, 1, 1};
    launch.attrs = &attribute;
    launch.numAttrs = 1;
    error = cudaOccupancyMaxActiveClusters(result, forward_kernel<Config>, &launch);
    if (error != cudaSuccess) return error;
    if (*result < 1) return cudaErrorInvalidConfiguration;
  }
  known.store(*result);
  return cudaSuccess;
}

template <class Config>
Schedule make_schedule(const AttentionParams& params, const SequenceInputs& inputs, int* drawn) {
  constexpr int kRows = Config::kCluster * Config::kBlockQ;
  constexpr int64_t kSectionBytes = 32 << 20;  // of keys and values, about half of L2
  Schedule schedule = {};
  schedule.tiles_per_head = static_cast<int>((params.T + kRows - 1) / kRows);
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
    schedule.drawn = drawn;
  }
  return schedule;
}

// drawn: one int of scratch.
template <class Config>
cudaError_t run_forward(const ForwardParams& params, const SequenceInputs& inputs, int* drawn,
                        cudaStream_t stream) {
  const AttentionParams& attention = params.attention;
  const int64_t num_rows = attention.B * attention.N * ((attention.T + 63) / 64);
  if (num_rows == 0) return cudaSuccess;
  if (num_rows > INT32_MAX) return cudaErrorInvalidConfiguration;
  constexpr int kSharedBytes = sizeof(typename Config::SharedStorage);
  cudaError_t error = cudaFuncSetAttribute(
      forward_kernel<Config>, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  ForwardMaps maps;
  int num_clusters;
  if (error == cudaSuccess) error = encode_forward_maps<Config>(params, &maps);
  if (error == cudaSuccess) error = resident_clusters<Config>(&num_clusters);
  if (error != cudaSuccess) return error;
  const Schedule schedule = make_schedule<Config>(attention, inputs, drawn);
  if (schedule.drawn != nullptr) {
    error = cudaMemsetAsync(schedule.drawn, 0, sizeof(int), stream);
    if (error != cudaSuccess) return error;
  }
  cudaLaunchConfig_t launch = {};
  launch.gridDim = dim3(std::min(num_clusters, schedule.num_tiles) * Config::kCluster);
  launch.blockDim = dim3(Config::kNumThreads);
  launch.dynamicSmemBytes = kSharedBytes;
  launch.stream = stream;
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {Config::kCluster, 1, 1};
  launch.attrs = &attribute;
  launch.numAttrs = 1;
  return cudaLaunchKernelEx(&launch, forward_kernel<Config>, params, inputs, maps, schedule);
}

}  // namespace jaxflash::fa3_sm90
