// A whole forward pass of a Llama in one call: the phases of every layer, in one parallel region.
//
// Between two barriers a phase reads what the one before has written, and its threads take their
// work from a ticket of its own. Rounds where PyTorch's layer by layer does: what is fused here
// (residual sums, SiLU) keeps the roundings of the unfused.
#include <algorithm>
#include <thread>
#include <utility>
#include <vector>

#include "attention.h"
#include "elements.h"
#include "quire.h"

namespace quire {
namespace {

constexpr int kTicketsPerPhase = 4;

// Where threads wait for each other. Spins for some microseconds, as the others are mostly there
// by then; after that it gives up its core in turns, as the one that is missing may need it.
// OpenMP's barrier spins for milliseconds first, and with busy neighbours a pass took twice as
// long.
class Barrier {
 public:
  void wait(int size) {
    if (size == 1) return;
    const int before = generation_.load(std::memory_order_acquire);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size) {
      arrived_.store(0, std::memory_order_relaxed);
      generation_.store(before + 1, std::memory_order_release);
      return;
    }
    for (int spins = 0; generation_.load(std::memory_order_acquire) == before; ++spins)
      spins < kSpins ? pause() : std::this_thread::yield();
  }

 private:
  static constexpr int kSpins = 500;

  static void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }

  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<int> generation_{0};
};

class Forward {
 public:
  explicit Forward(const ForwardArgs& args)
      : a_(args),
        tickets_(kTicketsPerPhase * (args.end_phase - args.first_phase)),
        size_(args.dtype == QUIRE_BF16 ? 2 : 4),
        attend_(attend_args(args)) {
    const int first_attention = args.first_phase + args.first_phase % 2;
    if (first_attention < std::min(args.end_phase, 2 * args.num_layers))
      plan_ = plan_attention(attend_, args.num_threads);
  }

  void run(Team team) {
    std::atomic<int>* ticket = tickets_.data();
    for (int phase = a_.first_phase; phase < a_.end_phase; ++phase) {
      if (phase == 0) embed(team);
      if (phase != 0 && a_.is_shared) add_partial(team);
      // Each token's row stays with one thread from here into the norm: no barrier.
      if (phase == 2 * a_.num_layers) {
        barrier(team);  // the sampled tokens' rows may be another thread's
        logits(team, ticket);
      } else if (phase % 2 == 0) {
        attention(a_.layers[phase / 2], team, ticket);
      } else {
        mlp(a_.layers[phase / 2], team, ticket);
      }
      ticket += kTicketsPerPhase;
    }
  }

 private:
  void attention(const Layer& layer, Team team, std::atomic<int>* ticket) {
    norm(layer.attention_norm, team);
    quantize(layer.qkv, a_.normed, a_.hidden_size, a_.num_tokens, team);
    barrier(team);
    const int64_t width = qkv_width();
    linear(layer.qkv, QUIRE_STORE, a_.normed, a_.hidden_size, a_.qkv, width,
           a_.num_tokens, team, ticket++);
    barrier(team);
    rotate_and_write(layer, team);
    barrier(team);
    AttendArgs attend = attend_;
    attend.k_cache = layer.k_cache;
    attend.v_cache = layer.v_cache;
    attend_part(attend, plan_, on(team, ticket++));
    barrier(team);
    add_linear(layer.o, a_.attended, layer.o.num_in, team, ticket++);
    barrier(team);
  }

  void mlp(const Layer& layer, Team team, std::atomic<int>* ticket) {
    norm(layer.mlp_norm, team);
    quantize(layer.gate_up, a_.normed, a_.hidden_size, a_.num_tokens, team);
    barrier(team);
    const int64_t width = layer.gate_up.num_out / 2;
    linear(layer.gate_up, QUIRE_GATED, a_.normed, a_.hidden_size, a_.hidden, width, a_.num_tokens,
           team, ticket++);
    barrier(team);
    add_linear(layer.down, a_.hidden, width, team, ticket++);
    barrier(team);
  }

  void logits(Team team, std::atomic<int>* ticket) {
    NormArgs args = norm_args(a_.final_norm);
    args.rows = a_.last_tokens;
    args.num_rows = a_.num_samples;
    rms_norm_part(args, team);
    quantize(a_.lm_head, a_.normed, a_.hidden_size, a_.num_samples, team);
    barrier(team);
    linear(a_.lm_head, QUIRE_STORE_F32, a_.normed, a_.hidden_size, a_.logits, a_.lm_head.num_out,
           a_.num_samples, team, ticket);
  }

  void embed(Team team) {
    const int64_t row_bytes = a_.hidden_size * size_;
    auto [begin, end] = share(team);
    for (int64_t token = begin; token < end; ++token)
      std::memcpy(static_cast<char*>(a_.residual) + token * row_bytes,
                  static_cast<const char*>(a_.embedding) + a_.token_ids[token] * row_bytes,
                  row_bytes);
  }

  // The ranks' sum, rounded as one linear layer's output.
  void add_partial(Team team) {
    a_.dtype == QUIRE_BF16 ? add_partial_of<bf16>(team) : add_partial_of<float>(team);
  }

