// State tensors, pools and the rows that are read and written in them.
#include <cstring>

#include "calls.hpp"

namespace flashqla::test {
namespace {

/// What forward and recurrent calls share: states and their indices.
template <class T>
class ValidationStates : public testing::Test {};
using Calls = testing::Types<Forward, Recurrent>;
TYPED_TEST_SUITE(ValidationStates, Calls);

/// A call of three sequences on a pool of eight slots, in place.
template <class T>
struct Pooled : T {
  Pooled()
      : T([] {
          Problem p = small_problem();
          p.batch = 3;
          return p;
        }()) {
    const TensorView pool = this->state(8);
    this->tensors.states.initial_state = pool;
    this->tensors.states.final_state = pool;
    read({1, 2, 3});
    write({1, 2, 3});
  }
  void read(const std::vector<std::int64_t>& rows) { this->tensors.states.read = this->store.indices(rows); }
  void write(const std::vector<std::int64_t>& rows) { this->tensors.states.write = this->store.indices(rows); }
  void separate() { this->tensors.states.final_state = this->state(8); }
};

TYPED_TEST(ValidationStates, WrongNumberOfInitialStates) {
  TypeParam call;
  call.tensors.states.initial_state = call.state(3);
  expect_refused<InvalidArgument>(call, {"initial_state: expected shape [N=2, Hv=4, K=16, V=8], got [3, 4, 16, 8]"});
  TypeParam packed(packed_problem(3));
  packed.offsets({0, 1, 2, 5});
  packed.tensors.states.initial_state = packed.state(2);
  expect_refused<InvalidArgument>(packed, {"initial_state: expected shape [N=3, Hv=4, K=16, V=8], got [2, 4, 16, 8]"});
}

TYPED_TEST(ValidationStates, WrongNumberOfFinalStates) {
  TypeParam call;
  call.tensors.states.final_state = call.state(1);
  expect_refused<InvalidArgument>(call, {"final_state: expected shape [N=2, Hv=4, K=16, V=8], got [1, 4, 16, 8]"});
}

TYPED_TEST(ValidationStates, LayoutDecidesTheShape) {
  Problem p = small_problem();
  p.state_layout = StateLayout::value_key;
  TypeParam call(p);
  expect_accepted(call);
  call.tensors.states.final_state = call.store.tensor(DType::f32, {2, 4, 16, 8});
  expect_refused<InvalidArgument>(call, {"final_state: expected shape [N=2, Hv=4, V=8, K=16], got [2, 4, 16, 8]"});
}

TYPED_TEST(ValidationStates, DTypes) {
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
    TypeParam call;
    call.tensors.states.initial_state = call.state(2, dtype);
    expect_accepted(call);
  }
  TypeParam call;
  call.tensors.states.initial_state = call.state(2, DType::f64);
  expect_refused<InvalidType>(call, {"initial_state: expected float32, bfloat16 or float16, got float64"});
  TypeParam dense;
  dense.tensors.states.final_state = dense.state(2, DType::bf16);
  expect_refused<InvalidType>(dense, {"final_state: expected float32, got bfloat16"});
  Problem p = small_problem();
  p.dtype = DType::f64;
  TypeParam exact(p);
  exact.tensors.states.final_state = exact.state(2, DType::f64);
  expect_accepted(exact);
}

TYPED_TEST(ValidationStates, LastDimensionNotContiguous) {
  TypeParam call;
  std::swap(call.tensors.states.final_state.strides[2], call.tensors.states.final_state.strides[3]);
  expect_refused<InvalidArgument>(call, {"final_state: expected a contiguous last dimension (stride 1), got stride 8"});
}

TYPED_TEST(ValidationStates, IndicesWithoutTheirTensors) {
  TypeParam call;
  call.tensors.states.read = call.store.template indices<std::int64_t>({0, 1});
  expect_refused<InvalidArgument>(call, {"read: expected none (it is given only with initial_state), got [2]"});
  TypeParam other;
  other.tensors.states.final_state = {};
  other.tensors.states.write = other.store.template indices<std::int64_t>({0, 1});
  expect_refused<InvalidArgument>(other, {"write: expected none (it is given only with final_state), got [2]"});
}

TYPED_TEST(ValidationStates, IndicesOfWrongSizeOrType) {
  Pooled<TypeParam> call;
  call.read({1, 2});
  expect_refused<InvalidArgument>(call, {"read: expected shape [N=3], got [2]"});
  Pooled<TypeParam> other;
  other.write({1, 2, 3, 4});
  expect_refused<InvalidArgument>(other, {"write: expected shape [N=3], got [4]"});
  Pooled<TypeParam> typed;
  typed.tensors.states.write = typed.store.tensor(DType::f32, {3});
  expect_refused<InvalidType>(typed, {"write: expected int64 or int32, got float32"});
}

TYPED_TEST(ValidationStates, C06_SlotsOutOfRange) {
  Pooled<TypeParam> call;
  call.read({1, 8, 3});
  expect_refused<InvalidArgument>(call, {"read: expected -1 or a row below 8, got 8 at [1]"});
  call.read({1, 2, -2});
  expect_refused<InvalidArgument>(call, {"read: expected -1 or a row below 8, got -2 at [2]"});
  call.read({1, 2, 3});
  call.write({INT64_MAX, 2, 3});
  expect_refused<InvalidArgument>(call, {"write: expected -1 or a row below 8, got 9223372036854775807 at [0]"});
  call.write({1, INT64_MIN, 3});
  expect_refused<InvalidArgument>(call, {"write: expected -1 or a row below 8, got -9223372036854775808 at [1]"});
  Pooled<TypeParam> narrow;
  narrow.tensors.states.write = narrow.store.template indices<std::int32_t>({1, 2, 9});
  expect_refused<InvalidArgument>(narrow, {"write: expected -1 or a row below 8, got 9 at [2]"});
}

TYPED_TEST(ValidationStates, C06_SlotWrittenTwice) {
  for (const bool in_place : {true, false}) {
    Pooled<TypeParam> call;
    if (!in_place) call.separate();
    call.read({-1, 2, -1});
    call.write({5, 2, 5});
    expect_refused<InvalidArgument>(
        call, {"write: expected every row written at most once, got row 5 for sequence 0 and for sequence 2"});
  }
}

TYPED_TEST(ValidationStates, SlotWrittenForOneSequenceAndReadForAnother) {
  Pooled<TypeParam> call;
  call.read({1, 2, 3});
  call.write({2, 4, 5});
  expect_refused<InvalidArgument>(
      call, {"write: expected no row written for one sequence and read for another, got row 2, written for sequence 0 and "
             "read for sequence 1"});
  call.separate();
  expect_accepted(call);  // different memory: nothing is read after it was written
}

TYPED_TEST(ValidationStates, LegalSlots) {
  const auto legal = [](const std::vector<std::int64_t>& read, const std::vector<std::int64_t>& write) {
    Pooled<TypeParam> call;
    call.read(read);
    call.write(write);
    expect_accepted(call);
  };
  legal({1, 2, 3}, {1, 2, 3});      // in place
  legal({1, 2, 3}, {4, 5, 6});      // moved
  legal({7, 7, 7}, {1, 2, 3});      // one prefix for all
  legal({7, 7, 7}, {1, -1, 3});     // not written
  legal({-1, -1, 3}, {-1, -1, 3});  // padding entries
  legal({-1, 2, 3}, {0, 2, 3});     // from zero
}

TYPED_TEST(ValidationStates, ReadFromAPoolWriteToADenseTensor) {
  Pooled<TypeParam> call;
  call.tensors.states.write = {};
  expect_refused<InvalidArgument>(call, {"final_state: expected shape [N=3, Hv=4, K=16, V=8], got [8, 4, 16, 8]"});
  call.tensors.states.final_state = call.state(3);
  expect_accepted(call);
}

TYPED_TEST(ValidationStates, PoolsOfAnyFloatingType) {
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
    Pooled<TypeParam> call;
    call.tensors.states.initial_state = call.tensors.states.final_state = call.state(8, dtype);
    expect_accepted(call);
  }
}

