// Register blocks of the small matrix products: C [rows x kColumns vectors] += A [rows x depth] B [depth x kColumns vectors],
// where an element of A is broadcast and a row of B is contiguous. Included inside an instruction set's namespace.
//
// A "dot policy" says what one step along the depth is. F32Dot: one f32 of A times a row of B. Bf16Dot (AVX512_BF16 only): a pair
// of bf16 of A that are neighbours along the depth times a pair row of B. An algorithm written over the policy differs between
// the two only in how its operands are packed:
//   A and B (element types), kPair (depth of a step), broadcast, load_b, accumulate, add_squares, store_b.
#pragma once

/// A block of rows in memory, `stride` floats apart, its first element at p.
template <int kRows, int kColumns>
FLASHQLA_INLINE void load_block(const float* p, std::int64_t stride, Vec (&c)[kRows][kColumns]) {
  FLASHQLA_UNROLL
  for (int i = 0; i < kRows; ++i) {
    FLASHQLA_UNROLL
    for (int j = 0; j < kColumns; ++j) c[i][j] = load(p + i * stride + j * kWidth);
  }
}
template <int kRows, int kColumns>
FLASHQLA_INLINE void store_block(float* p, std::int64_t stride, const Vec (&c)[kRows][kColumns]) {
  FLASHQLA_UNROLL
  for (int i = 0; i < kRows; ++i) {
    FLASHQLA_UNROLL
    for (int j = 0; j < kColumns; ++j) store(p + i * stride + j * kWidth, c[i][j]);
  }
}

struct F32Dot {
  using A = float;
  using B = float;
  using AVec = Vec;
  using BVec = Vec;
  static constexpr int kPair = 1;
  static FLASHQLA_INLINE AVec broadcast(const A* a) { return set1(*a); }
  static FLASHQLA_INLINE BVec load_b(const B* b) { return load(b); }
  static FLASHQLA_INLINE Vec accumulate(Vec acc, AVec a, BVec b) { return fmadd(a, b, acc); }
  /// acc + the squares of kWidth elements (pairs) of B.
  static FLASHQLA_INLINE Vec add_squares(Vec acc, const B* b) { return fmadd(load(b), load(b), acc); }
  /// Rows [row, row + kRows) of B, both multiples of kPair.
  template <int kRows, int kColumns>
  static FLASHQLA_INLINE void store_b(B* b, std::int64_t b_step, std::int64_t row, const Vec (&c)[kRows][kColumns]) {
    store_block(b + row * b_step, b_step, c);
  }
};

/// Whether operands are copies in another form, not the f32 arrays themselves.
template <class Dot>
inline constexpr bool kPacked = Dot::kPair > 1;

/// Where A and B lie. Strides in elements of A (row: next row of C; step: next step along the depth) and of B (next step).
template <class Dot>
struct Operands {
  const typename Dot::A* a;
  std::int64_t a_row, a_step;
  const typename Dot::B* b;
  std::int64_t b_step;
};

/// c += A B for kRows rows from `row` on and `steps` steps.
template <class Dot, int kRows, int kColumns>
FLASHQLA_INLINE void multiply_block(const Operands<Dot>& x, std::int64_t row, std::int64_t steps, Vec (&c)[kRows][kColumns]) {
  const typename Dot::A* a = x.a + row * x.a_row;
  const typename Dot::B* b = x.b;
  for (std::int64_t s = 0; s < steps; ++s, a += x.a_step, b += x.b_step) {
    typename Dot::BVec bv[kColumns];
    FLASHQLA_UNROLL
    for (int j = 0; j < kColumns; ++j) bv[j] = Dot::load_b(b + j * kWidth);
    FLASHQLA_UNROLL
    for (int i = 0; i < kRows; ++i) {
      const typename Dot::AVec av = Dot::broadcast(a + i * x.a_row);
      FLASHQLA_UNROLL
      for (int j = 0; j < kColumns; ++j) c[i][j] = Dot::accumulate(c[i][j], av, bv[j]);
    }
  }
}

/// Rows of the largest block whose accumulators, one row of B and one broadcast fit the registers.
template <int kColumns>
inline constexpr int kBlockRows = kRegisters == 32 ? (kColumns == 1   ? 16
                                                      : kColumns == 2 ? 8
                                                      : kColumns == 3 ? 8
                                                                      : 6)
                                                   : (kColumns == 1   ? 8
                                                      : kColumns == 2 ? 6
                                                                      : 4);

/// Calls body.template operator()<kRows>(row) for blocks that cover rows [first, last); block sizes are kBlockRows, 8, 4, 2, 1.
/// Every element of C sees the same arithmetic in any block, so results do not depend on where the rows are cut.
template <int kColumns, class Body>
FLASHQLA_INLINE void for_row_blocks(std::int64_t first, std::int64_t last, Body body) {
  constexpr int kMost = kBlockRows<kColumns>;
  std::int64_t row = first;
  while (row < last) {
    const std::int64_t left = last - row;
    if (left >= kMost) {
      body.template operator()<kMost>(row);
      row += kMost;
    } else if (kMost > 8 && left >= 8) {
      body.template operator()<(kMost > 8 ? 8 : 4)>(row);
      row += 8;
    } else if (left >= 4) {
      body.template operator()<4>(row);
      row += 4;
    } else if (left >= 2) {
      body.template operator()<2>(row);
      row += 2;
    } else {
      body.template operator()<1>(row);
      row += 1;
    }
  }
}

