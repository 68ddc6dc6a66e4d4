// Every implementation against the truth at every length, every width and every kind of data.
#include <gtest/gtest.h>

#include "harness/compare.hpp"
#include "harness/run.hpp"

namespace flashqla::test {
namespace {

constexpr Op kChunkOps[] = {Op::forward, Op::backward};
constexpr Op kAllOps[] = {Op::forward, Op::backward, Op::recurrent};
constexpr DType kDTypes[] = {DType::f32, DType::bf16, DType::f16};

TEST(CpuLengths, Implementations) {
  for (Op op : kAllOps) EXPECT_FALSE(cpu_implementations(op, DType::f32).empty()) << "operation " << static_cast<int>(op);
}

TEST(CpuLengths, Each) {
  for (std::int64_t T = 0; T <= 193; ++T) {
    for (Op op : kAllOps) {
      if (op == Op::recurrent && T > 70) continue;
      Case c;
      c.op = op;
      c.T = T;
      c.Hq = 1;
      c.Hv = 2;
      c.K = T % 5 == 4 ? 32 : 16;
      c.V = T % 7 == 3 ? 48 : 16;
      c.dtype = kDTypes[T % 3];
      c.initial = T % 2 == 0;
      c.d_final = T % 4 < 2;
      c.l2norm = T % 3 == 1;
      c.extras = T % 2 == 1;
      c.seed = static_cast<std::uint64_t>(T) + 1;
      EXPECT_EQ(check_all(c, 1 + static_cast<int>(T % 2)), "");
      c.saved = true;
      if (op == Op::backward) {
        EXPECT_EQ(check_all(c, 2), "");
      }
    }
  }
}

// The sums of a few tokens average no rounding away.
TEST(CpuLengths, FewTokensOfWideHeads) {
  for (std::int64_t T : {1, 2, 3, 4, 8, 17, 40, 70}) {
    for (int l2norm : {0, 1}) {
      for (std::uint64_t seed = 1; seed <= 4; ++seed) {
        Case c = parse_case("op=backward Hq=1 Hv=2 K=128 V=128 dtype=bf16 d_final=1");
        c.T = T;
        c.l2norm = l2norm == 1;
        c.seed = seed;
        EXPECT_EQ(check_all(c), "");
      }
    }
  }
}

TEST(CpuLengths, Thousands) {
  for (Op op : kChunkOps) {
    for (const char* text :
         {"T=2048 Hv=2 K=64 V=64 initial=1 d_final=1", "T=3001 K=32 V=128 dtype=bf16 d_final=1",
          "T=4096 Hv=2 K=16 V=16 dtype=f16 l2norm=1", "T=1500 Hv=2 K=128 V=128 dtype=bf16 gate=computed beta=sigmoid l2norm=1"}) {
      Case c = parse_case(text);
      c.op = op;
      for (const std::string& implementation : cpu_implementations(op, c.dtype)) EXPECT_EQ(check_case(c, implementation, 2), "");
    }
  }
}

TEST(CpuLengths, RaggedPacks) {
  for (Op op : kAllOps) {
    for (DType dtype : kDTypes) {
      Case c = with_lengths({}, {0, 1, 63, 64, 65, 0, 0, 127, 1, 1, 200, 0}, 5);
      c.op = op;
      c.dtype = dtype;
      c.Hq = 2;
      c.Hv = 4;
      c.K = c.V = 32;
      c.initial = c.d_final = true;
      EXPECT_EQ(check_all(c, 3), "");
      c.saved = true;
      if (op == Op::backward) {
        EXPECT_EQ(check_all(c, 3), "");
      }
    }
  }
}

TEST(CpuWidths, Each) {
  std::vector<std::int64_t> widths;
  for (std::int64_t width = 1; width <= 17; ++width) widths.push_back(width);
  for (std::int64_t width : {31, 48, 64, 80, 96, 100, 128, 160, 192, 256}) widths.push_back(width);
  for (std::size_t i = 0; i < widths.size(); ++i) {
    for (std::size_t other : {i, (i + 7) % widths.size(), (i + 16) % widths.size()}) {
      Case c;
      c.T = 66 + static_cast<std::int64_t>(i % 3) * 30;
      c.K = widths[i];
      c.V = widths[other];
      c.dtype = kDTypes[(i + other) % 3];
      c.initial = c.d_final = true;
      c.layout = i % 2 == 0 ? StateLayout::key_value : StateLayout::value_key;
      c.seed = i + 1;
      for (Op op : kAllOps) {
        c.op = op;
        if (op == Op::recurrent) c.T = 3;
        EXPECT_EQ(check_all(c), "");
      }
    }
  }
}

TEST(CpuData, EachKind) {
  for (Data data : {Data::usual, Data::strong_decay, Data::no_decay, Data::growth, Data::forget, Data::beta_zero, Data::beta_two,
                    Data::repeated_keys, Data::unnormalised}) {
    for (DType dtype : kDTypes) {
      for (Op op : kAllOps) {
        Case c = parse_case("T=300 Hq=2 Hv=4 K=64 V=64 initial=1 d_final=1");
        c.op = op;
        c.data = data;
        c.dtype = dtype;
        if (op == Op::recurrent) c.T = 9;
        for (const std::string& implementation : cpu_implementations(op, c.dtype)) EXPECT_EQ(check_case(c, implementation), "");
      }
    }
  }
}

}  // namespace
}  // namespace flashqla::test
