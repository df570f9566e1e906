// Vectors of a codec, decoded sixteen tokens at a time; knows no block and no sequence.
//
// Sixteen tokens of one head: keys are [bytes][stride], one byte of sixteen tokens side by side, so that
// a register takes the same number of each; values are [16][bytes]. Decoded they are floats, keys
// [dim][16] and values [16][dim], in the codec's own basis, and each token still lacks a factor. That is
// left for its score and its weight: one product a token in place of one a number.
// What the bytes say is kernels/codecs' (fp8.py, turboquant.py, packing.py).
#pragma once

#include <cmath>

#include "banyan_native.h"
#include "vector.h"

namespace banyan {

constexpr int TOGETHER = 16;      // tokens that are decoded at once
constexpr int DIM_MAX = 256;      // of a head
constexpr float E4M3_UNIT = 256;  // what from_e4m3 leaves out

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

// --- small floats ----------------------------------------------------------------------------------

#if defined(__AVX512F__)
INLINE v16 from_halves(__m256i half) { return (v16)_mm512_cvtph_ps(half); }
#elif defined(__AVX2__)
INLINE v16 from_halves(__m256i half) {
  return {(Floats)_mm256_cvtph_ps(_mm256_castsi256_si128(half)),
          (Floats)_mm256_cvtph_ps(_mm256_extracti128_si256(half, 1))};
}
#endif

#if defined(__AVX2__)
// Sixteen numbers of fp16.
INLINE v16 from_fp16(const uint16_t* p) { return from_halves(_mm256_loadu_si256((const __m256i*)p)); }

// Sixteen numbers of e4m3, divided by 2^8: read as fp16, whose exponents count from 15 and not from 7.
INLINE v16 from_e4m3(const uint8_t* p) {
  const __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p));
  const __m256i ones = _mm256_set1_epi16(0x7f);
  const __m256i nan = _mm256_cmpeq_epi16(_mm256_and_si256(wide, ones), ones);
  const __m256i moved = _mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16((int16_t)0xbfff));
  return from_halves(_mm256_or_si256(moved, nan));
}
#else
INLINE void get_words(const uint16_t* p, Uints& into) {
  into = __builtin_convertvector(load_as<Halves>(p), Uints);
}
template <class V>
INLINE void get_words(const uint16_t* p, Two<V>& into) {
  get_words(p, into.low);
  get_words(p + sizeof(V) / 4, into.high);
}

// Numbers without a sign, of MANTISSA bits behind the point and exponents that count from 15: below
// 2^MANTISSA they are multiples of the least one, which 2^-14 more makes normal for a moment.
template <int MANTISSA>
INLINE v16 from_magnitude(const u16& magnitude) {
  const u16 moved = magnitude << (23 - MANTISSA);
  const v16 normal = floats(moved + (112u << 23)), small = floats(moved + (113u << 23)) - splat(0x1p-14f);
  return select(magnitude < (1u << MANTISSA), small, normal);
}

INLINE v16 from_fp16(const uint16_t* p) {
  u16 bits;
  get_words(p, bits);
  const u16 magnitude = bits & 0x7fffu, moved = magnitude << 13;
  const v16 found = select(magnitude > 0x7bffu, floats(moved ^ 0x70000000u), from_magnitude<10>(magnitude));
  return floats(uints(found) ^ ((bits & 0x8000u) << 16));
}

INLINE v16 from_e4m3(const uint8_t* p) {
  const u16 bits = sixteen_bytes(p), magnitude = bits & 0x7fu;
  const v16 found = select(magnitude > 0x7eu, splat(__builtin_nanf("")), from_magnitude<3>(magnitude));
  return floats(uints(found) ^ ((bits & 0x80u) << 24));
}
#endif

// --- indices of a codebook -------------------------------------------------------------------------

