// The C ABI of the native CPU library: plain structs that Python fills in through ctypes.
// `native_header.py` parses the declarations within `extern "C"` and says which C it understands.
//
// The library is compiled once for each instruction set, and the loader picks one. The code thus
// has no run-time dispatch, only `#if defined(__AVX512BF16__)` and the like. Tensors are row-major
// and their strides count elements.
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

// `kv_write.cpp` describes the layout of the caches. A head has a multiple of 16 channels, at most
// 256. A block has 4, 8 or a multiple of 16 tokens.
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
  int32_t num_heads;
  int32_t num_kv_heads;
  int32_t head_size;
  int32_t block_size;
  float scale;            // above 0
  float soft_cap;         // scores become soft_cap * tanh(score / soft_cap); 0: no cap
  int32_t window;         // a query sees the last `window` tokens up to itself; 0: all
  int32_t lookahead;      // a query also sees this many tokens after itself
  const float* sinks;     // [H]: attention sinks, scores that belong to no token, or null
  int32_t cache_is_int8;  // with a scale for each token and head; else the cache has `dtype`
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

// An index out of range in the arguments of a call. The call has then neither read nor written any
// tensor. Valid values are from `least` to `end` - 1.
struct QuireRefusal {
  int64_t what;  // a QuireIndex, or 0: no index is out of range
  int64_t at;    // the position of `value` in its list; for a block id, the row of its table
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

// A linear layer's weights, packed by `quire_pack` (layout: gemm.cpp), `quire_pack_int8`
// (gemm_int8.cpp) or `quire_pack_w4` (gemm_w4.cpp).
struct LinearWeights {
  const void* weight;  // ceil(num_out / panel) panels of panel * num_in values
  const float* bias;   // in the order of the panels' columns, or null
  int64_t num_in;      // even in bfloat16
  int64_t num_out;     // in a gated layer: all gates, then as many ups
  int32_t splits;      // 1, 2, 4 or 8: the number of equal parts of K, see gemm.cpp
  int32_t gated;
  int32_t is_int8;
  int32_t group;        // 4 bits: k that share a scale, a multiple of 8 that divides a part; else 0
  int32_t wide_scales;  // 4 bits: scales are floats rather than bf16
  int32_t has_zeros;    // 4 bits: groups have zero points
  float alpha;          // for QUIRE_GATED_CLAMPED
  float limit;          // for QUIRE_GATED_CLAMPED
};

// A LoRA adapter's weights for a linear layer, to which it adds B (scale * (A x)); see low_rank.h.
struct LowRankWeights {
  const void* a;           // [rank / 16, num_in / steps of a lane, 16 lanes], or null: adds nothing
  const void* b;           // for each vector of the layer's panels [its ranks / steps, 16 lanes]
  const float* scales;     // [rank]
  const int64_t* vectors;  // [panels * 2, 3]: the vector's first lane in b, its first rank, and its
                           // number of ranks, which is even
  int64_t rank;            // a multiple of 16
};

struct PackArgs {
  int32_t dtype;
  const void* source;  // [num_out, num_in]
  int64_t stride;
  const void* source_bias;  // [num_out], or null
  LinearWeights weights;    // its pointers are where the packed weights and bias are written
  int32_t* is_broken;       // set to 1 if a weight is NaN or infinite; not checked for 4 bits
  const float* scales;      // 4 bits: [num_out, num_in / group]; the source has a byte per weight
  const uint8_t* zeros;     // 4 bits: zero points [num_out, num_in / group], or null
};

enum LinearMode : int32_t {
  QUIRE_STORE = 0,       // out [T, num_out] in dtype
  QUIRE_STORE_F32 = 1,   // out [T, num_out] in float
  QUIRE_ADD = 2,         // out [T, num_out] += the result, each rounded to dtype
  QUIRE_GATED = 3,       // out [T, num_out / 2] = silu(gate) * up, rounded as in PyTorch
  QUIRE_LOGITS_F32 = 4,  // out [T, num_out] in float, times `scale`, then cap * tanh(logit / cap)
                         // if there is a cap; the last `num_greedy` rows are not written, and
                         // `greatest.h` keeps their greatest logits
  QUIRE_GATED_GELU = 5,  // as QUIRE_GATED, with gelu(gate)
  QUIRE_GATED_CLAMPED = 6,  // (up + 1) * gate * sigmoid(alpha * gate) in float; gates are clamped
                            // to at most `limit`, ups to between -limit and limit
};

// The output columns that each row needs, checked 32 at a time. Others may or may not be computed.
struct WantedColumns {
  const int32_t* mask_of;  // [rows]: the row's index in `masks`, or -1: it needs all columns
  const uint32_t* masks;   // [any, num_words]: bit t % 32 of word t / 32 is set: token t is needed
  int64_t num_words;
  int32_t first_column;  // the token of this rank's first column
};

struct LinearArgs {
  int32_t dtype;
  int32_t mode;
  const LinearWeights* weights;
  const void* x;  // [T, num_in]; the stride is even in bfloat16. int8: `quire_quantize`'s output
  int64_t x_stride;
  void* out;
  int64_t out_stride;
  int64_t num_rows;
  const float* x_scales;  // int8: [T, splits]
  int64_t num_greedy;
  quire::Greatest* greatest;            // [num_greedy], of this thread
  float scale;                          // of logits
  float cap;                            // of logits; 0: no cap
  const WantedColumns* wanted;          // null: every row needs all columns
  const quire::LowRankLayer* low_rank;  // of adapters, added to the sums before the bias; or null
  const float* addend;  // [rows from `addend_row` on, panel]: these terms for one panel, or null
  int64_t addend_row;
};

// Quantizes an int8 layer's inputs, each part of a row alone, zero-padded to a multiple of 4 bytes.
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
  QUIRE_RMS_NORM = 0,    // rounded to dtype, then multiplied by the weight, which has that dtype
  QUIRE_WIDE_NORM = 1,   // an RMS norm in float with float weight and bias, rounded once at the end
  QUIRE_LAYER_NORM = 2,  // as QUIRE_WIDE_NORM, after the mean is subtracted
};

