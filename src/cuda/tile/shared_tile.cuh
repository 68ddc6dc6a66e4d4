// A row-major tile of 16-bit elements in shared memory, its 16-byte pieces permuted inside each row so that ldmatrix finds eight
// neighbouring rows of one column of pieces in eight different groups of banks.
//
// Rows of 32, 64 or 128 and more bytes put 4, 2 or 1 of them into the 128 bytes of all banks; pieces are permuted by the number
// of that line, as far as a row has pieces:
//   bytes of a row   32                  64                     128 and more
//   piece ^=         (row / 4) % 2       (row / 2) % 4          row % 8
#pragma once

#include "cuda/ptx/shared.cuh"

namespace flashqla::cuda::tile {

inline constexpr int kPieceBytes = 16;
inline constexpr int kPieceElements = 8;

template <int kRowCount, int kColumnCount>
struct SharedTile {
  static constexpr int kRows = kRowCount, kColumns = kColumnCount;
  static constexpr int kRowBytes = kColumns * 2;
  static constexpr int kRowPieces = kColumns / kPieceElements;
  static constexpr int kBytes = kRows * kRowBytes;
  static_assert(kColumns >= 16 && (kColumns & (kColumns - 1)) == 0, "rows of a power of two, 16 elements at least");

  std::uint32_t base;  // shared address, a multiple of 128

  /// Place of piece `piece` of row `row` in bytes.
  static constexpr __host__ __device__ int offset(int row, int piece) {
    constexpr int kRowsPerLine = kRowBytes >= 128 ? 1 : 128 / kRowBytes;
    constexpr int kMask = kRowPieces >= 8 ? 7 : kRowPieces - 1;
    return row * kRowBytes + (piece ^ (row / kRowsPerLine & kMask)) * kPieceBytes;
  }
  FLASHQLA_DEVICE std::uint32_t piece(int row, int piece_index) const { return base + offset(row, piece_index); }
  /// Address of one element.
  FLASHQLA_DEVICE std::uint32_t element(int row, int column) const {
    return piece(row, column / kPieceElements) + column % kPieceElements * 2;
  }
};

}  // namespace flashqla::cuda::tile
