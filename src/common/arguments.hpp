// What an implementation receives: the tensors of a call after src/api has checked every one of them. Plain data, strides in
// elements, nothing optional left to interpret except "data == nullptr means absent". Implementations trust it and check nothing.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/saved.hpp"
#include "common/scalar.hpp"
#include "flashqla/ops.hpp"

namespace flashqla {

/// A [B,T,H] or [B,T,H,D] tensor; the last dimension of the latter is contiguous. `Byte` is std::byte or const std::byte.
template <class Byte>
struct TokenView {
  Byte* data = nullptr;
  DType dtype = DType::f32;
  std::int64_t stride_batch = 0, stride_token = 0, stride_head = 0;

  bool present() const { return data != nullptr; }
  std::int64_t offset(std::int64_t batch, std::int64_t token, std::int64_t head) const {
    return batch * stride_batch + token * stride_token + head * stride_head;
  }
  /// First element of one head's row at one token.
  Byte* row(std::int64_t batch, std::int64_t token, std::int64_t head) const {
    return data + offset(batch, token, head) * element_bytes(dtype);
  }
  double load(std::int64_t batch, std::int64_t token, std::int64_t head, std::int64_t d = 0) const {
    return load_scalar(data, dtype, offset(batch, token, head) + d);
  }
  void store(std::int64_t batch, std::int64_t token, std::int64_t head, std::int64_t d, double value) const {
    store_scalar(data, dtype, offset(batch, token, head) + d, value);
  }
};
using ConstTokenView = TokenView<const std::byte>;
using MutableTokenView = TokenView<std::byte>;

/// A [Hv] tensor.
template <class Byte>
struct HeadView {
  Byte* data = nullptr;
  DType dtype = DType::f32;
  std::int64_t stride = 0;

  bool present() const { return data != nullptr; }
  double load(std::int64_t head) const { return load_scalar(data, dtype, head * stride); }
  void store(std::int64_t head, double value) const { store_scalar(data, dtype, head * stride, value); }
};
using ConstHeadView = HeadView<const std::byte>;
using MutableHeadView = HeadView<std::byte>;

/// A [rows,Hv,K,V] or [rows,Hv,V,K] tensor with a contiguous last dimension.
template <class Byte>
struct StateView {
  Byte* data = nullptr;
  DType dtype = DType::f32;
  StateLayout layout = StateLayout::key_value;
  std::int64_t stride_row = 0, stride_head = 0, stride_outer = 0;  // outer: K in key_value, V in value_key
  std::int64_t rows = 0;

  bool present() const { return data != nullptr; }
  std::int64_t offset(std::int64_t row, std::int64_t head) const { return row * stride_row + head * stride_head; }
  /// First element of one head's matrix.
  Byte* matrix(std::int64_t row, std::int64_t head) const { return data + offset(row, head) * element_bytes(dtype); }
  std::int64_t element(std::int64_t row, std::int64_t head, std::int64_t k, std::int64_t v) const {
    return offset(row, head) + (layout == StateLayout::key_value ? k * stride_outer + v : v * stride_outer + k);
  }
  double load(std::int64_t row, std::int64_t head, std::int64_t k, std::int64_t v) const {
    return load_scalar(data, dtype, element(row, head, k, v));
  }
  void store(std::int64_t row, std::int64_t head, std::int64_t k, std::int64_t v, double value) const {
    store_scalar(data, dtype, element(row, head, k, v), value);
  }
};
using ConstStateView = StateView<const std::byte>;
using MutableStateView = StateView<std::byte>;

/// A 1-d or 2-d tensor of indices.
struct IndexView {
  const void* data = nullptr;
  DType dtype = DType::i64;
  std::int64_t stride_0 = 0, stride_1 = 0;
  std::int64_t size_0 = 0, size_1 = 0;

  bool present() const { return data != nullptr; }
  std::int64_t at(std::int64_t i, std::int64_t j = 0) const {
    const std::int64_t index = i * stride_0 + j * stride_1;
    return dtype == DType::i64 ? static_cast<const std::int64_t*>(data)[index] : static_cast<const std::int32_t*>(data)[index];
  }
};

/// The sequences of a call. Sequence n is rows [begin, begin + length) of batch entry `batch`.
struct Sequences {
  IndexView cu_seqlens;  // absent: one sequence per batch entry
  std::int64_t count = 0;
  std::int64_t tokens = 0;  // T

