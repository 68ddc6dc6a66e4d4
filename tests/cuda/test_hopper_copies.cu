// The copy engine of Hopper through ptx/bulk_copy.cuh and host/tensor_map.hpp: the place of every element of a box, zeros outside
// the tensor, copies to both blocks of a cluster, boxes stored. Elements of tensors are numbers that say where they lie.
#include <gtest/gtest.h>
#include <algorithm>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "cuda/host/tensor_map.hpp"
#include "cuda/ptx/bulk_copy.cuh"
#include "cuda/ptx/cluster.cuh"
#include "cuda/ptx/mbarrier.cuh"

#include "device/hopper.cuh"

namespace flashqla::cuda {
namespace {

constexpr int kBoxRows = 64, kBoxColumns = 64, kBoxElements = kBoxRows * kBoxColumns, kBoxBytes = 2 * kBoxElements;
constexpr std::uint16_t kPoison = 0xffff;

/// In a box: pieces of 16 bytes are swizzled.
[[maybe_unused]] FLASHQLA_DEVICE int place_in_box(int at) {
  const int row = at / kBoxColumns, column = at % kBoxColumns;
  return row * kBoxColumns + (column / 8 ^ row % 8) * 8 + column % 8;
}

/// Where a box begins.
struct Corner {
  int column, head, token, batch;
};
std::string to_text(const Corner& c) {
  return "box at column " + std::to_string(c.column) + ", head " + std::to_string(c.head) + ", token " + std::to_string(c.token) +
         ", batch " + std::to_string(c.batch);
}

/// A view of a larger memory: 2 x 100 x 3 heads x 80 columns of 16 bits.
struct View {
  static constexpr int kBatch = 2, kTokens = 100, kHeads = 3, kColumns = 80, kMemory = 2 * 104 * 4 * 112;
  const char* name;
  int first, stride_batch, stride_token, stride_head;

  static bool inside(int column, int head, int token, int batch) {
    return column >= 0 && column < kColumns && head >= 0 && head < kHeads && token >= 0 && token < kTokens && batch >= 0 &&
           batch < kBatch;
  }
  static std::uint16_t number(int column, int head, int token, int batch) {
    return static_cast<std::uint16_t>(1 + ((batch * kTokens + token) * kHeads + head) * kColumns + column);
  }
  std::size_t place(int column, int head, int token, int batch) const {
    return static_cast<std::size_t>(first + batch * stride_batch + token * stride_token + head * stride_head + column);
  }
  template <class Function>
  void for_each(const Function& function) const {
    for (int batch = 0; batch < kBatch; ++batch) {
      for (int token = 0; token < kTokens; ++token) {
        for (int head = 0; head < kHeads; ++head) {
          for (int column = 0; column < kColumns; ++column) function(column, head, token, batch);
        }
      }
    }
  }
  std::vector<std::uint16_t> numbered() const {
    std::vector<std::uint16_t> memory(kMemory, kPoison);
    for_each([&](int column, int head, int token, int batch) {
      memory.at(place(column, head, token, batch)) = number(column, head, token, batch);
    });
    return memory;
  }
  TensorMap map(std::uint16_t* memory, DType dtype) const {
    const TokenTensor x{memory + first, dtype, stride_batch, stride_token, stride_head};
    TensorMap made;
    if (!make_tensor_map(x, {kBatch, kTokens, kHeads, kColumns}, made))
      throw std::runtime_error(std::string("no map of ") + name);
    return made;
  }
};
static_assert(View::kBatch * View::kTokens * View::kHeads * View::kColumns < kPoison);

constexpr View kViews[] = {
    {"[B,T,H,D] with gaps", 2 * 4 * 112 + 112 + 16, 104 * 4 * 112 - 56, 4 * 112 - 8, 112 - 8},
    {"[B,H,T,D] with gaps", 24, 4 * 104 * 112, 112 - 16, 104 * 112},
    {"[T,B,H,D]", 0, 3 * 80, 2 * 3 * 80, 80},
};
const std::vector<Corner> kCorners = {
    {0, 0, 0, 0},    {0, 1, 0, 1},  {16, 2, 36, 1}, {0, 2, 37, 0},  {0, 0, 64, 0},  {0, 1, 99, 1},  {0, 1, 100, 0},
    {0, 1, 1000, 0}, {0, 2, -5, 1}, {0, 2, -63, 0}, {0, 2, -64, 1}, {64, 0, 20, 0}, {64, 2, 60, 1}, {80, 1, 0, 0},
    {-8, 1, 3, 1},   {0, 3, 0, 0},  {0, -1, 0, 1},  {0, 0, 0, 2},   {0, 0, 0, -1},  {40, 1, 50, 0}, {8, 0, 7, 1},
};

std::uint16_t expected_in_box(const Corner& c, int row, int column) {
  const bool inside = View::inside(c.column + column, c.head, c.token + row, c.batch);
  return inside ? View::number(c.column + column, c.head, c.token + row, c.batch) : std::uint16_t{0};
}

/// A box a block: its elements to boxes[block], in their order. The barrier serves two boxes in turn, the first of another
/// corner.
__global__ void load_boxes(const __grid_constant__ TensorMap map, const Corner* corners, std::uint16_t* boxes) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) std::uint16_t loaded[];  // two boxes
  __shared__ std::uint64_t barrier;
  const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
  for (int at = thread; at < 2 * kBoxElements; at += threads) loaded[at] = kPoison;
  ptx::fence_async_shared();
  const std::uint32_t full = ptx::shared_address(&barrier);
  if (thread == 0) {
    ptx::mbarrier_init(full, 1);
    ptx::mbarrier_fence();
  }
  __syncthreads();
  for (int turn = 0; turn < 2; ++turn) {
    const Corner c = corners[(blockIdx.x + 1 - turn) % gridDim.x];
    if (thread == 0) {
      ptx::mbarrier_arrive_expecting(full, kBoxBytes);
      ptx::copy_box(ptx::shared_address(loaded) + turn * kBoxBytes, &map, c.column, c.head, c.token, c.batch, full);
    }
    ptx::mbarrier_wait(full, turn);
  }
  for (int at = thread; at < kBoxElements; at += threads) {
    boxes[blockIdx.x * kBoxElements + at] = loaded[kBoxElements + place_in_box(at)];
  }
#endif
}

