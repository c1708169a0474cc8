// Runs the recorded operations of a step, one after the other.
#include <chrono>

#include "common.h"

namespace outrider {
namespace {

struct Op {
  OpFunction run;
  const Word* arguments;
};

// An argument that points into a result of the program, which lies elsewhere in every run.
struct Patch {
  Word* argument;
  std::int64_t result, offset;  // which one, and the byte of it
};

std::int64_t nanoseconds() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

}  // namespace

// What the Python side lays out once per program.
struct Program {
  const Op* ops;
  std::int64_t num_ops;
  const Patch* patches;
  std::int64_t num_patches;
};

// results: the address of each. times: null, or num_ops numbers that get the nanoseconds of each operation.
OUTRIDER_API void outrider_program_run(const Program* program, char* const* results, std::int64_t* times) {
  for (std::int64_t i = 0; i < program->num_patches; ++i) {
    const Patch& patch = program->patches[i];
    patch.argument->pointer = results[patch.result] + patch.offset;
  }
  if (times == nullptr) {
    for (std::int64_t i = 0; i < program->num_ops; ++i) program->ops[i].run(program->ops[i].arguments);
    return;
  }
  std::int64_t before = nanoseconds();
  for (std::int64_t i = 0; i < program->num_ops; ++i) {
    program->ops[i].run(program->ops[i].arguments);
    std::int64_t now = nanoseconds();
    times[i] = now - before;
    before = now;
  }
}

}  // namespace outrider
