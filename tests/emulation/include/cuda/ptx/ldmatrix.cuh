// Twin of src/cuda/ptx/ldmatrix.cuh.
#pragma once

#include "cuda/ptx/shared.cuh"
#include "emulation/warp.hpp"

namespace flashqla::cuda::ptx {

FLASHQLA_DEVICE void ldmatrix_x4(std::uint32_t (&r)[4], std::uint32_t address) { emulation::load_matrices(r, address); }
FLASHQLA_DEVICE void ldmatrix_x4_trans(std::uint32_t (&r)[4], std::uint32_t address) {
  emulation::load_matrices_transposed(r, address);
}
FLASHQLA_DEVICE std::uint32_t movmatrix_trans(std::uint32_t matrix) { return emulation::transpose_matrix(matrix); }

}  // namespace flashqla::cuda::ptx
