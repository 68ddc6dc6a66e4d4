// Register blocks and scratch of chunk_backward. Included inside an instruction set's namespace, after gemm.inl, gates.inl and
// rows.inl.
//
// Layouts ("word": what a dot policy takes from B in one lane; one f32, or a pair of bf16 that are neighbours along the depth of
// the product):
//   rows    [token][k]            as the caller's
//   panels  [panel][row][kPanel]  a matrix with V columns, cut into panels of one register block's width
//   lanes   [k or v][token]       transposed: tokens lie along the vector
// With Bf16Dot two neighbouring rows of a matrix share one row of words.

inline constexpr int kBlock = kRegisters == 32 ? 8 : 4;  // rows of a register block
inline constexpr int kColumns = 2;                       // vectors of a register block
inline constexpr int kPanel = kColumns * kWidth;
inline constexpr int kTokens = static_cast<int>(kBackwardTokens);
inline constexpr int kBoth = 2 * kTokens;  // lanes of a stacked matrix: [Q | K], [dO | D], [dP | dKK]
inline constexpr int kLaneBlocks = kTokens / kWidth;
template <class Dot>
inline constexpr std::int64_t kPanelWords = kPanel / Dot::kPair;  // words along V in a panel
template <class Dot>
inline constexpr std::int64_t kKeyWords = Dot::kPair == 1 ? kBoth : kTokens;  // from one row of key_words to the next
template <class Dot>
inline constexpr std::int64_t kTokenWords = kTokens / Dot::kPair;  // words along the tokens of a chunk
static_assert(kTokens % kBlock == 0 && kTokens % kPanel == 0);

using Gates = ChunkGates<kTokens>;
template <int kRows>
using Rows = Vec[kRows][kColumns];
using Block = Rows<kBlock>;
inline constexpr int kTall = kBlock * 3 / 2;  // rows of the largest block whose accumulators fit the registers

template <int kRows>
FLASHQLA_INLINE void clear(Rows<kRows>& c) {
  FLASHQLA_UNROLL
  for (int r = 0; r < kRows; ++r) {
    FLASHQLA_UNROLL
    for (int j = 0; j < kColumns; ++j) c[r][j] = zero();
  }
}

template <int kRows>
FLASHQLA_INLINE void load_block(const float* from, std::int64_t stride, Rows<kRows>& c) {
  FLASHQLA_UNROLL
  for (int r = 0; r < kRows; ++r) {
    FLASHQLA_UNROLL
    for (int j = 0; j < kColumns; ++j) c[r][j] = load(from + r * stride + j * kWidth);
  }
}

template <int kRows>
FLASHQLA_INLINE void store_block(float* to, std::int64_t stride, const Rows<kRows>& c) {
  FLASHQLA_UNROLL
  for (int r = 0; r < kRows; ++r) {
    FLASHQLA_UNROLL
    for (int j = 0; j < kColumns; ++j) store(to + r * stride + j * kWidth, c[r][j]);
  }
}

/// c[r][j] = factors[j] * c[r][j].
template <int kRows>
FLASHQLA_INLINE void scale_columns(const Vec (&factors)[kColumns], Rows<kRows>& c) {
  FLASHQLA_UNROLL
  for (int r = 0; r < kRows; ++r) {
    FLASHQLA_UNROLL
    for (int j = 0; j < kColumns; ++j) c[r][j] = flush(mul(factors[j], c[r][j]));
  }
}

/// Strides in words: a(row, step) is one word at a + row * kRow + step * step_a.
template <class Dot>
FLASHQLA_INLINE Operands<Dot> operands(const typename Dot::B* a, std::int64_t row, std::int64_t step_a, const typename Dot::B* b,
                                       std::int64_t step_b) {
  return {reinterpret_cast<const typename Dot::A*>(a), row * Dot::kPair, step_a * Dot::kPair, b, step_b};
}

/// c += A B over `steps` words of depth; the kSpan columns of B and c lie kApart words apart.
template <class Dot, int kSpan, int kApart = kWidth, int kRows>
FLASHQLA_INLINE void multiply(const Operands<Dot>& x, std::int64_t steps, Rows<kRows>& c) {
  const typename Dot::A* a = x.a;
  const typename Dot::B* b = x.b;
  for (std::int64_t s = 0; s < steps; ++s, a += x.a_step, b += x.b_step) {
    typename Dot::BVec bv[kSpan];
    FLASHQLA_UNROLL
    for (int j = 0; j < kSpan; ++j) bv[j] = Dot::load_b(b + j * kApart);
    FLASHQLA_UNROLL
    for (int r = 0; r < kRows; ++r) {
      const typename Dot::AVec av = Dot::broadcast(a + r * x.a_row);
      FLASHQLA_UNROLL
      for (int j = 0; j < kSpan; ++j) c[r][j] = Dot::accumulate(c[r][j], av, bv[j]);
    }
  }
}

