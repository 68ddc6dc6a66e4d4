// The harness itself: a test that cannot fail proves nothing.
#include <gtest/gtest.h>

#include <cmath>

#include "common/scalar.hpp"
#include "harness/compare.hpp"
#include "harness/pairwise.hpp"
#include "harness/run.hpp"

namespace flashqla::test {
namespace {

TEST(Harness, CasesRoundTripThroughText) {
  const Case c =
      parse_case("op=backward lengths=40+0+24 slack=3 Hq=2 Hv=4 dtype=bf16 gate=computed beta=sigmoid scale=0.5 strides=padded");
  EXPECT_EQ(to_text(c), to_text(parse_case(to_text(c))));
  EXPECT_EQ(c.T, 67);
  EXPECT_THROW(parse_case("Tt=3"), std::runtime_error);
}

TEST(Harness, SeesWritesOutsideAView) {
  const Tensor tensor(DType::bf16, {2, 3}, {5, 1}, 1);
  EXPECT_TRUE(tensor.gaps_are_poison());
  auto* data = static_cast<std::uint16_t*>(tensor.view().data);
  data[2] = 0;
  EXPECT_TRUE(tensor.gaps_are_poison());
  data[3] = 0;
  EXPECT_FALSE(tensor.gaps_are_poison());
}

TEST(Harness, InputsAreNaNWhereNothingMayRead) {
  const Tensors inputs = make_inputs(parse_case("lengths=3+2 slack=2 K=2 V=2 initial=1 pool=separate"));
  EXPECT_FALSE(std::isnan(inputs.at("q").get(9)));
  EXPECT_TRUE(std::isnan(inputs.at("q").get(10)));
  EXPECT_TRUE(std::isnan(inputs.at("g").get(5)));
}

TEST(Harness, ErrorsAreSeen) {
  EXPECT_DOUBLE_EQ(relative_rms({1, 2}, {1, 2}), 0);
  EXPECT_DOUBLE_EQ(relative_rms({3, 0}, {0, 4}), 1.25);
  EXPECT_TRUE(std::isinf(relative_rms({NAN, 2}, {1, 2})));
  EXPECT_DOUBLE_EQ(relative_rms({0, 2}, {0, 0}), std::sqrt(2.0));
  EXPECT_DOUBLE_EQ(worst_head({1, 2, 1, 4}, {1, 2, 1, 2}, 2), std::sqrt(0.5));
  EXPECT_EQ(bit_differences({{"o", {0.0}}}, {{"o", {-0.0}}}), " o");
}

TEST(Harness, PairsAreAllCovered) {
  const auto set = [](std::int64_t Case::* member, std::int64_t value) { return [=](Case& c) { c.*member = value; }; };
  const std::vector<Option> options{{set(&Case::K, 1), set(&Case::K, 2)},
                                    {set(&Case::V, 1), set(&Case::V, 2), set(&Case::V, 3)},
                                    {set(&Case::T, 1), set(&Case::T, 2), set(&Case::T, 3)}};
  const std::vector<Case> cases = pairwise({}, options, 3);
  for (std::int64_t V : {1, 2, 3}) {
    for (std::int64_t T : {1, 2, 3}) {
      EXPECT_TRUE(std::any_of(cases.begin(), cases.end(), [=](const Case& c) { return c.V == V && c.T == T; })) << V << T;
    }
  }
  EXPECT_LE(cases.size(), 12u);
}

TEST(Scalar, SixteenBitTypesRoundOnceToNearestEven) {
  std::uint16_t bits = 0;
  const auto rounded = [&](DType dtype, double value) {
    store_scalar(&bits, dtype, 0, value);
    return load_scalar(&bits, dtype, 0);
  };
  for (std::uint32_t b = 0; b < 0x7c00; ++b) {  // every finite half, and the halfway points
    const double x = static_cast<double>(f16_to_float(static_cast<std::uint16_t>(b)));
    const double next = static_cast<double>(f16_to_float(static_cast<std::uint16_t>(b + 1)));
    ASSERT_EQ(rounded(DType::f16, -x), -x);
    if (b == 0x7bff) break;
    const double middle = (x + next) / 2;
    ASSERT_EQ(rounded(DType::f16, middle), b % 2 == 0 ? x : next) << b;
    ASSERT_EQ(rounded(DType::f16, std::nextafter(middle, 1e9)), next) << b;
    ASSERT_EQ(rounded(DType::f16, std::nextafter(middle, -1e9)), x) << b;
  }
  for (std::uint32_t b = 0; b < 0x7f7f; ++b) {
    const double x = static_cast<double>(bf16_to_float(static_cast<std::uint16_t>(b)));
    const double next = static_cast<double>(bf16_to_float(static_cast<std::uint16_t>(b + 1)));
    const double middle = (x + next) / 2;
    ASSERT_EQ(rounded(DType::bf16, x), x);
    ASSERT_EQ(rounded(DType::bf16, middle), b % 2 == 0 ? x : next) << b;
    ASSERT_EQ(rounded(DType::bf16, std::nextafter(middle, 1e300)), next) << b;
    ASSERT_EQ(rounded(DType::bf16, -std::nextafter(middle, -1e300)), -x) << b;
  }
  EXPECT_TRUE(std::isnan(rounded(DType::f16, NAN)) && std::isnan(rounded(DType::bf16, NAN)));
  EXPECT_TRUE(std::isinf(rounded(DType::f16, 65520)));
  EXPECT_EQ(rounded(DType::f16, 65519.99), 65504);
}

}  // namespace
}  // namespace flashqla::test
