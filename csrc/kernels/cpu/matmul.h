// The one matrix product behind every step of attention:
//
//   C[row][lane] (+)= sum over i of A[row][i] * B[i][lane]
//
// A is read as scalars through two strides (so a tile serves as itself or as its transpose), B and
// C are panels of 64 lanes. A block of kBlockRows x kBlockVectors accumulators stays in registers
// over a chunk of the inner dim. Partial sums start at 0 and are added to C at the end: the error
// then grows with the number of chunks, not with the number of summands.
// An element's value does not depend on which block shape computes it.
#pragma once

#include "kernels/cpu/simd.h"

namespace jaxflash::cpu::JF_CPU_ISA {

// Fill the register file: 24 of 32 (AVX-512) or 12 of 16 registers accumulate.
constexpr int kBlockRows = 6;
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kBlockVectors = 4;
#else
constexpr int kBlockVectors = 2;
#endif

struct ScalarOperand {
  const float* data;
  int64_t row_stride;
  int64_t inner_stride;
};

enum class Store { kOverwrite, kAccumulate };

template <int kRows, int kVectors>
inline void multiply_block(ScalarOperand a, const float* b, int64_t inner, float* c, Store mode) {
  Vector sum[kRows][kVectors] = {};
  for (int64_t i = 0; i < inner; ++i) {
    Vector right[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) right[v] = load(b + i * kPanelLanes + v * kLanes);
#pragma GCC unroll 6
    for (int r = 0; r < kRows; ++r) {
      const Vector left = splat(a.data[r * a.row_stride + i * a.inner_stride]);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) sum[r][v] += left * right[v];
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      float* destination = c + r * kPanelLanes + v * kLanes;
      store(destination, mode == Store::kAccumulate ? load(destination) + sum[r][v] : sum[r][v]);
    }
  }
}

template <int kRows>
inline void multiply_rows(ScalarOperand a, const float* b, int64_t inner, float* c,
                          int64_t num_vectors, Store mode) {
  int64_t v = 0;
  for (; v + kBlockVectors <= num_vectors; v += kBlockVectors) {
    multiply_block<kRows, kBlockVectors>(a, b + v * kLanes, inner, c + v * kLanes, mode);
  }
  for (; v < num_vectors; ++v) {
    multiply_block<kRows, 1>(a, b + v * kLanes, inner, c + v * kLanes, mode);
  }
}

inline void multiply_chunk(ScalarOperand a, int64_t rows, const float* b, int64_t inner, float* c,
                           int64_t num_vectors, Store mode) {
  int64_t row = 0;
  for (; row + kBlockRows <= rows; row += kBlockRows) {
    multiply_rows<kBlockRows>(a, b, inner, c, num_vectors, mode);
    a.data += kBlockRows * a.row_stride;
    c += kBlockRows * kPanelLanes;
  }
  static_assert(kBlockRows == 6, "the remainders below cover 1 to 5 rows");
  switch (rows - row) {
    case 5:
      return multiply_rows<5>(a, b, inner, c, num_vectors, mode);
    case 4:
      return multiply_rows<4>(a, b, inner, c, num_vectors, mode);
    case 3:
      return multiply_rows<3>(a, b, inner, c, num_vectors, mode);
    case 2:
      return multiply_rows<2>(a, b, inner, c, num_vectors, mode);
    case 1:
      return multiply_rows<1>(a, b, inner, c, num_vectors, mode);
    default:
      return;
  }
}

// Computes rows x (num_vectors * kLanes) elements of C. The inner dim goes in chunks whose B fits
// the L1 cache (16 KiB); it also bounds the length of a plain sum.
inline void multiply(ScalarOperand a, int64_t rows, const float* b, int64_t inner, float* c,
                     int64_t num_vectors, Store mode) {
  constexpr int64_t kChunk = 64;
  int64_t begin = 0;
  do {
    const int64_t left = inner - begin;
    multiply_chunk(a, rows, b, left < kChunk ? left : kChunk, c, num_vectors, mode);
    a.data += kChunk * a.inner_stride;
    b += kChunk * kPanelLanes;
    mode = Store::kAccumulate;
    begin += kChunk;
  } while (begin < inner);
}

}  // namespace jaxflash::cpu::JF_CPU_ISA