struct NormArgs {
  int32_t dtype;
  const void* x;        // [T, C]
  const int64_t* rows;  // indices of the rows of x to norm, or null: all
  const void* weight;   // [C]
  const float* bias;    // [C], or null; null for QUIRE_RMS_NORM
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
  int32_t rotary_size;  // channels of a head that are rotated, the first ones
};

// The buffers of a program's operations, with a row for each token or for each sampled token.
enum QuireBuffer : int32_t {
  QUIRE_RESIDUAL = 0,
  QUIRE_NORMED = 1,
  QUIRE_QKV = 2,  // Q heads, K heads, V heads
  QUIRE_ATTENDED = 3,
  QUIRE_HIDDEN = 4,
  QUIRE_BRANCH = 5,
  QUIRE_PARTIAL = 6,  // float: this rank's partial sum, then the sum over the ranks
  // For mixtures of experts. A token has S places: one for each of its k experts, best first, then
  // one for the shared expert if there is one. Rows, one for each place, are sorted by expert.
  QUIRE_SCORES = 7,     // float [T, E]: the router's outputs
  QUIRE_CHOSEN = 8,     // int32 [T, k]: each token's experts
  QUIRE_SHARES = 9,     // float [T, S]: the factors of the experts' results
  QUIRE_PLACES = 10,    // int32 [T, S]: the row of each place's input and result
  QUIRE_GATHERED = 11,  // [T * S, C]: inputs; unused if they are quantized
  QUIRE_INNER = 12,     // [T * k, inner channels], then T rows of the shared expert
  QUIRE_RESULTS = 13,   // float [T * S, C]: this rank's partial sums, then the sums over the ranks
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
  int32_t out;         // a QuireBuffer, as are `x`, `out` and `to` of the operations below
};

