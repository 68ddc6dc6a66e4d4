#include "api/problem.hpp"

#include <algorithm>
#include <cmath>
#include <string>

#include "common/saved.hpp"

namespace flashqla::api {

namespace {

std::string text(double value) { return std::to_string(value); }

std::int64_t at_least(const char* name, std::int64_t value, std::int64_t smallest) {
  if (value < smallest) invalid(name, "at least " + std::to_string(smallest), std::to_string(value));
  return value;
}

/// Product of sizes, none negative; throws when it does not fit into 63 bits.
std::int64_t checked_product(const char* what, std::initializer_list<std::int64_t> factors) {
  std::int64_t product = 1;
  bool overflow = false;
  for (const std::int64_t factor : factors) {
    if (factor == 0) return 0;
    overflow = overflow || __builtin_mul_overflow(product, factor, &product);
  }
  if (overflow) invalid(what, "a size in bytes below 2^63", text_of(std::span(factors.begin(), factors.size())) + " multiplied");
  return product;
}

template <class Enum>
void enumerator(const char* name, Enum value, Enum last) {
  if (value > last)
    invalid_type(name, "one of its " + std::to_string(static_cast<int>(last) + 1) + " values",
                 std::to_string(static_cast<int>(value)));
}

void check_sizes(const Problem& p) {
  at_least("batch", p.batch, 0);
  at_least("tokens", p.tokens, 0);
  at_least("heads_qk", p.heads_qk, 1);
  at_least("heads_v", p.heads_v, 1);
  if (p.heads_v % p.heads_qk != 0) {
    invalid("heads_v", "a multiple of heads_qk = " + std::to_string(p.heads_qk), std::to_string(p.heads_v));
  }
  const auto head_dim = [](const char* name, std::int64_t size) {
    if (size < 1 || size > kMaxHeadDim) invalid(name, "1 to " + std::to_string(kMaxHeadDim), std::to_string(size));
  };
  head_dim("dim_k", p.dim_k);
  head_dim("dim_v", p.dim_v);
  at_least("num_sequences", p.num_sequences, -1);
  if (p.packed && p.batch != 1) invalid("batch", "1 with packed sequences (cu_seqlens)", std::to_string(p.batch));
  if (!p.packed && p.num_sequences >= 0 && p.num_sequences != p.batch) {
    invalid("num_sequences", "batch = " + std::to_string(p.batch) + " without packed sequences", std::to_string(p.num_sequences));
  }
}

/// Every size in bytes that the library or a caller derives from the descriptor must fit into int64.
void check_overflow(const Problem& p) {
  constexpr std::int64_t kBytes = 8, kRowBytes = 16;  // the widest element; what the checks keep for each sequence or token
  const std::int64_t batch = std::max<std::int64_t>(p.batch, 1), tokens = std::max<std::int64_t>(p.tokens, 1);
  const std::int64_t widest = std::max({p.dim_k, p.dim_v, kTokensPerChunk});
  checked_product("batch * tokens * heads_v * dim", {batch, tokens, p.heads_v, widest, kBytes});
  checked_product("num_sequences * heads_v * dim_k * dim_v", {p.sequences(), p.heads_v, p.dim_k, p.dim_v, kBytes, kRowBytes});
  checked_product("batch * tokens / 64 * heads_v * dim_k * dim_v",
                  {batch, tokens / kTokensPerChunk + 1, p.heads_v, p.dim_k, p.dim_v, kBytes, kRowBytes});
  checked_product("tokens * dim_k * dim_v",
                  {tokens, p.dim_k, p.dim_v, kBytes, 2, kMaxThreads});  // more than any implementation keeps a thread
}

enum class Operator { forward, backward };

Problem resolved(const Problem& problem, Operator which) {
  Problem p = problem;
  enumerator("device", p.device.type, DeviceType::cuda);
  if (!DTypeSet{DType::f64, DType::f32, DType::bf16, DType::f16}.contains(p.dtype)) {
    invalid_type("dtype", "float32, bfloat16, float16 or float64", name_of(p.dtype));
  }
  enumerator("gate", p.gate, Gate::cumulative);
  enumerator("beta", p.beta, Beta::doubled_sigmoid);
  enumerator("state_layout", p.state_layout, StateLayout::value_key);
  if (p.gate == Gate::cumulative && which != Operator::backward) {
    invalid_type("gate", "none, log_decay or computed (cumulative is for chunk_backward alone)", "cumulative");
  }
  check_sizes(p);
  check_overflow(p);
  if (!std::isfinite(p.l2norm_eps) || p.l2norm_eps < 0.0)
    invalid("l2norm_eps", "a finite number of at least 0", text(p.l2norm_eps));
  if (p.scale && !std::isfinite(*p.scale)) invalid("scale", "a finite number", text(*p.scale));
  p.num_sequences = p.sequences();
  if (!p.scale) p.scale = 1.0 / std::sqrt(static_cast<double>(p.dim_k));
  return p;
}

}  // namespace

ChunkForward resolved(const ChunkForward& descriptor) {
  ChunkForward d = descriptor;
  d.problem = resolved(d.problem, Operator::forward);
  enumerator("stored_states", d.stored_states, StoredStates::every);
  if (d.stored_states == StoredStates::every) {
    if (d.states_every < 1 || d.states_every % kTokensPerChunk != 0) {
      invalid("states_every", "a positive multiple of " + std::to_string(kTokensPerChunk), std::to_string(d.states_every));
    }
  } else if (d.states_every != 0) {
    invalid("states_every", "0 without StoredStates::every", std::to_string(d.states_every));
  }
  return d;
}

ChunkBackward resolved(const ChunkBackward& descriptor) {
  ChunkBackward d = descriptor;
  d.problem = resolved(d.problem, Operator::backward);
  at_least("max_sequence_tokens", d.max_sequence_tokens, -1);
  const std::int64_t tokens = d.problem.tokens;
  if (d.max_sequence_tokens < 0 || d.max_sequence_tokens > tokens) d.max_sequence_tokens = tokens;
  if (!d.problem.packed && d.max_sequence_tokens < tokens) {
    invalid("max_sequence_tokens", "at least tokens = " + std::to_string(tokens) + " without packed sequences",
            std::to_string(d.max_sequence_tokens));
  }
  return d;
}

RecurrentForward resolved(const RecurrentForward& descriptor) {
  RecurrentForward d = descriptor;
  d.problem = resolved(d.problem, Operator::forward);
  return d;
}

std::int64_t max_stored_states(const ChunkForward& descriptor) {
  const Problem& p = descriptor.problem;
  if (descriptor.stored_states == StoredStates::none) return 0;
  return p.batch * (p.tokens / kTokensPerChunk) + p.sequences();  // a sequence stores at most one more than its whole chunks
}

std::int64_t saved_size(const Problem& p) {
  constexpr std::int64_t kMostBytes = 8192;  // a token and value head, with K = V = 256
  checked_product("batch * tokens * heads_v", {p.batch, p.tokens, p.heads_v, kMostBytes});
  return SavedShape(p).elements();
}

}  // namespace flashqla::api
