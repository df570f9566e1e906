// Attention that reads pages in place: up to 32 query rows of one KV head against their sequence.
//
// It walks fixed chunks of 64 positions from position 0 with a running softmax (Milakov and
// Gimelshein, 2018; FlashAttention's inner loop), so a row's result depends on its own sequence
// only: what is masked adds exactly nothing, however many rows share the walk.
//
// `Pages` (pages.h) is where codecs plug in: it gives sixteen tokens of a head at a time, in place or
// decoded. A score is one lane per token, an output one lane per column.
#pragma once

#include "gemm.h"
#include "pages.h"

namespace banyan {

constexpr int TILE_ROWS = 32;   // query rows of one walk: it loads a page once for all of them

struct AttentionShape {
  int dim;
  int window;     // 0 = unbounded
  float scale;    // of the logits
  float cap;      // 0 = off
};

// Per-thread working memory.
template <class E>
struct AttentionScratch {
  // A tile of a member's last rows may reach 15 rows over the end.
  typedef typename Num<E>::Operand Operand;
  alignas(64) Operand query[(TILE_ROWS + 16) * DIM_MAX];  // rows `dim` apart, so that they fill the cache evenly
  alignas(64) float scores[TILE_ROWS + 16][CHUNK];
  alignas(64) Operand weights[TILE_ROWS + 16][CHUNK];
  alignas(64) float out[TILE_ROWS * DIM_MAX];
  alignas(64) float part[16][64];
  alignas(64) E tail[SUBPAGE * DIM_MAX];
  float top[TILE_ROWS];
  v16 total[TILE_ROWS];
};

template <class E, int ROWS>
inline void score_rows(const typename Num<E>::Operand* query, const E* keys, int key_stride, int dim, float* scores) {
  constexpr int STEP = Num<E>::STEP;
  v16 acc[ROWS];
  for (int r = 0; r < ROWS; r++) acc[r] = v16{};
  int d = 0;
  do {  // a loop that may run no time would keep the sums in memory
    const auto wide = Num<E>::wide(keys + (size_t)(d / STEP) * key_stride);
    for (int r = 0; r < ROWS; r++) acc[r] = Num<E>::mac(acc[r], wide, query + r * dim + d);
  } while ((d += STEP) < dim);
  for (int r = 0; r < ROWS; r++) store(scores + r * CHUNK, acc[r]);
}

#if defined(__AVX512F__)
constexpr int SCORE_ROWS = 8;     // accumulators of one register
constexpr int WEIGH_ROWS = 4;     // x 4 registers of columns
constexpr int WEIGH_COLUMNS = 4;
#else                             // 16 registers, two of them a vector
constexpr int SCORE_ROWS = 4;
constexpr int WEIGH_ROWS = 4;
constexpr int WEIGH_COLUMNS = 1;
#endif

// The sums stay in registers over all of a chunk's subpages; absent ones are passed over.
template <class E, int ROWS, int COLUMNS>
inline void weigh_rows(const typename Num<E>::Operand* weights, const E* const* values, int subpages, int dim, int column,
                       float* out) {
  constexpr int STEP = Num<E>::STEP;
  v16 acc[ROWS][COLUMNS];
  for (int r = 0; r < ROWS; r++)
    for (int c = 0; c < COLUMNS; c++) acc[r][c] = load(out + r * dim + c * 16);
  for (int j = 0; j < subpages; j++, weights += SUBPAGE) {
    if (values[j] == nullptr) continue;
    const E* from = values[j] + (size_t)column * STEP;
    for (int t = 0; t < SUBPAGE; t += STEP, from += (size_t)dim * STEP) {
      for (int c = 0; c < COLUMNS; c++) {
        const auto wide = Num<E>::wide(from + c * 16 * STEP);
        for (int r = 0; r < ROWS; r++) acc[r][c] = Num<E>::mac(acc[r][c], wide, weights + r * CHUNK + t);
      }
    }
  }
  for (int r = 0; r < ROWS; r++)
    for (int c = 0; c < COLUMNS; c++) store(out + r * dim + c * 16, acc[r][c]);
}

template <class E, int ROWS>
inline void score_sized(int rows, const typename Num<E>::Operand* query, const E* keys, int stride, int dim, float* scores) {
  if (rows == ROWS)
    score_rows<E, ROWS>(query, keys, stride, dim, scores);
  else if constexpr (ROWS > 1)
    score_sized<E, ROWS - 1>(rows, query, keys, stride, dim, scores);
}

template <class E, int ROWS>
inline void weigh_sized(int rows, const typename Num<E>::Operand* weights, const E* const* values, int subpages, int dim,
                        int column, float* out) {
  if (rows == ROWS) {
    if (column + WEIGH_COLUMNS * 16 <= dim) {
      weigh_rows<E, ROWS, WEIGH_COLUMNS>(weights, values, subpages, dim, column, out + column);
    } else {
      for (; column < dim; column += 16)
        weigh_rows<E, ROWS, 1>(weights, values, subpages, dim, column, out + column);
    }
  } else if constexpr (ROWS > 1) {
    weigh_sized<E, ROWS - 1>(rows, weights, values, subpages, dim, column, out);
  }
}

// scores[r][16 j ..] of the chunk's present subpages.
template <class E>
inline void score_chunk(AttentionScratch<E>& s, int first, int rows, int dim, int key_stride,
                        const E* const* keys, int subpages) {
  for (int j = 0; j < subpages; j++) {
    if (keys[j] == nullptr) continue;
    for (int r = first; r < first + rows; r += SCORE_ROWS) {
      const int count = first + rows - r < SCORE_ROWS ? first + rows - r : SCORE_ROWS;
      score_sized<E, SCORE_ROWS>(count, &s.query[r * dim], keys[j], key_stride, dim, &s.scores[r][j * SUBPAGE]);
    }
  }
}

// out[r] += weights[r] x values, over the chunk's present subpages.
template <class E>
inline void weigh_chunk(AttentionScratch<E>& s, int first, int rows, int dim, const E* const* values,
                        int subpages) {
  for (int column = 0; column < dim; column += WEIGH_COLUMNS * 16)
    for (int r = first; r < first + rows; r += WEIGH_ROWS) {
      const int count = first + rows - r < WEIGH_ROWS ? first + rows - r : WEIGH_ROWS;
      weigh_sized<E, WEIGH_ROWS>(count, s.weights[r], values, subpages, dim, column, &s.out[r * dim]);
    }
}

#if defined(__AMX_BF16__)
inline void shape_attention(int rows) {  // of more than 16 rows each tile takes 16, the last some in vain
  if (rows > 16) rows = 16;
  TileShapes shapes;
  for (int t : {0, 1, 2, 3, 4}) shapes.set(t, rows, 64);
  shapes.set(5, rows, 2 * SUBPAGE);      // weights of a subpage
  shapes.set(6, 16, 64);                 // 16 pairs of dim x 16 tokens
  shapes.set(7, SUBPAGE / 2, 64);        // 8 pairs of tokens x 16 columns
  TILE_SHAPES(shapes);
}

#define TILE_MAC_EXPANDED(C, A, B) TILE_MAC(C, A, B)
#define BANYAN_SCORE(J)                                   \
  if (keys[J] != nullptr) {                               \
    TILE_LOAD(6, keys[J] + row, key_stride * 2);          \
    TILE_MAC_EXPANDED(J, 4, 6);                           \
  }

// Four subpages: the accumulators there are.
inline void amx_score_half(AttentionScratch<bf16>& s, int first, int dim, int key_stride,
                           const bf16* const* keys, int column) {
  TILE_ZERO(0);
  TILE_ZERO(1);
  TILE_ZERO(2);
  TILE_ZERO(3);
  for (int d = 0; d < dim; d += 32) {
    TILE_LOAD(4, &s.query[first * dim + d], dim * 2);
    const size_t row = (size_t)(d / 2) * key_stride;
    BANYAN_SCORE(0)
    BANYAN_SCORE(1)
    BANYAN_SCORE(2)
    BANYAN_SCORE(3)
  }
  float* to = &s.scores[first][column];
  TILE_STORE(0, to, CHUNK * 4);
  TILE_STORE(1, to + 16, CHUNK * 4);
  TILE_STORE(2, to + 32, CHUNK * 4);
  TILE_STORE(3, to + 48, CHUNK * 4);
}

inline void amx_score_chunk(AttentionScratch<bf16>& s, int first, int rows, int dim, int key_stride,
                            const bf16* const* keys, int subpages) {
  for (int j = 0; j < subpages; j += 4)
    for (int r = 0; r < rows; r += 16)
      amx_score_half(s, first + r, dim, key_stride, keys + j, j * SUBPAGE);
}
#undef BANYAN_SCORE

#define BANYAN_WEIGH(C)                                   \
  if (columns > C) {                                      \
    TILE_LOAD(7, from + C * 32, dim * 4);               \
    TILE_MAC_EXPANDED(C, 5, 7);                              \
  }

inline void amx_weigh_chunk(AttentionScratch<bf16>& s, int first, int rows, int dim,
                            const bf16* const* values, int subpages) {
  for (int row = first; row < first + rows; row += 16)
    for (int column = 0; column < dim; column += 64) {
      const int columns = (dim - column < 64 ? dim - column : 64) / 16;
      TILE_ZERO(0);
      TILE_ZERO(1);
      TILE_ZERO(2);
      TILE_ZERO(3);
      for (int j = 0; j < subpages; j++) {
        if (values[j] == nullptr) continue;
        const bf16* from = values[j] + (size_t)column * 2;
        TILE_LOAD(5, &s.weights[row][j * SUBPAGE], CHUNK * 2);
        BANYAN_WEIGH(0)
        BANYAN_WEIGH(1)
        BANYAN_WEIGH(2)
        BANYAN_WEIGH(3)
      }
      TILE_STORE(0, &s.part[0][0], 256);
      if (columns > 1) TILE_STORE(1, &s.part[0][16], 256);
      if (columns > 2) TILE_STORE(2, &s.part[0][32], 256);
      if (columns > 3) TILE_STORE(3, &s.part[0][48], 256);
      const int count = first + rows - row < 16 ? first + rows - row : 16;
      for (int r = 0; r < count; r++)
        for (int c = 0; c < columns; c++) {
          float* at = &s.out[(row + r) * dim + column + c * 16];
          store(at, load(at) + load(&s.part[r][c * 16]));
        }
    }
}
#undef BANYAN_WEIGH
#endif

constexpr int32_t LANE[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

// The first `count` numbers; zeros behind them, whatever is there.
inline v16 first_of(const v16& x, int count) { return select(load_as<i16>(LANE) < i16{} + count, x, v16{}); }

// One row of a chunk's scores -> weights; rescales the row's output and total. Positions outside
// [low, high] weigh exactly 0, so it makes no difference how many subpages behind them are looked at.
template <class E>
inline void soften(AttentionScratch<E>& s, int r, int p0, int subpages, int low, int high,
                   const AttentionShape& shape) {
  const v16 none = splat(-__builtin_inff());
  v16 score[SUBPAGES], top = none;
  float scale = shape.scale * LOG2E;
  for (int j = 0; j < subpages; j++) score[j] = load(&s.scores[r][j * SUBPAGE]);
  if (shape.cap > 0) {
    for (int j = 0; j < subpages; j++)
      score[j] = tanhv(score[j] * splat(shape.scale / shape.cap)) * splat(shape.cap);
    scale = LOG2E;
  }
  if (p0 < low || p0 + subpages * SUBPAGE - 1 > high) {
    for (int j = 0; j < subpages; j++) {
      const i16 position = load_as<i16>(LANE) + (p0 + j * SUBPAGE);
      score[j] = select((position <= i16{} + high) & (position >= i16{} + low), score[j], none);
    }
  }
  for (int j = 0; j < subpages; j++) top = max(top, score[j]);
  const float before = s.top[r], now = largest(top) * scale;
  const float peak = now > before ? now : before;
  if (peak == -__builtin_inff()) {  // nothing seen yet
    for (int j = 0; j < subpages; j++) put_operands<E>(&s.weights[r][j * SUBPAGE], v16{});
    return;
  }
  v16 total = v16{};
  for (int j = 0; j < subpages; j++) {
    const v16 weight = exp2v(fma(score[j], splat(scale), splat(-peak)));
    put_operands<E>(&s.weights[r][j * SUBPAGE], weight);
    total = total + weight;
  }
  if (peak != before) {
    const v16 shrink = exp2v(splat(before - peak));
    s.total[r] = s.total[r] * shrink;
    float* out = &s.out[r * shape.dim];
    for (int d = 0; d < shape.dim; d += 16) store(out + d, load(out + d) * shrink);
    s.top[r] = peak;
  }
  s.total[r] = s.total[r] + total;
}

// Values of a subpage whose tokens from `valid` on were never written: those count as zeros.
template <class E>
inline const E* without_tail(AttentionScratch<E>& s, const E* values, int dim, int valid) {
  constexpr int STEP = Num<E>::STEP;
  std::memset(s.tail, 0, sizeof(E) * SUBPAGE * dim);
  const int whole = valid / STEP;
  std::memcpy(s.tail, values, sizeof(E) * (size_t)whole * dim * STEP);
  for (int t = whole * STEP; t < valid; t++)
    for (int d = 0; d < dim; d++) {
      const size_t at = ((size_t)(t / STEP) * dim + d) * STEP + t % STEP;
      s.tail[at] = values[at];
    }
  return s.tail;
}

// What walks know of a chunk: its subpages from position p0 on, those in `places`.
template <class Place>
struct Chunk {
  int p0, subpages;
  Place places[SUBPAGES];
};

// Pages of the model's dtype: all of a chunk's subpages at once.
template <class E>
void score_pages(AttentionScratch<E>& s, const PlainPages<E>& pages, const Chunk<PlaceOf<E>>& chunk, int /*head*/,
                 int first, int rows) {
  const E* keys[SUBPAGES] = {};
  for (int j = 0; j < chunk.subpages; j++) keys[j] = chunk.places[j].keys;
#if defined(__AMX_BF16__)
  if constexpr (sizeof(E) == 2) {
    amx_score_chunk(s, first, rows, pages.dim, pages.key_stride(), keys, chunk.subpages);
    return;
  }
#endif
  score_chunk(s, first, rows, pages.dim, pages.key_stride(), keys, chunk.subpages);
}

template <class E>
void weigh_pages(AttentionScratch<E>& s, const PlainPages<E>& pages, const Chunk<PlaceOf<E>>& chunk, int /*head*/,
                 int first, int rows, int length) {
  const E* values[SUBPAGES] = {};
  for (int j = 0; j < chunk.subpages; j++) {
    const int valid = length - (chunk.p0 + j * SUBPAGE);
    values[j] = chunk.places[j].values;
    if (values[j] != nullptr && valid < SUBPAGE) values[j] = without_tail(s, values[j], pages.dim, valid);
  }
#if defined(__AMX_BF16__)
  if constexpr (sizeof(E) == 2) {
    amx_weigh_chunk(s, first, rows, pages.dim, values, chunk.subpages);
    return;
  }
#endif
  weigh_chunk(s, first, rows, pages.dim, values, chunk.subpages);
}

// rows[r][16 j ..] times a factor by token.
inline void multiply_rows(float (*at)[CHUNK], int rows, int j, const v16& factor) {
  for (int r = 0; r < rows; r++) store(&at[r][j * SUBPAGE], load(&at[r][j * SUBPAGE]) * factor);
}

// Pages of codes: one subpage is decoded, used by all rows, and gives way to the next.
inline void score_pages(AttentionScratch<float>& s, const CodedPages& pages, const Chunk<PlaceOf<uint8_t>>& chunk,
                        int head, int first, int rows) {
  for (int j = 0; j < chunk.subpages; j++) {
    if (chunk.places[j].keys == nullptr) continue;
    const Decoded& decoded = pages.keys(chunk.places[j], head);
    const float* keys[SUBPAGES] = {};
    keys[j] = decoded.tile;
    score_chunk(s, first, rows, pages.dim, pages.key_stride(), keys, j + 1);
    multiply_rows(&s.scores[first], rows, j, decoded.factor);
  }
}

inline void weigh_pages(AttentionScratch<float>& s, const CodedPages& pages, const Chunk<PlaceOf<uint8_t>>& chunk,
                        int head, int first, int rows, int length) {
  for (int j = 0; j < chunk.subpages; j++) {
    if (chunk.places[j].values == nullptr) continue;
    const Decoded& decoded = pages.values(chunk.places[j], head);
    const int valid = length - (chunk.p0 + j * SUBPAGE);
    const float* values[SUBPAGES] = {};
    values[j] = valid < SUBPAGE ? without_tail(s, decoded.tile, pages.dim, valid) : decoded.tile;
    multiply_rows(&s.weights[first], rows, j, first_of(decoded.factor, valid));
    weigh_chunk(s, first, rows, pages.dim, values, j + 1);
  }
}

// Before the first walk of the scratch's rows.
template <class E>
void begin(AttentionScratch<E>& s, int rows, int dim) {
  for (int r = 0; r < rows; r++) {
    s.top[r] = -__builtin_inff();
    s.total[r] = v16{};
  }
  std::memset(s.out, 0, sizeof(float) * rows * dim);
}

// Rows [first, first + rows) of the scratch over positions [from, to) of a sequence of `length`
// positions, `from` a multiple of CHUNK; row r sees up to last[r], and the window before that. Walks
// of the same rows may follow each other, each by other pages: what is shared is walked together.
// `ahead`: the pages come from memory, not from a cache, so fetch them before their use.
template <class E, class Pages>
void walk(AttentionScratch<E>& s, const Pages& pages, int head, int first, int rows, const int* last,
          int from, int to, int length, const AttentionShape& shape, bool ahead) {
#if defined(__AMX_BF16__)
  if constexpr (sizeof(E) == 2) shape_attention(rows);
#endif
  for (int p0 = from; p0 < to; p0 += CHUNK) {
    const int subpages = to - p0 < CHUNK ? (to - p0 + SUBPAGE - 1) / SUBPAGE : SUBPAGES;
    Chunk<typename Pages::Place> chunk{p0, subpages, {}};
    for (int j = 0; j < subpages; j++) chunk.places[j] = pages.at(p0 + j * SUBPAGE, head);
    for (int j = 0; ahead && j < SUBPAGES; j++) {  // the chunk after this one
      const int p = p0 + CHUNK + j * SUBPAGE;
      if (p >= to) break;
      const auto next = pages.at(p, head);
      if (next.keys != nullptr) pages.fetch(next);
    }
    score_pages(s, pages, chunk, head, first, rows);
    for (int r = first; r < first + rows; r++) {
      const int low = shape.window > 0 ? last[r] - shape.window + 1 : 0;
      soften(s, r, p0, subpages, low, last[r], shape);
    }
    weigh_pages(s, pages, chunk, head, first, rows, length);
  }
}

// After the last walk: row r's result is s.out[r * dim ..].
template <class E>
void finish(AttentionScratch<E>& s, int rows, int dim) {
  for (int r = 0; r < rows; r++) {
    const v16 scale = splat(1.0f / sum(s.total[r]));
    float* out = &s.out[r * dim];
    for (int d = 0; d < dim; d += 16) store(out + d, load(out + d) * scale);
  }
}

}  // namespace banyan
