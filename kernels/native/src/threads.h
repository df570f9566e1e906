// A few threads that run one function together and meet at barriers; they sleep between steps.
#pragma once

#include <sched.h>

#include <atomic>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#define BANYAN_PAUSE() _mm_pause()
#else
#define BANYAN_PAUSE() sched_yield()
#endif

namespace banyan {

// Waiting spins for about as long as a phase takes, then gives the core away: beside a busy
// neighbour a spinning thread would hold up the one it waits for.
constexpr int SPINS = 200;
// Between two steps a worker spins for so long before it sleeps: waking costs tens of microseconds.
constexpr int SPINS_IDLE = 2000;

// Of a count of equal things: one thread's part.
struct Share {
  int first, last;
};

inline Share share(int count, int parts, int part) {
  return {(int)((int64_t)count * part / parts), (int)((int64_t)count * (part + 1) / parts)};
}

class Barrier {
 public:
  explicit Barrier(int parties) : parties_(parties) {}

  void wait() {
    if (parties_ == 1) return;
    const int phase = phase_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == parties_) {
      arrived_.store(0, std::memory_order_relaxed);
      phase_.store(phase + 1, std::memory_order_release);
      return;
    }
    for (int spins = 0; phase_.load(std::memory_order_acquire) == phase; spins++) {
      if (spins < SPINS)
        BANYAN_PAUSE();
      else
        sched_yield();
    }
  }

 private:
  const int parties_;
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<int> phase_{0};
};

class Team {
 public:
  explicit Team(int size) : size_(size), barrier(size) {
    for (int i = 1; i < size; i++) threads_.emplace_back([this, i] { work(i); });
  }

  ~Team() {
    stopping_.store(true);
    generation_.fetch_add(1);
    generation_.notify_all();
    for (auto& thread : threads_) thread.join();
  }

  int size() const { return size_; }

  // Runs body(context, thread) on every thread, the caller's as number 0; returns when all are done.
  void run(void (*body)(void*, int), void* context) {
    body_ = body;
    context_ = context;
    generation_.fetch_add(1, std::memory_order_release);
    generation_.notify_all();
    body(context, 0);
    barrier.wait();
  }

 private:
  void work(int number) {
    uint32_t seen = 0;
    for (;;) {
      for (int spins = 0; generation_.load(std::memory_order_acquire) == seen; spins++) {
        if (spins < SPINS_IDLE)
          BANYAN_PAUSE();
        else
          generation_.wait(seen, std::memory_order_acquire);
      }
      seen++;
      if (stopping_.load()) return;
      body_(context_, number);
      barrier.wait();
    }
  }

  const int size_;
  void (*body_)(void*, int) = nullptr;
  void* context_ = nullptr;
  std::atomic<uint32_t> generation_{0};
  std::atomic<bool> stopping_{false};
  std::vector<std::thread> threads_;

 public:
  Barrier barrier;
};

}  // namespace banyan
