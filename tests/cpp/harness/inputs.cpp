#include "harness/inputs.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>

namespace flashqla::test {

namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

class Generator {
 public:
  explicit Generator(const Case& c) : c_(c), random_(c.seed) {}

  Tensors make() {
    make_rows();
    make_gate();
    make_beta();
    if (c_.packed()) make_offsets();
    make_states();
    if (c_.op == Op::backward) make_gradients();
    if (c_.op == Op::forward && c_.stored == StoredStates::every) make_stored_rows();
    if (c_.op == Op::recurrent && c_.token_rows && !c_.same_rows) make_token_rows();
    return std::move(tensors_);
  }

 private:
  double normal() { return std::normal_distribution<double>()(random_); }
  double uniform(double low, double high) { return std::uniform_real_distribution<double>(low, high)(random_); }

  /// [B,T,H] (size 0) or [B,T,H,D].
  Tensor tokens_tensor(DType dtype, std::int64_t heads, std::int64_t size) const {
    std::vector<std::int64_t> sizes{c_.B, c_.T, heads};
    const std::int64_t row = std::max<std::int64_t>(size, 1);
    std::vector<std::int64_t> strides{c_.T * heads * row, heads * row, row};
    std::int64_t shift = 0;
    switch (c_.strides) {
      case Strides::dense:
      case Strides::fused:
        break;
      case Strides::padded:
        strides = {c_.T * (heads * (row + 3) + 5) + 7, heads * (row + 3) + 5, row + 3};
        shift = 1;
        break;
      case Strides::transposed:
        strides = {c_.T * heads * row, row, c_.T * row};
        break;
      case Strides::expanded:
        strides = {c_.T * row, row, 0};
        break;
      case Strides::reversed:
        strides = {c_.T * heads * row, -heads * row, row};
        break;
      case Strides::huge:
        strides = {kHugeStride, c_.B > 1 ? heads * row : kHugeStride / 4, row};
        break;
    }
    if (size > 0) {
      sizes.push_back(size);
      strides.push_back(1);
    }
    return Tensor(dtype, sizes, strides, shift);
  }

  void make_rows() {
    if (c_.strides == Strides::fused) {
      const Tensor fused(c_.dtype, {c_.B, c_.T, 2 * c_.Hq * c_.K + c_.Hv * c_.V + 2});
      const auto part = [&](std::int64_t start, std::int64_t heads, std::int64_t size) {
        return fused.slice(2, start, heads * size).split_last(heads, size);
      };
      tensors_["q"] = part(0, c_.Hq, c_.K);
      tensors_["k"] = part(c_.Hq * c_.K, c_.Hq, c_.K);
      tensors_["v"] = part(2 * c_.Hq * c_.K, c_.Hv, c_.V);
    } else {
      tensors_["q"] = tokens_tensor(c_.dtype, c_.Hq, c_.K);
      tensors_["k"] = tokens_tensor(c_.dtype, c_.Hq, c_.K);
      tensors_["v"] = tokens_tensor(c_.dtype, c_.Hv, c_.V);
    }
    fill_rows(tensors_["q"], c_.Hq, c_.K, !c_.l2norm);
    fill_rows(tensors_["k"], c_.Hq, c_.K, !c_.l2norm);
    fill_rows(tensors_["v"], c_.Hv, c_.V, false);
    if (c_.data == Data::repeated_keys) repeat_keys(tensors_["k"]);
  }

  /// Calls set(b, t, h) for every row that belongs to a sequence.
  template <class Set>
  void for_used_rows(std::int64_t heads, const Set& set) {
    for (std::int64_t b = 0; b < c_.B; ++b) {
      for (std::int64_t t = 0; t < c_.used(); ++t) {
        for (std::int64_t h = 0; h < heads; ++h) set((b * c_.T + t) * heads + h);
      }
    }
  }

  void fill_rows(Tensor& tensor, std::int64_t heads, std::int64_t size, bool unit) {
    std::vector<double> row(static_cast<std::size_t>(size));
    for_used_rows(heads, [&](std::int64_t at) {
      double sum = 0;
      for (double& x : row) {
        x = normal();
        sum += x * x;
      }
      double factor = unit ? 1 / std::sqrt(sum) : 1;
      if (unit && c_.data == Data::unnormalised) factor *= uniform(0.3, 1.4);
      for (std::int64_t d = 0; d < size; ++d) tensor.set(at * size + d, row[static_cast<std::size_t>(d)] * factor);
    });
  }

  void repeat_keys(Tensor& k) {
    for (std::int64_t b = 0; b < c_.B; ++b) {
      for (std::int64_t t = 3; t < c_.used(); ++t) {
        for (std::int64_t i = 0; i < c_.Hq * c_.K; ++i) {
          k.set((b * c_.T + t) * c_.Hq * c_.K + i, k.get((b * c_.T + t % 3) * c_.Hq * c_.K + i));
        }
      }
    }
  }