/// Calls body.template operator()<kRows>(row) for blocks that cover [0, rows), or up to kBlock - 1 rows more.
template <class Body>
FLASHQLA_INLINE void for_tall_blocks(std::int64_t rows, Body body) {
  const std::int64_t blocks = (rows + kBlock - 1) / kBlock, low = blocks % 3;  // two tall blocks are as high as three others
  std::int64_t row = 0;
  for (; row < (blocks - low) * kBlock; row += kTall) body.template operator()<kTall>(row);
  for (; row < blocks * kBlock; row += kBlock) body.template operator()<kBlock>(row);
}

/// Rows token + row .. of one head, columns column .. column + kPanel; zero outside of the `rows` and `width` that exist.
FLASHQLA_INLINE void load_rows_block(const ConstTokenView& view, std::int64_t batch, std::int64_t token, std::int64_t head,
                                     std::int64_t rows, std::int64_t width, std::int64_t column, Block& c) {
  const std::int64_t bytes = element_bytes(view.dtype), row_bytes = view.stride_token * bytes;
  const std::byte* first = view.data + (view.offset(batch, token, head) + column) * bytes;
  if (rows >= kBlock && column + kPanel <= width) {
    with_type(view.dtype, [&]<DType kType>() FLASHQLA_INLINE_LAMBDA {
      FLASHQLA_UNROLL
      for (int r = 0; r < kBlock; ++r) {
        FLASHQLA_UNROLL
        for (int j = 0; j < kColumns; ++j) c[r][j] = load_as<kType>(first + r * row_bytes, j * kWidth);
      }
    });
    return;
  }
  for (int r = 0; r < kBlock; ++r) {
    for (int j = 0; j < kColumns; ++j) {
      const std::int64_t at = column + j * kWidth;
      c[r][j] = r < rows && at < width ? load_any(first + r * row_bytes, view.dtype, j * kWidth, lanes_left(width, at)) : zero();
    }
  }
}

FLASHQLA_INLINE void store_rows_block(const MutableTokenView& view, std::int64_t batch, std::int64_t token, std::int64_t head,
                                      std::int64_t rows, std::int64_t width, std::int64_t column, const Block& c) {
  const std::int64_t bytes = element_bytes(view.dtype), row_bytes = view.stride_token * bytes;
  std::byte* first = view.data + (view.offset(batch, token, head) + column) * bytes;
  if (rows >= kBlock && column + kPanel <= width) {
    with_type(view.dtype, [&]<DType kType>() FLASHQLA_INLINE_LAMBDA {
      FLASHQLA_UNROLL
      for (int r = 0; r < kBlock; ++r) {
        FLASHQLA_UNROLL
        for (int j = 0; j < kColumns; ++j) store_as<kType>(first + r * row_bytes, j * kWidth, c[r][j]);
      }
    });
    return;
  }
  for (int r = 0; r < kBlock; ++r) {
    for (int j = 0; j < kColumns; ++j) {
      const std::int64_t at = column + j * kWidth;
      if (r < rows && at < width) store_any(first + r * row_bytes, view.dtype, j * kWidth, lanes_left(width, at), c[r][j]);
    }
  }
}

/// Zero where the lane's token i = lane_block * kWidth + lane is before `first`.
FLASHQLA_INLINE Vec from_token(Vec a, std::int64_t lane_block, std::int64_t first, Vec lane_numbers) {
  return select_less(lane_numbers, set1(static_cast<float>(first - lane_block * kWidth)), zero(), a);
}

FLASHQLA_INLINE Vec lane_numbers() {
  alignas(64) float numbers[kWidth];
  for (int i = 0; i < kWidth; ++i) numbers[i] = static_cast<float>(i);
  return load(numbers);
}

// How a policy packs f32 into words. F32Dot takes f32 as it is, so that its packed copies are the matrices themselves.
template <class Dot>
struct Packing;

template <>
struct Packing<F32Dot> {
  static constexpr bool kCopies = false;
  using TokenDot = F32Dot;  // of products with q and k
};

/// Takes pieces of the scratch; with a null base only counts them.
class ScratchCursor {
 public:
  explicit ScratchCursor(std::byte* base) : base_(base) {}
  template <class T>
  T* take(std::int64_t count) {
    T* piece = base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + used_);
    used_ += (static_cast<std::size_t>(count) * sizeof(T) + 63) / 64 * 64;
    return piece;
  }
  std::size_t used() const { return used_; }

 private:
  std::byte* base_;
  std::size_t used_ = 0;
};

