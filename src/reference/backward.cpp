// chunk_backward: the adjoint of the token recurrence, by hand. With Sd = exp(g) S_prev, e = v - k Sd and S = Sd + beta k^T e:
//
//   dS += scale q^T do            dq = scale do S^T
//   u = k dS;  dv = beta u;  dbeta = u.e;  dk = beta dS e^T - Sd dv^T
//   dSd = dS - k^T dv;  dg = exp(g) <dSd, S_prev>;  dS_prev = exp(g) dSd
//
// The states are recomputed: one is kept per 64 tokens of a sequence, and those inside a 64-token block when it is walked
// backwards.
#include <algorithm>

#include "reference/reference.hpp"
#include "reference/tokens.hpp"

namespace flashqla::reference {

namespace {

constexpr std::int64_t kBlock = 64;

std::int64_t blocks_of(std::int64_t tokens) { return (tokens + kBlock - 1) / kBlock; }

/// Pieces of the workspace. `tokens` is the length of the longest sequence.
struct Buffers {
  double* checkpoints;          // [blocks,K,V] states before each block
  double* states;               // [kBlock+1,K,V] states before each token of a block, and after the last
  double* dS;                   // [K,V]
  double *sum_dq, *sum_dk;      // [tokens,K] gradients of the rows as the recurrence reads them, summed over the group
  double *d_a_log, *d_dt_bias;  // [Hv]
  double *q, *k, *v, *error, *d_o, *u;

