// Runs a program's operations in one call, in one parallel region. An operation is one or several
// stages, but neighbouring operations that work row by row form one stage together.
//
// A stage begins when all pieces of the stages before it are done, and reads what they have
// written. Values are rounded where PyTorch rounds them layer by layer: fused operations (residual
// sums, SiLU) keep the roundings of the unfused ones.
#include <algorithm>
#include <vector>

#include "attention.h"
#include "check.h"
#include "elements.h"
#include "experts.h"
#include "greatest.h"
#include "linear_store.h"
#include "low_rank.h"
#include "quire.h"

namespace quire {
namespace {

int num_stages(const Op& op) {
  if (op.kind == QUIRE_EXPERTS) return Experts::kStages;
  return op.kind == QUIRE_LINEAR ? 4 : 2;
}

int num_stages(const ForwardArgs& args) {
  int sum = 0;
  for (int i = args.first_op; i < args.end_op; ++i) sum += num_stages(args.ops[i]);
  return sum;
}

// The arguments that all layers share. Each layer adds its caches and buffers.
AttendArgs attend_args(const ForwardArgs& a) {
  AttendArgs args = {};
  args.dtype = a.dtype;
  args.block_tables = a.block_tables;
  args.bt_stride = a.bt_stride;
  args.bt_width = a.bt_width;
  args.seq_lens = a.seq_lens;
  args.query_starts = a.query_starts;
  args.num_tokens = a.num_tokens;
  args.num_blocks = a.num_blocks;
  args.num_rows = a.num_rows;
  args.num_heads = a.num_heads;
  args.num_kv_heads = a.num_kv_heads;
  args.head_size = a.head_size;
  args.block_size = a.block_size;
  args.cache_is_int8 = a.cache_is_int8;
  return args;
}

// Checks the range of every index that a step reads or writes through.
QuireRefusal check(const ForwardArgs& a) {
  const int64_t num_slots = int64_t{a.num_blocks} * a.block_size;
  for (const QuireRefusal& refusal :
       {check_indices(QUIRE_TOKEN_ID, a.token_ids, a.num_tokens, a.vocab_size),
        check_indices(QUIRE_POSITION, a.positions, a.num_tokens, a.num_positions),
        check_indices(QUIRE_SLOT, a.slots, a.num_tokens, num_slots),
        check_indices(QUIRE_LAST_TOKEN, a.last_tokens, a.num_samples, a.num_tokens)})
    if (refusal.what) return refusal;
  if (a.adapter_slots) {
    const QuireRefusal refusal = check_slots(a.adapter_slots, a.num_tokens, a.num_slots);
    if (refusal.what) return refusal;
  }
  return check_rows(attend_args(a));
}

class Forward {
 public:
  explicit Forward(const ForwardArgs& args)
      : a_(args),
        stages_(num_stages(args)),
        size_(args.dtype == QUIRE_BF16 ? 2 : 4),
        attend_(attend_args(args)) {
    if (args.adapter_slots)
      adapters_ = AdapterGroups(args.adapter_slots, args.num_tokens, args.num_slots);
    bool ends = false;
    for (int i = args.first_op; i < args.end_op; ++i) {
      const Op& op = args.ops[i];
      ends |= op.kind == QUIRE_LOGITS;
      if (op.kind == QUIRE_EXPERTS) experts_.emplace_back(args, op.experts, adapters_);
      if (op.kind != QUIRE_ATTEND || plan_for(op.attend.window)) continue;
      AttendArgs attend = attend_;
      attend.window = op.attend.window;
      plans_.push_back(plan_attention(attend, args.num_threads));
    }
    if (ends) {
      greatest_.resize(args.num_threads * args.num_greedy);
      for (int64_t i = 0; i < args.num_threads * args.num_greedy; ++i)
        greatest_[i].clear(args.edits, i % args.num_greedy);
    }
  }

  void run(Team team) {
    Stage* stage = stages_.data();
    auto experts = experts_.begin();
    for (int i = a_.first_op, next; i < a_.end_op; i = next) {
      const Op& op = a_.ops[i];
      team.stage = stage;
      stage += num_stages(op);
      next = i + 1;
      switch (op.kind) {
        case QUIRE_LINEAR: linear(op.linear, team); break;
        case QUIRE_ATTEND: attend(op.attend, team); break;
        case QUIRE_EXPERTS: (experts++)->run(team); break;
        case QUIRE_LOGITS: logits(op.logits, team); break;
        default: {
          const bool samples = is_sampled(op);
          while (!samples && next < a_.end_op && is_by_token(a_.ops[next])) ++next;
          team.share_rows(samples ? a_.num_samples : a_.num_tokens,
                          [&](int64_t begin, int64_t end) {
                            for (int each = i; each < next; ++each)
                              row_op(a_.ops[each], begin, end);
                          });
        }
      }
    }
  }

