// recurrent_forward for any processor.
#include <cstddef>
#include <cstdint>

#include "common/arguments.hpp"
#include "cpu/operations.hpp"
#include "cpu/recurrent_forward.hpp"
#include "cpu/refusal.hpp"
#include "cpu/simd/scalar.hpp"

#include "cpu/simd/scalar_begin.inc"

#include "cpu/kernels/math.inl"
#include "cpu/kernels/rows.inl"

#include "cpu/kernels/gates.inl"
#include "cpu/kernels/recurrent_slab.inl"

#include "cpu/kernels/recurrent.inl"

inline void run_recurrent(const RecurrentForwardArguments& arguments, std::byte* workspace, const Parallel& parallel) {
  run_recurrent_forward(arguments, workspace, parallel, run_recurrent_slabs);
}

extern const RecurrentForwardOperation kRecurrentForward{refuse_f64<RecurrentForward>, recurrent_workspace_bytes, run_recurrent};

#include "cpu/simd/scalar_end.inc"
