// wgmma: a warpgroup multiplies 64 x 16 by 16 x N 16-bit elements, accumulating in float32, while
// its threads go on.
//
// Warp w of the warpgroup holds rows 16 w .. 16 w + 15. Lane l holds of the accumulator
//   d[4 j + 2 r + e]: row 16 w + l / 4 + 8 r, column 8 j + 2 (l % 4) + e
// and of an operand `a` in registers the fragment of mma.sync (ptx/mma.cuh) for its warp's rows: d
// of columns 16 k .. 16 k + 15, packed in pairs, is `a` of step k. `b`, and `a` where it is not in
// registers, are shared memory named by descriptors (mma/wgmma_tile.cuh).
//
// Order: wgmma_fence, products, wgmma_commit; then wgmma_wait before anything touches d, or the
// registers of `a`, again. Between the fence and the wait no register of them may be copied or
// spilled: wgmma_pin on both sides of a batch keeps the compiler's own code out.
// NOTE: ptxas serialises all products of a kernel (warnings C7509 to C7519) when it cannot prove
// that; function calls, run-time indices and a shortage of registers are enough.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace jaxflash::ptx {

// wgmma.fence.sync.aligned (PTX ISA 8.0, sm_90a): orders ordinary accesses to registers before the
// products that follow. The whole warpgroup, as all of these.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

// wgmma.commit_group: closes the group of products issued so far.
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// wgmma.wait_group: waits until at most kPending of the youngest groups are unfinished.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Not an instruction: the compiler moves no use of these registers across it.
template <int kCount>
__device__ __forceinline__ void wgmma_pin(float (&registers)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(registers[i])::"memory");
}
template <int kCount>
__device__ __forceinline__ void wgmma_pin(uint32_t (&registers)[kCount][4]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) asm volatile("" : "+r"(registers[i][j])::"memory");
  }
}

// Not an instruction that does anything: a store to shared `address` that never happens if x and y
// are not negative, but needs both. Without it ptxas hoists a wgmma_wait that follows above most of
// the work x and y come from, and that work runs when the product is done instead of beside it.
// NOTE: one predicate each; a test of x + y does not hold the wait.
__device__ __forceinline__ void wgmma_hold(float x, float y, uint32_t address) {
  asm volatile(
      "{\n.reg .pred p, q;\n"
      "setp.lt.f32 p, %0, 0f00000000;\n"
      "setp.lt.or.f32 q, %1, 0f00000000, p;\n"
      "@q st.shared.f32 [%2], %0;\n}" ::"f"(x),
      "f"(y), "r"(address)
      : "memory");
}

// How a product reads its operands: the high words of the descriptors, and whether an operand lies
// in shared memory with the summed dim outermost (true) or innermost.
template <uint32_t kHighWordA, uint32_t kHighWordB, bool kIsTransposedA, bool kIsTransposedB>
struct WgmmaOperands {
  static constexpr uint32_t kHighA = kHighWordA;
  static constexpr uint32_t kHighB = kHighWordB;
  static constexpr int kTransposeA = kIsTransposedA;
  static constexpr int kTransposeB = kIsTransposedB;
};

// wgmma.mma_async.sync.aligned.m64nNk16.f32 (PTX ISA 8.0, sm_90a), one pair of overloads for each
// N:
//   wgmma_ss<Element, Operands>(d, a, b, accumulate)  a, b: low words of the descriptors
//   wgmma_rs<Element, Operands>(d, a, b, accumulate)  a: fragment, b: low word
// d = a b, plus d if accumulate.

#define JF_LIST(...) __VA_ARGS__  // takes the parentheses off
#define JF_WGMMA_SS(TYPE, N, D, OUTPUTS, A, B, ACCUMULATE, HIGH_A, HIGH_B, TRANSPOSE_A, \
                    TRANSPOSE_B)                                                        \
  asm volatile(                                                                         \
      "{\n.reg .pred p;\n.reg .b64 da, db;\n"                                           \
      "setp.ne.b32 p, " ACCUMULATE                                                      \
      ", 0;\n"                                                                          \
      "mov.b64 da, {" A ", " HIGH_A                                                     \
      "};\n"                                                                            \
      "mov.b64 db, {" B ", " HIGH_B                                                     \
      "};\n"                                                                            \
      "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" D            \
      "}, da, db, p, 1, 1, " TRANSPOSE_A ", " TRANSPOSE_B ";\n}"                        \
      : JF_LIST OUTPUTS                                                                 \
      : "r"(a), "r"(b), "r"(static_cast<int>(accumulate)), "n"(Operands::kHighA),       \
        "n"(Operands::kHighB), "n"(Operands::kTransposeA), "n"(Operands::kTransposeB))

#define JF_WGMMA_RS(TYPE, N, D, OUTPUTS, A0, A1, A2, A3, B, ACCUMULATE, HIGH_B, TRANSPOSE_B)   \
  asm volatile(                                                                                \
      "{\n.reg .pred p;\n.reg .b64 db;\n"                                                      \
      "setp.ne.b32 p, " ACCUMULATE                                                             \
      ", 0;\n"                                                                                 \
      "mov.b64 db, {" B ", " HIGH_B                                                            \
      "};\n"                                                                                   \
      "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" D "}, {" A0 ", " A1 \
      ", " A2 ", " A3 "}, db, p, 1, 1, " TRANSPOSE_B ";\n}"                                    \
      : JF_LIST OUTPUTS                                                                        \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(static_cast<int>(accumulate)), \
        "n"(Operands::kHighB), "n"(Operands::kTransposeB))