TEST_F(Hopper, BoxesLoaded) {
  for (const View& view : kViews) {
    for (const DType dtype : {DType::bf16, DType::f16}) {
      const DeviceArray<std::uint16_t> memory(view.numbered()), boxes(kCorners.size() * kBoxElements);
      const DeviceArray<Corner> corners(kCorners);
      const KernelLaunch launch{static_cast<std::int64_t>(kCorners.size()), 128, 2 * kBoxBytes, nullptr};
      check(start_kernel(load_boxes, launch, view.map(memory.data(), dtype), corners.data(), boxes.data()), "load_boxes");
      const std::vector<std::uint16_t> found = boxes.fetch();
      for (std::size_t i = 0; i < kCorners.size(); ++i) {
        expect_matrix(std::string(view.name) + ", " + to_text(kCorners[i]), found, i * kBoxElements, kBoxRows, kBoxColumns,
                      [&](int row, int column) { return expected_in_box(kCorners[i], row, column); });
      }
    }
  }
}

TEST_F(Hopper, TensorsOutOfReach) {
  const DeviceArray<std::uint16_t> memory(View::kMemory);
  const auto made = [&](int first, std::int64_t batch, std::int64_t token, std::int64_t head, const TensorSizes& sizes) {
    TensorMap map;
    return make_tensor_map({memory.data() + first, DType::bf16, batch, token, head}, sizes, map);
  };
  const TensorSizes sizes{2, 100, 3, 80}, one_head{2, 100, 1, 80};
  EXPECT_TRUE(made(8, 24000, 240, 80, sizes));
  EXPECT_FALSE(made(4, 24000, 240, 80, sizes)) << "begins between multiples of 16 bytes";
  EXPECT_FALSE(made(8, 24000, 244, 80, sizes)) << "rows begin between multiples of 16 bytes";
  EXPECT_FALSE(made(8, 24000, -240, 80, sizes)) << "tokens backwards";
  EXPECT_FALSE(made(8, 0, 240, 80, sizes)) << "all of the batch at one place";
  EXPECT_FALSE(made(8, 24000, 240, 80, {2, std::int64_t{1} << 31, 3, 80})) << "2^31 tokens";
  EXPECT_TRUE(made(8, 24000, 240, 3, one_head)) << "the stride of one head means nothing";
}

