#include "convert.hpp"

#include <pthread.h>
#if defined(__linux__)
#include <sys/mman.h>
#endif
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <iterator>
#include <string>
#include <string_view>

namespace flashqla::bindings {
namespace {

using torch::headeronly::ScalarType;

constexpr std::size_t kAlignment = 64;

ScalarType scalar_type_of(DType dtype) {
  switch (dtype) {
    case DType::f64:
      return ScalarType::Double;
    case DType::f32:
      return ScalarType::Float;
    case DType::bf16:
      return ScalarType::BFloat16;
    case DType::f16:
      return ScalarType::Half;
    case DType::i64:
      return ScalarType::Long;
    case DType::i32:
      return ScalarType::Int;
  }
  return ScalarType::Float;
}

bool is_index(std::string_view name) {
  constexpr std::string_view kNames[] = {"cu_seqlens", "read_rows",       "write_rows",    "accepted",
                                         "token_rows", "checkpoint_rows", "prefix_lengths"};
  return std::find(std::begin(kNames), std::end(kNames), name) != std::end(kNames);
}

bool is_meta(const Tensor& tensor) { return tensor.device().type() == torch::headeronly::DeviceType::Meta; }

/// What an empty tensor points to: null is kept for "no memory at all".
alignas(kAlignment) std::byte nothing[kAlignment];

template <class Pointer>
BasicTensorView<Pointer> view(const char* name, const Tensor& tensor, Pointer data) {
  BasicTensorView<Pointer> result;
  result.dtype = dtype_of(name, tensor);
  const auto sizes = tensor.sizes();
  const auto strides = tensor.strides();
  if (sizes.empty() || sizes.size() > static_cast<std::size_t>(kMaxRank)) {
    throw InvalidArgument(std::string(name) + ": expected 1 to " + std::to_string(kMaxRank) + " dimensions, got " +
                          std::to_string(sizes.size()));
  }
  result.rank = static_cast<int>(sizes.size());
  std::copy(sizes.begin(), sizes.end(), result.sizes.begin());
  std::copy(strides.begin(), strides.end(), result.strides.begin());
  // Torch leaves the strides of a dimension of one element, or of a tensor without any, undefined.
  const auto last = sizes.size() - 1;
  if (result.sizes[last] <= 1 || tensor.numel() == 0) result.strides[last] = 1;
  result.data = data == nullptr && !is_meta(tensor) ? static_cast<Pointer>(nothing) : data;
  return result;
}

/// Asks for huge pages where that is possible: a large result is new memory, and a fault for each of its 4 KB pages costs more
/// than writing them.
void prefer_huge_pages(const Tensor& tensor, std::size_t bytes) {
#if defined(__linux__)
  constexpr std::uintptr_t kHugePage = std::uintptr_t{2} << 20;
  const auto address = reinterpret_cast<std::uintptr_t>(tensor.const_data_ptr());
  const std::uintptr_t begin = (address + kHugePage - 1) / kHugePage * kHugePage, end = (address + bytes) / kHugePage * kHugePage;
  if (address != 0 && end > begin) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);  // a hint: may fail
#endif
}

std::int32_t device_type_of(Placement placement) {
  if (placement.results == Results::nowhere) return aoti_torch_device_type_meta();
  return placement.device.type == DeviceType::cuda ? aoti_torch_device_type_cuda() : aoti_torch_device_type_cpu();
}

/// Contiguous, uninitialised. Torch's C interface says of a failure only that there was one; there is one reason to fail.
Tensor allocate(const std::vector<std::int64_t>& sizes, std::int32_t torch_dtype, std::int64_t bytes, Placement placement) {
  std::vector<std::int64_t> strides(sizes.size(), 1);
  for (std::size_t d = sizes.size(); d-- > 1;) strides[d - 1] = strides[d] * std::max<std::int64_t>(sizes[d], 1);
  const bool nowhere = placement.results == Results::nowhere;
  AtenTensorHandle handle = nullptr;
  if (aoti_torch_empty_strided(static_cast<std::int64_t>(sizes.size()), sizes.data(), strides.data(), torch_dtype,
                               device_type_of(placement), nowhere ? 0 : placement.device.index, &handle) != TORCH_SUCCESS) {
    for (std::int64_t size : sizes) bytes *= size;
    throw OutOfMemory("torch could not allocate " + std::to_string(bytes) + " bytes" +
                      (placement.device.type == DeviceType::cuda ? " on cuda:" + std::to_string(placement.device.index) : ""));
  }
  return Tensor(handle);
}

// Watched from load time on: torch's pool may have started before our first call.
std::atomic<bool> forked{false};
[[maybe_unused]] const int watching_forks =
    pthread_atfork(nullptr, nullptr, [] { forked.store(true, std::memory_order_relaxed); });

/// Torch divides a range into equal parts in advance; sequences differ in length, so its workers take one task at a time instead.
void run_on_torch_pool(void*, std::int64_t tasks, Parallel::Task task, void* argument) {
  std::atomic<std::int64_t> next{0};
  const auto work = [&](std::int64_t, std::int64_t) {
    for (std::int64_t i = next.fetch_add(1); i < tasks; i = next.fetch_add(1)) task(argument, i);
  };
  const auto workers = std::min<std::int64_t>(tasks, torch::stable::get_num_threads());
  torch::stable::parallel_for(0, workers, 1, work);
}

}  // namespace

