#include "harness/parts.hpp"

namespace flashqla::test {

Part token_range(const Case& c, const Tensors& inputs, std::int64_t start, std::int64_t length) {
  Part part{c, inputs};
  part.c.T = length;
  for (const char* name : {"q", "k", "v", "g", "beta", "d_o"}) {
    const auto found = inputs.find(name);
    if (found != inputs.end()) part.inputs[name] = found->second.slice(1, start, length);
  }
  return part;
}

Part sequence_alone(const Case& c, const Tensors& inputs, std::int64_t n) {
  Part part = token_range(c, inputs, c.begin(n), c.length(n));
  part.c.lengths.clear();
  part.c.slack = 0;
  part.inputs.erase("cu_seqlens");
  for (const char* name : {"initial_state", "d_final_state"}) {
    const auto found = inputs.find(name);
    if (found != inputs.end()) part.inputs[name] = found->second.slice(0, n, 1);
  }
  return part;
}

std::vector<double> cut(const std::vector<double>& values, const std::vector<std::int64_t>& sizes, std::size_t dim,
                        std::int64_t start, std::int64_t length) {
  std::int64_t outer = 1, inner = 1;
  for (std::size_t d = 0; d < sizes.size(); ++d) (d < dim ? outer : inner) *= d == dim ? 1 : sizes[d];
  std::vector<double> result;
  for (std::int64_t i = 0; i < outer; ++i) {
    const auto first = values.begin() + (i * sizes[dim] + start) * inner;
    result.insert(result.end(), first, first + length * inner);
  }
  return result;
}

std::vector<double> rows_of(const std::vector<double>& output, std::int64_t rows, std::int64_t start, std::int64_t length) {
  return cut(output, {rows, rows == 0 ? 0 : static_cast<std::int64_t>(output.size()) / rows}, 0, start, length);
}

}  // namespace flashqla::test
