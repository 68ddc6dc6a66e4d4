// ldmatrix and movmatrix: 8x8 matrices of 16-bit elements between shared memory and the registers of a warp (sm_75 and newer).
//
// Lane l of the warp gives the address of row l % 8 of matrix l / 8 (16 bytes, 16-byte aligned) and receives, of matrix m in
// register m, the elements (row l / 4, columns 2 (l % 4) and + 1), the lower column in the lower half; with `trans`, of the
// transposed matrix. The loads are volatile, so that none passes a barrier, and name no memory, so that other loads may pass
// them.
#pragma once

#include "cuda/ptx/shared.cuh"

namespace flashqla::cuda::ptx {

FLASHQLA_DEVICE void ldmatrix_x4(std::uint32_t (&r)[4], std::uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}

FLASHQLA_DEVICE void ldmatrix_x4_trans(std::uint32_t (&r)[4], std::uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}

/// The way back: matrices from registers to the rows whose addresses the lanes give (sm_90 and newer).
FLASHQLA_DEVICE void stmatrix_x4_trans(std::uint32_t address, const std::uint32_t* r) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r[0]), "r"(r[1]),
               "r"(r[2]), "r"(r[3])
               : "memory");
}

/// An 8x8 matrix in a register of each lane, transposed.
FLASHQLA_DEVICE std::uint32_t movmatrix_trans(std::uint32_t matrix) {
  std::uint32_t transposed;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(matrix));
  return transposed;
}

}  // namespace flashqla::cuda::ptx
