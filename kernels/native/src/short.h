// The products where there are 16 registers of 4 or 8 floats (SSE, AVX2): tiles of 5 rows x 16 outputs.
//
// There is no product of bf16 pairs there, so rows are widened to float once for all outputs, and
// weights in registers; a row's entry is then one load that fills a register (BLIS's micro-kernel;
// Van Zee and van de Geijn, 2015). Sums run in the order of the inner dimension, whatever the tile.
#pragma once

#include "buffers.h"
#include "vector.h"

#if !defined(__AVX512F__)
namespace banyan {

constexpr int SHORT_ROWS = 5;                // x half a panel = 10 accumulators; with 12, some spill
constexpr int WHOLE_ROWS = 2;                // up to so many rows, a panel at once = 8
constexpr size_t WIDENED_BYTES = 256 << 10;  // of rows, so that they stay in the L2 cache

// Its loop has to be unrolled early: GCC 12 keeps sums that an index still names in memory, at half the
// speed, wherever it does not inline the tile.
template <int ROWS>
INLINE void short_fma(v16 (&acc)[ROWS], v16 weights, const float* a, int depth) {
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; r++) acc[r] = fma(weights, splat(a[(ptrdiff_t)r * depth]), acc[r]);
}

// Adds the products of 16 outputs' weights of STEP entries and ROWS rows, `depth` apart.
template <int ROWS>
INLINE void short_mac(v16 (&acc)[ROWS], const float* w, const float* a, int depth) {
  short_fma(acc, load(w), a, depth);
}
template <int ROWS>
INLINE void short_mac(v16 (&acc)[ROWS], const bf16* w, const float* a, int depth) {
  short_fma(acc, floats(load_as<u16>(w) << 16), a, depth);
  asm volatile("" ::: "memory");  // load them again: registers are for the sums
  short_fma(acc, floats(load_as<u16>(w) & 0xffff0000u), a + 1, depth);
}

// `sums` of ROWS rows (`depth` apart) and a whole panel that begins at `w`, whose weights come from
// memory, AHEAD bytes ahead of their use.
template <class E, int ROWS>
inline void short_stream(const float* a, int depth, const E* w, float* sums) {
  constexpr int STEP = Num<E>::STEP;
  v16 acc[2][ROWS] = {};
  for (int k = 0; k < depth; k += STEP) {
    const E* at = w + (size_t)k * PANEL;
    for (size_t b = 0; b < PANEL * STEP * sizeof(E); b += 64) __builtin_prefetch((const char*)at + b + AHEAD);
    for (int c = 0; c < 2; c++) short_mac(acc[c], at + c * 16 * STEP, a + k, depth);
  }
  for (int c = 0; c < 2; c++)
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++) store(sums + 16 * (c * ROWS + r), acc[c][r]);
}

// `sums` of ROWS rows and half a panel, whose weights are near. While it computes it brings LINES
// lines of what is at `next` every two steps into the L2 cache.
template <class E, int ROWS, int LINES>
inline void short_tile(const float* a, int depth, const E* w, const char* next, float* sums) {
  constexpr int STEP = Num<E>::STEP;
  v16 acc[ROWS] = {};
  for (int k = 0; k < depth; k += 2 * STEP) {
    const E* at = w + (size_t)k * PANEL;
    if constexpr (LINES > 0) __builtin_prefetch(next, 0, 2);
    short_mac(acc, at, a + k, depth);
    if constexpr (LINES > 1) __builtin_prefetch(next + 64, 0, 2);
    next += 64 * LINES;
    short_mac(acc, at + PANEL * STEP, a + k + STEP, depth);
  }
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; r++) store(sums + 16 * r, acc[r]);
}

template <class E, int ROWS, int LINES>
inline void short_halves(const float* a, int depth, const E* w, const char* next, size_t each, float* sums) {
  short_tile<E, ROWS, LINES>(a, depth, w, next, sums);
  short_tile<E, ROWS, LINES>(a, depth, w + 16 * Num<E>::STEP, next + each, sums + 16 * ROWS);
}

// One of the `tiles` of rows that use a panel. The first two bring the next panel, evenly while they
// compute: without that a panel's first tile waits for memory and its others leave memory idle.
template <class E, int ROWS, class Emit>
inline void short_panel(const float* a, int row, int depth, const E* w, int panel, int tile, int tiles,
                        Emit& emit) {
  alignas(64) float sums[2 * ROWS * 16];
  if constexpr (ROWS <= WHOLE_ROWS) {
    short_stream<E, ROWS>(a, depth, w, sums);
  } else {
    const char* next = (const char*)(w + (size_t)PANEL * depth);
    const size_t half = sizeof(E) * PANEL / 2 * depth;
    if (tiles == 1) {
      short_halves<E, ROWS, 2>(a, depth, w, next, half, sums);
    } else if (tile < 2) {
      short_halves<E, ROWS, 1>(a, depth, w, next + tile * half, half / 2, sums);
    } else {
      short_halves<E, ROWS, 0>(a, depth, w, next, 0, sums);
    }
  }
  for (int r = 0; r < ROWS; r++) emit(row + r, panel, load(sums + 16 * r), load(sums + 16 * (ROWS + r)));
}

template <class E, int ROWS, class Emit>
inline void short_sized(int rows, const float* a, int row, int depth, const E* w, int panel, int tile,
                        int tiles, Emit& emit) {
  if (rows == ROWS)
    short_panel<E, ROWS>(a, row, depth, w, panel, tile, tiles, emit);
  else if constexpr (ROWS > 1)
    short_sized<E, ROWS - 1>(rows, a, row, depth, w, panel, tile, tiles, emit);
}

inline const float* widened(const float* a, ptrdiff_t stride, int rows, int depth, float* into) {
  if (stride == depth) return a;
  for (int r = 0; r < rows; r++) std::memcpy(into + (size_t)r * depth, a + r * stride, sizeof(float) * depth);
  return into;
}
inline const float* widened(const bf16* a, ptrdiff_t stride, int rows, int depth, float* into) {
  for (int r = 0; r < rows; r++)
    for (int k = 0; k < depth; k += 16) store(into + (size_t)r * depth + k, Num<bf16>::get(a + r * stride + k));
  return into;
}

// See gemm.h.
template <class E, class Emit>
void short_gemm(const E* a, ptrdiff_t stride, int rows, const E* w, int depth, int first, int last,
                Emit& emit) {
  static thread_local Buffer<float> buffer;
  const int fitting = (int)(WIDENED_BYTES / sizeof(float) / depth) / SHORT_ROWS * SHORT_ROWS;
  const int block = fitting > SHORT_ROWS ? fitting : SHORT_ROWS;
  buffer.reserve((size_t)(rows < block ? rows : block) * depth);
  for (int from = 0; from < rows; from += block) {
    const int count = rows - from < block ? rows - from : block;
    const float* wide = widened(a + from * stride, stride, count, depth, buffer.get());
    const int tiles = (count + SHORT_ROWS - 1) / SHORT_ROWS, each = (count + tiles - 1) / tiles;
    for (int panel = first; panel < last; panel++) {
      const E* weights = w + (size_t)panel * PANEL * depth;
      for (int row = 0; row < count; row += each)
        short_sized<E, SHORT_ROWS>(count - row < each ? count - row : each, wide + (size_t)row * depth,
                                   from + row, depth, weights, panel, row / each, tiles, emit);
    }
  }
}

}  // namespace banyan
#endif
