// Sixteen floats at a time, on any CPU: the compiler's vector types, with intrinsics where they
// matter. Where registers are shorter, a v16 is two or four of them: a vector type longer than a
// register would live in memory, and every operation on it too.
//
// Rounding is part of the contract (kernels/native/__init__.py): every fused multiply-add is written
// as one, so that no two instances of a template round differently.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#define INLINE inline __attribute__((always_inline))

namespace banyan {

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX2__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif

// One register.
typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t Uints __attribute__((vector_size(4 * LANES)));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES)));

template <class V>
struct Two {
  V low, high;
};

template <class R>
using Sixteen = std::conditional_t<LANES == 16, R, std::conditional_t<LANES == 8, Two<R>, Two<Two<R>>>>;
typedef Sixteen<Floats> v16;
typedef Sixteen<Ints> i16;
typedef Sixteen<Uints> u16;

#define BANYAN_BINARY(OP)                                                                    \
  template <class V>                                                                         \
  INLINE auto operator OP(const Two<V>& a, const Two<V>& b)->Two<decltype(a.low OP b.low)> { \
    return {a.low OP b.low, a.high OP b.high};                                               \
  }                                                                                          \
  template <class V, class S, class = std::enable_if_t<std::is_arithmetic_v<S>>>             \
  INLINE Two<V> operator OP(const Two<V>& a, S b) {                                          \
    return {a.low OP b, a.high OP b};                                                        \
  }
BANYAN_BINARY(+)
BANYAN_BINARY(-)
BANYAN_BINARY(*)
BANYAN_BINARY(/)
BANYAN_BINARY(&)
BANYAN_BINARY(^)
BANYAN_BINARY(<<)
BANYAN_BINARY(>>)
BANYAN_BINARY(<)
BANYAN_BINARY(>)
BANYAN_BINARY(<=)
BANYAN_BINARY(>=)
BANYAN_BINARY(!=)
#undef BANYAN_BINARY

template <class V>
INLINE Two<V> operator-(const Two<V>& a) {
  return {-a.low, -a.high};
}

// Lane by lane: mask ? a : b.
template <class M, class V>
INLINE V select(M mask, V a, V b) {
  return mask ? a : b;
}
template <class M, class V>
INLINE Two<V> select(const Two<M>& mask, const Two<V>& a, const Two<V>& b) {
  return {select(mask.low, a.low, b.low), select(mask.high, a.high, b.high)};
}

// The same bits as another type.
INLINE Floats floats(Uints x) { return (Floats)x; }
INLINE Floats floats(Ints x) { return (Floats)x; }
INLINE Uints uints(Floats x) { return (Uints)x; }
template <class V>
INLINE auto floats(const Two<V>& x) -> Two<decltype(floats(x.low))> {
  return {floats(x.low), floats(x.high)};
}
template <class V>
INLINE auto uints(const Two<V>& x) -> Two<decltype(uints(x.low))> {
  return {uints(x.low), uints(x.high)};
}

struct bf16 {
  uint16_t bits;
};

template <class V>
INLINE void load_into(const void* p, V& v) {
  std::memcpy(&v, p, sizeof v);
}
template <class V>
INLINE void load_into(const void* p, Two<V>& v) {
  load_into(p, v.low);
  load_into((const char*)p + sizeof(V), v.high);
}
template <class V>
INLINE V load_as(const void* p) {
  V v;
  load_into(p, v);
  return v;
}
INLINE v16 load(const float* p) { return load_as<v16>(p); }

INLINE void store(float* p, const Floats& v) { std::memcpy(p, &v, sizeof v); }
template <class V>
INLINE void store(float* p, const Two<V>& v) {
  store(p, v.low);
  store(p + sizeof(V) / 4, v.high);
}

INLINE void fill(float x, Floats& v) {
#if defined(__AVX512F__)
  v = (Floats)_mm512_set1_ps(x);
#elif defined(__AVX2__)
  v = (Floats)_mm256_set1_ps(x);
#else
  v = Floats{x, x, x, x};
#endif
}
template <class V>
INLINE void fill(float x, Two<V>& v) {
  fill(x, v.low);
  v.high = v.low;
}
INLINE v16 splat(float x) {
  v16 v;
  fill(x, v);
  return v;
}

INLINE Floats fma(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
  return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__) && defined(__FMA__)
  return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}
template <class V>
INLINE Two<V> fma(const Two<V>& a, const Two<V>& b, const Two<V>& c) {
  return {fma(a.low, b.low, c.low), fma(a.high, b.high, c.high)};
}

INLINE v16 max(const v16& a, const v16& b) { return select(a > b, a, b); }

#if defined(__AVX512F__)
inline float sum(v16 v) { return _mm512_reduce_add_ps((__m512)v); }
inline float largest(v16 v) { return _mm512_reduce_max_ps((__m512)v); }
#else
#if defined(__AVX2__)  // in the order of the loops below
INLINE float sum(Floats v) {
  __m128 x = _mm_add_ps(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1));
  x = _mm_add_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_add_ss(x, _mm_shuffle_ps(x, x, 1)));
}
INLINE float largest(Floats v) {
  __m128 x = _mm_max_ps(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1));
  x = _mm_max_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_max_ss(x, _mm_shuffle_ps(x, x, 1)));
}
#else
INLINE float sum(Floats v) {
  float lanes[LANES];
  std::memcpy(lanes, &v, sizeof v);
  for (int width = LANES / 2; width > 0; width /= 2)
    for (int i = 0; i < width; i++) lanes[i] += lanes[i + width];
  return lanes[0];
}
INLINE float largest(Floats v) {
  float lanes[LANES];
  std::memcpy(lanes, &v, sizeof v);
  for (int width = LANES / 2; width > 0; width /= 2)
    for (int i = 0; i < width; i++) lanes[i] = lanes[i] > lanes[i + width] ? lanes[i] : lanes[i + width];
  return lanes[0];
}
#endif
template <class V>
INLINE float sum(const Two<V>& v) {
  return sum(v.low + v.high);
}
template <class V>
INLINE float largest(const Two<V>& v) {
  return largest(select(v.low > v.high, v.low, v.high));
}
#endif

