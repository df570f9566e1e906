// Vectors into a codec's basis and into its codes: byte for byte what kernels/codecs writes (fp8.py,
// turboquant.py, packing.py, hadamard.py); knows no page.
//
// Turned in double: sums of bf16 numbers times 1 or -1 are exact there, in any order. Of other numbers, and
// for widths that are no power of two, another order may move the last bit of 53, and a code only where a
// coordinate lies that near to the border of two codes.
#pragma once

#include <cmath>

#include "banyan_native.h"
#include "buffers.h"
#include "codes.h"

namespace banyan {

constexpr float E4M3_LARGEST = 448, FP16_LARGEST = 65504;
constexpr uint16_t FP16_NAN = 0x7e00;

// --- the codec's basis -----------------------------------------------------------------------------

// x [dim] times the symmetric matrix of hadamard.py: Sylvester's of dim / odd by butterflies, times
// Hartley's of `odd`. Its square is dim times the identity.
template <class T>
void mix(T* x, int dim, int odd, const double* hartley) {
  for (int step = odd; step < dim; step *= 2)
    for (int at = 0; at < dim; at += 2 * step)
      for (int i = at; i < at + step; i++) {
        const T a = x[i], b = x[i + step];
        x[i] = a + b;
        x[i + step] = a - b;
      }
  if (odd == 1) return;
  T mixed[DIM_MAX];
  for (int at = 0; at < dim; at += odd)
    for (int j = 0; j < odd; j++) {
      T total = 0;
      for (int i = 0; i < odd; i++) total += x[at + i] * (T)hartley[i * odd + j];
      mixed[at + j] = total;
    }
  std::memcpy(x, mixed, sizeof(T) * dim);
}

inline bool turns(const BanyanVectors& how) { return how.bits != 0 && how.bits != FP8_BITS; }

// Into the basis of the codes, in place; nothing where that is the model's own.
inline void turn_in(const BanyanVectors& how, float* x, int dim) {
  if (!turns(how)) return;
  const float scale = 1 / std::sqrt((float)dim);
  for (int d = 0; d < dim; d++) x[d] *= how.signs[d] < 0 ? -scale : scale;
  mix(x, dim, how.odd, how.hartley);
}

// And back.
inline void turn_out(const BanyanVectors& how, float* x, int dim) {
  if (!turns(how)) return;
  mix(x, dim, how.odd, how.hartley);
  const float scale = 1 / std::sqrt((float)dim);
  for (int d = 0; d < dim; d++) x[d] *= how.signs[d] < 0 ? -scale : scale;
}

// --- codes -----------------------------------------------------------------------------------------

inline uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}

// To the nearest e4m3, ties to even; beyond the largest the largest. A NaN stays one.
inline uint8_t to_e4m3(float x) {
  const uint32_t bits = bits_of(x), sign = bits >> 31 << 7;
  float size = std::fabs(x);
  if (size != size) return (uint8_t)(sign | 0x7f);
  if (size > E4M3_LARGEST) size = E4M3_LARGEST;
  if (size < 0x1p-6f)  // multiples of 2^-9: as many as steps of a float between 2^14 and 2^15
    return (uint8_t)(sign | (bits_of(size + 0x1p14f) - bits_of(0x1p14f)));
  const uint32_t whole = bits_of(size);
  return (uint8_t)(sign | (((whole + 0x7ffff + (whole >> 20 & 1)) >> 20) - (120 << 3)));
}

// To the nearest fp16, ties to even; x is 0 to FP16_LARGEST.
inline uint16_t to_fp16(float x) {
  if (x < 0x1p-14f) return (uint16_t)(bits_of(x + 0.5f) - bits_of(0.5f));  // multiples of 2^-24
  const uint32_t bits = bits_of(x);
  return (uint16_t)(((bits + 0xfff + (bits >> 13 & 1)) >> 13) - (112 << 10));
}

// The number of boundaries below x: the index of the nearest centroid.
inline i16 nearest(const float* boundaries, int count, const v16& x) {
  i16 found = {};
  for (int b = 0; b < count; b++) found = found - (x > splat(boundaries[b]));
  return found;
}

INLINE void put_bytes(uint8_t* p, const Ints& x) {
  const Bytes bytes = __builtin_convertvector(x, Bytes);
  std::memcpy(p, &bytes, sizeof bytes);
}
template <class V>
INLINE void put_bytes(uint8_t* p, const Two<V>& x) {
  put_bytes(p, x.low);
  put_bytes(p + sizeof(V) / 4, x.high);
}

// Eight indices, a byte each, side by side in `bits` bits each; what stands above them means nothing.
inline uint64_t side_by_side(uint64_t eight, int bits) {
  const uint64_t two = (eight | eight >> (8 - bits)) & 0x0001000100010001 * ((1ull << 2 * bits) - 1);
  const uint64_t four = (two | two >> (16 - 2 * bits)) & 0x0000000100000001 * ((1ull << 4 * bits) - 1);
  return four | four >> (32 - 4 * bits);
}

// `x` [dim], turned, in units of its root mean square -> indices packed into `code`.
inline void put_indices(const BanyanVectors& how, const float* x, int dim, uint8_t* code, int stride) {
  const int boundaries = (1 << how.bits) - 1;
  for (int d = 0; d < dim; d += 16) {
    uint8_t indices[16];
    put_bytes(indices, nearest(how.boundaries, boundaries, load(x + d)));
    for (int half = 0; half < 16; half += 8) {
      uint64_t eight;
      std::memcpy(&eight, indices + half, sizeof eight);
      const uint64_t word = side_by_side(eight, how.bits);
      for (int b = 0; b < how.bits; b++, code += stride) *code = (uint8_t)(word >> 8 * b);
    }
  }
}

template <class E>
void put_turbo(const BanyanVectors& how, const E* from, int dim, uint8_t* code, int stride) {
  double x[DIM_MAX], squares = 0;
  for (int d = 0; d < dim; d++) {
    const double number = to_float(from[d]);
    squares += number * number;
    x[d] = how.signs[d] * number;
  }
  const double length = std::sqrt(squares);
  const float single = (float)length;
  const bool finite = single - single == 0;
  const uint16_t norm = !finite ? FP16_NAN : to_fp16(single < FP16_LARGEST ? single : FP16_LARGEST);
  float normal[DIM_MAX] = {};  // zeros where there is nothing to tell
  if (finite && norm > 0) {
    mix(x, dim, how.odd, how.hartley);
    for (int d = 0; d < dim; d++) normal[d] = (float)x[d] / single;
  }
  put_indices(how, normal, dim, code, stride);
  code += (ptrdiff_t)how.bits * (dim / 8) * stride;
  code[0] = (uint8_t)norm;
  code[stride] = (uint8_t)(norm >> 8);
}

// The code of one vector of a head, its bytes `stride` apart.
template <class E>
void encode(const BanyanVectors& how, const E* from, int head, int dim, uint8_t* code, int stride) {
  const KeepDenormals keeping;
  if (how.bits == FP8_BITS)
    for (int d = 0; d < dim; d++) code[(ptrdiff_t)d * stride] = to_e4m3(to_float(from[d]) / how.scales[head]);
  else
    put_turbo(how, from, dim, code, stride);
}

}  // namespace banyan
