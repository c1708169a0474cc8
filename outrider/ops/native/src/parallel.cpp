#include "parallel.h"

#include <immintrin.h>
#include <pthread.h>

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>

namespace outrider {
namespace {

constexpr int MAX_WORKERS = 255;
constexpr int MAX_PARTS = 0xffff;
constexpr int SPINS = 256;  // pauses of about 10 to 40 ns each

// One job at a time. `claims` says all that a claim needs in one word: the number of the job, how many parts it
// has, the next unclaimed one. A claimed part keeps its job alive, so what the job consists of is read after it.
class Pool {
 public:
  bool try_enter() { return entry_.try_lock(); }
  void leave() { entry_.unlock(); }

  void run(int num_workers, int num_parts, PartFunction function, void* context) {
    start_workers(num_workers);
    function_ = function;
    context_ = context;
    remaining_.store(num_parts, std::memory_order_relaxed);
    job_ = (job_ + 1) & 0xffffffffu;
    claims_.store(job_ << 32 | static_cast<std::uint64_t>(num_parts) << 16, std::memory_order_seq_cst);
    if (sleepers_.load(std::memory_order_seq_cst) > 0) {
      { std::lock_guard<std::mutex> lock(mutex_); }
      wake_.notify_all();
    }
    while (run_one_part()) {
    }
    wait_until_done();
  }

 private:
  static bool has_unclaimed(std::uint64_t claims) { return (claims & 0xffff) < ((claims >> 16) & 0xffff); }

  bool run_one_part() {
    std::uint64_t claims = claims_.load(std::memory_order_acquire);
    while (has_unclaimed(claims)) {
      if (claims_.compare_exchange_weak(claims, claims + 1, std::memory_order_acq_rel)) {
        function_(context_, static_cast<int>(claims & 0xffff));
        if (remaining_.fetch_sub(1, std::memory_order_seq_cst) == 1 && caller_sleeps_.load(std::memory_order_seq_cst)) {
          { std::lock_guard<std::mutex> lock(mutex_); }
          done_.notify_one();
        }
        return true;
      }
    }
    return false;
  }

  void wait_until_done() {
    for (int spin = 0; spin < SPINS; ++spin) {
      if (remaining_.load(std::memory_order_acquire) == 0) return;
      _mm_pause();
    }
    std::unique_lock<std::mutex> lock(mutex_);
    caller_sleeps_.store(true, std::memory_order_seq_cst);
    done_.wait(lock, [this] { return remaining_.load(std::memory_order_seq_cst) == 0; });
    caller_sleeps_.store(false, std::memory_order_relaxed);
  }

  void work() {
    for (;;) {
      while (run_one_part()) {
      }
      bool found = false;
      for (int spin = 0; spin < SPINS && !found; ++spin) {
        _mm_pause();
        found = has_unclaimed(claims_.load(std::memory_order_acquire));
      }
      if (found) continue;
      std::unique_lock<std::mutex> lock(mutex_);
      sleepers_.fetch_add(1, std::memory_order_seq_cst);
      wake_.wait(lock, [this] { return has_unclaimed(claims_.load(std::memory_order_seq_cst)); });
      sleepers_.fetch_sub(1, std::memory_order_seq_cst);
    }
  }

  void start_workers(int wanted) {
    for (wanted = wanted > MAX_WORKERS ? MAX_WORKERS : wanted; num_workers_ < wanted; ++num_workers_) {
      std::thread([this] { work(); }).detach();
    }
  }

  std::mutex entry_, mutex_;
  std::condition_variable wake_, done_;
  std::atomic<std::uint64_t> claims_{0};
  std::atomic<int> remaining_{0}, sleepers_{0};
  std::atomic<bool> caller_sleeps_{false};
  PartFunction function_ = nullptr;
  void* context_ = nullptr;
  std::uint64_t job_ = 0;
  int num_workers_ = 0;
};

// Never destroyed: its detached workers may outlive static objects. A forked child has no workers and gets a new one.
std::atomic<Pool*> current_pool{nullptr};

Pool& pool() {
  static bool watched = [] {
    current_pool.store(new Pool);
    pthread_atfork(nullptr, nullptr, [] { current_pool.store(new Pool); });
    return true;
  }();
  (void)watched;
  return *current_pool.load(std::memory_order_acquire);
}

}  // namespace

void run_parts(int num_threads, int num_parts, PartFunction function, void* context) {
  Pool& shared = pool();
  if (num_parts > MAX_PARTS || !shared.try_enter()) {
    for (int part = 0; part < num_parts; ++part) function(context, part);
    return;
  }
  int num_workers = (num_threads < num_parts ? num_threads : num_parts) - 1;
  shared.run(num_workers, num_parts, function, context);
  shared.leave();
}

}  // namespace outrider
