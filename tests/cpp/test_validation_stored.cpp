// What run() says about the by-products of chunk_forward: stored states, cumulative gates, A.

#include "calls.hpp"

namespace flashqla::test {
namespace {

struct Stored : Forward {
  Stored()
      : Forward([] {
          Problem p = packed_problem(3);
          p.tokens = 300;
          return p;
        }()) {
    offsets({0, 130, 130, 300});
    descriptor.stored_states = StoredStates::every;
    descriptor.states_every = 64;
    tensors.stored = state(4, DType::bf16);  // 2 + 0 + 2
  }
};

TEST(ValidationStored, Rows) {
  Stored call;
  expect_accepted(call);
  call.tensors.stored = call.state(3);
  expect_refused<InvalidArgument>(call, {"stored: expected at least 4 rows, got 3"});
  call.tensors.stored_rows = call.store.indices<std::int64_t>({2, -1, 0});
  expect_refused<InvalidArgument>(call, {"stored_rows: expected one entry for each of 4 stored states, got [3]"});
  call.tensors.stored_rows = call.store.indices<std::int64_t>({2, -1, 0, 1});
  expect_accepted(call);
  call.tensors.stored_rows = call.store.indices<std::int64_t>({2, 3, 0, 1});
  expect_refused<InvalidArgument>(call, {"stored_rows: expected -1 or a row below 3, got 3 at [1]"});
  call.tensors.stored_rows = call.store.indices<std::int64_t>({2, -1, 1, 2});
  expect_refused<InvalidArgument>(
      call, {"stored_rows: expected every row written at most once, got row 2 for sequence 0 and for sequence 2"});
}

TEST(ValidationStored, BeforeChunks) {
  Stored call;
  call.descriptor.stored_states = StoredStates::before_chunks;
  call.descriptor.states_every = 0;
  expect_refused<InvalidArgument>(call, {"stored: expected at least 6 rows, got 4"});
  call.tensors.stored = call.state(6);
  expect_accepted(call);
  call.tensors.stored_rows = call.store.indices<std::int64_t>({0, 1, 2, 3, 4, 5});
  expect_refused<InvalidArgument>(call, {"stored_rows: expected none (it is given only with StoredStates::every), got [6]"});
}

TEST(ValidationStored, Prefixes) {
  Stored call;
  call.tensors.prefix_lengths = call.store.indices<std::int64_t>({62, 1000, 0});
  call.tensors.stored = call.state(5);
  expect_accepted(call);  // (62 + 130) / 64 = 3 and 2
  call.tensors.prefix_lengths = call.store.indices<std::int64_t>({62, -1, 0});
  expect_refused<InvalidArgument>(call, {"prefix_lengths: expected 0 to 2^62, got -1 at [1]"});
  call.tensors.prefix_lengths = call.store.indices<std::int64_t>({62, 0, INT64_MAX});
  expect_refused<InvalidArgument>(call, {"prefix_lengths: expected 0 to 2^62, got 9223372036854775807 at [2]"});
  call.tensors.prefix_lengths = call.store.indices<std::int64_t>({62, 0});
  expect_refused<InvalidArgument>(call, {"prefix_lengths: expected shape [N=3], got [2]"});
}

TEST(ValidationStored, WithoutOption) {
  Forward call;
  call.tensors.stored = call.state(4);
  expect_refused<InvalidArgument>(
      call, {"stored: expected none (it is given only with StoredStates other than none), got [4, 4, 16, 8]"});
  Stored missing;
  missing.tensors.stored = {};
  expect_refused<InvalidArgument>(missing, {"stored: expected shape [rows, Hv=4, K=16, V=8], got none"});
}

TEST(ValidationStored, InThePoolOfTheStates) {
  Stored call;
  const TensorView pool = call.state(9, DType::bf16);
  call.tensors.states.initial_state = call.tensors.states.final_state = call.tensors.stored = pool;
  call.tensors.states.read = call.store.indices<std::int64_t>({0, 1, 2});
  call.tensors.states.write = call.store.indices<std::int64_t>({0, 1, 3});
  call.tensors.stored_rows = call.store.indices<std::int64_t>({4, 5, 6, 2});  // the last over the row that sequence 2 starts from
  expect_accepted(call);
  call.tensors.stored_rows = call.store.indices<std::int64_t>({4, 1, 6, 2});
  expect_refused<InvalidArgument>(call, {"expected every row written at most once, got row 1 for sequence 0 and for sequence 1"});
  call.tensors.stored_rows = call.store.indices<std::int64_t>({4, 2, 6, -1});
  expect_refused<InvalidArgument>(call, {"row 2, written for sequence 0 and read for sequence 2"});
}

TEST(ValidationExtras, CumulativeGateAndA) {
  Forward call;
  call.tensors.g_cumulative = call.store.tensor(DType::f32, {2, 5, 4});
  call.tensors.a = call.store.tensor(DType::f32, {2, 5, 4, 64});
  expect_accepted(call);
  call.tensors.g_cumulative = call.store.tensor(DType::bf16, {2, 5, 4});
  expect_refused<InvalidType>(call, {"g_cumulative: expected float32, got bfloat16"});
  call.tensors.g_cumulative = {};
  call.tensors.a = call.store.tensor(DType::f32, {2, 5, 4, 32});
  expect_refused<InvalidArgument>(call, {"a: expected shape [B=2, T=5, Hv=4, chunk=64], got [2, 5, 4, 32]"});
  call.tensors.a = {};
  call.tensors.o = {};
  expect_refused<InvalidArgument>(call, {"o: expected shape [B=2, T=5, Hv=4, V=8], got none"});
}

}  // namespace
}  // namespace flashqla::test
