// Parts of a problem as problems of their own, and parts of its outputs.
#pragma once

#include "harness/case.hpp"
#include "harness/tensor.hpp"

namespace flashqla::test {

struct Part {
  Case c;
  Tensors inputs;
};

/// Tokens [start, start + length) of every sequence of an unpacked problem, sharing its memory. The initial state, if any, stays.
Part token_range(const Case& c, const Tensors& inputs, std::int64_t start, std::int64_t length);

/// Sequence n of a packed problem as an unpacked one.
Part sequence_alone(const Case& c, const Tensors& inputs, std::int64_t n);

/// Rows [start, start + length) of an output whose `rows` rows lie one after another (B = 1).
std::vector<double> rows_of(const std::vector<double>& output, std::int64_t rows, std::int64_t start, std::int64_t length);

/// Elements [start, start + length) of dimension `dim` of a row-major tensor.
std::vector<double> cut(const std::vector<double>& values, const std::vector<std::int64_t>& sizes, std::size_t dim,
                        std::int64_t start, std::int64_t length);

}  // namespace flashqla::test
