// plan, run and explain of recurrent_forward.
#include "api/fetched.hpp"
#include "api/inputs.hpp"
#include "api/operation.hpp"
#include "api/states.hpp"

namespace flashqla {

using namespace api;

namespace {

constexpr DTypeSet kIndexTypes{DType::i32, DType::i64};

/// Calls body(place, row, sequence) for each token of a sequence that is no padding; `place` counts the entries of token_rows.
template <class Body>
void for_each_token_row(const RecurrentForwardArguments& arguments, Body&& body) {
  const Sequences& sequences = arguments.inputs.sequences;
  for (std::int64_t n = 0; n < sequences.count; ++n) {
    if (arguments.states.padding(n)) continue;
    const std::int64_t batch = sequences.batch(n), begin = sequences.begin(n), end = begin + sequences.length(n);
    for (std::int64_t token = begin; token < end; ++token) {
      body(batch * sequences.tokens + token, arguments.token_row(batch, token), n);
    }
  }
}

void check_token_states(Checker& checker, const Problem& p, const RecurrentForwardTensors& t) {
  if (!t.token_states.present()) {
    require_absent(t.token_rows, "token_rows", "only with token_states");
    return;
  }
  require_state(checker, t.token_states, "token_states", p, {"rows", kAnySize}, small_dtypes(p), Role::state_output);
  checker.optional(t.token_rows, {"token_rows", {{"B", p.batch}, {"T", p.tokens}}, kIndexTypes});
  const std::int64_t rows = t.token_states.sizes[0], tokens = p.batch * p.tokens;
  if (!t.token_rows.present() && rows < tokens) {
    invalid("token_states", "at least B * T = " + std::to_string(tokens) + " rows without token_rows", std::to_string(rows));
  }
}

void check_written_rows(const RecurrentForwardArguments& arguments, const RecurrentForwardTensors& t, std::byte* scratch) {
  const StateTensors& states = t.states;
  const std::int64_t sequences = arguments.inputs.sequences.count;
  const ConstTensorView final_state = states.final_state, token_states = t.token_states;
  const auto shared = [](const ConstTensorView& x, const ConstTensorView& y) {
    return x.present() && y.present() && same_pool(x, y);
  };
  if (!states.write.present() && !t.token_rows.present() && !shared(token_states, states.initial_state) &&
      !shared(token_states, final_state)) {
    return;
  }
  RowBook book(scratch);
  if (final_state.present()) {
    book.begin("write", final_state);
    for (std::int64_t n = 0; n < sequences; ++n) book.add(arguments.states.write_row(n), n);
  }
  if (token_states.present()) {
    book.begin("token_rows", token_states);
    for_each_token_row(arguments, [&](std::int64_t, std::int64_t row, std::int64_t n) { book.add(row, n); });
  }
  book.check(arguments.states, states.initial_state, sequences);
}

std::int64_t max_writes(const RecurrentForward& d) { return d.problem.sequences() + d.problem.batch * d.problem.tokens; }

/// What depends on the contents of tensors.
void check_contents(const RecurrentForwardArguments& arguments, const RecurrentForwardTensors& t, std::byte* scratch) {
  check_offsets(arguments.inputs.sequences);
  check_state_indices(arguments.states, t.states, arguments.inputs.problem.sequences());
  if (t.token_rows.present()) {
    for_each_token_row(arguments, [&](std::int64_t place, std::int64_t row, std::int64_t) {
      check_row("token_rows", place, row, t.token_states.sizes[0]);
    });
  }
  check_written_rows(arguments, t, scratch);
}

RecurrentForwardArguments checked(const RecurrentForward& d, const RecurrentForwardTensors& t, std::byte* scratch,
                                  Memory memory) {
  const Problem& p = d.problem;
  Checker checker(memory);
  RecurrentForwardArguments arguments;
  arguments.inputs = check_inputs(checker, p, t.inputs);
  arguments.states = check_states(checker, p, t.states);
  checker.require(t.o, {"o",
                        {{"B", p.batch}, {"T", p.tokens}, {"Hv", p.heads_v}, {"V", p.dim_v}},
                        {p.dtype},
                        Role::output,
                        LastDimension::contiguous});
  check_token_states(checker, p, t);
  checker.check_overlaps();
  arguments.o = token_view(t.o);
  arguments.token_states = state_view(t.token_states, p.state_layout);
  arguments.token_rows = index_view(t.token_rows);

  if (checker.complete() && p.device.type == DeviceType::cpu) check_contents(arguments, t, scratch);
  return arguments;
}

void check_fetched(const Plan<RecurrentForward>& plan, RecurrentForwardArguments arguments, const RecurrentForwardTensors& t,
                   Stream stream) {
  Fetched fetched(*plan.chosen, plan.descriptor.problem.device, stream);
  fetched.take(arguments.inputs.sequences.cu_seqlens);
  fetched.take(arguments.states);
  fetched.take(arguments.token_rows);
  std::vector<RowBook::Write> scratch(static_cast<std::size_t>(max_writes(plan.descriptor)));
  check_contents(arguments, t, reinterpret_cast<std::byte*>(scratch.data()));
}

}  // namespace

Plan<RecurrentForward> plan(const RecurrentForward& descriptor, int threads) {
  const RecurrentForward d = resolved(descriptor);
  return make_plan(d, threads, RowBook::bytes(max_writes(d)));
}

void check(const Plan<RecurrentForward>& plan, const RecurrentForwardTensors& tensors) {
  std::vector<RowBook::Write> scratch(static_cast<std::size_t>(max_writes(plan.descriptor)));
  checked(plan.descriptor, tensors, reinterpret_cast<std::byte*>(scratch.data()), Memory::optional);
}

void run(const Plan<RecurrentForward>& plan, const RecurrentForwardTensors& tensors, Workspace workspace,
         const Parallel& parallel) {
  check_call(plan, workspace, parallel);
  execute(plan, checked(plan.descriptor, tensors, static_cast<std::byte*>(workspace.data), Memory::required), workspace,
          parallel);
}

void run(const Plan<RecurrentForward>& plan, const RecurrentForwardTensors& tensors, Workspace workspace, Stream stream) {
  check_call(plan, workspace, DeviceType::cuda);
  const RecurrentForwardArguments arguments = checked(plan.descriptor, tensors, nullptr, Memory::required);
  if (Fetched::wanted(*plan.chosen)) check_fetched(plan, arguments, tensors, stream);
  launch(plan, arguments, workspace, stream);
}

void recurrent_forward(const RecurrentForward& descriptor, const RecurrentForwardTensors& tensors) {
  plan_and_run(descriptor, tensors);
}

std::vector<ImplementationReport> explain(const RecurrentForward& descriptor) {
  return detail::report(detail::implementations(), resolved(descriptor));
}

}  // namespace flashqla
