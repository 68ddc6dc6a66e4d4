// Tensors that every operation reads or writes: shape, dtype, strides, offsets. Each refusal names the argument, what was
// expected and what came, and comes before anything is written (expect_refused compares all memory).
#include "calls.hpp"

namespace flashqla::test {
namespace {

template <class T>
class ValidationInputs : public testing::Test {};
using Calls = testing::Types<Forward, Recurrent, Backward>;
TYPED_TEST_SUITE(ValidationInputs, Calls);

TYPED_TEST(ValidationInputs, TheCallsAreValid) {
  TypeParam dense;
  expect_accepted(dense);
  TypeParam packed(packed_problem(3));
  packed.offsets({0, 2, 2, 5});
  expect_accepted(packed);
  Problem p = small_problem();
  p.gate = Gate::computed;
  TypeParam computed(p);
  expect_accepted(computed);
  p.gate = Gate::none;
  p.beta = Beta::one;
  TypeParam bare(p);
  expect_accepted(bare);
}

TYPED_TEST(ValidationInputs, WrongRank) {
  TypeParam call;
  call.tensors.inputs.q = call.store.tensor(DType::f32, {10, 2, 16});
  expect_refused<InvalidArgument>(call, {"q: expected shape [B=2, T=5, Hq=2, K=16], got [10, 2, 16]"});
  TypeParam other;
  other.tensors.inputs.g = other.store.tensor(DType::f32, {2, 5, 4, 1});
  expect_refused<InvalidArgument>(other, {"g: expected shape [B=2, T=5, Hv=4], got [2, 5, 4, 1]"});
}

TYPED_TEST(ValidationInputs, RankOutOfRange) {
  TypeParam call;
  call.tensors.inputs.q.rank = 9;
  expect_refused<InvalidArgument>(call, {"q: expected shape", "got 9 dimensions"});
  call.tensors.inputs.q.rank = -1;
  expect_refused<InvalidArgument>(call, {"q: expected shape", "got none"});
}

TYPED_TEST(ValidationInputs, WrongSize) {
  TypeParam call;
  call.tensors.inputs.v = call.store.tensor(DType::f32, {2, 6, 4, 8});
  expect_refused<InvalidArgument>(call, {"v: expected shape [B=2, T=5, Hv=4, V=8], got [2, 6, 4, 8]"});
  TypeParam batch;
  batch.tensors.inputs.beta = batch.store.tensor(DType::f32, {1, 5, 4});
  expect_refused<InvalidArgument>(batch, {"beta: expected shape [B=2, T=5, Hv=4], got [1, 5, 4]"});
}

TYPED_TEST(ValidationInputs, QAndKHeadsThatDiffer) {
  TypeParam call;
  call.tensors.inputs.k = call.store.tensor(DType::f32, {2, 5, 1, 16});
  expect_refused<InvalidArgument>(call, {"k: expected shape [B=2, T=5, Hq=2, K=16], got [2, 5, 1, 16]"});
}

TYPED_TEST(ValidationInputs, MixedDTypes) {
  TypeParam call;
  call.tensors.inputs.k = call.store.tensor(DType::bf16, {2, 5, 2, 16});
  expect_refused<InvalidType>(call, {"k: expected float32, got bfloat16"});
  TypeParam other;
  other.tensors.inputs.v = other.store.tensor(DType::f16, {2, 5, 4, 8});
  expect_refused<InvalidType>(other, {"v: expected float32, got float16"});
}

TYPED_TEST(ValidationInputs, SmallTensorsOfAnyFloatingType) {
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
    TypeParam call;
    call.tensors.inputs.g = call.store.tensor(dtype, {2, 5, 4});
    expect_accepted(call);
  }
  TypeParam call;
  call.tensors.inputs.g = call.store.tensor(DType::f64, {2, 5, 4});
  expect_refused<InvalidType>(call, {"g: expected float32, bfloat16 or float16, got float64"});
  TypeParam integer;
  integer.tensors.inputs.beta = integer.store.tensor(DType::i64, {2, 5, 4});
  expect_refused<InvalidType>(integer, {"beta: expected float32, bfloat16 or float16, got int64"});
}

TYPED_TEST(ValidationInputs, MissingTensors) {
  const auto missing = [](ConstTensorView InputTensors::* member, const std::string& message) {
    Problem p = small_problem();
    p.gate = Gate::computed;
    TypeParam call(p);
    call.tensors.inputs.*member = {};
    expect_refused<InvalidArgument>(call, {message});
  };
  missing(&InputTensors::q, "q: expected shape [B=2, T=5, Hq=2, K=16], got none");
  missing(&InputTensors::k, "k: expected shape");
  missing(&InputTensors::v, "v: expected shape");
  missing(&InputTensors::g, "g: expected shape [B=2, T=5, Hv=4], got none");
  missing(&InputTensors::beta, "beta: expected shape [B=2, T=5, Hv=4], got none");
  missing(&InputTensors::a_log, "a_log: expected shape [Hv=4], got none");
}

TYPED_TEST(ValidationInputs, DtBiasMayBeAbsent) {
  Problem p = small_problem();
  p.gate = Gate::computed;
  TypeParam call(p);
  call.tensors.inputs.dt_bias = {};
  if constexpr (std::is_same_v<TypeParam, Backward>) {
    expect_refused<InvalidArgument>(call, {"d_dt_bias: expected none (it is given only with dt_bias), got [4]"});
    call.tensors.d_dt_bias = {};
  }
  expect_accepted(call);
}

TYPED_TEST(ValidationInputs, TensorsWithoutTheirOption) {
  const auto unwanted = [](ConstTensorView InputTensors::* member, Gate gate, Beta beta,
                           const std::vector<std::string>& message) {
    Problem p = small_problem();
    p.gate = gate;
    p.beta = beta;
    TypeParam call(p);
    call.tensors.inputs.*member = call.store.tensor(DType::f32, {4});
    expect_refused<InvalidArgument>(call, message);
  };
  unwanted(&InputTensors::a_log, Gate::log_decay, Beta::given,
           {"a_log: expected none (it is given only with Gate::computed), got [4]"});
  unwanted(&InputTensors::dt_bias, Gate::log_decay, Beta::given,
           {"dt_bias: expected none (it is given only with Gate::computed), got [4]"});
  unwanted(&InputTensors::g, Gate::none, Beta::given,
           {"g: expected none (it is given only with a Gate other than none), got [4]"});
  unwanted(&InputTensors::beta, Gate::log_decay, Beta::one,
           {"beta: expected none (it is given only with a Beta other than one), got [4]"});
  unwanted(&InputTensors::cu_seqlens, Gate::log_decay, Beta::given,
           {"cu_seqlens: expected none (it is given only with packed sequences), got [4]"});
}

TYPED_TEST(ValidationInputs, LastDimensionNotContiguous) {
  TypeParam call;
  call.tensors.inputs.q = call.store.tensor(DType::f32, {2, 5, 2, 32});
  call.tensors.inputs.q.sizes[3] = 16;
  call.tensors.inputs.q.strides[3] = 2;
  expect_refused<InvalidArgument>(call, {"q: expected a contiguous last dimension (stride 1), got stride 2"});
}

TYPED_TEST(ValidationInputs, AnyStrideOfALastDimensionOfOne) {
  Problem p = small_problem();
  p.dim_k = 1;
  TypeParam call(p);
  call.tensors.inputs.q.strides[3] = 77;
  expect_accepted(call);
}

TYPED_TEST(ValidationInputs, FreeStrides) {
  TypeParam call;
  call.tensors.inputs.k.strides[2] = 0;                                                         // one key head for both
  call.tensors.inputs.g.strides = {};                                                           // one decay for all
  call.tensors.inputs.v.data = static_cast<const float*>(call.tensors.inputs.v.data) + 4 * 32;  // tokens backwards
  call.tensors.inputs.v.strides[1] = -32;
  expect_accepted(call);
}

TYPED_TEST(ValidationInputs, StridesThatOverflow) {
  TypeParam call;
  call.tensors.inputs.q.strides[0] = INT64_MAX;
  expect_refused<InvalidArgument>(
      call, {"q: expected strides that stay inside the address space, got strides [9223372036854775807, 32, 16, 1]"});
  call.tensors.inputs.q.strides[0] = INT64_MIN;
  expect_refused<InvalidArgument>(call, {"q: expected strides that stay inside the address space"});
  call.tensors.inputs.q.strides[0] = -(std::int64_t{1} << 55);
  expect_refused<InvalidArgument>(call, {"q: expected strides that stay inside the address space"});
}

TYPED_TEST(ValidationInputs, NullAndMisalignedMemory) {
  TypeParam call;
  const void* data = call.tensors.inputs.v.data;
  call.tensors.inputs.v.data = nullptr;
  expect_refused<InvalidArgument>(call, {"v: expected memory for its [2, 5, 4, 8] elements, got a null pointer"});
  call.tensors.inputs.v.data = static_cast<const std::byte*>(data) + 2;
  expect_refused<InvalidArgument>(call, {"v: expected an address that is a multiple of 4, got one that is not"});
}

TYPED_TEST(ValidationInputs, Workspace) {
  TypeParam call;
  auto made = plan(call.descriptor, 2);
  made.workspace_bytes = 128;  // as if the implementation had asked for it
  alignas(64) std::byte memory[192];
  const auto attempt = [&](Workspace workspace, Parallel parallel) { run(made, call.tensors, workspace, parallel); };
  expect_throw<InvalidArgument>([&] { attempt({memory, 127}, serial()); }, {"workspace: expected 128 bytes, got 127"});
  expect_throw<InvalidArgument>([&] { attempt({nullptr, 128}, serial()); }, {"workspace: expected memory, got a null pointer"});
  expect_throw<InvalidArgument>([&] { attempt({memory + 32, 128}, serial()); },
                                {"workspace: expected an address that is a multiple of 64"});
  Parallel none = serial();
  none.threads = 0;
  expect_throw<InvalidArgument>([&] { attempt({memory, 128}, none); }, {"parallel.threads: expected at least 1, got 0"});
  made.chosen = nullptr;
  expect_throw<InvalidArgument>([&] { attempt({memory, 128}, serial()); },
                                {"plan: expected one that plan() made, got an empty one"});
}

TYPED_TEST(ValidationInputs, C06_Offsets) {
  const auto with = [](const std::vector<std::int64_t>& offsets, const std::string& message) {
    TypeParam wide(packed_problem(static_cast<std::int64_t>(offsets.size()) - 1));
    wide.offsets(offsets);
    TypeParam narrow(packed_problem(static_cast<std::int64_t>(offsets.size()) - 1));
    narrow.tensors.inputs.cu_seqlens = narrow.store.template indices<std::int32_t>({offsets.begin(), offsets.end()});
    if (message.empty()) {
      expect_accepted(wide);
      expect_accepted(narrow);
    } else {
      expect_refused<InvalidArgument>(wide, {message});
      expect_refused<InvalidArgument>(narrow, {message});
    }
  };
  with({1, 5}, "cu_seqlens: expected a first offset of 0, got 1");
  with({-1, 5}, "cu_seqlens: expected a first offset of 0, got -1");
  with({0, 4, 2}, "cu_seqlens: expected offsets that never decrease, got 2 at [2] after 4");
  with({0, -1}, "cu_seqlens: expected offsets that never decrease, got -1 at [1] after 0");
  with({0, 100}, "cu_seqlens: expected a last offset of at most T=5, got 100");
  with({0, 4, 100, 5}, "cu_seqlens: expected offsets that never decrease, got 5 at [3] after 100");
  with({0}, "");              // no sequence at all
  with({0, 0}, "");           // one without tokens
  with({0, 1, 3, 3, 3}, "");  // repeated last offsets, rows past the last
  with({0, 5}, "");
}

TYPED_TEST(ValidationInputs, C06_SizeAndTypeOfOffsets) {
  TypeParam call(packed_problem(2));
  call.offsets({0, 5});
  expect_refused<InvalidArgument>(call, {"cu_seqlens: expected shape [N+1=3], got [2]"});
  call.tensors.inputs.cu_seqlens = {};
  expect_refused<InvalidArgument>(call, {"cu_seqlens: expected shape [N+1=3], got none"});
  call.tensors.inputs.cu_seqlens = call.store.tensor(DType::f32, {3});
  expect_refused<InvalidType>(call, {"cu_seqlens: expected int64 or int32, got float32"});
}

TYPED_TEST(ValidationInputs, C06_NothingToDo) {
  for (const auto& [batch, tokens] : {std::pair{0, 5}, {2, 0}, {0, 0}}) {
    Problem p = small_problem();
    p.batch = batch;
    p.tokens = tokens;
    TypeParam call(p);
    expect_accepted(call);
  }
  Problem p = packed_problem(0);
  p.tokens = 0;
  TypeParam call(p);
  call.offsets({0});
  expect_accepted(call);
}

TYPED_TEST(ValidationInputs, DoubleProblemsTakeDoubleSmallTensors) {
  Problem p = small_problem();
  p.dtype = DType::f64;
  TypeParam call(p);
  call.tensors.inputs.g = call.store.tensor(DType::f64, {2, 5, 4});
  expect_accepted(call);
  call.tensors.inputs.k = call.store.tensor(DType::f32, {2, 5, 2, 16});
  expect_refused<InvalidType>(call, {"k: expected float64, got float32"});
}

TYPED_TEST(ValidationInputs, GrowthIsLegal) {
  TypeParam call;
  static_cast<float*>(const_cast<void*>(call.tensors.inputs.g.data))[3] = 0.5f;
  expect_accepted(call);
}

TYPED_TEST(ValidationInputs, CheckWithoutMemory) {
  TypeParam call;
  const auto made = plan(call.descriptor);
  EXPECT_NO_THROW(check(made, call.tensors));
  call.tensors.inputs.q.data = nullptr;
  EXPECT_NO_THROW(check(made, call.tensors));
  call.tensors.inputs.q.strides[3] = 2;
  expect_throw<InvalidArgument>([&] { check(made, call.tensors); },
                                {"q: expected a contiguous last dimension (stride 1), got stride 2"});
  call.tensors.inputs.q.strides[3] = 1;
  call.tensors.inputs.q.sizes[1] = 4;
  expect_throw<InvalidArgument>([&] { check(made, call.tensors); },
                                {"q: expected shape [B=2, T=5, Hq=2, K=16], got [2, 4, 2, 16]"});
}

TYPED_TEST(ValidationInputs, CheckLooksAtContentsOnlyWhenAllIsThere) {
  TypeParam call(packed_problem(1));
  call.offsets({0, 6});
  const auto made = plan(call.descriptor);
  expect_throw<InvalidArgument>([&] { check(made, call.tensors); }, {"cu_seqlens: expected a last offset of at most T=5, got 6"});
  call.tensors.inputs.q.data = nullptr;
  EXPECT_NO_THROW(check(made, call.tensors));
}

}  // namespace
}  // namespace flashqla::test
