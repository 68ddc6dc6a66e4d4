// What a test of every implementation is about: those of the CPU, or one of a device, on which the same tests then run.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "harness/run.hpp"

namespace flashqla::test {

/// From here on the program tests this implementation, alone. What run_case is to run on it goes through a mover of its own.
void test_on(const std::string& implementation, std::function<std::unique_ptr<Mover>()> make_mover);
bool tests_a_device();

/// A mover for a run of this implementation; null if it computes on the CPU.
std::unique_ptr<Mover> mover_for(const std::string& implementation);

/// cpu_implementations, or the device's if it takes problems of this dtype.
std::vector<std::string> tested_implementations(Op op, DType dtype);

/// Whether the implementation, tested or "reference", must take problems of this dtype.
bool tested_takes(const std::string& implementation, Op op, DType dtype);

/// K or V, or the next larger one that the tested device takes.
std::int64_t tested_width(std::int64_t width);

}  // namespace flashqla::test
