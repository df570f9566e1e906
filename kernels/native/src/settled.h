// TurboQuant's codes of bf16 vectors that come back rounded to bf16, byte for byte as TurboVectors with
// returns_as=bfloat16 (turboquant.py) writes and restores them; knows no block. For widths that are powers
// of two.
//
// torch sums in an order of its own. Sums of centroids are exact in any. Every other sum is checked: where
// another order might end in another byte, and where a code is not settled from the start, the vector is
// left to torch. Of random vectors that is one in ten thousand.
#pragma once

#include <cmath>

#include "encode.h"
#include "rows.h"

namespace banyan {

typedef double Doubles __attribute__((vector_size(32)));
typedef float Singles __attribute__((vector_size(32)));
typedef float FourFloats __attribute__((vector_size(16)));
typedef uint32_t FourWords __attribute__((vector_size(16)));
typedef uint16_t FourHalves __attribute__((vector_size(8)));

constexpr int SETTLE_STEPS_MAX = 64;
constexpr double SLACK = 0x1p-44;  // more than orders of 256 numbers differ in a length, in shares of it
constexpr double EDGE = 0x1p-11;  // of a stretch's square: that near to its limits torch's float32 may differ

// --- Sylvester's matrix, a register at a time --------------------------------------------------------

#if defined(__AVX2__)
INLINE Doubles mixed_within(Doubles v) {
  __m256d a = (__m256d)v, b = _mm256_permute_pd(a, 5);
  a = _mm256_blend_pd(a + b, b - a, 0b1010);
  b = _mm256_permute2f128_pd(a, a, 1);
  return (Doubles)_mm256_blend_pd(a + b, b - a, 0b1100);
}
INLINE Singles mixed_within(Singles v) {
  __m256 a = (__m256)v, b = _mm256_permute_ps(a, 0b10110001);
  a = _mm256_blend_ps(a + b, b - a, 0b10101010);
  b = _mm256_permute_ps(a, 0b01001110);
  a = _mm256_blend_ps(a + b, b - a, 0b11001100);
  b = _mm256_permute2f128_ps(a, a, 1);
  return (Singles)_mm256_blend_ps(a + b, b - a, 0b11110000);
}
#else
template <class T, class V>
INLINE V mixed_numbers(const V& v) {
  T x[sizeof v / sizeof(T)];
  std::memcpy(x, &v, sizeof v);
  mix(x, sizeof v / sizeof(T), 1, nullptr);
  return load_as<V>(x);
}
INLINE Doubles mixed_within(Doubles v) { return mixed_numbers<double>(v); }
INLINE Singles mixed_within(Singles v) { return mixed_numbers<float>(v); }
#endif

// `mix` of COUNT registers; all loops are unrolled.
template <int COUNT, class V>
INLINE void mix_registers(V* x) {
#pragma GCC unroll 64
  for (int i = 0; i < COUNT; i++) x[i] = mixed_within(x[i]);
#pragma GCC unroll 8
  for (int step = 1; step < COUNT; step *= 2)
#pragma GCC unroll 64
    for (int i = 0; i < COUNT; i++)
      if ((i & step) == 0) {
        const V a = x[i], b = x[i + step];
        x[i] = a + b;
        x[i + step] = a - b;
      }
}

// --- what is certain ---------------------------------------------------------------------------------

// Whether sums of these numbers times 1 or -1 are exact in double, in any order: all are multiples of the
// last bit of the one next to zero.
template <int DIM>
inline bool sums_exactly(const bf16* from) {
  uint16_t largest = 0, least = 0xffff;  // `least` less one, so that zeros come last
  for (int d = 0; d < DIM; d++) {
    const uint16_t size = from[d].bits & 0x7fff, below = (uint16_t)(size - 1);
    largest = size > largest ? size : largest;
    least = below < least ? below : least;
  }
  const double all = (double)to_float(bf16{largest}) * DIM, one = to_float(bf16{(uint16_t)(least + 1)});
  return largest == 0 || all * 0x1p8 < one * 0x1p53;
}

// The float that a length is rounded to; false if another order of its sum might give another, or for NaN.
inline bool certain(double length, float& single) {
  single = (float)(length * (1 - SLACK));
  return single == (float)(length * (1 + SLACK));
}

inline uint16_t stored_norm(float length) { return to_fp16(length < FP16_LARGEST ? length : FP16_LARGEST); }

inline float norm_of(uint16_t stored) {
  uint16_t all[TOGETHER] = {stored};
  float norms[TOGETHER];
  store(norms, from_fp16(all));
  return norms[0];
}

// --- vectors -----------------------------------------------------------------------------------------

INLINE Doubles four(const float* p) { return __builtin_convertvector(load_as<FourFloats>(p), Doubles); }
INLINE Doubles four(const bf16* p) {
  const FourWords words = __builtin_convertvector(load_as<FourHalves>(p), FourWords) << 16;
  return __builtin_convertvector((FourFloats)words, Doubles);
}

template <int DIM, class E>
inline double square_sum(const E* x) {
  Doubles sums[2] = {};
  for (int d = 0; d < DIM; d += 8) {
    const Doubles a = four(x + d), b = four(x + d + 4);
    sums[0] += a * a;
    sums[1] += b * b;
  }
  const Doubles sum = sums[0] + sums[1];
  return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

template <int BITS, int DIM>
class SettledVectors {
 public:
  explicit SettledVectors(const BanyanSettled& codec)
      : how_(codec.how),
        lowest_(codec.lowest * codec.lowest * (1 + EDGE)),
        highest_(codec.highest * codec.highest * (1 - EDGE)),
        entries_(codec.how.centroids) {
    for (int d = 0; d < DIM; d++) signs_[d] = (float)how_.signs[d];
  }

  // False if the vector is left to torch; its code may have been written.
  bool encode(const bf16* from, uint8_t* code) const {
    const double length = std::sqrt(square_sum<DIM>(from));
    float single;
    if (!certain(length, single) && single == single) return false;
    const bool finite = single - single == 0;
    const uint16_t norm = finite ? stored_norm(single) : FP16_NAN;
    const bool live = finite && norm > 0;
    alignas(64) float normal[DIM];
    if (live) {
      if (!sums_exactly<DIM>(from)) return false;
      turn(from, single, normal);
    } else {
      std::memset(normal, 0, sizeof normal);  // there is nothing to tell
    }
    BanyanVectors how = how_;
    how.bits = BITS;  // for the compiler
    put_indices(how, normal, DIM, code, 1);
    put_norm(code, norm);
    return settles(code, norm, live);
  }

  void decode(const uint8_t* code, bf16* into) const {
    alignas(64) float values[DIM];
    const float length = restored(code, values);
    uint16_t norm;
    std::memcpy(&norm, code + NORM_AT, sizeof norm);
    scaled(values, norm_of(norm) / length, into);
  }

 private:
  static constexpr int NORM_AT = BITS * DIM / 8;

  static void put_norm(uint8_t* code, uint16_t norm) { std::memcpy(code + NORM_AT, &norm, sizeof norm); }

  // In the codec's basis and in units of its root mean square.
  void turn(const bf16* from, float length, float* normal) const {
    Doubles x[DIM / 4];
#pragma GCC unroll 64
    for (int i = 0; i < DIM / 4; i++) x[i] = four(from + 4 * i) * load_as<Doubles>(how_.signs + 4 * i);
    mix_registers<DIM / 4>(x);
#pragma GCC unroll 64
    for (int i = 0; i < DIM / 4; i++) {
      const FourFloats single = __builtin_convertvector(x[i], FourFloats);
      std::memcpy(normal + 4 * i, &single, sizeof single);
    }
    for (int d = 0; d < DIM; d += 16) store(normal + d, load(normal + d) / splat(length));
  }

  // A code's centroids in the model's basis, and their length as float32.
  float restored(const uint8_t* code, float* values) const {
    entries_.decode(code, DIM, values);
    const double squares = square_sum<DIM>(values);
    Singles x[DIM / 8];
    std::memcpy(x, values, sizeof x);
    mix_registers<DIM / 8>(x);
#pragma GCC unroll 32
    for (int i = 0; i < DIM / 8; i++)  // of zeros the positive one
      x[i] = x[i] * load_as<Singles>(signs_ + 8 * i) + Singles{};
    std::memcpy(values, x, sizeof x);
    return (float)(std::sqrt(squares) * std::sqrt((double)DIM));
  }

  static void scaled(const float* values, float factor, bf16* into) {
    if (factor != factor) return (void)std::memset(into, 0xff, DIM * sizeof *into);  // torch's NaN
    for (int d = 0; d < DIM; d += 16) Num<bf16>::put(into + d, load(values + d) * splat(factor));
  }

  // Whether the code is one that its decoded vector is encoded to; its norm is replaced by one that is.
  bool settles(uint8_t* code, uint16_t norm, bool live) const {
    if (norm == FP16_NAN) return true;
    alignas(64) float values[DIM];
    const float length = restored(code, values);
    const double stretch = (double)DIM * DIM / ((double)length * length);
    if (live && !(stretch > lowest_ && stretch < highest_)) return false;
    for (int step = 0; step < SETTLE_STEPS_MAX; step++) {
      bf16 again[DIM];
      float single;
      scaled(values, norm_of(norm) / length, again);
      if (!certain(std::sqrt(square_sum<DIM>(again)), single)) return false;
      const uint16_t found = stored_norm(single);
      if (found == norm) return true;
      put_norm(code, norm = found);
    }
    return true;
  }

  const BanyanVectors& how_;
  const double lowest_, highest_;  // what the square of a stretch may be
  const ValueEntries<BITS> entries_;
  alignas(64) float signs_[DIM];
};

// `f` of the codec, whose width is then known to the compiler; -1 if there is none such.
template <class F>
inline int64_t with_settled(const BanyanSettled& codec, const F& f) {
  if (codec.how.bits != 4) return -1;
  switch (codec.dim) {
    case 32: return f(SettledVectors<4, 32>(codec));
    case 64: return f(SettledVectors<4, 64>(codec));
    case 128: return f(SettledVectors<4, 128>(codec));
    case 256: return f(SettledVectors<4, 256>(codec));
    default: return -1;
  }
}

}  // namespace banyan

extern "C" int64_t banyan_encode_settled(const BanyanSettled* codec, const BanyanBatch* given, uint8_t* left) {
  const banyan::KeepDenormals keeping;
  const BanyanBatch batch = *given;
  return banyan::with_settled(*codec, [&](const auto& vectors) {
    int64_t count = 0;
    for (int64_t i = 0; i < batch.count; i++) {
      const auto* from = (const banyan::bf16*)((const char*)batch.vectors + i * batch.vector_stride);
      left[i] = !vectors.encode(from, (uint8_t*)batch.codes + i * batch.code_stride);
      count += left[i];
    }
    return count;
  });
}

extern "C" int64_t banyan_decode_settled(const BanyanSettled* codec, const BanyanBatch* given) {
  const banyan::KeepDenormals keeping;
  const BanyanBatch batch = *given;
  return banyan::with_settled(*codec, [&](const auto& vectors) {
    for (int64_t i = 0; i < batch.count; i++)
      vectors.decode((const uint8_t*)batch.codes + i * batch.code_stride,
                     (banyan::bf16*)((char*)batch.vectors + i * batch.vector_stride));
    return (int64_t)0;
  });
}
