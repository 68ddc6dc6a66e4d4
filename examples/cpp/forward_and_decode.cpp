// Prefills a sequence in chunks, then decodes its last tokens one by one from the state, and compares with the whole sequence
// done in chunks.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <flashqla/flashqla.hpp>
#include <random>
#include <vector>

using namespace flashqla;

namespace {

constexpr std::int64_t kHeadsQk = 2, kHeadsV = 4, kDim = 64, kTokens = 200, kPrefill = 192;

struct Sequence {
  std::vector<float> q, k, v, g, beta;
};

Sequence random_sequence() {
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  auto filled = [&](std::int64_t size, auto value) {
    std::vector<float> data(static_cast<std::size_t>(size));
    for (float& x : data) x = value(normal(random));
    return data;
  };
  auto same = [](float x) { return x; };
  auto decay = [](float x) { return -0.1f * std::fabs(x); };             // g: natural logarithm of the decay
  auto strength = [](float x) { return 1.0f / (1.0f + std::exp(-x)); };  // beta
  return {filled(kTokens * kHeadsQk * kDim, same), filled(kTokens * kHeadsQk * kDim, same),
          filled(kTokens * kHeadsV * kDim, same), filled(kTokens * kHeadsV, decay), filled(kTokens * kHeadsV, strength)};
}

/// The options of this model, for `tokens` tokens of one sequence.
Problem problem_of(std::int64_t tokens) {
  return {.tokens = tokens, .heads_qk = kHeadsQk, .heads_v = kHeadsV, .dim_k = kDim, .dim_v = kDim, .qk_l2norm = true};
}

/// Tokens [begin, begin + tokens) of the sequence, as views: nothing is copied.
InputTensors views(const Sequence& s, std::int64_t begin, std::int64_t tokens) {
  auto view = [&](const std::vector<float>& data, std::int64_t heads, std::int64_t dim) {
    return ConstTensorView(data.data() + begin * heads * dim, DType::f32, {1, tokens, heads, dim});
  };
  auto gate = [&](const std::vector<float>& data) {
    return ConstTensorView(data.data() + begin * kHeadsV, DType::f32, {1, tokens, kHeadsV});
  };
  InputTensors inputs;
  inputs.q = view(s.q, kHeadsQk, kDim);
  inputs.k = view(s.k, kHeadsQk, kDim);
  inputs.v = view(s.v, kHeadsV, kDim);
  inputs.g = gate(s.g);
  inputs.beta = gate(s.beta);
  return inputs;
}

}  // namespace

int main() {
  const Sequence sequence = random_sequence();
  std::vector<float> whole(sequence.v.size()), stepwise(sequence.v.size()), state(kHeadsV * kDim * kDim);
  auto out = [](std::vector<float>& o, std::int64_t begin, std::int64_t tokens) {
    return TensorView(o.data() + begin * kHeadsV * kDim, DType::f32, {1, tokens, kHeadsV, kDim});
  };
  const TensorView state_view(state.data(), DType::f32, {1, kHeadsV, kDim, kDim});

  ChunkForwardTensors all{.inputs = views(sequence, 0, kTokens), .o = out(whole, 0, kTokens)};
  chunk_forward({.problem = problem_of(kTokens)}, all);

  ChunkForwardTensors prefill{.inputs = views(sequence, 0, kPrefill), .o = out(stepwise, 0, kPrefill)};
  prefill.states.final_state = state_view;
  chunk_forward({.problem = problem_of(kPrefill)}, prefill);

  // Decoding reads and writes one state in place: row 0 of a pool with one row. The plan is made once, run() does not allocate.
  const RecurrentForward step{.problem = problem_of(1)};
  const Plan<RecurrentForward> step_plan = plan(step);
  std::vector<std::byte> memory(step_plan.workspace_bytes + 64);
  const auto misaligned = reinterpret_cast<std::uintptr_t>(memory.data()) % 64;
  const Workspace workspace{memory.data() + (64 - misaligned) % 64, step_plan.workspace_bytes};
  const std::int64_t row = 0;
  for (std::int64_t t = kPrefill; t < kTokens; ++t) {
    RecurrentForwardTensors token{.inputs = views(sequence, t, 1), .o = out(stepwise, t, 1)};
    token.states.initial_state = state_view;
    token.states.final_state = state_view;
    token.states.read = token.states.write = ConstTensorView(&row, DType::i64, {1});
    run(step_plan, token, workspace, serial());
  }

  double difference = 0, size = 0;
  for (std::size_t i = 0; i < whole.size(); ++i) {
    difference += std::pow(whole[i] - stepwise[i], 2);
    size += std::pow(whole[i], 2);
  }
  const double error = std::sqrt(difference / size);
  std::printf("flashqla %s, decoding with %s: prefill + decode differs from the whole by %.1e\n", kVersion,
              step_plan.implementation.c_str(), error);
  return error < 1e-5 ? 0 : 1;
}
