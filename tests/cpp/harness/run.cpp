#include "harness/run.hpp"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <mutex>
#include <stdexcept>
#include <thread>

#include "dispatch/implementation.hpp"
#include "harness/tested.hpp"

namespace flashqla::test {

namespace {

void run_on_threads(void* context, std::int64_t tasks, Parallel::Task task, void* argument) {
  const auto threads = static_cast<int>(reinterpret_cast<std::intptr_t>(context));
  std::atomic<std::int64_t> next{0};
  const auto work = [&] {
    for (std::int64_t i = next++; i < tasks; i = next++) task(argument, i);
  };
  std::vector<std::thread> pool;
  for (int i = 0; i < threads; ++i) pool.emplace_back(work);
  for (std::thread& thread : pool) thread.join();
}

/// function() with one implementation forced. The environment belongs to the process: one caller at a time.
template <class Function>
auto with_forced(const RunOptions& options, const Function& function) {
  static std::mutex environment;
  const std::lock_guard lock(environment);
  setenv("FLASHQLA_IMPL", options.implementation.c_str(), 1);
  try {
    auto result = function();
    unsetenv("FLASHQLA_IMPL");
    return result;
  } catch (...) {
    unsetenv("FLASHQLA_IMPL");
    throw;
  }
}

/// 64-byte aligned and full of NaN, with a guard behind it.
class PoisonedWorkspace {
 public:
  explicit PoisonedWorkspace(std::size_t bytes)
      : tensor_(DType::f64, {static_cast<std::int64_t>((bytes + 7) / 8)}), bytes_(bytes) {}
  Workspace get() const { return {bytes_ == 0 ? nullptr : tensor_.view().data, bytes_}; }
  bool guards_intact() const { return tensor_.gaps_are_poison(); }

 private:
  Tensor tensor_;
  std::size_t bytes_;
};

const Tensor& find(const Tensors& tensors, const char* name) {
  static const Tensor kAbsent;
  const auto found = tensors.find(name);
  return found == tensors.end() ? kAbsent : found->second;
}

/// Views of tensors where the implementation finds them.
struct Places {
  Mover* mover;

