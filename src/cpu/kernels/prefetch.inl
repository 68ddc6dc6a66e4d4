// Software prefetches between the register blocks of products. Included inside an instruction set's namespace.
#pragma once

/// Memory that is needed soon, fetched into the second-level cache a few lines at a time between runs of the products: in bursts
/// the lines would fill the buffers for outstanding ones and stop the products. Rows of the caller lie a page or more apart,
/// where no hardware prefetcher follows. A step has no branch; at the end it repeats the last lines. What was added first comes
/// first.
class PrefetchList {
 public:
  PrefetchList() { clear(); }
  void clear() {
    pieces_[0] = reinterpret_cast<const std::byte*>(this);
    at_ = end_ = 0;
  }
  void add(const void* memory, std::int64_t bytes) {
    const auto* first = static_cast<const std::byte*>(memory);
    for (std::int64_t at = 0; at < bytes && end_ < kMost; at += kPieceBytes) pieces_[end_++] = first + at;
  }
  /// Rows of `width` elements of one head from `token` on; nothing if the tensor is absent.
  template <class Byte>
  void add_rows(const TokenView<Byte>& view, std::int64_t batch, std::int64_t token, std::int64_t head, std::int64_t rows,
                std::int64_t width) {
    if (!view.present()) return;
    for (std::int64_t t = 0; t < rows; ++t) add(view.row(batch, token + t, head), width * element_bytes(view.dtype));
  }
  template <int kLines>
  FLASHQLA_INLINE void step() {
    static_assert(kPieceLines % kLines == 0);
    constexpr int kSteps = kPieceLines / kLines;
    const std::byte* const lines = pieces_[at_ / kSteps] + at_ % kSteps * kLines * kLineBytes;
    FLASHQLA_UNROLL
    for (int i = 0; i < kLines; ++i) prefetch_far(lines + i * kLineBytes);
    at_ += at_ + 1 < kSteps * end_;
  }

 private:
  static constexpr int kLineBytes = 64, kPieceLines = 4, kPieceBytes = kPieceLines * kLineBytes, kMost = 1024;
  const std::byte* pieces_[kMost];
  int at_, end_;
};