TYPED_TEST(ValidationStates, PoolWithGapsAndWithHeadsOutside) {
  Pooled<TypeParam> gaps;
  TensorView pool = gaps.store.tensor(DType::f32, {8, 6, 16, 8});
  pool.sizes[1] = 4;
  gaps.tensors.states.initial_state = gaps.tensors.states.final_state = pool;
  expect_accepted(gaps);
  Pooled<TypeParam> outside;
  pool = outside.store.tensor(DType::f32, {4, 8, 16, 8});
  std::swap(pool.sizes[0], pool.sizes[1]);
  std::swap(pool.strides[0], pool.strides[1]);
  outside.tensors.states.initial_state = outside.tensors.states.final_state = pool;
  expect_accepted(outside);
}

TYPED_TEST(ValidationStates, TwoPoolsInTheSlotsOfOneBuffer) {
  Pooled<TypeParam> call;
  TensorView both = call.store.tensor(DType::f32, {8, 8, 16, 8});
  both.sizes[1] = 4;
  call.tensors.states.initial_state = both;
  both.data = static_cast<float*>(both.data) + 4 * 16 * 8;
  call.tensors.states.final_state = both;
  expect_accepted(call);
}

TYPED_TEST(ValidationStates, PoolsThatOverlapOtherwise) {
  Pooled<TypeParam> call;
  TensorView shifted = call.tensors.states.final_state;
  shifted.data = static_cast<float*>(shifted.data) + 4 * 16 * 8;
  shifted.sizes[0] = 7;
  call.tensors.states.final_state = shifted;
  expect_refused<InvalidArgument>(call, {"final_state: expected memory apart from that of initial_state, got an overlap"});
}

