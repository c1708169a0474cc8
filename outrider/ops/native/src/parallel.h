// Work split over persistent threads. A part is claimed by whoever comes first, the caller included, so a worker
// that the system does not run delays nobody: the caller then does all parts. Workers look for work for a few
// microseconds and then sleep. Which thread does a part must not change its result.
#pragma once

#include <type_traits>

#include "common.h"

namespace outrider {

using PartFunction = void (*)(void* context, int part);

// Run parts 0..num_parts-1 on up to num_threads threads (the caller is one), return when all are done.
// With one thread or one part, or while another thread uses the pool, the caller runs them in order.
void run_parts(int num_threads, int num_parts, PartFunction function, void* context);

// body(part) for every part; see run_parts.
template <class Body>
void parallel_parts(int num_threads, int num_parts, Body&& body) {
  if (num_threads <= 1 || num_parts <= 1) {
    for (int part = 0; part < num_parts; ++part) body(part);
    return;
  }
  run_parts(
      num_threads, num_parts, [](void* context, int part) { (*static_cast<std::remove_reference_t<Body>*>(context))(part); },
      const_cast<void*>(static_cast<const void*>(&body)));
}

// body(begin, end) over 0..count in runs whose bounds are multiples of grain; one call when work (an estimate in
// multiply-adds or bytes of the whole) is below MIN_PARALLEL_WORK: to wake a sleeping worker takes as long as that.
constexpr std::int64_t MIN_PARALLEL_WORK = 1 << 18;
constexpr int PARTS_PER_THREAD = 2;

template <class Body>
void parallel_ranges(int num_threads, std::int64_t count, std::int64_t grain, std::int64_t work, Body&& body) {
  std::int64_t num_grains = ceil_div(count, grain);
  if (num_threads <= 1 || num_grains <= 1 || work < MIN_PARALLEL_WORK) {
    if (count > 0) body(std::int64_t{0}, count);
    return;
  }
  int num_parts = static_cast<int>(min64(num_grains, static_cast<std::int64_t>(num_threads) * PARTS_PER_THREAD));
  auto part_body = [&](int part) {
    std::int64_t begin = num_grains * part / num_parts * grain;
    std::int64_t end = min64(num_grains * (part + 1) / num_parts * grain, count);
    if (begin < end) body(begin, end);
  };
  parallel_parts(num_threads, num_parts, part_body);
}

}  // namespace outrider
