// A whole forward pass of a Llama in one call: the stages of every layer, in one parallel region.
//
// A stage reads what the ones before have written, all of whose pieces are done by then. Rounds
// where PyTorch's layer by layer does: what is fused here (residual sums, SiLU) keeps the roundings
// of the unfused.
#include <algorithm>
#include <vector>

#include "attention.h"
#include "elements.h"
#include "greatest.h"
#include "quire.h"

namespace quire {
namespace {

constexpr int kStagesPerPhase = 6;

class Forward {
 public:
  explicit Forward(const ForwardArgs& args)
      : a_(args),
        stages_(kStagesPerPhase * (args.end_phase - args.first_phase)),
        size_(args.dtype == QUIRE_BF16 ? 2 : 4),
        attend_(attend_args(args)) {
    const int first_attention = args.first_phase + args.first_phase % 2;
    if (first_attention < std::min(args.end_phase, 2 * args.num_layers))
      plan_ = plan_attention(attend_, args.num_threads);
    if (args.end_phase == 2 * args.num_layers + 1) {
      greatest_.resize(args.num_threads * args.num_greedy);
      for (Greatest& greatest : greatest_) greatest.clear();
    }
  }

  void run(Team team) {
    for (int phase = a_.first_phase; phase < a_.end_phase; ++phase) {
      team.stage = &stages_[kStagesPerPhase * (phase - a_.first_phase)];
      if (phase == 2 * a_.num_layers) {
        logits(team);
      } else if (phase % 2 == 0) {
        attention(a_.layers[phase / 2], phase, team);
      } else {
        mlp(a_.layers[phase / 2], phase, team);
      }
    }
  }

 private:
  void attention(const Layer& layer, int phase, Team team) {
    norm(layer.attention_norm, layer.qkv, phase, team);
    ++team.stage;
    const int64_t width = qkv_width();
    linear(layer.qkv, QUIRE_STORE, a_.normed, a_.hidden_size, a_.qkv, width, team);
    ++team.stage;
    rotate_and_write(layer, team);
    ++team.stage;
    AttendArgs attend = attend_;
    attend.k_cache = layer.k_cache;
    attend.v_cache = layer.v_cache;
    attend_part(attend, plan_, team);
    ++team.stage;
    add_linear(layer.o, a_.attended, layer.o.num_in, team);
  }

  void mlp(const Layer& layer, int phase, Team team) {
    norm(layer.mlp_norm, layer.gate_up, phase, team);
    ++team.stage;
    const int64_t width = layer.gate_up.num_out / 2;
    linear(layer.gate_up, QUIRE_GATED, a_.normed, a_.hidden_size, a_.hidden, width, team);
    ++team.stage;
    add_linear(layer.down, a_.hidden, width, team);
  }

  void logits(Team team) {
    if (a_.is_shared) {
      team.share_rows(a_.num_tokens, [&](int64_t begin, int64_t end) { add_partial(begin, end); });
      ++team.stage;
    }
    NormArgs norm = norm_args(a_.final_norm);
    norm.rows = a_.last_tokens;
    norm.num_rows = a_.num_samples;
    team.share_rows(a_.num_samples, [&](int64_t begin, int64_t end) {
      rms_norm_rows(norm, begin, end);
      quantize(a_.lm_head, a_.normed, a_.hidden_size, begin, end);
    });
    ++team.stage;
    LinearArgs head = linear_args(a_.lm_head, QUIRE_GREATEST, a_.normed, a_.hidden_size, a_.logits,
                                  a_.lm_head.num_out);
    head.num_rows = a_.num_samples;
    head.num_greedy = a_.num_greedy;
    head.greatest = greatest_.data() + team.thread * a_.num_greedy;
    linear_part(head, team);
    ++team.stage;
    team.share_rows(a_.num_greedy, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row)
        write_greatest(&greatest_[row], a_.num_threads, a_.num_greedy, a_.greatest + 2 * row);
    });
  }

  // What goes into a phase, normed: the embedding, or the residual with the last phase's share.
  void norm(const void* weight, const LinearWeights& next, int phase, Team team) {
    team.share_rows(a_.num_tokens, [&](int64_t begin, int64_t end) {
      if (phase == 0)
        embed(begin, end);
      else if (a_.is_shared)
        add_partial(begin, end);
      rms_norm_rows(norm_args(weight), begin, end);
      quantize(next, a_.normed, a_.hidden_size, begin, end);
    });
  }

  void embed(int64_t begin, int64_t end) {
    const int64_t row_bytes = a_.hidden_size * size_;
    for (int64_t token = begin; token < end; ++token)
      std::memcpy(static_cast<char*>(a_.residual) + token * row_bytes,
                  static_cast<const char*>(a_.embedding) + a_.token_ids[token] * row_bytes,
                  row_bytes);
  }

  // The ranks' sum, rounded as one linear layer's output.
  void add_partial(int64_t begin, int64_t end) {
    a_.dtype == QUIRE_BF16 ? add_partial_of<bf16>(begin, end) : add_partial_of<float>(begin, end);
  }

