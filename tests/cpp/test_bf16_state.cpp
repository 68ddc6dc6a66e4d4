// What bf16 implementations keep in the state over thousands of tokens: rounding must be forgotten, or be too small to add up.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>

#include "harness/compare.hpp"
#include "harness/run.hpp"

namespace flashqla::test {
namespace {

enum class Keys { random, one, near_one, few, unit_vectors };
enum class ValueKind { random, constant };

class Generator {
 public:
  explicit Generator(const Case& c) : c_(c), random_(c.seed), first_(unit_row(random_)) {}

  /// Keys of length `length`. beta is that of |k| = 1; -1 draws it between 0 and 2.
  Tensors make(Keys keys, ValueKind kind, double beta, double length) {
    Tensors inputs = make_inputs(c_);
    Tensor &k = inputs["k"], &v = inputs["v"], &betas = inputs["beta"];
    for (std::int64_t t = 0; t < c_.T; ++t) {
      const std::vector<double> row = key(keys);
      for (std::int64_t d = 0; d < c_.K; ++d) k.set(t * c_.K + d, length * row[static_cast<std::size_t>(d)]);
      const double drawn = 2 / (1 + std::exp(-2 * std::normal_distribution<double>()(random_)));
      betas.set(t, (beta < 0 ? drawn : beta) / (length * length));
      for (std::int64_t d = 0; kind == ValueKind::constant && t > 0 && d < c_.V; ++d)
        v.set(t * c_.V + d, v.get(d) + 0.01 * v.get(t * c_.V + d));
    }
    return inputs;
  }

 private:
  std::vector<double> unit_row(std::mt19937_64& random) const {
    std::normal_distribution<double> normal;
    std::vector<double> row(static_cast<std::size_t>(c_.K));
    double sum = 0;
    for (double& x : row) {
      x = normal(random);
      sum += x * x;
    }
    for (double& x : row) x /= std::sqrt(sum);
    return row;
  }

  std::vector<double> key(Keys keys) {
    if (keys == Keys::one) return first_;
    if (keys == Keys::few) {
      std::mt19937_64 of_key(random_() % 5);
      return unit_row(of_key);
    }
    std::vector<double> row = unit_row(random_);
    const std::size_t one = random_() % row.size();
    for (std::size_t d = 0; d < row.size(); ++d) {
      if (keys == Keys::near_one) row[d] = first_[d] + 0.03 * row[d];
      if (keys == Keys::unit_vectors) row[d] = d == one ? 1 : 0;
    }
    return row;
  }

  const Case& c_;
  std::mt19937_64 random_;
  std::vector<double> first_;
};

TEST(Bf16State, RoundingIsForgottenOrSmall) {
  Case c = parse_case("K=64 V=32 dtype=bf16");
  for (Keys keys : {Keys::random, Keys::one, Keys::near_one, Keys::few, Keys::unit_vectors}) {
    for (double beta : {0.05, 0.3, 0.7, 1.0, 1.3, 1.39, 1.45, 1.7, 1.9, 2.0, -1.0}) {
      for (Data data : {Data::no_decay, Data::usual}) {
        ++c.seed;
        c.data = data;
        c.T = 1500 + 37 * static_cast<std::int64_t>(c.seed % 8);
        const ValueKind kind = c.seed / 2 % 2 == 0 ? ValueKind::random : ValueKind::constant;
        const double length = c.seed % 3 == 0 ? 0.2 : c.seed % 3 == 1 ? 1 : 5;
        const Tensors inputs = Generator(c).make(keys, kind, beta, length);
        const Values expected = truth(c, inputs);
        for (const std::string& implementation : cpu_implementations(Op::forward, c.dtype)) {
          EXPECT_EQ(differences(c, inputs, run_case(c, inputs, {implementation, 1}), expected, 0), "")
              << implementation << ", keys " << static_cast<int>(keys) << ", beta " << beta << ", seed " << c.seed;
        }
      }
    }
  }
}

// Gradients pass through the same states, and through those of a recurrence that goes back. Of the implementation that a caller
// gets without asking for one, whatever the keys and betas.
TEST(Bf16State, GradientsByDefault) {
  Case c = parse_case("op=backward K=64 V=64 dtype=bf16 initial=1 d_final=1");
  for (Keys keys : {Keys::random, Keys::one, Keys::near_one, Keys::few, Keys::unit_vectors}) {
    for (double beta : {0.3, 1.0, 1.3, 1.9, 2.0}) {
      ++c.seed;
      c.data = c.seed % 2 == 0 ? Data::no_decay : Data::usual;
      c.T = 700 + 37 * static_cast<std::int64_t>(c.seed % 8);
      const ValueKind kind = c.seed / 2 % 2 == 0 ? ValueKind::random : ValueKind::constant;
      const Tensors inputs = Generator(c).make(keys, kind, beta, c.seed % 3 == 0 ? 0.2 : 1);
      const std::string implementation = plan(ChunkBackward{problem_of(c)}).implementation;
      EXPECT_EQ(differences(c, inputs, run_case(c, inputs, {implementation, 1}), truth(c, inputs), 0), "")
          << implementation << ", keys " << static_cast<int>(keys) << ", beta " << beta << ", seed " << c.seed;
    }
  }
}

// A number of v that is not finite, or nearly so, at a token that is written together with others: its column of its head alone.
TEST(Bf16State, ABadColumnStaysAlone) {
  const Case c = parse_case("T=70 Hv=2 K=64 V=48 dtype=bf16 initial=1");
  const std::int64_t token = 41, head = 1;
  const Tensors clean = make_inputs(c);
  for (double bad : {std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity(), 3e38}) {
    for (std::int64_t column : {0, 17, 40}) {
      Tensors inputs = make_inputs(c);
      inputs["v"].set((token * c.Hv + head) * c.V + column, bad);
      for (const std::string& implementation : cpu_implementations(Op::forward, c.dtype)) {
        Values expected = run_case(c, clean, {implementation, 1}), values = run_case(c, inputs, {implementation, 1});
        for (std::int64_t t = token; t < c.T; ++t) {
          const auto i = static_cast<std::size_t>((t * c.Hv + head) * c.V + column);
          values["o"][i] = expected["o"][i];
        }
        for (std::int64_t k = 0; k < c.K; ++k) {
          const auto i = static_cast<std::size_t>((head * c.K + k) * c.V + column);
          if (!std::isfinite(bad)) {
            EXPECT_FALSE(std::isfinite(values["final_state"][i])) << implementation;
          }
          values["final_state"][i] = expected["final_state"][i];
        }
        EXPECT_EQ(bit_differences(values, expected), "") << implementation << " " << bad;
      }
    }
  }
}

}  // namespace
}  // namespace flashqla::test