DType dtype_of(const char* name, const Tensor& tensor) {
  const ScalarType type = tensor.scalar_type();
  for (DType dtype : {DType::f64, DType::f32, DType::bf16, DType::f16, DType::i64, DType::i32}) {
    if (type == scalar_type_of(dtype)) return dtype;
  }
  throw InvalidType(std::string(name) + ": expected " + (is_index(name) ? "int64 or int32" : "float32, bfloat16 or float16") +
                    ", got " + torch::headeronly::toString(type));
}

Tensor empty(const std::vector<std::int64_t>& sizes, DType dtype, Placement placement) {
  Tensor tensor = allocate(sizes, torch::stable::detail::to<std::int32_t>(torch::stable::detail::from(scalar_type_of(dtype))),
                           element_bytes(dtype), placement);
  if (placement.results == Results::on_device && placement.device.type == DeviceType::cpu) {
    prefer_huge_pages(tensor, static_cast<std::size_t>(tensor.numel() * element_bytes(dtype)));
  }
  return tensor;
}

Tensor with_contiguous_rows(const Tensor& tensor) {
  const std::int64_t rank = tensor.dim();
  if (rank == 0 || tensor.size(rank - 1) <= 1 || tensor.stride(rank - 1) == 1) return tensor;
  return torch::stable::contiguous(tensor);
}

OptionalTensor with_contiguous_rows(const OptionalTensor& tensor) {
  return tensor ? OptionalTensor(with_contiguous_rows(*tensor)) : std::nullopt;
}

ConstTensorView const_view(const char* name, const Tensor& tensor) { return view(name, tensor, tensor.const_data_ptr()); }

ConstTensorView const_view(const char* name, const OptionalTensor& tensor) {
  return tensor ? const_view(name, *tensor) : ConstTensorView();
}

TensorView mutable_view(const char* name, const Tensor& tensor) { return view(name, tensor, tensor.mutable_data_ptr()); }

TensorView mutable_view(const char* name, const OptionalTensor& tensor) {
  return tensor ? mutable_view(name, *tensor) : TensorView();
}

Scratch::Scratch(std::size_t bytes, Device device) : bytes_(bytes) {
  if (bytes == 0 && device.type == DeviceType::cuda) return;
  memory_ = allocate({static_cast<std::int64_t>(bytes + kAlignment)}, aoti_torch_dtype_uint8(), 1, {device});
  const auto address = reinterpret_cast<std::uintptr_t>(memory_->mutable_data_ptr());
  data_ = reinterpret_cast<void*>((address + kAlignment - 1) / kAlignment * kAlignment);
}

Parallel torch_pool() {
  if (forked.load(std::memory_order_relaxed)) return serial();
  Parallel parallel;
  parallel.threads = static_cast<int>(torch::stable::get_num_threads());
  parallel.run = run_on_torch_pool;
  return parallel;
}

}  // namespace flashqla::bindings
