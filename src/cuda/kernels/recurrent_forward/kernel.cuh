// The kernel around step.cuh: which slab a block has, its tokens, and where states come from and go to.
#pragma once

#include "cuda/kernels/recurrent_forward/step.cuh"

namespace flashqla::cuda {

/// A stronger decay is taken in two factors: its exponential alone may be no normal number, while the state may be so large that
/// the product is one.
constexpr float kFarDecay = -80.0f;

/// Numbers of a token that a value head's slabs share.
struct TokenNumbers {
  float decay, far_decay;  // far_decay is 1 down to kFarDecay
  float beta, k_dot_q;
  float factor_k, factor_q;  // what L2 normalisation multiplies k and q by; k.q has them
};

/// k, q and the block's columns of v to shared memory, and the token's numbers. All loads are under way before any is waited for.
template <int kDimK>
FLASHQLA_DEVICE TokenNumbers prepare_token(const RecurrentParams& p, RecurrentShared<kDimK>& shared, std::int64_t batch,
                                           std::int64_t row, std::int32_t head, int first_v) {
  constexpr int kEach = (kDimK + kRecurrentThreads - 1) / kRecurrentThreads;
  const int thread = static_cast<int>(threadIdx.x);
  const std::int64_t at_k = offset_of(p.k, batch, row, head / p.group), at_q = offset_of(p.q, batch, row, head / p.group);
  float k[kEach], q[kEach], v = 0.0f;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int at = thread + i * kRecurrentThreads;
    k[i] = at < p.dim_k ? load_scalar(p.k.data, p.k.dtype, at_k + at) : 0.0f;
    q[i] = at < p.dim_k ? load_scalar(p.q.data, p.q.dtype, at_q + at) : 0.0f;
  }
  if (thread < kRecurrentColumns && first_v + thread < p.dim_v) {
    v = load_scalar(p.v.data, p.v.dtype, offset_of(p.v, batch, row, head) + first_v + thread);
  }
  const block::RawGates raw = block::load_gates(p, batch, row, head);
  __syncthreads();  // the last token's k, q and v have been read
  float k_k = 0.0f, q_q = 0.0f, k_q = 0.0f;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int at = thread + i * kRecurrentThreads;
    if (at < kDimK) {
      shared.k[at] = k[i];
      shared.q[at] = q[i];
    }
    k_k = fmaf(k[i], k[i], k_k);
    q_q = fmaf(q[i], q[i], q_q);
    k_q = fmaf(k[i], q[i], k_q);
  }
  if (thread < kRecurrentColumns) shared.v[thread] = v;
  k_k = block::warp_total(k_k);
  q_q = block::warp_total(q_q);
  k_q = block::warp_total(k_q);
  if (thread % 32 == 0) {
    shared.sums[thread / 32][0] = k_k;
    shared.sums[thread / 32][1] = q_q;
    shared.sums[thread / 32][2] = k_q;
  }
  TokenNumbers numbers;
  const float log_decay = raw.log_decay(p);
  const bool far = log_decay < kFarDecay;
  numbers.decay = expf(far ? kFarDecay : log_decay);
  numbers.far_decay = far ? expf(log_decay - kFarDecay) : 1.0f;
  numbers.beta = raw.strength(p);
  __syncthreads();  // k, q, v and the warps' sums, for all
  float totals[3];
#pragma unroll
  for (int i = 0; i < 3; ++i) {
    totals[i] = (shared.sums[0][i] + shared.sums[1][i]) + (shared.sums[2][i] + shared.sums[3][i]);
  }
  numbers.factor_k = p.l2norm_eps >= 0.0f ? rsqrtf(totals[0] + p.l2norm_eps) : 1.0f;
  numbers.factor_q = p.l2norm_eps >= 0.0f ? rsqrtf(totals[1] + p.l2norm_eps) : 1.0f;
  numbers.k_dot_q = totals[2] * numbers.factor_k * numbers.factor_q;
  return numbers;
}

/// k S and q S of a column, of k and q as given, to e times k's factor; o is stored by the lane that `stores`.
FLASHQLA_DEVICE float finish_column(const RecurrentParams& p, const TokenNumbers& numbers, float v, std::int64_t at_o, float k_s,
                                    float q_s, bool stores) {
  const float e = numbers.beta * (v - numbers.decay * (numbers.factor_k * k_s));
  const float o = p.scale * fmaf(numbers.decay, numbers.factor_q * q_s, numbers.k_dot_q * e);
  if (stores) store_scalar(p.o.data, p.o.dtype, at_o, o);
  return numbers.factor_k * e;
}

FLASHQLA_DEVICE void scale(float4& x, float factor) { x = {factor * x.x, factor * x.y, factor * x.z, factor * x.w}; }
template <int kCount>
FLASHQLA_DEVICE void scale(float4 (&s)[kCount], float factor) {
#pragma unroll
  for (float4& x : s) scale(x, factor);
}