#if !defined(__AVX512F__)
INLINE Ints whole_numbers(Floats x) { return __builtin_convertvector(x, Ints); }
template <class V>
INLINE auto whole_numbers(const Two<V>& x) -> Two<decltype(whole_numbers(x.low))> {
  return {whole_numbers(x.low), whole_numbers(x.high)};
}
INLINE Ints ints(Floats x) { return (Ints)x; }
template <class V>
INLINE auto ints(const Two<V>& x) -> Two<decltype(ints(x.low))> {
  return {ints(x.low), ints(x.high)};
}
#endif

// 2^x, relative error below 2e-7; exactly 0 far below (and for -infinity), so that what is masked
// adds nothing at all; a NaN stays one. Coefficients: least largest relative error on [-1/2, 1/2].
INLINE v16 exp2v(v16 x) {
#if defined(__AVX512F__)
  const __m512 bounded = _mm512_max_ps(_mm512_set1_ps(-200.0f), (__m512)x);
  const __m512 whole = _mm512_roundscale_ps(bounded, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const v16 part = (v16)_mm512_sub_ps(bounded, whole);
#else
  const v16 low = splat(-126.0f), high = splat(127.0f);
  const v16 bounded = select(x < low, low, select(x > high, high, x));
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
  return select(x < low, v16{}, floats(ints(y) + (whole_numbers(whole) << 23)));
#endif
}

constexpr float LOG2E = 1.44269504088896341f;

inline v16 expv(v16 x) { return exp2v(x * splat(LOG2E)); }
inline v16 sigmoid(v16 x) { return splat(1.0f) / (splat(1.0f) + expv(-x)); }

// Odd, and relative to x where x is small: its series there, else (1 - t) / (1 + t), t = e^(-2|x|).
inline v16 tanhv(v16 x) {
  const v16 square = x * x, size = select(x < v16{}, -x, x);
  v16 y = splat(62.0f / 2835);
  y = fma(y, square, splat(-17.0f / 315));
  y = fma(y, square, splat(2.0f / 15));
  y = fma(y, square, splat(-1.0f / 3));
  const v16 near = fma(y * square, x, x);
  const v16 t = expv(splat(-2.0f) * size);
  const v16 far = (splat(1.0f) - t) / (splat(1.0f) + t);
  return select(size < splat(0.25f), near, select(x < v16{}, -far, far));
}

inline float to_float(bf16 x) {
  uint32_t bits = (uint32_t)x.bits << 16;
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}

constexpr int PANEL = 32;       // outputs side by side in packed weights (gemm.h)
constexpr int AHEAD = 8 << 10;  // bytes that weights are prefetched ahead of their use

inline float to_float(float x) { return x; }

// Numbers as weights, activations and pages hold them. STEP consecutive entries of the summed
// dimension lie side by side ("pairs" for bf16): one multiply-accumulate takes STEP products a lane,
// of a Wide and of STEP Operands.
template <class E>
struct Num;

INLINE void get_halves(const bf16* p, Floats& into) {
  into = (Floats)(__builtin_convertvector(load_as<Halves>(p), Uints) << 16);
}
template <class V>
INLINE void get_halves(const bf16* p, Two<V>& into) {
  get_halves(p, into.low);
  get_halves(p + sizeof(V) / 4, into.high);
}
INLINE void put_halves(bf16* p, Uints rounded) {
  const Halves half = __builtin_convertvector(rounded, Halves);
  std::memcpy(p, &half, sizeof half);
}
template <class V>
INLINE void put_halves(bf16* p, const Two<V>& rounded) {
  put_halves(p, rounded.low);
  put_halves(p + sizeof(V) / 4, rounded.high);
}

template <>
struct Num<float> {
  static constexpr int STEP = 1;
  typedef float Operand;
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
    v16 v;
    get_halves(p, v);
    return v;
  }
  static float one(const bf16* p) { return to_float(*p); }
#if defined(__AVX512F__)
  typedef bf16 Operand;
#else
  typedef float Operand;  // widened once, where it takes an instruction
#endif
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
    return {floats(raw << 16), floats(raw & 0xffff0000u)};
  }
  static v16 mac(v16 acc, Wide w, const Operand* a) {
    acc = fma(w.even, splat(to_float(a[0])), acc);
    return fma(w.odd, splat(to_float(a[1])), acc);
  }
  static void put(bf16* p, v16 v) {  // to nearest even; a NaN stays one
    const u16 raw = uints(v);
    const u16 rounded = (raw + 0x7fffu + ((raw >> 16) & 1u)) >> 16;
    put_halves(p, select(v != v, u16{} + 0x7fc0u, rounded));
  }
#endif
};

// Numbers as the operands that `mac` takes; `count` is a multiple of 16.
template <class E>
inline void as_operands(const E* from, typename Num<E>::Operand* to, int count) {
  if constexpr (sizeof(E) == sizeof *to)
    std::memcpy(to, from, sizeof(E) * count);
  else
    for (int i = 0; i < count; i += 16) store(to + i, Num<E>::get(from + i));
}
template <class E>
INLINE void put_operands(typename Num<E>::Operand* to, const v16& v) {
  if constexpr (sizeof(E) == sizeof *to)
    Num<E>::put(to, v);
  else
    store(to, v);
}

}  // namespace banyan
