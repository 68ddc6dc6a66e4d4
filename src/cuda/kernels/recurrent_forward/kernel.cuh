// The kernel around step.cuh: which slab a block has, its tokens, and where states come from and go to. The loads of a state come
// first, the first token's behind them, and what follows from the token alone is done before anything waits for the state.
#pragma once

#include "cuda/kernels/recurrent_forward/step.cuh"

namespace flashqla::cuda {

/// Blocks of a multiprocessor at once, by Steps and K (64, 128, 256): as many as the compiler finds registers for without spills.
/// More have more loads under way.
inline constexpr int kResidentBlocks[2][3] = {{7, 5, 3}, {8, 6, 4}};

FLASHQLA_DEVICE std::uint32_t quotient(std::uint32_t x, const Divisor& by) {
  return static_cast<std::uint32_t>(static_cast<std::uint64_t>(2 * x) * by.multiplier >> 32) >> by.shift;
}

/// The halves of an index in memory, which loading one does not wait for.
struct IndexBits {
  std::int32_t low, high;  // high: of a wide one

  FLASHQLA_DEVICE std::int64_t value(const IndexRows& x) const {
    return x.wide != 0 ? static_cast<std::int64_t>(high) << 32 | static_cast<std::uint32_t>(low) : low;
  }
};
FLASHQLA_DEVICE IndexBits load_index_bits(const IndexRows& x, std::int64_t i, std::int64_t j = 0) {
  const auto* const at = reinterpret_cast<const std::int32_t*>(x.data + i * x.stride_0 + j * x.stride_1);
  return {at[0], x.wide != 0 ? at[1] : 0};
}
FLASHQLA_DEVICE std::int64_t load_index(const IndexRows& x, std::int64_t i, std::int64_t j = 0) {
  return load_index_bits(x, i, j).value(x);
}

/// The tokens of a sequence, inside the tensors whatever the offsets say.
struct SequenceTokens {
  std::int64_t first;  // batch entry or, in a pack, token
  std::int64_t length;
};
FLASHQLA_DEVICE SequenceTokens tokens_of(const RecurrentParams& p, std::int64_t n) {
  if (p.packed == 0) return {n, p.tokens};
  const auto inside = [&](std::int64_t x) { return x < 0 ? 0 : x > p.tokens ? p.tokens : x; };
  const std::int64_t begin = inside(load_index(p.cu_seqlens, n)), end = inside(load_index(p.cu_seqlens, n + 1));
  return {begin, end > begin ? end - begin : 0};
}

/// Row of the initial state that sequence n starts from, -1 for zero. `bits`: of its index, if there are indices alone.
FLASHQLA_DEVICE std::int64_t read_row(const RecurrentParams& p, std::uint32_t n, const IndexBits& bits) {
  if (p.read_from == RowSource::index) return bits.value(p.read);
  if (p.read_from == RowSource::none) return -1;
  if (p.read_from == RowSource::number) return n;
  const std::int64_t draft = load_index(p.accepted, n) - 1;
  return draft < 0 || draft >= p.read.size_1 ? -1 : load_index(p.read, n, draft);
}
/// Row of the final state, -1 for none.
FLASHQLA_DEVICE std::int64_t write_row(const RecurrentParams& p, std::uint32_t n, const IndexBits& bits) {
  if (p.write_to == RowSource::index) return bits.value(p.write);
  return p.write_to == RowSource::number ? std::int64_t{n} : -1;
}

/// Row of token_states for token t of sequence n.
FLASHQLA_DEVICE std::int64_t kept_row(const RecurrentParams& p, const SequenceTokens& tokens, std::int64_t t) {
  const std::int64_t batch = p.packed != 0 ? 0 : tokens.first, row = p.packed != 0 ? tokens.first + t : t;
  return p.keep_in == RowSource::index ? load_index(p.token_rows, batch, row) : batch * p.tokens + row;
}

/// Rows past the last offset belong to no sequence: the blocks share them.
FLASHQLA_DEVICE void zero_rows_of_none(const RecurrentParams& p) {
  const std::int64_t last = load_index(p.cu_seqlens, p.sequences), end = last < 0 ? 0 : last;
  for (std::int64_t row = end + blockIdx.x; row < p.tokens; row += gridDim.x) {
    for (std::uint32_t head = 0; head < p.heads.divisor; ++head) {
      std::byte* const o = row_of(p.o, row, static_cast<int>(head));
      for (int v = static_cast<int>(threadIdx.x); v < p.dim_v; v += kRecurrentThreads)
        store_number(o + v * p.bytes, p.type, 0.0f);
    }
  }
}

template <int kDimK, StateLayout kLayout, Steps kSteps>
__global__ void __launch_bounds__(kRecurrentThreads, kResidentBlocks[static_cast<int>(kSteps)][kDimK / 128])
    recurrent_steps(const __grid_constant__ RecurrentParams p) {
  using Where = SlabVectors<kDimK, kLayout>;
  using OneStep = Step<kDimK, kLayout>;
  constexpr bool kEven = kSteps == Steps::one_even;
  __shared__ RecurrentShared shared;
  // 0, which the compiler does not know: it takes what follows as different from thread to thread. What it knows to be the same
  // it keeps in a warp's own registers, with more instructions, and waits for an index where it is loaded.
  const std::uint32_t same = threadIdx.x / kRecurrentThreads, block = blockIdx.x + (kEven ? same : 0);
  const std::uint32_t matrix = quotient(block, p.slabs), n = quotient(matrix, p.heads);
  const auto head = static_cast<int>(matrix - n * p.heads.divisor);
  const auto first_v = static_cast<int>(block - matrix * p.slabs.divisor) * kRecurrentColumns;
  if (!kEven && p.packed != 0) zero_rows_of_none(p);
  if (!kEven && n >= static_cast<std::uint32_t>(p.sequences)) return;  // a pack of none
  const SequenceTokens tokens = kEven ? SequenceTokens{n, 1} : tokens_of(p, n);
  const int left = p.dim_v - first_v, columns = kEven || left > kRecurrentColumns ? kRecurrentColumns : left;
  const bool whole = kEven || (p.dim_k == kDimK && columns == kRecurrentColumns);
  const SlabPlace place{head, first_v, kEven ? kDimK : p.dim_k, columns, whole, kEven};
  IndexBits read_bits{0, 0}, write_bits{0, 0};
  if (p.read_from == RowSource::index) read_bits = load_index_bits(p.read, n);
  if (p.write_to == RowSource::index) write_bits = load_index_bits(p.write, n + (kEven ? 0 : same));
  const std::int64_t read = read_row(p, n, read_bits), write = write_row(p, n, write_bits);
  const bool padding = p.pads != 0 && read < 0 && write < 0;
  Slab<kDimK, kLayout> s;
  const Number loaded = load_slab<kDimK, kLayout>(p.initial_state, read, place, s);
  const int column = OneStep::own_column();
  const auto head_qk = static_cast<int>(quotient(static_cast<std::uint32_t>(head), p.group));
  TokenRows rows = token_rows_of(p, tokens.first, head, head_qk);
  for (std::int64_t t = 0; t < tokens.length;) {
    const auto token = load_token<Where>(p, rows, place, column);
    if (t == 0) decode_slab(loaded, s);
    const float o = OneStep::run(p, shared, static_cast<int>(t % 2), token, s);
    if (OneStep::stores() && column < columns) store_number(rows.o + (first_v + column) * p.bytes, p.type, padding ? 0.0f : o);
    if (p.keep_in != RowSource::none && !padding) store_slab<kDimK, kLayout>(p.token_states, kept_row(p, tokens, t), place, s);
    if (++t < tokens.length) rows.advance(p);
  }
  if (tokens.length == 0) decode_slab(loaded, s);
  store_slab<kDimK, kLayout>(p.final_state, write, place, s);
}

}  // namespace flashqla::cuda
