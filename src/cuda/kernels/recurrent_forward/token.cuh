// A token as a thread of recurrent_forward has it: its own values of k and q, a column of v, the gates.
#pragma once

#include "cuda/block/gates.cuh"
#include "cuda/kernels/recurrent_forward/slab.cuh"

namespace flashqla::cuda {

/// First bytes of a token's rows, for the block's head.
struct TokenRows {
  const std::byte *q, *k, *v, *g, *beta;
  std::byte* o;

  FLASHQLA_DEVICE void advance(const RecurrentParams& p) {
    q += p.q.stride_token;
    k += p.k.stride_token;
    v += p.v.stride_token;
    g += p.g.stride_token;
    beta += p.beta.stride_token;
    o += p.o.stride_token;
  }
};

/// `first` counts batch entries or, in a pack, tokens.
FLASHQLA_DEVICE std::byte* row_of(const StepTensor& x, std::int64_t first, int head) {
  return x.data + first * x.stride_sequence + times(head, x.stride_head);
}
FLASHQLA_DEVICE TokenRows token_rows_of(const RecurrentParams& p, std::int64_t first, int head, int head_qk) {
  return {row_of(p.q, first, head_qk), row_of(p.k, first, head_qk), row_of(p.v, first, head),
          row_of(p.g, first, head),    row_of(p.beta, first, head), row_of(p.o, first, head)};
}

/// Sums over K of a token alone.
struct TokenSums {
  float k_k, q_q, k_q;
};

template <int kGroups>
struct Token {
  float4 k[kGroups], q[kGroups];       // as given; zero past dim_k
  TokenSums sums;                      // over these
  float v;                             // of the thread's own column
  std::uint32_t g, beta, a_log, bias;  // bits: they are made numbers of when they are wanted
};

template <int kGroups>
FLASHQLA_DEVICE void make_sums(Token<kGroups>& token) {
  token.sums = {0.0f, 0.0f, 0.0f};
#pragma unroll
  for (int i = 0; i < kGroups; ++i) {
    token.sums.k_k = dot(token.k[i], token.k[i], token.sums.k_k);
    token.sums.q_q = dot(token.q[i], token.q[i], token.sums.q_q);
    token.sums.k_q = dot(token.k[i], token.q[i], token.sums.k_q);
  }
}

/// The sums are made here, in each type's own branch, so that they wait for loads of that type alone: past the branches the
/// compiler would have them wait for those of the state too.
template <class Element, class Where, int kGroups>
FLASHQLA_DEVICE void load_rows(const RecurrentParams& p, const TokenRows& rows, const SlabPlace& place, int column,
                               Token<kGroups>& token) {
  const auto* const k = reinterpret_cast<const Element*>(rows.k);
  const auto* const q = reinterpret_cast<const Element*>(rows.q);
  const auto* const v = reinterpret_cast<const Element*>(rows.v) + place.first_v;
  if (place.even || (p.vectors != 0 && place.whole)) {
    using Memory = typename Quad<Element>::Memory;
    const Element own_v = v[column];
    Memory of_k[kGroups], of_q[kGroups];
#pragma unroll
    for (int i = 0; i < kGroups; ++i) {
      of_k[i] = *reinterpret_cast<const Memory*>(k + Where::k(i));
      of_q[i] = *reinterpret_cast<const Memory*>(q + Where::k(i));
    }
#pragma unroll
    for (int i = 0; i < kGroups; ++i) {
      token.k[i] = Quad<Element>::load(of_k[i]);
      token.q[i] = Quad<Element>::load(of_q[i]);
    }
    token.v = static_cast<float>(own_v);
    return make_sums(token);
  }
  token.v = column < place.columns ? static_cast<float>(v[column]) : 0.0f;
  const auto four = [](const Element* at) {
    return float4{static_cast<float>(at[0]), static_cast<float>(at[1]), static_cast<float>(at[2]), static_cast<float>(at[3])};
  };
#pragma unroll
  for (int i = 0; i < kGroups; ++i) {
    token.k[i] = token.q[i] = {0.0f, 0.0f, 0.0f, 0.0f};
    if (Where::k(i) >= place.dim_k) continue;
    token.k[i] = four(k + Where::k(i));
    token.q[i] = four(q + Where::k(i));
  }
  make_sums(token);
}

/// All loads are under way before any is waited for.
template <class Where>
FLASHQLA_DEVICE Token<Where::kGroups> load_token(const RecurrentParams& p, const TokenRows& rows, const SlabPlace& place,
                                                 int column) {
  Token<Where::kGroups> token;
  token.g = token.beta = token.a_log = token.bias = 0;
  if (p.gate != GateKind::none) token.g = load_bits(rows.g, p.g.type);
  if (p.beta_kind != BetaKind::one) token.beta = load_bits(rows.beta, p.beta.type);
  if (p.gate == GateKind::computed) {
    token.a_log = load_bits(p.a_log.data + times(place.head, p.a_log.stride), p.a_log.type);
    if (p.dt_bias.data != nullptr) token.bias = load_bits(p.dt_bias.data + times(place.head, p.dt_bias.stride), p.dt_bias.type);
  }
  if (p.type == Number::bf16) {
    load_rows<__nv_bfloat16, Where>(p, rows, place, column, token);
  } else if (p.type == Number::f16) {
    load_rows<__half, Where>(p, rows, place, column, token);
  } else {
    load_rows<float, Where>(p, rows, place, column, token);
  }
  return token;
}

template <int kGroups>
FLASHQLA_DEVICE float log_decay_of(const RecurrentParams& p, const Token<kGroups>& token) {
  if (p.gate == GateKind::none) return 0.0f;
  const float g = number_of(token.g, p.g.type);
  if (p.gate == GateKind::log_decay) return block::log_decay(Gate::log_decay, g, 0.0f, 0.0f);
  return block::log_decay(Gate::computed, g, number_of(token.a_log, p.a_log.type), number_of(token.bias, p.dt_bias.type));
}
template <int kGroups>
FLASHQLA_DEVICE float beta_of(const RecurrentParams& p, const Token<kGroups>& token) {
  if (p.beta_kind == BetaKind::one) return 1.0f;
  const float beta = number_of(token.beta, p.beta.type);
  if (p.beta_kind == BetaKind::given) return beta;
  return block::sigmoid(beta) * (p.beta_kind == BetaKind::sigmoid ? 1.0f : 2.0f);
}

}  // namespace flashqla::cuda