/// A panel as the B operand of a product with q or k.
template <class Dot>
struct TokenOperand {
  float* rows;
  typename Dot::B* words;  // the rows themselves, or a copy
  float* worth;            // [kPanel]: what one is worth in the columns of a copy
};

/// Sums over the tokens of a value head: chunk_backward_check.inl.
struct GateCheck {
  double decay = 0.0, decay_variance = 0.0;  // d_decay^2, and the variance of its rounding
  double beta = 0.0, beta_variance = 0.0;    // of d_beta, likewise
};

/// A state in panels, and its rows with neighbouring columns in a word, or the same array again.
template <class Dot>
struct StateForms {
  float* panels;
  typename Dot::B* rows;
};

/// What the value heads of a group share, for one chunk. Every product takes q and k from `xt` or the packed copies.
template <class Dot>
struct GroupChunk {
  using Word = typename Dot::B;
  float* xt;       // lanes [K][Q | K], normalised; not there if the words are copies
  Word* xt_words;  // the same with neighbours along K in a word; copies are there while a chunk is prepared
  // Copies of these are int16, scaled per token, without L2 normalisation; `unscale` takes the first back and puts in the second.
  Word* x_words;    // the same with neighbouring tokens in a word
  Word* key_words;  // the right half of xt_words
  float* unscale;   // [Q | K token]
  float* squares;   // [Q | K token]: |q|^2 or |k|^2, after L2 normalisation, if the words are copies
  float* norms;     // [Q | K token]: with L2 normalisation, the factor of a row that copies do not have
  float* gram;      // [token j][Q | K token i]: k_j.q_i and k_j.k_i
  float* gradient;  // lanes [K][dQ | dK], summed over the group
  float* solve;     // [token j][token i] of the current value head, see prepare_solve
  float* solve_far;

  /// `first`: the chunk, if another, whose xt_words are used again where they are copies.
  void take(const BackwardShape& shape, ScratchCursor& cursor, const GroupChunk* first) {
    if constexpr (Packing<Dot>::kCopies) {
      const std::int64_t rows = (shape.padded_k + 2 * kWidth - 1) / (2 * kWidth) * kWidth;
      xt = nullptr;
      xt_words = first == nullptr ? cursor.take<Word>(rows * kBoth) : first->xt_words;
      x_words = cursor.take<Word>(shape.padded_k * kBoth / Dot::kPair);
      key_words = cursor.take<Word>(rows * kTokens);
      unscale = cursor.take<float>(kBoth);
      norms = cursor.take<float>(kBoth);
      squares = cursor.take<float>(kBoth);
    } else {
      xt = xt_words = x_words = cursor.take<float>(shape.padded_k * kBoth);
      key_words = xt + kTokens;
      unscale = norms = squares = nullptr;
    }
    gram = cursor.take<float>(kTokens * kBoth);
    gradient = cursor.take<float>(shape.padded_k * kBoth);
    solve = cursor.take<float>(kTokens * kTokens);
    solve_far = cursor.take<float>(kTokens * kTokens);
  }
};

/// All else that a thread needs, for one value head at a time. Sizes in docs/design/cpu_backward.md.
template <class Dot>
struct BackwardScratch {
  using Word = typename Dot::B;
  static constexpr int kMostChunks = 8;
  GroupChunk<Dot> chunks[kMostChunks];
  Gates* gates;                 // of each chunk of the segment
  float* rows;                  // [tokens][row_k]: q or k on their way to xt
  float* states;                // before chunks 1 .. n - 1 of the segment; not there if state_rows are copies
  Word* state_rows;             // before every chunk, with neighbouring columns in a word, if these are copies
  float* state_worth;           // [chunk][V]: what one is worth in the columns of these
  float* state_squares;         // [chunk][panel]: sums of the squares of these
  GateCheck* gate_checks;       // of each value head of the group
  StateForms<Dot> d_states[2];  // after and before the current chunk, in turn; copies of rows share the panels
  float* errors;                // of each chunk of the segment, unless the stash has them
  float* state_panel;
  TokenOperand<Dot> state_words;  // a panel of a state
  // Of one panel:
  float* panel;                // [tokens]
  TokenOperand<Dot> weighted;  // [tokens]: rest beta e
  float* d_o;                  // [tokens]
  TokenOperand<Dot> y;         // [dOg; dU]
  // Of all of V:
  float* zt;                     // lanes, a block of them after another: [lane block][V][dO | D]
  Word* zt_words;                // the same with neighbours along V in a word; copies are of state_worth zt
  float *zt_worth, *zt_squares;  // [lane block][dO | D]: as TokenOperand::worth; sums of squares over V
  float* et;                     // lanes [V][e]
  Word* et_words;
  // [token j][token i]:
  float* rt;  // [dP | dKK]
  Word* rt_words;
  float *rt_worth, *r_worth;  // [kBoth], [kTokens]: as TokenOperand::worth
  float* r;                   // [dP; dKK token i][token j]
  Word* r_words;
  float* flow;                              // gradient of log Gam_ij
  float *between, *reverse_solve, *scores;  // see prepare_reverse
  float *between_far, *reverse_solve_far, *scores_far;
  float *beta_sums, *write_sums;  // [token][kWidth]: partial sums of D.e and of rest (k dS').e
  float* write_squares;           // likewise: of the squares of rest e times what one is worth in a copy of dS'

