// With Bf16Dot, one value head over one chunk unless it needs f32 (PackedChunk::precise): as advance_head of chunk_forward.inl,
// but the update is in fixed point, and rows of v and o, which are bf16, go between the caller's memory and the registers.
// Included after chunk_forward_fixed.inl, inside namespace avx512bf16.
#pragma once

#include "cpu/kernels/chunk_forward_fixed.inl"

/// Where the columns of a slab lie in the caller's v and o, from the chunk's first token on.
struct SlabRows {
  const std::uint16_t* v;
  std::uint16_t* o;
  std::int64_t v_stride, o_stride;
  std::int64_t n;  // tokens
  int width;       // columns

  template <int kTokens, int kColumns>
  bool whole() const {
    return n == kTokens && width == kColumns * kWidth;
  }
  FLASHQLA_INLINE int lanes(std::int64_t row, int vector) const { return row < n ? width - vector * kWidth : 0; }
};

/// K S and Q S of one slab: W goes to x.w, scale D o (Q S) to x.values.
template <class Dot, int kTokens, int kColumns, class Prefetch>
FLASHQLA_NOINLINE void project_packed(const ForwardScratch<Dot, kTokens>& x, const SlabRows& rows, const typename Dot::B* operand,
                                      Prefetch& soon) {
  constexpr std::int64_t kSlab = kColumns * kWidth;
  const std::int64_t steps = x.projection_steps();
  const bool whole = rows.whole<kTokens, kColumns>();
  const Operands<Dot> projection{reinterpret_cast<const typename Dot::A*>(x.panel), 2, 4 * kTokens, operand, kSlab};
  const auto meanwhile = [&]() FLASHQLA_INLINE_LAMBDA { soon.template step<2>(); };
  const std::uint16_t* next = rows.v;  // of v, from the second-level cache: a block has four steps and eight rows
  const auto meanwhile_v = [&]() FLASHQLA_INLINE_LAMBDA {
    soon.template step<2>();
    prefetch_near(next);
    prefetch_near(next + rows.v_stride);
    next += 2 * rows.v_stride;
  };
  multiply_rows<Dot, kColumns>(
      projection, 0, kTokens, steps,
      [&]<int kRows>(std::int64_t row, Vec(&c)[kRows][kColumns]) FLASHQLA_INLINE_LAMBDA {
        FLASHQLA_UNROLL
        for (int i = 0; i < kRows; ++i) {
          const Vec factor = set1(x.read_k[row + i]);
          const std::uint16_t* const v = rows.v + (row + i) * rows.v_stride;
          FLASHQLA_UNROLL
          for (int j = 0; j < kColumns; ++j) {
            c[i][j] = fnmadd(factor, c[i][j],
                             whole ? load_bf16(v + j * kWidth) : load_bf16_partial(v + j * kWidth, rows.lanes(row + i, j)));
          }
        }
        store_block(x.w + row * kSlab, kSlab, c);
      },
      meanwhile_v);
  multiply_rows<Dot, kColumns>(
      projection, kTokens, 2 * kTokens, steps,
      [&]<int kRows>(std::int64_t row, Vec(&c)[kRows][kColumns]) FLASHQLA_INLINE_LAMBDA {
        scale_rows(x.read_q + (row - kTokens), c);
        store_block(x.values + (row - kTokens) * kSlab, kSlab, c);
      },
      meanwhile);
}

/// e of one slab, and R o beta o e in x.weighted. Returns what one of fixed point is worth there.
template <class Dot, int kTokens, int kColumns>
FLASHQLA_NOINLINE FixedUnit<kColumns> solve_packed(const ForwardScratch<Dot, kTokens>& x, std::int64_t n) {
  constexpr std::int64_t kSlab = kColumns * kWidth;
  constexpr int kRows = 8;
  FixedRange<kColumns> range;
  const Operands<F32Dot> solve{x.solve, kTokens, 1, x.w, kSlab};
  for (std::int64_t row = 0; row < n; row += kRows) {
    Vec c[kRows][kColumns];
    clear_block(c);
    multiply_triangle<F32Dot, kRows, kColumns>(solve, row, c);
    store_block(x.e + row * kSlab, kSlab, c);
    scale_rows(x.write_k + row, c);
    if (row + kRows > n) {  // tokens past the end may hold NaN
      FLASHQLA_UNROLL
      for (int i = 0; i < kRows; ++i) {
        FLASHQLA_UNROLL
        for (int j = 0; j < kColumns; ++j) c[i][j] = row + i < n ? c[i][j] : zero();
      }
    }
    store_block(x.weighted + row * kSlab, kSlab, c);
    range.add(c);
  }
  return range.unit();
}

