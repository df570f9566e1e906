/* The C ABI of the compiled CPU path. Layouts and meaning: kernels/native/decoder.py. */
#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define BANYAN_NATIVE_VERSION 4

enum { BANYAN_FP32 = 0, BANYAN_BF16 = 1 };
enum { BANYAN_SILU = 0, BANYAN_GELU_TANH = 1 };

typedef struct {
  int32_t dtype, layers, hidden, intermediate, query_heads, kv_heads, head_dim, vocab;
  int32_t block_tokens, groups, activation, tied;
  float norm_eps, attention_scale, attention_cap, final_cap, embedding_scale;
} BanyanConfig;

/* How the keys or the values of a layer are stored. bits: 0, the model's dtype, and nothing else is read;
   8, e4m3 with a scale per KV head; 1 to 4, indices of a codebook and a norm in fp16, turned by signs and
   then by Sylvester's matrix of head_dim / odd times Hartley's of odd. */
typedef struct {
  int32_t bits, bytes; /* of a number, of a vector */
  const float *scales; /* [kv_heads] */
  const float *centroids, *boundaries; /* [16], fewer ones repeated; [2^bits - 1], ascending */
  const double *signs, *hartley;       /* [head_dim] of 1 and -1; [odd, odd] */
  int32_t odd;
} BanyanVectors;

/* A layer's share of its group's blocks, in bytes. Both are codes, or neither. */
typedef struct {
  int64_t block_bytes, keys_at, values_at; /* from block to block; in a block */
  BanyanVectors keys, values;
} BanyanPages;

/* Matrices are packed (banyan_pack); vectors are float32, padded with zeros to a multiple of 32
   where they go with a matrix's outputs. Absent ones are null. */
typedef struct {
  const void *qkv, *output, *gate_up, *down;
  const float *input_norm, *mlp_norm, *attention_post_norm, *mlp_post_norm, *query_norm, *key_norm;
  const float *qkv_bias, *output_bias, *gate_up_bias, *down_bias;
  const float *cos, *sin; /* [positions, head_dim/2] */
  int32_t group, window;
  BanyanPages pages;
} BanyanLayer;

typedef struct {
  int32_t rows, sequences, samples;
  const int32_t *token_ids, *positions, *starts, *lengths;
  const int32_t *const *tables; /* [groups] -> [sequences, widths[g]] */
  const int32_t *widths;
  const int32_t *sample_rows;
  void *const *pools; /* [groups] */
  float *logits;      /* [samples, logits_stride] */
  int64_t logits_stride;
} BanyanStep;

/* TurboQuant whose codes are settled for vectors that come back rounded to bf16 (turboquant.py): of 4 bits,
   dim 32, 64, 128 or 256. A codeword may be stretched by `lowest` to `highest` to its norm. */
typedef struct {
  BanyanVectors how;
  int32_t dim;
  double lowest, highest;
} BanyanSettled;

/* Vectors of bf16 and their codes; strides are bytes from one to the next. */
typedef struct {
  int64_t count;
  void *vectors, *codes;
  int64_t vector_stride, code_stride;
} BanyanBatch;

typedef struct BanyanDecoder BanyanDecoder;

int32_t banyan_version(void);
/* 1 if this process may run this build's instructions beyond what cpuid says (AMX), else 0. */
int32_t banyan_allowed(void);
/* Bytes of a packed [outputs, inner] matrix. */
int64_t banyan_packed_bytes(int32_t dtype, int32_t outputs, int32_t inner);
void banyan_pack(int32_t dtype, const void *source, void *target, int32_t outputs, int32_t inner,
                 int32_t halves);
/* Copies both structs; the memory they point to must outlive the decoder. Null if memory is short. */
BanyanDecoder *banyan_decoder_new(const BanyanConfig *config, const BanyanLayer *layers,
                                  const void *embedding, const void *head, const float *norm,
                                  int32_t threads);
void banyan_decoder_free(BanyanDecoder *decoder);
/* Between steps: keys and values are stored so from now on, [layers]. Copied like the layers. */
void banyan_decoder_recode(BanyanDecoder *decoder, const BanyanPages *pages);
/* One step: writes the rows' keys and values into the pools and the sampled rows' logits. 0, or -1 if
   memory is short (nothing but scratch was touched). Not reentrant. */
int32_t banyan_step(BanyanDecoder *decoder, const BanyanStep *step);
/* Reads `bytes` (a multiple of 128 per thread) on all threads, as fast as memory gives them; returns
   their exclusive or, so that no compiler leaves the reading out. For measurements. */
int64_t banyan_read(BanyanDecoder *decoder, const void *from, int64_t bytes);
/* Like memcpy, past the caches if `to` is aligned to 64 bytes. */
void banyan_copy_streaming(void *to, const void *from, int64_t bytes);
/* Writes codes. Returns how many vectors are left to kernels/codecs, whose sums alone decide there, and marks
   them with 1 in left [count], the others with 0; -1 and nothing else if there is no such codec. */
int64_t banyan_encode_settled(const BanyanSettled *codec, const BanyanBatch *batch, uint8_t *left);
/* Writes vectors. 0, or -1 and nothing else if there is no such codec. */
int64_t banyan_decode_settled(const BanyanSettled *codec, const BanyanBatch *batch);

#ifdef __cplusplus
}
#endif
