// Faults that users have reported for such kernels, by number: sequences, lengths, padding, states.
#include <gtest/gtest.h>

#include <cmath>
#include <thread>

#include "harness/compare.hpp"
#include "harness/parts.hpp"
#include "harness/run.hpp"
#include "harness/tested.hpp"

namespace flashqla::test {
namespace {

constexpr Op kChunkOps[] = {Op::forward, Op::backward};
constexpr Op kAllOps[] = {Op::forward, Op::backward, Op::recurrent};

Case small_case(Op op, DType dtype = DType::bf16) {
  Case c = parse_case("Hq=1 Hv=2 K=32 V=32 initial=1 d_final=1");
  c.op = op;
  c.dtype = dtype;
  return c;
}

/// An index table must follow the contents of cu_seqlens, not its address.
TEST(Faults, A01_offsets_changed_in_place) {
  for (const std::string& implementation : tested_implementations(Op::forward, DType::bf16)) {
    Case c = with_lengths(small_case(Op::forward), {30, 70, 28});
    Tensors inputs = make_inputs(c);
    run_case(c, inputs, {implementation, 2});
    for (const auto& lengths : {std::vector<std::int64_t>{100, 0, 28}, {1, 126, 1}, {64, 64, 0}}) {
      c = with_lengths(c, lengths);
      for (std::int64_t n = 0; n <= 3; ++n) inputs.at("cu_seqlens").set(n, static_cast<double>(c.begin(n)));
      EXPECT_EQ(differences(c, inputs, run_case(c, inputs, {implementation, 2}), truth(c, inputs), 0), "") << implementation;
    }
  }
}

TEST(Faults, A01_calls_from_several_threads_with_other_offsets) {
  for (const std::string& implementation : tested_implementations(Op::forward, DType::bf16)) {
    const Case first = with_lengths(small_case(Op::forward), {30, 70, 28}),
               second = with_lengths(small_case(Op::forward), {100, 0, 28});
    const Tensors inputs_1 = make_inputs(first), inputs_2 = make_inputs(second);
    const Values expected_1 = run_case(first, inputs_1, {implementation, 1}),
                 expected_2 = run_case(second, inputs_2, {implementation, 1});
    std::string seen_1, seen_2;
    const auto repeat = [&](const Case& c, const Tensors& inputs, const Values& expected, std::string& seen) {
      for (int i = 0; i < 50; ++i) seen += bit_differences(run_case(c, inputs, {implementation, 2}), expected);
    };
    std::thread other([&] { repeat(second, inputs_2, expected_2, seen_2); });
    repeat(first, inputs_1, expected_1, seen_1);
    other.join();
    EXPECT_EQ(seen_1 + seen_2, "") << implementation;
  }
}

TEST(Faults, A02_zero_length_sequences) {
  for (Op op : kAllOps) {
    for (const auto& lengths : {std::vector<std::int64_t>{0, 64}, {64, 0}, {64, 0, 64}, {0, 0, 5}, {0}, {0, 0}}) {
      for (int initial = 0; initial < 2; ++initial) {
        Case c = with_lengths(small_case(op), lengths);
        c.initial = initial == 1;
        EXPECT_EQ(check_all(c, 2), "");
      }
    }
  }
}

TEST(Faults, A02_neighbours_of_an_empty_sequence_do_not_change) {
  for (Op op : kChunkOps) {
    for (const std::string& implementation : tested_implementations(op, DType::bf16)) {
      Case with = with_lengths(small_case(op), {64, 0, 130});
      with.initial = with.d_final = false;
      Case without = with_lengths(with, {64, 130});
      Tensors inputs = make_inputs(with);
      const Values a = run_case(with, inputs, {implementation, 1});
      inputs["cu_seqlens"] = make_inputs(without).at("cu_seqlens");
      for (const auto& [name, values] : run_case(without, inputs, {implementation, 1})) {
        if (name == "final_state") continue;
        EXPECT_EQ(values, a.at(name)) << implementation << " " << name;
      }
    }
  }
}

TEST(Faults, A06_more_than_65535_sequences_times_heads) {
  for (Op op : kAllOps) {
    const DType dtype = tested_implementations(op, DType::f32).empty() ? DType::bf16 : DType::f32;
    Case c = with_lengths(small_case(op, dtype), std::vector<std::int64_t>(2100, 1));
    c.Hq = 4;
    c.Hv = 32;
    c.K = c.V = tested_width(4);
    EXPECT_EQ(check_all(c, 2), "");
  }
}

/// The outputs hold NaN first; rows 256.. must be exactly zero afterwards.
TEST(Faults, A07_rows_past_the_last_offset_are_zero) {
  for (Op op : kChunkOps) {
    for (DType dtype : {DType::f32, DType::bf16}) {
      std::vector<std::string> implementations = tested_implementations(op, dtype);
      implementations.push_back("reference");
      for (const std::string& implementation : implementations) {
        Case c = with_lengths(small_case(op, dtype), {200, 56}, 144);
        c.gate = Gate::computed;
        c.beta = Beta::sigmoid;
        c.l2norm = true;
        for (const auto& [name, values] : run_case(c, make_inputs(c), {implementation, 2})) {
          if (name.find("state") != std::string::npos || name == "d_a_log" || name == "d_dt_bias") continue;
          for (double x : rows_of(values, c.T, 256, 144)) ASSERT_EQ(x, 0) << implementation << " " << name;
        }
      }
    }
  }
}

TEST(Faults, A10_zero_initial_state_and_ragged_lengths) {
  for (Op op : kChunkOps) {
    for (const std::string& implementation : tested_implementations(op, DType::bf16)) {
      Case c = with_lengths(small_case(op), {65, 1, 129, 64});
      c.Hq = c.Hv = 12;
      Tensors inputs = make_inputs(c);
      inputs.at("initial_state").fill(0);
      const Values zero = run_case(c, inputs, {implementation, 8});
      inputs.erase("initial_state");
      for (const auto& [name, values] : run_case(c, inputs, {implementation, 8})) {
        EXPECT_EQ(values, zero.at(name)) << implementation << " " << name;
      }
    }
  }
}

/// Fast decay at the end of each chunk: a decay taken one token too early is seen in the state.
TEST(Faults, A12_decay_between_chunks) {
  for (std::int64_t T : {63, 64, 65, 128, 200}) {
    for (Op op : kChunkOps) {
      Case c = parse_case("K=128 V=128 initial=1 d_final=1 dtype=bf16");
      c.op = op;
      c.T = T;
      Tensors inputs = make_inputs(c);
      for (std::int64_t t = 0; t < T; ++t) inputs.at("g").set(t, t % 64 >= 57 ? -1 : -0.01);
      for (const std::string& implementation : tested_implementations(op, c.dtype)) {
        EXPECT_EQ(differences(c, inputs, run_case(c, inputs, {implementation, 1}), truth(c, inputs), 0), "")
            << implementation << T;
      }
    }
  }
}

/// Races show as differences between repeats of two alternating inputs.
TEST(Faults, A13_alternating_inputs_repeat_bit_for_bit) {
  for (Op op : kChunkOps) {
    for (const std::string& implementation : tested_implementations(op, DType::bf16)) {
      Case a = with_lengths(small_case(op), {500, 0, 12, 64}), b = a;
      b.seed = 99;
      const Tensors inputs_a = make_inputs(a), inputs_b = make_inputs(b);
      const Values expected_a = run_case(a, inputs_a, {implementation, 4}),
                   expected_b = run_case(b, inputs_b, {implementation, 4});
      for (int i = 0; i < 25; ++i) {
        ASSERT_EQ(bit_differences(run_case(a, inputs_a, {implementation, 4}), expected_a), "") << implementation << i;
        ASSERT_EQ(bit_differences(run_case(b, inputs_b, {implementation, 4}), expected_b), "") << implementation << i;
      }
    }
  }
}

TEST(Faults, A14_partial_last_chunk) {
  for (Op op : kChunkOps) {
    for (std::int64_t T : {1, 2, 15, 16, 17, 63, 65, 500, 1000}) {
      Case c = small_case(op);
      c.T = T;
      EXPECT_EQ(check_all(c), "");
    }
    EXPECT_EQ(check_all(with_lengths(small_case(op), {57, 2, 5}, 30)), "");
  }
}

/// The state is honoured whatever the number of tokens of the later call.
TEST(Faults, A20_second_call_continues) {
  for (const std::string& implementation : tested_implementations(Op::forward, DType::f32)) {
    Case c = small_case(Op::forward, DType::f32);
    c.T = 48;
    const Tensors inputs = make_inputs(c);
    const double recurrence = fp32_recurrence_error(c, inputs);
    const Values expected = truth(c, inputs);
    const auto continued = [&](Op op, std::int64_t tokens_a_call) {
      Part part = token_range(c, inputs, 0, 32);
      Values values = run_case(part.c, part.inputs, {implementation, 1});
      std::vector<double> o = values.at("o");
      for (std::int64_t t = 32; t < 48; t += tokens_a_call) {
        Tensor state(DType::f32, inputs.at("initial_state").sizes());
        state.set_values(values.at("final_state"));
        part = token_range(c, inputs, t, tokens_a_call);
        part.inputs["initial_state"] = state;
        part.c.op = op;
        values = run_case(part.c, part.inputs, {implementation, 1});
        o.insert(o.end(), values.at("o").begin(), values.at("o").end());
      }
      values["o"] = o;
      return differences(c, inputs, values, expected, recurrence);
    };
    EXPECT_EQ(continued(Op::forward, 16), "") << implementation;
    EXPECT_EQ(continued(Op::recurrent, 1), "") << implementation;
    EXPECT_EQ(continued(Op::recurrent, 4), "") << implementation;
    EXPECT_EQ(continued(Op::forward, 1), "") << implementation;
  }
}

TEST(Faults, A21_a_pack_does_not_leak_between_samples) {
  for (Op op : kChunkOps) {
    for (const std::string& implementation : tested_implementations(op, DType::bf16)) {
      Case c = with_lengths(small_case(op), {40, 24}), other = c;
      other.seed = 1234;
      const Tensors inputs = make_inputs(c), changed = make_inputs(other);
      Tensors mixed;
      for (const auto& [name, tensor] : inputs) {
        mixed[name] = tensor.clone();
        if (name == "cu_seqlens") continue;
        const bool state = name.find("state") != std::string::npos;
        const int dim = state ? 0 : 1;
        mixed.at(name).slice(dim, 0, state ? 1 : 40).set_values(changed.at(name).slice(dim, 0, state ? 1 : 40).values());
      }
      const Values before = run_case(c, inputs, {implementation, 1}), after = run_case(c, mixed, {implementation, 1});
      for (const auto& [name, values] : before) {
        const bool state = name.find("state") != std::string::npos;
        const std::int64_t rows = state ? 2 : 64, first = state ? 1 : 40;
        EXPECT_EQ(rows_of(values, rows, first, rows - first), rows_of(after.at(name), rows, first, rows - first))
            << implementation << name;
      }
    }
  }
}

/// Rows of zeros (k = v = 0, beta = 0, g = 0) before the real ones change nothing, and their norm has a finite gradient.
TEST(Faults, A22_padding_tokens_before_the_sequence) {
  for (Op op : kChunkOps) {
    for (const std::string& implementation : tested_implementations(op, DType::f32)) {
      Case c = small_case(op, DType::f32);
      c.T = 64;
      c.l2norm = true;
      Tensors inputs = make_inputs(c);
      for (const char* name : {"q", "k", "v", "g", "beta", "d_o"}) {
        if (inputs.count(name) > 0) inputs.at(name).slice(1, 0, 10).fill(0);
      }
      const Part real = token_range(c, inputs, 10, 54);
      const Values padded = run_case(c, inputs, {implementation, 1}), expected = truth(real.c, real.inputs);
      Values cut_off;
      for (const auto& [name, values] : padded) {
        for (double x : values) ASSERT_TRUE(std::isfinite(x)) << implementation << name;
        cut_off[name] = name.find("state") != std::string::npos ? values : rows_of(values, 64, 10, 54);
      }
      EXPECT_EQ(differences(real.c, real.inputs, cut_off, expected, fp32_recurrence_error(real.c, real.inputs)), "")
          << implementation;
    }
  }
}

}  // namespace
}  // namespace flashqla::test