  BackwardScratch(const BackwardShape& shape, std::byte* base, std::size_t* used = nullptr) {
    ScratchCursor cursor(base);
    const std::int64_t pair = Dot::kPair, square = kTokens * kTokens, panel_state = shape.padded_k * kPanel;
    const auto operand = [&](std::int64_t rows) {
      TokenOperand<Dot> made;
      made.rows = cursor.take<float>(rows * kPanel);
      made.words = reinterpret_cast<Word*>(made.rows);
      made.worth = nullptr;
      if constexpr (Packing<Dot>::kCopies) {
        made.words = cursor.take<Word>(rows / pair * kPanel);
        made.worth = cursor.take<float>(kPanel);
      }
      return made;
    };
    const auto copy = [&](float* original, std::int64_t words) {
      return Packing<Dot>::kCopies ? cursor.take<Word>(words) : reinterpret_cast<Word*>(original);
    };
    for (std::int64_t i = 0; i < shape.chunks_per_segment; ++i) chunks[i].take(shape, cursor, i == 0 ? nullptr : chunks);
    gates = cursor.take<Gates>(shape.chunks_per_segment);
    if constexpr (Packing<Dot>::kCopies) {
      rows = states = nullptr;
      state_rows = cursor.take<Word>(shape.chunks_per_segment * shape.state() / pair);
      state_worth = cursor.take<float>(shape.chunks_per_segment * shape.padded_v);
      state_squares = cursor.take<float>(shape.chunks_per_segment * shape.padded_v / kPanel);
      gate_checks = cursor.take<GateCheck>(shape.group);
      d_states[0].panels = d_states[1].panels = cursor.take<float>(shape.state());
      for (StateForms<Dot>& d_state : d_states) d_state.rows = cursor.take<Word>(shape.state() / pair);
    } else {
      rows = cursor.take<float>(kTokens * shape.row_k);
      states = cursor.take<float>((shape.chunks_per_segment - 1) * shape.state());
      state_rows = nullptr;
      state_worth = state_squares = nullptr;
      gate_checks = nullptr;
      for (StateForms<Dot>& d_state : d_states) d_state.panels = d_state.rows = cursor.take<float>(shape.state());
    }
    errors = cursor.take<float>(shape.errors_kept ? 0 : shape.chunks_per_segment * shape.errors());
    state_panel = cursor.take<float>(panel_state);
    state_words.rows = nullptr;
    state_words.words = copy(nullptr, panel_state / pair);
    state_words.worth = cursor.take<float>(kPanel);
    panel = cursor.take<float>(kTokens * kPanel);
    weighted = operand(kTokens);
    d_o = cursor.take<float>(kTokens * kPanel);
    y = operand(kBoth);
    zt = cursor.take<float>(shape.padded_v * kBoth);
    zt_words = copy(zt, shape.padded_v / pair * kBoth);
    zt_worth = cursor.take<float>(kBoth);
    zt_squares = cursor.take<float>(kBoth);
    et = cursor.take<float>(shape.padded_v * kTokens);
    et_words = copy(et, shape.padded_v / pair * kTokens);
    rt = cursor.take<float>(kTokens * kBoth);
    rt_words = copy(rt, kTokens / pair * kBoth);
    r = cursor.take<float>(kBoth * kTokens);
    r_words = copy(r, kBoth / pair * kTokens);
    rt_worth = cursor.take<float>(kBoth);
    r_worth = cursor.take<float>(kTokens);
    flow = cursor.take<float>(square);
    between = cursor.take<float>(square);
    reverse_solve = cursor.take<float>(square);
    scores = cursor.take<float>(square);
    between_far = cursor.take<float>(square);
    reverse_solve_far = cursor.take<float>(square);
    scores_far = cursor.take<float>(square);
    beta_sums = cursor.take<float>(kTokens * kWidth);
    write_sums = cursor.take<float>(kTokens * kWidth);
    write_squares = cursor.take<float>(Packing<Dot>::kCopies ? kTokens * kWidth : 0);
    if (used != nullptr) *used = cursor.used();
  }
};