// Eight numbers of BITS bits each, the first lowest.
template <int BITS>
INLINE uint32_t word_at(const uint8_t* p) {
  uint32_t word = 0;
  std::memcpy(&word, p, BITS);
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

// norm / sqrt(squares), token by token: what makes of a codeword the vector of that norm.
INLINE v16 stretch(const uint16_t* norms, const float* squares) {
  float lengths[TOGETHER];
  for (int t = 0; t < TOGETHER; t++) lengths[t] = std::sqrt(squares[t]);
  return from_fp16(norms) / load(lengths);
}

// --- the ways to decode ----------------------------------------------------------------------------

// `tile` is written, and `factor`, by token. `stride`: from one byte of keys to the next.
typedef void (*DecodeKeys)(const BanyanVectors& how, const uint8_t* keys, int stride, int head, int dim,
                           float* tile, v16& factor);
typedef void (*DecodeValues)(const BanyanVectors& how, const uint8_t* values, int head, int dim, float* tile,
                             v16& factor);

inline void fp8_keys(const BanyanVectors& how, const uint8_t* keys, int stride, int head, int dim, float* tile,
                     v16& factor) {
  for (int d = 0; d < dim; d++) store(tile + d * TOGETHER, from_e4m3(keys + (size_t)d * stride));
  factor = splat(how.scales[head] * E4M3_UNIT);
}

inline void fp8_values(const BanyanVectors& how, const uint8_t* values, int head, int dim, float* tile,
                       v16& factor) {
  for (int k = 0; k < TOGETHER * dim; k += 16) store(tile + k, from_e4m3(values + k));
  factor = splat(how.scales[head] * E4M3_UNIT);
}

template <int BITS>
inline void turbo_keys(const BanyanVectors& how, const uint8_t* keys, int stride, int, int dim, float* tile,
                       v16& factor) {
  Codebook book;
  std::memcpy(&book, how.centroids, sizeof book);
  v16 squares = {};
  for (int d = 0; d < dim; d += 8) {
    u16 word = sixteen_bytes(keys);
    for (int b = 1; b < BITS; b++) word = word ^ (sixteen_bytes(keys + (size_t)b * stride) << (8 * b));
    keys += (size_t)BITS * stride;
    for (int i = 0; i < 8; i++, tile += TOGETHER) {
      const v16 found = chosen<BITS>(book, word >> (BITS * i));
      store(tile, found);
      squares = fma(found, found, squares);
    }
  }
  uint16_t norms[TOGETHER];
  float sums[TOGETHER];
  for (int t = 0; t < TOGETHER; t++) norms[t] = (uint16_t)(keys[t] | keys[stride + t] << 8);
  store(sums, squares);
  factor = stretch(norms, sums);
}

template <int BITS>
inline void turbo_values(const BanyanVectors& how, const uint8_t* values, int, int dim, float* tile,
                         v16& factor) {
  static constexpr uint32_t SHIFTS[] = {0,        BITS,     2 * BITS, 3 * BITS, 4 * BITS, 5 * BITS,
                                        6 * BITS, 7 * BITS, 0,        BITS,     2 * BITS, 3 * BITS,
                                        4 * BITS, 5 * BITS, 6 * BITS, 7 * BITS};
  Codebook book;
  std::memcpy(&book, how.centroids, sizeof book);
  const u16 shifts = load_as<u16>(SHIFTS);
  uint16_t norms[TOGETHER];
  float sums[TOGETHER];
  for (int t = 0; t < TOGETHER; t++, tile += dim) {
    v16 squares = {};
    for (int d = 0; d < dim; d += 16, values += 2 * BITS) {
      u16 words;
      words_of(word_at<BITS>(values), word_at<BITS>(values + BITS), words);
      const v16 found = chosen<BITS>(book, words >> shifts);
      store(tile + d, found);
      squares = fma(found, found, squares);
    }
    sums[t] = sum(squares);
    std::memcpy(&norms[t], values, sizeof norms[t]);
    values += sizeof norms[t];
  }
  factor = stretch(norms, sums);
}

constexpr int FP8_BITS = 8;

inline DecodeKeys key_decoder(int bits) {
  constexpr DecodeKeys TURBO[] = {turbo_keys<1>, turbo_keys<2>, turbo_keys<3>, turbo_keys<4>};
  return bits == FP8_BITS ? fp8_keys : TURBO[bits - 1];
}

inline DecodeValues value_decoder(int bits) {
  constexpr DecodeValues TURBO[] = {turbo_values<1>, turbo_values<2>, turbo_values<3>, turbo_values<4>};
  return bits == FP8_BITS ? fp8_values : TURBO[bits - 1];
}

}  // namespace banyan
