// One call computes a whole step: embedding, all layers, head; threads meet at a few barriers a layer.
#include "banyan_native.h"

#include <cmath>
#include <memory>
#include <new>
#include <vector>

#include "attention.h"
#include "buffers.h"
#include "copying.h"
#include "encode.h"
#include "gemm.h"
#include "rows.h"
#include "settled.h"
#include "tasks.h"
#include "threads.h"

namespace banyan {
namespace {

bool coded(const BanyanLayer& layer) { return layer.pages.keys.bits != 0; }

}  // namespace

struct Decoder {
  virtual ~Decoder() = default;
  virtual void step(const BanyanStep& step) = 0;
  virtual void recode(const BanyanPages* pages) = 0;
  virtual int64_t read(const void* from, int64_t bytes) = 0;
};

template <class E>
class DecoderOf final : public Decoder {
 public:
  DecoderOf(const BanyanConfig& config, const BanyanLayer* layers, const void* embedding, const void* head,
            const float* norm, int threads)
      : c_(config),
        layers_(layers, layers + config.layers),
        embedding_(static_cast<const E*>(embedding)),
        head_(static_cast<const E*>(head)),
        norm_(norm),
        team_(threads),
        counters_(config.layers),
        scratch_(threads),
        planner_(config) {
    hidden_ = padded(c_.hidden, INNER);
    qkv_ = padded((c_.query_heads + 2 * c_.kv_heads) * c_.head_dim, PANEL);
    attended_ = padded(c_.query_heads * c_.head_dim, INNER);
    inter_ = padded(c_.intermediate, INNER);
    // The panels of gate_up yield 16 entries of the activation each.
    gate_panels_ = padded(padded(c_.intermediate, 16) * 2, PANEL) / PANEL;
    for (auto& s : scratch_) s.reset(new Scratch);
  }

  void step(const BanyanStep& step) override {
    s_ = &step;
    reserve();
    planner_.plan(step);
    for (auto& counter : counters_) counter.store(0, std::memory_order_relaxed);
    team_.run([](void* self, int thread) { static_cast<DecoderOf*>(self)->body(thread); }, this);
  }

  void recode(const BanyanPages* pages) override {
    for (BanyanLayer& layer : layers_) layer.pages = *pages++;
  }

  int64_t read(const void* from, int64_t bytes) override {
    Reading reading{this, static_cast<const char*>(from), bytes, std::vector<i16>(team_.size())};
    team_.run([](void* context, int thread) { read_share(*static_cast<Reading*>(context), thread); },
              &reading);
    i16 all = {};
    for (const i16& one : reading.found) all = all ^ one;
    int32_t lanes[16];
    std::memcpy(lanes, &all, sizeof all);
    int64_t found = 0;
    for (const int32_t lane : lanes) found ^= lane;
    return found;
  }

 private:
  struct Reading {
    DecoderOf* self;
    const char* from;
    int64_t bytes;
    std::vector<i16> found;
  };

  static void read_share(Reading& reading, int thread) {
    const int64_t lines = reading.bytes / 128, parts = reading.self->team_.size();
    i16 a = {}, b = {};
    for (int64_t line = lines * thread / parts; line < lines * (thread + 1) / parts; line++) {
      const char* at = reading.from + line * 128;
      __builtin_prefetch(at + AHEAD);
      __builtin_prefetch(at + AHEAD + 64);
      a = a ^ load_as<i16>(at);
      b = b ^ load_as<i16>(at + 64);
    }
    reading.found[thread] = a ^ b;
  }

  struct Scratch {
    AttentionScratch<E> attention;
    AttentionScratch<float> coded;  // over codes
    Decoded decoded;
    alignas(64) float head[DIM_MAX];
  };

  void reserve() {
    const size_t rows = padded(s_->rows, 16);  // AMX may read whole tiles of rows
    residual_.reserve(rows * hidden_);
    // Several choices may be drawn from one row, so the head may see more rows than the step has.
    normed_.reserve((size_t)padded(std::max(s_->rows, s_->samples), 16) * hidden_);
    projected_.reserve(rows * (qkv_ > hidden_ ? qkv_ : hidden_));
    queries_.reserve(rows * attended_);
    outputs_.reserve(rows * attended_);
    activated_.reserve(rows * inter_);
  }

