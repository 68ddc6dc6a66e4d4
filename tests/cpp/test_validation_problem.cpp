// Descriptors: what plan() refuses, and how it says so. The same checks serve explain().
#include <cmath>
#include <limits>

#include "calls.hpp"

namespace flashqla::test {
namespace {

void expect_problem_refused(const std::function<void(Problem&)>& spoil, const std::vector<std::string>& parts) {
  ChunkForward forward{.problem = small_problem()};
  ChunkBackward backward{.problem = small_problem()};
  RecurrentForward recurrent{.problem = small_problem()};
  spoil(forward.problem);
  spoil(backward.problem);
  spoil(recurrent.problem);
  expect_throw<InvalidArgument>([&] { plan(forward); }, parts);
  expect_throw<InvalidArgument>([&] { plan(backward); }, parts);
  expect_throw<InvalidArgument>([&] { plan(recurrent); }, parts);
  expect_throw<InvalidArgument>([&] { explain(forward); }, parts);
}

template <class Descriptor>
void expect_type_refused(const Descriptor& descriptor, const std::vector<std::string>& parts) {
  expect_throw<InvalidType>([&] { plan(descriptor); }, parts);
}

TEST(ValidationProblem, NegativeSizes) {
  expect_problem_refused([](Problem& p) { p.batch = -1; }, {"batch: expected at least 0, got -1"});
  expect_problem_refused([](Problem& p) { p.tokens = -7; }, {"tokens: expected at least 0, got -7"});
  expect_problem_refused([](Problem& p) { p.heads_qk = 0; }, {"heads_qk: expected at least 1, got 0"});
  expect_problem_refused([](Problem& p) { p.heads_v = 0; }, {"heads_v: expected at least 1, got 0"});
  expect_problem_refused([](Problem& p) { p.num_sequences = -2; }, {"num_sequences: expected at least -1, got -2"});
}

TEST(ValidationProblem, HeadDimensions) {
  expect_problem_refused([](Problem& p) { p.dim_k = 0; }, {"dim_k: expected 1 to 256, got 0"});
  expect_problem_refused([](Problem& p) { p.dim_k = 257; }, {"dim_k: expected 1 to 256, got 257"});
  expect_problem_refused([](Problem& p) { p.dim_v = -1; }, {"dim_v: expected 1 to 256, got -1"});
  expect_problem_refused([](Problem& p) { p.dim_v = 512; }, {"dim_v: expected 1 to 256, got 512"});
}

TEST(ValidationProblem, HeadCountsThatDoNotDivide) {
  expect_problem_refused([](Problem& p) { p.heads_v = 3; }, {"heads_v: expected a multiple of heads_qk = 2, got 3"});
  expect_problem_refused([](Problem& p) { p.heads_qk = 8; }, {"heads_v: expected a multiple of heads_qk = 8, got 4"});
}

TEST(ValidationProblem, BatchAndSequences) {
  expect_problem_refused([](Problem& p) { p.packed = true; }, {"batch: expected 1 with packed sequences (cu_seqlens), got 2"});
  expect_problem_refused([](Problem& p) { p.num_sequences = 3; },
                         {"num_sequences: expected batch = 2 without packed sequences, got 3"});
}

TEST(ValidationProblem, ScaleAndEpsilon) {
  const double nan = std::numeric_limits<double>::quiet_NaN(), infinity = std::numeric_limits<double>::infinity();
  expect_problem_refused([&](Problem& p) { p.scale = nan; }, {"scale: expected a finite number, got", "nan"});
  expect_problem_refused([&](Problem& p) { p.scale = infinity; }, {"scale: expected a finite number, got inf"});
  expect_problem_refused([&](Problem& p) { p.scale = -infinity; }, {"scale: expected a finite number, got -inf"});
  expect_problem_refused([&](Problem& p) { p.l2norm_eps = nan; }, {"l2norm_eps: expected a finite number of at least 0, got"});
  expect_problem_refused([&](Problem& p) { p.l2norm_eps = -1.0; },
                         {"l2norm_eps: expected a finite number of at least 0, got -1"});
}

TEST(ValidationProblem, ScaleZeroAndNegativeAreLegal) {
  for (const double scale : {0.0, -2.0}) {
    ChunkForward descriptor{.problem = small_problem()};
    descriptor.problem.scale = scale;
    EXPECT_EQ(*plan(descriptor).descriptor.problem.scale, scale);
  }
  EXPECT_DOUBLE_EQ(*plan(ChunkForward{.problem = small_problem()}).descriptor.problem.scale, 0.25);
}

TEST(ValidationProblem, DTypesAndEnumerators) {
  ChunkForward descriptor{.problem = small_problem()};
  descriptor.problem.dtype = DType::i32;
  expect_type_refused(descriptor, {"dtype: expected float32, bfloat16, float16 or float64, got int32"});
  descriptor.problem.dtype = static_cast<DType>(77);
  expect_type_refused(descriptor, {"dtype: expected", "got unknown dtype"});
  descriptor.problem = small_problem();
  descriptor.problem.gate = static_cast<Gate>(9);
  expect_type_refused(descriptor, {"gate: expected one of its 4 values, got 9"});
  descriptor.problem = small_problem();
  descriptor.problem.beta = static_cast<Beta>(4);
  expect_type_refused(descriptor, {"beta: expected one of its 4 values, got 4"});
  descriptor.problem = small_problem();
  descriptor.problem.state_layout = static_cast<StateLayout>(2);
  expect_type_refused(descriptor, {"state_layout: expected one of its 2 values, got 2"});
  descriptor.problem = small_problem();
  descriptor.problem.device.type = static_cast<DeviceType>(2);
  expect_type_refused(descriptor, {"device: expected one of its 2 values, got 2"});
  descriptor.problem = small_problem();
  descriptor.stored_states = static_cast<StoredStates>(3);
  expect_type_refused(descriptor, {"stored_states: expected one of its 3 values, got 3"});
}

TEST(ValidationProblem, CumulativeGateIsForTheBackwardAlone) {
  ChunkForward forward{.problem = small_problem()};
  RecurrentForward recurrent{.problem = small_problem()};
  ChunkBackward backward{.problem = small_problem()};
  forward.problem.gate = recurrent.problem.gate = backward.problem.gate = Gate::cumulative;
  expect_type_refused(forward, {"gate: expected none, log_decay or computed", "got cumulative"});
  expect_type_refused(recurrent, {"gate: expected none, log_decay or computed", "got cumulative"});
  EXPECT_NO_THROW(plan(backward));
}

TEST(ValidationProblem, StatesEvery) {
  ChunkForward descriptor{.problem = small_problem(), .stored_states = StoredStates::every};
  for (const std::int64_t n : {0, -64, 1, 63, 65, 100}) {
    descriptor.states_every = n;
    expect_throw<InvalidArgument>([&] { plan(descriptor); },
                                  {"states_every: expected a positive multiple of 64, got " + std::to_string(n)});
  }
  for (const std::int64_t n : {64, 128, 640}) {
    descriptor.states_every = n;
    EXPECT_NO_THROW(plan(descriptor));
  }
  descriptor.stored_states = StoredStates::before_chunks;
  expect_throw<InvalidArgument>([&] { plan(descriptor); }, {"states_every: expected 0 without StoredStates::every, got 640"});
}

TEST(ValidationProblem, MaxSequenceTokens) {
  ChunkBackward descriptor{.problem = small_problem(), .max_sequence_tokens = 4};
  expect_throw<InvalidArgument>([&] { plan(descriptor); },
                                {"max_sequence_tokens: expected at least tokens = 5 without packed sequences, got 4"});
  descriptor.max_sequence_tokens = -2;
  expect_throw<InvalidArgument>([&] { plan(descriptor); }, {"max_sequence_tokens: expected at least -1, got -2"});
  descriptor.max_sequence_tokens = 1000;
  EXPECT_EQ(plan(descriptor).descriptor.max_sequence_tokens, 5);
}

TEST(ValidationProblem, Threads) {
  expect_throw<InvalidArgument>([] { plan(ChunkForward{.problem = small_problem()}, 0); },
                                {"threads: expected 1 to 1024, got 0"});
  expect_throw<InvalidArgument>([] { plan(ChunkForward{.problem = small_problem()}, 1025); },
                                {"threads: expected 1 to 1024, got 1025"});
}

TEST(ValidationProblem, SizesThatOverflow) {
  const std::int64_t huge = std::int64_t{1} << 40;
  const auto spoil_tokens = [&](Problem& p) { p.batch = huge, p.tokens = huge; };
  expect_problem_refused(spoil_tokens, {"batch * tokens * heads_v * dim: expected a size in bytes below 2^63", "1099511627776"});
  expect_problem_refused([&](Problem& p) { p.tokens = INT64_MAX; },
                         {"expected a size in bytes below 2^63", "9223372036854775807"});
  expect_problem_refused([&](Problem& p) { p.batch = 1, p.packed = true, p.num_sequences = INT64_MAX / 4; },
                         {"num_sequences * heads_v * dim_k * dim_v", "below 2^63"});
  expect_problem_refused([&](Problem& p) { p.batch = 0, p.tokens = std::int64_t{1} << 57; }, {"below 2^63"});
  expect_problem_refused([&](Problem& p) { p.heads_v = INT64_MAX - 1; }, {"below 2^63"});
}

TEST(ValidationProblem, MoreElementsThan2To31AreLegal) {
  Problem p = small_problem();
  p.batch = 1, p.tokens = std::int64_t{1} << 24, p.heads_v = p.heads_qk = 64, p.dim_k = p.dim_v = 128;
  EXPECT_NO_THROW(plan(ChunkForward{.problem = p}));
  EXPECT_NO_THROW(plan(ChunkBackward{.problem = p}));
  EXPECT_NO_THROW(plan(RecurrentForward{.problem = p}));
}

TEST(ValidationProblem, CudaIsUnsupportedWithReasons) {
  ChunkForward descriptor{.problem = small_problem()};
  descriptor.problem.device = {DeviceType::cuda, 0};
  expect_throw<Unsupported>([&] { plan(descriptor); },
                            {"chunk_forward: no implementation takes this problem", "reference: computes on the CPU only"});
}

TEST(ValidationProblem, APlanForTheCpuTakesNoStream) {
  Forward call;
  const Plan<ChunkForward> made = plan(call.descriptor);
  expect_throw<InvalidArgument>([&] { run(made, call.tensors, {}, Stream{}); },
                                {"plan: expected one for a CUDA device, with a Stream", "got one for the CPU"});
  expect_throw<InvalidArgument>([&] { run(Plan<ChunkForward>{}, call.tensors, {}, Stream{}); },
                                {"plan: expected one that plan() made"});
}

TEST(ValidationProblem, NumberOfStoredStates) {
  Store store;
  ChunkForward descriptor{.problem = packed_problem(4), .stored_states = StoredStates::before_chunks};
  descriptor.problem.tokens = 400;
  const ConstTensorView offsets = store.indices<std::int64_t>({0, 64, 64, 193, 400});
  EXPECT_EQ(num_stored_states(descriptor, offsets, {}), 1 + 0 + 3 + 4);
  descriptor.stored_states = StoredStates::every;
  descriptor.states_every = 64;
  EXPECT_EQ(num_stored_states(descriptor, offsets, {}), 1 + 0 + 2 + 3);
  const ConstTensorView prefixes = store.indices<std::int32_t>({63, 10, 65, 0});
  EXPECT_EQ(num_stored_states(descriptor, offsets, prefixes), 1 + 0 + 2 + 3);
  descriptor.states_every = 128;
  EXPECT_EQ(num_stored_states(descriptor, offsets, prefixes), 0 + 0 + 1 + 1);
  descriptor.stored_states = StoredStates::none;
  descriptor.states_every = 0;
  EXPECT_EQ(num_stored_states(descriptor, offsets, {}), 0);
  expect_throw<InvalidArgument>([&] { num_stored_states(descriptor, {}, {}); }, {"cu_seqlens: expected shape [N+1=5], got none"});
}

}  // namespace
}  // namespace flashqla::test
