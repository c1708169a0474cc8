// What every native operation shares: the export mark, plain types and rounding of scalars.
//
// Rules (docs/concepts/exactness.md): the bits of a row depend on that row and on weights only. So every output
// element has one sequence of operations, whatever the number of rows, threads and the position in the call;
// threads split outputs, never a sum. Compiled with -ffp-contract=off: a fused multiply-add is written as one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#define OUTRIDER_API extern "C" __attribute__((visibility("default")))

#include "program.h"

// In front of a loop with a small constant count whose body must end up in registers.
#if defined(__clang__)
#define OUTRIDER_UNROLL _Pragma("unroll")
#else
#define OUTRIDER_UNROLL _Pragma("GCC unroll 32")
#endif

namespace outrider {

// A bfloat16 value as its bits.
using bf16 = std::uint16_t;

inline float to_float(bf16 value) {
  std::uint32_t bits = static_cast<std::uint32_t>(value) << 16;
  float result;
  std::memcpy(&result, &bits, sizeof result);
  return result;
}

// Round to nearest, ties to even; a NaN stays a NaN (quiet).
inline bf16 to_bf16(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<bf16>((bits >> 16) | 0x40u);
  return static_cast<bf16>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

// Bytes of memory on their way to the second nearest cache, without waiting. Not _mm_prefetch: to the compiler that has
// no effect, so it drops calls of a function that does nothing else.
inline void prefetch(const void* data, std::int64_t bytes) {
  for (std::int64_t i = 0; i < bytes; i += 64) {
    asm volatile("prefetcht1 %0" : : "m"(*(static_cast<const char*>(data) + i)));
  }
}

inline std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }
inline std::int64_t min64(std::int64_t a, std::int64_t b) { return a < b ? a : b; }
inline std::int64_t max64(std::int64_t a, std::int64_t b) { return a > b ? a : b; }

}  // namespace outrider
