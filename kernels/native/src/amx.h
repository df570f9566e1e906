// The same products in AMX tiles (Intel, from Sapphire Rapids): 16 rows x 32 inner x 16 outputs each.
#pragma once

#include "vector.h"

#if defined(__AMX_BF16__)
#include <sys/syscall.h>
#include <unistd.h>

namespace banyan {

// As _tile_loadd and its like, but the compiler knows that they read and write memory (GCC 12's own
// say so only of stores, and it may then drop or move the writes that a load is to see).
#define TILE_SHAPES(SHAPES) asm volatile("ldtilecfg %0" ::"m"(SHAPES) : "memory")
#define TILE_LOAD(T, FROM, STRIDE)                                                        \
  asm volatile("tileloadd (%0,%1,1), %%tmm" #T ::"r"((const void*)(FROM)),                \
               "r"((ptrdiff_t)(STRIDE))                                                   \
               : "memory")
#define TILE_STORE(T, TO, STRIDE)                                                         \
  asm volatile("tilestored %%tmm" #T ", (%0,%1,1)" ::"r"((void*)(TO)), "r"((ptrdiff_t)(STRIDE)) \
               : "memory")
#define TILE_ZERO(T) asm volatile("tilezero %%tmm" #T ::)
#define TILE_MAC(C, A, B) asm volatile("tdpbf16ps %%tmm" #B ", %%tmm" #A ", %%tmm" #C ::)

// The kernel lets a process use tiles once it has asked. False: this one may not.
inline bool amx_allowed() {
  constexpr int REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
  return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
}

struct alignas(64) TileShapes {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t bytes[16] = {};
  uint8_t rows[16] = {};

  void set(int tile, int height, int width) {
    rows[tile] = (uint8_t)height;
    bytes[tile] = (uint16_t)width;
  }
};

inline void shape_gemm(int rows) {
  TileShapes shapes;
  const int upper = rows < 16 ? rows : 16, lower = rows > 16 ? rows - 16 : 16;
  for (int t : {0, 1, 4}) shapes.set(t, upper, 64);
  for (int t : {2, 3, 5}) shapes.set(t, rows > 16 ? lower : upper, 64);
  for (int t : {6, 7}) shapes.set(t, 16, 64);
  TILE_SHAPES(shapes);
}

template <class Emit>
inline void emit_tiles(const float (&out)[4][16][16], int t, int rows, int row, int panel, Emit& emit) {
  for (int r = 0; r < rows; r++) emit(row + r, panel, load(out[t][r]), load(out[t + 1][r]));
}

// 17..32 rows of one panel: two row tiles over two output tiles.
template <class Emit>
inline void amx_two_rows(const bf16* a, ptrdiff_t stride, int row, int rows, const bf16* w, int depth,
                         int panel, Emit& emit) {
  alignas(64) float out[4][16][16];
  const bf16* weights = w + (size_t)panel * 32 * depth;
  const bf16* upper = a + row * stride;
  const bf16* lower = upper + 16 * stride;
  const ptrdiff_t bytes = stride * 2;
  TILE_ZERO(0);
  TILE_ZERO(1);
  TILE_ZERO(2);
  TILE_ZERO(3);
  for (int k = 0; k < depth; k += 32) {
    const bf16* at = weights + (size_t)k * 32;
    TILE_LOAD(6, at, 128);
    TILE_LOAD(4, upper + k, bytes);
    TILE_MAC(0, 4, 6);
    TILE_LOAD(7, at + 32, 128);
    TILE_MAC(1, 4, 7);
    TILE_LOAD(5, lower + k, bytes);
    TILE_MAC(2, 5, 6);
    TILE_MAC(3, 5, 7);
  }
  TILE_STORE(0, out[0], 64);
  TILE_STORE(1, out[1], 64);
  TILE_STORE(2, out[2], 64);
  TILE_STORE(3, out[3], 64);
  emit_tiles(out, 0, 16, row, panel, emit);
  emit_tiles(out, 2, rows - 16, row + 16, panel, emit);
}

// At most 16 rows: the four accumulators are two panels. `ahead`: fetch weights before their use.
template <bool AHEAD_TOO, bool SECOND, class Emit>
inline void amx_one_row(const bf16* a, ptrdiff_t stride, int row, int rows, const bf16* w, int depth,
                        int panel, Emit& emit) {
  alignas(64) float out[4][16][16];
  const bf16* one = w + (size_t)panel * 32 * depth;
  const bf16* two = one + (size_t)32 * depth;
  const bf16* from = a + row * stride;
  TILE_ZERO(0);
  TILE_ZERO(1);
  TILE_ZERO(2);
  TILE_ZERO(3);
  for (int k = 0; k < depth; k += 32) {
    const bf16* at = one + (size_t)k * 32;
    const bf16* at_two = two + (size_t)k * 32;
    if constexpr (AHEAD_TOO)
      for (int line = 0; line < 2048; line += 64) {
        _mm_prefetch((const char*)at + (8 << 10) + line, _MM_HINT_T0);
        if constexpr (SECOND) _mm_prefetch((const char*)at_two + (8 << 10) + line, _MM_HINT_T0);
      }
    TILE_LOAD(4, from + k, stride * 2);
    TILE_LOAD(6, at, 128);
    TILE_MAC(0, 4, 6);
    TILE_LOAD(7, at + 32, 128);
    TILE_MAC(1, 4, 7);
    if constexpr (SECOND) {
      TILE_LOAD(6, at_two, 128);
      TILE_MAC(2, 4, 6);
      TILE_LOAD(7, at_two + 32, 128);
      TILE_MAC(3, 4, 7);
    }
  }
  TILE_STORE(0, out[0], 64);
  TILE_STORE(1, out[1], 64);
  emit_tiles(out, 0, rows, row, panel, emit);
  if constexpr (SECOND) {
    TILE_STORE(2, out[2], 64);
    TILE_STORE(3, out[3], 64);
    emit_tiles(out, 2, rows, row, panel + 1, emit);
  }
}

template <class Emit>
void amx_gemm(const bf16* a, ptrdiff_t stride, int rows, const bf16* w, int depth, int first, int last,
              Emit& emit) {
  if (rows <= 0 || first >= last) return;
  if (rows <= 16) {
    shape_gemm(rows);
    int panel = first;
    for (; panel + 2 <= last; panel += 2)
      amx_one_row<true, true>(a, stride, 0, rows, w, depth, panel, emit);
    if (panel < last) amx_one_row<true, false>(a, stride, 0, rows, w, depth, panel, emit);
    return;
  }
  const int whole = rows / 32 * 32, rest = rows - whole;
  if (whole) shape_gemm(32);
  for (int panel = first; whole && panel < last; panel++)
    for (int row = 0; row < whole; row += 32)
      amx_two_rows(a, stride, row, 32, w, depth, panel, emit);
  if (rest == 0) return;
  shape_gemm(rest);
  for (int panel = first; panel < last; panel++) {
    if (rest > 16)
      amx_two_rows(a, stride, whole, rest, w, depth, panel, emit);
    else
      amx_one_row<false, false>(a, stride, whole, rest, w, depth, panel, emit);
  }
}

}  // namespace banyan
#endif
