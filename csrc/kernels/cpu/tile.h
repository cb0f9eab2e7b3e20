// Moves tiles between the arrays ([rows, heads, features] of any dtype) and float32 scratch.
//
// A row that must not be observed (padding) is never read: its place is filled with zeros.
#pragma once

#include "kernels/cpu/convert.h"
#include "kernels/cpu/simd.h"

namespace jaxflash::cpu::JF_CPU_ISA {

// Which sequence a kernel owns; the other one is streamed.
enum class Owned { kQueries, kKeys };

// Rows of one head: row r starts at data + r * row_stride.
struct RowsOf {
  const void* data;
  DataType dtype;
  int64_t row_stride;
  int64_t features;
};

// The tile of rows [begin, begin + count) times scale, row-major with features columns.
inline void load_tile(const RowsOf& rows, int64_t begin, int64_t count, const bool* valid,
                      float scale, float* tile) {
  for (int64_t i = 0; i < count; ++i, tile += rows.features) {
    if (valid[i]) {
      row_to_float(element_address(rows.data, rows.dtype, (begin + i) * rows.row_stride),
                   rows.dtype, rows.features, tile);
      if (scale == 1.0f) continue;
      for (int64_t j = 0; j < rows.features; ++j) tile[j] *= scale;
    } else {
      __builtin_memset(tile, 0, rows.features * sizeof(float));
    }
  }
}

// Interleaves the low and the high halves of two vectors.
#if defined(__clang__)
#define JF_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define JF_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, IntVector{__VA_ARGS__})
#endif
inline Vector zip_low(Vector a, Vector b) {
#if defined(__AVX512F__)
  return JF_SHUFFLE(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
#elif defined(__AVX__)
  return JF_SHUFFLE(a, b, 0, 8, 1, 9, 2, 10, 3, 11);
#else
  return JF_SHUFFLE(a, b, 0, 4, 1, 5);
#endif
}
inline Vector zip_high(Vector a, Vector b) {
#if defined(__AVX512F__)
  return JF_SHUFFLE(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
#elif defined(__AVX__)
  return JF_SHUFFLE(a, b, 4, 12, 5, 13, 6, 14, 7, 15);
#else
  return JF_SHUFFLE(a, b, 2, 6, 3, 7);
#endif
}
#undef JF_SHUFFLE

// Transposes a square of kLanes vectors: each stage zips vector i with vector i + kLanes / 2, and
// log2(kLanes) stages bring every element to its place.
inline void transpose_square(Vector* square) {
  constexpr int kHalf = kLanes / 2;
#pragma GCC unroll 4
  for (int stage = 1; stage < kLanes; stage *= 2) {
    Vector zipped[kLanes];
#pragma GCC unroll 8
    for (int i = 0; i < kHalf; ++i) {
      zipped[2 * i] = zip_low(square[i], square[i + kHalf]);
      zipped[2 * i + 1] = zip_high(square[i], square[i + kHalf]);
    }
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) square[i] = zipped[i];
  }
}

// destination[column][row] = source[row][column] for rows, columns <= 64, both with rows of 64
// floats. Destination rows are filled up to a whole vector, with zeros.
inline void transpose(const float* source, int64_t rows, int64_t columns, float* destination) {
  for (int64_t row = 0; row < rows; row += kLanes) {
    for (int64_t column = 0; column < columns; column += kLanes) {
      Vector square[kLanes];
      for (int64_t i = 0; i < kLanes; ++i) {
        const float* place = source + (row + i) * kPanelLanes + column;
        square[i] = row + i < rows ? load(place) : Vector{};
      }
      transpose_square(square);
      for (int64_t i = 0; i < kLanes && column + i < columns; ++i) {
        store(destination + (column + i) * kPanelLanes + row, square[i]);
      }
    }
  }
}

// The same rows as lanes: panel[feature][lane], times scale; lanes from count on are zero.
inline void load_panel(const RowsOf& rows, int64_t begin, int64_t count, const bool* valid,
                       float scale, float* panel) {
  alignas(64) float block[kTileFloats];
  for (int64_t feature = 0; feature < rows.features; feature += kPanelLanes) {
    const int64_t left = rows.features - feature;
    const int64_t width = left < kPanelLanes ? left : kPanelLanes;
    for (int64_t i = 0; i < kPanelLanes; ++i) {
      float* row = block + i * kPanelLanes;
      if (i < count && valid[i]) {
        row_to_float(
            element_address(rows.data, rows.dtype, (begin + i) * rows.row_stride + feature),
            rows.dtype, width, row);
        for (int64_t j = 0; scale != 1.0f && j < width; ++j) row[j] *= scale;
      } else {
        __builtin_memset(row, 0, width * sizeof(float));
      }
    }
    transpose(block, kPanelLanes, width, panel + feature * kPanelLanes);
  }
}

// Writes lane i of panel[feature][lane], times scale[i], to row begin + i. Rows with scale 0 are
// written as zeros whatever the panel holds.
inline void store_panel(const float* panel, const float* scale, const RowsOf& rows, int64_t begin,
                        int64_t count) {
  alignas(64) float block[kTileFloats];
  for (int64_t feature = 0; feature < rows.features; feature += kPanelLanes) {
    const int64_t left = rows.features - feature;
    const int64_t width = left < kPanelLanes ? left : kPanelLanes;
    transpose(panel + feature * kPanelLanes, width, count, block);
    for (int64_t i = 0; i < count; ++i) {
      float* row = block + i * kPanelLanes;
      for (int64_t j = 0; j < width; ++j) row[j] = scale[i] == 0.0f ? 0.0f : row[j] * scale[i];
      row_from_float(row, rows.dtype, width,
                     element_address(const_cast<void*>(rows.data), rows.dtype,
                                     (begin + i) * rows.row_stride + feature));
    }
  }
}

}  // namespace jaxflash::cpu::JF_CPU_ISA
