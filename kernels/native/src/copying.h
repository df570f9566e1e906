// A copy past the caches, for memory that nobody reads soon. A plain one first reads the lines that it
// is about to write over, and pushes out of the caches what is used.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace banyan {

inline void copy_streaming(char* to, const char* from, int64_t bytes) {
#if defined(__SSE2__)
  constexpr int64_t LINE = 64;
  if ((uintptr_t)to % LINE == 0) {
    const int64_t whole = bytes / LINE * LINE;
    for (int64_t i = 0; i < whole; i += LINE) {
      const __m128i a = _mm_loadu_si128((const __m128i*)(from + i));
      const __m128i b = _mm_loadu_si128((const __m128i*)(from + i + 16));
      const __m128i c = _mm_loadu_si128((const __m128i*)(from + i + 32));
      const __m128i d = _mm_loadu_si128((const __m128i*)(from + i + 48));
      _mm_stream_si128((__m128i*)(to + i), a);
      _mm_stream_si128((__m128i*)(to + i + 16), b);
      _mm_stream_si128((__m128i*)(to + i + 32), c);
      _mm_stream_si128((__m128i*)(to + i + 48), d);
    }
    _mm_sfence();  // before anybody is told that the bytes are there
    to += whole, from += whole, bytes -= whole;
  }
#endif
  std::memcpy(to, from, (size_t)bytes);
}

}  // namespace banyan
