// What is particular to recurrent_forward: tokens one by one, the states after each token and the way back to them, pools,
// layouts. Comparisons are bit for bit wherever the same operations are done in the same order.
#include <gtest/gtest.h>

#include <cstdlib>
#include <string>
#include <vector>

#include "harness/compare.hpp"
#include "harness/parts.hpp"
#include "harness/run.hpp"

namespace flashqla::test {
namespace {

Case case_of(const std::string& text) { return parse_case("op=recurrent " + text); }

/// Sizes that a slab holds exactly, that need several slabs, and that need padding.
const std::vector<std::string> kSizes{"Hv=2 K=128 V=128", "Hv=1 K=256 V=200", "Hv=2 K=64 V=160",
                                      "Hv=3 K=20 V=36",   "Hv=2 K=5 V=7",     "Hv=1 K=64 V=64"};
const std::vector<std::string> kLayouts{"layout=key_value", "layout=value_key"};

Tensor index_tensor(std::vector<std::int64_t> sizes, const std::vector<std::int64_t>& values) {
  Tensor tensor(DType::i32, std::move(sizes));
  for (std::size_t i = 0; i < values.size(); ++i) tensor.set(static_cast<std::int64_t>(i), static_cast<double>(values[i]));
  return tensor;
}

/// One call after another, each from the final state of the last; o of all tokens and the last state.
Values run_in_calls(Case c, const Tensors& inputs, const std::vector<std::int64_t>& counts, const RunOptions& options) {
  Tensor state = inputs.at("initial_state");
  Tensor o(c.dtype, {c.B, c.T, c.Hv, c.V});
  std::int64_t first = 0;
  for (std::int64_t count : counts) {
    Part part = token_range(c, inputs, first, count);
    part.inputs["initial_state"] = state;
    Tensors outputs = make_outputs(part.c, part.inputs);
    run_case_into(part.c, part.inputs, options, outputs);
    o.slice(1, first, count).set_values(outputs.at("o").values());
    state = outputs.at("final_state");
    first += count;
  }
  return {{"o", o.values()}, {"final_state", state.values()}};
}

TEST(Recurrent, TokensInOneCallEqualTokensInSeveral) {
  for (const std::string& implementation : cpu_implementations(Op::recurrent, DType::f32)) {
    for (const std::string& sizes : kSizes) {
      for (const std::string& layout : kLayouts) {
        for (const char* dtype :
             {"dtype=f32 l2norm=1", "dtype=bf16 gate=computed beta=sigmoid", "dtype=f16 gate=none beta=one"}) {
          const Case c = case_of("B=2 T=11 initial=1 " + sizes + " " + layout + " " + dtype);
          const Tensors inputs = make_inputs(c);
          const Values whole = run_in_calls(c, inputs, {11}, {implementation});
          EXPECT_EQ(bit_differences(whole, run_in_calls(c, inputs, std::vector<std::int64_t>(11, 1), {implementation})), "")
              << implementation << ' ' << to_text(c);
          EXPECT_EQ(bit_differences(whole, run_in_calls(c, inputs, {5, 6}, {implementation})), "")
              << implementation << ' ' << to_text(c);
        }
      }
    }
  }
}

/// Draft verification as a server does it: a pool with P rows for each sequence, the state after token t in row t, the next call
/// starts behind the last token that was accepted. The same tokens without the rejected ones must give the same bits.
void expect_roll_back(const std::string& options, const std::string& implementation) {
  constexpr std::int64_t kSequences = 3, kDrafts = 4;
  Case c = case_of("T=4 pool=separate drafts=4 final=0 token_states=1 token_rows=1 index=i32 " + options);
  c.B = kSequences;
  Tensors first = make_inputs(c);
  // Rows in no order; the last two belong to nobody.
  const std::vector<std::int64_t> rows{5, 0, 9, 2, 13, 7, 1, 11, 3, 12, 4, 8};
  Tensor pool(c.state_dtype,
              {14, c.Hv, c.layout == StateLayout::key_value ? c.K : c.V, c.layout == StateLayout::key_value ? c.V : c.K});
  const Tensor random = make_inputs(case_of(options + " B=14 T=1 initial=1 pool=none")).at("initial_state");
  pool.set_values(random.values());
  const Tensor before = pool.clone();
  const std::vector<std::int64_t> start{1, 4, 2}, accepted{3, 1, 4};
  first["initial_state"] = pool;
  first["read"] = first["token_rows"] = index_tensor({kSequences, kDrafts}, rows);
  first["accepted"] = index_tensor({kSequences}, start);
  first.erase("write");
  const auto verify = [&](const Tensors& inputs) {
    Tensors outputs = make_outputs(c, inputs);
    outputs["token_states"] = inputs.at("initial_state");
    run_case_into(c, inputs, {implementation}, outputs);
    return outputs.at("o");
  };
  verify(first);

  Case other = c;
  other.seed = 2;
  Tensors second = make_inputs(other);
  for (const char* name : {"initial_state", "read", "token_rows", "a_log", "dt_bias"})
    if (first.count(name) > 0) second[name] = first[name];
  second["accepted"] = index_tensor({kSequences}, accepted);
  second.erase("write");
  const Tensor o = verify(second);

  for (std::int64_t n = 0; n < kSequences; ++n) {
    const auto row_of = [&](std::int64_t t) { return rows[static_cast<std::size_t>(n * kDrafts + t)]; };
    Case alone = c;
    alone.B = 1;
    alone.drafts = 0;
    alone.final = true;
    alone.token_states = alone.token_rows = false;
    Tensors inputs;
    for (const auto& [name, tensor] : first)
      inputs[name] = tensor.sizes().size() > 2 && name != "initial_state" ? tensor.slice(0, n, 1) : tensor;
    inputs["initial_state"] = before;
    inputs.erase("accepted");
    inputs.erase("token_rows");
    inputs["read"] = index_tensor({1}, {row_of(start[static_cast<std::size_t>(n)] - 1)});
    inputs["write"] = index_tensor({1}, {0});
    const std::int64_t kept = accepted[static_cast<std::size_t>(n)];
    const Part prefix = token_range(alone, inputs, 0, kept);
    Tensors outputs = make_outputs(prefix.c, prefix.inputs);
    run_case_into(prefix.c, prefix.inputs, {implementation}, outputs);

    Tensors rest = inputs;
    for (const char* name : {"q", "k", "v", "g", "beta"})
      if (second.count(name) > 0) rest[name] = second.at(name).slice(0, n, 1);
    rest["initial_state"] = outputs.at("final_state");
    rest["read"] = index_tensor({1}, {0});
    rest["write"] = index_tensor({1}, {1});
    Tensors again = make_outputs(alone, rest);
    run_case_into(alone, rest, {implementation}, again);
    EXPECT_EQ(bit_differences({{"o", again.at("o").values()}}, {{"o", o.slice(0, n, 1).values()}}), "")
        << implementation << ' ' << options;
    EXPECT_EQ(bit_differences({{"state", again.at("final_state").slice(0, 1, 1).values()}},
                              {{"state", pool.slice(0, row_of(kDrafts - 1), 1).values()}}),
              "")
        << implementation << ' ' << options;
  }
}

TEST(Recurrent, RollBackOfRejectedDraftsEqualsRecomputation) {
  const std::vector<std::string> states{"state=f32", "state=bf16 dtype=bf16", "state=f16 gate=computed"};
  for (const std::string& implementation : cpu_implementations(Op::recurrent, DType::f32)) {
    std::size_t turn = 0;
    for (const std::string& layout : kLayouts)
      for (const std::string& sizes : kSizes) expect_roll_back(sizes + " " + layout + " " + states[turn++ % 3], implementation);
  }
}

TEST(Recurrent, NarrowPoolIsTheWideStateRoundedOnce) {
  for (const std::string& implementation : cpu_implementations(Op::recurrent, DType::f32)) {
    for (const std::string& sizes : kSizes) {
      for (const std::string& layout : kLayouts) {
        for (const char* state : {"bf16", "f16"}) {
          for (const char* tokens : {"T=1", "T=3"}) {
            const Case narrow =
                case_of("B=2 pool=in_place " + sizes + " " + layout + " " + tokens + " state=" + state + " dtype=bf16");
            const Tensors inputs = make_inputs(narrow);
            Case wide = narrow;
            wide.state_dtype = DType::f32;
            Tensors wide_inputs = inputs;
            wide_inputs["initial_state"] = inputs.at("initial_state").to(DType::f32);
            Tensors outputs = make_outputs(narrow, inputs), wide_outputs = make_outputs(wide, wide_inputs);
            run_case_into(narrow, inputs, {implementation}, outputs);
            run_case_into(wide, wide_inputs, {implementation}, wide_outputs);
            EXPECT_EQ(bit_differences({{"o", outputs.at("o").values()}, {"state", outputs.at("final_state").values()}},
                                      {{"o", wide_outputs.at("o").values()},
                                       {"state", wide_outputs.at("final_state").to(narrow.state_dtype).values()}}),
                      "")
                << implementation << ' ' << to_text(narrow);
          }
        }
      }
    }
  }
}

TEST(Recurrent, LayoutsAgree) {
  for (const std::string& implementation : cpu_implementations(Op::recurrent, DType::f32)) {
    for (const std::string& sizes : kSizes) {
      Case c = case_of("B=2 T=3 initial=1 " + sizes);
      const Tensors inputs = make_inputs(c);
      Tensors turned = inputs;
      const Tensor& state = inputs.at("initial_state");
      Tensor& other = turned["initial_state"] = Tensor(DType::f32, {c.B, c.Hv, c.V, c.K});
      for (std::int64_t i = 0; i < state.count(); ++i) {
        const std::int64_t matrix = i / (c.K * c.V), k = i / c.V % c.K, v = i % c.V;
        other.set((matrix * c.V + v) * c.K + k, state.get(i));
      }
      const Values by_key = run_case(c, inputs, {implementation});
      c.layout = StateLayout::value_key;
      const Values by_value = run_case(c, turned, {implementation});
      EXPECT_LE(relative_rms(by_key.at("o"), by_value.at("o")), 1e-6) << implementation << ' ' << sizes;
      std::vector<double> turned_back(by_value.at("final_state").size());
      for (std::size_t i = 0; i < turned_back.size(); ++i) {
        const auto at = static_cast<std::int64_t>(i);
        const std::int64_t matrix = at / (c.K * c.V), k = at / c.V % c.K, v = at % c.V;
        turned_back[i] = by_value.at("final_state")[static_cast<std::size_t>((matrix * c.V + v) * c.K + k)];
      }
      EXPECT_LE(relative_rms(by_key.at("final_state"), turned_back), 1e-6) << implementation << ' ' << sizes;
    }
  }
}

/// Both ways to read the states, whichever the processor prefers.
TEST(Recurrent, BitsDoNotDependOnTheWalk) {
  const std::vector<std::string> states{"state=f32", "state=bf16 dtype=bf16", "state=f16 dtype=f16"};
  for (const std::string& implementation : cpu_implementations(Op::recurrent, DType::f32)) {
    for (const std::string& sizes : kSizes) {
      for (const std::string& layout : kLayouts) {
        for (const std::string& state : states) {
          for (const char* tokens : {"T=1", "T=3"}) {
            const Case c = case_of("B=2 pool=in_place " + sizes + " " + layout + " " + tokens + " " + state);
            const Tensors inputs = make_inputs(c);
            const auto run_with = [&](const char* walk) {
              setenv("FLASHQLA_STATE_WALK", walk, 1);
              const Values values = run_case(c, inputs, {implementation});
              unsetenv("FLASHQLA_STATE_WALK");
              return values;
            };
            EXPECT_EQ(bit_differences(run_with("in_order"), run_with("side_by_side")), "") << implementation << ' ' << to_text(c);
          }
        }
      }
    }
  }
}

/// Large enough that the work is divided among threads.
TEST(Recurrent, BitsDependNeitherOnThreadsNorOnCompany) {
  for (const std::string& implementation : cpu_implementations(Op::recurrent, DType::f32)) {
    for (const std::string& layout : kLayouts) {
      const Case c = case_of("B=6 T=2 Hq=4 Hv=16 K=128 V=128 initial=1 l2norm=1 gate=computed beta=sigmoid " + layout);
      const Tensors inputs = make_inputs(c);
      const Values one = run_case(c, inputs, {implementation, 1});
      EXPECT_EQ(bit_differences(one, run_case(c, inputs, {implementation, 2})), "") << implementation << ' ' << layout;
      EXPECT_EQ(bit_differences(one, run_case(c, inputs, {implementation, 7})), "") << implementation << ' ' << layout;
      Case alone = c;
      alone.B = 1;
      Tensors fifth;
      for (const auto& [name, tensor] : inputs) fifth[name] = tensor.sizes().size() > 1 ? tensor.slice(0, 4, 1) : tensor;
      const Values by_itself = run_case(alone, fifth, {implementation, 1});
      for (const auto& [name, values] : by_itself) {
        const std::vector<double>& all = one.at(name);
        const auto begin = all.begin() + static_cast<std::ptrdiff_t>(4 * values.size());
        EXPECT_EQ(bit_differences({{name, values}},
                                  {{name, std::vector<double>(begin, begin + static_cast<std::ptrdiff_t>(values.size()))}}),
                  "")
            << implementation << ' ' << layout;
      }
    }
  }
}

}  // namespace
}  // namespace flashqla::test
