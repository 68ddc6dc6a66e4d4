// recurrent_forward on the device against the reference in double.
#include <gtest/gtest.h>

#include "device/check.hpp"
#include "harness/parts.hpp"

namespace flashqla::test {
namespace {

constexpr DType kDTypes[] = {DType::f32, DType::bf16, DType::f16};

TEST(RecurrentForward, Lengths) {
  for (std::int64_t T = 0; T <= 40; ++T) {
    for (StateLayout layout : {StateLayout::key_value, StateLayout::value_key}) {
      Case c = parse_case("op=recurrent B=2 Hq=1 Hv=2");
      c.T = T;
      c.K = T % 5 == 4 ? 64 : 16;
      c.V = T % 7 == 3 ? 48 : 16;
      c.dtype = kDTypes[T % 3];
      c.layout = layout;
      c.initial = T % 2 == 0;
      c.l2norm = T % 3 == 1;
      c.seed = static_cast<std::uint64_t>(T) + 1;
      EXPECT_EQ(faults_of(c), "");
    }
  }
}

TEST(RecurrentForward, Widths) {
  for (std::int64_t K : {16, 48, 64, 80, 128, 144, 192, 256}) {
    for (std::int64_t V : {16, 32, 48, 64, 112, 128, 256}) {
      Case c = parse_case("op=recurrent B=3 T=2 Hq=1 Hv=2 initial=1");
      c.K = K;
      c.V = V;
      c.dtype = kDTypes[(K + V) / 16 % 3];
      c.layout = (K + V) / 16 % 2 == 0 ? StateLayout::key_value : StateLayout::value_key;
      EXPECT_EQ(faults_of(c), "");
    }
  }
}

TEST(RecurrentForward, Options) { expect_option_pairs(Op::recurrent, recurrent_options(), 300, with_widths); }

/// The common step has a kernel of its own: one token for each batch entry, widths that blocks fill. Strides may lead back to the
/// other one.
TEST(RecurrentForward, OneTokenOfFullWidths) {
  constexpr std::int64_t kWidths[] = {64, 128, 256};
  std::int64_t count = 0;
  expect_option_pairs(Op::recurrent, recurrent_options(), 301, [&](Case c) {
    c = with_widths(c);
    c.lengths.clear();
    c.slack = 0;
    c.B = count % 4 + 1;
    c.T = 1;
    c.K = kWidths[count % 3];
    c.V = 32 * (count % 4 + 1);
    ++count;
    return c;
  });
}

TEST(RecurrentForward, Cases) { expect_table_cases(Op::recurrent, with_widths); }

TEST(RecurrentForward, APackedSequenceIsTheSequenceAloneAndStepsAreTheWhole) {
  for (DType dtype : kDTypes) {
    Case c = with_lengths(parse_case("op=recurrent Hq=2 Hv=4 K=128 V=128 initial=1"), {1, 0, 3, 5}, 2);
    c.dtype = dtype;
    const Tensors inputs = make_inputs(c);
    const Values packed = run_on_cuda(c, inputs);
    EXPECT_EQ(bit_differences(packed, run_on_cuda(c, inputs)), "") << "a second run";
    for (std::int64_t n = 0; n < c.sequences(); ++n) {
      const Part part = sequence_alone(c, inputs, n);
      const Values expected = {{"o", rows_of(packed.at("o"), c.T, c.begin(n), c.length(n))},
                               {"final_state", rows_of(packed.at("final_state"), c.sequences(), n, 1)}};
      EXPECT_EQ(bit_differences(run_on_cuda(part.c, part.inputs), expected), "") << "sequence " << n;
    }
  }
}

/// Without sequences all rows lie past the last offset.
TEST(RecurrentForward, RowsOfNoSequenceAreZero) {
  for (const std::vector<std::int64_t>& lengths : {std::vector<std::int64_t>{0}, std::vector<std::int64_t>{2, 1}}) {
    const Case c = with_lengths(parse_case("op=recurrent Hq=1 Hv=2 K=64 V=32 dtype=bf16"), lengths, 5);
    const Values values = run_on_cuda(c, make_inputs(c));
    const std::vector<double> slack = rows_of(values.at("o"), c.T, c.used(), 5);
    for (double x : slack) EXPECT_EQ(x, 0);
  }
}

/// Indices that lead outside: nothing outside the tensors is touched, and the call ends.
TEST(RecurrentForward, WrongIndicesStayInside) {
  Case c = parse_case("op=recurrent B=4 T=2 Hq=1 Hv=2 K=64 V=64 pool=separate drafts=3 token_states=1 token_rows=1");
  Tensors inputs = make_inputs(c);
  for (const char* name : {"read", "write", "accepted", "token_rows"}) {
    for (std::int64_t i = 0; i < inputs.at(name).count(); ++i) inputs.at(name).set(i, i % 2 == 0 ? 1 << 20 : -70000);
  }
  RunOptions options{cuda_implementation};
  DeviceMover mover;
  options.mover = &mover;
  const Case valid = c;
  Tensors outputs = make_outputs(valid, make_inputs(valid));
  EXPECT_NO_THROW(run_case_into(c, inputs, options, outputs));
}

}  // namespace
}  // namespace flashqla::test
