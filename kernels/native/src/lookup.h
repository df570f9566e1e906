// Packed indices to the entries of a codebook, for sixteen tokens at a time; knows no norm and no page.
//
// Two ways. In words: a lane holds eight indices and is shifted, and a permutation of a register of entries
// looks up. In bytes, where registers hold 8 floats and permutations over all of them are slow: entries are
// looked up byte by byte, 32 at once, and put together; the lowest of a float's bytes is zero in all of
// them, since entries have 13 bits behind the point (turboquant.py).
#pragma once

#include "vector.h"

namespace banyan {

constexpr int TOGETHER = 16;  // tokens that are decoded at once

typedef uint8_t Bytes __attribute__((vector_size(LANES)));

INLINE void get_bytes(const uint8_t* p, Uints& into) {
  into = __builtin_convertvector(load_as<Bytes>(p), Uints);
}
template <class V>
INLINE void get_bytes(const uint8_t* p, Two<V>& into) {
  get_bytes(p, into.low);
  get_bytes(p + sizeof(V) / 4, into.high);
}
INLINE u16 sixteen_bytes(const uint8_t* p) {
  u16 found;
  get_bytes(p, found);
  return found;
}

// Eight numbers of BITS bits each, the first lowest. What stands above three bytes is the norm that
// follows, or other numbers: it is faster to read it than not.
template <int BITS>
INLINE uint32_t word_at(const uint8_t* p) {
  uint32_t word = 0;
  std::memcpy(&word, p, BITS == 3 ? 4 : BITS);
  return word;
}

#if defined(__AVX512F__)
INLINE void words_of(uint32_t first, uint32_t second, Uints& into) {
  into = (Uints)_mm512_mask_set1_epi32(_mm512_set1_epi32((int)first), 0xff00, (int)second);
}
#else
INLINE void words_of(uint32_t word, Uints& into) { into = Uints{} + word; }
template <class V>
INLINE void words_of(uint32_t word, Two<V>& into) {
  words_of(word, into.low);
  into.high = into.low;
}
// Eight lanes of the first, eight of the second.
template <class V>
INLINE void words_of(uint32_t first, uint32_t second, Two<V>& into) {
  words_of(first, into.low);
  words_of(second, into.high);
}
#endif

// A codebook's 16 entries (one of fewer bits comes again and again), by the lowest bits of an index:
// what stands above them does not matter.
#if defined(__AVX512F__)
typedef v16 Codebook;
template <int BITS>
INLINE void choose(const Codebook& book, const Uints& index, Floats& into) {
  into = (Floats)_mm512_permutexvar_ps((__m512i)index, (__m512)book);
}
#elif defined(__AVX2__)
typedef v16 Codebook;
template <int BITS>
INLINE void choose(const Codebook& book, const Uints& index, Floats& into) {
  const __m256 low = _mm256_permutevar8x32_ps((__m256)book.low, (__m256i)index);
  if constexpr (BITS < 4) {
    into = (Floats)low;
  } else {
    const __m256 high = _mm256_permutevar8x32_ps((__m256)book.high, (__m256i)index);
    into = (Floats)_mm256_blendv_ps(low, high, (__m256)(index << 28));
  }
}
#else
struct Codebook {
  float at[16];
};
template <int BITS>
INLINE void choose(const Codebook& book, const Uints& index, Floats& into) {
  for (int i = 0; i < LANES; i++) into[i] = book.at[index[i] & 15];
}
#endif
template <int BITS, class V, class W>
INLINE void choose(const Codebook& book, const Two<V>& index, Two<W>& into) {
  choose<BITS>(book, index.low, into.low);
  choose<BITS>(book, index.high, into.high);
}
template <int BITS>
INLINE v16 chosen(const Codebook& book, const u16& index) {
  v16 found;
  choose<BITS>(book, index, found);
  return found;
}

#if defined(__AVX2__) && !defined(__AVX512F__)
struct ByteBook {
  __m256i second, third, highest;  // bytes of 16 floats, in both halves

