// A step's attention as tasks that threads take one by one; knows no layer and no number type.
#pragma once

#include <algorithm>
#include <vector>

#include "attention.h"
#include "banyan_native.h"

namespace banyan {

// Consecutive rows of one sequence.
struct Member {
  int sequence, first_row, tokens;
};

// Query rows of one KV head that walk pages together: one member, or several that decode behind a
// common prefix of `shared` positions (cascade attention; Hydragen, Juravsky et al. 2024, and
// FlashInfer's): they walk that once, then each its own. The result is the same to the bit.
struct Task {
  int head, first_query, queries, first_member, members, shared;
  int64_t cost;
};

struct TaskList {
  std::vector<Task> tasks;
  std::vector<Member> members;

  void clear() {
    tasks.clear();
    members.clear();
  }
};

class Planner {
 public:
  explicit Planner(const BanyanConfig& config) : c_(config), shared_(config.groups) {}

  // Makes the lists of a step, the costliest task first; valid until the next.
  void plan(const BanyanStep& step) {
    s_ = &step;
    const int group = c_.query_heads / c_.kv_heads;
    queries_per_task_ = group < TILE_ROWS ? group : TILE_ROWS;
    tokens_per_task_ = TILE_ROWS / queries_per_task_;
    decode_only_ = group <= TILE_ROWS;
    for (int i = 0; i < s_->sequences; i++)
      if (s_->starts[i + 1] - s_->starts[i] > 1) decode_only_ = false;
    lone_.clear();
    for (int i = 0; i < s_->sequences; i++) add_alone(lone_, i);
    sort(lone_);
    for (int g = 0; g < c_.groups; g++) plan_group(g);
  }

  // For layers with a window every sequence walks alone; else those of a group's tables that begin
  // with the same blocks walk them together.
  const TaskList& tasks(const BanyanLayer& layer) const {
    return layer.window > 0 ? lone_ : shared_[layer.group];
  }

  // Each sequence has one row, and one task a head: that may write its key and value itself.
  bool decode_only() const { return decode_only_; }

 private:
  static void sort(TaskList& list) {
    std::stable_sort(list.tasks.begin(), list.tasks.end(),
                     [](const Task& a, const Task& b) { return a.cost > b.cost; });
  }

  void add_alone(TaskList& list, int sequence) {
    const int first = s_->starts[sequence], last = s_->starts[sequence + 1];
    for (int row = last; row > first; row -= tokens_per_task_) {
      const int from = row - tokens_per_task_ > first ? row - tokens_per_task_ : first;
      list.members.push_back({sequence, from, row - from});
      add_tasks(list, (int)list.members.size() - 1, 1, 0, s_->lengths[sequence] - (last - row));
    }
  }

  void add_tasks(TaskList& list, int member, int members, int shared, int64_t cost) {
    const int group = c_.query_heads / c_.kv_heads;
    for (int head = 0; head < c_.kv_heads; head++)
      for (int q = 0; q < group; q += queries_per_task_) {
        const int queries = group - q < queries_per_task_ ? group - q : queries_per_task_;
        list.tasks.push_back({head, q, queries, member, members, shared, cost});
      }
  }

  const int32_t* table(int group, int sequence) const {
    return s_->tables[group] + (size_t)sequence * s_->widths[group];
  }

  // Leading positions that two decoding sequences hold in the same blocks, in whole chunks.
  int common(int group, int a, int b) const {
    const int length = s_->lengths[a] < s_->lengths[b] ? s_->lengths[a] : s_->lengths[b];
    const int32_t *x = table(group, a), *y = table(group, b);
    int blocks = 0;
    while ((blocks + 1) * c_.block_tokens <= length && x[blocks] >= 0 && x[blocks] == y[blocks]) blocks++;
    return blocks * c_.block_tokens / CHUNK * CHUNK;
  }

  void plan_group(int group) {
    TaskList& list = shared_[group];
    list.clear();
    order_.clear();
    for (int i = 0; i < s_->sequences; i++) {
      const int rows = s_->starts[i + 1] - s_->starts[i];
      if (rows == 1 && tokens_per_task_ > 1 && s_->lengths[i] > CHUNK)
        order_.push_back(i);
      else if (rows > 0)
        add_alone(list, i);
    }
    // Sequences with a common prefix come to stand side by side.
    std::sort(order_.begin(), order_.end(), [&](int a, int b) {
      const int32_t *x = table(group, a), *y = table(group, b);
      const int width = s_->widths[group];
      for (int i = 0; i < width; i++)
        if (x[i] != y[i]) return x[i] < y[i];
      return a < b;
    });
    for (size_t i = 0; i < order_.size();) {
      size_t end = i + 1;
      int shared = 0;
      while (end < order_.size() && (int)(end - i) < tokens_per_task_) {
        const int with = common(group, order_[i], order_[end]);
        if (with == 0 || (end - i > 1 && with < shared / 2)) break;
        shared = with;  // of the first and the last, so of all between
        end++;
      }
      const int member = (int)list.members.size();
      int64_t cost = shared;
      for (size_t k = i; k < end; k++) {
        list.members.push_back({order_[k], s_->starts[order_[k]], 1});
        cost += s_->lengths[order_[k]] - shared;
      }
      add_tasks(list, member, (int)(end - i), shared, cost);
      i = end;
    }
    sort(list);
  }

  const BanyanConfig c_;
  const BanyanStep* s_ = nullptr;
  TaskList lone_;
  std::vector<TaskList> shared_;  // per group
  std::vector<int> order_;
  int queries_per_task_ = 1, tokens_per_task_ = 1;
  bool decode_only_ = true;
};

}  // namespace banyan
