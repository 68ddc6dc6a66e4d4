// Gradients of bf16 problems that are hard on few digits: what a recurrence never forgets (beta |k|^2 near 2, keys that repeat,
// no decay) and gradients that are left of terms which cancel. Of the implementations with bf16 dot products and of the one that
// a caller gets without asking for one. Inputs are drawn anew for each --gtest_random_seed.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>

#include "harness/compare.hpp"
#include "harness/run.hpp"

namespace flashqla::test {
namespace {

enum class Keys { random, one, alternating, near_one, kCount };
enum class Decay { none, weak, strong, kCount };

constexpr double kMixed = -1;  // beta between 0 and 2
constexpr double kBetas[] = {0, 0.5, 1, 1.3, 1.5, 1.8, 2, kMixed};
constexpr std::int64_t kShort[] = {1, 2, 4, 31, 33, 64, 70}, kLong[] = {193, 700, 1500};

struct Kind {
  Keys keys;
  double beta;
  Decay decay;
  bool no_values;
};

class Generator {
 public:
  explicit Generator(std::uint64_t seed) : random_(seed) {}

  std::int64_t below(std::int64_t n) { return static_cast<std::int64_t>(random_() % static_cast<std::uint64_t>(n)); }

  Tensors make(const Case& c, const Kind& kind) {
    Tensors inputs = make_inputs(c);
    const std::vector<double> keys[] = {unit_row(c.K), unit_row(c.K)};
    for (std::int64_t t = 0; t < c.T; ++t) {
      std::vector<double> row = kind.keys == Keys::alternating ? keys[t % 2] : keys[0];
      if (kind.keys == Keys::random) row = unit_row(c.K);
      if (kind.keys == Keys::near_one) {
        const std::vector<double> noise = unit_row(c.K);
        for (std::size_t d = 0; d < row.size(); ++d) row[d] += 0.03 * noise[d];
      }
      for (std::int64_t d = 0; d < c.K; ++d) inputs["k"].set(t * c.K + d, row[static_cast<std::size_t>(d)]);
      for (std::int64_t h = 0; h < c.Hv; ++h) {
        const double speed = kind.decay == Decay::none ? 0 : kind.decay == Decay::weak ? 0.01 : 5;
        inputs["g"].set(t * c.Hv + h, -speed * uniform());
        inputs["beta"].set(t * c.Hv + h, kind.beta == kMixed ? 2 * uniform() : kind.beta);
      }
    }
    if (kind.no_values) inputs["v"].fill(0);
    return inputs;
  }

 private:
  double uniform() { return std::uniform_real_distribution<double>()(random_); }

  std::vector<double> unit_row(std::int64_t size) {
    std::normal_distribution<double> normal;
    std::vector<double> row(static_cast<std::size_t>(size));
    double sum = 0;
    for (double& x : row) {
      x = normal(random_);
      sum += x * x;
    }
    for (double& x : row) x /= std::sqrt(sum);
    return row;
  }

  std::mt19937_64 random_;
};

/// Implementations to check: those with bf16 dot products by name, and the default, whose name is empty.
std::vector<std::string> implementations(const Case& c) {
  std::vector<std::string> names = cpu_implementations(Op::backward, c.dtype);
  std::erase_if(names, [](const std::string& name) { return name.find("bf16") == std::string::npos; });
  const std::string by_default = plan(ChunkBackward{problem_of(c)}).implementation;
  if (std::find(names.begin(), names.end(), by_default) == names.end()) names.push_back(by_default);
  return names;
}

void check(Case c, const Kind& kind, Generator& generator) {
  c.seed = static_cast<std::uint64_t>(generator.below(1 << 30));
  c.l2norm = generator.below(2) == 1;
  // With one key and beta |k|^2 = 1 nothing in the state outlives a token but what an initial state adds in other directions: d_g
  // would be nothing but what the rounding of |k|^2 leaves, in any arithmetic.
  const bool forgets = kind.keys == Keys::one && kind.beta == 1;
  c.initial = kind.no_values || forgets || generator.below(2) == 1;
  c.d_final = generator.below(2) == 1;
  const Tensors inputs = generator.make(c, kind);
  const Values expected = truth(c, inputs);
  for (const std::string& implementation : implementations(c)) {
    EXPECT_EQ(differences(c, inputs, run_case(c, inputs, {implementation, 1}), expected, 0), "")
        << implementation << ", keys " << static_cast<int>(kind.keys) << ", beta " << kind.beta << ", decay "
        << static_cast<int>(kind.decay) << ", no values " << kind.no_values << ": " << to_text(c);
  }
}

TEST(Bf16Gradients, OfHardProblems) {
  Case c = parse_case("op=backward K=64 V=64 dtype=bf16");
  Generator generator(static_cast<std::uint64_t>(::testing::UnitTest::GetInstance()->random_seed()));
  for (std::int64_t i = 0; i < static_cast<std::int64_t>(Keys::kCount) * static_cast<std::int64_t>(Decay::kCount); ++i) {
    for (double beta : kBetas) {
      Kind kind{static_cast<Keys>(i / 3), beta, static_cast<Decay>(i % 3), false};
      for (std::int64_t length : kShort) {
        if (generator.below(2) == 0) continue;
        c.T = length;
        kind.no_values = generator.below(3) == 0;
        check(c, kind, generator);
      }
      if (generator.below(4) > 0) continue;
      c.T = kLong[generator.below(3)];
      check(c, kind, generator);
    }
  }
}

}  // namespace
}  // namespace flashqla::test