/// Stores a box of numbers from 1 on; what the box holds after its shared memory has been read is nobody's.
__global__ void store_numbers(const __grid_constant__ TensorMap map, Corner c) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) std::uint16_t box[];
  const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
  for (int at = thread; at < kBoxElements; at += threads) box[place_in_box(at)] = static_cast<std::uint16_t>(at + 1);
  ptx::fence_async_shared();
  __syncthreads();
  if (thread == 0) {
    ptx::store_box(&map, c.column, c.head, c.token, c.batch, ptx::shared_address(box));
    ptx::store_commit();
    ptx::store_wait_read<0>();
  }
  __syncthreads();
  for (int at = thread; at < kBoxElements; at += threads) box[at] = 0xdead;
  if (thread == 0) ptx::store_wait_all();
#endif
}

TEST_F(Hopper, BoxesStored) {
  for (const View& view : kViews) {
    for (const Corner& c : kCorners) {
      if (std::min({c.column, c.head, c.token, c.batch}) < 0) continue;  // stored there, a box is an illegal instruction
      const DeviceArray<std::uint16_t> memory(View::kMemory);
      const KernelLaunch launch{1, 128, kBoxBytes, nullptr};
      check(start_kernel(store_numbers, launch, view.map(memory.data(), DType::bf16), c), "store_numbers");
      std::vector<std::uint16_t> expected(View::kMemory, kPoison);
      for (int at = 0; at < kBoxElements; ++at) {
        const int column = c.column + at % kBoxColumns, token = c.token + at / kBoxColumns;
        if (!View::inside(column, c.head, token, c.batch)) continue;
        expected.at(view.place(column, c.head, token, c.batch)) = static_cast<std::uint16_t>(at + 1);
      }
      expect_matrix(std::string(view.name) + ", stored " + to_text(c) + ", memory by 112", memory.fetch(), 0, View::kMemory / 112,
                    112, [&](int row, int column) { return expected[static_cast<std::size_t>(row * 112 + column)]; });
    }
  }
}

// Copies to several blocks of a cluster. Of every turn each block copies a box and bytes of its own to the blocks of its mask,
// itself or not, at places of its own. Who has read what came tells both blocks, so that none copies too early.
constexpr int kBlocks = 2, kTurns = 7;
constexpr int kMostRunBytes = 2304;
__host__ __device__ constexpr int run_bytes(int block) { return block == 0 ? 768 : 1040; }  // multiples of 16
__host__ __device__ constexpr int run_place(int block) { return block == 0 ? 0 : 1024; }    // behind the boxes
constexpr int kStageBytes = kBlocks * kBoxBytes + kMostRunBytes, kStageElements = kStageBytes / 2;

struct Multicast {
  Corner corners[kTurns][kBlocks];
  std::uint16_t masks[kBlocks];
};

