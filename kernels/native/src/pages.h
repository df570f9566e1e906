// A sequence's pages of one layer, sixteen tokens of a head at a time, in the form that attention reads;
// knows no query.
//
// That form: keys [dim/STEP][tokens][STEP], values [tokens/STEP][dim][STEP], so that a vector is one number
// of sixteen tokens, or of sixteen columns. Pages of the model's dtype are read where they lie, codes are
// decoded into the thread's memory. Both kinds have the same functions; another codec is another kind,
// or another way to decode (codes.h).
#pragma once

#include "codes.h"
#include "vector.h"

namespace banyan {

constexpr int SUBPAGE = TOGETHER;  // tokens of a vector; block_tokens is a multiple of it
constexpr int CHUNK = 64;          // positions between two rescalings
constexpr int SUBPAGES = CHUNK / SUBPAGE;

// Sixteen tokens of a head; null if their block is absent.
template <class T>
struct PlaceOf {
  const T *keys, *values;
};

// Ahead of their use, into L2: the pages of two chunks overfill L1. Of keys in blocks longer than a subpage
// it brings only the first, and the CPU's own prefetcher the rest.
template <class T>
inline void fetch_both(const PlaceOf<T>& at, size_t key_bytes, size_t value_bytes) {
  for (size_t b = 0; b < key_bytes; b += 64) __builtin_prefetch((const char*)at.keys + b, 0, 2);
  for (size_t b = 0; b < value_bytes; b += 64) __builtin_prefetch((const char*)at.values + b, 0, 2);
}

// Pages of the model's own dtype, read where they lie.
template <class E>
struct PlainPages {
  typedef PlaceOf<E> Place;

  const E* pool;         // of one layer's keys
  size_t block_elements; // from one block to the next
  size_t values_offset;  // from a layer's keys to its values
  int block_tokens, dim;
  const int32_t* table;

  // Position p0 (a multiple of SUBPAGE) of a head.
  Place at(int p0, int head) const {
    const int32_t block = table[p0 / block_tokens];
    if (block < 0) return {nullptr, nullptr};
    const int offset = p0 % block_tokens;
    const E* page = pool + block * block_elements + (size_t)head * block_tokens * dim;
    return {page + offset * Num<E>::STEP, page + values_offset + (size_t)offset * dim};
  }
  int key_stride() const { return block_tokens * Num<E>::STEP; }  // in elements
  void fetch(const Place& at) const {
    const size_t bytes = sizeof(E) * SUBPAGE * dim;
    fetch_both(at, bytes, bytes);
  }
};

// A thread's memory for sixteen decoded tokens, keys or values: so few that they stay in the L1 cache.
struct Decoded {
  alignas(64) float tile[SUBPAGE * DIM_MAX];
  v16 factor;  // by token
};

// Pages of codes: keys [kv_heads][bytes][block_tokens], values [kv_heads][block_tokens][bytes].
struct CodedPages {
  typedef PlaceOf<uint8_t> Place;

  const BanyanPages* how;
  const uint8_t* pool;  // of the group's blocks
  int block_tokens, dim;
  const int32_t* table;
  Decoded* decoded;
  DecodeKeys decode_keys;
  DecodeValues decode_values;

  CodedPages(const BanyanPages& how, const void* pool, int block_tokens, int dim, const int32_t* table,
             Decoded& decoded)
      : how(&how),
        pool((const uint8_t*)pool),
        block_tokens(block_tokens),
        dim(dim),
        table(table),
        decoded(&decoded),
        decode_keys(key_decoder(how.keys.bits)),
        decode_values(value_decoder(how.values.bits)) {}

  Place at(int p0, int head) const {
    const int32_t block = table[p0 / block_tokens];
    if (block < 0) return {nullptr, nullptr};
    const size_t offset = p0 % block_tokens, first = (size_t)head * block_tokens;
    const uint8_t* page = pool + block * how->block_bytes;
    return {page + how->keys_at + first * how->keys.bytes + offset,
            page + how->values_at + (first + offset) * how->values.bytes};
  }
  // Valid until the next, of keys or of values.
  const Decoded& keys(const Place& at, int head) const {
    decode_keys(how->keys, at.keys, block_tokens, head, dim, decoded->tile, decoded->factor);
    return *decoded;
  }
  const Decoded& values(const Place& at, int head) const {
    decode_values(how->values, at.values, head, dim, decoded->tile, decoded->factor);
    return *decoded;
  }
  int key_stride() const { return SUBPAGE; }
  void fetch(const Place& at) const {
    fetch_both(at, (size_t)SUBPAGE * how->keys.bytes, (size_t)SUBPAGE * how->values.bytes);
  }
};

}  // namespace banyan
