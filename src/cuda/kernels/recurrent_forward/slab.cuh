// A slab of a state in the registers of a block of 128 threads: all of K, 32 columns of V. Which thread has what, loads and
// stores.
//
// A thread has vectors of four neighbouring elements, as the state lies in memory. value_key (rows of K): a warp has 8 columns of
// V, its lanes lie along K. key_value (rows of V): 8 lanes lie along the 32 columns, the 4 lanes of a column and the 4 warps have
// different k.
#pragma once

#include "cuda/kernels/recurrent_forward/params.hpp"
#include "cuda/ptx/streaming.cuh"
#include "cuda/views/views.cuh"

namespace flashqla::cuda {

inline constexpr int kRecurrentThreads = 128, kRecurrentWarps = 4;
inline constexpr int kVector = 4;

FLASHQLA_DEVICE int thread_warp() { return static_cast<int>(threadIdx.x / 32); }
FLASHQLA_DEVICE int thread_lane() { return static_cast<int>(threadIdx.x % 32); }

/// Where a thread's kOuter x kInner vectors lie, counted from the block's first column of V. Rows of memory follow each other,
/// vectors of a row are kInnerStep elements apart. A thread's values of k are kGroups times four neighbours.
template <int kDimK, StateLayout kLayout>
struct SlabVectors;

template <int kDimK>
struct SlabVectors<kDimK, StateLayout::value_key> {
  static constexpr int kAcross = kDimK / kVector / 2;  // lanes of a row of K
  static constexpr int kOuter = kRecurrentColumns / kRecurrentWarps * kAcross / 32, kInner = kDimK / kVector / kAcross;
  static constexpr int kInnerStep = kAcross * kVector, kGroups = kInner;
  static FLASHQLA_DEVICE int k(int group) { return group * kInnerStep + static_cast<int>(threadIdx.x % kAcross) * kVector; }
  static FLASHQLA_DEVICE int v() { return static_cast<int>(threadIdx.x / kAcross) * kOuter; }
  /// Element of the first vector along the outer dimension and along the inner one, and of the vector (outer, inner).
  static FLASHQLA_DEVICE int first_outer() { return v(); }
  static FLASHQLA_DEVICE int first_inner() { return k(0); }
  static FLASHQLA_DEVICE bool inside(int outer, int inner, int dim_k, int columns) {
    return k(inner) < dim_k && v() + outer < columns;
  }
};

template <int kDimK>
struct SlabVectors<kDimK, StateLayout::key_value> {
  static constexpr int kOuter = kDimK / 16, kInner = 1;
  static constexpr int kInnerStep = 0, kGroups = kOuter / kVector;
  static FLASHQLA_DEVICE int k(int group) { return static_cast<int>(threadIdx.x / 8) * kOuter + group * kVector; }
  static FLASHQLA_DEVICE int v() { return static_cast<int>(threadIdx.x % 8) * kVector; }
  static FLASHQLA_DEVICE int first_outer() { return k(0); }
  static FLASHQLA_DEVICE int first_inner() { return v(); }
  static FLASHQLA_DEVICE bool inside(int outer, int, int dim_k, int columns) { return k(0) + outer < dim_k && v() < columns; }
};

/// Vector (outer, inner) is s[outer][inner].
template <int kDimK, StateLayout kLayout>
using Slab = float4[SlabVectors<kDimK, kLayout>::kOuter][SlabVectors<kDimK, kLayout>::kInner];

/// Element types of memory, four elements at a time.
template <class Element>
struct Quad;
template <>
struct Quad<float> {
  using Memory = float4;
  static FLASHQLA_DEVICE float4 load(const float4& x) { return x; }
  static FLASHQLA_DEVICE float4 store(const float4& x) { return x; }
};
template <>
struct Quad<__nv_bfloat16> {
  using Memory = uint2;
  static FLASHQLA_DEVICE float4 load(const uint2& x) {
    return {__uint_as_float(x.x << 16), __uint_as_float(x.x & 0xffff0000u), __uint_as_float(x.y << 16),
            __uint_as_float(x.y & 0xffff0000u)};
  }
  static FLASHQLA_DEVICE uint2 store(const float4& x) {
    const __nv_bfloat162 low = __floats2bfloat162_rn(x.x, x.y), high = __floats2bfloat162_rn(x.z, x.w);
    return {*reinterpret_cast<const unsigned*>(&low), *reinterpret_cast<const unsigned*>(&high)};
  }
};
template <>
struct Quad<__half> {
  using Memory = uint2;
  static FLASHQLA_DEVICE float4 load(const uint2& x) {
    const float2 low = __half22float2(*reinterpret_cast<const __half2*>(&x.x)),
                 high = __half22float2(*reinterpret_cast<const __half2*>(&x.y));
    return {low.x, low.y, high.x, high.y};
  }
  static FLASHQLA_DEVICE uint2 store(const float4& x) {
    const __half2 low = __floats2half2_rn(x.x, x.y), high = __floats2half2_rn(x.z, x.w);
    return {*reinterpret_cast<const unsigned*>(&low), *reinterpret_cast<const unsigned*>(&high)};
  }
};

FLASHQLA_DEVICE float dot(const float4& a, const float4& b, float sum) {
  return fmaf(a.x, b.x, fmaf(a.y, b.y, fmaf(a.z, b.z, fmaf(a.w, b.w, sum))));
}

/// The bits of a number in memory, in 32: they are made a number of when it is wanted, so that loading does not wait.
FLASHQLA_DEVICE std::uint32_t load_bits(const std::byte* at, Number type) {
  if (type == Number::f32) return *reinterpret_cast<const std::uint32_t*>(at);
  return *reinterpret_cast<const std::uint16_t*>(at);
}
FLASHQLA_DEVICE float number_of(std::uint32_t bits, Number type) {
  if (type == Number::f32) return __uint_as_float(bits);
  if (type == Number::bf16) return __uint_as_float(bits << 16);
  const auto low = static_cast<std::uint16_t>(bits);
  return __half2float(*reinterpret_cast<const __half*>(&low));
}
FLASHQLA_DEVICE void store_number(std::byte* to, Number type, float x) {
  if (type == Number::bf16) {
    *reinterpret_cast<__nv_bfloat16*>(to) = __float2bfloat16_rn(x);
  } else if (type == Number::f16) {
    *reinterpret_cast<__half*>(to) = __float2half_rn(x);
  } else {
    *reinterpret_cast<float*>(to) = x;
  }
}

/// The bits of a vector in memory, in the first of a float4's elements until they are wanted as numbers.
FLASHQLA_DEVICE void keep_raw(float4& vector, const float4& x) { vector = x; }
FLASHQLA_DEVICE void keep_raw(float4& vector, const uint2& x) {
  vector.x = __uint_as_float(x.x);
  vector.y = __uint_as_float(x.y);
}

template <class Element>
FLASHQLA_DEVICE float4 decode_four(const float4& raw) {
  if constexpr (sizeof(Element) == 4)
    return raw;
  else
    return Quad<Element>::load({__float_as_uint(raw.x), __float_as_uint(raw.y)});
}

/// `x`, not negative, times `stride` without the products that numbers of 32 bits do not need.
FLASHQLA_DEVICE std::int64_t times(int x, std::int64_t stride) {
  return static_cast<std::int64_t>(static_cast<std::uint64_t>(static_cast<std::uint32_t>(x)) *
                                   static_cast<std::uint64_t>(stride));
}

/// What a block has of a matrix of a state, the same for all states.
struct SlabPlace {
  int head, first_v, dim_k, columns;  // columns of V from first_v to the last
  bool whole;                         // all of the block's vectors are inside
  bool even;                          // whole, and four neighbouring elements of all states can be moved together
};

/// Calls body(vector, address) for each of the thread's vectors that `inside(outer, inner)` is true of; rows of memory lie
/// `stride` bytes apart.
template <int kBytes, int kDimK, StateLayout kLayout, class Vectors, class Inside, class Body>
FLASHQLA_DEVICE void for_each_vector(std::byte* first, std::uint32_t stride, Vectors& s, Inside inside, Body body) {
  using Where = SlabVectors<kDimK, kLayout>;
#pragma unroll
  for (int i = 0; i < Where::kOuter; ++i) {
#pragma unroll
    for (int j = 0; j < Where::kInner; ++j) {
      if (inside(i, j)) body(s[i][j], first + static_cast<std::uint64_t>(stride) * i + j * (Where::kInnerStep * kBytes));
    }
  }
}

/// The same where four elements cannot be moved together: body(number, address) for each element.
template <int kDimK, StateLayout kLayout, class Vectors, class Body>
FLASHQLA_DEVICE void for_each_element(const SlabPlace& place, std::byte* first, std::int64_t stride, int bytes, Vectors& s,
                                      Body body) {
  using Where = SlabVectors<kDimK, kLayout>;
#pragma unroll
  for (int i = 0; i < Where::kOuter; ++i) {
#pragma unroll
    for (int j = 0; j < Where::kInner; ++j) {
      if (!Where::inside(i, j, place.dim_k, place.columns)) continue;
      std::byte* const at = first + i * stride + j * Where::kInnerStep * bytes;
      body(s[i][j].x, at);
      body(s[i][j].y, at + bytes);
      body(s[i][j].z, at + 2 * bytes);
      body(s[i][j].w, at + 3 * bytes);
    }
  }
}

FLASHQLA_DEVICE bool has_row(const SlabTensor& x, std::int64_t row) {
  return static_cast<std::uint64_t>(row) < static_cast<std::uint64_t>(x.rows);
}

/// The thread's first vector in row `row` of the tensor.
template <int kDimK, StateLayout kLayout>
FLASHQLA_DEVICE std::byte* first_vector(const SlabTensor& x, std::int64_t row, const SlabPlace& place) {
  using Where = SlabVectors<kDimK, kLayout>;
  const bool by_column = kLayout == StateLayout::value_key;
  const int outer = Where::first_outer() + (by_column ? place.first_v : 0);
  const int inner = Where::first_inner() + (by_column ? 0 : place.first_v);
  std::byte* const head = x.data + row * x.stride_row + times(place.head, x.stride_head);
  return head + times(outer, x.stride_outer) + static_cast<std::uint32_t>(inner * x.bytes);
}

template <int kOuter, int kInner>
FLASHQLA_DEVICE void clear_slab(float4 (&s)[kOuter][kInner]) {
  const float zero = ptx::zero_here();
#pragma unroll
  for (auto& vectors : s) {
#pragma unroll
    for (float4& vector : vectors) vector = {zero, zero, zero, zero};
  }
}

template <class Memory, int kDimK, StateLayout kLayout, class Inside>
FLASHQLA_DEVICE void load_raw(std::byte* first, std::int64_t stride, Slab<kDimK, kLayout>& s, Inside inside) {
  for_each_vector<sizeof(Memory) / kVector, kDimK, kLayout>(
      first, static_cast<std::uint32_t>(stride), s, inside,
      [](float4& vector, const std::byte* at) { keep_raw(vector, ptx::load_once(reinterpret_cast<const Memory*>(at))); });
}

/// Row `row` of the tensor; zeros if there is no such row. The type of what is in the registers then: decode_slab makes numbers
/// of it, so that nothing waits for the loads here.
template <int kDimK, StateLayout kLayout>
FLASHQLA_DEVICE Number load_slab(const SlabTensor& x, std::int64_t row, const SlabPlace& place, Slab<kDimK, kLayout>& s) {
  using Where = SlabVectors<kDimK, kLayout>;
  const auto all = [](int, int) { return true; };
  const auto inside = [&](int i, int j) { return Where::inside(i, j, place.dim_k, place.columns); };
  if (!has_row(x, row)) {
    clear_slab(s);
    return Number::f32;
  }
  std::byte* const first = first_vector<kDimK, kLayout>(x, row, place);
  if (place.even || (x.vectors != 0 && place.whole)) {
    if (x.type == Number::f32) {
      load_raw<float4, kDimK, kLayout>(first, x.stride_outer, s, all);
    } else {
      load_raw<uint2, kDimK, kLayout>(first, x.stride_outer, s, all);
    }
    return x.type;
  }
  clear_slab(s);
  if (x.vectors == 0) {
    const auto load = [&](float& number, const std::byte* at) { number = number_of(load_bits(at, x.type), x.type); };
    for_each_element<kDimK, kLayout>(place, first, x.stride_outer, x.bytes, s, load);
    return Number::f32;
  }
  if (x.type == Number::f32) {
    load_raw<float4, kDimK, kLayout>(first, x.stride_outer, s, inside);
  } else {
    load_raw<uint2, kDimK, kLayout>(first, x.stride_outer, s, inside);
  }
  return x.type;
}

template <class Element, int kOuter, int kInner>
FLASHQLA_DEVICE void decode_as(float4 (&s)[kOuter][kInner]) {
#pragma unroll
  for (auto& vectors : s) {
#pragma unroll
    for (float4& x : vectors) x = decode_four<Element>(x);
  }
}
template <int kOuter, int kInner>
FLASHQLA_DEVICE void decode_slab(Number type, float4 (&s)[kOuter][kInner]) {
  if (type < Number::bf16) return;  // by order, since equality with all three becomes a table of jumps
  if (type == Number::bf16) {
    decode_as<__nv_bfloat16>(s);
  } else {
    decode_as<__half>(s);
  }
}

template <class Element, int kDimK, StateLayout kLayout>
FLASHQLA_DEVICE void store_slab_as(const SlabTensor& x, const SlabPlace& place, std::byte* first, const Slab<kDimK, kLayout>& s) {
  using Memory = typename Quad<Element>::Memory;
  const auto store = [&](auto inside) {
    for_each_vector<sizeof(Element), kDimK, kLayout>(
        first, static_cast<std::uint32_t>(x.stride_outer), s, inside, [](const float4& vector, std::byte* at) {
          ptx::store_once(reinterpret_cast<Memory*>(at), Quad<Element>::store(vector));
        });
  };
  if (place.whole) {
    store([](int, int) { return true; });
  } else {
    store([&](int i, int j) { return SlabVectors<kDimK, kLayout>::inside(i, j, place.dim_k, place.columns); });
  }
}

/// To row `row` of the tensor, if there is such a row.
template <int kDimK, StateLayout kLayout>
FLASHQLA_DEVICE void store_slab(const SlabTensor& x, std::int64_t row, const SlabPlace& place, const Slab<kDimK, kLayout>& s) {
  if (!has_row(x, row)) return;
  std::byte* const first = first_vector<kDimK, kLayout>(x, row, place);
  if (!place.even && x.vectors == 0) {
    const auto store = [&](const float& number, std::byte* at) { store_number(at, x.type, number); };
    for_each_element<kDimK, kLayout>(place, first, x.stride_outer, x.bytes, s, store);
  } else if (x.type == Number::f32) {
    store_slab_as<float, kDimK, kLayout>(x, place, first, s);
  } else if (x.type == Number::bf16) {
    store_slab_as<__nv_bfloat16, kDimK, kLayout>(x, place, first, s);
  } else {
    store_slab_as<__half, kDimK, kLayout>(x, place, first, s);
  }
}

}  // namespace flashqla::cuda
