// flashqla_bench CASES [SECONDS]: measures the machine's peaks, then runs every case of the file for about SECONDS (default 0.5),
// and prints one JSON object a line: {"kind":"machine"}, then {"kind":"case"} or {"kind":"refused"} for each case. bench/bench.py
// makes the table and the picture of it.
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <optional>
#include <sstream>
#include <thread>

#include "bench/cases.hpp"
#include "bench/machine.hpp"
#include "bench/run.hpp"
#include "flashqla/flashqla.hpp"

namespace flashqla::bench {
namespace {

constexpr std::size_t kColdBytes = std::size_t{1536} << 20;  // three times the largest L3 cache seen

/// Writes `"key": value` pairs of one JSON object.
class JsonLine {
 public:
  JsonLine& text(const char* key, const std::string& value) {
    std::string quoted = "\"";
    for (char c : value) {
      if (c == '"' || c == '\\') quoted += '\\';
      quoted += c == '\n' ? ' ' : c;
    }
    return raw(key, quoted + "\"");
  }
  JsonLine& number(const char* key, std::optional<double> value) {
    if (!value) return raw(key, "null");
    char digits[32];
    std::snprintf(digits, sizeof digits, "%.6g", *value);
    return raw(key, digits);
  }
  JsonLine& integer(const char* key, std::int64_t value) { return raw(key, std::to_string(value)); }
  JsonLine& raw(const char* key, const std::string& value) {
    body_ += (body_.empty() ? "\"" : ", \"") + std::string(key) + "\": " + value;
    return *this;
  }
  std::string str() const { return "{" + body_ + "}"; }

 private:
  std::string body_;
};

void print_machine(ColdMemory& memory) {
  std::string peaks;
  const int most_threads = static_cast<int>(std::min(2u, std::max(1u, std::thread::hardware_concurrency())));
  for (int threads = 1; threads <= most_threads; ++threads) {
    JsonLine line;
    line.integer("threads", threads);
    for (Peak peak : kPeaks) line.number((std::string(name_of(peak)) + "_gflops").c_str(), measure_peak(peak, threads));
    line.number("update_gbytes", 1e-9 * memory.update_bandwidth(threads))
        .number("copy_gbytes", 1e-9 * memory.copy_bandwidth(threads));
    peaks += (peaks.empty() ? "" : ", ") + line.str();
  }
  JsonLine line;
  line.text("kind", "machine").text("processor", processor_name()).text("compiler", __VERSION__).text("version", kVersion);
  line.integer("processors", static_cast<std::int64_t>(std::thread::hardware_concurrency())).raw("peaks", "[" + peaks + "]");
  std::cout << line.str() << std::endl;
}

void describe(JsonLine& line, const Case& bench_case) {
  line.text("case", bench_case.text).text("op", name_of(bench_case.op));
  line.integer("B", bench_case.batch)
      .integer("T", bench_case.tokens)
      .integer("Hq", bench_case.heads_qk)
      .integer("Hv", bench_case.heads_v);
  line.integer("K", bench_case.dim_k).integer("V", bench_case.dim_v).text("dtype", short_name_of(bench_case.dtype));
  line.text("state", short_name_of(bench_case.state_dtype)).text("layout", name_of(bench_case.layout));
  line.text("states", name_of(bench_case.states)).integer("threads", bench_case.threads);
  line.text("implementation_asked", bench_case.implementation);
}

void print_case(const Case& bench_case, double seconds_each, ColdMemory& memory) {
  JsonLine line;
  try {
    const Measurement result = run_case(bench_case, seconds_each, memory);
    const bool one_thread = bench_case.threads == 1;
    const std::vector<double>& judged = one_thread ? result.timings.cpu : result.timings.wall;
    const double seconds = minimum(judged);
    const auto cpu_only = [&](double value) { return one_thread ? std::optional(value) : std::nullopt; };
    const double gflops = 1e-9 * flops_of(bench_case) / seconds;
    line.text("kind", "case");
    describe(line, bench_case);
    line.text("implementation", result.implementation)
        .integer("workspace_bytes", static_cast<std::int64_t>(result.workspace_bytes));
    line.integer("repeats", static_cast<std::int64_t>(judged.size()))
        .number("seconds", seconds)
        .text("clock", one_thread ? "cpu" : "wall");
    line.number("cpu_min", cpu_only(minimum(result.timings.cpu))).number("cpu_median", cpu_only(median(result.timings.cpu)));
    line.number("wall_min", minimum(result.timings.wall)).number("wall_median", median(result.timings.wall));
    line.number("tokens_per_second", static_cast<double>(bench_case.batch * bench_case.tokens) / seconds)
        .number("gflops", gflops);
    if (bench_case.op != Op::recurrent) {
      std::vector<double> shares;
      for (std::size_t i = 0; i < judged.size(); ++i) shares.push_back(1e-9 * flops_of(bench_case) / judged[i] / result.peaks[i]);
      line.text("peak", name_of(result.peak)).number("peak_gflops", median(result.peaks)).number("share_of_peak", median(shares));
    } else {
      std::vector<double> ratios;
      for (std::size_t i = 0; i < judged.size(); ++i) ratios.push_back(judged[i] / result.passes[i]);
      line.integer("state_bytes", result.state_bytes).number("state_seconds", median(result.passes));
      line.number("time_to_state_time", median(ratios));
    }
  } catch (const Error& error) {
    line = JsonLine();
    line.text("kind", "refused");
    describe(line, bench_case);
    line.text("reason", error.what());
  }
  std::cout << line.str() << std::endl;
}

int main(int argc, char** argv) {
  if (argc < 2 || argc > 3) {
    std::cerr << "usage: flashqla_bench CASES [SECONDS]\n";
    return 2;
  }
  std::ifstream file(argv[1]);
  if (!file) {
    std::cerr << "flashqla_bench: cannot read " << argv[1] << '\n';
    return 2;
  }
  try {
    const std::vector<Case> cases = read_cases(file);
    const double seconds_each = argc == 3 ? std::stod(argv[2]) : 0.5;
    ColdMemory memory(kColdBytes);
    print_machine(memory);
    for (const Case& bench_case : cases) {
      std::cerr << bench_case.text << std::endl;
      print_case(bench_case, seconds_each, memory);
    }
  } catch (const std::exception& error) {
    std::cerr << "flashqla_bench: " << error.what() << '\n';
    return 1;
  }
  return 0;
}

}  // namespace
}  // namespace flashqla::bench

int main(int argc, char** argv) { return flashqla::bench::main(argc, argv); }
