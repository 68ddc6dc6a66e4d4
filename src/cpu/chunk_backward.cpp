// Host side of chunk_backward: the workspace and the split of the work. An item is a (sequence, q/k head); items are independent
// but for d_a_log and d_dt_bias, whose parts are summed at the end in the order of the sequences.
#include "cpu/chunk_backward.hpp"

#include "common/parallel.hpp"

namespace flashqla::cpu {

namespace {

constexpr std::size_t kAlignment = 64;

std::size_t aligned(std::size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

/// The workspace: [gate sums][scratch of each thread][stash]. The stash has either a place for each thread, as large as the
/// longest sequence needs, or, where that is less, one for each item.
struct Layout {
  BackwardShape shape;
  std::int64_t slots;
  std::int64_t total_places;              // of a value head, upper bound over all sequences
  std::int64_t longest_places;            // of the longest sequence
  std::size_t gate_sums, scratch, stash;  // bytes
  bool stash_of_items;

  Layout(const Problem& problem, std::int64_t longest, std::int64_t threads, const BackwardKernel& kernel, bool saved)
      : shape(problem, saved) {
    const std::int64_t sequences = problem.sequences();
    slots = std::max<std::int64_t>(1, std::min(threads, sequences * problem.heads_qk));
    longest_places = shape.places(longest);
    total_places = place(sequences, problem.batch * problem.tokens);
    const std::int64_t by_slot = slots * shape.group * longest_places, by_item = problem.heads_v * total_places;
    stash_of_items = !saved && by_item < by_slot;
    gate_sums = aligned(static_cast<std::size_t>(sequences * problem.heads_v * 2) * sizeof(double));
    scratch = aligned(kernel.scratch_bytes(shape));
    stash = static_cast<std::size_t>(shape.stash(stash_of_items ? by_item : by_slot)) * sizeof(float);
  }

  /// First place of sequence n's segments among those of all sequences, when it begins at row `begin` of all rows: at least as
  /// many places as it has segments.
  std::int64_t place(std::int64_t n, std::int64_t begin) const { return begin / shape.segment_tokens() + n; }
  std::size_t bytes() const { return gate_sums + static_cast<std::size_t>(slots) * scratch + stash; }
};

void zero_slack(const InputArguments& inputs, const MutableTokenView& view, std::int64_t heads, std::int64_t size) {
  if (!view.present()) return;
  for (std::int64_t t = inputs.sequences.end(); t < inputs.sequences.tokens; ++t) {
    for (std::int64_t h = 0; h < heads; ++h) {
      for (std::int64_t d = 0; d < size; ++d) view.store(0, t, h, d, 0.0);
    }
  }
}

void zero_slack(const ChunkBackwardArguments& arguments) {
  const InputArguments& inputs = arguments.inputs;
  if (!inputs.sequences.packed()) return;
  const Problem& problem = inputs.problem;
  zero_slack(inputs, arguments.d_q, problem.heads_qk, problem.dim_k);
  zero_slack(inputs, arguments.d_k, problem.heads_qk, problem.dim_k);
  zero_slack(inputs, arguments.d_v, problem.heads_v, problem.dim_v);
  zero_slack(inputs, arguments.d_g, problem.heads_v, 1);
  zero_slack(inputs, arguments.d_beta, problem.heads_v, 1);
}

void sum_gate_gradients(const ChunkBackwardArguments& arguments, const double* gate_sums) {
  const std::int64_t heads = arguments.inputs.problem.heads_v;
  for (std::int64_t head = 0; head < heads; ++head) {
    double d_a_log = 0.0, d_dt_bias = 0.0;
    for (std::int64_t n = 0; n < arguments.inputs.sequences.count; ++n) {
      d_a_log += gate_sums[(n * heads + head) * 2];
      d_dt_bias += gate_sums[(n * heads + head) * 2 + 1];
    }
    if (arguments.d_a_log.present()) arguments.d_a_log.store(head, d_a_log);
    if (arguments.d_dt_bias.present()) arguments.d_dt_bias.store(head, d_dt_bias);
  }
}

}  // namespace

std::size_t chunk_backward_workspace(const ChunkBackward& descriptor, int threads, const BackwardKernel& kernel) {
  const std::int64_t longest = descriptor.max_sequence_tokens < 0 ? descriptor.problem.tokens : descriptor.max_sequence_tokens;
  return std::max(Layout(descriptor.problem, longest, threads, kernel, false).bytes(),
                  Layout(descriptor.problem, longest, threads, kernel, true).bytes());
}

void chunk_backward(const ChunkBackwardArguments& arguments, std::byte* workspace, const Parallel& parallel,
                    const BackwardKernel& kernel) {
  const InputArguments& inputs = arguments.inputs;
  const Problem& problem = inputs.problem;
  const bool saved = arguments.saved != nullptr && SavedHead::holds(arguments.saved, kernel.saved_layout);
  const Layout layout(problem, arguments.max_sequence_tokens, parallel.run == nullptr ? 1 : parallel.threads, kernel, saved);
  auto* gate_sums = reinterpret_cast<double*>(workspace);
  std::byte* scratch = workspace + layout.gate_sums;
  auto* stash = reinterpret_cast<float*>(scratch + static_cast<std::size_t>(layout.slots) * layout.scratch);
  const std::int64_t items = inputs.sequences.count * problem.heads_qk;
  for_each_item(parallel, items, [&](std::int64_t slot, std::int64_t index) {
    const std::int64_t n = index / problem.heads_qk, head_qk = index % problem.heads_qk;
    std::int64_t place = slot * layout.shape.group * layout.longest_places;
    if (layout.stash_of_items) {
      const std::int64_t begin = inputs.sequences.batch(n) * problem.tokens + inputs.sequences.begin(n);
      const std::int64_t here = layout.place(n, begin), next = layout.place(n + 1, begin + inputs.sequences.length(n));
      place = here * problem.heads_v + head_qk * layout.shape.group * (next - here);
    }
    const std::int64_t head = head_qk * layout.shape.group;
    kernel.run({arguments, layout.shape, n, head_qk, slot_scratch(scratch, layout.scratch, slot),
                stash + layout.shape.stash(place), gate_sums + (n * problem.heads_v + head) * 2});
  });
  sum_gate_gradients(arguments, gate_sums);
  zero_slack(arguments);
}

}  // namespace flashqla::cpu