  TensorView view(const Tensor& tensor) const {
    TensorView result = tensor.view();
    if (mover == nullptr || !tensor.present()) return result;
    result.data = mover->place(tensor) + (static_cast<std::byte*>(result.data) - tensor.memory().get());
    return result;
  }
  ConstTensorView in(const Tensors& tensors, const char* name) const { return view(find(tensors, name)); }
  TensorView out(const Tensors& tensors, const char* name) const { return view(find(tensors, name)); }
};

InputTensors input_tensors(const Places& places, const Tensors& inputs) {
  InputTensors result;
  result.q = places.in(inputs, "q");
  result.k = places.in(inputs, "k");
  result.v = places.in(inputs, "v");
  result.g = places.in(inputs, "g");
  result.beta = places.in(inputs, "beta");
  result.a_log = places.in(inputs, "a_log");
  result.dt_bias = places.in(inputs, "dt_bias");
  result.cu_seqlens = places.in(inputs, "cu_seqlens");
  return result;
}

StateTensors state_tensors(const Places& places, const Case& c, const Tensors& inputs, const Tensors& outputs) {
  StateTensors result;
  if (c.same_rows) result.initial_state = places.out(outputs, "token_states");
  if (!c.same_rows)
    result.initial_state =
        c.pool == Pool::in_place ? ConstTensorView(places.out(outputs, "final_state")) : places.in(inputs, "initial_state");
  result.final_state = places.out(outputs, "final_state");
  result.read = places.in(inputs, "read");
  if (result.final_state.present()) result.write = places.in(inputs, "write");
  result.accepted = places.in(inputs, "accepted");
  return result;
}

/// The problem of a case on the device of the run.
Problem problem_on(const Case& c, const RunOptions& options) {
  Problem problem = problem_of(c);
  if (options.mover != nullptr) problem.device = options.mover->device();
  return problem;
}

template <class Descriptor, class Views>
void plan_and_run(const Descriptor& descriptor, const Views& views, const RunOptions& options) {
  const Plan<Descriptor> planned = with_forced(options, [&] { return plan(descriptor, options.threads); });
  if (planned.implementation != options.implementation) {
    throw std::runtime_error("planned " + planned.implementation + " instead of " + options.implementation);
  }
  if (options.mover != nullptr) {
    std::byte* const workspace = options.mover->workspace(planned.workspace_bytes);
    run(planned, views, {workspace, planned.workspace_bytes}, options.mover->stream());
    options.mover->finish();
    return;
  }
  const PoisonedWorkspace workspace(planned.workspace_bytes);
  run(planned, views, workspace.get(), threads_of_test(options.threads));
  if (!workspace.guards_intact()) throw std::runtime_error("wrote past the workspace");
}

void run_forward(const Case& c, const Tensors& inputs, const RunOptions& options, const Tensors& outputs) {
  const ChunkForward descriptor{problem_on(c, options), c.stored, c.states_every};
  plan_and_run(descriptor, forward_tensors(c, inputs, outputs, options.mover), options);
}

/// What the forward of the case leaves for the backward, in an array full of NaN: absent if the implementation saves nothing.
Tensor saved_by_forward(const Case& c, const Tensors& inputs, const RunOptions& options) {
  const std::int64_t elements = with_forced(options, [&] { return saved_elements(ChunkForward{problem_on(c, options)}); });
  if (elements == 0) return {};
  Tensor saved(DType::f32, {elements}, {1}, options.saved_shift);
  const Tensor o(c.dtype, {c.B, c.T, c.Hv, c.V});
  const Places places{options.mover};
  ChunkForwardTensors views;
  views.inputs = input_tensors(places, inputs);
  views.states.initial_state = places.in(inputs, "initial_state");
  views.o = o.view();
  views.saved = saved.view();
  plan_and_run(ChunkForward{problem_on(c, options)}, views, options);
  if (!saved.gaps_are_poison()) throw std::runtime_error("wrote outside saved");
  for (double value : saved.values()) {
    if (std::isnan(value)) throw std::runtime_error("left a part of saved unwritten");
  }
  return saved;
}

void run_backward(const Case& c, const Tensors& inputs, const RunOptions& options, const Tensors& outputs) {
  const Places places{options.mover};
  ChunkBackward descriptor{problem_on(c, options)};
  if (c.packed()) descriptor.max_sequence_tokens = *std::max_element(c.lengths.begin(), c.lengths.end());
  ChunkBackwardTensors views;
  views.inputs = input_tensors(places, inputs);
  views.initial_state = places.in(inputs, "initial_state");
  views.d_o = places.in(inputs, "d_o");
  views.d_final_state = places.in(inputs, "d_final_state");
  views.d_q = places.out(outputs, "d_q");
  views.d_k = places.out(outputs, "d_k");
  views.d_v = places.out(outputs, "d_v");
  views.d_g = places.out(outputs, "d_g");
  views.d_beta = places.out(outputs, "d_beta");
  views.d_initial_state = places.out(outputs, "d_initial_state");
  views.d_a_log = places.out(outputs, "d_a_log");
  views.d_dt_bias = places.out(outputs, "d_dt_bias");
  Tensor saved;
  if (c.saved && options.mover == nullptr) {  // forwards on devices save nothing
    const std::string& forward = options.saved_by.empty() ? options.implementation : options.saved_by;
    saved = saved_by_forward(c, inputs, {forward, options.threads, {}, options.saved_shift});
    if (saved.present()) views.saved = saved.view();
  }
  plan_and_run(descriptor, views, options);
}

void run_recurrent(const Case& c, const Tensors& inputs, const RunOptions& options, const Tensors& outputs) {
  const Places places{options.mover};
  RecurrentForwardTensors views;
  views.inputs = input_tensors(places, inputs);
  views.states = state_tensors(places, c, inputs, outputs);
  views.o = places.out(outputs, "o");
  views.token_states = places.out(outputs, "token_states");
  views.token_rows = places.in(inputs, "token_rows");
  plan_and_run(RecurrentForward{problem_on(c, options)}, views, options);
}

std::int64_t max_row(const Tensor& rows) {
  double highest = -1;
  for (double row : rows.values()) highest = std::max(highest, row);
  return static_cast<std::int64_t>(highest);
}

std::vector<std::int64_t> to_integers(const Tensor& tensor) {
  std::vector<std::int64_t> result;
  for (double value : tensor.values()) result.push_back(static_cast<std::int64_t>(value));
  return result;
}

/// With gaps when the case's inputs have them, and as far apart.
Tensor output_like(const Case& c, DType dtype, std::vector<std::int64_t> sizes, std::int64_t inner_dims) {
  if (c.strides == Strides::huge && sizes.size() > 2) {
    std::vector<std::int64_t> strides = contiguous_strides(sizes);
    strides[0] = kHugeStride;
    if (c.B == 1 && sizes[0] == 1) strides[1] = kHugeStride / 4;
    return Tensor(dtype, std::move(sizes), std::move(strides));
  }
  if (c.strides != Strides::padded && c.strides != Strides::reversed) return Tensor(dtype, std::move(sizes));
  std::vector<std::int64_t> strides(sizes.size(), 1);
  std::int64_t next = 1;
  for (std::size_t d = sizes.size(); d-- > 0;) {
    strides[d] = next;
    const bool innermost = inner_dims > 0 && d + 1 == sizes.size();
    next = next * sizes[d] + (innermost ? 3 : 2);
  }
  return Tensor(dtype, std::move(sizes), std::move(strides), 1);
}

void make_state_outputs(const Case& c, const Tensors& inputs, Tensors& outputs) {
  const bool by_key = c.layout == StateLayout::key_value;
  const auto states = [&](DType dtype, std::int64_t rows) {
    return output_like(c, dtype, {rows, c.Hv, by_key ? c.K : c.V, by_key ? c.V : c.K}, 1);
  };
  const bool pooled = inputs.count("write") > 0;
  const DType wide = c.dtype == DType::f64 ? DType::f64 : DType::f32;
  if (c.final && c.pool == Pool::in_place && !c.same_rows) outputs["final_state"] = inputs.at("initial_state").clone();
  if (c.final && (c.pool != Pool::in_place || c.same_rows)) {
    outputs["final_state"] = pooled ? states(c.state_dtype, inputs.at("initial_state").sizes()[0]) : states(wide, c.sequences());
  }
  if (c.op == Op::forward && c.stored != StoredStates::none) {
    const Tensor& rows = find(inputs, "stored_rows");
    std::vector<std::int64_t> prefix(static_cast<std::size_t>(c.sequences()));
    if (c.prefix) prefix = to_integers(inputs.at("prefix_lengths"));
    outputs["stored"] = states(c.state_dtype, rows.present() ? max_row(rows) + 2 : c.stored_count(prefix));
  }
  if (c.same_rows) outputs["token_states"] = inputs.at("initial_state").clone();
  if (c.op == Op::recurrent && c.token_states && !c.same_rows) {
    const Tensor& rows = find(inputs, "token_rows");
    outputs["token_states"] = states(c.state_dtype, rows.present() ? max_row(rows) + 2 : c.B * c.T);
  }
}

void make_gradient_outputs(const Case& c, const Tensors& inputs, Tensors& outputs) {
  const auto add = [&](const char* name) {
    const Tensor& input = find(inputs, name);
    if (!input.present()) return;
    const bool wide = c.f32_gradients && input.dtype() != DType::f64;
    outputs[std::string("d_") + name] =
        output_like(c, wide ? DType::f32 : input.dtype(), input.sizes(), input.sizes().size() == 4 ? 1 : 0);
  };
  for (const char* name : {"q", "k", "v", "g", "beta", "initial_state", "a_log", "dt_bias"}) add(name);
}

}  // namespace

ChunkForwardTensors forward_tensors(const Case& c, const Tensors& inputs, const Tensors& outputs, Mover* mover) {
  const Places places{mover};
  ChunkForwardTensors views;
  views.inputs = input_tensors(places, inputs);
  views.states = state_tensors(places, c, inputs, outputs);
  views.o = places.out(outputs, "o");
  views.stored = places.out(outputs, "stored");
  views.stored_rows = places.in(inputs, "stored_rows");
  views.prefix_lengths = places.in(inputs, "prefix_lengths");
  views.g_cumulative = places.out(outputs, "g_cumulative");
  views.a = places.out(outputs, "a");
  return views;
}

Parallel threads_of_test(int threads) {
  Parallel parallel;
  parallel.threads = threads;
  if (threads > 1) {
    parallel.context = reinterpret_cast<void*>(static_cast<std::intptr_t>(threads));
    parallel.run = run_on_threads;
  }
  return parallel;
}

Tensors make_outputs(const Case& c, const Tensors& inputs) {
  Tensors outputs;
  if (c.op == Op::backward) {
    make_gradient_outputs(c, inputs, outputs);
    return outputs;
  }
  outputs["o"] = output_like(c, c.dtype, {c.B, c.T, c.Hv, c.V}, 1);
  make_state_outputs(c, inputs, outputs);
  if (c.op == Op::forward && c.extras) {
    outputs["g_cumulative"] = Tensor(c.dtype == DType::f64 ? DType::f64 : DType::f32, {c.B, c.T, c.Hv});
    outputs["a"] = output_like(c, c.dtype, {c.B, c.T, c.Hv, kTokensPerChunk}, 1);
  }
  return outputs;
}

void run_case_into(const Case& c, const Tensors& inputs, const RunOptions& asked, Tensors& outputs) {
  RunOptions options = asked;
  const std::unique_ptr<Mover> mover = asked.mover == nullptr ? mover_for(asked.implementation) : nullptr;
  if (mover != nullptr) options.mover = mover.get();
  if (c.op == Op::forward) run_forward(c, inputs, options, outputs);
  if (c.op == Op::backward) run_backward(c, inputs, options, outputs);
  if (c.op == Op::recurrent) run_recurrent(c, inputs, options, outputs);
  for (const auto& [name, tensor] : outputs) {
    if (!tensor.gaps_are_poison()) throw std::runtime_error("wrote outside " + name);
  }
}

Values run_case(const Case& c, const Tensors& inputs, const RunOptions& options) {
  Tensors outputs = make_outputs(c, inputs);
  run_case_into(c, inputs, options, outputs);
  Values values;
  for (const auto& [name, tensor] : outputs) values[name] = tensor.values();
  return values;
}

Case in_double(Case c) {
  c.dtype = c.gate_dtype = c.state_dtype = DType::f64;
  c.strides = Strides::dense;
  return c;
}

Values truth(const Case& c, const Tensors& inputs) { return run_case(in_double(c), in_double(inputs), {"reference", 1}); }

bool takes(const std::string& implementation, DType dtype) {
  const bool bf16_only = implementation.size() > 4 && implementation.substr(implementation.size() - 4) == "bf16";
  return !bf16_only || dtype == DType::bf16;
}

std::vector<std::string> cpu_implementations(Op op, DType dtype) {
  std::vector<std::string> names;
  for (const detail::Implementation* row : detail::implementations()) {
    const std::string name = row->name;
    if (name.rfind("cpu-", 0) != 0 || !row->missing().empty()) continue;
    const bool has = op == Op::forward    ? row->chunk_forward.run != nullptr
                     : op == Op::backward ? row->chunk_backward.run != nullptr
                                          : row->recurrent_forward.run != nullptr;
    if (has && takes(name, dtype)) names.push_back(name);
  }
  return names;
}

}  // namespace flashqla::test