  double log_decay(std::int64_t at) {
    const std::int64_t head = at % c_.Hv, token = at / c_.Hv % std::max<std::int64_t>(c_.T, 1);
    const double speed = std::pow(10.0, -1.0 * static_cast<double>((head + 1) % 3));  // 0.1, 0.01, 1
    switch (c_.data) {
      case Data::strong_decay:
        return -(head % 2 == 0 ? 20.0 : 3.0) * uniform(0.2, 1);
      case Data::no_decay:
        return 0;
      case Data::growth:
        return uniform(-0.05, 0.05);
      case Data::forget:
        if (token % 11 == 5) return -kInfinity;
        if (token % 17 == 9) return -1e4;
        return token % 2 == 0 ? 0 : -uniform(0, 50) * static_cast<double>(token % 3);
      default:
        return -speed * std::log1p(std::exp(normal()));
    }
  }

  void make_gate() {
    if (c_.gate == Gate::none) return;
    const bool cumulative = c_.gate == Gate::cumulative;
    Tensor& g = tensors_["g"] = cumulative ? Tensor(DType::f32, {c_.B, c_.T, c_.Hv}) : tokens_tensor(c_.gate_dtype, c_.Hv, 0);
    if (c_.gate == Gate::computed) {
      for_used_rows(c_.Hv, [&](std::int64_t at) { g.set(at, 1.5 * normal()); });
      Tensor& a_log = tensors_["a_log"] = Tensor(c_.gate_dtype, {c_.Hv});
      for (std::int64_t h = 0; h < c_.Hv; ++h)
        a_log.set(h, std::log(c_.data == Data::strong_decay ? uniform(4, 16) : uniform(0.02, 2)));
      if (!c_.dt_bias) return;
      Tensor& dt_bias = tensors_["dt_bias"] = Tensor(c_.gate_dtype, {c_.Hv});
      for (std::int64_t h = 0; h < c_.Hv; ++h) dt_bias.set(h, uniform(-3, 1));
      return;
    }
    for_used_rows(c_.Hv, [&](std::int64_t at) { g.set(at, log_decay(at)); });
    if (cumulative) accumulate(g);
  }

  /// As chunk_forward's g_cumulative.
  void accumulate(Tensor& g) {
    for (std::int64_t n = 0; n < c_.sequences(); ++n) {
      const std::int64_t first = (c_.packed() ? 0 : n * c_.T) + c_.begin(n);
      for (std::int64_t h = 0; h < c_.Hv; ++h) {
        double sum = 0;
        for (std::int64_t t = 0; t < c_.length(n); ++t) {
          if (t % kTokensPerChunk == 0) sum = 0;
          sum += std::max(g.get((first + t) * c_.Hv + h), -128.0);
          g.set((first + t) * c_.Hv + h, sum);
        }
      }
    }
  }

  void make_beta() {
    if (c_.beta == Beta::one) return;
    Tensor& beta = tensors_["beta"] = tokens_tensor(c_.gate_dtype, c_.Hv, 0);
    for_used_rows(c_.Hv, [&](std::int64_t at) {
      double value = c_.beta == Beta::given ? uniform(0.05, 0.98) : 1.5 * normal();
      if (c_.beta == Beta::given && c_.data == Data::beta_two) value = uniform(1.9, 2);
      if (c_.beta == Beta::given && c_.data == Data::beta_zero && at / c_.Hv % 3 == 0) value = 0;
      beta.set(at, value);
    });
  }

  void make_offsets() {
    Tensor& offsets = tensors_["cu_seqlens"] = Tensor(c_.index_dtype, {c_.sequences() + 1});
    for (std::int64_t n = 0; n <= c_.sequences(); ++n) offsets.set(n, static_cast<double>(c_.begin(n)));
  }

