// A case on the device against the reference in double.
#pragma once

#include <gtest/gtest.h>

#include <span>
#include <string>
#include <vector>

#include "device/device_mover.hpp"
#include "harness/compare.hpp"
#include "harness/options.hpp"
#include "harness/pairwise.hpp"
#include "harness/parts.hpp"

namespace flashqla::test {

/// That the tests of a program are about.
inline const char* cuda_implementation = "cuda-portable";

inline Values run_on_cuda(const Case& c, const Tensors& inputs) {
  DeviceMover mover;
  RunOptions options{cuda_implementation};
  options.mover = &mover;
  return run_case(c, inputs, options);
}

/// What is wrong with the results of the case on these inputs; empty if nothing.
inline std::string faults_of(const Case& c, const Tensors& inputs) {
  const double recurrence = c.dtype == DType::f32 ? fp32_recurrence_error(c, inputs) : 0;
  std::string lines;
  try {
    lines = differences(c, inputs, run_on_cuda(c, inputs), truth(c, inputs), recurrence);
  } catch (const std::exception& error) {
    lines = std::string("  threw: ") + error.what() + "\n";
  }
  return lines.empty() ? "" : to_text(c) + "\n" + lines;
}
inline std::string faults_of(const Case& c) { return faults_of(c, make_inputs(c)); }

/// K and V made multiples of 16, and no tensors that would not fit.
inline Case with_widths(Case c) {
  c.K = (c.K + 15) / 16 * 16;
  c.V = (c.V + 15) / 16 * 16;
  if (c.strides == Strides::huge) c.strides = Strides::dense;
  return c;
}

/// The table's cases of an operation, as `taken` changes them to what the kernels take.
template <class Taken>
void expect_table_cases(Op op, const Taken& taken) {
  for (const char* tag : {"smoke", "full"}) {
    for (const Case& c : load_cases("problems.txt", tag)) {
      if (c.op != op) continue;
      EXPECT_EQ(faults_of(taken(c)), "");
    }
  }
}

/// Every pair of values of two options of an operation, likewise changed.
template <class Taken>
void expect_option_pairs(Op op, const std::vector<Option>& options, std::uint64_t seed, const Taken& taken) {
  Case base;
  base.op = op;
  for (const Case& c : pairwise(base, options, seed)) EXPECT_EQ(faults_of(taken(c)), "");
}

inline constexpr DType kChunkDTypes[] = {DType::bf16, DType::f16, DType::f32};

/// Every length up to three chunks and a token, of the chunked operation and options of `base`.
inline void expect_lengths(const Case& base) {
  for (std::int64_t T = 0; T <= 193; ++T) {
    Case c = base;
    c.T = T;
    c.K = T % 5 == 4 ? 64 : 16;
    c.V = T % 7 == 3 ? 48 : 16;
    c.dtype = kChunkDTypes[T / 2 % 3];
    c.initial = T % 3 == 0;
    c.d_final = T % 4 < 2;
    c.l2norm = T % 3 == 1;
    c.seed = static_cast<std::uint64_t>(T) + 1;
    EXPECT_EQ(faults_of(c), "");
  }
}

inline void expect_widths(const Case& base) {
  for (std::int64_t K : {16, 48, 64, 80, 128, 144, 192, 256}) {
    for (std::int64_t V : {16, 32, 48, 64, 112, 128, 256}) {
      Case c = base;
      c.K = K;
      c.V = V;
      c.dtype = kChunkDTypes[(K + V) / 16 % 3];
      EXPECT_EQ(faults_of(c), "");
    }
  }
}

inline void expect_hard_data(const Case& base, std::span<const DType> dtypes = kChunkDTypes) {
  for (Data data : {Data::usual, Data::strong_decay, Data::no_decay, Data::growth, Data::forget, Data::beta_zero, Data::beta_two,
                    Data::repeated_keys, Data::unnormalised}) {
    for (DType dtype : dtypes) {
      for (std::int64_t T : {70, 300}) {
        Case c = base;
        c.T = T;
        c.data = data;
        c.dtype = dtype;
        EXPECT_EQ(faults_of(c), "");
      }
    }
  }
}

/// A sequence has the same bits in a pack with many others and alone, and in a second run. `of_tokens`: results with rows of
/// tokens; `of_sequence`: that with a row a sequence.
inline void expect_pack_is_its_sequences(const Case& base, std::span<const DType> dtypes,
                                         const std::vector<const char*>& of_tokens, const char* of_sequence) {
  for (DType dtype : dtypes) {
    std::vector<std::int64_t> lengths = {64, 0, 130, 1, 17, 300};
    lengths.resize(40, 70);
    Case c = with_lengths(base, lengths, 70);
    c.dtype = dtype;
    const Tensors inputs = make_inputs(c);
    const Values packed = run_on_cuda(c, inputs);
    EXPECT_EQ(bit_differences(packed, run_on_cuda(c, inputs)), "") << "a second run";
    for (std::int64_t n = 0; n < 8; ++n) {
      const Part part = sequence_alone(c, inputs, n);
      Values expected = {{of_sequence, rows_of(packed.at(of_sequence), c.sequences(), n, 1)}};
      for (const char* name : of_tokens) expected[name] = rows_of(packed.at(name), c.T, c.begin(n), c.length(n));
      EXPECT_EQ(bit_differences(run_on_cuda(part.c, part.inputs), expected), "") << "sequence " << n;
    }
  }
}

/// The forward of 256 tokens in two calls, the second of which gets the first one's state, has the bits of one call.
inline void expect_split_is_the_whole(const Case& base, std::span<const DType> dtypes) {
  for (DType dtype : dtypes) {
    Case c = base;
    c.T = 256;
    c.dtype = dtype;
    const Tensors inputs = make_inputs(c);
    const Values whole = run_on_cuda(c, inputs);
    for (std::int64_t at : {0, 64, 128, 192, 256}) {
      Part first = token_range(c, inputs, 0, at), second = token_range(c, inputs, at, c.T - at);
      const Values a = run_on_cuda(first.c, first.inputs);
      second.inputs["initial_state"] = inputs.at("initial_state").clone();
      second.inputs.at("initial_state").set_values(a.at("final_state"));
      Values joined = run_on_cuda(second.c, second.inputs);
      joined.at("o").insert(joined.at("o").begin(), a.at("o").begin(), a.at("o").end());
      EXPECT_EQ(bit_differences(joined, whole), "") << "split at " << at;
    }
  }
}

}  // namespace flashqla::test
