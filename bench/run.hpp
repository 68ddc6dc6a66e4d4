// Runs one case and says how long it took.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "bench/cases.hpp"
#include "bench/machine.hpp"
#include "bench/timing.hpp"

namespace flashqla::bench {

struct Measurement {
  std::string implementation;  // that ran
  std::size_t workspace_bytes = 0;
  Timings timings;
  Peak peak = Peak::fp32_plain;
  std::vector<double> peaks;     // GFLOP/s of as many threads, measured after each repeat for as long as it took; not recurrent
  std::vector<double> passes;    // seconds of an in-place pass over as many bytes, measured after each repeat; recurrent only
  std::int64_t state_bytes = 0;  // read and written by one call; recurrent only
};

/// Throws flashqla::Error when no implementation takes the case. `memory` holds the cold states.
Measurement run_case(const Case& bench_case, double seconds, ColdMemory& memory);

/// Multiply-adds counted as 2: 7 K V a token and value head forward, 19 K V backward.
double flops_of(const Case& bench_case);

}  // namespace flashqla::bench