  explicit ByteBook(const float* entries) {
    const __m128i side_by_side = _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    __m128i four[4];
    for (int i = 0; i < 4; i++)
      four[i] = _mm_shuffle_epi8(_mm_loadu_si128((const __m128i*)entries + i), side_by_side);
    const __m128i a = _mm_unpacklo_epi32(four[0], four[1]), b = _mm_unpacklo_epi32(four[2], four[3]);
    const __m128i c = _mm_unpackhi_epi32(four[0], four[1]), d = _mm_unpackhi_epi32(four[2], four[3]);
    second = _mm256_broadcastsi128_si256(_mm_unpackhi_epi64(a, b));
    third = _mm256_broadcastsi128_si256(_mm_unpacklo_epi64(c, d));
    highest = _mm256_broadcastsi128_si256(_mm_unpackhi_epi64(c, d));
  }

  // Of 32 indices: in each half of `indices` the first four bytes make the same half of one.low, the next
  // four of one.high, then of two.
  INLINE void look_up(__m256i indices, v16& one, v16& two) const {
    const __m256i a = _mm256_shuffle_epi8(second, indices), b = _mm256_shuffle_epi8(third, indices);
    const __m256i c = _mm256_shuffle_epi8(highest, indices), zero = _mm256_setzero_si256();
    const __m256i below = _mm256_unpacklo_epi8(zero, a), above = _mm256_unpacklo_epi8(b, c);
    one.low = (Floats)_mm256_unpacklo_epi16(below, above);
    one.high = (Floats)_mm256_unpackhi_epi16(below, above);
    const __m256i later_below = _mm256_unpackhi_epi8(zero, a), later_above = _mm256_unpackhi_epi8(b, c);
    two.low = (Floats)_mm256_unpacklo_epi16(later_below, later_above);
    two.high = (Floats)_mm256_unpackhi_epi16(later_below, later_above);
  }
};

INLINE __m256i twice(const uint8_t* p) { return _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)p)); }
#endif

// --- keys: [bytes][stride] -> tile [dim][16]; returns the sums of squares, by token -----------------

template <int BITS>
inline v16 key_words(const float* centroids, const uint8_t* keys, int stride, int dim, float* tile) {
  Codebook book;
  std::memcpy(&book, centroids, sizeof book);
  v16 squares = {}, odd = {};
  for (int d = 0; d < dim; d += 8, keys += (size_t)BITS * stride) {
    u16 word = sixteen_bytes(keys);
    for (int b = 1; b < BITS; b++) word = word ^ (sixteen_bytes(keys + (size_t)b * stride) << (8 * b));
    for (int i = 0; i < 8; i += 2, tile += 2 * TOGETHER) {
      const v16 one = chosen<BITS>(book, word >> (BITS * i)), two = chosen<BITS>(book, word >> (BITS * (i + 1)));
      store(tile, one);
      store(tile + TOGETHER, two);
      squares = fma(one, one, squares);
      odd = fma(two, two, odd);
    }
  }
  return squares + odd;
}

#if defined(__AVX2__) && !defined(__AVX512F__)
// Two numbers of each token at once: the first in the lower eight bytes of each half, then the second.
struct KeyPairs {
  const ByteBook book;
  float* tile;
  v16 squares = {}, odd = {};

  // A byte of sixteen tokens, in both places.
  static INLINE __m256i bytes_at(const uint8_t* keys) {
    const __m256i order = _mm256_setr_epi8(0, 1, 2, 3, 8, 9, 10, 11, 0, 1, 2, 3, 8, 9, 10, 11,  //
                                           4, 5, 6, 7, 12, 13, 14, 15, 4, 5, 6, 7, 12, 13, 14, 15);
    return _mm256_shuffle_epi8(twice(keys), order);
  }
  // Shifted right, by a count for the first number and one for the second, and masked likewise.
  static INLINE __m256i part(__m256i bytes, int one, int two, int one_mask, int two_mask) {
    const int64_t ones = 0x0101010101010101;
    const __m256i masks = _mm256_setr_epi64x(ones * one_mask, ones * two_mask, ones * one_mask, ones * two_mask);
    return _mm256_and_si256(_mm256_srlv_epi64(bytes, _mm256_setr_epi64x(one, two, one, two)), masks);
  }
  static INLINE __m256i left(__m256i bytes, int count, int one_mask, int two_mask) {
    return part(_mm256_slli_epi64(bytes, count), 0, 0, one_mask, two_mask);
  }
  INLINE void put(__m256i indices) {
    v16 one, two;
    book.look_up(indices, one, two);
    store(tile, one);
    store(tile + TOGETHER, two);
    squares = fma(one, one, squares);
    odd = fma(two, two, odd);
    tile += 2 * TOGETHER;
  }
};

