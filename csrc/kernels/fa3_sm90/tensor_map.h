// Tensor maps: what TMA needs to know about an array, encoded on the host for every launch.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "params.h"

namespace jaxflash::fa3_sm90 {

// An array [B, rows, heads, features] of 16-bit elements, contiguous.
struct HeadArray {
  const void* data;
  DataType dtype;
  int64_t batches, rows, heads, features;
};

using EncodeTiled = decltype(&cuTensorMapEncodeTiled);

// The driver's encoder, found through the runtime so that nothing links to the driver library.
inline EncodeTiled tensor_map_encoder() {
  static const EncodeTiled encoder = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result;
#if CUDART_VERSION >= 12050
    const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function,
                                                               12000, cudaEnableDefault, &result);
#else
    const cudaError_t error =
        cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &function, cudaEnableDefault, &result);
#endif
    const bool is_found = error == cudaSuccess && result == cudaDriverEntryPointSuccess;
    return is_found ? reinterpret_cast<EncodeTiled>(function) : nullptr;
  }();
  return encoder;
}

// A box is `box_rows` rows of 64 features of one head, in the layout of mma::WgmmaTile.
// Coordinates: feature, row, head, batch. Loads read zeros outside the array, features from
// array.features on included; an empty array is described by one zero row that no kernel loads.
inline cudaError_t encode_tensor_map(const HeadArray& array, int box_rows, CUtensorMap* map) {
  const EncodeTiled encode = tensor_map_encoder();
  if (encode == nullptr) return cudaErrorNotSupported;
  const auto at_least_one = [](int64_t size) {
    return static_cast<cuuint64_t>(size < 1 ? 1 : size);
  };
  const cuuint64_t dims[4] = {at_least_one(array.features), at_least_one(array.rows),
                              at_least_one(array.heads), at_least_one(array.batches)};
  const cuuint64_t head_bytes = 2 * dims[0], row_bytes = head_bytes * dims[2];
  const cuuint64_t strides[3] = {row_bytes, head_bytes, row_bytes * dims[1]};  // of dims 1, 2, 3
  const cuuint32_t box[4] = {64, static_cast<cuuint32_t>(box_rows), 1, 1};
  const cuuint32_t element_strides[4] = {1, 1, 1, 1};
  const CUtensorMapDataType type = array.dtype == DataType::kFloat16
                                       ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                       : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  const CUresult result =
      encode(map, type, 4, const_cast<void*>(array.data), dims, strides, box, element_strides,
             CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace jaxflash::fa3_sm90
