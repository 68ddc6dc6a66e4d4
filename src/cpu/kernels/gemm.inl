// Register blocks of the small matrix products: C [rows x kColumns vectors] += A [rows x depth] B [depth x kColumns vectors],
// where an element of A is broadcast and a row of B is contiguous. Included inside an instruction set's namespace.
//
// A "dot policy" says what one step along the depth is. F32Dot: one f32 of A times a row of B. Bf16Dot (AVX512_BF16 only): a pair
// of bf16 of A that are neighbours along the depth times a pair row of B. An algorithm written over the policy differs between
// the two only in how its operands are packed:
//   A element type, B element type, kPair (depth of a step), broadcast(a), load(b), accumulate(acc, a, b).

struct F32Dot {
  using A = float;
  using B = float;
  using AVec = Vec;
  using BVec = Vec;
  static constexpr int kPair = 1;
  static FLASHQLA_INLINE AVec broadcast(const A* a) { return set1(*a); }
  static FLASHQLA_INLINE BVec load_b(const B* b) { return load(b); }
  static FLASHQLA_INLINE Vec accumulate(Vec acc, AVec a, BVec b) { return fmadd(a, b, acc); }
};

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
                                                      : kColumns == 2 ? 12
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
    if (left >= kMost && left != 8) {
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

/// C = A B for rows [first, last): `done.template operator()<kRows>(row, c)` takes each finished block (stores it, or works on it
/// in registers).
template <class Dot, int kColumns, class Done>
FLASHQLA_INLINE void multiply_rows(const Operands<Dot>& x, std::int64_t first, std::int64_t last, std::int64_t steps, Done done) {
  for_row_blocks<kColumns>(first, last, [&]<int kRows>(std::int64_t row) FLASHQLA_INLINE_LAMBDA {
    Vec c[kRows][kColumns];
    FLASHQLA_UNROLL
    for (int i = 0; i < kRows; ++i) {
      FLASHQLA_UNROLL
      for (int j = 0; j < kColumns; ++j) c[i][j] = zero();
    }
    multiply_block<Dot, kRows, kColumns>(x, row, steps, c);
    done.template operator()<kRows>(row, c);
  });
}