TEST(ValidationAccepted, Recurrent) {
  Pooled<Recurrent> call;
  TensorView read = call.store.indices<std::int64_t>({0, 1, 2, 3, 4, 5});
  read.rank = 2;
  read.sizes = {3, 2};
  read.strides = {2, 1};
  call.tensors.states.read = read;
  expect_refused<InvalidArgument>(call, {"read: expected shape [N=3], got [3, 2]"});
  call.tensors.states.accepted = call.store.indices<std::int64_t>({1, 2, 1});
  call.write({0, 3, 4});
  expect_accepted(call);
  call.tensors.states.accepted = call.store.indices<std::int64_t>({1, 3, 1});
  expect_refused<InvalidArgument>(call, {"accepted: expected 1 to P=2, got 3 at [1]"});
  call.tensors.states.accepted = call.store.indices<std::int32_t>({0, 2, 1});
  expect_refused<InvalidArgument>(call, {"accepted: expected 1 to P=2, got 0 at [0]"});
  call.tensors.states.accepted = call.store.indices<std::int64_t>({1, 2});
  expect_refused<InvalidArgument>(call, {"accepted: expected shape [N=3], got [2]"});
  call.tensors.states.accepted = call.store.indices<std::int64_t>({1, 2, 1});
  call.read({1, 2, 3});
  expect_refused<InvalidArgument>(call, {"read: expected shape [N=3, P], got [3]"});
  call.tensors.states.read = {};
  expect_refused<InvalidArgument>(call, {"accepted: expected none (it is given only with read), got [3]"});
}

TEST(ValidationAccepted, RowsOfRejectedDraftsAreNotLookedAt) {
  Pooled<Recurrent> call;
  TensorView read = call.store.indices<std::int64_t>({0, 99, -7, 3, 4, 1 << 30});
  read.rank = 2;
  read.sizes = {3, 2};
  read.strides = {2, 1};
  call.tensors.states.read = read;
  call.write({0, 3, 4});
  call.tensors.states.accepted = call.store.indices<std::int64_t>({1, 2, 1});
  expect_accepted(call);
  call.tensors.states.accepted = call.store.indices<std::int64_t>({2, 2, 1});
  expect_refused<InvalidArgument>(call, {"read: expected -1 or a row below 8, got 99 at [0]"});
}