 private:
  static bool is_sampled(const Op& op) { return op.kind == QUIRE_NORM && op.norm.is_sampled; }

  // Whether each token's row is computed from that token's rows alone.
  static bool is_by_token(const Op& op) {
    const bool shares = op.kind == QUIRE_LINEAR || op.kind == QUIRE_ATTEND ||
                        op.kind == QUIRE_EXPERTS || op.kind == QUIRE_LOGITS;
    return !shares && !is_sampled(op);
  }

  void row_op(const Op& op, int64_t begin, int64_t end) {
    switch (op.kind) {
      case QUIRE_EMBED: return embed(op.embed, begin, end);
      case QUIRE_NORM: return norm(op.norm, begin, end);
      case QUIRE_ROTATE_AND_WRITE: return rotate_and_write(op.rotate_and_write, begin, end);
      case QUIRE_ROUND_PARTIAL:
        return with_type(
            [&](auto type) { round_partial<decltype(type)>(op.round_partial, begin, end); });
      case QUIRE_ADD_VALUE:
        return with_type([&](auto type) { add_value<decltype(type)>(op.add_value, begin, end); });
      case QUIRE_GELU:
        return with_type([&](auto type) { gelu_rows<decltype(type)>(op.gelu, begin, end); });
      case QUIRE_ROUTE: return route(op.route, begin, end);
      case QUIRE_MIX: return mix(op.mix, begin, end);
    }
  }

  template <class Work>
  void with_type(const Work& work) {
    a_.dtype == QUIRE_BF16 ? work(bf16()) : work(float());
  }

  void embed(const EmbedOp& op, int64_t begin, int64_t end) {
    const int64_t row_bytes = a_.widths[op.out] * size_;
    for (int64_t token = begin; token < end; ++token)
      std::memcpy(buffer(op.out) + token * row_bytes,
                  static_cast<const char*>(op.weight) + a_.token_ids[token] * row_bytes, row_bytes);
  }

  void norm(const NormOp& op, int64_t begin, int64_t end) {
    NormArgs args = {};
    args.dtype = a_.dtype;
    args.x = buffer(op.x);
    args.rows = op.is_sampled ? a_.last_tokens : nullptr;
    args.weight = op.weight;
    args.bias = op.bias;
    args.out = buffer(op.out);
    args.num_channels = a_.widths[op.x];
    args.eps = op.eps;
    args.kind = op.norm_kind;
    norm_rows(args, begin, end);
    if (op.next) quantize(*op.next, op.out, begin, end);
  }

  void linear(const LinearOp& op, Team team) {
    if (op.quantizes) {
      team.share_rows(a_.num_tokens,
                      [&](int64_t begin, int64_t end) { quantize(*op.weights, op.x, begin, end); });
      ++team.stage;
    }
    LinearArgs args = linear_args(*op.weights, op.mode, op.x);
    args.out = buffer(op.out);
    args.out_stride = a_.widths[op.out];
    args.num_rows = a_.num_tokens;
    const bool is_share = op.out == QUIRE_PARTIAL;
    float* t = is_share ? behind(QUIRE_PARTIAL, a_.widths[QUIRE_PARTIAL]) : a_.low_rank;
    const LowRankLayer low_rank(a_.dtype, adapters_, op.adapters, t, op.rank);
    if (adds(op.adapters) && (is_share || low_rank.has_any(0, a_.num_tokens))) {
      team.stage = low_rank.shrink_part(buffer(op.x), a_.widths[op.x], *op.weights, is_share,
                                        a_.num_tokens, team);
      if (!is_share) args.low_rank = &low_rank;
    }
    linear_part(args, team);
  }

  // Whether the step's adapters may add to a layer.
  bool adds(const LowRankWeights* adapters) const { return adapters && a_.adapter_slots; }

  // The memory behind a buffer's [T, width].
  float* behind(int32_t which, int64_t width) const {
    return values<float>(which) + a_.num_tokens * width;
  }

