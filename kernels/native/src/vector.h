// Sixteen floats at a time, on any CPU: GCC's vector types, with intrinsics where they matter.
//
// Rounding is part of the contract (kernels/native/__init__.py): every fused multiply-add is written
// as one, so that no two instances of a template round differently.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace banyan {

typedef float v16 __attribute__((vector_size(64)));
typedef int32_t i16 __attribute__((vector_size(64)));
typedef uint32_t u16 __attribute__((vector_size(64)));
typedef uint16_t h16 __attribute__((vector_size(32)));

struct bf16 {
  uint16_t bits;
};

template <class V, class T>
inline V load_as(const T* p) {
  V v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

inline v16 load(const float* p) { return load_as<v16>(p); }
inline void store(float* p, v16 v) { std::memcpy(p, &v, sizeof v); }
inline v16 splat(float x) { return v16{} + x; }

inline v16 fma(v16 a, v16 b, v16 c) {
#if defined(__AVX512F__)
  return (v16)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__) && defined(__FMA__)
  __m256 x[2], y[2], z[2];
  std::memcpy(x, &a, sizeof a);
  std::memcpy(y, &b, sizeof b);
  std::memcpy(z, &c, sizeof c);
  z[0] = _mm256_fmadd_ps(x[0], y[0], z[0]);
  z[1] = _mm256_fmadd_ps(x[1], y[1], z[1]);
  std::memcpy(&c, z, sizeof c);
  return c;
#else
  return a * b + c;
#endif
}

inline v16 max(v16 a, v16 b) { return a > b ? a : b; }

#if defined(__AVX512F__)
inline float sum(v16 v) { return _mm512_reduce_add_ps((__m512)v); }
inline float largest(v16 v) { return _mm512_reduce_max_ps((__m512)v); }
#else
inline float sum(v16 v) {
  float lanes[16];
  store(lanes, v);
  for (int width = 8; width > 0; width /= 2)
    for (int i = 0; i < width; i++) lanes[i] += lanes[i + width];
  return lanes[0];
}

inline float largest(v16 v) {
  float lanes[16];
  store(lanes, v);
  for (int width = 8; width > 0; width /= 2)
    for (int i = 0; i < width; i++) lanes[i] = lanes[i] > lanes[i + width] ? lanes[i] : lanes[i + width];
  return lanes[0];
}
#endif

// 2^x, relative error below 2e-7; exactly 0 far below (and for -infinity), so that what is masked
// adds nothing at all; a NaN stays one. Coefficients: least largest relative error on [-1/2, 1/2].
inline v16 exp2v(v16 x) {
#if defined(__AVX512F__)
  const __m512 bounded = _mm512_max_ps(_mm512_set1_ps(-200.0f), (__m512)x);
  const __m512 whole = _mm512_roundscale_ps(bounded, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const v16 part = (v16)_mm512_sub_ps(bounded, whole);
#else
  const v16 low = splat(-126.0f), high = splat(127.0f);
  const v16 bounded = x < low ? low : (x > high ? high : x);
  const v16 magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const v16 whole = (bounded + magic) - magic;
  const v16 part = bounded - whole;
#endif
  v16 y = splat(1.326472731e-3f);
  y = fma(y, part, splat(9.671512991e-3f));
  y = fma(y, part, splat(5.550733581e-2f));
  y = fma(y, part, splat(2.402224243e-1f));
  y = fma(y, part, splat(6.931470037e-1f));
  y = fma(y, part, splat(1.0f));
#if defined(__AVX512F__)
  return (v16)_mm512_scalef_ps((__m512)y, whole);
#else
  const i16 power = __builtin_convertvector(whole, i16) << 23;
  const v16 result = (v16)((i16)y + power);
  return x < low ? v16{} : result;
#endif
}

constexpr float LOG2E = 1.44269504088896341f;

inline v16 expv(v16 x) { return exp2v(x * splat(LOG2E)); }
inline v16 sigmoid(v16 x) { return splat(1.0f) / (splat(1.0f) + expv(-x)); }

// Odd, and relative to x where x is small: its series there, else (1 - t) / (1 + t), t = e^(-2|x|).
inline v16 tanhv(v16 x) {
  const v16 square = x * x, size = x < v16{} ? -x : x;
  v16 y = splat(62.0f / 2835);
  y = fma(y, square, splat(-17.0f / 315));
  y = fma(y, square, splat(2.0f / 15));
  y = fma(y, square, splat(-1.0f / 3));
  const v16 near = fma(y * square, x, x);
  const v16 t = expv(splat(-2.0f) * size);
  const v16 far = (splat(1.0f) - t) / (splat(1.0f) + t);
  return size < splat(0.25f) ? near : (x < v16{} ? -far : far);
}

inline float to_float(bf16 x) {
  uint32_t bits = (uint32_t)x.bits << 16;
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}

// Numbers as weights, activations and pages hold them. STEP consecutive entries of the summed
// dimension lie side by side ("pairs" for bf16): one multiply-accumulate takes STEP products a lane.
template <class E>
struct Num;

template <>
struct Num<float> {
  static constexpr int STEP = 1;
  typedef v16 Wide;
  static Wide wide(const float* p) { return load(p); }
  static v16 mac(v16 acc, Wide w, const float* a) { return fma(w, splat(*a), acc); }
  static v16 get(const float* p) { return load(p); }
  static void put(float* p, v16 v) { store(p, v); }
  static float one(const float* p) { return *p; }
};

template <>
struct Num<bf16> {
  static constexpr int STEP = 2;
  static v16 get(const bf16* p) {
    return (v16)(__builtin_convertvector(load_as<h16>(p), u16) << 16);
  }
  static float one(const bf16* p) { return to_float(*p); }
#if defined(__AVX512BF16__)
  typedef __m512bh Wide;
  static Wide wide(const bf16* p) { return (__m512bh)_mm512_loadu_si512(p); }
  static v16 mac(v16 acc, Wide w, const bf16* a) {
    int32_t pair;
    std::memcpy(&pair, a, 4);
    return (v16)_mm512_dpbf16_ps((__m512)acc, w, (__m512bh)_mm512_set1_epi32(pair));
  }
  static void put(bf16* p, v16 v) {
    __m256bh half = _mm512_cvtneps_pbh((__m512)v);
    std::memcpy(p, &half, 32);
  }
#else
  struct Wide {
    v16 even, odd;
  };
  static Wide wide(const bf16* p) {
    u16 raw = load_as<u16>(p);
    return {(v16)(raw << 16), (v16)(raw & 0xffff0000u)};
  }
  static v16 mac(v16 acc, Wide w, const bf16* a) {
    acc = fma(w.even, splat(to_float(a[0])), acc);
    return fma(w.odd, splat(to_float(a[1])), acc);
  }
  static void put(bf16* p, v16 v) {  // to nearest even; a NaN stays one
    u16 raw = (u16)v;
    u16 rounded = (raw + 0x7fffu + ((raw >> 16) & 1u)) >> 16;
    rounded = v != v ? u16{} + 0x7fc0u : rounded;
    h16 half = __builtin_convertvector(rounded, h16);
    std::memcpy(p, &half, 32);
  }
#endif
};

}  // namespace banyan
