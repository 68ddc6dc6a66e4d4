// Shared memory in thread-local memory, which lies in one piece: dynamic memory in an array, static variables anywhere around it.
#include "emulation/shared_memory.hpp"

#include <link.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <string>

#include "emulation/block.hpp"
#include "shared_scope.hpp"

namespace flashqla::cuda {

/// The `extern __shared__ std::byte memory[]` of every kernel.
alignas(1024) thread_local std::byte memory[emulation::kMostSharedBytes + emulation::kSharedGuard];

}  // namespace flashqla::cuda

namespace flashqla::emulation {

namespace {

constexpr std::uint32_t kFirstAddress = 0x400;  // that of the dynamic memory
constexpr int kNan = 0xff;                      // every byte of it: NaN in all formats
constexpr std::size_t kArrayBytes = kMostSharedBytes + kSharedGuard;

struct Range {
  std::byte *begin = nullptr, *end = nullptr;
};

/// The calling thread's thread-local memory of the program, or library, that this is part of.
Range thread_local_memory() {
  Range found;
  const auto look = [](dl_phdr_info* info, std::size_t, void* result) {
    for (int i = 0; i < info->dlpi_phnum; ++i) {
      if (info->dlpi_phdr[i].p_type != PT_TLS || info->dlpi_tls_data == nullptr) continue;
      auto* const begin = static_cast<std::byte*>(info->dlpi_tls_data);
      std::byte* const end = begin + info->dlpi_phdr[i].p_memsz;
      if (begin <= cuda::memory && cuda::memory < end) *static_cast<Range*>(result) = {begin, end};
    }
    return 0;
  };
  dl_iterate_phdr(look, &found);
  return found;
}

}  // namespace

SharedScope::SharedScope(std::size_t dynamic_bytes) {
  thread_state.shared = cuda::memory;
  thread_state.shared_bytes = dynamic_bytes;
  const Range all = thread_local_memory();
  set_aside_.assign(all.begin, all.end);
}

SharedScope::~SharedScope() {
  const ThreadState state = thread_state;
  std::copy(set_aside_.begin(), set_aside_.end(), thread_local_memory().begin);
  thread_state = state;
}

void SharedScope::fill() const {
  const ThreadState state = thread_state;
  const Range all = thread_local_memory();
  std::fill(all.begin, all.end, std::byte{kNan});
  thread_state = state;
}

std::int64_t SharedScope::written_past() const {
  const std::byte* const guard = cuda::memory + thread_state.shared_bytes;
  const auto* const at = std::find_if(guard, guard + kSharedGuard, [](std::byte byte) { return byte != std::byte{kNan}; });
  return at == guard + kSharedGuard ? -1 : at - cuda::memory;
}

std::uint32_t to_shared_address(const void* pointer) {
  const std::ptrdiff_t offset = static_cast<const std::byte*>(pointer) - thread_state.shared;
  if (offset < 0 || offset > static_cast<std::ptrdiff_t>(thread_state.shared_bytes)) {
    const Range all = thread_local_memory();
    if (pointer < all.begin || pointer >= all.end) fail("shared_address of memory that is not shared");
  }
  return kFirstAddress + static_cast<std::uint32_t>(offset);
}

std::byte* from_shared_address(std::uint32_t address, std::uint32_t bytes, const char* instruction) {
  const auto offset = static_cast<std::int32_t>(address - kFirstAddress);
  if (address % bytes != 0) fail(std::string(instruction) + ": shared address " + std::to_string(address) + " is not aligned");
  if (offset >= 0 && static_cast<std::size_t>(offset) + bytes <= thread_state.shared_bytes) return thread_state.shared + offset;
  const Range all = thread_local_memory();
  std::byte* const at = thread_state.shared + offset;
  const bool dynamic = at >= thread_state.shared && at < thread_state.shared + kArrayBytes;
  if (dynamic || at < all.begin || at + bytes > all.end) {
    fail(std::string(instruction) + ": byte " + std::to_string(offset) + " of " + std::to_string(thread_state.shared_bytes) +
         " bytes of shared memory");
  }
  return at;
}

}  // namespace flashqla::emulation
