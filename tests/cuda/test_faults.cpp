// Faults that users have reported for such kernels, by number: those that only a device has. The others run on a device as they
// are (tests/cpp/test_faults_*.cpp).
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include "cuda/host/device.hpp"

#include "device/check.hpp"

namespace flashqla::test {
namespace {

Values run_on(int device, const Case& c, const Tensors& inputs) {
  DeviceMover mover(device);
  RunOptions options{cuda_implementation};
  options.mover = &mover;
  return run_case(c, inputs, options);
}

/// Tensors on a device that is not the current one, on a stream of it: the same bits, and the current device stays.
TEST(Faults, A16_tensors_on_another_device) {
  int devices = 0;
  cuda::check(cudaGetDeviceCount(&devices), "devices");
  for (const char* text :
       {"T=300 Hq=1 Hv=2 K=64 V=64 dtype=bf16 initial=1", "T=300 Hq=1 Hv=2 K=64 V=64 initial=1",
        "lengths=100+0+30 Hv=2 K=64 V=64 dtype=f16 initial=1", "op=recurrent B=3 T=2 Hv=2 K=64 V=64 initial=1"}) {
    const Case c = parse_case(text);
    const Tensors inputs = make_inputs(c);
    const Values expected = run_on(0, c, inputs);
    for (int current = 0; current < devices; ++current) {
      for (int device = 0; device < devices; ++device) {
        cuda::check(cudaSetDevice(current), "current device");
        EXPECT_EQ(bit_differences(run_on(device, c, inputs), expected), "") << "device " << device << ", current " << current;
        int now = -1;
        cuda::check(cudaGetDevice(&now), "current device");
        EXPECT_EQ(now, current) << "device " << device;
      }
    }
  }
  cuda::check(cudaSetDevice(0), "current device");
}

/// A call that keeps nothing for gradients works with at most 1.6 times its outputs, in the plan's words.
TEST(Faults, D05_memory_of_a_forward) {
  for (const char* text :
       {"T=512", "T=32768", "B=8 T=1024", "T=131072", "lengths=32768+512+512+512", "lengths=1+0+1+1+64+1 slack=9"}) {
    for (const std::int64_t heads_v : {16, 32, 64}) {
      for (const DType dtype : {DType::f32, DType::bf16}) {
        Case c = parse_case(text);
        c.Hq = 16;
        c.Hv = heads_v;
        c.K = c.V = 128;
        c.dtype = dtype;
        Problem problem = problem_of(c);
        problem.device = {DeviceType::cuda, 0};
        const std::int64_t o = c.B * c.T * c.Hv * c.V * element_bytes(dtype), states = problem.sequences() * c.Hv * c.K * c.V * 4;
        const auto bytes = static_cast<double>(plan(ChunkForward{problem}).workspace_bytes);
        EXPECT_LE(bytes, 1.6 * static_cast<double>(o + states)) << to_text(c);
      }
    }
  }
}

/// The backward works with at most two bf16 states and three rows of values for 64 tokens and value head.
TEST(Faults, D05_memory_of_a_backward) {
  for (const char* text : {"T=32768", "B=8 T=1024", "B=64 T=64", "T=131072"}) {
    for (const std::int64_t heads_v : {16, 32, 64}) {
      for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
        Case c = parse_case(std::string("op=backward ") + text);
        c.Hq = 16;
        c.Hv = heads_v;
        c.K = c.V = 128;
        c.dtype = dtype;
        Problem problem = problem_of(c);
        problem.device = {DeviceType::cuda, 0};
        const std::int64_t of_chunk = 2 * c.K * c.V * 2 + 3 * 64 * c.V * element_bytes(dtype);
        const std::int64_t chunks = c.B * (c.T / 64) * c.Hv;
        EXPECT_LE(plan(ChunkBackward{problem}).workspace_bytes, static_cast<std::size_t>(chunks * of_chunk)) << to_text(c);
      }
    }
  }
}

}  // namespace
}  // namespace flashqla::test
