// Where errors are hardly forgotten: docs/numerics.md. A token shrinks the state, and errors in it, along its key by
// 1 - beta |k|^2; with beta |k|^2 = 2 it reflects them. Included inside namespace avx512bf16.
#pragma once

/// Bound of the mean of beta |k|^2, weighted with itself.
inline constexpr float kMostBeta = 1.4f;

/// Of some tokens of a value head.
class Reflection {
 public:
  /// beta |k|^2 of one more.
  void add(float beta) {
    stable_ = stable_ && beta >= 0.0f && beta <= 2.0f;  // false for NaN
    sum_ += beta;
    squares_ += beta * beta;
  }
  bool found() const { return !(stable_ && squares_ <= kMostBeta * sum_); }

 private:
  float sum_ = 0.0f, squares_ = 0.0f;
  bool stable_ = true;
};
