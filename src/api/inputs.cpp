#include "api/inputs.hpp"

#include <string>

#include "api/problem.hpp"

namespace flashqla::api {

namespace {

constexpr DTypeSet kIndexTypes{DType::i32, DType::i64};

void check_gate(Checker& checker, const Problem& p, const InputTensors& t) {
  const DTypeSet small = small_dtypes(p);
  if (p.gate == Gate::none) {
    require_absent(t.g, "g", "only with a Gate other than none");
  } else {
    checker.require(
        t.g, {"g", {{"B", p.batch}, {"T", p.tokens}, {"Hv", p.heads_v}}, p.gate == Gate::cumulative ? exact_dtypes(p) : small});
  }
  if (p.gate == Gate::computed) {
    checker.require(t.a_log, {"a_log", {{"Hv", p.heads_v}}, small});
    checker.optional(t.dt_bias, {"dt_bias", {{"Hv", p.heads_v}}, small});
  } else {
    require_absent(t.a_log, "a_log", "only with Gate::computed");
    require_absent(t.dt_bias, "dt_bias", "only with Gate::computed");
  }
}

}  // namespace

InputArguments check_inputs(Checker& checker, const Problem& p, const InputTensors& t) {
  const Dimension batch{"B", p.batch}, tokens{"T", p.tokens};
  checker.require(t.q,
                  {"q", {batch, tokens, {"Hq", p.heads_qk}, {"K", p.dim_k}}, {p.dtype}, Role::input, LastDimension::contiguous});
  checker.require(t.k,
                  {"k", {batch, tokens, {"Hq", p.heads_qk}, {"K", p.dim_k}}, {p.dtype}, Role::input, LastDimension::contiguous});
  checker.require(t.v,
                  {"v", {batch, tokens, {"Hv", p.heads_v}, {"V", p.dim_v}}, {p.dtype}, Role::input, LastDimension::contiguous});
  check_gate(checker, p, t);
  if (p.beta == Beta::one) {
    require_absent(t.beta, "beta", "only with a Beta other than one");
  } else {
    checker.require(t.beta, {"beta", {batch, tokens, {"Hv", p.heads_v}}, small_dtypes(p)});
  }
  InputArguments arguments;
  arguments.problem = p;
  arguments.scale = *p.scale;
  arguments.group = p.heads_v / p.heads_qk;
  arguments.q = token_view(t.q);
  arguments.k = token_view(t.k);
  arguments.v = token_view(t.v);
  arguments.g = token_view(t.g);
  arguments.beta = token_view(t.beta);
  arguments.a_log = head_view(t.a_log);
  arguments.dt_bias = head_view(t.dt_bias);
  arguments.sequences = check_sequences(checker, p, t.cu_seqlens);
  return arguments;
}

Sequences check_sequences(Checker& checker, const Problem& p, const ConstTensorView& cu_seqlens) {
  if (p.packed) {
    checker.require(cu_seqlens, {"cu_seqlens", {{"N+1", p.sequences() + 1}}, kIndexTypes});
  } else {
    require_absent(cu_seqlens, "cu_seqlens", "only with packed sequences");
  }
  return {index_view(cu_seqlens), p.sequences(), p.tokens};
}

void check_saved(Checker& checker, const Problem& p, const ConstTensorView& saved, Role role) {
  if (saved.present())
    checker.require(saved, {"saved", {{"saved_elements()", saved_size(p)}}, {DType::f32}, role, LastDimension::contiguous});
}

void check_offsets(const Sequences& sequences) {
  if (!sequences.packed()) return;
  const auto number = [](std::int64_t value) { return std::to_string(value); };
  const IndexView& offsets = sequences.cu_seqlens;
  std::int64_t previous = offsets.at(0);
  if (previous != 0) invalid("cu_seqlens", "a first offset of 0", number(previous));
  for (std::int64_t n = 1; n <= sequences.count; ++n) {
    const std::int64_t offset = offsets.at(n);
    if (offset < previous) {
      invalid("cu_seqlens", "offsets that never decrease", number(offset) + " at [" + number(n) + "] after " + number(previous));
    }
    previous = offset;
  }
  if (previous > sequences.tokens)
    invalid("cu_seqlens", "a last offset of at most T=" + number(sequences.tokens), number(previous));
}

}  // namespace flashqla::api
