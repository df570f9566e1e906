// The same products in AMX tiles (Intel, from Sapphire Rapids): 16 rows x 32 inner x 16 outputs each.
#pragma once

#include "vector.h"

#if defined(__AMX_BF16__)
#include <sys/syscall.h>
#include <unistd.h>

#include <initializer_list>

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

// Weights to be fetched before their use, some lines with every step of the inner loop.
struct Ahead {
  const char* at;
  int lines;

  inline void fetch() {
    for (int i = 0; i < lines; i++, at += 64) _mm_prefetch(at, _MM_HINT_T1);
  }
};

// 17..32 rows of one panel: two row tiles over two output tiles.
template <class Emit>
inline void amx_two_rows(const bf16* a, ptrdiff_t stride, int row, int rows, const bf16* w, int depth,
                         int panel, Ahead& ahead, Emit& emit) {
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
    ahead.fetch();
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

// At most 16 rows: the four accumulators are two panels (one, if there is no `second`).
template <bool SECOND, class Emit>
inline void amx_one_row(const bf16* a, ptrdiff_t stride, int row, int rows, const bf16* w, int depth,
                        int panel, bool from_memory, Emit& emit) {
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
    if (from_memory)
      for (int line = 0; line < 2048; line += 64) {
        _mm_prefetch((const char*)at + AHEAD + line, _MM_HINT_T0);
        if constexpr (SECOND) _mm_prefetch((const char*)at_two + AHEAD + line, _MM_HINT_T0);
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
      amx_one_row<true>(a, stride, 0, rows, w, depth, panel, true, emit);
    if (panel < last) amx_one_row<false>(a, stride, 0, rows, w, depth, panel, true, emit);
    return;
  }
  // A panel stays in the L1 cache for all rows, and the next one is fetched meanwhile, spread evenly.
  const int blocks = (rows + 31) / 32, rest = rows - (blocks - 1) * 32;
  const int lines = (32 + blocks - 1) / blocks;
  const size_t panel_bytes = (size_t)depth * 64;
  shape_gemm(blocks > 1 ? 32 : rest);
  for (int panel = first; panel < last; panel++) {
    Ahead ahead{(const char*)w + (panel + 1) * panel_bytes, lines};
    for (int block = 0; block < blocks - 1; block++)
      amx_two_rows(a, stride, block * 32, 32, w, depth, panel, ahead, emit);
    const bool reshape = blocks > 1 && rest < 32;
    if (reshape) shape_gemm(rest);
    const int row = (blocks - 1) * 32;
    if (rest > 16)
      amx_two_rows(a, stride, row, rest, w, depth, panel, ahead, emit);
    else
      amx_one_row<false>(a, stride, row, rest, w, depth, panel, false, emit);
    if (reshape) shape_gemm(32);
  }
}

}  // namespace banyan
#endif