  void rotate_and_write(const RotateAndWriteOp& op, int64_t begin, int64_t end) {
    const int64_t width = a_.widths[op.x], head = a_.head_size;
    const RotaryArgs rotary = {
        a_.dtype,     buffer(op.x), width,         op.cos,
        op.sin,       a_.positions, a_.num_tokens, a_.num_heads + a_.num_kv_heads,
        a_.head_size, a_.head_size};
    WriteKvArgs write = {};
    write.dtype = a_.dtype;
    write.k = buffer(op.x) + a_.num_heads * head * size_;
    write.v = buffer(op.x) + (a_.num_heads + a_.num_kv_heads) * head * size_;
    write.k_stride_t = write.v_stride_t = width;
    write.k_cache = op.k_cache;
    write.v_cache = op.v_cache;
    write.slots = a_.slots;
    write.num_blocks = a_.num_blocks;
    write.num_tokens = static_cast<int32_t>(a_.num_tokens);
    write.num_kv_heads = a_.num_kv_heads;
    write.head_size = a_.head_size;
    write.block_size = a_.block_size;
    write.cache_is_int8 = a_.cache_is_int8;
    if (op.q_norm) norm_heads(op.q_norm, op, 0, a_.num_heads, begin, end);
    if (op.k_norm) norm_heads(op.k_norm, op, a_.num_heads, a_.num_kv_heads, begin, end);
    rotary_rows(rotary, begin, end);
    write_kv_rows(write, begin, end);
    if (op.q_scale) with_type([&](auto type) { scale_queries<decltype(type)>(op, begin, end); });
  }

  // Norms some heads of some tokens, in place.
  void norm_heads(const void* weight, const RotateAndWriteOp& op, int64_t first, int64_t count,
                  int64_t begin, int64_t end) {
    NormArgs args = {};
    args.dtype = a_.dtype;
    args.weight = weight;
    args.num_channels = op.norms_all_heads ? count * a_.head_size : a_.head_size;
    args.eps = op.eps;
    args.kind = op.norm_kind;
    for (int64_t token = begin; token < end; ++token) {
      args.out = buffer(op.x) + (token * a_.widths[op.x] + first * a_.head_size) * size_;
      args.x = args.out;
      norm_rows(args, 0, op.norms_all_heads ? 1 : count);
    }
  }

  template <class T>
  void scale_queries(const RotateAndWriteOp& op, int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) {
      T* q = values<T>(op.x) + token * a_.widths[op.x];
      const T* scale = static_cast<const T*>(op.q_scale) + a_.positions[token];
      const Vec factor = splat(sum_of_lanes(read(scale, 1)));
      for (int64_t i = 0; i < int64_t{a_.num_heads} * a_.head_size; i += kLanes)
        write(q + i, mul(read(q + i), factor));
    }
  }

  void attend(const AttendOp& op, Team team) {
    AttendArgs args = attend_;
    args.q = buffer(op.x);
    args.q_stride_t = a_.widths[op.x];
    args.out = buffer(op.out);
    args.k_cache = op.k_cache;
    args.v_cache = op.v_cache;
    args.scale = op.scale;
    args.soft_cap = op.soft_cap;
    args.window = op.window;
    args.sinks = op.sinks;
    attend_part(args, *plan_for(op.window), team);
  }

  AttendPlan* plan_for(int32_t window) {
    for (AttendPlan& plan : plans_)
      if (plan.window == window) return &plan;
    return nullptr;
  }