// Computes the norm of `x`, and quantizes it if the next layer is in int8.
struct NormOp {
  const void* weight;  // `weight`, `bias`, `eps` and `norm_kind` as in NormArgs
  const float* bias;
  const LinearWeights* next;  // the next layer if it is in int8, or null
  int32_t x;
  int32_t out;
  int32_t is_sampled;  // only the sampled rows are computed
  float eps;
  int32_t norm_kind;
};

struct LinearOp {
  const LinearWeights* weights;
  int32_t mode;  // a LinearMode
  int32_t x;
  int32_t out;
  int32_t quantizes;               // `x` is quantized first
  const LowRankWeights* adapters;  // [slots], or null: no adapter adds to this layer
  int64_t rank;                    // the greatest rank of `adapters`
};

struct RotateAndWriteOp {
  const float* cos;  // [positions, D / 2]
  const float* sin;
  void* k_cache;
  void* v_cache;
  const void* q_norm;  // [D]: weight of the norm of each head before the rotation, or null
  const void* k_norm;
  const void* q_scale;      // [positions]: factor of Q after the rotation, or null
  int32_t x;                // Q is normed, rotated and scaled in place
  float eps;                // of both norms
  int32_t norm_kind;        // of both norms
  int32_t norms_all_heads;  // one norm over all heads: q_norm is [H * D], k_norm [K * D]
};

struct AttendOp {
  const void* k_cache;
  const void* v_cache;
  int32_t x;
  int32_t out;
  float scale;  // this and the following as in AttendArgs
  float soft_cap;
  int32_t window;
  const float* sinks;
};

// Writes the sum over the ranks plus a bias to `out`, rounded as a linear layer's output is.
struct RoundPartialOp {
  const void* bias;  // or null
  int32_t out;
  const LowRankWeights* adapters;  // the layer's; their A x lies behind the sums in QUIRE_PARTIAL
  int64_t rank;
};

// Adds `scale` times `x` to `to`. Product and sum are rounded.
struct AddOp {
  int32_t x;
  int32_t to;
  float scale;
};

// Applies GELU to `x` in place, in the tanh approximation.
struct GeluOp {
  int32_t x;
};

struct LogitsOp {
  const LinearWeights* weights;
  int32_t x;
  float scale;  // `scale` and `cap` as in LinearArgs
  float cap;
};

enum SharedExpert : int32_t {
  QUIRE_NOT_SHARED = 0,
  QUIRE_SHARED = 1,        // its share is 1
  QUIRE_SHARED_GATED = 2,  // its share is the sigmoid of the score after those of the experts
};

// Chooses each token's experts. Of equal scores the lower number wins; NaN is the greatest score.
struct RouteOp {
  const float* correction;  // [E]: added to the scores for the choice only, or null
  int32_t num_experts;
  int32_t top_k;
  int32_t groups;      // groups of experts of equal size
  int32_t top_groups;  // groups that experts are chosen from, by the sum of their two best scores
  int32_t is_sigmoid;  // scores go through a sigmoid instead of a softmax
  int32_t softmax_after_top_k;
  int32_t renormalise;  // the experts' shares add up to `scale`
  int32_t shared;       // a SharedExpert
  float scale;          // of all shares except the shared expert's
};

struct RouteArgs {
  RouteOp how;
  const float* scores;  // [T, experts and the shared expert's gate]
  int64_t stride;
  int32_t* chosen;  // [T, k], the best first
  float* shares;    // [T, S]
  int64_t num_tokens;
};

// Sorts tokens by expert, stably, and computes the experts' MLPs.
struct ExpertsOp {
  const LinearWeights* ups;  // [E], then the shared expert's; all gated
  const LinearWeights* downs;
  int32_t num_experts;
  int32_t top_k;
  int32_t has_shared;
  int32_t mode;  // the LinearMode of the experts' ups; that of the shared expert is QUIRE_GATED
  int32_t x;
  int32_t is_split;                   // the results are partial sums, to be added over the ranks
  const LowRankWeights* up_adapters;  // [slots], for the shared expert's layer, or null
  const LowRankWeights* down_adapters;
  int64_t up_rank;  // the greatest rank of `up_adapters`
  int64_t down_rank;
};

