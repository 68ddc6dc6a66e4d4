// Shared memory: dynamic in one array, static variables wherever the compiler puts thread-local ones. Addresses are 32 bits wide
// and checked whenever an emulated instruction takes one.
#pragma once

#include <cstddef>
#include <cstdint>

namespace flashqla::emulation {

/// As on devices of compute capability 9.0: what a block may have, dynamic and with cudaFuncSetAttribute.
inline constexpr std::size_t kMostSharedBytes = 227 * 1024;
inline constexpr std::size_t kSharedGuard = 4096;

/// What ptx::shared_address gives.
std::uint32_t to_shared_address(const void* pointer);
/// The memory behind an address; fails unless it is aligned to and has `bytes`, all of them the block's.
std::byte* from_shared_address(std::uint32_t address, std::uint32_t bytes, const char* instruction);

}  // namespace flashqla::emulation
