// One token after another on a slab of a state that stays in registers: a block of 128 threads has 32 columns of V and all of K.
// With d = exp(g) and the state S before the token,
//   e = beta (v - d k S)    o = scale (d q S + (k.q) e)    S <- d S + k^T e
// so that one pass over S gives k S and q S, and another updates it. All in f32.
//
// A thread has vectors of four neighbouring elements, as the state lies in memory. value_key (rows of K): a warp has 8 columns of
// V, its lanes lie along K; sums over K go across the lanes. key_value (rows of V): 8 lanes lie along the 32 columns, the 4 lanes
// of a column and the 4 warps have different k; sums go over the thread's own k, its 4 lanes, then the warps in order.
#pragma once

#include "cuda/block/gates.cuh"
#include "cuda/kernels/recurrent_forward/params.hpp"
#include "cuda/views/views.cuh"

namespace flashqla::cuda {

inline constexpr int kRecurrentThreads = 128, kRecurrentWarps = 4;
inline constexpr int kVector = 4;

/// What a block's threads share of one token.
template <int kDimK>
struct RecurrentShared {
  float k[kDimK], q[kDimK];             // as given; zero past dim_k
  float v[32];                          // of the block's columns
  float sums[kRecurrentWarps][3];       // of the warps: |k|^2, |q|^2, k.q
  float parts[2][kRecurrentWarps][32];  // key_value: k S and q S over a warp's k
};

/// Where a thread's vectors lie. Vector i of kCount; `k` and `v` of its first element.
template <int kDimK, StateLayout kLayout>
struct SlabVectors;

template <int kDimK>
struct SlabVectors<kDimK, StateLayout::value_key> {
  static constexpr int kAcross = kDimK / kVector < 32 ? kDimK / kVector : 32;  // lanes of a row of K
  static constexpr int kRowsAtOnce = 32 / kAcross, kPerRow = kDimK / kVector / kAcross;
  static constexpr int kRows = 8 / kRowsAtOnce;  // that a lane has a part of
  static constexpr int kCount = kRows * kPerRow;
  static constexpr int kOuter = kRows, kOuterStep = kRowsAtOnce, kInnerStep = kAcross * kVector;
  static FLASHQLA_DEVICE int k(int i) { return (i % kPerRow * kAcross + static_cast<int>(threadIdx.x) % kAcross) * kVector; }
  static FLASHQLA_DEVICE int v(int i) {
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
    return warp * 8 + i / kPerRow * kRowsAtOnce + lane / kAcross;
  }
};

template <int kDimK>
struct SlabVectors<kDimK, StateLayout::key_value> {
  static constexpr int kCount = kDimK / 16;
  static constexpr int kOuter = kCount, kOuterStep = 4, kInnerStep = 0;
  static FLASHQLA_DEVICE int k(int i) {
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
    return (warp * kCount + i) * 4 + lane / 8;
  }
  static FLASHQLA_DEVICE int v(int) { return static_cast<int>(threadIdx.x) % 8 * kVector; }
};

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

/// The slab of a block in a state tensor: first element of its matrix, and where it ends.
struct SlabPlace {
  std::int64_t first;  // element
  int first_v, dim_k, dim_v;
};

/// Calls body(i, element, inside) for each of the thread's vectors: `element` is where it begins in the tensor.
template <int kDimK, StateLayout kLayout, class Body>
FLASHQLA_DEVICE void for_each_vector(const StateTensor& x, const SlabPlace& slab, Body body) {
  using Vectors = SlabVectors<kDimK, kLayout>;
  constexpr bool kByRow = kLayout == StateLayout::value_key;
  constexpr int kPerRow = kByRow ? Vectors::kCount / Vectors::kOuter : 1;
  const int k = Vectors::k(0), v = slab.first_v + Vectors::v(0);
  std::int64_t row = slab.first + (kByRow ? v * x.stride_outer + k : k * x.stride_outer + v);
#pragma unroll
  for (int i = 0; i < Vectors::kCount; ++i) {
    body(i, row + i % kPerRow * Vectors::kInnerStep, Vectors::k(i) < slab.dim_k && slab.first_v + Vectors::v(i) < slab.dim_v);
    if (i % kPerRow == kPerRow - 1) row += Vectors::kOuterStep * x.stride_outer;
  }
}

template <class Element, int kDimK, StateLayout kLayout>
FLASHQLA_DEVICE void load_slab_as(const StateTensor& x, const SlabPlace& slab, float4 (&s)[SlabVectors<kDimK, kLayout>::kCount]) {
  const auto* const data = static_cast<const Element*>(x.data);
  for_each_vector<kDimK, kLayout>(x, slab, [&](int i, std::int64_t at, bool inside) {
    if (inside) s[i] = Quad<Element>::load(*reinterpret_cast<const typename Quad<Element>::Memory*>(data + at));
  });
}
template <class Element, int kDimK, StateLayout kLayout>
FLASHQLA_DEVICE void store_slab_as(const StateTensor& x, const SlabPlace& slab,
                                   const float4 (&s)[SlabVectors<kDimK, kLayout>::kCount]) {
  auto* const data = static_cast<Element*>(x.data);
  for_each_vector<kDimK, kLayout>(x, slab, [&](int i, std::int64_t at, bool inside) {
    if (inside) *reinterpret_cast<typename Quad<Element>::Memory*>(data + at) = Quad<Element>::store(s[i]);
  });
}

/// The same element by element, where four of them cannot be moved together.
template <int kDimK, StateLayout kLayout>
FLASHQLA_DEVICE void load_elements(const StateTensor& x, const SlabPlace& slab,
                                   float4 (&s)[SlabVectors<kDimK, kLayout>::kCount]) {
  for_each_vector<kDimK, kLayout>(x, slab, [&](int i, std::int64_t at, bool inside) {
    if (!inside) return;
    s[i].x = load_scalar(x.data, x.dtype, at);
    s[i].y = load_scalar(x.data, x.dtype, at + 1);
    s[i].z = load_scalar(x.data, x.dtype, at + 2);
    s[i].w = load_scalar(x.data, x.dtype, at + 3);
  });
}
template <int kDimK, StateLayout kLayout>
FLASHQLA_DEVICE void store_elements(const StateTensor& x, const SlabPlace& slab,
                                    const float4 (&s)[SlabVectors<kDimK, kLayout>::kCount]) {
  for_each_vector<kDimK, kLayout>(x, slab, [&](int i, std::int64_t at, bool inside) {
    if (!inside) return;
    store_scalar(x.data, x.dtype, at, s[i].x);
    store_scalar(x.data, x.dtype, at + 1, s[i].y);
    store_scalar(x.data, x.dtype, at + 2, s[i].z);
    store_scalar(x.data, x.dtype, at + 3, s[i].w);
  });
}

/// Row `row` of the tensor; zeros if there is no such row.
template <int kDimK, StateLayout kLayout>
FLASHQLA_DEVICE void load_slab(const StateTensor& x, std::int64_t row, std::int32_t head, SlabPlace slab,
                               float4 (&s)[SlabVectors<kDimK, kLayout>::kCount]) {
#pragma unroll
  for (float4& vector : s) vector = {0.0f, 0.0f, 0.0f, 0.0f};
  if (x.data == nullptr || row < 0 || row >= x.rows) return;
  slab.first = row * x.stride_row + head * x.stride_head;
  if (x.vectors == 0) {
    load_elements<kDimK, kLayout>(x, slab, s);
  } else if (x.dtype == DType::f32) {
    load_slab_as<float, kDimK, kLayout>(x, slab, s);
  } else if (x.dtype == DType::bf16) {
    load_slab_as<__nv_bfloat16, kDimK, kLayout>(x, slab, s);
  } else {
    load_slab_as<__half, kDimK, kLayout>(x, slab, s);
  }
}
template <int kDimK, StateLayout kLayout>
FLASHQLA_DEVICE void store_slab(const StateTensor& x, std::int64_t row, std::int32_t head, SlabPlace slab,
                                const float4 (&s)[SlabVectors<kDimK, kLayout>::kCount]) {
  if (x.data == nullptr || row < 0 || row >= x.rows) return;
  slab.first = row * x.stride_row + head * x.stride_head;
  if (x.vectors == 0) {
    store_elements<kDimK, kLayout>(x, slab, s);
  } else if (x.dtype == DType::f32) {
    store_slab_as<float, kDimK, kLayout>(x, slab, s);
  } else if (x.dtype == DType::bf16) {
    store_slab_as<__nv_bfloat16, kDimK, kLayout>(x, slab, s);
  } else {
    store_slab_as<__half, kDimK, kLayout>(x, slab, s);
  }
}

FLASHQLA_DEVICE float dot(const float4& a, const float4& b, float sum) {
  return fmaf(a.x, b.x, fmaf(a.y, b.y, fmaf(a.z, b.z, fmaf(a.w, b.w, sum))));
}

}  // namespace flashqla::cuda