// Adds up each token's results times their shares, in the order of its places.
struct MixOp {
  const float* bias;  // [E, C]: added to the experts' results, or null
  int32_t top_k;
  int32_t num_places;
  int32_t out;
  const LowRankWeights* adapters;  // as in RoundPartialOp, for the shared expert's down layer
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

// Changes to the logits of greedy rows, before their greatest logit is found: a bias is added,
// penalties are applied to the tokens seen, and masked tokens are skipped. Ids ascend within a row;
// ids of other ranks' columns have no effect here.
struct GreedyEdits {
  const int64_t* biased_starts;  // [num_greedy + 1]: where each row's ids begin, then the end
  const int32_t* biased_ids;
  const float* bias;
  const int64_t* seen_starts;  // [num_greedy + 1]
  const int32_t* seen_ids;
  const int32_t* seen_counts;  // in the output; 0: no presence and frequency penalty
  const float* presence;       // [num_greedy]
  const float* frequency;
  const float* repetition;
  const int32_t* mask_of;  // [num_greedy]: the row's index in `masks`, or -1: no mask
  const uint32_t* masks;   // [any, num_words]: bit t % 32 of word t / 32 allows token t
  int64_t num_words;
  int32_t first_column;  // the token of this rank's first column
};

// Runs operations of a program. A single rank runs all of them in one call. With several ranks, a
// call ends before each sum over the ranks, which the caller computes in place.
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
  int64_t num_samples;
  const int64_t* last_tokens;  // [S]
  // Workspace; 64-byte aligned.
  void* buffers[QUIRE_NUM_BUFFERS];  // [T, the buffer's width]
  int64_t widths[QUIRE_NUM_BUFFERS];
  void* quantized;  // [T or T * S, `quantized_stride`]: the int8 input of one layer at a time
  int64_t quantized_stride;
  float* scales;       // [T or T * S, splits]: the scales of `quantized`
  int64_t max_splits;  // the greatest number of splits of a layer
  int64_t num_greedy;  // greedy rows, the last of S: they get `greatest` and no `logits`
  float* greatest;     // [num_greedy, 2]: the greatest logit and its column, the first of equals
  const GreedyEdits* edits;      // of the greedy rows, or null
  const WantedColumns* wanted;   // of the logits of S rows, or null
  float* logits;                 // [S - num_greedy, V of this rank]
  const int32_t* adapter_slots;  // [T]: each token's adapter slot or -1; null: no token has one
  int64_t num_slots;
  float* low_rank;  // [T, the greatest rank]: workspace for a layer's A x
};

struct ArgmaxArgs {
  const float* x;  // [S, V]
  int64_t stride;
  int64_t* out;  // [S]: the column of the greatest value, the first of equals
  int64_t num_rows;
  int64_t num_columns;
};

// Draws one token from each of some rows of logits, at a temperature above 0.
struct SampleArgs {
  const float* logits;  // [S, V]
  int64_t stride;
  int64_t num_columns;
  const int64_t* rows;  // [R]
  int64_t num_rows;
  const float* temperature;  // [R], as are all of the following
  const int64_t* top_k;      // 0: no limit
  const double* top_p;
  const double* log_min_p;  // minus infinity: no limit
  const double* uniform;    // in [0, 1)
  int64_t* out;             // -1 if the greatest logit is infinite or a logit is NaN
};

// Computes the log-probability and rank of one token in each of some rows of logits, and the
// log-probabilities of the best tokens, of which equal ones are in the order of their ids.
struct ScoreArgs {
  const float* logits;  // [S, V]
  int64_t stride;
  int64_t num_columns;
  const int64_t* rows;  // [R]
  int64_t num_rows;
  const int64_t* token_ids;  // [R]
  const int64_t* num_top;    // [R]
  int64_t max_top;
  double* logprobs;      // [R]; NaN if the greatest logit is infinite or a logit is NaN
  int64_t* ranks;        // [R]
  int64_t* top_ids;      // [R, max_top]
  double* top_logprobs;  // [R, max_top]
  double* log_totals;    // [R]: a log-probability is the logit minus this
};

