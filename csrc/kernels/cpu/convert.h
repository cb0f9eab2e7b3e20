// Rows of float32, bfloat16 or float16 to and from float32, rounding to nearest even.
//
// Integer arithmetic without branches, so that the loops vectorise, NaN stays NaN, and float16
// subnormals survive threads that flush float32 subnormals to zero (XLA's do).
#pragma once

#include <cstdint>

#include "kernels/cpu/simd.h"
#include "params.h"

namespace jaxflash::cpu::JF_CPU_ISA {

inline uint32_t bits_of(float x) {
  uint32_t bits;
  __builtin_memcpy(&bits, &x, sizeof(bits));
  return bits;
}

inline float from_bits(uint32_t bits) {
  float x;
  __builtin_memcpy(&x, &bits, sizeof(x));
  return x;
}

inline float bfloat16_to_float(uint16_t x) { return from_bits(uint32_t{x} << 16); }

inline uint16_t float_to_bfloat16(float x) {
  const uint32_t bits = bits_of(x);
  const uint32_t rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
  const uint32_t nan = (bits >> 16) | 0x40;
  return static_cast<uint16_t>((bits & 0x7FFFFFFF) > 0x7F800000 ? nan : rounded);
}

inline float float16_to_float(uint16_t x) {
  const uint32_t magnitude = x & 0x7FFF;
  const uint32_t normal = (magnitude << 13) + (112u << 23);
  const uint32_t special = (magnitude << 13) + (224u << 23);  // infinity and NaN
  // A subnormal is an integer times 2^-24, and both factors are normal float32 numbers.
  const uint32_t subnormal =
      bits_of(static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-24f);
  uint32_t bits = magnitude < 0x400 ? subnormal : normal;
  bits = magnitude >= 0x7C00 ? special : bits;
  return from_bits(bits | (uint32_t{x} & 0x8000) << 16);
}

inline uint16_t float_to_float16(float x) {
  const uint32_t bits = bits_of(x);
  const uint32_t magnitude = bits & 0x7FFFFFFF;
  const uint32_t normal = (magnitude + 0xFFF + ((magnitude >> 13) & 1) - (112u << 23)) >> 13;
  // Adding 0.5 rounds to a multiple of 2^-24, the spacing of float16 subnormals.
  const uint32_t subnormal = bits_of(from_bits(magnitude) + 0.5f) - bits_of(0.5f);
  const uint32_t nan = 0x7E00 | ((magnitude >> 13) & 0x3FF);
  uint32_t result = magnitude < 0x38800000 ? subnormal : normal;
  result = magnitude >= 0x477FF000 ? 0x7C00 : result;
  result = magnitude > 0x7F800000 ? nan : result;
  return static_cast<uint16_t>(result | (bits >> 16 & 0x8000));
}

inline int64_t element_bytes(DataType dtype) { return dtype == DataType::kFloat32 ? 4 : 2; }

inline const char* element_address(const void* data, DataType dtype, int64_t offset) {
  return static_cast<const char*>(data) + offset * element_bytes(dtype);
}
inline char* element_address(void* data, DataType dtype, int64_t offset) {
  return static_cast<char*>(data) + offset * element_bytes(dtype);
}

// source holds count contiguous elements of dtype.
inline void row_to_float(const void* source, DataType dtype, int64_t count, float* destination) {
  if (dtype == DataType::kFloat32) {
    __builtin_memcpy(destination, source, count * sizeof(float));
    return;
  }
  const uint16_t* halves = static_cast<const uint16_t*>(source);
  if (dtype == DataType::kBFloat16) {
    for (int64_t i = 0; i < count; ++i) destination[i] = bfloat16_to_float(halves[i]);
  } else {
    for (int64_t i = 0; i < count; ++i) destination[i] = float16_to_float(halves[i]);
  }
}

inline void row_from_float(const float* source, DataType dtype, int64_t count, void* destination) {
  if (dtype == DataType::kFloat32) {
    __builtin_memcpy(destination, source, count * sizeof(float));
    return;
  }
  uint16_t* halves = static_cast<uint16_t*>(destination);
  if (dtype == DataType::kBFloat16) {
    for (int64_t i = 0; i < count; ++i) halves[i] = float_to_bfloat16(source[i]);
  } else {
    for (int64_t i = 0; i < count; ++i) halves[i] = float_to_float16(source[i]);
  }
}

}  // namespace jaxflash::cpu::JF_CPU_ISA