  template <class T>
  void add_partial_of(int64_t begin, int64_t end) {
    T* out = static_cast<T*>(a_.residual);
    for (int64_t i = begin * a_.hidden_size; i < end * a_.hidden_size; i += kLanes) {
      const int64_t left = end * a_.hidden_size - i;
      const Vec sum = rounded<T>(read(a_.partial + i, left));
      write(out + i, add(read(out + i, left), sum), left);
    }
  }

  void rotate_and_write(const Layer& layer, Team team) {
    const int64_t width = qkv_width(), head = a_.head_size;
    const RotaryArgs rotary = {a_.dtype,      a_.qkv,        width,
                               a_.cos,        a_.sin,        a_.positions,
                               a_.num_tokens, a_.num_heads + a_.num_kv_heads,
                               a_.head_size,  a_.head_size};
    WriteKvArgs write = {};
    write.dtype = a_.dtype;
    write.k = static_cast<char*>(a_.qkv) + a_.num_heads * head * size_;
    write.v = static_cast<char*>(a_.qkv) + (a_.num_heads + a_.num_kv_heads) * head * size_;
    write.k_stride_t = write.v_stride_t = width;
    write.k_cache = layer.k_cache;
    write.v_cache = layer.v_cache;
    write.slots = a_.slots;
    write.num_tokens = static_cast<int32_t>(a_.num_tokens);
    write.num_kv_heads = a_.num_kv_heads;
    write.head_size = a_.head_size;
    write.block_size = a_.block_size;
    write.cache_is_int8 = a_.cache_is_int8;
    team.share_rows(a_.num_tokens, [&](int64_t begin, int64_t end) {
      rotary_rows(rotary, begin, end);
      write_kv_rows(write, begin, end);
    });
  }

  // Onto the residual; of several ranks, into this one's share of the sum.
  void add_linear(const LinearWeights& weights, const void* x, int64_t width, Team team) {
    if (weights.is_int8) {
      team.share_rows(a_.num_tokens, [&](int64_t begin, int64_t end) {
        quantize(weights, x, width, begin, end);
      });
      ++team.stage;
    }
    const bool shared = a_.is_shared;
    linear(weights, shared ? QUIRE_STORE_F32 : QUIRE_ADD, x, width,
           shared ? a_.partial : a_.residual, a_.hidden_size, team);
  }

  // Some rows of the layer's input to int8, if that is what it takes.
  void quantize(const LinearWeights& weights, const void* x, int64_t x_stride, int64_t begin,
                int64_t end) {
    if (!weights.is_int8) return;
    quantize_rows({a_.dtype, weights.splits, x, x_stride, weights.num_in, a_.num_tokens,
                   a_.quantized, a_.quantized_stride, a_.scales},
                  begin, end);
  }

  void linear(const LinearWeights& weights, LinearMode mode, const void* x, int64_t x_stride,
              void* out, int64_t out_stride, Team team) {
    linear_part(linear_args(weights, mode, x, x_stride, out, out_stride), team);
  }

  LinearArgs linear_args(const LinearWeights& weights, LinearMode mode, const void* x,
                         int64_t x_stride, void* out, int64_t out_stride) const {
    LinearArgs args = {a_.dtype, mode, &weights, x, x_stride, out, out_stride, a_.num_tokens};
    if (weights.is_int8)
      args.x = a_.quantized, args.x_stride = a_.quantized_stride, args.x_scales = a_.scales;
    return args;
  }

  // For every layer; the layer adds its caches.
  static AttendArgs attend_args(const ForwardArgs& a) {
    const int64_t width = static_cast<int64_t>(a.num_heads + 2 * a.num_kv_heads) * a.head_size;
    return {a.dtype,         a.qkv,         width,           a.attended,      nullptr,
            nullptr,         a.block_tables, a.bt_stride,    a.seq_lens,      a.query_starts,
            a.num_rows,      a.num_decodes, a.num_heads,     a.num_kv_heads,  a.head_size,
            a.block_size,    a.scale,        a.cache_is_int8};
  }

  NormArgs norm_args(const void* weight) const {
    return {a_.dtype,  a_.residual,     nullptr,        weight,
            a_.normed, a_.num_tokens, a_.hidden_size, a_.eps};
  }

  int64_t qkv_width() const {
    return static_cast<int64_t>(a_.num_heads + 2 * a_.num_kv_heads) * a_.head_size;
  }

  const ForwardArgs& a_;
  std::vector<Stage> stages_;
  const int64_t size_;  // of an element, in bytes
  const AttendArgs attend_;
  AttendPlan plan_;
  std::vector<Greatest> greatest_;  // [threads, num_greedy]
};

}  // namespace
}  // namespace quire

void quire_forward(const ForwardArgs* args) {
  quire::Forward forward(*args);
  parallel(args->num_threads, [&](Team team) { forward.run(team); });
}