template <int kDimK>
FLASHQLA_DEVICE void step_value_key(const RecurrentParams& p, RecurrentShared<kDimK>& shared, const TokenNumbers& numbers,
                                    std::int64_t at_o, int first_v,
                                    float4 (&s)[SlabVectors<kDimK, StateLayout::value_key>::kCount]) {
  using Vectors = SlabVectors<kDimK, StateLayout::value_key>;
  float4 k[Vectors::kPerRow], q[Vectors::kPerRow];
#pragma unroll
  for (int i = 0; i < Vectors::kPerRow; ++i) {
    k[i] = *reinterpret_cast<const float4*>(shared.k + Vectors::k(i));
    q[i] = *reinterpret_cast<const float4*>(shared.q + Vectors::k(i));
  }
#pragma unroll
  for (int row = 0; row < Vectors::kRows; ++row) {
    float k_s = 0.0f, q_s = 0.0f;
#pragma unroll
    for (int i = 0; i < Vectors::kPerRow; ++i) {
      k_s = dot(k[i], s[row * Vectors::kPerRow + i], k_s);
      q_s = dot(q[i], s[row * Vectors::kPerRow + i], q_s);
    }
#pragma unroll
    for (int step = Vectors::kAcross / 2; step > 0; step /= 2) {
      k_s += __shfl_xor_sync(0xffffffffu, k_s, step);
      q_s += __shfl_xor_sync(0xffffffffu, q_s, step);
    }
    const int column = Vectors::v(row * Vectors::kPerRow), v = first_v + column;
    const bool stores = threadIdx.x % Vectors::kAcross == 0 && v < p.dim_v;
    const float e =
        finish_column(p, numbers, shared.v[column], at_o + v, numbers.far_decay * k_s, numbers.far_decay * q_s, stores);
    if (numbers.far_decay < 1.0f) {  // here and not for all rows before the sums, which costs spills
#pragma unroll
      for (int i = 0; i < Vectors::kPerRow; ++i) scale(s[row * Vectors::kPerRow + i], numbers.far_decay);
    }
#pragma unroll
    for (int i = 0; i < Vectors::kPerRow; ++i) {
      float4& x = s[row * Vectors::kPerRow + i];
      x = {fmaf(k[i].x, e, numbers.decay * x.x), fmaf(k[i].y, e, numbers.decay * x.y), fmaf(k[i].z, e, numbers.decay * x.z),
           fmaf(k[i].w, e, numbers.decay * x.w)};
    }
  }
}

FLASHQLA_DEVICE void add_scaled(float4& sum, float factor, const float4& x) {
  sum = {fmaf(factor, x.x, sum.x), fmaf(factor, x.y, sum.y), fmaf(factor, x.z, sum.z), fmaf(factor, x.w, sum.w)};
}
/// Sums over the four lanes of a warp that have the same columns, in all of them.
FLASHQLA_DEVICE float4 sum_of_lanes(float4 x) {
#pragma unroll
  for (int step = 8; step < 32; step *= 2) {
    x.x += __shfl_xor_sync(0xffffffffu, x.x, step);
    x.y += __shfl_xor_sync(0xffffffffu, x.y, step);
    x.z += __shfl_xor_sync(0xffffffffu, x.z, step);
    x.w += __shfl_xor_sync(0xffffffffu, x.w, step);
  }
  return x;
}

template <int kDimK>
FLASHQLA_DEVICE void step_key_value(const RecurrentParams& p, RecurrentShared<kDimK>& shared, const TokenNumbers& numbers,
                                    std::int64_t at_o, int first_v,
                                    float4 (&s)[SlabVectors<kDimK, StateLayout::key_value>::kCount]) {
  using Vectors = SlabVectors<kDimK, StateLayout::key_value>;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  float4 k_s = {0.0f, 0.0f, 0.0f, 0.0f}, q_s = k_s;
#pragma unroll
  for (int i = 0; i < Vectors::kCount; ++i) {
    add_scaled(k_s, shared.k[Vectors::k(i)], s[i]);
    add_scaled(q_s, shared.q[Vectors::k(i)], s[i]);
  }
  k_s = sum_of_lanes(k_s);
  q_s = sum_of_lanes(q_s);
  if (lane < 8) {
    *reinterpret_cast<float4*>(&shared.parts[0][warp][lane * kVector]) = k_s;
    *reinterpret_cast<float4*>(&shared.parts[1][warp][lane * kVector]) = q_s;
  }
  __syncthreads();  // the warps' sums, for all; they are written again after the barriers of the next token
  float e[kVector];
#pragma unroll
  for (int c = 0; c < kVector; ++c) {
    const int column = lane % 8 * kVector + c;
    const auto total = [&](int which) {
      return (shared.parts[which][0][column] + shared.parts[which][1][column]) +
             (shared.parts[which][2][column] + shared.parts[which][3][column]);
    };
    const bool stores = threadIdx.x < 8 && first_v + column < p.dim_v;
    e[c] = finish_column(p, numbers, shared.v[column], at_o + first_v + column, total(0), total(1), stores);
  }
#pragma unroll
  for (int i = 0; i < Vectors::kCount; ++i) {
    const float k = shared.k[Vectors::k(i)];
    s[i] = {fmaf(k, e[0], numbers.decay * s[i].x), fmaf(k, e[1], numbers.decay * s[i].y), fmaf(k, e[2], numbers.decay * s[i].z),
            fmaf(k, e[3], numbers.decay * s[i].w)};
  }
}