  void body(int thread) {
    const FlushDenormals flushing;
    embed(thread);
    meet();
    for (int i = 0; i < c_.layers; i++) {
      const BanyanLayer& layer = layers_[i];
      attend(layer, counters_[i], thread);
      feed_forward(layer, thread);
    }
    logits(thread);
  }

  void meet() { team_.barrier.wait(); }

  Share mine(int count, int thread) const { return share(count, team_.size(), thread); }

  void embed(int thread) {
    const Share rows = mine(s_->rows, thread);
    for (int row = rows.first; row < rows.last; row++) {
      float* into = residual_.get() + (size_t)row * hidden_;
      const int token = s_->token_ids[row];
      if (c_.tied) {
        unpack_row(embedding_, token, c_.hidden, into);
      } else {
        const E* from = embedding_ + (size_t)token * c_.hidden;
        for (int k = 0; k < c_.hidden; k++) into[k] = Num<E>::one(from + k);
      }
      if (c_.embedding_scale != 1.0f)
        for (int k = 0; k < c_.hidden; k++) into[k] *= c_.embedding_scale;
      for (int k = c_.hidden; k < hidden_; k++) into[k] = 0;
    }
  }

  // RMSNorm of a residual row (float32 weight) in the model's dtype.
  void norm_row(const float* row, const float* weight, E* into) const {
    const float scale = 1.0f / std::sqrt(mean_square(row, hidden_) / c_.hidden + c_.norm_eps);
    for (int k = 0; k < hidden_; k += 16)
      Num<E>::put(into + k, load(row + k) * splat(scale) * load(weight + k));
  }

  void norm_rows(const float* weight, int thread) {
    const Share rows = mine(s_->rows, thread);
    for (int row = rows.first; row < rows.last; row++)
      norm_row(residual_.get() + (size_t)row * hidden_, weight, normed_.get() + (size_t)row * hidden_);
    meet();
  }

  // --- attention ---------------------------------------------------------------------------------

  void attend(const BanyanLayer& layer, std::atomic<int>& counter, int thread) {
    norm_rows(layer.input_norm, thread);
    const Share panels = mine(qkv_ / PANEL, thread);
    float* projected = projected_.get();
    gemm(normed_.get(), hidden_, s_->rows, static_cast<const E*>(layer.qkv), hidden_, panels.first,
         panels.last, [&](int row, int panel, v16 low, v16 high) {
           float* at = projected + (size_t)row * qkv_ + panel * PANEL;
           if (layer.qkv_bias != nullptr) {
             low = low + load(layer.qkv_bias + panel * PANEL);
             high = high + load(layer.qkv_bias + panel * PANEL + 16);
           }
           store(at, low);
           store(at + 16, high);
         });
    meet();
    if (!planner_.decode_only()) {
      turn_rows(layer, thread);
      meet();
    }
    const TaskList& list = planner_.tasks(layer);
    for (int t; (t = counter.fetch_add(1, std::memory_order_relaxed)) < (int)list.tasks.size();)
      run_task(layer, list.tasks[t], &list.members[list.tasks[t].first_member], *scratch_[thread]);
    meet();
    project(layer.output, outputs_.get(), attended_, layer.output_bias, layer.attention_post_norm, thread);
  }

  // Adds a (rows `depth` apart) times a packed [hidden, depth] matrix to the residual stream.
  void project(const void* weights, const E* a, int depth, const float* bias, const float* post_norm,
               int thread) {
    const Share panels = mine(hidden_ / PANEL, thread);
    float* into = post_norm == nullptr ? residual_.get() : projected_.get();
    const bool add = post_norm == nullptr;
    gemm(a, depth, s_->rows, static_cast<const E*>(weights), depth, panels.first, panels.last,
         [&](int row, int panel, v16 low, v16 high) {
           float* at = into + (size_t)row * hidden_ + panel * PANEL;
           if (bias != nullptr) {
             low = low + load(bias + panel * PANEL);
             high = high + load(bias + panel * PANEL + 16);
           }
           store(at, add ? load(at) + low : low);
           store(at + 16, add ? load(at + 16) + high : high);
         });
    meet();
    if (add) return;
    const Share rows = mine(s_->rows, thread);
    for (int row = rows.first; row < rows.last; row++) {
      const float* x = projected_.get() + (size_t)row * hidden_;
      float* r = residual_.get() + (size_t)row * hidden_;
      const float scale = 1.0f / std::sqrt(mean_square(x, hidden_) / c_.hidden + c_.norm_eps);
      for (int k = 0; k < hidden_; k += 16)
        store(r + k, load(r + k) + load(x + k) * splat(scale) * load(post_norm + k));
    }
    meet();
  }

