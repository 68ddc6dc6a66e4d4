// Small valid calls of the three operations, to be spoilt one argument at a time, and the question whether a call is refused as
// it should be.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <initializer_list>
#include <memory>
#include <string>
#include <vector>

#include "flashqla/flashqla.hpp"

namespace flashqla::test {

/// Owns the memory of a call's tensors. Everything starts as 0.25 in floating types and 0 in integer types.
class Store {
 public:
  TensorView tensor(DType dtype, std::initializer_list<std::int64_t> sizes) {
    TensorView view(nullptr, dtype, sizes);
    std::int64_t count = 1;
    for (const std::int64_t size : sizes) count *= size;
    view.data = allocate(dtype, count);
    return view;
  }

  template <class Index = std::int64_t>
  TensorView indices(const std::vector<Index>& values) {
    const DType dtype = sizeof(Index) == 8 ? DType::i64 : DType::i32;
    TensorView view = tensor(dtype, {static_cast<std::int64_t>(values.size())});
    if (!values.empty()) std::memcpy(view.data, values.data(), values.size() * sizeof(Index));
    return view;
  }

  std::vector<std::vector<std::uint64_t>> contents() const {
    std::vector<std::vector<std::uint64_t>> copy;
    for (const auto& block : blocks_) copy.push_back(*block);
    return copy;
  }

 private:
  void* allocate(DType dtype, std::int64_t count) {
    const auto words = static_cast<std::size_t>(count * element_bytes(dtype) / 8 + 1);
    blocks_.push_back(std::make_unique<std::vector<std::uint64_t>>(words));
    void* data = blocks_.back()->data();
    for (std::int64_t i = 0; i < count; ++i) {
      if (dtype == DType::f64) static_cast<double*>(data)[i] = 0.25;
      if (dtype == DType::f32) static_cast<float*>(data)[i] = 0.25f;
      if (dtype == DType::bf16) static_cast<std::uint16_t*>(data)[i] = 0x3e80;
      if (dtype == DType::f16) static_cast<std::uint16_t*>(data)[i] = 0x3400;
    }
    return data;
  }

  std::vector<std::unique_ptr<std::vector<std::uint64_t>>> blocks_;
};

inline Problem small_problem() {
  Problem p;
  p.batch = 2;
  p.tokens = 5;
  p.heads_qk = 2;
  p.heads_v = 4;
  p.dim_k = 16;
  p.dim_v = 8;
  return p;
}

inline Problem packed_problem(std::int64_t sequences) {
  Problem p = small_problem();
  p.batch = 1;
  p.packed = true;
  p.num_sequences = sequences;
  return p;
}

inline InputTensors make_inputs(Store& store, const Problem& p, DType small = DType::f32) {
  InputTensors t;
  t.q = store.tensor(p.dtype, {p.batch, p.tokens, p.heads_qk, p.dim_k});
  t.k = store.tensor(p.dtype, {p.batch, p.tokens, p.heads_qk, p.dim_k});
  t.v = store.tensor(p.dtype, {p.batch, p.tokens, p.heads_v, p.dim_v});
  if (p.gate != Gate::none) t.g = store.tensor(small, {p.batch, p.tokens, p.heads_v});
  if (p.beta != Beta::one) t.beta = store.tensor(small, {p.batch, p.tokens, p.heads_v});
  if (p.gate == Gate::computed) t.a_log = store.tensor(small, {p.heads_v});
  if (p.gate == Gate::computed) t.dt_bias = store.tensor(small, {p.heads_v});
  return t;
}

inline TensorView make_state(Store& store, const Problem& p, std::int64_t rows, DType dtype = DType::f32) {
  return p.state_layout == StateLayout::key_value ? store.tensor(dtype, {rows, p.heads_v, p.dim_k, p.dim_v})
                                                  : store.tensor(dtype, {rows, p.heads_v, p.dim_v, p.dim_k});
}

/// A call that is valid until a test changes it.
template <class Descriptor, class Tensors>
struct Call {
  Store store;
  Descriptor descriptor;
  Tensors tensors;