/// o of one slab; R o beta o e to fixed point between the products.
template <class Dot, int kTokens, int kColumns>
FLASHQLA_NOINLINE void attend_packed(const ForwardScratch<Dot, kTokens>& x, const SlabRows& rows,
                                     const FixedUnit<kColumns>& unit) {
  constexpr std::int64_t kSlab = kColumns * kWidth;
  constexpr int kRows = 8;
  const bool whole = rows.whole<kTokens, kColumns>();
  const Operands<F32Dot> attention{x.attention, kTokens, 1, x.e, kSlab};
  for (std::int64_t row = 0; row < rows.n; row += kRows) {
    fix_rows<Dot, kTokens, kColumns, kRows>(x, row, unit);
    Vec c[kRows][kColumns];
    load_block(x.values + row * kSlab, kSlab, c);
    multiply_triangle<F32Dot, kRows, kColumns>(attention, row, c);
    FLASHQLA_UNROLL
    for (int i = 0; i < kRows; ++i) {
      std::uint16_t* const o = rows.o + (row + i) * rows.o_stride;
      FLASHQLA_UNROLL
      for (int j = 0; j < kColumns; ++j) {
        if (whole) {
          store_bf16(o + j * kWidth, c[i][j]);
        } else {
          store_bf16_partial(o + j * kWidth, c[i][j], rows.lanes(row + i, j));
        }
      }
    }
  }
}

template <class Dot, int kTokens, int kColumns, class Prefetch>
FLASHQLA_INLINE void advance_packed_slab(const ForwardScratch<Dot, kTokens>& x, const SlabRows& rows, float* state,
                                         typename Dot::B* operand, Prefetch& soon) {
  project_packed<Dot, kTokens, kColumns>(x, rows, operand, soon);
  const FixedUnit<kColumns> unit = solve_packed<Dot, kTokens, kColumns>(x, rows.n);
  attend_packed<Dot, kTokens, kColumns>(x, rows, unit);
  if (x.ends.wanted_after) update_fixed<Dot, kTokens, kColumns>(x, rows.n, unit, state, operand, soon);
}

/// The slabs of one value head, whose gates and matrices are prepared: v -> o, state.
template <class Dot, int kTokens, class Prefetch>
inline void advance_packed(const ForwardScratch<Dot, kTokens>& x, const ConstTokenView& v, const MutableTokenView& o,
                           std::int64_t batch, std::int64_t token, std::int64_t head, std::int64_t place, std::int64_t n,
                           Prefetch& soon) {
  const SlabRange& range = x.range;
  for (std::int64_t s = 0; s < range.slabs(); ++s) {
    const std::int64_t first = s * x.padded_k * kSlabColumns, column = range.begin + s * kSlabColumns;
    float* const state = x.state(place) + first;
    typename Dot::B* const operand = x.operand(place) + first / 2;
    const SlabRows rows{reinterpret_cast<const std::uint16_t*>(v.row(batch, token, head)) + column,
                        reinterpret_cast<std::uint16_t*>(o.row(batch, token, head)) + column,
                        v.stride_token,
                        o.stride_token,
                        n,
                        static_cast<int>(range.end - column < kSlabColumns ? range.end - column : kSlabColumns)};
    if (range.columns(s) == kSlabColumns) {
      advance_packed_slab<Dot, kTokens, kSlabVectors>(x, rows, state, operand, soon);
    } else {
      advance_packed_slab<Dot, kTokens, 1>(x, rows, state, operand, soon);
    }
  }
}