  // A head as projected -> normed (where the model does) and rotated, into `head`.
  void turn(const float* from, const float* weight, const BanyanLayer& layer, int position,
            float* head) const {
    const int dim = c_.head_dim, half = dim / 2;
    if (weight != nullptr) {
      const float scale = 1.0f / std::sqrt(mean_square(from, dim) / dim + c_.norm_eps);
      for (int d = 0; d < dim; d += 16) store(head + d, load(from + d) * splat(scale) * load(weight + d));
    } else if (from != head) {
      std::memcpy(head, from, sizeof(float) * dim);
    }
    const float* cosines = layer.cos + (size_t)position * half;
    const float* sines = layer.sin + (size_t)position * half;
    for (int d = 0; d < half; d += 16) {
      const v16 a = load(head + d), b = load(head + half + d), c = load(cosines + d), s = load(sines + d);
      store(head + d, fma(a, c, -(b * s)));
      store(head + half + d, fma(b, c, a * s));
    }
  }

  // A row's key and value of a head into its page.
  void write_kv(const BanyanLayer& layer, int sequence, int row, int head, float* scratch) {
    const int dim = c_.head_dim, bt = c_.block_tokens;
    const float* from = projected_.get() + (size_t)row * qkv_ + (c_.query_heads + head) * dim;
    turn(from, layer.key_norm, layer, s_->positions[row], scratch);
    alignas(64) E key[DIM_MAX], value[DIM_MAX];
    narrow(scratch, key, dim);
    narrow(from + c_.kv_heads * dim, value, dim);
    const BanyanPages& pages = layer.pages;
    const int position = position_of(sequence, row), offset = position % bt;
    char* block = pool(layer) + table(layer.group, sequence)[position / bt] * pages.block_bytes;
    if (coded(layer)) {
      uint8_t* keys = (uint8_t*)block + pages.keys_at + (size_t)head * bt * pages.keys.bytes;
      uint8_t* values = (uint8_t*)block + pages.values_at + (size_t)head * bt * pages.values.bytes;
      encode(pages.keys, key, head, dim, keys + offset, bt);
      encode(pages.values, value, head, dim, values + (size_t)offset * pages.values.bytes, 1);
    } else {
      const size_t first = (size_t)head * bt * dim;
      put_pairs(key, value, offset, (E*)(block + pages.keys_at) + first, (E*)(block + pages.values_at) + first);
    }
  }

  // A token's numbers into a head's page (PlainPages).
  void put_pairs(const E* key, const E* value, int offset, E* keys, E* values) const {
    constexpr int STEP = Num<E>::STEP;
    const int dim = c_.head_dim, bt = c_.block_tokens;
    for (int d = 0; d < dim; d++) keys[(d / STEP * bt + offset) * STEP + d % STEP] = key[d];
    values += (size_t)(offset / STEP) * dim * STEP + offset % STEP;
    for (int d = 0; d < dim; d++) values[d * STEP] = value[d];
  }

  char* pool(const BanyanLayer& layer) const { return static_cast<char*>(s_->pools[layer.group]); }

  void turn_query(const BanyanLayer& layer, int row, int head, E* into, float* scratch) const {
    const int dim = c_.head_dim;
    turn(projected_.get() + (size_t)row * qkv_ + head * dim, layer.query_norm, layer, s_->positions[row],
         scratch);
    narrow(scratch, into, dim);
  }

  // Keys and values of all rows into the pages, queries into their buffer.
  void turn_rows(const BanyanLayer& layer, int thread) {
    const Share rows = mine(s_->rows, thread);
    float* scratch = scratch_[thread]->head;
    int sequence = 0;
    for (int row = rows.first; row < rows.last; row++) {
      while (row >= s_->starts[sequence + 1]) sequence++;
      for (int head = 0; head < c_.kv_heads; head++) write_kv(layer, sequence, row, head, scratch);
      for (int head = 0; head < c_.query_heads; head++)
        turn_query(layer, row, head, queries_.get() + (size_t)row * attended_ + head * c_.head_dim, scratch);
    }
  }

  void run_task(const BanyanLayer& layer, const Task& task, const Member* members, Scratch& scratch) {
    if (coded(layer))
      run_rows<true>(layer, task, members, scratch.coded, scratch);
    else
      run_rows<false>(layer, task, members, scratch.attention, scratch);
  }