  std::vector<std::int64_t> permutation(std::int64_t size) {
    std::vector<std::int64_t> order(static_cast<std::size_t>(size));
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), random_);
    return order;
  }

  void fill_state_row(Tensor& state, std::int64_t row) {
    const std::int64_t size = c_.Hv * c_.K * c_.V;
    for (std::int64_t i = 0; i < size; ++i) state.set(row * size + i, 0.5 * normal());
  }

  Tensor state_tensor(DType dtype, std::int64_t rows) const {
    const bool by_key = c_.layout == StateLayout::key_value;
    const std::vector<std::int64_t> sizes{rows, c_.Hv, by_key ? c_.K : c_.V, by_key ? c_.V : c_.K};
    if (c_.strides == Strides::huge) return Tensor(dtype, sizes, {kHugeStride, c_.K * c_.V, sizes[3], 1});
    if (c_.strides != Strides::padded) return Tensor(dtype, sizes);
    const std::int64_t outer = sizes[3] + 2, head = sizes[2] * outer + 3;
    return Tensor(dtype, sizes, {c_.Hv * head + 11, head, outer, 1}, 1);
  }

  void make_states() {
    const std::int64_t N = c_.sequences();
    if (c_.pool == Pool::none && c_.drafts == 0) {
      if (!c_.initial) return;
      Tensor& state = tensors_["initial_state"] = state_tensor(c_.state_dtype, N);
      for (std::int64_t n = 0; n < N; ++n) fill_state_row(state, n);
      return;
    }
    make_pool(N, std::max<std::int64_t>(c_.drafts, 1));
  }

  /// Sequences 3, 7, ... are padding entries; sequence 1 starts from zero and sequence 2 is not written.
  void make_pool(std::int64_t N, std::int64_t P) {
    const std::int64_t slots = N * P + 3;
    Tensor& state = tensors_["initial_state"] = state_tensor(c_.state_dtype, slots);
    Tensor read(c_.index_dtype, c_.drafts > 0 ? std::vector<std::int64_t>{N, P} : std::vector<std::int64_t>{N});
    Tensor write(c_.index_dtype, {N}), accepted(c_.index_dtype, {N});
    const auto order = permutation(slots);
    const auto write_order = permutation(slots);
    for (std::int64_t n = 0; n < N; ++n) {
      const bool padding = n % 4 == 3;
      const std::int64_t count = std::min<std::int64_t>(n % P + 1, P);
      std::int64_t start = -1;
      for (std::int64_t p = 0; p < P; ++p) {
        const std::int64_t row = !c_.same_rows && (padding || n == 1) ? -1 : order[static_cast<std::size_t>(n * P + p)];
        read.set(n * P + p, static_cast<double>(row));
        if (p == count - 1) start = row;
      }
      accepted.set(n, static_cast<double>(count));
      if (start >= 0) fill_state_row(state, start);
      std::int64_t row = write_order[static_cast<std::size_t>(n)];
      if (c_.pool == Pool::in_place) row = n == 1 ? order[static_cast<std::size_t>(P)] : start;
      write.set(n, static_cast<double>(padding || n == 2 ? -1 : row));
    }
    tensors_["read"] = read;
    if (c_.same_rows) tensors_["token_rows"] = read;
    if (!c_.same_rows) tensors_["write"] = write;
    if (c_.drafts > 0) tensors_["accepted"] = accepted;
  }

  void make_gradients() {
    if (c_.d_o) {
      const std::vector<std::int64_t> sizes{c_.B, c_.T, c_.Hv, c_.V};
      Tensor& d_o = tensors_["d_o"] = c_.ones ? Tensor(c_.dtype, sizes, {0, 0, 0, 1}) : tokens_tensor(c_.dtype, c_.Hv, c_.V);
      if (c_.ones) {
        d_o.fill(1);
      } else {
        fill_rows(d_o, c_.Hv, c_.V, false);
      }
    }
    if (!c_.d_final) return;
    Tensor& d_final = tensors_["d_final_state"] = state_tensor(c_.dtype == DType::f64 ? DType::f64 : DType::f32, c_.sequences());
    for (std::int64_t n = 0; n < c_.sequences(); ++n) fill_state_row(d_final, n);
  }

  void make_stored_rows() {
    std::vector<std::int64_t> prefix_lengths(static_cast<std::size_t>(c_.sequences()));
    if (c_.prefix) {
      Tensor& prefix = tensors_["prefix_lengths"] = Tensor(c_.index_dtype, {c_.sequences()});
      for (std::size_t n = 0; n < prefix_lengths.size(); ++n) {
        prefix_lengths[n] = static_cast<std::int64_t>(uniform(0, 3.0 * static_cast<double>(c_.states_every)));
        prefix.set(static_cast<std::int64_t>(n), static_cast<double>(prefix_lengths[n]));
      }
    }
    if (!c_.stored_rows) return;
    const std::int64_t count = c_.stored_count(prefix_lengths);
    Tensor& rows = tensors_["stored_rows"] = Tensor(c_.index_dtype, {count});
    const auto order = permutation(count + 2);
    for (std::int64_t i = 0; i < count; ++i)
      rows.set(i, i % 5 == 3 ? -1.0 : static_cast<double>(order[static_cast<std::size_t>(i)]));
  }

  void make_token_rows() {
    Tensor& rows = tensors_["token_rows"] = Tensor(c_.index_dtype, {c_.B, c_.T});
    const auto order = permutation(c_.B * c_.T + 2);
    for (std::int64_t i = 0; i < c_.B * c_.T; ++i)
      rows.set(i, i % 4 == 2 ? -1.0 : static_cast<double>(order[static_cast<std::size_t>(i)]));
  }

  const Case& c_;
  std::mt19937_64 random_;
  Tensors tensors_;
};

}  // namespace

Tensors make_inputs(const Case& c) { return Generator(c).make(); }

Tensors in_double(const Tensors& inputs) {
  Tensors result;
  for (const auto& [name, tensor] : inputs) {
    const bool index = tensor.dtype() == DType::i64 || tensor.dtype() == DType::i32;
    result[name] = index ? tensor : tensor.to(DType::f64);
  }
  return result;
}

}  // namespace flashqla::test