  Buffers(Scratch scratch, const Problem& problem, std::int64_t tokens) {
    const std::int64_t size = state_size(problem);
    checkpoints = scratch.take(blocks_of(tokens) * size);
    states = scratch.take((kBlock + 1) * size);
    dS = scratch.take(size);
    sum_dq = scratch.take(tokens * problem.dim_k);
    sum_dk = scratch.take(tokens * problem.dim_k);
    d_a_log = scratch.take(problem.heads_v);
    d_dt_bias = scratch.take(problem.heads_v);
    q = scratch.take(problem.dim_k);
    k = scratch.take(problem.dim_k);
    v = scratch.take(problem.dim_v);
    error = scratch.take(problem.dim_v);
    d_o = scratch.take(problem.dim_v);
    u = scratch.take(problem.dim_v);
  }
  static std::int64_t doubles(const Problem& problem, std::int64_t tokens) {
    return (blocks_of(tokens) + kBlock + 2) * state_size(problem) + 2 * tokens * problem.dim_k + 2 * problem.heads_v +
           2 * problem.dim_k + 4 * problem.dim_v;
  }
};

void step_token(const HeadTokens& tokens, std::int64_t t, const Buffers& buffers, const double* S, double* next) {
  tokens.load_k(t, buffers.k);
  tokens.load_v(t, buffers.v);
  step(tokens.inputs.problem, std::exp(tokens.log_decay(t)), tokens.beta(t), buffers.k, buffers.v, S, next, buffers.error);
}

void fill_checkpoints(const HeadTokens& tokens, const ConstStateView& initial_state, std::int64_t n, const Buffers& buffers) {
  const Problem& problem = tokens.inputs.problem;
  const std::int64_t size = state_size(problem);
  double* S = buffers.states;
  load_state(initial_state, initial_state.present() ? n : -1, tokens.head, problem, S);
  for (std::int64_t t = 0; t < tokens.length; ++t) {
    if (t % kBlock == 0) std::copy_n(S, size, buffers.checkpoints + t / kBlock * size);
    step_token(tokens, t, buffers, S, S);
  }
}

void store_gate_gradient(const ChunkBackwardArguments& arguments, const HeadTokens& tokens, std::int64_t t, double d_log_decay,
                         const Buffers& buffers) {
  const std::int64_t head = tokens.head;
  double d_g = d_log_decay;
  if (tokens.inputs.problem.gate == Gate::computed) {
    const double a_log = tokens.inputs.a_log.load(head);
    // A decay of zero has no gradient, however steep the gate.
    d_g = d_log_decay == 0 ? 0 : -d_log_decay * exp_product(a_log, log_sigmoid(tokens.gate_input(t)));
    buffers.d_a_log[head] += d_log_decay == 0 ? 0 : d_log_decay * tokens.log_decay(t);
    buffers.d_dt_bias[head] += d_g;
  }
  if (arguments.d_g.present()) arguments.d_g.store(tokens.batch, tokens.begin + t, head, 0, d_g);
}

/// `S_prev` and `S`: states before and after token t. On entry buffers.dS is the gradient of S, on return that of S_prev.
void token_backward(const ChunkBackwardArguments& arguments, const HeadTokens& tokens, std::int64_t t, const double* S_prev,
                    const double* S, const Buffers& buffers) {
  const Problem& problem = tokens.inputs.problem;
  const std::int64_t dim_k = problem.dim_k, dim_v = problem.dim_v, head = tokens.head;
  const double decay = std::exp(tokens.log_decay(t)), beta = tokens.beta(t), scale = tokens.inputs.scale;
  double *q = buffers.q, *k = buffers.k, *error = buffers.error, *d_o = buffers.d_o, *u = buffers.u, *dS = buffers.dS;
  double *dq = buffers.sum_dq + t * dim_k, *dk = buffers.sum_dk + t * dim_k;
  tokens.load_q(t, q);
  tokens.load_k(t, k);
  tokens.load_v(t, error);
  for (std::int64_t j = 0; j < dim_v; ++j) {
    d_o[j] = arguments.d_o.present() ? arguments.d_o.load(tokens.batch, tokens.begin + t, head, j) : 0;
    u[j] = 0;
  }
  for (std::int64_t i = 0; i < dim_k; ++i) {
    for (std::int64_t j = 0; j < dim_v; ++j) {
      const std::int64_t at = i * dim_v + j;
      error[j] -= k[i] * (decay * S_prev[at]);
      dS[at] += scale * q[i] * d_o[j];
      dq[i] += scale * S[at] * d_o[j];
      u[j] += k[i] * dS[at];
    }
  }
  double d_beta = 0, d_log_decay = 0;
  for (std::int64_t j = 0; j < dim_v; ++j) d_beta += u[j] * error[j];
  for (std::int64_t i = 0; i < dim_k; ++i) {
    for (std::int64_t j = 0; j < dim_v; ++j) {
      const std::int64_t at = i * dim_v + j;
      const double dv = beta * u[j];
      dk[i] += beta * dS[at] * error[j] - decay * S_prev[at] * dv;
      dS[at] = decay * (dS[at] - k[i] * dv);
      d_log_decay += dS[at] * S_prev[at];
    }
  }
  if (arguments.d_v.present()) {
    for (std::int64_t j = 0; j < dim_v; ++j) arguments.d_v.store(tokens.batch, tokens.begin + t, head, j, beta * u[j]);
  }
  if (arguments.d_beta.present()) {
    arguments.d_beta.store(tokens.batch, tokens.begin + t, head, 0, d_beta * tokens.beta_slope(t));
  }
  store_gate_gradient(arguments, tokens, t, d_log_decay, buffers);
}

/// Adds to sum_dq and sum_dk, writes everything else.
void head_backward(const ChunkBackwardArguments& arguments, std::int64_t n, std::int64_t head, const Buffers& buffers) {
  const HeadTokens tokens(arguments.inputs, n, head);
  const Problem& problem = arguments.inputs.problem;
  const std::int64_t size = state_size(problem);
  fill_checkpoints(tokens, arguments.initial_state, n, buffers);
  load_state(arguments.d_final_state, arguments.d_final_state.present() ? n : -1, head, problem, buffers.dS);
  for (std::int64_t block = blocks_of(tokens.length) - 1; block >= 0; --block) {
    const std::int64_t first = block * kBlock, last = std::min(first + kBlock, tokens.length);
    const auto state = [&](std::int64_t t) { return buffers.states + (t - first) * size; };
    std::copy_n(buffers.checkpoints + block * size, size, state(first));
    for (std::int64_t t = first; t < last; ++t) step_token(tokens, t, buffers, state(t), state(t + 1));
    for (std::int64_t t = last - 1; t >= first; --t) token_backward(arguments, tokens, t, state(t), state(t + 1), buffers);
  }
  if (arguments.d_initial_state.present()) store_state(arguments.d_initial_state, n, head, problem, buffers.dS);
}

/// From the gradient dy of y = x * factor (with L2 normalisation: dx = factor (dy - (dy.y) y)) to that of x.
void store_qk_gradient(const HeadTokens& tokens, const ConstTokenView& x, const MutableTokenView& d_x, const double* sum,
                       double* y) {
  if (!d_x.present()) return;
  const std::int64_t dim_k = tokens.inputs.problem.dim_k;
  for (std::int64_t t = 0; t < tokens.length; ++t) {
    const double* dy = sum + t * dim_k;
    const double factor = tokens.load_qk(x, t, y);
    double dot = 0;
    if (tokens.inputs.problem.qk_l2norm) {
      for (std::int64_t i = 0; i < dim_k; ++i) dot += dy[i] * y[i];
    }
    for (std::int64_t i = 0; i < dim_k; ++i) {
      d_x.store(tokens.batch, tokens.begin + t, tokens.head / tokens.inputs.group, i, factor * (dy[i] - dot * y[i]));
    }
  }
}

void zero_slack(const ChunkBackwardArguments& arguments) {
  const InputArguments& inputs = arguments.inputs;
  if (!inputs.sequences.packed()) return;
  const std::int64_t first = inputs.sequences.end(), last = inputs.sequences.tokens;
  const Problem& problem = inputs.problem;
  zero_rows(arguments.d_q, 0, first, last, problem.heads_qk, problem.dim_k);
  zero_rows(arguments.d_k, 0, first, last, problem.heads_qk, problem.dim_k);
  zero_rows(arguments.d_v, 0, first, last, problem.heads_v, problem.dim_v);
  zero_rows(arguments.d_g, 0, first, last, problem.heads_v, 1);
  zero_rows(arguments.d_beta, 0, first, last, problem.heads_v, 1);
}

}  // namespace

std::size_t chunk_backward_workspace(const ChunkBackward& descriptor, int) {
  const Problem& problem = descriptor.problem;
  const std::int64_t longest = descriptor.max_sequence_tokens < 0 ? problem.tokens : descriptor.max_sequence_tokens;
  return static_cast<std::size_t>(Buffers::doubles(problem, longest)) * sizeof(double);
}

void chunk_backward(const ChunkBackwardArguments& arguments, std::byte* workspace, const Parallel&) {
  const InputArguments& inputs = arguments.inputs;
  const Problem& problem = inputs.problem;
  const Buffers buffers(Scratch(workspace), problem, arguments.max_sequence_tokens);
  std::fill_n(buffers.d_a_log, problem.heads_v, 0.0);
  std::fill_n(buffers.d_dt_bias, problem.heads_v, 0.0);
  for (std::int64_t n = 0; n < inputs.sequences.count; ++n) {
    for (std::int64_t head_qk = 0; head_qk < problem.heads_qk; ++head_qk) {
      const std::int64_t head = head_qk * inputs.group;  // the first of the group
      const HeadTokens tokens(inputs, n, head);
      std::fill_n(buffers.sum_dq, tokens.length * problem.dim_k, 0.0);
      std::fill_n(buffers.sum_dk, tokens.length * problem.dim_k, 0.0);
      for (std::int64_t i = 0; i < inputs.group; ++i) head_backward(arguments, n, head + i, buffers);
      store_qk_gradient(tokens, inputs.q, arguments.d_q, buffers.sum_dq, buffers.q);
      store_qk_gradient(tokens, inputs.k, arguments.d_k, buffers.sum_dk, buffers.k);
    }
  }
  for (std::int64_t head = 0; head < problem.heads_v; ++head) {
    if (arguments.d_a_log.present()) arguments.d_a_log.store(head, buffers.d_a_log[head]);
    if (arguments.d_dt_bias.present()) arguments.d_dt_bias.store(head, buffers.d_dt_bias[head]);
  }
  zero_slack(arguments);
}

}  // namespace flashqla::reference
