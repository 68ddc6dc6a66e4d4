// Sizes and memory of chunk_backward, shared by the host side and the kernels; docs/design/cpu_backward.md explains them.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "common/arguments.hpp"

namespace flashqla::cpu {

inline constexpr std::int64_t kBackwardTokens = SavedShape::kChunkTokens;  // of a chunk inside these kernels

/// What the workspace keeps of each value head of a sequence (its stash): the state before every segment of
/// `chunks_per_segment` chunks and, when `errors_kept`, the errors e of every token. With what the forward saved (SavedShape) it
/// is the sequence's first state and one gradient. All counts are floats.
struct BackwardShape {
  std::int64_t dim_k, dim_v, group;
  std::int64_t padded_k;  // rows of a state, a multiple of 16
  std::int64_t padded_v;  // columns of a state, a multiple of 32
  std::int64_t row_k;     // stride of a token's row of q or k: an odd number of cache lines, so that a column touches all L1 sets
  std::int64_t chunks_per_segment;
  bool errors_kept;
  bool saved;

  explicit BackwardShape(const Problem& problem, bool saved_ = false)
      : dim_k(problem.dim_k),
        dim_v(problem.dim_v),
        group(problem.heads_v / problem.heads_qk),
        padded_k((problem.dim_k + 15) / 16 * 16),
        padded_v((problem.dim_v + 31) / 32 * 32),
        row_k(padded_k + (padded_k % 32 == 0 ? 16 : 32)),
        saved(saved_) {
    if (saved) {
      errors_kept = false;
      chunks_per_segment = SavedShape::kSegmentTokens / kBackwardTokens;
      return;
    }
    // Errors cost 64 / K of a state per 64 tokens, so segments of n chunks fit one state per 64 tokens if K / (32 n) + 1 <= K
    // / 64.
    const std::int64_t wanted = padded_k > 64 ? (2 * padded_k + padded_k - 65) / (padded_k - 64) : kMostChunks + 1;
    errors_kept = wanted <= kMostChunks;
    chunks_per_segment = errors_kept ? wanted : 2;
  }

  std::int64_t state() const { return padded_k * padded_v; }
  std::int64_t errors() const { return kBackwardTokens * padded_v; }
  std::int64_t segment_tokens() const { return kBackwardTokens * chunks_per_segment; }
  std::int64_t segments(std::int64_t tokens) const { return (tokens + segment_tokens() - 1) / segment_tokens(); }
  /// Places for states that a value head of a sequence has in the stash.
  std::int64_t places(std::int64_t tokens) const { return saved ? 2 : segments(tokens); }
  /// So many places.
  std::int64_t stash(std::int64_t places) const { return places * (state() + (errors_kept ? chunks_per_segment * errors() : 0)); }

 private:
  static constexpr std::int64_t kMostChunks = 8;
};

/// One (sequence, q/k head): gradients of its rows for all value heads of the group.
struct BackwardItem {
  const ChunkBackwardArguments& arguments;
  const BackwardShape& shape;
  std::int64_t sequence, head_qk;
  std::byte* scratch;  // of this thread
  float* stash;        // of all value heads of the item, one after another
  double* gate_sums;   // [group][2]: d_a_log and d_dt_bias of this sequence
};

/// What each instruction set supplies.
struct BackwardKernel {
  std::size_t (*scratch_bytes)(const BackwardShape& shape);
  void (*run)(const BackwardItem& item);
  std::uint64_t saved_layout;  // of what the forward saved, as these kernels read it
};

namespace avx512 {
/// What cpu-avx512bf16 leaves to f32.
extern const BackwardKernel kBackwardItems;
}  // namespace avx512

std::size_t chunk_backward_workspace(const ChunkBackward& descriptor, int threads, const BackwardKernel& kernel);
void chunk_backward(const ChunkBackwardArguments& arguments, std::byte* workspace, const Parallel& parallel,
                    const BackwardKernel& kernel);

}  // namespace flashqla::cpu
