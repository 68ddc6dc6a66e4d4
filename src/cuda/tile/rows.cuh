// Rows of a tensor to a shared tile, and back. 16 bits an element.
#pragma once

#include "cuda/ptx/cp_async.cuh"
#include "cuda/tile/shared_tile.cuh"

namespace flashqla::cuda::tile {

/// Where rows lie in global memory, in elements of 16 bits.
struct GlobalRows {
  const void* first;
  std::int64_t stride;
  int rows, columns;  // that exist; a tile has zeros past them
};

/// Starts the copy of a tile with `kThreads` threads, of which this is number `thread`: the caller commits and waits. Rows begin
/// at multiples of 16 bytes and columns are a multiple of 8.
template <int kThreads, int kRows, int kColumns>
FLASHQLA_DEVICE void copy_rows_async(const SharedTile<kRows, kColumns>& tile, const GlobalRows& from,
                                     unsigned thread = threadIdx.x) {
  constexpr int kPieces = SharedTile<kRows, kColumns>::kRowPieces;
  static_assert(kRows * kPieces % kThreads == 0, "every thread copies as many pieces as any other");
  const auto* first = static_cast<const std::byte*>(from.first);
#pragma unroll
  for (int i = 0; i < kRows * kPieces / kThreads; ++i) {
    const int at = i * kThreads + static_cast<int>(thread), row = at / kPieces, piece = at % kPieces;
    const bool there = row < from.rows && piece * kPieceElements < from.columns;
    const std::byte* source = there ? first + (row * from.stride + piece * kPieceElements) * 2 : first;
    ptx::cp_async_16_or_zeros(tile.piece(row, piece), source, there);
  }
}

/// Where a thread's pieces of the next tile's rows lie, when tiles are whole and rows aligned: they move on by kRows rows a tile.
template <int kThreads, int kRows, int kColumns>
struct RowCursor {
  static constexpr int kPieces = kColumns / kPieceElements, kCopies = kRows * kPieces / kThreads;
  static constexpr int kRowStep = kThreads / kPieces;
  static_assert(kThreads % kPieces == 0, "a thread has the same piece of every row that it copies");
  const std::byte* from;
  std::int64_t row_bytes;

  FLASHQLA_DEVICE RowCursor(const void* first, std::int64_t stride, unsigned thread = threadIdx.x) : row_bytes(stride * 2) {
    from = static_cast<const std::byte*>(first) + thread / kPieces * row_bytes + thread % kPieces * kPieceBytes;
  }
  /// Where the thread's first piece of a tile lies, in bytes.
  static FLASHQLA_DEVICE std::uint32_t place(unsigned thread = threadIdx.x) {
    const unsigned row = thread / kPieces;
    if constexpr (kPieces < 8) return static_cast<std::uint32_t>(SharedTile<kRows, kColumns>::offset(row, thread % kPieces));
    return (thread ^ row % 8) * kPieceBytes;  // the same: rows follow each other, and so do their pieces
  }
  /// To the tile of which `to` is the address of the thread's first piece.
  FLASHQLA_DEVICE void copy(std::uint32_t to) {
    using Tile = SharedTile<kRows, kColumns>;
    static_assert(kRowStep % 8 == 0 || kRowStep == 4, "pieces are permuted alike every eight rows, and every four turn one bit");
    const std::uint32_t turned = kRowStep % 8 == 0 ? to : to ^ 4u * kPieceBytes;
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      ptx::cp_async_16((i % 2 == 0 ? to : turned) + i * kRowStep * Tile::kRowBytes, from);
      from += kRowStep * row_bytes;
    }
  }
  /// On by `tiles` tiles, past none that it has not copied.
  FLASHQLA_DEVICE void move(int tiles) { from += tiles * kRows * row_bytes; }
};

/// The same for rows anywhere, through the registers: done when it returns (a barrier is needed besides). `memory`: the tile.
template <int kThreads, int kRows, int kColumns>
FLASHQLA_DEVICE void copy_rows(std::byte* memory, const GlobalRows& from, unsigned thread = threadIdx.x) {
  using Tile = SharedTile<kRows, kColumns>;
  const auto* first = static_cast<const std::uint16_t*>(from.first);
  for (int at = static_cast<int>(thread); at < kRows * kColumns; at += kThreads) {
    const int row = at / kColumns, column = at % kColumns;
    const bool there = row < from.rows && column < from.columns;
    *reinterpret_cast<std::uint16_t*>(memory + Tile::offset(row, column / kPieceElements) + column % kPieceElements * 2) =
        there ? first[row * from.stride + column] : std::uint16_t{0};
  }
}

}  // namespace flashqla::cuda::tile