TEST(ValidationAccepted, NotForChunks) {
  Pooled<Forward> call;
  call.tensors.states.accepted = call.store.indices<std::int64_t>({1, 1, 1});
  expect_refused<InvalidArgument>(call, {"accepted: expected none (it is given only to recurrent_forward), got [3]"});
}

TEST(ValidationTokenStates, RowsAndTypes) {
  Recurrent call;
  call.tensors.token_states = call.state(10, DType::f16);
  expect_accepted(call);
  call.tensors.token_states = call.state(9);
  expect_refused<InvalidArgument>(call, {"token_states: expected at least B * T = 10 rows without token_rows, got 9"});
  TensorView rows = call.store.indices<std::int64_t>({0, 1, 2, 3, 4, 8, 7, 6, -1, -1});
  rows.rank = 2;
  rows.sizes = {2, 5};
  rows.strides = {5, 1};
  call.tensors.token_rows = rows;
  expect_accepted(call);
  auto* values = static_cast<std::int64_t*>(rows.data);
  values[7] = 9;
  expect_refused<InvalidArgument>(call, {"token_rows: expected -1 or a row below 9, got 9 at [7]"});
  values[7] = -3;
  expect_refused<InvalidArgument>(call, {"token_rows: expected -1 or a row below 9, got -3 at [7]"});
  values[7] = 2;
  expect_refused<InvalidArgument>(
      call, {"token_rows: expected every row written at most once, got row 2 for sequence 0 and for sequence 1"});
  call.tensors.token_states = {};
  expect_refused<InvalidArgument>(call, {"token_rows: expected none (it is given only with token_states), got [2, 5]"});
}

/// Draft verification on one pool: sequence n starts at row read[n, accepted - 1] and leaves the state after token t in row
/// read[n, t].
struct Drafts : Recurrent {
  explicit Drafts(const std::vector<std::int64_t>& rows)
      : Recurrent([] {
          Problem p = small_problem();
          p.tokens = 2;
          return p;
        }()) {
    const TensorView pool = state(8, DType::bf16);
    TensorView indices = store.indices(rows);
    indices.rank = 2;
    indices.sizes = {2, 2};
    indices.strides = {2, 1};
    tensors.states.initial_state = tensors.token_states = pool;
    tensors.states.read = tensors.token_rows = indices;
    tensors.states.accepted = store.indices<std::int64_t>({2, 1});
    tensors.states.final_state = {};
  }
};

TEST(ValidationTokenStates, DraftsInOnePool) {
  Drafts legal({3, 5, 1, 0});
  expect_accepted(legal);
  Drafts twice({3, 5, 1, 3});
  expect_refused<InvalidArgument>(
      twice, {"token_rows: expected every row written at most once, got row 3 for sequence 0 and for sequence 1"});
}

TEST(ValidationTokenStates, DraftOverARowThatAnotherSequenceReads) {
  Drafts call({3, 5, 1, 0});
  TensorView others = call.store.indices<std::int64_t>({5, 4, 6, 7});
  others.rank = 2;
  others.sizes = {2, 2};
  others.strides = {2, 1};
  call.tensors.states.read = others;
  call.tensors.states.accepted = call.store.indices<std::int64_t>({2, 1});
  expect_accepted(call);
  static_cast<std::int64_t*>(others.data)[2] = 5;
  expect_refused<InvalidArgument>(call, {"row 5, written for sequence 0 and read for sequence 1"});
}

TEST(ValidationTokenStates, FinalStateInTheSamePool) {
  Drafts call({3, 5, 1, 0});
  call.tensors.states.final_state = call.tensors.token_states;
  call.tensors.states.write = call.store.indices<std::int64_t>({7, 0});
  expect_refused<InvalidArgument>(call, {"expected every row written at most once, got row 0 twice for sequence 1"});
  call.tensors.states.write = call.store.indices<std::int64_t>({7, 6});
  expect_accepted(call);
}

}  // namespace
}  // namespace flashqla::test
