// Mixtures of experts (Shazeer et al. 2017). Each token's experts depend on that token alone.
// Tokens are sorted by expert, stably, and all experts' up (or down) layers are one stage, whose
// pieces are computed like those of any layer (`linear_pieces.cpp`). A token's bits do not depend
// on other tokens: no sum spans tokens, and a token's results are added in the order of its places.
//
// Traffic: the weights of each chosen expert once; the inputs and results of each token and expert
// once more than in a dense layer, for the sorting.
#include "experts.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "elements.h"

namespace quire {
namespace {

constexpr float kLog2E = 1.44269504f;
constexpr float kLeastSum = 1e-20f;

// Computes the softmax of `x` in place.
void softmax(float* x, int64_t count) {
  float most = x[0];
  for (int64_t i = 1; i < count; ++i) most = std::max(most, x[i]);
  Vec sums = zero();
  for (int64_t i = 0; i < count; i += kLanes) {
    const int64_t left = count - i;
    Vec power = exp2_of<false>(mul(sub(read(x + i, left), splat(most)), splat(kLog2E)));
    if (left < kLanes) power = first_lanes(power, static_cast<int>(left), zero());
    sums = add(sums, power);
    write(x + i, power, left);
  }
  const Vec sum = splat(sum_of_lanes(sums));
  for (int64_t i = 0; i < count; i += kLanes)
    write(x + i, div(read(x + i, count - i), sum), count - i);
}

void sigmoid(float* x, int64_t count) {
  for (int64_t i = 0; i < count; i += kLanes) {
    const Vec log2 = max(splat(-126), mul(read(x + i, count - i), splat(kLog2E)));  // keeps NaN
    const Vec power = exp2_of<false>(sub(zero(), log2));
    write(x + i, div(splat(1), add(splat(1), power)), count - i);
  }
}

// Whether x > y, where NaN is greater than all other values.
bool is_greater(float x, float y) { return x > y || (std::isnan(x) && !std::isnan(y)); }

// Writes the indices of the `top` greatest of `count` values in order, of equal values the first.
void choose(const float* x, int64_t count, int32_t top, std::vector<char>& is_taken, int32_t* out) {
  is_taken.assign(count, 0);
  for (int32_t i = 0; i < top; ++i) {
    int64_t best = std::find(is_taken.begin(), is_taken.end(), 0) - is_taken.begin();
    for (int64_t j = best + 1; j < count; ++j)
      if (!is_taken[j] && is_greater(x[j], x[best])) best = j;
    is_taken[best] = 1;
    out[i] = static_cast<int32_t>(best);
  }
}

class Route {
 public:
  explicit Route(const RouteArgs& args) : args_(args), how_(args.how) {}

  void token(int64_t token) {
    const int32_t num_experts = how_.num_experts, top_k = how_.top_k;
    const float* from = args_.scores + token * args_.stride;
    scores_.assign(from, from + num_experts);
    if (how_.is_sigmoid)
      sigmoid(scores_.data(), num_experts);
    else if (!how_.softmax_after_top_k)
      softmax(scores_.data(), num_experts);
    choice_ = scores_;
    if (how_.correction)
      for (int32_t i = 0; i < num_experts; ++i) choice_[i] += how_.correction[i];
    if (how_.groups > 1) keep_best_groups();
    int32_t* chosen = args_.chosen + token * top_k;
    float* shares = args_.shares + token * (top_k + (how_.shared != QUIRE_NOT_SHARED));
    choose(choice_.data(), num_experts, top_k, is_taken_, chosen);
    for (int32_t i = 0; i < top_k; ++i) shares[i] = scores_[chosen[i]];
    if (how_.softmax_after_top_k) softmax(shares, top_k);
    if (how_.renormalise) {
      const float sum = std::accumulate(shares, shares + top_k, 0.0f) + kLeastSum;
      for (int32_t i = 0; i < top_k; ++i) shares[i] /= sum;
    }
    for (int32_t i = 0; i < top_k; ++i) shares[i] *= how_.scale;
    if (how_.shared == QUIRE_NOT_SHARED) return;
    shares[top_k] = 1;
    if (how_.shared != QUIRE_SHARED_GATED) return;
    shares[top_k] = from[num_experts];
    sigmoid(shares + top_k, 1);
  }

 private:
  void keep_best_groups() {
    const int32_t size = how_.num_experts / how_.groups;
    groups_.resize(how_.groups);
    best_groups_.resize(how_.top_groups);
    for (int32_t group = 0; group < how_.groups; ++group) {
      const float* x = choice_.data() + group * size;
      int32_t best[2];
      choose(x, size, 2, is_taken_, best);
      groups_[group] = x[best[0]] + x[best[1]];
    }
    choose(groups_.data(), how_.groups, how_.top_groups, is_taken_, best_groups_.data());
    for (int32_t group = 0; group < how_.groups; ++group)
      if (!is_taken_[group]) std::fill_n(choice_.begin() + group * size, size, -INFINITY);
  }

