// Whether 16-bit fixed point was enough for the gradients of the gate and of beta. Unlike those of rows and states they are few
// numbers, sums of terms that may cancel by chance or because keys repeat. So after the walk what rounding may have done to them
// is compared with what came out. Included after chunk_backward_reverse.inl, before chunk_backward.inl.
//
// Rounding to integers has the variance 1/12, whatever is rounded. In units of that, and to the order of size:
//   <dS', S>           sum_v worth_v^2 |dS'_v|^2                                                   S rounded
//   k_j.Z_j            |k_j|^2 sum_v (beta_j rest_j e_jv worth'_v)^2                               dS' rounded
//   q_i.(dOg S^T)_i    |q_i|^2 (scale decay_i)^2 (sum_v (worth_v do_iv)^2 + unit_i^2 |S|^2 / K)    S and do rounded
//   k_i.(dU S^T)_i     |k_i|^2 (beta_i decay_i)^2 (sum_v (worth_v D_iv)^2 + unit_i^2 |S|^2 / K)    S and D rounded
//   D_i.e_i            |k_i|^2 (sum_v (rest_i e_iv worth'_v)^2 + decay_i^2 sum_v (worth_v D_iv)^2) dS' and S rounded
// `worth` is what one is worth in a column of S, worth' in one of dS', unit_i in worth_v do_iv or worth_v D_iv; |S| is the norm
// of the integers. Left out are the errors that D and e hand on from token to token.

inline constexpr double kFixedVariance = 1.0 / 12.0;
/// Of the root of summed variances to the root of summed squares. The errors were 5 times as large as that at most, 0.6 times
/// in the median (3200 problems drawn by tests/cpp/test_bf16_gradients.cpp); the least of the bounds is 8e-3.
inline constexpr double kMostRounding = 1.5e-3;

template <class Dot>
inline void begin_gate_checks(const BackwardRun<Dot>& run) {
  for (std::int64_t m = 0; m < run.shape.group; ++m) run.scratch.gate_checks[m] = {};
}

/// Adds a chunk's gradients. `state_dot`: the first of the variances.
template <class Dot>
inline void check_gate_gradients(const BackwardRun<Dot>& run, const ChunkPlace& place, std::int64_t member, double state_dot,
                                 const double* d_decay, const float* d_beta) {
  const BackwardScratch<Dot>& scratch = run.scratch;
  const GroupChunk<Dot>& chunk = scratch.chunks[place.in_segment];
  const Gates& gates = scratch.gates[place.in_segment];
  const auto square = [](double a) { return a * a; };
  const auto factor = [&](const float* first, const float* again, std::int64_t t) {
    return square(static_cast<double>(first[t])) * (gates.far ? square(static_cast<double>(again[t])) : 1.0);
  };
  double state = 0.0;
  for (std::int64_t p = 0; p < run.panels; ++p) {
    state += static_cast<double>(scratch.state_squares[place.in_segment * run.shape.padded_v / kPanel + p]);
  }
  state /= static_cast<double>(run.shape.dim_k);
  GateCheck sums;
  double before = square(static_cast<double>(gates.total)) * state_dot;  // the variance of what tokens from t on share
  for (std::int64_t t = 0; t < place.tokens; ++t) {
    const std::int64_t at = t / kWidth * kPanel + t % kWidth;
    const auto read = [&](std::int64_t half) {
      return static_cast<double>(scratch.zt_squares[at + half * kWidth]) +
             square(static_cast<double>(scratch.zt_worth[at + half * kWidth])) * state;
    };
    const double decay = factor(gates.decay, gates.decay_again, t), beta = square(static_cast<double>(gates.beta[t]));
    const double q = static_cast<double>(chunk.squares[t]), k = static_cast<double>(chunk.squares[kTokens + t]);
    const double written = k * (gates.far ? square(static_cast<double>(gates.rest_again[t])) : 1.0) *
                           static_cast<double>(sum(load(scratch.write_squares + t * kWidth)));
    const double reads = decay * (square(run.inputs.scale) * q * read(0) + beta * k * read(1));
    sums.decay += square(d_decay[t]);
    sums.decay_variance += before + static_cast<double>(t + 1) * reads;  // the tokens up to t have it
    sums.beta += square(static_cast<double>(d_beta[t]));
    sums.beta_variance += written + decay * k * static_cast<double>(scratch.zt_squares[at + kWidth]);
    before += beta * written;
  }
  GateCheck& check = scratch.gate_checks[member];
  check.decay += sums.decay;
  check.decay_variance += kFixedVariance * sums.decay_variance;
  check.beta += sums.beta;
  check.beta_variance += kFixedVariance * sums.beta_variance;
}

/// False also if something is not finite.
template <class Dot>
inline bool gate_gradients_hold(const BackwardRun<Dot>& run) {
  for (std::int64_t m = 0; m < run.shape.group; ++m) {
    const GateCheck& check = run.scratch.gate_checks[m];
    if (!(check.decay_variance <= kMostRounding * kMostRounding * check.decay)) return false;
    if (!(check.beta_variance <= kMostRounding * kMostRounding * check.beta)) return false;
  }
  return true;
}
