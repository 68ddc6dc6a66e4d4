// From gradients of log decay and beta as the recurrence uses them to those of the tensors as given. Included after gates.inl.

/// Gate::computed: decay = -rate softplus(x) with x = g + dt_bias, so d decay / dx = -rate sigmoid(x). A gradient of zero stays
/// zero however steep the gate is. Adds to sums[0] and sums[1] the gradients of a_log and dt_bias.
inline void gate_input_gradients(const InputArguments& in, std::int64_t batch, std::int64_t token, std::int64_t position,
                                 std::int64_t head, std::int64_t n, double* d_decay, double* sums) {
  alignas(64) float x[kTokens], slope[kTokens];
  double decay[64];
  load_decays(in, batch, token, position, head, n, decay);
  load_tokens(in.g, batch, token, head, n, x);
  for (std::int64_t i = n; i < kTokens; ++i) x[i] = 0.0f;
  const Vec bias = set1(in.dt_bias.present() ? static_cast<float>(in.dt_bias.load(head)) : 0.0f);
  for (std::int64_t i = 0; i < kTokens; i += kWidth) {
    store(x + i, add(load(x + i), bias));
    store(slope + i, sigmoid(load(x + i)));
  }
  const double a_log = in.a_log.load(head), rate = __builtin_exp(a_log);
  for (std::int64_t i = 0; i < n; ++i) {
    if (d_decay[i] == 0.0) continue;
    const double x_i = static_cast<double>(x[i]);
    sums[0] += d_decay[i] * decay[i];
    d_decay[i] *= x_i < -80.0 ? -__builtin_exp(a_log + x_i) : -rate * static_cast<double>(slope[i]);
    sums[1] += d_decay[i];
  }
}

inline void store_gate_gradients(const ChunkBackwardArguments& arguments, std::int64_t batch, std::int64_t token,
                                 std::int64_t position, std::int64_t head, std::int64_t n, double* d_decay, double* sums) {
  if (arguments.inputs.problem.gate == Gate::computed) {
    gate_input_gradients(arguments.inputs, batch, token, position, head, n, d_decay, sums);
  }
  if (!arguments.d_g.present()) return;
  for (std::int64_t i = 0; i < n; ++i) arguments.d_g.store(batch, token + i, head, 0, d_decay[i]);
}

inline void store_beta_gradients(const ChunkBackwardArguments& arguments, std::int64_t batch, std::int64_t token,
                                 std::int64_t head, std::int64_t n, const float* d_beta) {
  const InputArguments& in = arguments.inputs;
  alignas(64) float slope[kTokens] = {};
  const bool inside = in.problem.beta == Beta::sigmoid || in.problem.beta == Beta::doubled_sigmoid;
  if (inside) {
    load_tokens(in.beta, batch, token, head, n, slope);
    const Vec factor = set1(in.problem.beta == Beta::doubled_sigmoid ? 2.0f : 1.0f);
    for (std::int64_t i = 0; i < kTokens; i += kWidth) {
      const Vec x = load(slope + i);
      store(slope + i, mul(factor, mul(sigmoid(x), sigmoid(sub(zero(), x)))));
    }
  }
  for (std::int64_t i = 0; i < n; ++i) {
    arguments.d_beta.store(batch, token + i, head, 0, static_cast<double>(inside ? d_beta[i] * slope[i] : d_beta[i]));
  }
}
