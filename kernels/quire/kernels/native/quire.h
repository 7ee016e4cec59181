// The C ABI of the native CPU library: plain structs, filled in by Python through ctypes, which
// reads what stands within `extern "C"` from this file: `native_header.py` says what C it knows.
//
// The library is compiled once for each instruction set, and the loader picks one; so there is no
// dispatch in here, only `#if defined(__AVX512BF16__)` and the like. Tensors are row-major and
// their strides count elements.
#pragma once

#include <cstdint>

#include "team.h"

namespace quire {
class Greatest;
class LowRankLayer;
}  // namespace quire

// T tokens of the step, packed   B rows (sequences)   H query heads   K KV heads   D head size

extern "C" {

enum QuireType : int32_t { QUIRE_F32 = 0, QUIRE_BF16 = 1 };

// The caches are laid out as `kv_write.cpp` says. A head has a multiple of 16 channels, 256 at
// most; a block 4, 8 or a multiple of 16 tokens.
struct AttendArgs {
  int32_t dtype;  // of q and out
  const void* q;  // [T, H, D]; a token's heads are contiguous
  int64_t q_stride_t;
  void* out;  // [T, H, D], contiguous
  const void* k_cache;
  const void* v_cache;
  const int32_t* block_tables;  // [B, bt_width]
  int64_t bt_stride;
  int64_t bt_width;
  const int32_t* seq_lens;      // [B]
  const int32_t* query_starts;  // [B + 1]
  int64_t num_tokens;
  int32_t num_blocks;  // of the caches
  int32_t num_rows;
  int32_t num_decodes;
  int32_t num_heads;
  int32_t num_kv_heads;
  int32_t head_size;
  int32_t block_size;
  float scale;            // above 0
  float soft_cap;         // scores become soft_cap * tanh(score / soft_cap); 0: they do not
  int32_t window;         // a query sees this many tokens, itself the last; 0: all
  int32_t lookahead;      // and this many of its sequence behind itself
  const float* sinks;     // [H]: a score that stands for no token, or null
  int32_t cache_is_int8;  // with a scale for each token and head; else it is of `dtype`
};

struct WriteKvArgs {
  int32_t dtype;  // of k and v
  const void* k;  // [T, K, D]; a token's heads are contiguous
  const void* v;
  int64_t k_stride_t;
  int64_t v_stride_t;
  void* k_cache;
  void* v_cache;
  const int64_t* slots;  // [T]: block * block_size + offset
  int32_t num_blocks;    // of the caches
  int32_t num_tokens;
  int32_t num_kv_heads;
  int32_t head_size;
  int32_t block_size;
  int32_t cache_is_int8;
};

// What is wrong with the arguments of a call that has read and written nothing else. `what` is 0
// where nothing is; else an index of that kind, at this place of its list, is not from `least` to
// `end` - 1.
struct QuireRefusal {
  int64_t what;
  int64_t at;  // of a block id: the row of its table
  int64_t value;
  int64_t least;
  int64_t end;
};

enum QuireIndex : int64_t {
  QUIRE_TOKEN_ID = 1,
  QUIRE_POSITION = 2,
  QUIRE_SLOT = 3,
  QUIRE_QUERY_START = 4,
  QUIRE_SEQUENCE_LENGTH = 5,
  QUIRE_BLOCK_ID = 6,
  QUIRE_LAST_TOKEN = 7,
  QUIRE_ADAPTER_SLOT = 8,
};

QuireRefusal quire_attend(const AttendArgs* args);
QuireRefusal quire_write_kv(const WriteKvArgs* args);

// A linear layer's weights, packed by `quire_pack` (layout: gemm.cpp), by `quire_pack_int8`
// (gemm_int8.cpp) or by `quire_pack_w4` (gemm_w4.cpp).
struct LinearWeights {
  const void* weight;  // ceil(num_out / panel) panels of panel * num_in values
  const float* bias;   // in the order of the panels' columns, or null
  int64_t num_in;      // even in bfloat16
  int64_t num_out;     // of a gated layer: gates, then as many ups
  int32_t splits;      // 1, 2, 4 or 8: into how many parts K is cut, see gemm.cpp
  int32_t gated;
  int32_t is_int8;
  int32_t group;        // 4 bits: k that share a scale, a multiple of 8 that divides a part; else 0
  int32_t wide_scales;  // 4 bits: scales are floats rather than bf16
  int32_t has_zeros;    // 4 bits
  float alpha;          // of QUIRE_GATED_CLAMPED, as is the limit
  float limit;
};

// What an adapter adds to a linear layer: B (scale * (A x)); see low_rank.cpp.
struct LowRankWeights {
  const void* a;           // [rank / 16, num_in / steps of a lane, 16 lanes], or null: adds nothing
  const void* b;           // for each vector of the layer's panels [its ranks / steps, 16 lanes]
  const float* scales;     // [rank]
  const int64_t* vectors;  // [panels * 2, 3]: the vector's first lane in b, its first rank, and how
                           // many it has, an even number
  int64_t rank;            // a multiple of 16
};

struct PackArgs {
  int32_t dtype;
  const void* source;  // [num_out, num_in]
  int64_t stride;
  const void* source_bias;  // [num_out], or null
  LinearWeights weights;    // where to write, through its pointers
  int32_t* is_broken;       // set to 1 where a weight is NaN or infinite; not of 4 bits
  const float* scales;      // 4 bits, whose source has a byte each: [num_out, num_in / group]
  const uint8_t* zeros;     // the same, or null
};

enum LinearMode : int32_t {
  QUIRE_STORE = 0,       // out [T, num_out] in dtype
  QUIRE_STORE_F32 = 1,   // out [T, num_out] in float
  QUIRE_ADD = 2,         // out [T, num_out] += the result, each rounded to dtype
  QUIRE_GATED = 3,       // out [T, num_out / 2] = silu(gate) * up, rounded as in PyTorch
  QUIRE_LOGITS_F32 = 4,  // out [T, num_out] in float, times `scale`, and then
                         // cap * tanh(logit / cap) where there is a cap; of the last `num_greedy`
                         // rows only what `greatest.h` keeps
  QUIRE_GATED_GELU = 5,  // as QUIRE_GATED, with gelu(gate)
  QUIRE_GATED_CLAMPED = 6,  // (up + 1) * gate * sigmoid(alpha * gate) in float, of gates up to the
                            // limit and ups within it on both sides
};

// Which outputs of some rows are wanted, 32 columns at a time; the others may be computed or not.
struct WantedColumns {
  const int32_t* mask_of;  // [rows]: its row of the masks, or -1, which wants all
  const uint32_t* masks;   // [any, num_words]: bit t % 32 of word t / 32 wants token t
  int64_t num_words;
  int32_t first_column;  // the token of this rank's first column
};

struct LinearArgs {
  int32_t dtype;
  int32_t mode;
  const LinearWeights* weights;
  const void* x;  // [T, num_in]; the stride is even in bfloat16. int8: `quire_quantize`'s
  int64_t x_stride;
  void* out;
  int64_t out_stride;
  int64_t num_rows;
  const float* x_scales;  // int8: [T, splits]
  int64_t num_greedy;
  quire::Greatest* greatest;            // [num_greedy], of this thread
  float scale;                          // of logits
  float cap;                            // of logits; 0: there is none
  const WantedColumns* wanted;          // or null, which wants all
  const quire::LowRankLayer* low_rank;  // what is added to the sums before the bias, or null
  const float* addend;  // [num_rows, panel]: the same for one panel, or null; from this row on
  int64_t addend_row;
};

// The inputs of an int8 layer: each part of a row by itself, filled up to a multiple of 4 bytes.
struct QuantizeArgs {
  int32_t dtype;   // of x
  int32_t splits;  // as the layer's
  const void* x;   // [T, num_in]
  int64_t x_stride;
  int64_t num_in;
  int64_t num_rows;
  void* out;  // [T, splits, ceil(num_in / splits / 4) * 4] bytes
  int64_t out_stride;
  float* scales;  // [T, splits]
};

enum NormKind : int32_t {
  QUIRE_RMS_NORM = 0,    // rounded to dtype before it is multiplied with the weight, of that dtype
  QUIRE_WIDE_NORM = 1,   // an RMS norm in float, as are weight and bias, rounded at its end
  QUIRE_LAYER_NORM = 2,  // likewise, of what is left when the mean is subtracted
};

struct NormArgs {
  int32_t dtype;
  const void* x;        // [T, C]
  const int64_t* rows;  // which of x's rows to take, or null: all
  const void* weight;   // [C]
  const float* bias;    // [C], or null; none of a QUIRE_RMS_NORM
  void* out;            // [T, C], contiguous; may be x where `rows` is null
  int64_t num_rows;
  int64_t num_channels;
  float eps;
  int32_t kind;  // a NormKind
};

struct RotaryArgs {
  int32_t dtype;
  void* x;  // [T, heads, D]; rotated in place
  int64_t x_stride_t;
  const float* cos;  // [positions, rotary_size / 2]
  const float* sin;
  const int64_t* positions;  // [T]
  int64_t num_tokens;
  int32_t num_heads;
  int32_t head_size;
  int32_t rotary_size;  // the first channels of a head; the rest stays
};

// What a program's operations read and write: a row for each token, or for each that is sampled.
enum QuireBuffer : int32_t {
  QUIRE_RESIDUAL = 0,
  QUIRE_NORMED = 1,
  QUIRE_QKV = 2,  // Q heads, K heads, V heads
  QUIRE_ATTENDED = 3,
  QUIRE_HIDDEN = 4,
  QUIRE_BRANCH = 5,
  QUIRE_PARTIAL = 6,  // in float: a rank's share of a sum, and then the sum
  // Of mixtures of experts. A token's S places are those of its k experts, the best first, and of
  // the shared one, if there is one. Rows of a token and an expert are sorted by expert.
  QUIRE_SCORES = 7,     // float [T, E]: what the router makes of a token
  QUIRE_CHOSEN = 8,     // int32 [T, k]: its experts
  QUIRE_SHARES = 9,     // float [T, S]: by which their results are multiplied
  QUIRE_PLACES = 10,    // int32 [T, S]: the rows that have their inputs and results
  QUIRE_GATHERED = 11,  // [T * S, C]: inputs; unused where they are quantised
  QUIRE_INNER = 12,     // [T * k, inner channels], then those of T rows of the shared expert
  QUIRE_RESULTS = 13,   // float [T * S, C]: a rank's shares of sums, and then the sums
  QUIRE_NUM_BUFFERS = 14,
};

enum QuireOpKind : int32_t {
  QUIRE_EMBED = 1,
  QUIRE_NORM = 2,
  QUIRE_LINEAR = 3,
  QUIRE_ROTATE_AND_WRITE = 4,
  QUIRE_ATTEND = 5,
  QUIRE_ROUND_PARTIAL = 6,
  QUIRE_ADD_VALUE = 7,
  QUIRE_GELU = 8,
  QUIRE_LOGITS = 9,
  QUIRE_ROUTE = 10,
  QUIRE_EXPERTS = 11,
  QUIRE_MIX = 12,
};

struct EmbedOp {
  const void* weight;  // [V, C]
  int32_t out;         // a QuireBuffer, as are all of these
};

// The norm of `x`, and the input of the next layer in int8 if that is what it takes.
struct NormOp {
  const void* weight;  // these as in NormArgs
  const float* bias;
  const LinearWeights* next;  // of int8, or null
  int32_t x;
  int32_t out;
  int32_t is_sampled;  // only the rows that are sampled
  float eps;
  int32_t norm_kind;
};

struct LinearOp {
  const LinearWeights* weights;
  int32_t mode;  // a LinearMode
  int32_t x;
  int32_t out;
  int32_t quantizes;               // `x`, before
  const LowRankWeights* adapters;  // [slots], or null: none adds to this layer
  int64_t rank;                    // the greatest of these
};

struct RotateAndWriteOp {
  const float* cos;  // [positions, D / 2]
  const float* sin;
  void* k_cache;
  void* v_cache;
  const void* q_norm;  // [D], of each head before it is rotated, or null
  const void* k_norm;
  const void* q_scale;  // [positions]: by which Q is multiplied when it is rotated, or null
  int32_t x;            // Q stays there
  float eps;            // of both norms, as is their kind
  int32_t norm_kind;
  int32_t norms_all_heads;  // together: q_norm is [H * D], k_norm [K * D]
};

struct AttendOp {
  const void* k_cache;
  const void* v_cache;
  int32_t x;
  int32_t out;
  float scale;  // these as in AttendArgs
  float soft_cap;
  int32_t window;
  const float* sinks;
};

// `out`: the ranks' sum and a bias, which may be null, rounded as one linear layer's output.
struct RoundPartialOp {
  const void* bias;
  int32_t out;
  const LowRankWeights* adapters;  // as the layer's, whose A x is summed behind the other sums
  int64_t rank;
};

// Adds `scale` times `x` to `to`, each rounded.
struct AddOp {
  int32_t x;
  int32_t to;
  float scale;
};

// `x`: its GELU, by the formula with tanh.
struct GeluOp {
  int32_t x;
};

struct LogitsOp {
  const LinearWeights* weights;
  int32_t x;
  float scale;  // these as in LinearArgs
  float cap;
};

enum SharedExpert : int32_t {
  QUIRE_NOT_SHARED = 0,
  QUIRE_SHARED = 1,        // its results are multiplied by 1
  QUIRE_SHARED_GATED = 2,  // by the sigmoid of the score behind those of the experts
};

// Which experts a token goes to; of equal scores the lower number comes first, and NaN before all.
struct RouteOp {
  const float* correction;  // [E]: added to the scores for the choice only, or null
  int32_t num_experts;
  int32_t top_k;
  int32_t groups;      // of experts, equally many each; they are taken of
  int32_t top_groups;  // so many, by the sums of their two best scores
  int32_t is_sigmoid;  // else scores are a softmax's
  int32_t softmax_after_top_k;
  int32_t renormalise;  // shares add up to `scale`
  int32_t shared;       // a SharedExpert
  float scale;          // of shares, but for the shared expert's
};

struct RouteArgs {
  RouteOp how;
  const float* scores;  // [T, experts and the shared one's gate]
  int64_t stride;
  int32_t* chosen;  // [T, k], the best first
  float* shares;    // [T, S]
  int64_t num_tokens;
};

// Sorts tokens by expert, stably, and computes the experts' MLPs.
struct ExpertsOp {
  const LinearWeights* ups;  // [E], then the shared one's; all gated
  const LinearWeights* downs;
  int32_t num_experts;
  int32_t top_k;
  int32_t has_shared;
  int32_t mode;  // a LinearMode: of the experts' ups; the shared one's is QUIRE_GATED
  int32_t x;
  int32_t is_split;                   // the results are shares of sums over the ranks
  const LowRankWeights* up_adapters;  // [slots] of the shared one's layers, or null
  const LowRankWeights* down_adapters;
  int64_t up_rank;  // the greatest of these
  int64_t down_rank;
};

// The sum of a token's results, weighted, in the order of its places.
struct MixOp {
  const float* bias;  // [E, C]: of the experts' results, or null
  int32_t top_k;
  int32_t num_places;
  int32_t out;
  const LowRankWeights* adapters;  // as of RoundPartialOp: the shared expert's last layer's
  int64_t rank;
};

struct Op {
  int32_t kind;
  union {
    EmbedOp embed;
    NormOp norm;
    LinearOp linear;
    RotateAndWriteOp rotate_and_write;
    AttendOp attend;
    RoundPartialOp round_partial;
    AddOp add_value;
    GeluOp gelu;
    LogitsOp logits;
    RouteOp route;
    ExpertsOp experts;
    MixOp mix;
  };
};

// What is changed in the logits of the rows of which only the greatest is wanted: a bias is added,
// penalties are applied to the tokens seen, tokens behind a mask are passed over. Each row's ids
// ascend; those of other ranks' columns change nothing here.
struct GreedyEdits {
  const int64_t* biased_starts;  // [num_greedy + 1]: where each row's begin, and the end
  const int32_t* biased_ids;
  const float* bias;
  const int64_t* seen_starts;  // [num_greedy + 1]
  const int32_t* seen_ids;
  const int32_t* seen_counts;  // in the output; presence and frequency need more than 0
  const float* presence;       // [num_greedy]
  const float* frequency;
  const float* repetition;
  const int32_t* mask_of;  // [num_greedy]: its row of the masks, or -1
  const uint32_t* masks;   // [any, num_words]: bit t % 32 of word t / 32 allows token t
  int64_t num_words;
  int32_t first_column;  // the token of this rank's first column
};

// A rank alone runs all operations of a program in one call. One of several ranks runs those up to
// each sum over the ranks, which the caller forms in `QUIRE_PARTIAL`.
struct ForwardArgs {
  int32_t dtype;
  int32_t num_threads;
  int32_t first_op;
  int32_t end_op;
  // The model.
  const Op* ops;
  int64_t vocab_size;  // of the embedding
  int32_t num_heads;   // of this rank, in every layer
  int32_t num_kv_heads;
  int32_t head_size;
  int32_t num_blocks;  // of every layer's caches
  int32_t block_size;
  int32_t cache_is_int8;
  int64_t num_positions;  // of every rotary table
  // The step.
  int64_t num_tokens;
  const int64_t* token_ids;
  const int64_t* positions;
  const int64_t* slots;
  const int32_t* block_tables;
  int64_t bt_stride;
  int64_t bt_width;
  const int32_t* seq_lens;
  const int32_t* query_starts;
  int32_t num_rows;
  int32_t num_decodes;
  int64_t num_samples;
  const int64_t* last_tokens;  // [S]
  // Room to work in; 64-byte aligned.
  void* buffers[QUIRE_NUM_BUFFERS];  // [T, the buffer's width]
  int64_t widths[QUIRE_NUM_BUFFERS];
  void* quantized;  // [T or T * S, `quantized_stride`]: any layer's input in int8, where one is
  int64_t quantized_stride;
  float* scales;       // [the same, splits] of any layer
  int64_t max_splits;  // of all layers
  int64_t num_greedy;  // the last so many of S want no logits, only
  float* greatest;     // [num_greedy, 2]: the greatest one and its column, the first of equals
  const GreedyEdits* edits;      // of these rows, or null
  const WantedColumns* wanted;   // of the logits of S rows, or null
  float* logits;                 // [S - num_greedy, V of this rank]
  const int32_t* adapter_slots;  // [T]: of each token's adapter, or -1; or null: no token has one
  int64_t num_slots;
  float* low_rank;  // [T, the greatest rank]: room for a layer's A x
};

struct ArgmaxArgs {
  const float* x;  // [S, V]
  int64_t stride;
  int64_t* out;  // [S]: the first of the greatest
  int64_t num_rows;
  int64_t num_columns;
};

// Rows of logits from which a token each is drawn, at a temperature above 0.
struct SampleArgs {
  const float* logits;  // [S, V]
  int64_t stride;
  int64_t num_columns;
  const int64_t* rows;  // [R]
  int64_t num_rows;
  const float* temperature;  // [R], and so on
  const int64_t* top_k;      // 0: no limit
  const double* top_p;
  const double* log_min_p;  // minus infinity: no limit
  const double* uniform;    // in [0, 1)
  int64_t* out;             // -1 where the greatest logit is infinite, or one is NaN
};

// Rows of logits of which the log-probability and the rank of a token each are wanted, and those of
// the best tokens, lower ids first among equals.
struct ScoreArgs {
  const float* logits;  // [S, V]
  int64_t stride;
  int64_t num_columns;
  const int64_t* rows;  // [R]
  int64_t num_rows;
  const int64_t* token_ids;  // [R]
  const int64_t* num_top;    // [R]
  int64_t max_top;
  double* logprobs;      // [R]; NaN where the greatest logit is infinite, or one is NaN
  int64_t* ranks;        // [R]
  int64_t* top_ids;      // [R, max_top]
  double* top_logprobs;  // [R, max_top]
  double* log_totals;    // [R]: a log-probability is a logit less this
};

struct MaskArgs {
  float* logits;  // [S, V]; what is not allowed becomes minus infinity
  int64_t stride;
  int64_t num_columns;
  const int32_t* rows;  // [K]
  int64_t num_rows;
  const uint32_t* masks;  // [K, num_words]; bit t % 32 of word t / 32 allows token t
  int64_t num_words;      // A token behind them is not allowed.
};

// Blocks that go from the caches of a model's layers to memory outside, or come back. A block has
// one piece in each cache.
struct CopyBlocksArgs {
  int64_t num_caches;
  int64_t piece_bytes;
  char* outside;         // where the first cache's piece of block 0 is
  int64_t block_stride;  // bytes from a block's piece to the next block's
  int64_t piece_stride;  // and to that of the next cache
  const int64_t* cache_blocks;
  const int64_t* outside_blocks;
  int64_t num_blocks;
  int32_t goes_out;
};

int32_t quire_panel_columns();
void quire_pack(const PackArgs* args, int32_t num_threads);
void quire_linear(const LinearArgs* args, int32_t num_threads);
int64_t quire_int8_bytes(const LinearWeights* weights);  // to pack these into
void quire_pack_int8(const PackArgs* args, int32_t num_threads);
int64_t quire_w4_bytes(const LinearWeights* weights);  // to pack these into
void quire_pack_w4(const PackArgs* args, int32_t num_threads);
void quire_quantize(const QuantizeArgs* args, int32_t num_threads);
void quire_norm(const NormArgs* args, int32_t num_threads);
void quire_rotary(const RotaryArgs* args, int32_t num_threads);
void quire_route(const RouteArgs* args, int32_t num_threads);
void quire_argmax(const ArgmaxArgs* args, int32_t num_threads);
void quire_sample(const SampleArgs* args, int32_t num_threads);
void quire_mask(const MaskArgs* args, int32_t num_threads);
void quire_score(const ScoreArgs* args, int32_t num_threads);
// Refused with its first operation only: the indices are the same in all of a step.
QuireRefusal quire_forward(const ForwardArgs* args);
void quire_copy_blocks(const CopyBlocksArgs* args, char* const* caches, int32_t num_threads);
// Asks for huge pages where the memory is not in use yet.
void quire_huge_pages(void* start, int64_t size);

// One rank's end of the memory that the ranks of a machine share; see shared_sum.cpp.
struct SharedGroup {
  char* base;        // zeroed before the first rank came
  int64_t capacity;  // bytes in a slot; a multiple of 64
  int32_t rank;
  int32_t size;
  int64_t round;  // of this rank; begins at 0
};

void quire_shared_sum(SharedGroup* group, float* x, int64_t count);
void quire_shared_gather(SharedGroup* group, const char* x, char* const* out, int64_t num_bytes);

}  // extern "C"

// See `team.h`. Attention: `attention.h`.
void linear_part(const LinearArgs& args, Team team);
void linears_part(const LinearArgs* layers, int64_t count, Team team);  // as one stage

// Rows or tokens `begin` to `end`.
void write_kv_rows(const WriteKvArgs& args, int64_t begin, int64_t end);
void quantize_rows(const QuantizeArgs& args, int64_t begin, int64_t end);
void norm_rows(const NormArgs& args, int64_t begin, int64_t end);
void rotary_rows(const RotaryArgs& args, int64_t begin, int64_t end);
void route_rows(const RouteArgs& args, int64_t begin, int64_t end);
void mix_rows(const ForwardArgs& args, const MixOp& op, int64_t begin, int64_t end);
