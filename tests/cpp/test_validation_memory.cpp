// Where tensors lie: overlaps of whole calls, and the geometry that decides them against brute force over small views.
#include <random>
#include <set>

#include "api/memory.hpp"
#include "calls.hpp"

namespace flashqla::test {
namespace {

TEST(ValidationMemory, OutputOverAnInput) {
  Forward call;
  call.tensors.o.data = const_cast<void*>(call.tensors.inputs.v.data);
  expect_refused<InvalidArgument>(call, {"o: expected memory apart from that of v, got an overlap"});
  Forward small;
  small.tensors.g_cumulative = small.store.tensor(DType::f32, {2, 5, 4});
  small.tensors.g_cumulative.data = const_cast<void*>(small.tensors.inputs.g.data);
  expect_refused<InvalidArgument>(small, {"g_cumulative: expected memory apart from that of g, got an overlap"});
  Forward indices(packed_problem(1));
  indices.tensors.inputs.cu_seqlens = ConstTensorView(indices.tensors.o.data, DType::i64, {2});
  expect_refused<InvalidArgument>(indices, {"o: expected memory apart from that of cu_seqlens, got an overlap"});
}

TEST(ValidationMemory, OutputOverAnOutput) {
  Recurrent call;
  call.tensors.o.data = call.tensors.states.final_state.data;  // o is the smaller: it reaches no third tensor
  expect_refused<InvalidArgument>(call, {"o: expected memory apart from that of final_state, got an overlap"});
}

TEST(ValidationMemory, OutputOverItself) {
  Forward call;
  call.tensors.o.strides[2] = 0;
  expect_refused<InvalidArgument>(
      call, {"o: expected strides that give every element memory of its own", "got strides [160, 32, 0, 1]"});
  call.tensors.o.strides = {160, 32, 4, 1};
  expect_refused<InvalidArgument>(
      call, {"o: expected strides that give every element memory of its own", "got strides [160, 32, 4, 1]"});
}

TEST(ValidationMemory, SlicesOfOneProjectionAndItsOutput) {
  Forward call;  // [B, T, q | k | v | o] in one buffer
  constexpr std::int64_t kRow = 2 * 16 + 2 * 16 + 4 * 8 + 4 * 8;
  const TensorView buffer = call.store.tensor(DType::f32, {2, 5, kRow});
  const auto slice = [&](std::int64_t begin, std::int64_t heads, std::int64_t dim) {
    TensorView view(static_cast<float*>(buffer.data) + begin, DType::f32, {2, 5, heads, dim});
    view.strides = {5 * kRow, kRow, dim, 1};
    return view;
  };
  call.tensors.inputs.q = slice(0, 2, 16);
  call.tensors.inputs.k = slice(32, 2, 16);
  call.tensors.inputs.v = slice(64, 4, 8);
  call.tensors.o = slice(96, 4, 8);
  expect_accepted(call);
  call.tensors.o = slice(95, 4, 8);
  expect_refused<InvalidArgument>(call, {"o: expected memory apart from that of v, got an overlap"});
}

/// Addresses of all bytes of a view.
std::set<std::uintptr_t> bytes_of(const ConstTensorView& view) {
  std::set<std::uintptr_t> bytes;
  std::int64_t count = 1;
  for (int d = 0; d < view.rank; ++d) count *= view.sizes[static_cast<std::size_t>(d)];
  for (std::int64_t i = 0; i < count; ++i) {
    std::int64_t rest = i, offset = 0;
    for (int d = view.rank - 1; d >= 0; --d) {
      const auto at = static_cast<std::size_t>(d);
      offset += rest % view.sizes[at] * view.strides[at];
      rest /= view.sizes[at];
    }
    const std::int64_t size = element_bytes(view.dtype);
    for (std::int64_t b = 0; b < size; ++b) {
      bytes.insert(reinterpret_cast<std::uintptr_t>(view.data) + static_cast<std::uintptr_t>(offset * size + b));
    }
  }
  return bytes;
}

class RandomViews {
 public:
  ConstTensorView next() {
    ConstTensorView view;
    view.data = reinterpret_cast<const void*>(std::uintptr_t{100000} + static_cast<std::uintptr_t>(8 * between(0, 30)));
    view.dtype = static_cast<DType>(between(0, 5));
    view.rank = static_cast<int>(between(1, 4));
    for (std::size_t d = 0; d < static_cast<std::size_t>(view.rank); ++d) {
      view.sizes[d] = between(0, 8) == 0 ? 0 : between(1, 4);
      view.strides[d] = kStrides[static_cast<std::size_t>(between(0, 15))];
    }
    return view;
  }

 private:
  static constexpr std::int64_t kStrides[] = {0, 1, 1, 2, 3, 4, 4, 6, 8, 8, 12, 16, 32, -1, -4, -16};
  std::int64_t between(std::int64_t low, std::int64_t high) {
    return std::uniform_int_distribution<std::int64_t>(low, high)(random_);
  }
  std::mt19937_64 random_{7};
};

TEST(MemoryGeometry, DisjointnessIsNeverClaimedWrongly) {
  RandomViews views;
  int disjoint = 0, claimed = 0;
  for (int i = 0; i < 20000; ++i) {
    const ConstTensorView x = views.next(), y = views.next();
    const std::set<std::uintptr_t> x_bytes = bytes_of(x), y_bytes = bytes_of(y);
    bool meet = false;
    for (const std::uintptr_t byte : x_bytes) meet = meet || y_bytes.contains(byte);
    const bool claim = api::certainly_disjoint(x, y);
    ASSERT_EQ(claim, api::certainly_disjoint(y, x));
    ASSERT_FALSE(meet && claim);
    disjoint += !meet;
    claimed += claim;
  }
  EXPECT_GT(claimed, disjoint * 9 / 10);
}

TEST(MemoryGeometry, DistinctnessIsNeverClaimedWrongly) {
  RandomViews views;
  int distinct = 0, claimed = 0;
  for (int i = 0; i < 20000; ++i) {
    const ConstTensorView x = views.next();
    if (api::num_elements(x) == 0) continue;
    const bool truth = bytes_of(x).size() == static_cast<std::size_t>(api::num_elements(x) * element_bytes(x.dtype));
    const bool claim = api::elements_distinct(x);
    ASSERT_FALSE(claim && !truth);
    distinct += truth;
    claimed += claim;
  }
  EXPECT_GT(claimed, distinct * 9 / 10);
}

}  // namespace
}  // namespace flashqla::test