template <int BITS>
inline v16 key_bytes(const float* centroids, const uint8_t* keys, int stride, int dim, float* tile) {
  KeyPairs pairs{ByteBook(centroids), tile};
  if constexpr (BITS == 3) {
    for (int d = 0; d < dim; d += 8, keys += 3 * (size_t)stride) {
      const __m256i a = pairs.bytes_at(keys), b = pairs.bytes_at(keys + stride);
      const __m256i c = pairs.bytes_at(keys + 2 * (size_t)stride);
      pairs.put(pairs.part(a, 0, 3, 7, 7));
      const __m256i whole = _mm256_or_si256(pairs.part(a, 6, 0, 3, 0), pairs.part(b, 0, 1, 0, 7));
      pairs.put(_mm256_or_si256(whole, pairs.left(b, 2, 4, 0)));
      pairs.put(_mm256_or_si256(pairs.part(b, 4, 7, 7, 1), pairs.left(c, 1, 0, 6)));
      pairs.put(pairs.part(c, 2, 5, 7, 7));
    }
  } else {
    constexpr int MASK = (1 << BITS) - 1;
    for (int d = 0; d < dim; d += 8 / BITS, keys += stride) {
      const __m256i bytes = pairs.bytes_at(keys);
      for (int i = 0; i < 8; i += 2 * BITS) pairs.put(pairs.part(bytes, i, i + BITS, MASK, MASK));
    }
  }
  return pairs.squares + pairs.odd;
}
#endif

template <int BITS>
inline v16 key_entries(const float* centroids, const uint8_t* keys, int stride, int dim, float* tile) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  return key_bytes<BITS>(centroids, keys, stride, dim, tile);
#else
  return key_words<BITS>(centroids, keys, stride, dim, tile);
#endif
}

// --- values: a token's bytes -> row [dim]; returns the sums of squares, in parts --------------------

template <int BITS>
struct ValueEntries {
  Codebook book;
  u16 shifts;

  explicit ValueEntries(const float* centroids) {
    static constexpr uint32_t SHIFTS[] = {0,        BITS,     2 * BITS, 3 * BITS, 4 * BITS, 5 * BITS,
                                          6 * BITS, 7 * BITS, 0,        BITS,     2 * BITS, 3 * BITS,
                                          4 * BITS, 5 * BITS, 6 * BITS, 7 * BITS};
    std::memcpy(&book, centroids, sizeof book);
    shifts = load_as<u16>(SHIFTS);
  }

  INLINE v16 decode(const uint8_t* values, int dim, float* row) const {
    v16 squares = {};
    for (int d = 0; d < dim; d += 16, values += 2 * BITS) {
      u16 words;
      words_of(word_at<BITS>(values), word_at<BITS>(values + BITS), words);
      const v16 found = chosen<BITS>(book, words >> shifts);
      store(row + d, found);
      squares = fma(found, found, squares);
    }
    return squares;
  }
};

#if defined(__AVX2__) && !defined(__AVX512F__)
template <>
struct ValueEntries<4> {
  ByteBook book;

  explicit ValueEntries(const float* centroids) : book(centroids) {}

  INLINE v16 decode(const uint8_t* values, int dim, float* row) const {
    const __m256i order = _mm256_setr_epi8(0, 0, 1, 1, 4, 4, 5, 5, 8, 8, 9, 9, 12, 12, 13, 13,  //
                                           2, 2, 3, 3, 6, 6, 7, 7, 10, 10, 11, 11, 14, 14, 15, 15);
    v16 squares = {}, odd = {};
    for (int d = 0; d < dim; d += 32, values += 16) {
      const __m256i bytes = _mm256_shuffle_epi8(twice(values), order);
      const __m256i low = _mm256_and_si256(bytes, _mm256_set1_epi16(0x000f));
      const __m256i high = _mm256_and_si256(_mm256_srli_epi16(bytes, 4), _mm256_set1_epi16(0x0f00));
      v16 one, two;
      book.look_up(_mm256_or_si256(low, high), one, two);
      store(row + d, one);
      store(row + d + 16, two);
      squares = fma(one, one, squares);
      odd = fma(two, two, odd);
    }
    return squares + odd;
  }
};
#endif

}  // namespace banyan