template <int kRows, int kColumns>
FLASHQLA_INLINE void clear_block(Vec (&c)[kRows][kColumns]) {
  FLASHQLA_UNROLL
  for (int i = 0; i < kRows; ++i) {
    FLASHQLA_UNROLL
    for (int j = 0; j < kColumns; ++j) c[i][j] = zero();
  }
}

/// C = A B for rows [first, last): `done.template operator()<kRows>(row, c)` takes each finished block (stores it, or works on it
/// in registers). `meanwhile()` is called every few steps: a place for prefetches.
template <class Dot, int kColumns, class Done, class Meanwhile>
FLASHQLA_INLINE void multiply_rows(const Operands<Dot>& x, std::int64_t first, std::int64_t last, std::int64_t steps, Done done,
                                   Meanwhile meanwhile) {
  constexpr std::int64_t kRun = 16;
  for_row_blocks<kColumns>(first, last, [&]<int kRows>(std::int64_t row) FLASHQLA_INLINE_LAMBDA {
    Vec c[kRows][kColumns];
    clear_block(c);
    Operands<Dot> run = x;
    for (std::int64_t left = steps; left > 0; left -= kRun) {
      meanwhile();
      multiply_block<Dot, kRows, kColumns>(run, row, left < kRun ? left : kRun, c);
      run.a += kRun * x.a_step;
      run.b += kRun * x.b_step;
    }
    done.template operator()<kRows>(row, c);
  });
}
template <class Dot, int kColumns, class Done>
FLASHQLA_INLINE void multiply_rows(const Operands<Dot>& x, std::int64_t first, std::int64_t last, std::int64_t steps, Done done) {
  for_row_blocks<kColumns>(first, last, [&]<int kRows>(std::int64_t row) FLASHQLA_INLINE_LAMBDA {
    Vec c[kRows][kColumns];
    clear_block(c);
    multiply_block<Dot, kRows, kColumns>(x, row, steps, c);
    done.template operator()<kRows>(row, c);
  });
}

/// c += rows [row, row + kRows) of A B where A is lower triangular with its diagonal; row and kRows are multiples of kPair.
/// Elements of A above the diagonal are not read, except one that shares a pair with an element below it: that must be zero.
template <class Dot, int kRows, int kColumns>
FLASHQLA_INLINE void multiply_triangle(const Operands<Dot>& x, std::int64_t row, Vec (&c)[kRows][kColumns]) {
  constexpr int kPair = Dot::kPair;
  multiply_block<Dot, kRows, kColumns>(x, row, row / kPair, c);
  const typename Dot::A* a = x.a + row * x.a_row + row / kPair * x.a_step;
  const typename Dot::B* b = x.b + row / kPair * x.b_step;
  FLASHQLA_UNROLL
  for (int p = 0; p < kRows / kPair; ++p) {
    typename Dot::BVec bv[kColumns];
    FLASHQLA_UNROLL
    for (int j = 0; j < kColumns; ++j) bv[j] = Dot::load_b(b + p * x.b_step + j * kWidth);
    FLASHQLA_UNROLL
    for (int i = p * kPair; i < kRows; ++i) {
      const typename Dot::AVec av = Dot::broadcast(a + i * x.a_row + p * x.a_step);
      FLASHQLA_UNROLL
      for (int j = 0; j < kColumns; ++j) c[i][j] = Dot::accumulate(c[i][j], av, bv[j]);
    }
  }
}

/// (I + L)^-1 of a unit lower triangular matrix [kTokens][kTokens], given `negative` = -L (its strict lower part is read). Above
/// the diagonal the result holds zeros, or NaN where L has some. Rows in blocks: the finished rows as a product, then the block's
/// own triangle in registers.
template <int kTokens>
inline void invert_unit_lower(const float* negative, float* inverse) {
  constexpr int kRows = 8;
  for (int column = 0; column < kTokens; column += kWidth) {
    for (int row = 0; row < kTokens; row += kRows) {
      Vec c[kRows][1];
      FLASHQLA_UNROLL
      for (int i = 0; i < kRows; ++i) {
        const Vec up_to = first_lanes(set1(1.0f), row + i - column + 1);
        c[i][0] = sub(up_to, first_lanes(set1(1.0f), row + i - column));
      }
      if (row + kRows > column) {
        const Operands<F32Dot> x{negative, kTokens, 1, inverse + column, kTokens};
        multiply_block<F32Dot, kRows, 1>(x, row, row, c);
        FLASHQLA_UNROLL
        for (int q = 0; q < kRows; ++q) {
          FLASHQLA_UNROLL
          for (int i = q + 1; i < kRows; ++i) {
            c[i][0] = fmadd(set1(negative[(row + i) * kTokens + row + q]), c[q][0], c[i][0]);
          }
        }
      }
      FLASHQLA_UNROLL
      for (int i = 0; i < kRows; ++i) store(inverse + (row + i) * kTokens + column, c[i][0]);
    }
  }
}
