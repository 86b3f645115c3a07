// Threads that take every step together.
//
// All run the same function; `barrier` keeps them in step. A barrier spins a little and then yields:
// a thread that slept in the kernel instead would come back late some 300 times a step.
#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include <immintrin.h>
#include <sched.h>

namespace shoal {

class Team {
 public:
  explicit Team(int size) : size_(size) {
    for (int rank = 1; rank < size; rank++)
      threads_.emplace_back([this, rank] { serve(rank); });
  }

  ~Team() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stopping_ = true;
    }
    wake_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  int size() const { return size_; }

  // Calls `work(rank)` on every thread, the caller's included, and returns when all are done.
  void run(const std::function<void(int)>& work) {
    if (size_ > 1) {
      {
        std::lock_guard<std::mutex> lock(mutex_);
        work_ = &work;
        turn_++;
      }
      wake_.notify_all();
    }
    work(0);
    barrier();
  }

  void barrier() {
    if (size_ == 1) return;
    const uint32_t round = round_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) == size_ - 1) {
      arrived_.store(0, std::memory_order_relaxed);
      round_.store(round + 1, std::memory_order_release);
      return;
    }
    for (int spins = 0; round_.load(std::memory_order_acquire) == round; spins++) {
      if (spins < SPINS)
        _mm_pause();
      else
        sched_yield();
    }
  }

 private:
  static constexpr int SPINS = 2000;  // some tens of microseconds; a phase lasts about as long

  void serve(int rank) {
    uint64_t seen = 0;
    while (true) {
      const std::function<void(int)>* work;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        wake_.wait(lock, [&] { return stopping_ || turn_ != seen; });
        if (stopping_) return;
        seen = turn_;
        work = work_;
      }
      (*work)(rank);
      barrier();
    }
  }

  const int size_;
  std::vector<std::thread> threads_;
  std::mutex mutex_;
  std::condition_variable wake_;
  const std::function<void(int)>* work_ = nullptr;
  uint64_t turn_ = 0;
  bool stopping_ = false;
  std::atomic<int> arrived_{0};
  std::atomic<uint32_t> round_{0};
};

// The parts of one phase. Each thread begins with a stretch of its own, which the hardware can read
// ahead, and helps the others when it is done with it.
class Parts {
 public:
  void share(int count, int threads) {
    threads_ = threads;
    for (int t = 0; t < threads; t++) {
      next_[t].value.store(int64_t(count) * t / threads, std::memory_order_relaxed);
      end_[t] = int64_t(count) * (t + 1) / threads;
    }
  }

  // The next part for `rank`; -1 when all are taken.
  int take(int rank) {
    for (int i = 0; i < threads_; i++) {
      const int t = (rank + i) % threads_;
      if (next_[t].value.load(std::memory_order_relaxed) >= end_[t]) continue;
      const int part = next_[t].value.fetch_add(1, std::memory_order_relaxed);
      if (part < end_[t]) return part;
    }
    return -1;
  }

  static constexpr int THREADS_MAX = 64;

 private:
  struct alignas(64) Counter {
    std::atomic<int> value{0};
  };
  int threads_ = 0;
  Counter next_[THREADS_MAX];
  int end_[THREADS_MAX];
};

}  // namespace shoal