  bool packed() const { return cu_seqlens.present(); }
  std::int64_t batch(std::int64_t n) const { return packed() ? 0 : n; }
  std::int64_t begin(std::int64_t n) const { return packed() ? cu_seqlens.at(n) : 0; }
  std::int64_t length(std::int64_t n) const { return packed() ? cu_seqlens.at(n + 1) - cu_seqlens.at(n) : tokens; }
  /// First row that belongs to no sequence.
  std::int64_t end() const { return packed() ? cu_seqlens.at(count) : tokens; }
};

struct InputArguments {
  Problem problem;         // with num_sequences and scale filled in
  double scale = 1.0;      // the one in effect
  std::int64_t group = 1;  // Hv / Hq
  ConstTokenView q, k, v, g, beta;
  ConstHeadView a_log, dt_bias;
  Sequences sequences;
};

struct StateArguments {
  ConstStateView initial_state;
  MutableStateView final_state;
  IndexView read, write, accepted;

  /// Row of `initial_state` where sequence n starts, -1 for zero.
  std::int64_t read_row(std::int64_t n) const {
    if (!initial_state.present()) return -1;
    if (!read.present()) return n;
    return accepted.present() ? read.at(n, accepted.at(n) - 1) : read.at(n);
  }
  /// Row of `final_state` for sequence n, -1 for none.
  std::int64_t write_row(std::int64_t n) const {
    if (!final_state.present()) return -1;
    return write.present() ? write.at(n) : n;
  }
  /// A padding entry: its rows of o are zero and nothing else is touched.
  bool padding(std::int64_t n) const { return read.present() && write.present() && read_row(n) < 0 && write.at(n) < 0; }
};

struct ChunkForwardArguments {
  InputArguments inputs;
  StateArguments states;
  MutableTokenView o;
  StoredStates stored_states = StoredStates::none;
  std::int64_t states_every = 0;
  MutableStateView stored;
  IndexView stored_rows, prefix_lengths;
  MutableTokenView g_cumulative;  // f32 [B,T,Hv]
  MutableTokenView a;             // [B,T,Hv,64]
  float* saved = nullptr;         // SavedShape's array for the backward; null: not wanted

  std::int64_t prefix(std::int64_t n) const { return prefix_lengths.present() ? prefix_lengths.at(n) : 0; }
  /// Stored states of sequence n.
  std::int64_t stored_count(std::int64_t n) const {
    const std::int64_t length = inputs.sequences.length(n);
    if (stored_states == StoredStates::before_chunks) return (length + kTokensPerChunk - 1) / kTokensPerChunk;
    if (stored_states == StoredStates::every) return (prefix(n) + length) / states_every - prefix(n) / states_every;
    return 0;
  }
  /// Place of sequence n's first stored state in the order of all of them.
  std::int64_t stored_begin(std::int64_t n) const {
    std::int64_t begin = 0;
    for (std::int64_t i = 0; i < n; ++i) begin += stored_count(i);
    return begin;
  }
  /// Row of `stored` for the `place`-th stored state, -1 to skip it.
  std::int64_t stored_row(std::int64_t place) const { return stored_rows.present() ? stored_rows.at(place) : place; }
};

struct ChunkBackwardArguments {
  InputArguments inputs;
  std::int64_t max_sequence_tokens = 0;
  ConstStateView initial_state, d_final_state;
  ConstTokenView d_o;
  MutableTokenView d_q, d_k, d_v, d_g, d_beta;
  MutableStateView d_initial_state;
  MutableHeadView d_a_log, d_dt_bias;
  const float* saved = nullptr;  // what chunk_forward left, if anything
};

struct RecurrentForwardArguments {
  InputArguments inputs;
  StateArguments states;
  MutableTokenView o;
  MutableStateView token_states;
  IndexView token_rows;

  std::int64_t token_row(std::int64_t batch, std::int64_t token) const {
    if (!token_states.present()) return -1;
    return token_rows.present() ? token_rows.at(batch, token) : batch * inputs.problem.tokens + token;
  }
};

}  // namespace flashqla
