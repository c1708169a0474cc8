// How a recorded step calls an operation: every argument is one word (docs/decisions/0010-recorded-steps.md).
#pragma once

#include <cstdint>
#include <type_traits>
#include <utility>

namespace outrider {

union Word {
  void* pointer;
  std::int64_t integer;
  float real;
};
static_assert(sizeof(Word) == 8, "the Python side writes words of eight bytes");

using OpFunction = void (*)(const Word* arguments);

template <class T>
inline T argument(Word word) {
  if constexpr (std::is_pointer_v<T>) {
    return static_cast<T>(word.pointer);
  } else if constexpr (std::is_floating_point_v<T>) {
    static_assert(std::is_same_v<T, float>, "real arguments are float");
    return word.real;
  } else {
    static_assert(std::is_same_v<T, std::int64_t>, "counts are int64");
    return word.integer;
  }
}

template <class R, class... T, std::size_t... I>
inline void call_with_words(R (*function)(T...), const Word* words, std::index_sequence<I...>) {
  static_assert(std::is_void_v<R>, "what a recorded operation returns is lost");
  function(argument<T>(words[I])...);
}

template <class R, class... T>
inline void call_with_words(R (*function)(T...), const Word* words) {
  call_with_words(function, words, std::index_sequence_for<T...>{});
}

}  // namespace outrider

// Behind the definition of an operation: lets recorded steps call it.
#define OUTRIDER_OP(name)                                              \
  OUTRIDER_API void outrider_op_##name(const outrider::Word* words) {  \
    outrider::call_with_words(&outrider_##name, words);                \
  }
