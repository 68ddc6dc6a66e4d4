// The instructions of a warp, as the twins of src/cuda/ptx and the shuffles call them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "emulation/block.hpp"

namespace flashqla::emulation {

/// ldmatrix of four 8x8 matrices of 16-bit elements.
void load_matrices(std::uint32_t (&r)[4], std::uint32_t address);
void load_matrices_transposed(std::uint32_t (&r)[4], std::uint32_t address);
std::uint32_t transpose_matrix(std::uint32_t matrix);

/// c += a b, m16n8k16. Products are exact, sums are made in f32 in the order of k.
void multiply_bf16(float (&c)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1);
void multiply_f16(float (&c)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1);
/// c += a b, m16n8k8 of f32 that are cut off to TF32.
void multiply_tf32(float (&c)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1);

/// cp.async of 16 bytes: the destination is NaN until a wait.
void copy_later(std::uint32_t to, const void* from, std::uint32_t bytes);
void end_group_of_copies();
void wait_for_copies(int pending, const Site& site);

enum class Shuffle { index, up, down, exclusive_or };
/// The lane's value of `bytes` (4 or 8) becomes that of another lane.
void shuffle(Shuffle kind, std::uint32_t mask, void* value, std::size_t bytes, int by);
void wait_for_warp(std::uint32_t mask, const Site& site);

// Conversions, round to nearest even.
float bf16_to_float(std::uint16_t bits);
float f16_to_float(std::uint16_t bits);
std::uint16_t float_to_bf16(float value);
std::uint16_t float_to_f16(float value);

}  // namespace flashqla::emulation