  template <bool CODED, class N>
  void run_rows(const BanyanLayer& layer, const Task& task, const Member* members, AttentionScratch<N>& s,
                Scratch& scratch) {
    const int dim = c_.head_dim, group = c_.query_heads / c_.kv_heads;
    const int first_head = task.head * group + task.first_query;
    int last[TILE_ROWS], rows = 0;
    for (int m = 0; m < task.members; m++) {
      const Member& member = members[m];
      if (planner_.decode_only()) write_kv(layer, member.sequence, member.first_row, task.head, scratch.head);
      for (int row = member.first_row; row < member.first_row + member.tokens; row++)
        for (int q = 0; q < task.queries; q++, rows++) {
          last[rows] = position_of(member.sequence, row);
          E* query = queries_.get() + (size_t)row * attended_ + (first_head + q) * dim;
          if (planner_.decode_only()) turn_query(layer, row, first_head + q, query, scratch.head);
          load_query<CODED>(layer, query, s.query + rows * dim);
        }
    }
    const AttentionShape shape{dim, layer.window, c_.attention_scale, c_.attention_cap};
    begin(s, rows, dim);
    if (task.shared > 0)
      walk(s, pages<CODED>(layer, members[0].sequence, scratch), task.head, 0, rows, last, 0, task.shared,
           task.shared, shape, true);
    int first = 0;
    for (int m = 0; m < task.members; m++) {
      const Member& member = members[m];
      const int count = member.tokens * task.queries;
      const int oldest = layer.window > 0 ? last[first] - layer.window + 1 : 0;
      const int from = oldest > task.shared ? oldest / CHUNK * CHUNK : task.shared;
      walk(s, pages<CODED>(layer, member.sequence, scratch), task.head, first, count, last, from,
           last[first + count - 1] + 1, s_->lengths[member.sequence], shape, member.tokens == 1);
      first += count;
    }
    finish(s, rows, dim);
    rows = 0;
    for (int m = 0; m < task.members; m++)
      for (int row = members[m].first_row; row < members[m].first_row + members[m].tokens; row++)
        for (int q = 0; q < task.queries; q++, rows++) {
          if (CODED) turn_out(layer.pages.values, s.out + rows * dim, dim);
          narrow(s.out + rows * dim, outputs_.get() + (size_t)row * attended_ + (first_head + q) * dim, dim);
        }
  }

  template <bool CODED, class Operand>
  void load_query(const BanyanLayer& layer, const E* query, Operand* into) const {
    if constexpr (CODED) {
      widen(query, into, c_.head_dim);
      turn_in(layer.pages.keys, into, c_.head_dim);
    } else {
      as_operands(query, into, c_.head_dim);
    }
  }

  template <bool CODED>
  auto pages(const BanyanLayer& layer, int sequence, Scratch& scratch) const {
    const BanyanPages& how = layer.pages;
    const int32_t* blocks = table(layer.group, sequence);
    if constexpr (CODED)
      return CodedPages(how, pool(layer), c_.block_tokens, c_.head_dim, blocks, scratch.decoded);
    else
      return PlainPages<E>{(const E*)(pool(layer) + how.keys_at), how.block_bytes / sizeof(E),
                           (how.values_at - how.keys_at) / sizeof(E), c_.block_tokens, c_.head_dim, blocks};
  }

  const int32_t* table(int group, int sequence) const {
    return s_->tables[group] + (size_t)sequence * s_->widths[group];
  }

  // Where among its sequence's physical positions a row is.
  int position_of(int sequence, int row) const {
    return s_->lengths[sequence] - (s_->starts[sequence + 1] - row);
  }

  // --- the rest of a layer -----------------------------------------------------------------------

  void feed_forward(const BanyanLayer& layer, int thread) {
    norm_rows(layer.mlp_norm, thread);
    const Share panels = mine(gate_panels_, thread);
    const bool silu = c_.activation == BANYAN_SILU;
    gemm(normed_.get(), hidden_, s_->rows, static_cast<const E*>(layer.gate_up), hidden_, panels.first,
         panels.last, [&](int row, int panel, v16 gate, v16 up) {
           if (layer.gate_up_bias != nullptr) {
             gate = gate + load(layer.gate_up_bias + panel * PANEL);
             up = up + load(layer.gate_up_bias + panel * PANEL + 16);
           }
           v16 inside = gate;
           if (!silu)  // gelu's tanh form: x sigmoid(2 sqrt(2/pi) (x + 0.044715 x^3))
             inside = gate * splat(1.5957691216f) * fma(gate * gate, splat(0.044715f), splat(1.0f));
           Num<E>::put(activated_.get() + (size_t)row * inter_ + panel * 16, gate * sigmoid(inside) * up);
         });
    meet();
    project(layer.down, activated_.get(), inter_, layer.down_bias, layer.mlp_post_norm, thread);
  }

