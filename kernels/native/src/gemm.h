// Rows of activations times packed weights. Every output is one sum over the inner dimension in one
// order, whatever tile it is computed in: a row does not depend on the rows beside it.
//
// Weights [outputs, inner] are packed as panels of 32 outputs: [outputs/32][inner/STEP][32][STEP],
// padded with zeros to whole panels and to INNER inner entries. That is the order in which vector
// units (vdpbf16ps, FMA) and AMX tiles (16 pairs x 16 outputs) both read them: one packing for all.
#pragma once

#include "amx.h"
#include "short.h"
#include "vector.h"

namespace banyan {

constexpr int INNER = 32;       // the inner dimension is a multiple of it, zeros behind the end

inline int padded(int n, int unit) { return (n + unit - 1) / unit * unit; }

// source [outputs, inner] row-major; with `halves`, panel p takes 16 outputs from the first half of
// the source and 16 from the second (gate and up of one activation meet in one panel).
template <class E>
void pack(const E* source, E* target, int outputs, int inner, bool halves) {
  constexpr int STEP = Num<E>::STEP;
  const int depth = padded(inner, INNER), panels = padded(outputs, PANEL) / PANEL;
  std::memset(target, 0, sizeof(E) * (size_t)panels * PANEL * depth);
  for (int panel = 0; panel < panels; panel++) {
    E* into = target + (size_t)panel * PANEL * depth;
    for (int lane = 0; lane < PANEL; lane++) {
      int output = panel * PANEL + lane;
      if (halves) output = panel * 16 + (lane & 15) + (lane >= 16 ? outputs / 2 : 0);
      if (halves ? panel * 16 + (lane & 15) >= outputs / 2 : output >= outputs) continue;
      const E* row = source + (size_t)output * inner;
      for (int k = 0; k < inner; k++) into[(k / STEP * PANEL + lane) * STEP + k % STEP] = row[k];
    }
  }
}

// Column `output` of packed weights (an embedding, where it is tied to the head), as float.
template <class E>
void unpack_row(const E* packed, int output, int inner, float* row) {
  constexpr int STEP = Num<E>::STEP;
  const E* from = packed + (size_t)(output / PANEL) * PANEL * padded(inner, INNER);
  const int lane = output % PANEL;
  for (int k = 0; k < inner; k++)
    row[k] = Num<E>::one(from + (k / STEP * PANEL + lane) * STEP + k % STEP);
}

// What a tile prefetches while it computes. Alone (few rows), it streams its panels from memory: each
// AHEAD bytes on, and behind its end where the panel begins that is read in its place next. One of
// several tiles of a panel that is in the cache by now brings its share of the next panel.
struct Stream {
  const char* next;  // nullptr: alone
  size_t per_step;   // bytes of it per step of the inner dimension
};

#if defined(__AVX512F__)
// ROWS x PANELS panels at once, in registers.
template <class E, int ROWS, int PANELS, class Emit>
inline void tile(const E* a, ptrdiff_t stride, int row, const E* w, int depth, int panel, Stream stream,
                 Emit& emit) {
  constexpr int STEP = Num<E>::STEP;
  const size_t panel_size = (size_t)PANEL * depth;
  const E* weights = w + panel * panel_size;
  const size_t panel_bytes = panel_size * sizeof(E);
  const int knee = depth - AHEAD / (int)(PANEL * sizeof(E));
  v16 acc[ROWS][2 * PANELS] = {};
  const E* rows = a + row * stride;
  for (int k = 0; k < depth; k += STEP) {
    const size_t ahead = AHEAD + (k < knee ? 0 : (PANELS - 1) * panel_bytes);
    if (stream.next != nullptr) __builtin_prefetch(stream.next + k / STEP * stream.per_step, 0, 2);
    for (int p = 0; p < PANELS; p++) {
      const E* at = weights + p * panel_size + (size_t)k * PANEL;
      for (int c = 0; c < 2; c++) {
        if (stream.next == nullptr) __builtin_prefetch((const char*)(at + c * 16 * STEP) + ahead);
        const auto wide = Num<E>::wide(at + c * 16 * STEP);
        for (int r = 0; r < ROWS; r++)
          acc[r][2 * p + c] = Num<E>::mac(acc[r][2 * p + c], wide, rows + r * stride + k);
      }
    }
  }
  for (int r = 0; r < ROWS; r++)
    for (int p = 0; p < PANELS; p++) emit(row + r, panel + p, acc[r][2 * p], acc[r][2 * p + 1]);
}

constexpr int ROWS_MAX = 12;  // x 2 registers of a panel = 24 accumulators of 32 registers

// How many panels side by side keep enough independent sums in flight for so few rows.
constexpr int panels_beside(int rows) { return rows <= 3 ? 4 : rows <= 6 ? 2 : 1; }

template <class E, int ROWS, class Emit>
inline void row_tile(const E* a, ptrdiff_t stride, int row, const E* w, int depth, int first, int last,
                     Stream stream, Emit& emit) {
  constexpr int BESIDE = panels_beside(ROWS);
  int panel = first;
  for (; panel + BESIDE <= last; panel += BESIDE)
    tile<E, ROWS, BESIDE>(a, stride, row, w, depth, panel, stream, emit);
  if constexpr (BESIDE > 1)
    for (; panel < last; panel++) tile<E, ROWS, 1>(a, stride, row, w, depth, panel, stream, emit);
}

template <class E, int ROWS, class Emit>
inline void sized_tile(int rows, const E* a, ptrdiff_t stride, int row, const E* w, int depth, int first,
                       int last, Stream stream, Emit& emit) {
  if (rows == ROWS)
    row_tile<E, ROWS>(a, stride, row, w, depth, first, last, stream, emit);
  else if constexpr (ROWS > 1)
    sized_tile<E, ROWS - 1>(rows, a, stride, row, w, depth, first, last, stream, emit);
}

#endif

// Panels [first, last) of a [rows, depth] (its rows `stride` apart) times w; emit(row, panel, lo, hi)
// gets the 32 sums of a row and a panel.
template <class E, class Emit>
void gemm(const E* a, ptrdiff_t stride, int rows, const E* w, int depth, int first, int last, Emit emit) {
#if defined(__AMX_BF16__)
  if constexpr (sizeof(E) == 2) {
    amx_gemm(a, stride, rows, w, depth, first, last, emit);
    return;
  }
#endif
#if !defined(__AVX512F__)
  short_gemm(a, stride, rows, w, depth, first, last, emit);
#else
  const int tiles = (rows + ROWS_MAX - 1) / ROWS_MAX;
  if (tiles == 0) return;
  const int each = (rows + tiles - 1) / tiles;
  if (tiles == 1) {
    sized_tile<E, ROWS_MAX>(rows, a, stride, 0, w, depth, first, last, {nullptr, 0}, emit);
    return;
  }
  const size_t panel_bytes = sizeof(E) * PANEL * depth;
  const size_t per_step = (PANEL * Num<E>::STEP * sizeof(E) + tiles - 1) / tiles;
  for (int panel = first; panel < last; panel++) {  // one panel stays in the L1/L2 cache for all rows
    const char* next = (const char*)w + (panel + 1) * panel_bytes;
    for (int row = 0, i = 0; row < rows; row += each, i++)
      sized_tile<E, ROWS_MAX>(rows - row < each ? rows - row : each, a, stride, row, w, depth, panel,
                              panel + 1, {next + i * (panel_bytes / tiles), per_step}, emit);
  }
#endif
}

}  // namespace banyan
