// mma.sync: one warp multiplies 16x16 by 16x8 16-bit elements (m16n8k16) or 16x8 by 8x8 TF32
// numbers (m16n8k8), accumulating in float32.
//
// Fragment ownership, lane l, g = l / 4, t = l % 4:
//   a (16 rows x 16 k): a[0] row g,     k 2t, 2t + 1     a[1] row g + 8, the same k
//                       a[2] row g,     k 2t + 8, 2t + 9 a[3] row g + 8, the same k
//   b (16 k x 8 columns): b0 k 2t, 2t + 1, column g      b1 k 2t + 8, 2t + 9, column g
//   d (16 rows x 8 columns): d[0], d[1] row g, columns 2t, 2t + 1      d[2], d[3] row g + 8
// m16n8k8 has the same d and
//   a (16 rows x 8 k): a0 row g, k t     a1 row g + 8, k t     a2 row g, k t + 4     a3 row g + 8
//   b (8 k x 8 columns): b0 k t, column g     b1 k t + 4, column g
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace jaxflash::ptx {

// mma.sync.aligned.m16n8k16.row.col.f32 (PTX ISA 7.0, sm_80): d += a b.
// All 32 lanes call it; it orders nothing but its own registers. d is an output and an input, not
// one operand that is both, so that accumulators known to be zero cost no clearing.
template <class Element>
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                             uint32_t b1);

template <>
__device__ __forceinline__ void mma_m16n8k16<__nv_bfloat16>(float (&d)[4], const uint32_t (&a)[4],
                                                            uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(d[0]), "f"(d[1]),
        "f"(d[2]), "f"(d[3]));
}

template <>
__device__ __forceinline__ void mma_m16n8k16<__half>(float (&d)[4], const uint32_t (&a)[4],
                                                     uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(d[0]), "f"(d[1]),
        "f"(d[2]), "f"(d[3]));
}

// mma.sync.aligned.m16n8k8.row.col.f32.tf32 (PTX ISA 7.0, sm_80): d += a b. The operands are floats
// of which the tensor cores ignore the low 13 bits; they truncate when they add. All 32 lanes call
// it; d as above.
__device__ __forceinline__ void mma_m16n8k8_tf32(float (&d)[4], const float (&a)[4], float b0,
                                                 float b1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(__float_as_uint(a[0])), "r"(__float_as_uint(a[1])), "r"(__float_as_uint(a[2])),
        "r"(__float_as_uint(a[3])), "r"(__float_as_uint(b0)), "r"(__float_as_uint(b1)), "f"(d[0]),
        "f"(d[1]), "f"(d[2]), "f"(d[3]));
}

}  // namespace jaxflash::ptx