  void logits(int thread) {
    const Share rows = mine(s_->samples, thread);
    for (int i = rows.first; i < rows.last; i++)
      norm_row(residual_.get() + (size_t)s_->sample_rows[i] * hidden_, norm_,
               normed_.get() + (size_t)i * hidden_);
    meet();
    const Share panels = mine(padded(c_.vocab, PANEL) / PANEL, thread);
    gemm(normed_.get(), hidden_, s_->samples, head_, hidden_, panels.first, panels.last,
         [&](int row, int panel, v16 low, v16 high) {
           float* at = s_->logits + (size_t)row * s_->logits_stride + panel * PANEL;
           if (c_.final_cap > 0) {
             low = tanhv(low * splat(1 / c_.final_cap)) * splat(c_.final_cap);
             high = tanhv(high * splat(1 / c_.final_cap)) * splat(c_.final_cap);
           }
           store(at, low);
           store(at + 16, high);
         });
  }

  const BanyanConfig c_;
  std::vector<BanyanLayer> layers_;
  const E* const embedding_;
  const E* const head_;
  const float* const norm_;
  int hidden_, qkv_, attended_, inter_, gate_panels_;  // widths of rows, padded
  Team team_;
  std::vector<std::atomic<int>> counters_;  // next attention task, per layer
  std::vector<std::unique_ptr<Scratch>> scratch_;
  const BanyanStep* s_ = nullptr;
  Planner planner_;
  Buffer<float> residual_, projected_;
  Buffer<E> normed_, queries_, outputs_, activated_;
};

}  // namespace banyan

using banyan::bf16;

struct BanyanDecoder {
  std::unique_ptr<banyan::Decoder> decoder;
};

extern "C" {

int32_t banyan_version(void) { return BANYAN_NATIVE_VERSION; }

int32_t banyan_allowed(void) {
#if defined(__AMX_BF16__)
  return banyan::amx_allowed();
#else
  return 1;
#endif
}

int64_t banyan_packed_bytes(int32_t dtype, int32_t outputs, int32_t inner) {
  return (int64_t)banyan::padded(outputs, banyan::PANEL) * banyan::padded(inner, banyan::INNER) *
         (dtype == BANYAN_BF16 ? 2 : 4);
}

void banyan_pack(int32_t dtype, const void* source, void* target, int32_t outputs, int32_t inner,
                 int32_t halves) {
  if (dtype == BANYAN_BF16)
    banyan::pack((const bf16*)source, (bf16*)target, outputs, inner, halves != 0);
  else
    banyan::pack((const float*)source, (float*)target, outputs, inner, halves != 0);
}

BanyanDecoder* banyan_decoder_new(const BanyanConfig* config, const BanyanLayer* layers,
                                  const void* embedding, const void* head, const float* norm,
                                  int32_t threads) {
  try {
    std::unique_ptr<banyan::Decoder> made;
    if (config->dtype == BANYAN_BF16)
      made.reset(new banyan::DecoderOf<bf16>(*config, layers, embedding, head, norm, threads));
    else
      made.reset(new banyan::DecoderOf<float>(*config, layers, embedding, head, norm, threads));
    return new BanyanDecoder{std::move(made)};
  } catch (const std::exception&) {
    return nullptr;
  }
}

void banyan_decoder_free(BanyanDecoder* decoder) { delete decoder; }

void banyan_decoder_recode(BanyanDecoder* decoder, const BanyanPages* pages) {
  decoder->decoder->recode(pages);
}

int64_t banyan_read(BanyanDecoder* decoder, const void* from, int64_t bytes) {
  return decoder->decoder->read(from, bytes);
}

void banyan_copy_streaming(void* to, const void* from, int64_t bytes) {
  banyan::copy_streaming((char*)to, (const char*)from, bytes);
}

int32_t banyan_step(BanyanDecoder* decoder, const BanyanStep* step) {
  try {
    decoder->decoder->step(*step);
    return 0;
  } catch (const std::bad_alloc&) {
    return -1;
  }
}
}