/// Of every turn and block what its shared memory holds.
__global__ void FLASHQLA_CLUSTER(kBlocks)
    copy_to_blocks(const __grid_constant__ TensorMap map, const __grid_constant__ Multicast plan, const std::byte* runs,
                   std::uint16_t* stages) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) std::uint16_t stage[];
  __shared__ std::uint64_t barriers[2];
  const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x), rank = ptx::cluster_rank();
  const std::uint32_t full = ptx::shared_address(&barriers[0]), empty = ptx::shared_address(&barriers[1]);
  const std::uint32_t to = ptx::shared_address(stage);
  if (thread == 0) {
    ptx::mbarrier_init(full, 1);
    ptx::mbarrier_init(empty, kBlocks);
    ptx::mbarrier_fence();
  }
  ptx::cluster_barrier();
  int expected = 0;
  for (int from = 0; from < kBlocks; ++from) expected += (plan.masks[from] >> rank & 1) * (kBoxBytes + run_bytes(from));
  for (int turn = 0; turn < kTurns; ++turn) {
    for (int at = thread; at < kStageElements; at += threads) stage[at] = kPoison;
    ptx::fence_async_shared();
    __syncthreads();
    if (thread == 0) {
      for (int block = 0; block < kBlocks; ++block) ptx::mbarrier_arrive_in_cluster(ptx::address_in_block(empty, block));
      ptx::mbarrier_wait(empty, turn % 2);
      const Corner& c = plan.corners[turn][rank];
      ptx::mbarrier_arrive_expecting(full, expected);
      ptx::copy_box_to_all(to + rank * kBoxBytes, &map, c.column, c.head, c.token, c.batch, full, plan.masks[rank]);
      ptx::copy_bytes_to_all(to + kBlocks * kBoxBytes + run_place(rank), runs + (turn * kBlocks + rank) * kMostRunBytes,
                             run_bytes(rank), full, plan.masks[rank]);
    }
    ptx::mbarrier_wait(full, turn % 2);
    for (int at = thread; at < kStageElements; at += threads) stages[(turn * kBlocks + rank) * kStageElements + at] = stage[at];
    __syncthreads();
  }
  ptx::cluster_barrier();
#endif
}

/// What place `at` of a block's shared memory holds after a turn.
std::uint16_t expected_in_stage(const Multicast& plan, const std::vector<std::uint16_t>& runs, int turn, int block, int at) {
  for (int from = 0; from < kBlocks; ++from) {
    if ((plan.masks[from] >> block & 1) == 0) continue;
    const int in_box = at - from * kBoxElements;
    if (in_box >= 0 && in_box < kBoxElements) {
      const int row = in_box / kBoxColumns, place = in_box % kBoxColumns;
      return expected_in_box(plan.corners[turn][from], row, (place / 8 ^ row % 8) * 8 + place % 8);
    }
    const int in_run = at - kBlocks * kBoxElements - run_place(from) / 2;
    if (in_run >= 0 && in_run < run_bytes(from) / 2) {
      return runs.at(static_cast<std::size_t>((turn * kBlocks + from) * kMostRunBytes / 2 + in_run));
    }
  }
  return kPoison;
}

TEST_F(Hopper, CopiesToBlocksOfACluster) {
  const std::uint16_t masks[][kBlocks] = {{3, 3}, {2, 1}, {1, 2}, {3, 1}, {2, 3}};
  std::vector<std::uint16_t> runs(kTurns * kBlocks * kMostRunBytes / 2);
  for (std::size_t i = 0; i < runs.size(); ++i) runs[i] = static_cast<std::uint16_t>(i + 1);
  const View& view = kViews[0];
  const DeviceArray<std::uint16_t> memory(view.numbered()), device_runs(runs);
  for (const auto& mask : masks) {
    Multicast plan{};
    for (int turn = 0; turn < kTurns; ++turn) {
      for (int block = 0; block < kBlocks; ++block) {
        plan.masks[block] = mask[block];
        plan.corners[turn][block] = {block * 16, (turn + block) % View::kHeads, turn * 23 - 10, turn % View::kBatch};
      }
    }
    const DeviceArray<std::uint16_t> stages(kTurns * kBlocks * kStageElements);
    check(start_kernel(copy_to_blocks, {kBlocks, 128, kStageBytes, nullptr}, view.map(memory.data(), DType::f16), plan,
                       reinterpret_cast<const std::byte*>(device_runs.data()), stages.data()),
          "copy_to_blocks");
    const std::vector<std::uint16_t> found = stages.fetch();
    for (int turn = 0; turn < kTurns; ++turn) {
      for (int block = 0; block < kBlocks; ++block) {
        const std::string what = "masks " + std::to_string(mask[0]) + " and " + std::to_string(mask[1]) + ", turn " +
                                 std::to_string(turn) + ", block " + std::to_string(block) + ", pieces of shared memory";
        expect_matrix(what, found, static_cast<std::size_t>((turn * kBlocks + block) * kStageElements), kStageElements / 8, 8,
                      [&](int row, int column) { return expected_in_stage(plan, runs, turn, block, row * 8 + column); });
      }
    }
  }
}

}  // namespace
}  // namespace flashqla::cuda