  explicit Call(const Problem& problem = small_problem()) {
    descriptor.problem = problem;
    tensors.inputs = make_inputs(store, problem);
  }
  const Problem& problem() const { return descriptor.problem; }
  TensorView state(std::int64_t rows, DType dtype = DType::f32) { return make_state(store, problem(), rows, dtype); }
  /// Offsets of a packed call.
  void offsets(const std::vector<std::int64_t>& values) { tensors.inputs.cu_seqlens = store.indices(values); }

  void run() {
    const Plan<Descriptor> made = plan(descriptor);
    std::vector<std::byte> memory(made.workspace_bytes + 64);
    const std::size_t shift = (64 - reinterpret_cast<std::uintptr_t>(memory.data()) % 64) % 64;
    flashqla::run(made, tensors, {memory.data() + shift, made.workspace_bytes}, serial());
  }
};

struct Forward : Call<ChunkForward, ChunkForwardTensors> {
  explicit Forward(const Problem& p = small_problem()) : Call(p) {
    tensors.o = store.tensor(p.dtype, {p.batch, p.tokens, p.heads_v, p.dim_v});
    tensors.states.final_state = state(p.sequences());
  }
};

struct Recurrent : Call<RecurrentForward, RecurrentForwardTensors> {
  explicit Recurrent(const Problem& p = small_problem()) : Call(p) {
    tensors.o = store.tensor(p.dtype, {p.batch, p.tokens, p.heads_v, p.dim_v});
    tensors.states.final_state = state(p.sequences());
  }
};

struct Backward : Call<ChunkBackward, ChunkBackwardTensors> {
  explicit Backward(const Problem& p = small_problem()) : Call(p) {
    tensors.initial_state = state(p.sequences());
    tensors.d_o = store.tensor(p.dtype, {p.batch, p.tokens, p.heads_v, p.dim_v});
    tensors.d_final_state = state(p.sequences());
    tensors.d_q = store.tensor(p.dtype, {p.batch, p.tokens, p.heads_qk, p.dim_k});
    tensors.d_k = store.tensor(p.dtype, {p.batch, p.tokens, p.heads_qk, p.dim_k});
    tensors.d_v = store.tensor(p.dtype, {p.batch, p.tokens, p.heads_v, p.dim_v});
    tensors.d_initial_state = state(p.sequences());
    if (p.gate != Gate::none) tensors.d_g = store.tensor(DType::f32, {p.batch, p.tokens, p.heads_v});
    if (p.beta != Beta::one) tensors.d_beta = store.tensor(DType::f32, {p.batch, p.tokens, p.heads_v});
    if (p.gate == Gate::computed) tensors.d_a_log = store.tensor(DType::f32, {p.heads_v});
    if (p.gate == Gate::computed) tensors.d_dt_bias = store.tensor(DType::f32, {p.heads_v});
  }
};

/// `action` throws exactly `Exception`, and its message has every part.
template <class Exception>
void expect_throw(const std::function<void()>& action, const std::vector<std::string>& parts) {
  try {
    action();
    ADD_FAILURE() << "accepted, expected a message with: " << parts.front();
  } catch (const Error& error) {
    const auto* exact = dynamic_cast<const Exception*>(&error);
    const bool too_special = std::is_same_v<Exception, InvalidArgument> && dynamic_cast<const InvalidType*>(&error) != nullptr;
    EXPECT_TRUE(exact != nullptr && !too_special) << "another exception type: " << error.what();
    for (const std::string& part : parts) {
      EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << "message: " << error.what() << "\nlacks: " << part;
    }
  }
}

/// The call is refused with such a message, before anything is written.
template <class Exception, class AnyCall>
void expect_refused(AnyCall& call, const std::vector<std::string>& parts) {
  const auto before = call.store.contents();
  expect_throw<Exception>([&] { call.run(); }, parts);
  EXPECT_TRUE(before == call.store.contents()) << "refused, but something was written";
}

template <class AnyCall>
void expect_accepted(AnyCall& call) {
  try {
    call.run();
  } catch (const Error& error) {
    ADD_FAILURE() << "refused: " << error.what();
  }
}

}  // namespace flashqla::test
