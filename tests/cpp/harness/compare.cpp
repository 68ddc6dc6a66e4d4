#include "harness/compare.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <fstream>
#include <limits>
#include <sstream>
#include <stdexcept>

#include "harness/fp32_recurrence.hpp"
#include "harness/run.hpp"
#include "harness/tested.hpp"

namespace flashqla::test {

namespace {

double tolerance(const std::string& name) {
  static const std::string kText = [] {
    std::ifstream stream(case_file("tolerances.json"));
    std::ostringstream text;
    text << stream.rdbuf();
    return text.str();
  }();
  const std::size_t at = kText.find('"' + name + "\":");
  if (at == std::string::npos) throw std::runtime_error("no tolerance " + name);
  return std::stod(kText.substr(at + name.size() + 3));
}

bool is_state(const std::string& output) { return output == "final_state" || output == "stored" || output == "token_states"; }
bool is_gradient(const std::string& output) { return output.rfind("d_", 0) == 0; }

/// 0 fp32, 1 fp16, 2 bf16.
int coarseness(DType dtype) { return dtype == DType::bf16 ? 2 : dtype == DType::f16 ? 1 : 0; }

DType output_dtype(const Case& c, const Tensors& inputs, const std::string& output) {
  if (is_gradient(output)) return c.f32_gradients ? DType::f32 : inputs.at(output.substr(2)).dtype();
  if (output == "stored" || output == "token_states" || (output == "final_state" && inputs.count("write") > 0))
    return c.state_dtype;
  return output == "final_state" || output == "g_cumulative" ? DType::f32 : c.dtype;
}

std::int64_t heads_of(const Case& c, const std::string& output) { return output == "d_g" ? c.Hv : 1; }

}  // namespace

double relative_rms(const std::vector<double>& x, const std::vector<double>& truth) {
  if (x.size() != truth.size()) throw std::runtime_error("sizes differ");
  double difference = 0, norm = 0;
  for (std::size_t i = 0; i < x.size(); ++i) {
    if (std::isnan(truth[i]) && std::isnan(x[i])) continue;
    if (std::isinf(truth[i]) && x[i] == truth[i]) continue;
    if (!std::isfinite(truth[i]) || !std::isfinite(x[i])) return std::numeric_limits<double>::infinity();
    difference += (x[i] - truth[i]) * (x[i] - truth[i]);
    norm += truth[i] * truth[i];
  }
  if (difference == 0) return 0;
  return std::sqrt(difference / (norm > 0 ? norm : static_cast<double>(x.size())));
}

double worst_head(const std::vector<double>& x, const std::vector<double>& truth, std::int64_t heads) {
  double worst = 0;
  const auto step = static_cast<std::size_t>(heads);
  for (std::size_t h = 0; h < step; ++h) {
    std::vector<double> a, b;
    for (std::size_t i = h; i < x.size(); i += step) {
      a.push_back(x[i]);
      b.push_back(truth[i]);
    }
    worst = std::max(worst, relative_rms(a, b));
  }
  return worst;
}

double bound_of(const Case& c, const std::string& output, DType output_dtype, double recurrence) {
  const DType coarsest = coarseness(output_dtype) > coarseness(c.dtype) ? output_dtype : c.dtype;
  if (output == "g_cumulative") return tolerance("fp32.smallest");
  if (coarsest == DType::f32 || coarsest == DType::f64) {
    const bool chunks_on_device = tests_a_device() && c.op != Op::recurrent;
    const double smallest = tolerance(chunks_on_device ? "fp32.smallest_of_chunks_on_cuda" : "fp32.smallest");
    const double bound = std::max(smallest, tolerance("fp32.recurrence_factor") * recurrence);
    return is_gradient(output) ? bound * tolerance("fp32.gradient_factor") : bound;
  }
  const char* kind = output == "d_g"       ? "bf16.d_g_of_a_head"
                     : is_gradient(output) ? "bf16.gradient"
                     : is_state(output)    ? "bf16.state"
                                           : "bf16.o";
  return tolerance(kind) * (coarsest == DType::f16 ? tolerance("fp16.share_of_bf16") : 1);
}

double fp32_recurrence_error(const Case& c, const Tensors& inputs) {
  Case forward = c;
  forward.op = Op::forward;
  forward.stored = StoredStates::none;
  forward.extras = false;
  forward.final = true;
  if (c.gate == Gate::cumulative) forward.gate = Gate::log_decay;
  return fp32_recurrence_against_double(forward, inputs);
}

std::string differences(const Case& c, const Tensors& inputs, const Values& values, const Values& expected, double recurrence) {
  std::ostringstream lines;
  for (const auto& [name, truth] : expected) {
    const double error = worst_head(values.at(name), truth, heads_of(c, name));
    const double bound = bound_of(c, name, output_dtype(c, inputs, name), recurrence);
    if (!(error <= bound)) lines << "  " << name << ": error " << error << " > " << bound << "\n";
  }
  return lines.str();
}

namespace {

std::string check(const Case& c, const std::vector<std::string>& implementations, int threads) {
  const Tensors inputs = make_inputs(c);
  const double recurrence = c.dtype == DType::f32 ? fp32_recurrence_error(c, inputs) : 0;
  const Values expected = truth(c, inputs);
  std::string result;
  for (const std::string& implementation : implementations) {
    std::string lines;
    try {
      lines = differences(c, inputs, run_case(c, inputs, {implementation, threads}), expected, recurrence);
    } catch (const std::exception& error) {
      lines = std::string("  threw: ") + error.what() + "\n";
    }
    if (!lines.empty()) result += implementation + " on " + to_text(c) + "\n" + lines;
  }
  return result;
}

}  // namespace

std::string check_case(const Case& c, const std::string& implementation, int threads) {
  return check(c, {implementation}, threads);
}

std::string check_all(const Case& c, int threads) {
  std::vector<std::string> implementations = tested_implementations(c.op, c.dtype);
  implementations.push_back("reference");
  return check(c, implementations, threads);
}

std::string bit_differences(const Values& a, const Values& b) {
  std::string names;
  for (const auto& [name, x] : a) {
    const std::vector<double>& y = b.at(name);
    bool same = x.size() == y.size();
    for (std::size_t i = 0; same && i < x.size(); ++i) {
      same = (std::isnan(x[i]) && std::isnan(y[i])) || std::memcmp(&x[i], &y[i], sizeof(double)) == 0;
    }
    if (!same) names += " " + name;
  }
  return names;
}

}  // namespace flashqla::test
