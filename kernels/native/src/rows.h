// Runs of numbers as they pass between float and the model's dtype. Counts are multiples of 16.
#pragma once

#include "vector.h"

namespace banyan {

template <class E>
inline void narrow(const float* from, E* to, int count) {
  for (int i = 0; i < count; i += 16) Num<E>::put(to + i, load(from + i));
}

template <class E>
inline void widen(const E* from, float* to, int count) {
  for (int i = 0; i < count; i += 16) store(to + i, Num<E>::get(from + i));
}

inline float mean_square(const float* x, int count) {
  v16 squares[2] = {};
  int i = 0;
  for (; i + 32 <= count; i += 32) {
    const v16 a = load(x + i), b = load(x + i + 16);
    squares[0] = fma(a, a, squares[0]);
    squares[1] = fma(b, b, squares[1]);
  }
  for (; i < count; i += 16) {
    const v16 a = load(x + i);
    squares[0] = fma(a, a, squares[0]);
  }
  return sum(squares[0] + squares[1]);
}

}  // namespace banyan
