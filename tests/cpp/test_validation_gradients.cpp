// Tensors of chunk_backward alone.
#include "calls.hpp"

namespace flashqla::test {
namespace {

TEST(ValidationGradients, ShapesAndTypes) {
  Backward call;
  call.tensors.d_q = call.store.tensor(DType::f32, {2, 5, 4, 16});
  expect_refused<InvalidArgument>(call, {"d_q: expected shape [B=2, T=5, Hq=2, K=16], got [2, 5, 4, 16]"});
  Backward typed;
  typed.tensors.d_v = typed.store.tensor(DType::bf16, {2, 5, 4, 8});
  expect_refused<InvalidType>(typed, {"d_v: expected float32, got bfloat16"});
  Backward d_o;
  d_o.tensors.d_o = d_o.store.tensor(DType::f32, {2, 5, 4, 16});
  expect_refused<InvalidArgument>(d_o, {"d_o: expected shape [B=2, T=5, Hv=4, V=8], got [2, 5, 4, 16]"});
  Backward state;
  state.tensors.d_final_state = state.state(3);
  expect_refused<InvalidArgument>(state, {"d_final_state: expected shape [N=2, Hv=4, K=16, V=8], got [3, 4, 16, 8]"});
  Backward initial;
  initial.tensors.d_initial_state = initial.state(1);
  expect_refused<InvalidArgument>(initial, {"d_initial_state: expected shape [N=2, Hv=4, K=16, V=8], got [1, 4, 16, 8]"});
}

TEST(ValidationGradients, Saved) {
  Backward call;
  const std::int64_t elements = 16 + 2 * 5 * 4 * 32;  // no sequence has a second segment
  call.tensors.saved = call.store.tensor(DType::f32, {elements});
  expect_accepted(call);
  call.tensors.saved = call.store.tensor(DType::f32, {elements + 1});
  expect_refused<InvalidArgument>(call, {"saved: expected shape [saved_elements()=1296], got [1297]"});
  call.tensors.saved = call.store.tensor(DType::bf16, {elements});
  expect_refused<InvalidType>(call, {"saved: expected float32, got bfloat16"});
}

TEST(ValidationGradients, InTheirInputsTypeOrFloat32) {
  for (const DType dtype : {DType::bf16, DType::f16}) {
    Problem p = small_problem();
    p.dtype = dtype;
    Backward call(p);
    expect_accepted(call);
    call.tensors.d_q = call.store.tensor(DType::f32, {2, 5, 2, 16});
    call.tensors.inputs.g = call.store.tensor(dtype, {2, 5, 4});
    call.tensors.d_g = call.store.tensor(dtype, {2, 5, 4});
    expect_accepted(call);
    call.tensors.d_beta = call.store.tensor(dtype, {2, 5, 4});
    expect_refused<InvalidType>(call, {"d_beta: expected float32, got", "16"});
  }
}

TEST(ValidationGradients, AnySubset) {
  const auto without = [](auto remove) {
    Problem p = small_problem();
    p.gate = Gate::computed;
    Backward call(p);
    remove(call.tensors);
    expect_accepted(call);
  };
  without([](ChunkBackwardTensors& t) { t.d_q = {}; });
  without([](ChunkBackwardTensors& t) { t.d_k = t.d_v = {}; });
  without([](ChunkBackwardTensors& t) { t.d_g = t.d_beta = {}; });
  without([](ChunkBackwardTensors& t) { t.d_a_log = t.d_dt_bias = {}; });
  without([](ChunkBackwardTensors& t) { t.d_o = {}; });
  without([](ChunkBackwardTensors& t) { t.d_final_state = t.initial_state = {}; });
  without([](ChunkBackwardTensors& t) { t.d_initial_state = {}; });
}

TEST(ValidationGradients, OfWhatIsAbsent) {
  const auto unwanted = [](Gate gate, Beta beta, TensorView ChunkBackwardTensors::* member, const std::string& message) {
    Problem p = small_problem();
    p.gate = gate;
    p.beta = beta;
    Backward call(p);
    call.tensors.*member = call.store.tensor(DType::f32, {4});
    expect_refused<InvalidArgument>(call, {message});
  };
  unwanted(Gate::none, Beta::given, &ChunkBackwardTensors::d_g,
           "d_g: expected none (it is given only with a Gate other than none)");
  unwanted(Gate::log_decay, Beta::one, &ChunkBackwardTensors::d_beta,
           "d_beta: expected none (it is given only with a Beta other than one)");
  unwanted(Gate::log_decay, Beta::given, &ChunkBackwardTensors::d_a_log, "d_a_log: expected none (it is given only with a_log)");
  unwanted(Gate::log_decay, Beta::given, &ChunkBackwardTensors::d_dt_bias,
           "d_dt_bias: expected none (it is given only with dt_bias)");
}

TEST(ValidationGradients, ZeroStrideGradientsOfTheOutputs) {
  Backward call;
  call.tensors.d_o = call.store.tensor(DType::f32, {8});
  call.tensors.d_o.rank = 4;
  call.tensors.d_o.sizes = {2, 5, 4, 8};
  call.tensors.d_o.strides = {0, 0, 0, 1};
  expect_accepted(call);
}

TEST(ValidationGradients, CumulativeGate) {
  Problem p = small_problem();
  p.gate = Gate::cumulative;
  Backward call(p);
  expect_accepted(call);
  call.tensors.inputs.g = call.store.tensor(DType::bf16, {2, 5, 4});
  expect_refused<InvalidType>(call, {"g: expected float32, got bfloat16"});
}

TEST(ValidationGradients, LongestSequence) {
  Problem p = packed_problem(2);
  Backward call(p);
  call.descriptor.max_sequence_tokens = 3;
  call.offsets({0, 3, 5});
  expect_accepted(call);
  call.offsets({0, 1, 5});
  expect_refused<InvalidArgument>(
      call, {"cu_seqlens: expected sequences of at most max_sequence_tokens = 3 tokens, got 4 for sequence 1"});
}

TEST(ValidationGradients, OutputsAreApart) {
  Backward call;
  call.tensors.d_k.data = call.tensors.d_q.data;
  expect_refused<InvalidArgument>(call, {"d_k: expected memory apart from that of d_q, got an overlap"});
  Backward over_input;
  over_input.tensors.d_v.data = const_cast<void*>(over_input.tensors.inputs.v.data);
  expect_refused<InvalidArgument>(over_input, {"d_v: expected memory apart from that of v, got an overlap"});
  Backward state;
  state.tensors.d_initial_state.data = const_cast<void*>(state.tensors.d_final_state.data);
  expect_refused<InvalidArgument>(state, {"d_initial_state: expected memory apart from that of d_final_state, got an overlap"});
}

}  // namespace
}  // namespace flashqla::test
