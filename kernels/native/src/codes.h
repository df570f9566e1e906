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
#include "lookup.h"

namespace banyan {

constexpr int DIM_MAX = 256;      // of a head
constexpr float E4M3_UNIT = 256;  // what from_e4m3 leaves out

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
  float sums[TOGETHER];
  store(sums, key_entries<BITS>(how.centroids, keys, stride, dim, tile));
  keys += (size_t)BITS * (dim / 8) * stride;
  uint16_t norms[TOGETHER];
  for (int t = 0; t < TOGETHER; t++) norms[t] = (uint16_t)(keys[t] | keys[stride + t] << 8);
  factor = stretch(norms, sums);
}

template <int BITS>
inline void turbo_values(const BanyanVectors& how, const uint8_t* values, int, int dim, float* tile,
                         v16& factor) {
  const ValueEntries<BITS> entries(how.centroids);
  uint16_t norms[TOGETHER];
  float sums[TOGETHER];
  for (int t = 0; t < TOGETHER; t++, tile += dim, values += how.bytes) {
    sums[t] = sum(entries.decode(values, dim, tile));
    std::memcpy(&norms[t], values + how.bytes - sizeof norms[t], sizeof norms[t]);
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
