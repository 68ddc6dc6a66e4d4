// What chunk_forward can leave so that chunk_backward need not compute it again: the errors e of every token, and the state
// before every segment of 64 tokens but a sequence's first. One f32 array that is opaque to callers: its parts are laid out as
// the implementation that wrote it likes them, and its head says who that was. All counts are floats.
//
//   [head: 16][states: place][Hv][K padded][V padded][errors: chunk of 32 rows][Hv][row][V padded]
#pragma once

#include <cstdint>
#include <cstring>

#include "flashqla/problem.hpp"

namespace flashqla {

struct SavedShape {
  static constexpr std::int64_t kHead = 16;
  static constexpr std::int64_t kChunkTokens = 32;  // of the backward
  static constexpr std::int64_t kSegmentTokens = 64;

  std::int64_t heads_v, rows;
  std::int64_t padded_k;  // rows of a state, a multiple of 16
  std::int64_t padded_v;  // columns of a state, a multiple of 32

  explicit SavedShape(const Problem& problem)
      : heads_v(problem.heads_v),
        rows(problem.batch * problem.tokens),
        padded_k((problem.dim_k + 15) / 16 * 16),
        padded_v((problem.dim_v + 31) / 32 * 32) {}

  std::int64_t state() const { return padded_k * padded_v; }
  /// Places for states of all heads. A sequence of n rows has those from floor(first row / 64) on, floor((n - 1) / 64) of them,
  /// so that sequences do not meet.
  std::int64_t places() const { return rows > 0 ? (rows - 1) / kSegmentTokens : 0; }
  static std::int64_t places_of(std::int64_t length) { return length > 0 ? (length - 1) / kSegmentTokens : 0; }
  std::int64_t place_at(std::int64_t place) const { return kHead + place * heads_v * state(); }
  std::int64_t elements() const { return errors_at(rows, 0, 0); }
  /// The state before segment 1, 2, ... of the sequence that begins at `row`.
  std::int64_t state_at(std::int64_t row, std::int64_t segment, std::int64_t head) const {
    return place_at(row / kSegmentTokens + segment - 1) + head * state();
  }
  /// Errors of the `count` tokens of a chunk whose first is `row`: count * V padded.
  std::int64_t errors_at(std::int64_t row, std::int64_t count, std::int64_t head) const {
    return place_at(places()) + (row * heads_v + head * count) * padded_v;
  }
};

/// The head of such an array. `layout` is the vector width (in floats) of the implementation that wrote the rest, on which the
/// order inside its parts depends; 0 stands for "nothing saved".
struct SavedHead {
  static constexpr std::uint64_t kMagic = 0x6465766173514c46;  // "FLQsaved"
  std::uint64_t magic;
  std::uint64_t layout;

  static void write(float* saved, std::uint64_t layout) {
    const SavedHead head{kMagic, layout};
    std::memset(saved, 0, SavedShape::kHead * sizeof *saved);
    std::memcpy(saved, &head, sizeof head);
  }
  static bool holds(const float* saved, std::uint64_t layout) {
    SavedHead head;
    std::memcpy(&head, saved, sizeof head);
    return head.magic == kMagic && head.layout == layout;
  }
};
static_assert(sizeof(SavedHead) <= SavedShape::kHead * sizeof(float));

}  // namespace flashqla
