#include "cpu/recurrent_forward.hpp"

#include <algorithm>
#include <cstring>
#include <string_view>

#include "common/environment.hpp"
#include "common/parallel.hpp"
#include "cpu/cpuid.hpp"

namespace flashqla::cpu {
namespace {

constexpr std::int64_t kMostColumns = 128;

/// Side by side, a slab's f32 state stays in a first-level cache of 48 KB from token to token.
constexpr std::int64_t kSlabBytes = 32768;

/// State elements times tokens below which a second thread costs more than it saves, and pieces of work per thread above it.
constexpr std::int64_t kLeastWorkPerRun = 16 * 128 * 128;
constexpr std::int64_t kRunsPerThread = 4;

std::int64_t padded(std::int64_t n) { return (n + kRecurrentPadding - 1) / kRecurrentPadding * kRecurrentPadding; }

bool rows_in_order() {
  const std::string_view forced = environment::state_walk();
  return forced.empty() ? prefers_one_stream() : forced == "in_order";
}

/// With one token a sequence a key_value state streams from memory, best in long pieces of its rows; with more it should stay in
/// the first-level cache. In order the long pieces matter most.
std::int64_t slab_columns(const Problem& problem, bool in_order) {
  const bool one_token = problem.batch * problem.tokens < 2 * problem.sequences();
  std::int64_t columns = kMostColumns;
  if (!in_order && (!one_token || problem.state_layout == StateLayout::value_key))
    while (columns > 16 && columns * padded(problem.dim_k) * static_cast<std::int64_t>(sizeof(float)) > kSlabBytes) columns /= 2;
  return std::min(columns, problem.dim_v);
}

/// The slab in f32, prepared k and q, and the three rows between the sweeps; enough for any width of slabs.
std::size_t scratch_bytes(const Problem& problem) {
  const std::int64_t dim_k = padded(problem.dim_k), columns = padded(std::min(kMostColumns, problem.dim_v));
  return static_cast<std::size_t>(dim_k * columns + 2 * kPreparedTokens * dim_k + 3 * columns) * sizeof(float);
}

/// Rows of o that belong to no sequence.
void zero_slack_rows(const RecurrentForwardArguments& arguments) {
  const Problem& problem = arguments.inputs.problem;
  const auto row_bytes = static_cast<std::size_t>(problem.dim_v * element_bytes(arguments.o.dtype));
  for (std::int64_t token = arguments.inputs.sequences.end(); token < problem.tokens; ++token)
    for (std::int64_t head = 0; head < problem.heads_v; ++head) std::memset(arguments.o.row(0, token, head), 0, row_bytes);
}

}  // namespace

std::size_t recurrent_workspace_bytes(const RecurrentForward& descriptor, int threads) {
  return scratch_bytes(descriptor.problem) * static_cast<std::size_t>(threads);
}

void run_recurrent_forward(const RecurrentForwardArguments& arguments, std::byte* workspace, const Parallel& parallel,
                           RecurrentKernel kernel) {
  const Problem& problem = arguments.inputs.problem;
  RecurrentWork work;
  work.arguments = &arguments;
  work.in_order = rows_in_order();
  work.slab_columns = slab_columns(problem, work.in_order);
  work.slabs_per_head = (problem.dim_v + work.slab_columns - 1) / work.slab_columns;

  const std::int64_t slabs = work.slabs();
  const std::int64_t cost =
      (problem.batch * problem.tokens + arguments.inputs.sequences.count) * problem.heads_v * problem.dim_k * problem.dim_v;
  const std::int64_t most_runs = parallel.threads > 1 ? parallel.threads * kRunsPerThread : 1;
  const std::int64_t runs =
      std::clamp(cost / kLeastWorkPerRun, std::int64_t{1}, std::max(std::int64_t{1}, std::min(most_runs, slabs)));
  const std::size_t bytes_per_slot = scratch_bytes(problem);
  for_each_item(parallel, runs, [&](std::int64_t slot, std::int64_t run) {
    kernel(work, slabs * run / runs, slabs * (run + 1) / runs, slot_scratch(workspace, bytes_per_slot, slot));
  });
  zero_slack_rows(arguments);
}

}  // namespace flashqla::cpu
