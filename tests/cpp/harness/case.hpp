// One problem of the tests as data, and its text form: "key=value key=value ..." as in tests/cases/*.txt (bench programs read the
// same keys).
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "flashqla/problem.hpp"

namespace flashqla::test {

enum class Op : std::uint8_t { forward, backward, recurrent };

/// How the numbers are drawn.
enum class Data : std::uint8_t {
  usual,          ///< unit q and k, decays from slow to fast heads, beta in (0, 1)
  strong_decay,   ///< log decays down to -20 a token
  no_decay,       ///< g = 0
  growth,         ///< g up to +0.05
  forget,         ///< some g = -inf, some -1e4, alternating 0 and -50
  beta_zero,      ///< every third beta is 0
  beta_two,       ///< beta in (1.9, 2)
  repeated_keys,  ///< few distinct keys
  unnormalised,   ///< rows of free length with beta |k|^2 <= 2
};

/// How the input tensors lie in memory.
enum class Strides : std::uint8_t {
  dense,
  padded,      ///< gaps after every row, odd offsets
  transposed,  ///< [B,H,T,D] in memory
  fused,       ///< q, k, v slices of one projection
  expanded,    ///< heads of q, k (g, beta) share memory: stride 0
  reversed,    ///< negative token stride
  huge,        ///< offsets past 2^31 elements: between batch entries and rows of states, or between tokens when B = 1
};

enum class Pool : std::uint8_t {
  none,      ///< row n is sequence n
  separate,  ///< read and written through index tensors, two memories
  in_place,  ///< the same memory and rows
};

/// Elements between neighbours with Strides::huge.
inline constexpr std::int64_t kHugeStride = (std::int64_t{1} << 31) + 64;

struct Case {
  Op op = Op::forward;
  std::int64_t B = 1, T = 64, Hq = 1, Hv = 1, K = 16, V = 16;
  DType dtype = DType::f32;
  DType gate_dtype = DType::f32;   // g, beta, a_log, dt_bias
  DType state_dtype = DType::f32;  // initial states, pools, stored and token states
  DType index_dtype = DType::i64;
  std::vector<std::int64_t> lengths;  // packed when not empty; T is then their sum + slack
  std::int64_t slack = 0;             // rows past the last offset
  Gate gate = Gate::log_decay;
  bool dt_bias = true;
  Beta beta = Beta::given;
  bool l2norm = false;
  std::optional<double> scale;
  StateLayout layout = StateLayout::key_value;
  bool initial = false, final = true;
  Pool pool = Pool::none;
  std::int64_t drafts = 0;  // recurrent: P of `read` [N,P] with `accepted`; 0 is without
  bool token_states = false, token_rows = false;
  bool same_rows = false;  // recurrent, with drafts: the state after token t replaces draft t's row of the pool that `read` names
  StoredStates stored = StoredStates::none;
  std::int64_t states_every = 0;
  bool stored_rows = false, prefix = false;
  bool extras = false;  // g_cumulative and a
  bool d_o = true, d_final = false;
  bool ones = false;           // d_o and d_final are ones with stride 0
  bool saved = false;          // backward: with what the same implementation's forward saves
  bool f32_gradients = false;  // instead of each input's dtype
  Data data = Data::usual;
  Strides strides = Strides::dense;
  std::uint64_t seed = 1;

  bool packed() const { return !lengths.empty(); }
  std::int64_t sequences() const { return packed() ? static_cast<std::int64_t>(lengths.size()) : B; }
  std::int64_t begin(std::int64_t n) const;
  std::int64_t length(std::int64_t n) const { return packed() ? lengths[static_cast<std::size_t>(n)] : T; }
  /// Rows that belong to a sequence, of each batch entry.
  std::int64_t used() const { return packed() ? T - slack : T; }
  std::int64_t stored_count(const std::vector<std::int64_t>& prefix_lengths) const;
};

/// Fills in T of a packed case.
Case with_lengths(Case c, std::vector<std::int64_t> lengths, std::int64_t slack = 0);

/// Throws std::runtime_error on an unknown key or value.
Case parse_case(const std::string& line);
std::string to_text(const Case& c);

/// A file of tests/cases: of the folder $FLASHQLA_TEST_CASES, else of the source tree that the tests were built from.
std::string case_file(const std::string& name);

/// Lines of tests/cases/<file> that carry `tag` (the first word of a line, up to ':').
std::vector<Case> load_cases(const std::string& file, const std::string& tag);

Problem problem_of(const Case& c);

}  // namespace flashqla::test
