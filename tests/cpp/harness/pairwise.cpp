#include "harness/pairwise.hpp"

#include <random>
#include <set>
#include <tuple>

namespace flashqla::test {

namespace {

using Setting = std::pair<std::size_t, std::size_t>;  // option, setting
using Pair = std::pair<Setting, Setting>;

std::set<Pair> all_pairs(const std::vector<Option>& options) {
  std::set<Pair> pairs;
  for (std::size_t a = 0; a < options.size(); ++a) {
    for (std::size_t b = a + 1; b < options.size(); ++b) {
      for (std::size_t i = 0; i < options[a].size(); ++i) {
        for (std::size_t j = 0; j < options[b].size(); ++j) pairs.insert({{a, i}, {b, j}});
      }
    }
  }
  return pairs;
}

std::vector<Pair> pairs_of(const std::vector<std::size_t>& row) {
  std::vector<Pair> pairs;
  for (std::size_t a = 0; a < row.size(); ++a) {
    for (std::size_t b = a + 1; b < row.size(); ++b) pairs.push_back({{a, row[a]}, {b, row[b]}});
  }
  return pairs;
}

std::size_t open_pairs(const std::vector<std::size_t>& row, const std::set<Pair>& open) {
  std::size_t count = 0;
  for (const Pair& pair : pairs_of(row)) count += open.count(pair);
  return count;
}

}  // namespace

std::vector<Case> pairwise(const Case& base, const std::vector<Option>& options, std::uint64_t seed) {
  constexpr int kCandidates = 40;
  std::mt19937_64 random(seed);
  std::set<Pair> open = all_pairs(options);
  std::vector<Case> cases;
  while (!open.empty()) {
    const Pair must = *open.begin();
    std::vector<std::size_t> best;
    std::size_t best_count = 0;
    for (int candidate = 0; candidate < kCandidates; ++candidate) {
      std::vector<std::size_t> row;
      for (const Option& option : options) row.push_back(random() % option.size());
      row[must.first.first] = must.first.second;
      row[must.second.first] = must.second.second;
      const std::size_t count = open_pairs(row, open);
      if (count > best_count) std::tie(best, best_count) = std::tuple(row, count);
    }
    for (const Pair& pair : pairs_of(best)) open.erase(pair);
    Case c = base;
    for (std::size_t i = 0; i < options.size(); ++i) options[i][best[i]](c);
    c.seed = seed + cases.size();
    cases.push_back(c.packed() ? with_lengths(c, c.lengths, c.slack) : c);
  }
  return cases;
}

}  // namespace flashqla::test