  void logits(const LogitsOp& op, Team team) {
    LinearArgs args = linear_args(*op.weights, QUIRE_LOGITS_F32, op.x);
    args.scale = op.scale;
    args.cap = op.cap;
    args.out = a_.logits;
    args.out_stride = op.weights->num_out;
    args.num_rows = a_.num_samples;
    args.num_greedy = a_.num_greedy;
    args.greatest = greatest_.data() + team.thread * a_.num_greedy;
    args.wanted = a_.wanted;
    linear_part(args, team);
    ++team.stage;
    team.share_rows(a_.num_greedy, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row)
        write_greatest(&greatest_[row], a_.num_threads, a_.num_greedy, a_.greatest + 2 * row);
    });
  }

  template <class T>
  void round_partial(const RoundPartialOp& op, int64_t begin, int64_t end) {
    const int64_t width = a_.widths[op.out];
    if (adds(op.adapters))
      LowRankLayer(a_.dtype, adapters_, op.adapters, behind(QUIRE_PARTIAL, width), op.rank)
          .add_rows(begin, end, values<float>(QUIRE_PARTIAL), width);
    const T* bias = static_cast<const T*>(op.bias);
    for (int64_t token = begin; token < end; ++token) {
      const float* partial = values<float>(QUIRE_PARTIAL) + token * width;
      T* out = values<T>(op.out) + token * width;
      for (int64_t i = 0; i < width; i += kLanes) {
        const int64_t left = width - i;
        Vec sum = read(partial + i, left);
        if (bias) sum = add(sum, read(bias + i, left));
        write(out + i, sum, left);
      }
    }
  }

  template <class T>
  void add_value(const AddOp& op, int64_t begin, int64_t end) {
    const int64_t width = a_.widths[op.to];
    const T* x = values<T>(op.x);
    T* to = values<T>(op.to);
    for (int64_t i = begin * width; i < end * width; i += kLanes) {
      const int64_t left = end * width - i;
      Vec value = read(x + i, left);
      if (op.scale != 1) value = rounded<T>(mul(value, splat(op.scale)));
      write(to + i, add(read(to + i, left), value), left);
    }
  }

  template <class T>
  void gelu_rows(const GeluOp& op, int64_t begin, int64_t end) {
    const int64_t width = a_.widths[op.x];
    T* x = values<T>(op.x);
    for (int64_t i = begin * width; i < end * width; i += kLanes) {
      const int64_t left = end * width - i;
      write(x + i, gelu(read(x + i, left)), left);
    }
  }

  void route(const RouteOp& op, int64_t begin, int64_t end) {
    const RouteArgs args = {op,
                            values<float>(QUIRE_SCORES),
                            a_.widths[QUIRE_SCORES],
                            values<int32_t>(QUIRE_CHOSEN),
                            values<float>(QUIRE_SHARES),
                            a_.num_tokens};
    route_rows(args, begin, end);
  }

  void mix(const MixOp& op, int64_t begin, int64_t end) {
    if (adds(op.adapters)) {
      // The shared expert's results are the last T.
      const int64_t width = a_.widths[op.out], first = a_.num_tokens * op.top_k * width;
      float* t = behind(QUIRE_RESULTS, op.num_places * width);
      LowRankLayer(a_.dtype, adapters_, op.adapters, t, op.rank)
          .add_rows(begin, end, values<float>(QUIRE_RESULTS) + first, width);
    }
    mix_rows(a_, op, begin, end);
  }

  // Quantizes some rows of an int8 layer's input.
  void quantize(const LinearWeights& weights, int32_t x, int64_t begin, int64_t end) {
    quantize_rows({a_.dtype, weights.splits, buffer(x), a_.widths[x], weights.num_in, a_.num_tokens,
                   a_.quantized, a_.quantized_stride, a_.scales},
                  begin, end);
  }

  LinearArgs linear_args(const LinearWeights& weights, int32_t mode, int32_t x) const {
    LinearArgs args = {};
    args.dtype = a_.dtype;
    args.mode = mode;
    args.weights = &weights;
    args.x = buffer(x);
    args.x_stride = a_.widths[x];
    if (weights.is_int8)
      args.x = a_.quantized, args.x_stride = a_.quantized_stride, args.x_scales = a_.scales;
    return args;
  }

  char* buffer(int32_t which) const { return static_cast<char*>(a_.buffers[which]); }

  template <class T>
  T* values(int32_t which) const {
    return static_cast<T*>(a_.buffers[which]);
  }

  const ForwardArgs& a_;
  std::vector<Stage> stages_;
  const int64_t size_;  // of an element, in bytes
  const AttendArgs attend_;
  AdapterGroups adapters_;          // empty if no token has an adapter
  std::vector<Experts> experts_;    // one for each QUIRE_EXPERTS operation
  std::vector<AttendPlan> plans_;   // one for each window
  std::vector<Greatest> greatest_;  // [threads, num_greedy]
};

}  // namespace
}  // namespace quire

QuireRefusal quire_forward(const ForwardArgs* args) {
  if (args->first_op == 0) {
    const QuireRefusal refusal = quire::check(*args);
    if (refusal.what) return refusal;
  }
  quire::Forward forward(*args);
  parallel(args->num_threads, [&](Team team) { forward.run(team); });
  return {};
}
