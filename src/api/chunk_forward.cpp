// plan, run and explain of chunk_forward.
#include "api/fetched.hpp"
#include "api/inputs.hpp"
#include "api/operation.hpp"
#include "api/states.hpp"

namespace flashqla {

using namespace api;

namespace {

constexpr DTypeSet kIndexTypes{DType::i32, DType::i64};

void check_stored(Checker& checker, const ChunkForward& d, const ChunkForwardTensors& t) {
  const Problem& p = d.problem;
  if (d.stored_states == StoredStates::none) {
    require_absent(t.stored, "stored", "only with StoredStates other than none");
  } else {
    require_state(checker, t.stored, "stored", p, {"rows", kAnySize}, small_dtypes(p), Role::state_output);
  }
  if (d.stored_states == StoredStates::every) {
    checker.optional(t.stored_rows, {"stored_rows", {{"stored states", kAnySize}}, kIndexTypes});
    checker.optional(t.prefix_lengths, {"prefix_lengths", {{"N", p.sequences()}}, kIndexTypes});
  } else {
    require_absent(t.stored_rows, "stored_rows", "only with StoredStates::every");
    require_absent(t.prefix_lengths, "prefix_lengths", "only with StoredStates::every");
  }
}

void check_prefixes(const ChunkForwardArguments& arguments) {
  if (!arguments.prefix_lengths.present()) return;
  constexpr std::int64_t kLongest = std::int64_t{1} << 62;
  for (std::int64_t n = 0; n < arguments.inputs.sequences.count; ++n) {
    const std::int64_t prefix = arguments.prefix(n);
    if (prefix < 0 || prefix > kLongest) {
      invalid("prefix_lengths", "0 to 2^62", std::to_string(prefix) + " at [" + std::to_string(n) + "]");
    }
  }
}

std::int64_t count_stored(const ChunkForwardArguments& arguments) {
  std::int64_t count = 0;
  for (std::int64_t n = 0; n < arguments.inputs.sequences.count; ++n) count += arguments.stored_count(n);
  return count;
}

void check_stored_rows(const ChunkForwardArguments& arguments, const ChunkForwardTensors& t) {
  if (arguments.stored_states == StoredStates::none) return;
  const std::int64_t count = count_stored(arguments), rows = t.stored.sizes[0];
  if (!t.stored_rows.present()) {
    if (rows < count) invalid("stored", "at least " + std::to_string(count) + " rows", std::to_string(rows));
    return;
  }
  if (t.stored_rows.sizes[0] != count) {
    invalid("stored_rows", "one entry for each of " + std::to_string(count) + " stored states", shape_text(t.stored_rows));
  }
  for (std::int64_t i = 0; i < count; ++i) check_row("stored_rows", i, arguments.stored_rows.at(i), rows);
}

void check_written_rows(const ChunkForwardArguments& arguments, const ChunkForwardTensors& t, std::byte* scratch) {
  const StateTensors& states = t.states;
  const std::int64_t sequences = arguments.inputs.sequences.count;
  const ConstTensorView final_state = states.final_state, stored = t.stored;
  const auto shared = [](const ConstTensorView& x, const ConstTensorView& y) {
    return x.present() && y.present() && same_pool(x, y);
  };
  if (!states.write.present() && !t.stored_rows.present() && !shared(stored, states.initial_state) &&
      !shared(stored, final_state))
    return;
  RowBook book(scratch);
  if (final_state.present()) {
    book.begin("write", final_state);
    for (std::int64_t n = 0; n < sequences; ++n) book.add(arguments.states.write_row(n), n);
  }
  if (stored.present()) {
    book.begin("stored_rows", stored);
    std::int64_t place = 0;
    for (std::int64_t n = 0; n < sequences; ++n) {
      const std::int64_t count = arguments.stored_count(n);
      const bool padding = arguments.states.padding(n);
      for (std::int64_t i = 0; i < count && !padding; ++i) book.add(arguments.stored_row(place + i), n);
      place += count;
    }
  }
  book.check(arguments.states, states.initial_state, sequences);
}

std::int64_t max_writes(const ChunkForward& d) { return d.problem.sequences() + max_stored_states(d); }

/// What depends on the contents of tensors.
void check_contents(const ChunkForwardArguments& arguments, const ChunkForwardTensors& t, std::byte* scratch) {
  check_offsets(arguments.inputs.sequences);
  check_state_indices(arguments.states, t.states, arguments.inputs.problem.sequences());
  check_prefixes(arguments);
  check_stored_rows(arguments, t);
  check_written_rows(arguments, t, scratch);
}

ChunkForwardArguments checked(const ChunkForward& d, const ChunkForwardTensors& t, std::byte* scratch, Memory memory) {
  const Problem& p = d.problem;
  Checker checker(memory);
  ChunkForwardArguments arguments;
  arguments.inputs = check_inputs(checker, p, t.inputs);
  require_absent(t.states.accepted, "accepted", "only to recurrent_forward");
  arguments.states = check_states(checker, p, t.states);
  const Dimension batch{"B", p.batch}, tokens{"T", p.tokens}, heads{"Hv", p.heads_v};
  checker.require(t.o, {"o", {batch, tokens, heads, {"V", p.dim_v}}, {p.dtype}, Role::output, LastDimension::contiguous});
  check_stored(checker, d, t);
  checker.optional(t.g_cumulative, {"g_cumulative", {batch, tokens, heads}, exact_dtypes(p), Role::output});
  checker.optional(t.a,
                   {"a", {batch, tokens, heads, {"chunk", kTokensPerChunk}}, {p.dtype}, Role::output, LastDimension::contiguous});
  if (t.prefix_lengths.present()) require_absent(t.saved, "saved", "only without prefix_lengths");
  check_saved(checker, p, t.saved, Role::output);
  checker.check_overlaps();
  arguments.o = token_view(t.o);
  arguments.stored_states = d.stored_states;
  arguments.states_every = d.states_every;
  arguments.stored = state_view(t.stored, p.state_layout);
  arguments.stored_rows = index_view(t.stored_rows);
  arguments.prefix_lengths = index_view(t.prefix_lengths);
  arguments.g_cumulative = token_view(t.g_cumulative);
  arguments.a = token_view(t.a);
  arguments.saved = static_cast<float*>(t.saved.data);

  if (checker.complete() && p.device.type == DeviceType::cpu) check_contents(arguments, t, scratch);
  return arguments;
}

void check_fetched(const Plan<ChunkForward>& plan, ChunkForwardArguments arguments, const ChunkForwardTensors& t, Stream stream) {
  Fetched fetched(*plan.chosen, plan.descriptor.problem.device, stream);
  fetched.take(arguments.inputs.sequences.cu_seqlens);
  fetched.take(arguments.states);
  fetched.take(arguments.stored_rows);
  fetched.take(arguments.prefix_lengths);
  std::vector<RowBook::Write> scratch(static_cast<std::size_t>(max_writes(plan.descriptor)));
  check_contents(arguments, t, reinterpret_cast<std::byte*>(scratch.data()));
}

}  // namespace

Plan<ChunkForward> plan(const ChunkForward& descriptor, int threads) {
  const ChunkForward d = resolved(descriptor);
  return make_plan(d, threads, RowBook::bytes(max_writes(d)));
}

void check(const Plan<ChunkForward>& plan, const ChunkForwardTensors& tensors) {
  std::vector<RowBook::Write> scratch(static_cast<std::size_t>(max_writes(plan.descriptor)));
  checked(plan.descriptor, tensors, reinterpret_cast<std::byte*>(scratch.data()), Memory::optional);
}

void run(const Plan<ChunkForward>& plan, const ChunkForwardTensors& tensors, Workspace workspace, const Parallel& parallel) {
  check_call(plan, workspace, parallel);
  const ChunkForwardArguments arguments =
      checked(plan.descriptor, tensors, static_cast<std::byte*>(workspace.data), Memory::required);
  if (arguments.saved != nullptr) SavedHead::write(arguments.saved, 0);  // for implementations that save nothing
  execute(plan, arguments, workspace, parallel);
}

void run(const Plan<ChunkForward>& plan, const ChunkForwardTensors& tensors, Workspace workspace, Stream stream) {
  check_call(plan, workspace, DeviceType::cuda);
  require_absent(tensors.saved, "saved", "only on the CPU");
  const ChunkForwardArguments arguments = checked(plan.descriptor, tensors, nullptr, Memory::required);
  if (Fetched::wanted(*plan.chosen)) check_fetched(plan, arguments, tensors, stream);
  launch(plan, arguments, workspace, stream);
}

void chunk_forward(const ChunkForward& descriptor, const ChunkForwardTensors& tensors) { plan_and_run(descriptor, tensors); }

std::vector<ImplementationReport> explain(const ChunkForward& descriptor) {
  return detail::report(detail::implementations(), resolved(descriptor));
}

std::int64_t saved_elements(const ChunkForward& descriptor) {
  const ChunkForward d = resolved(descriptor);
  const detail::Implementation& chosen = detail::choose(detail::implementations(), d);
  return detail::operation_of(chosen, d).saves ? saved_size(d.problem) : 0;
}

std::int64_t num_stored_states(const ChunkForward& descriptor, const ConstTensorView& cu_seqlens,
                               const ConstTensorView& prefix_lengths) {
  const ChunkForward d = resolved(descriptor);
  Checker checker(Memory::required);
  ChunkForwardArguments arguments;
  arguments.inputs.sequences = check_sequences(checker, d.problem, cu_seqlens);
  arguments.stored_states = d.stored_states;
  arguments.states_every = d.states_every;
  if (d.stored_states == StoredStates::every) {
    checker.optional(prefix_lengths, {"prefix_lengths", {{"N", d.problem.sequences()}}, kIndexTypes});
    arguments.prefix_lengths = index_view(prefix_lengths);
  } else {
    require_absent(prefix_lengths, "prefix_lengths", "only with StoredStates::every");
  }
  check_offsets(arguments.inputs.sequences);
  check_prefixes(arguments);
  return count_stored(arguments);
}

}  // namespace flashqla
