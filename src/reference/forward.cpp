// chunk_forward and recurrent_forward: the token recurrence, one (sequence, value head) after another.
#include "reference/reference.hpp"
#include "reference/tokens.hpp"

namespace flashqla::reference {

namespace {

/// Runs value head `head` of sequence n from the state in S and leaves the last state there.
/// `before(t)` and `after(t)` are called around every token.
template <class Before, class After>
void run_head(const HeadTokens& tokens, const MutableTokenView& o, double* S, double* rows, const Before& before,
              const After& after) {
  const Problem& problem = tokens.inputs.problem;
  const std::int64_t dim_k = problem.dim_k, dim_v = problem.dim_v;
  double *q = rows, *k = q + dim_k, *v = k + dim_k, *error = v + dim_v;
  for (std::int64_t t = 0; t < tokens.length; ++t) {
    before(t);
    tokens.load_q(t, q);
    tokens.load_k(t, k);
    tokens.load_v(t, v);
    step(problem, std::exp(tokens.log_decay(t)), tokens.beta(t), k, v, S, S, error);
    for (std::int64_t j = 0; j < dim_v; ++j) {
      double sum = 0;
      for (std::int64_t i = 0; i < dim_k; ++i) sum += q[i] * S[i * dim_v + j];
      o.store(tokens.batch, tokens.begin + t, tokens.head, j, tokens.inputs.scale * sum);
    }
    after(t);
  }
}

std::int64_t run_head_scratch(const Problem& problem) { return state_size(problem) + 2 * problem.dim_k + 2 * problem.dim_v; }

void store_g_cumulative(const HeadTokens& tokens, const MutableTokenView& out) {
  double sum = 0;
  for (std::int64_t t = 0; t < tokens.length; ++t) {
    if (t % kTokensPerChunk == 0) sum = 0;
    const double g = tokens.log_decay(t);
    sum += g < -128 ? -128 : g;
    out.store(tokens.batch, tokens.begin + t, tokens.head, 0, sum);
  }
}

/// Rows of (I + L)^-1 with L = stril(beta_i k_i.k_j), by forward substitution: row_i = e_i - sum_{j<i} L_ij row_j.
void store_a(const HeadTokens& tokens, const MutableTokenView& out, double* keys, double* inverse) {
  constexpr std::int64_t kSize = kTokensPerChunk;
  const std::int64_t dim_k = tokens.inputs.problem.dim_k;
  for (std::int64_t t = 0; t < tokens.length; ++t) {
    const std::int64_t i = t % kSize;
    double* k = keys + i * dim_k;
    double* row = inverse + i * kSize;
    tokens.load_k(t, k);
    for (std::int64_t c = 0; c < kSize; ++c) row[c] = c == i ? 1 : 0;
    for (std::int64_t j = 0; j < i; ++j) {
      double dot = 0;
      for (std::int64_t d = 0; d < dim_k; ++d) dot += k[d] * keys[j * dim_k + d];
      for (std::int64_t c = 0; c <= j; ++c) row[c] -= tokens.beta(t) * dot * inverse[j * kSize + c];
    }
    for (std::int64_t c = 0; c < kSize; ++c) out.store(tokens.batch, tokens.begin + t, tokens.head, c, row[c]);
  }
}

std::int64_t store_a_scratch(const Problem& problem) { return kTokensPerChunk * (problem.dim_k + kTokensPerChunk); }

/// Rows past the last offset belong to no sequence.
void zero_slack(const InputArguments& inputs, const MutableTokenView& view, std::int64_t size) {
  if (inputs.sequences.packed())
    zero_rows(view, 0, inputs.sequences.end(), inputs.sequences.tokens, inputs.problem.heads_v, size);
}

void zero_padding_entry(const InputArguments& inputs, std::int64_t n, const MutableTokenView& o) {
  const Sequences& sequences = inputs.sequences;
  const std::int64_t begin = sequences.begin(n);
  zero_rows(o, sequences.batch(n), begin, begin + sequences.length(n), inputs.problem.heads_v, inputs.problem.dim_v);
}

void chunk_forward_head(const ChunkForwardArguments& arguments, std::int64_t n, std::int64_t head, std::int64_t place,
                        Scratch scratch) {
  const HeadTokens tokens(arguments.inputs, n, head);
  const Problem& problem = arguments.inputs.problem;
  double* S = scratch.take(state_size(problem));
  double* rows = scratch.take(2 * problem.dim_k + 2 * problem.dim_v);
  const auto store_next = [&] { store_state(arguments.stored, arguments.stored_row(place++), head, problem, S); };
  const auto before = [&](std::int64_t t) {
    if (arguments.stored_states == StoredStates::before_chunks && t % kTokensPerChunk == 0) store_next();
  };
  const auto after = [&](std::int64_t t) {
    if (arguments.stored_states == StoredStates::every && (arguments.prefix(n) + t + 1) % arguments.states_every == 0)
      store_next();
  };
  load_state(arguments.states.initial_state, arguments.states.read_row(n), head, problem, S);
  run_head(tokens, arguments.o, S, rows, before, after);
  store_state(arguments.states.final_state, arguments.states.write_row(n), head, problem, S);
  if (arguments.g_cumulative.present()) store_g_cumulative(tokens, arguments.g_cumulative);
  if (arguments.a.present()) {
    double* keys = scratch.take(kTokensPerChunk * problem.dim_k);
    store_a(tokens, arguments.a, keys, scratch.take(kTokensPerChunk * kTokensPerChunk));
  }
}

std::size_t bytes_of(std::int64_t doubles) { return static_cast<std::size_t>(doubles) * sizeof(double); }

}  // namespace

std::size_t chunk_forward_workspace(const ChunkForward& descriptor, int) {
  return bytes_of(run_head_scratch(descriptor.problem) + store_a_scratch(descriptor.problem));
}

void chunk_forward(const ChunkForwardArguments& arguments, std::byte* workspace, const Parallel&) {
  const InputArguments& inputs = arguments.inputs;
  std::int64_t place = 0;
  for (std::int64_t n = 0; n < inputs.sequences.count; ++n) {
    if (arguments.states.padding(n)) {
      zero_padding_entry(inputs, n, arguments.o);
    } else {
      for (std::int64_t head = 0; head < inputs.problem.heads_v; ++head) {
        chunk_forward_head(arguments, n, head, place, Scratch(workspace));
      }
    }
    place += arguments.stored_count(n);
  }
  zero_slack(inputs, arguments.o, inputs.problem.dim_v);
  zero_slack(inputs, arguments.g_cumulative, 1);
  zero_slack(inputs, arguments.a, kTokensPerChunk);
}

std::size_t recurrent_forward_workspace(const RecurrentForward& descriptor, int) {
  return bytes_of(run_head_scratch(descriptor.problem));
}

void recurrent_forward(const RecurrentForwardArguments& arguments, std::byte* workspace, const Parallel&) {
  const InputArguments& inputs = arguments.inputs;
  const Problem& problem = inputs.problem;
  for (std::int64_t n = 0; n < inputs.sequences.count; ++n) {
    if (arguments.states.padding(n)) {
      zero_padding_entry(inputs, n, arguments.o);
      continue;
    }
    for (std::int64_t head = 0; head < problem.heads_v; ++head) {
      const HeadTokens tokens(inputs, n, head);
      Scratch scratch(workspace);
      double* S = scratch.take(state_size(problem));
      double* rows = scratch.take(2 * problem.dim_k + 2 * problem.dim_v);
      load_state(arguments.states.initial_state, arguments.states.read_row(n), head, problem, S);
      run_head(
          tokens, arguments.o, S, rows, [](std::int64_t) {},
          [&](std::int64_t t) {
            store_state(arguments.token_states, arguments.token_row(tokens.batch, tokens.begin + t), head, problem, S);
          });
      store_state(arguments.states.final_state, arguments.states.write_row(n), head, problem, S);
    }
  }
  zero_slack(inputs, arguments.o, problem.dim_v);
}

}  // namespace flashqla::reference