/// The rows of a sequence, inside the tensors whatever the offsets say.
FLASHQLA_DEVICE SequenceRows rows_of(const RecurrentParams& p, std::int64_t n) {
  if (p.cu_seqlens.data == nullptr) return {n, 0, p.tokens, 0, 0};
  const auto inside = [&](std::int64_t x) { return x < 0 ? 0 : x > p.tokens ? p.tokens : x; };
  const std::int64_t begin = inside(load_index(p.cu_seqlens, n)), end = inside(load_index(p.cu_seqlens, n + 1));
  return {0, begin, end > begin ? end - begin : 0, 0, 0};
}

/// Row of the initial state that sequence n starts from, -1 for zero.
FLASHQLA_DEVICE std::int64_t read_row(const RecurrentParams& p, std::int64_t n) {
  if (p.initial_state.data == nullptr) return -1;
  if (p.read.data == nullptr) return n;
  if (p.accepted.data == nullptr) return load_index(p.read, n);
  const std::int64_t draft = load_index(p.accepted, n) - 1;
  return draft < 0 || draft >= p.read.size_1 ? -1 : load_index(p.read, n, draft);
}

FLASHQLA_DEVICE void zero_columns(const RecurrentParams& p, std::int64_t batch, std::int64_t first_row, std::int64_t rows,
                                  std::int32_t head, int first_v, int columns) {
  for (std::int64_t at = threadIdx.x; at < rows * columns; at += kRecurrentThreads) {
    const std::int64_t to = offset_of(p.o, batch, first_row + at / columns, head) + first_v + at % columns;
    store_scalar(p.o.data, p.o.dtype, to, 0.0f);
  }
}

/// Rows past the last offset belong to no sequence: the blocks share them.
FLASHQLA_DEVICE void zero_rows_of_none(const RecurrentParams& p) {
  if (p.cu_seqlens.data == nullptr) return;
  std::int64_t end = load_index(p.cu_seqlens, p.sequences);
  end = end < 0 ? 0 : end;
  for (std::int64_t row = end + blockIdx.x; row < p.tokens; row += gridDim.x) {
    for (std::int32_t head = 0; head < p.heads_v; ++head) zero_columns(p, 0, row, 1, head, 0, p.dim_v);
  }
}

template <int kDimK, StateLayout kLayout>
__global__ void __launch_bounds__(kRecurrentThreads, 4) recurrent_steps(const __grid_constant__ RecurrentParams p) {
  __shared__ RecurrentShared<kDimK> shared;
  const std::int64_t slabs = (p.dim_v + kRecurrentColumns - 1) / kRecurrentColumns, index = blockIdx.x;
  const auto first_v = static_cast<int>(index % slabs) * kRecurrentColumns;
  const auto head = static_cast<std::int32_t>(index / slabs % p.heads_v);
  const std::int64_t n = index / slabs / p.heads_v;
  zero_rows_of_none(p);
  if (n >= p.sequences) return;  // a pack of none
  const SequenceRows rows = rows_of(p, n);
  const std::int64_t read = read_row(p, n);
  std::int64_t write = -1;
  if (p.final_state.data != nullptr) write = p.write.data != nullptr ? load_index(p.write, n) : n;
  if (p.read.data != nullptr && p.write.data != nullptr && read < 0 && write < 0) {
    const int left = p.dim_v - first_v, columns = left < kRecurrentColumns ? left : kRecurrentColumns;
    return zero_columns(p, rows.batch, rows.begin, rows.length, head, first_v, columns);
  }
  const SlabPlace slab{0, first_v, p.dim_k, p.dim_v};
  float4 s[SlabVectors<kDimK, kLayout>::kCount];
  load_slab<kDimK, kLayout>(p.initial_state, read, head, slab, s);
  for (std::int64_t t = 0; t < rows.length; ++t) {
    const std::int64_t row = rows.begin + t;
    const TokenNumbers numbers = prepare_token<kDimK>(p, shared, rows.batch, row, head, first_v);
    const std::int64_t at_o = offset_of(p.o, rows.batch, row, head);
    if constexpr (kLayout == StateLayout::value_key) {
      step_value_key<kDimK>(p, shared, numbers, at_o, first_v, s);
    } else {
      if (numbers.far_decay < 1.0f) scale(s, numbers.far_decay);
      step_key_value<kDimK>(p, shared, numbers, at_o, first_v, s);
    }
    if (p.token_states.data != nullptr) {
      const std::int64_t kept =
          p.token_rows.data != nullptr ? load_index(p.token_rows, rows.batch, row) : rows.batch * p.tokens + row;
      store_slab<kDimK, kLayout>(p.token_states, kept, head, slab, s);
    }
  }
  store_slab<kDimK, kLayout>(p.final_state, write, head, slab, s);
}

}  // namespace flashqla::cuda
