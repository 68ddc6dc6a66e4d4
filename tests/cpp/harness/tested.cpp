#include "harness/tested.hpp"

#include <cstdlib>

namespace flashqla::test {

namespace {

struct TestedDevice {
  std::string implementation;
  std::function<std::unique_ptr<Mover>()> make_mover;
};
TestedDevice& tested_device() {
  static TestedDevice device;
  return device;
}

bool planned(const Problem& problem, Op op) {
  try {
    if (op == Op::forward) plan(ChunkForward{problem});
    if (op == Op::backward) plan(ChunkBackward{problem});
    if (op == Op::recurrent) plan(RecurrentForward{problem});
    return true;
  } catch (const Unsupported&) {
    return false;
  }
}

}  // namespace

void test_on(const std::string& implementation, std::function<std::unique_ptr<Mover>()> make_mover) {
  tested_device() = {implementation, std::move(make_mover)};
}

bool tests_a_device() { return !tested_device().implementation.empty(); }

std::unique_ptr<Mover> mover_for(const std::string& implementation) {
  return tests_a_device() && implementation == tested_device().implementation ? tested_device().make_mover() : nullptr;
}

bool tested_takes(const std::string& implementation, Op op, DType dtype) {
  const std::unique_ptr<Mover> mover = mover_for(implementation);
  if (mover == nullptr) return takes(implementation, dtype);
  Case c = parse_case("T=1 K=16 V=16");
  c.dtype = dtype;
  Problem problem = problem_of(c);
  problem.device = mover->device();
  setenv("FLASHQLA_IMPL", implementation.c_str(), 1);
  const bool taken = planned(problem, op);
  unsetenv("FLASHQLA_IMPL");
  return taken;
}

std::vector<std::string> tested_implementations(Op op, DType dtype) {
  if (!tests_a_device()) return cpu_implementations(op, dtype);
  const std::string& name = tested_device().implementation;
  return tested_takes(name, op, dtype) ? std::vector<std::string>{name} : std::vector<std::string>{};
}

std::int64_t tested_width(std::int64_t width) { return tests_a_device() ? (width + 15) / 16 * 16 : width; }

}  // namespace flashqla::test