// OUTPUTS, in parentheses: the registers of d. P0 .. P7: the operands that follow the N / 2
// registers of d.
#define JF_WGMMA(N, D, OUTPUTS, P0, P1, P2, P3, P4, P5, P6, P7)                                   \
  template <class Element, class Operands>                                                        \
  __device__ __forceinline__ void wgmma_ss(float (&d)[N / 2], uint32_t a, uint32_t b,             \
                                           bool accumulate) {                                     \
    if constexpr (std::is_same_v<Element, __half>) {                                              \
      JF_WGMMA_SS("f16", N, D, OUTPUTS, P0, P1, P2, P3, P4, P5, P6);                              \
    } else {                                                                                      \
      JF_WGMMA_SS("bf16", N, D, OUTPUTS, P0, P1, P2, P3, P4, P5, P6);                             \
    }                                                                                             \
  }                                                                                               \
  template <class Element, class Operands>                                                        \
  __device__ __forceinline__ void wgmma_rs(float (&d)[N / 2], const uint32_t (&a)[4], uint32_t b, \
                                           bool accumulate) {                                     \
    if constexpr (std::is_same_v<Element, __half>) {                                              \
      JF_WGMMA_RS("f16", N, D, OUTPUTS, P0, P1, P2, P3, P4, P5, P6, P7);                          \
    } else {                                                                                      \
      JF_WGMMA_RS("bf16", N, D, OUTPUTS, P0, P1, P2, P3, P4, P5, P6, P7);                         \
    }                                                                                             \
  }

// The registers of d as operands, and their names in the instruction.
#define JF_O8(i)                                                                              \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
      "+f"(d[i + 6]), "+f"(d[i + 7])
#define JF_O16(i) JF_O8(i), JF_O8(i + 8)
#define JF_O32(i) JF_O16(i), JF_O16(i + 16)
#define JF_D0                        \
  "%0, %1, %2, %3, %4, %5, %6, %7, " \
  "%8, %9, %10, %11, %12, %13, %14, %15"
#define JF_D1                                \
  "%16, %17, %18, %19, %20, %21, %22, %23, " \
  "%24, %25, %26, %27, %28, %29, %30, %31"
#define JF_D2                                \
  "%32, %33, %34, %35, %36, %37, %38, %39, " \
  "%40, %41, %42, %43, %44, %45, %46, %47"
#define JF_D3                                \
  "%48, %49, %50, %51, %52, %53, %54, %55, " \
  "%56, %57, %58, %59, %60, %61, %62, %63"
#define JF_D4                                \
  "%64, %65, %66, %67, %68, %69, %70, %71, " \
  "%72, %73, %74, %75, %76, %77, %78, %79"
#define JF_D5                                \
  "%80, %81, %82, %83, %84, %85, %86, %87, " \
  "%88, %89, %90, %91, %92, %93, %94, %95"

#define JF_D6                                    \
  "%96, %97, %98, %99, %100, %101, %102, %103, " \
  "%104, %105, %106, %107, %108, %109, %110, %111"
#define JF_D7                                        \
  "%112, %113, %114, %115, %116, %117, %118, %119, " \
  "%120, %121, %122, %123, %124, %125, %126, %127"

JF_WGMMA(32, JF_D0, (JF_O16(0)), "%16", "%17", "%18", "%19", "%20", "%21", "%22", "%23")
JF_WGMMA(64, JF_D0 ", " JF_D1, (JF_O32(0)), "%32", "%33", "%34", "%35", "%36", "%37", "%38", "%39")
JF_WGMMA(80, JF_D0 ", " JF_D1 ", %32, %33, %34, %35, %36, %37, %38, %39", (JF_O32(0), JF_O8(32)),
         "%40", "%41", "%42", "%43", "%44", "%45", "%46", "%47")
JF_WGMMA(96, JF_D0 ", " JF_D1 ", " JF_D2, (JF_O32(0), JF_O16(32)), "%48", "%49", "%50", "%51",
         "%52", "%53", "%54", "%55")
JF_WGMMA(112, JF_D0 ", " JF_D1 ", " JF_D2 ", %48, %49, %50, %51, %52, %53, %54, %55",
         (JF_O32(0), JF_O16(32), JF_O8(48)), "%56", "%57", "%58", "%59", "%60", "%61", "%62", "%63")
JF_WGMMA(128, JF_D0 ", " JF_D1 ", " JF_D2 ", " JF_D3, (JF_O32(0), JF_O32(32)), "%64", "%65", "%66",
         "%67", "%68", "%69", "%70", "%71")
JF_WGMMA(192, JF_D0 ", " JF_D1 ", " JF_D2 ", " JF_D3 ", " JF_D4 ", " JF_D5,
         (JF_O32(0), JF_O32(32), JF_O32(64)), "%96", "%97", "%98", "%99", "%100", "%101", "%102",
         "%103")
JF_WGMMA(256, JF_D0 ", " JF_D1 ", " JF_D2 ", " JF_D3 ", " JF_D4 ", " JF_D5 ", " JF_D6 ", " JF_D7,
         (JF_O32(0), JF_O32(32), JF_O32(64), JF_O32(96)), "%128", "%129", "%130", "%131", "%132",
         "%133", "%134", "%135")
#undef JF_D7
#undef JF_D6
#undef JF_D5
#undef JF_D4
#undef JF_D3
#undef JF_D2
#undef JF_D1
#undef JF_D0
#undef JF_O32
#undef JF_O16
#undef JF_O8
#undef JF_WGMMA
#undef JF_WGMMA_RS
#undef JF_WGMMA_SS
#undef JF_LIST

}  // namespace jaxflash::ptx
