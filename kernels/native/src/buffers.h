// Memory that steps reuse, and how their threads treat tiny numbers.
#pragma once

#include <cstdlib>
#include <cstring>
#include <new>

#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

namespace banyan {

// Memory that only grows; 64-byte aligned, zeroed when it grows.
template <class T>
class Buffer {
 public:
  Buffer() = default;
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { std::free(data_); }

  void reserve(size_t count) {
    if (count <= size_) return;
    const size_t bytes = (count * sizeof(T) + 63) / 64 * 64;
    void* fresh = std::aligned_alloc(64, bytes);
    if (fresh == nullptr) throw std::bad_alloc();
    std::memset(fresh, 0, bytes);
    std::free(data_);
    data_ = static_cast<T*>(fresh);
    size_ = count;
  }
  T* get() const { return data_; }

 private:
  T* data_ = nullptr;
  size_t size_ = 0;
};

// Numbers below the least normal one count as zero while it lives: they would take a hundred times as
// long, and the products of bf16 pairs and of tiles never have them.
class FlushDenormals {
 public:
#if defined(__SSE2__)
  FlushDenormals() : before_(_mm_getcsr()) { _mm_setcsr(before_ | 0x8040); }
  ~FlushDenormals() { _mm_setcsr(before_); }

 private:
  const unsigned before_;
#endif
};

// They count while it lives, inside FlushDenormals.
class KeepDenormals {
 public:
#if defined(__SSE2__)
  KeepDenormals() : before_(_mm_getcsr()) { _mm_setcsr(before_ & ~0x8040u); }
  ~KeepDenormals() { _mm_setcsr(before_); }

 private:
  const unsigned before_;
#else
  KeepDenormals() {}
#endif
};

}  // namespace banyan