struct MaskArgs {
  float* logits;  // [S, V]; logits of tokens that are not allowed become minus infinity
  int64_t stride;
  int64_t num_columns;
  const int32_t* rows;  // [K]
  int64_t num_rows;
  const uint32_t* masks;  // [K, num_words]; bit t % 32 of word t / 32 allows token t
  int64_t num_words;      // tokens past the last word are not allowed
};

// Copies blocks from the caches of a model's layers to memory outside of them, or back. A block has
// one piece in each cache.
struct CopyBlocksArgs {
  int64_t num_caches;
  int64_t piece_bytes;
  char* outside;         // the first cache's piece of block 0
  int64_t block_stride;  // bytes from a block's piece to that of the next block
  int64_t piece_stride;  // bytes from a block's piece to that of the next cache
  const int64_t* cache_blocks;
  const int64_t* outside_blocks;
  int64_t num_blocks;
  int32_t goes_out;
};

int32_t quire_panel_columns();
void quire_pack(const PackArgs* args, int32_t num_threads);
void quire_linear(const LinearArgs* args, int32_t num_threads);
int64_t quire_int8_bytes(const LinearWeights* weights);  // size of the packed weights
void quire_pack_int8(const PackArgs* args, int32_t num_threads);
int64_t quire_w4_bytes(const LinearWeights* weights);  // size of the packed weights
void quire_pack_w4(const PackArgs* args, int32_t num_threads);
void quire_quantize(const QuantizeArgs* args, int32_t num_threads);
void quire_norm(const NormArgs* args, int32_t num_threads);
void quire_rotary(const RotaryArgs* args, int32_t num_threads);
void quire_route(const RouteArgs* args, int32_t num_threads);
void quire_argmax(const ArgmaxArgs* args, int32_t num_threads);
void quire_sample(const SampleArgs* args, int32_t num_threads);
void quire_mask(const MaskArgs* args, int32_t num_threads);
void quire_score(const ScoreArgs* args, int32_t num_threads);
// Checks indices only when it runs operation 0: all calls of a step have the same indices.
QuireRefusal quire_forward(const ForwardArgs* args);
void quire_copy_blocks(const CopyBlocksArgs* args, char* const* caches, int32_t num_threads);
// Asks the kernel for huge pages for this memory, as far as it is not in use yet.
void quire_huge_pages(void* start, int64_t size);

// One rank's view of the memory that the ranks of a machine share; see shared_sum.cpp.
struct SharedGroup {
  char* base;        // zeroed before the first rank uses it
  int64_t capacity;  // bytes in a slot; a multiple of 64
  int32_t rank;
  int32_t size;
  int64_t round;  // the exchanges of this rank so far; begins at 0
};

void quire_shared_sum(SharedGroup* group, float* x, int64_t count);
void quire_shared_gather(SharedGroup* group, const char* x, char* const* out, int64_t num_bytes);

}  // extern "C"

// Kernels for a team, see `team.h`. Attention is in `attention.h`.
void linear_part(const LinearArgs& args, Team team);
void linears_part(const LinearArgs* layers, int64_t count, Team team);  // as one stage

// Kernels for rows or tokens `begin` to `end`.
void write_kv_rows(const WriteKvArgs& args, int64_t begin, int64_t end);
void quantize_rows(const QuantizeArgs& args, int64_t begin, int64_t end);
void norm_rows(const NormArgs& args, int64_t begin, int64_t end);
void rotary_rows(const RotaryArgs& args, int64_t begin, int64_t end);
void route_rows(const RouteArgs& args, int64_t begin, int64_t end);
void mix_rows(const ForwardArgs& args, const MixOp& op, int64_t begin, int64_t end);