  template <class T>
  void add_partial_of(Team team) {
    auto [begin, end] = share(team);
    T* out = static_cast<T*>(a_.residual);
    for (int64_t i = begin * a_.hidden_size; i < end * a_.hidden_size; i += kLanes) {
      const int64_t left = end * a_.hidden_size - i;
      const Vec sum = rounded<T>(read(a_.partial + i, left));
      write(out + i, add(read(out + i, left), sum), left);
    }
  }

  void rotate_and_write(const Layer& layer, Team team) {
    auto [begin, end] = share(team);
    const int64_t width = qkv_width(), head = a_.head_size;
    char* rows = static_cast<char*>(a_.qkv) + begin * width * size_;
    RotaryArgs rotary = {a_.dtype,  rows,  width, a_.cos, a_.sin, a_.positions + begin,
                         end - begin, a_.num_heads + a_.num_kv_heads, a_.head_size, a_.head_size};
    std::atomic<int> ticket{0};
    const Team alone = {0, 1, &ticket};
    rotary_part(rotary, alone);
    WriteKvArgs write = {};
    write.dtype = a_.dtype;
    write.k = rows + a_.num_heads * head * size_;
    write.v = rows + (a_.num_heads + a_.num_kv_heads) * head * size_;
    write.k_stride_t = write.v_stride_t = width;
    write.k_cache = layer.k_cache;
    write.v_cache = layer.v_cache;
    write.slots = a_.slots + begin;
    write.num_tokens = static_cast<int32_t>(end - begin);
    write.num_kv_heads = a_.num_kv_heads;
    write.head_size = a_.head_size;
    write.block_size = a_.block_size;
    write_kv_part(write, alone);
  }

  // Onto the residual; of several ranks, into this one's share of the sum.
  void add_linear(const LinearWeights& weights, const void* x, int64_t width, Team team,
           std::atomic<int>* ticket) {
    if (weights.is_int8) {
      quantize(weights, x, width, a_.num_tokens, team);
      barrier(team);
    }
    const bool shared = a_.is_shared;
    linear(weights, shared ? QUIRE_STORE_F32 : QUIRE_ADD, x, width,
           shared ? a_.partial : a_.residual, a_.hidden_size, a_.num_tokens, team, ticket);
  }

  // The layer's input to int8, if that is what it takes. A thread's rows are those of its norm.
  void quantize(const LinearWeights& weights, const void* x, int64_t x_stride, int64_t num_rows,
                Team team) {
    if (!weights.is_int8) return;
    quantize_part({a_.dtype, weights.splits, x, x_stride, weights.num_in, num_rows, a_.quantized,
                   a_.quantized_stride, a_.scales},
                  team);
  }

  void linear(const LinearWeights& weights, LinearMode mode, const void* x, int64_t x_stride,
              void* out, int64_t out_stride, int64_t num_rows, Team team,
              std::atomic<int>* ticket) {
    LinearArgs args = {a_.dtype, mode, &weights, x, x_stride, out, out_stride, num_rows,
                       nullptr};
    if (weights.is_int8)
      args.x = a_.quantized, args.x_stride = a_.quantized_stride, args.x_scales = a_.scales;
    linear_part(args, on(team, ticket));
  }

  void norm(const void* weight, Team team) { rms_norm_part(norm_args(weight), team); }

  // For every layer; the layer adds its caches.
  static AttendArgs attend_args(const ForwardArgs& a) {
    const int64_t width = static_cast<int64_t>(a.num_heads + 2 * a.num_kv_heads) * a.head_size;
    return {a.dtype,         a.qkv,         width,           a.attended,      nullptr,
            nullptr,         a.block_tables, a.bt_stride,    a.seq_lens,      a.query_starts,
            a.num_rows,      a.num_decodes, a.num_heads,     a.num_kv_heads,  a.head_size,
            a.block_size,    a.scale};
  }

  NormArgs norm_args(const void* weight) const {
    return {a_.dtype,  a_.residual,     nullptr,        weight,
            a_.normed, a_.num_tokens, a_.hidden_size, a_.eps};
  }

  std::pair<int64_t, int64_t> share(Team team) const {
    return {a_.num_tokens * team.thread / team.size,
            a_.num_tokens * (team.thread + 1) / team.size};
  }

  int64_t qkv_width() const {
    return static_cast<int64_t>(a_.num_heads + 2 * a_.num_kv_heads) * a_.head_size;
  }

  static Team on(Team team, std::atomic<int>* ticket) { return {team.thread, team.size, ticket}; }

  void barrier(Team team) { barrier_.wait(team.size); }

  const ForwardArgs& a_;
  std::vector<std::atomic<int>> tickets_;
  const int64_t size_;  // of an element, in bytes
  const AttendArgs attend_;
  AttendPlan plan_;
  Barrier barrier_;
};

}  // namespace
}  // namespace quire

void quire_forward(const ForwardArgs* args) {
  quire::Forward forward(*args);
  parallel(args->num_threads, [&](Team team) { forward.run(team); });
}