  const RouteArgs& args_;
  const RouteOp& how_;
  std::vector<float> scores_, choice_, groups_;
  std::vector<int32_t> best_groups_;
  std::vector<char> is_taken_;
};

template <class T>
void mix_rows_of(const ForwardArgs& a, const MixOp& op, int64_t begin, int64_t end) {
  const int64_t width = a.widths[op.out];
  const float* results = static_cast<const float*>(a.buffers[QUIRE_RESULTS]);
  for (int64_t token = begin; token < end; ++token) {
    const int64_t first = token * op.num_places;
    const auto* places = static_cast<const int32_t*>(a.buffers[QUIRE_PLACES]) + first;
    const auto* shares = static_cast<const float*>(a.buffers[QUIRE_SHARES]) + first;
    const auto* chosen = static_cast<const int32_t*>(a.buffers[QUIRE_CHOSEN]) + token * op.top_k;
    T* out = static_cast<T*>(a.buffers[op.out]) + token * width;
    for (int64_t c = 0; c < width; c += kLanes) {
      const int64_t left = width - c;
      Vec sum = zero();
      for (int32_t i = 0; i < op.num_places; ++i) {
        Vec value = read(results + places[i] * width + c, left);
        if (op.bias && i < op.top_k)
          value = add(value, read(op.bias + chosen[i] * width + c, left));
        sum = add(sum, mul(value, splat(shares[i])));
      }
      write(out + c, sum, left);
    }
  }
}

}  // namespace

Experts::Experts(const ForwardArgs& args, const ExpertsOp& op, const AdapterGroups& adapters)
    : a_(args),
      op_(op),
      size_(args.dtype == QUIRE_BF16 ? 2 : 4),
      shared_up_(args.dtype, adapters, op.up_adapters, args.low_rank, op.up_rank),
      // With several ranks, t lies behind the results and is summed over the ranks with them.
      shared_down_(args.dtype, adapters, op.down_adapters,
                   op.is_split ? values<float>(QUIRE_RESULTS) +
                                     (op.top_k + 1) * args.num_tokens * args.widths[op.x]
                               : args.low_rank,
                   op.down_rank) {}

// Whether the step's adapters add to one of the shared expert's layers.
bool Experts::adds(const LowRankLayer& layer, const LowRankWeights* adapters) const {
  return adapters && a_.adapter_slots && layer.has_any(0, a_.num_tokens);
}

void Experts::run(Team team) {
  team.share(1, [&](int64_t) { sort(); });
  ++team.stage;
  team.share_rows(a_.num_tokens, [&](int64_t begin, int64_t end) { gather(begin, end); });
  ++team.stage;
  if (adds(shared_up_, op_.up_adapters))
    team.stage = shared_up_.shrink_part(values<char>(op_.x), a_.widths[op_.x],
                                        op_.ups[op_.num_experts], false, a_.num_tokens, team);
  linears_part(ups_.data(), ups_.size(), team);
  ++team.stage;
  if (op_.down_adapters && a_.adapter_slots &&
      (op_.is_split || adds(shared_down_, op_.down_adapters))) {
    const LinearWeights& down = op_.downs[op_.num_experts];
    team.stage = shared_down_.shrink_part(inner(shared_start()), down.num_in, down, op_.is_split,
                                          a_.num_tokens, team);
  }
  if (op_.downs[0].is_int8 || (op_.has_shared && op_.downs[op_.num_experts].is_int8)) {
    team.share_rows(shared_start() + op_.has_shared * a_.num_tokens,
                    [&](int64_t begin, int64_t end) { quantize_inner(begin, end); });
    ++team.stage;
  }
  linears_part(downs_.data(), downs_.size(), team);
}

// Assigns rows to the tokens' places, and adds the layers of experts that have rows.
void Experts::sort() {
  const int64_t num_places = op_.top_k + op_.has_shared;
  const int32_t* chosen = values<int32_t>(QUIRE_CHOSEN);
  int32_t* places = values<int32_t>(QUIRE_PLACES);
  std::vector<int64_t> starts(op_.num_experts + 1, 0);
  for (int64_t i = 0; i < shared_start(); ++i) ++starts[chosen[i] + 1];
  std::partial_sum(starts.begin(), starts.end(), starts.begin());
  for (int32_t expert = 0; expert < op_.num_experts; ++expert)
    add_layers(op_.ups[expert], op_.downs[expert],
               {starts[expert], starts[expert + 1] - starts[expert], 0});
  if (op_.has_shared)
    add_layers(op_.ups[op_.num_experts], op_.downs[op_.num_experts],
               {shared_start(), a_.num_tokens, shared_start()});
  for (int64_t token = 0; token < a_.num_tokens; ++token, places += num_places) {
    for (int32_t i = 0; i < op_.top_k; ++i) places[i] = static_cast<int32_t>(starts[*chosen++]++);
    if (op_.has_shared) places[op_.top_k] = static_cast<int32_t>(shared_start() + token);
  }
}

void Experts::add_layers(const LinearWeights& up, const LinearWeights& down, const Rows& rows) {
  if (!rows.count) return;
  const int64_t channels = a_.widths[op_.x];
  LinearArgs args = layer(up, rows);
  const bool is_shared = &up == op_.ups + op_.num_experts;
  args.mode = is_shared ? QUIRE_GATED : op_.mode;
  if (!up.is_int8) {
    args.x = values<char>(QUIRE_GATHERED) + rows.first * channels * size_;
    args.x_stride = channels;
  }
  args.out = inner(rows.first);
  args.out_stride = down.num_in;
  if (is_shared && adds(shared_up_, op_.up_adapters)) args.low_rank = &shared_up_;
  ups_.push_back(args);
  args = layer(down, rows);
  args.mode = QUIRE_STORE_F32;
  if (!down.is_int8) {
    args.x = inner(rows.first);
    args.x_stride = down.num_in;
  }
  args.out = values<float>(QUIRE_RESULTS) + rows.first * channels;
  args.out_stride = channels;
  if (is_shared && !op_.is_split && adds(shared_down_, op_.down_adapters))
    args.low_rank = &shared_down_;
  downs_.push_back(args);
}

// The arguments that ups and downs share, with the inputs if these are quantized.
LinearArgs Experts::layer(const LinearWeights& weights, const Rows& rows) const {
  LinearArgs args = {};
  args.dtype = a_.dtype;
  args.weights = &weights;
  args.num_rows = rows.count;
  if (!weights.is_int8) return args;
  args.x = static_cast<char*>(a_.quantized) + rows.first * a_.quantized_stride;
  args.x_stride = a_.quantized_stride;
  args.x_scales = row_scales(weights, rows.first, rows.kind_first);
  return args;
}

void Experts::gather(int64_t begin, int64_t end) const {
  const int64_t row_bytes = a_.widths[op_.x] * size_, num_places = op_.top_k + op_.has_shared;
  for (int64_t token = begin; token < end; ++token) {
    const char* x = values<char>(op_.x) + token * row_bytes;
    const int32_t* places = values<int32_t>(QUIRE_PLACES) + token * num_places;
    for (int32_t i = 0; i < num_places; ++i) {
      const bool is_shared = i == op_.top_k;
      const LinearWeights& up = op_.ups[is_shared ? op_.num_experts : 0];
      if (up.is_int8)
        quantize_row(up, x, places[i], is_shared ? shared_start() : 0);
      else
        std::memcpy(values<char>(QUIRE_GATHERED) + places[i] * row_bytes, x, row_bytes);
    }
  }
}

void Experts::quantize_inner(int64_t begin, int64_t end) const {
  for (int64_t row = begin; row < end; ++row) {
    const bool is_shared = row >= shared_start();
    const LinearWeights& down = op_.downs[is_shared ? op_.num_experts : 0];
    if (down.is_int8) quantize_row(down, inner(row), row, is_shared ? shared_start() : 0);
  }
}

void Experts::quantize_row(const LinearWeights& weights, const char* x, int64_t row,
                           int64_t kind_first) const {
  char* out = static_cast<char*>(a_.quantized) + row * a_.quantized_stride;
  quantize_rows({a_.dtype, weights.splits, x, weights.num_in, weights.num_in, 1, out,
                 a_.quantized_stride, row_scales(weights, row, kind_first)},
                0, 1);
}

// A row's scales, which are adjacent to those of other rows of its kind.
float* Experts::row_scales(const LinearWeights& weights, int64_t row, int64_t kind_first) const {
  return a_.scales + kind_first * a_.max_splits + (row - kind_first) * weights.splits;
}

char* Experts::inner(int64_t row) const {
  const int64_t width = op_.downs[0].num_in, first = shared_start();
  const int64_t at =
      row < first ? row * width : first * width + (row - first) * op_.downs[op_.num_experts].num_in;
  return values<char>(QUIRE_INNER) + at * size_;
}

}  // namespace quire

using namespace quire;

void mix_rows(const ForwardArgs& args, const MixOp& op, int64_t begin, int64_t end) {
  args.dtype == QUIRE_BF16 ? mix_rows_of<bf16>(args, op, begin, end)
                           : mix_rows_of<float>(args, op, begin, end);
}

void route_rows(const RouteArgs& args, int64_t begin, int64_t end) {
  Route route(args);
  for (int64_t token = begin; token < end; ++token) route.token(token);
}

void quire_route(const RouteArgs* args, int32_t num_threads) {
  parallel(num_threads, [=](Team team) {
    team.share_rows(args->num_tokens,
                    [=](int64_t begin, int64_t end) { route_rows(*args, begin, end); });
  });
}
