#include "api/fetched.hpp"

#include <algorithm>

namespace flashqla::api {

void Fetched::take(IndexView& view) {
  const std::int64_t columns = std::max<std::int64_t>(view.size_1, 1);
  if (!view.present() || view.size_0 == 0) return;
  const std::int64_t ends[2] = {(view.size_0 - 1) * view.stride_0, (columns - 1) * view.stride_1};
  std::int64_t low = 0, high = 0;
  for (const std::int64_t end : ends) {
    low += std::min<std::int64_t>(end, 0);
    high += std::max<std::int64_t>(end, 0);
  }
  const std::int64_t bytes = element_bytes(view.dtype);
  std::vector<std::byte>& copy = copies_.emplace_back(static_cast<std::size_t>((high - low + 1) * bytes));
  implementation_.fetch(device_, copy.data(), static_cast<const std::byte*>(view.data) + low * bytes, copy.size(), stream_);
  view.data = copy.data() - low * bytes;
}

void Fetched::take(StateArguments& states) {
  take(states.read);
  take(states.write);
  take(states.accepted);
}

}  // namespace flashqla::api
