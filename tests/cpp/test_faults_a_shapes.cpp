// Faults that users have reported for such kernels, by number: sizes, strides, offsets, heads, refusals.
#include <gtest/gtest.h>

#include "dispatch/implementation.hpp"
#include "harness/compare.hpp"
#include "harness/parts.hpp"
#include "harness/run.hpp"
#include "harness/tested.hpp"

namespace flashqla::test {
namespace {

constexpr Op kChunkOps[] = {Op::forward, Op::backward};
constexpr Op kAllOps[] = {Op::forward, Op::backward, Op::recurrent};

/// The same numbers from contiguous memory.
Tensors contiguous(const Tensors& inputs) {
  Tensors result;
  for (const auto& [name, tensor] : inputs) result[name] = tensor.to(tensor.dtype());
  return result;
}

void expect_strides_do_not_matter(const Case& c, const std::string& implementation) {
  const Tensors inputs = make_inputs(c);
  Case dense = c;
  dense.strides = Strides::dense;
  const Values strided = run_case(c, inputs, {implementation, 2}),
               expected = run_case(dense, contiguous(inputs), {implementation, 2});
  EXPECT_EQ(bit_differences(strided, expected), "") << implementation << " on " << to_text(c);
}

/// Batch entries, rows of states and tokens lie more than 2^31 elements apart.
TEST(Faults, A04_offsets_past_2_31_elements) {
  if (tests_a_device()) GTEST_SKIP() << "copies 8 GB a tensor";
  for (Op op : kAllOps) {
    std::vector<std::string> implementations = tested_implementations(op, DType::bf16);
    implementations.push_back("reference");
    for (const std::string& implementation : implementations) {
      for (const char* text : {"B=2 T=70", "B=1 T=6"}) {
        for (DType dtype : {DType::f32, DType::bf16}) {
          Case c = parse_case(text);
          c.op = op;
          c.dtype = takes(implementation, dtype) ? dtype : DType::bf16;
          c.Hq = 1;
          c.Hv = 2;
          c.K = 32;
          c.V = 48;
          c.initial = c.d_final = true;
          c.strides = Strides::huge;
          if (op == Op::recurrent) c.T = c.B > 1 ? 2 : 6;
          expect_strides_do_not_matter(c, implementation);
        }
      }
    }
  }
}

TEST(Faults, A04_pool_rows_past_2_31_elements) {
  if (tests_a_device()) GTEST_SKIP() << "copies 8 GB a tensor";
  for (const std::string& implementation : tested_implementations(Op::recurrent, DType::f32)) {
    for (Pool pool : {Pool::separate, Pool::in_place}) {
      Case c = parse_case("op=recurrent B=3 T=1 Hv=2 K=32 V=32 state=bf16 strides=huge");
      c.pool = pool;
      const Tensors inputs = make_inputs(c);
      Case dense = c;
      dense.strides = Strides::dense;
      Tensors copies = contiguous(inputs);
      const auto used_rows = [&](const Case& run, const Tensors& tensors) {
        Values values = run_case(run, tensors, {implementation, 1});
        std::vector<double> rows;
        for (double row : tensors.at("write").values()) {
          if (row < 0) continue;
          const std::int64_t slots = tensors.at("initial_state").sizes()[0];
          for (double x : rows_of(values.at("final_state"), slots, static_cast<std::int64_t>(row), 1)) rows.push_back(x);
        }
        return Values{{"o", values.at("o")}, {"rows", rows}};
      };
      EXPECT_EQ(bit_differences(used_rows(c, inputs), used_rows(dense, copies)), "") << implementation;
    }
  }
}

/// A problem of a device for which there is no kernel is refused by name before any work.
TEST(Faults, A08_no_kernel_for_the_device) {
  if (tests_a_device()) GTEST_SKIP() << "there is one";
  Case c;
  ChunkForward descriptor{problem_of(c)};
  descriptor.problem.device.type = DeviceType::cuda;
  try {
    plan(descriptor);
    FAIL() << "planned for a CUDA device";
  } catch (const Unsupported& error) {
    EXPECT_NE(std::string(error.what()).find("computes on the CPU only"), std::string::npos) << error.what();
  }
}

/// A forced implementation that this processor or build lacks is an error, never another one.
TEST(Faults, A08_forced_implementation_is_never_replaced) {
  const Case c = parse_case("K=16 V=16 T=4");
  const Tensors inputs = make_inputs(c);
  EXPECT_THROW(run_case(c, inputs, {"cpu-of-tomorrow", 1}), Error);
  for (const detail::Implementation* row : detail::implementations()) {
    if (row->missing().empty()) continue;
    EXPECT_THROW(run_case(c, inputs, {row->name, 1}), Unsupported) << row->name;
  }
}

TEST(Faults, A09_dbeta_and_dg_at_the_reported_sizes) {
  for (const char* text :
       {"op=backward T=1024 Hq=2 Hv=2 K=100 V=100 dtype=f16", "op=backward B=2 T=512 Hq=2 Hv=4 K=64 V=64 dtype=bf16 d_final=1"}) {
    Case c = parse_case(text);
    c.K = tested_width(c.K);
    c.V = tested_width(c.V);
    Tensors inputs = make_inputs(c);
    for (std::int64_t i = 0; i < inputs.at("g").count(); i += 3) inputs.at("g").set(i, 0);
    for (const std::string& implementation : tested_implementations(Op::backward, c.dtype)) {
      EXPECT_EQ(differences(c, inputs, run_case(c, inputs, {implementation, 2}), truth(c, inputs), 0), "") << implementation;
    }
  }
}

TEST(Faults, A18_strides_of_every_kind) {
  for (Op op : kAllOps) {
    std::vector<std::string> implementations = tested_implementations(op, DType::bf16);
    implementations.push_back("reference");
    for (const std::string& implementation : implementations) {
      for (Strides strides : {Strides::padded, Strides::transposed, Strides::fused, Strides::expanded, Strides::reversed}) {
        for (const char* text :
             {"B=2 T=70 Hq=2 Hv=4 K=128 V=128 l2norm=1", "B=1 T=70 Hq=1 Hv=2 K=80 V=96", "B=2 T=66 Hq=1 Hv=1 K=17 V=9"}) {
          Case c = parse_case(text);
          c.op = op;
          c.K = tested_width(c.K);
          c.V = tested_width(c.V);
          c.strides = strides;
          c.initial = c.d_final = true;
          c.dtype = tested_takes(implementation, op, DType::f32) && strides != Strides::fused ? DType::f32 : DType::bf16;
          if (op == Op::recurrent) c.T = 2;
          expect_strides_do_not_matter(c, implementation);
        }
      }
    }
  }
}

/// As from o.sum().backward().
TEST(Faults, A18_gradient_with_stride_zero) {
  for (const std::string& implementation : tested_implementations(Op::backward, DType::bf16)) {
    expect_strides_do_not_matter(parse_case("op=backward B=2 T=70 Hv=2 K=64 V=64 dtype=bf16 ones=1"), implementation);
  }
}

/// state = empty(Hv, N, V, K).permute(1, 0, 2, 3).
TEST(Faults, A18_permuted_state) {
  for (const std::string& implementation : tested_implementations(Op::recurrent, DType::f32)) {
    Case c = parse_case("op=recurrent B=3 T=2 Hq=1 Hv=2 K=80 V=96 layout=value_key initial=1");
    Tensors inputs = make_inputs(c);
    const Values expected = run_case(c, inputs, {implementation, 1});
    const Tensor dense = inputs.at("initial_state");
    Tensor permuted(DType::f32, dense.sizes(), {80 * 96, 3 * 80 * 96, 80, 1});
    permuted.set_values(dense.values());
    inputs["initial_state"] = permuted;
    EXPECT_EQ(bit_differences(run_case(c, inputs, {implementation, 1}), expected), "") << implementation;
  }
}

TEST(Faults, A23_every_width_is_right) {
  for (Op op : kChunkOps) {
    for (std::int64_t K : {16, 32, 48, 64, 80, 96, 128, 160, 192, 256}) {
      Case c = parse_case("T=70 V=128 initial=1 d_final=1 dtype=bf16");
      c.op = op;
      c.K = K;
      for (const std::string& implementation : tested_implementations(op, c.dtype)) EXPECT_EQ(check_case(c, implementation), "");
    }
    for (std::int64_t V = 32; V <= 256; V += 16) {
      Case c = parse_case("T=70 K=128 initial=1 d_final=1");
      c.op = op;
      c.V = V;
      for (const std::string& implementation : tested_implementations(op, c.dtype)) EXPECT_EQ(check_case(c, implementation), "");
    }
  }
}

/// o is linear in scale, whatever K and V, with the part of the initial state too.
TEST(Faults, A25_output_is_linear_in_scale) {
  for (Op op : {Op::forward, Op::recurrent}) {
    for (const std::string& implementation : tested_implementations(op, DType::f32)) {
      for (const auto& [K, V] : {std::pair{128, 64}, {64, 128}, {32, 96}, {17, 5}}) {
        Case c = parse_case("T=70 Hv=2 initial=1");
        c.op = op;
        c.K = tested_width(K);
        c.V = tested_width(V);
        c.scale = 1.0;
        const Tensors inputs = make_inputs(c);
        const std::vector<double> one = run_case(c, inputs, {implementation, 1}).at("o");
        c.scale = 0.5;
        std::vector<double> twice_half = run_case(c, inputs, {implementation, 1}).at("o");
        for (double& x : twice_half) x *= 2;
        EXPECT_LT(relative_rms(twice_half, one), 1e-6) << implementation << K << V;
        c.scale.reset();
        EXPECT_EQ(check_case(c, implementation), "");
      }
    }
  }
}

TEST(Faults, A26_head_counts_that_do_not_divide) {
  for (const auto& [Hq, Hv] : {std::pair<std::int64_t, std::int64_t>{2, 3}, {3, 2}, {4, 6}}) {
    Case c;
    c.Hq = Hq;
    c.Hv = Hv;
    try {
      plan(ChunkForward{problem_of(c)});
      FAIL() << Hq << " and " << Hv;
    } catch (const InvalidArgument& error) {
      const std::string text = error.what();
      EXPECT_NE(text.find(std::to_string(Hq)), std::string::npos) << text;
      EXPECT_NE(text.find(std::to_string(Hv)), std::string::npos) << text;
    }
  }
}

/// A group of value heads equals separate heads with the q/k head repeated next to each other; dq and dk are sums over the group.
TEST(Faults, A26_groups_are_neighbours) {
  for (Op op : kAllOps) {
    std::vector<std::string> implementations = tested_implementations(op, DType::f32);
    implementations.push_back("reference");
    for (const std::string& implementation : implementations) {
      for (const auto& [Hq, Hv] : {std::pair<std::int64_t, std::int64_t>{16, 48}, {1, 8}, {2, 4}}) {
        Case grouped = parse_case("T=66 K=16 V=16 initial=1 d_final=1"), repeated;
        grouped.op = op;
        grouped.Hq = Hq;
        grouped.Hv = Hv;
        if (implementation == "reference") grouped = in_double(grouped);
        repeated = grouped;
        repeated.Hq = Hv;
        Tensors inputs = make_inputs(grouped);
        const Values expected = run_case(grouped, inputs, {implementation, 1});
        for (const char* name : {"q", "k"}) {
          Tensor wide(grouped.dtype, {1, 66, Hv, 16});
          for (std::int64_t h = 0; h < Hv; ++h)
            wide.slice(2, h, 1).set_values(inputs.at(name).slice(2, h / (Hv / Hq), 1).values());
          inputs[name] = wide;
        }
        Values values = run_case(repeated, inputs, {implementation, 1});
        for (const char* name : {"d_q", "d_k"}) {
          if (values.count(name) == 0) continue;
          std::vector<double> sums(static_cast<std::size_t>(66 * Hq * 16), 0.0);
          for (std::size_t i = 0; i < values.at(name).size(); ++i) {
            const auto at = static_cast<std::int64_t>(i), token = at / (Hv * 16), h = at / 16 % Hv;
            sums[static_cast<std::size_t>((token * Hq + h / (Hv / Hq)) * 16 + at % 16)] += values.at(name)[i];
          }
          values[name] = sums;
        }
        for (const auto& [name, x] : values) EXPECT_LT(relative_rms(x, expected.at(name)), 1e-6) << implementation << " " << name;
      }
    }
  }
}

}  // namespace
}  // namespace flashqla::test
