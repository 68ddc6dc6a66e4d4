// Elementary functions on vectors. Included inside an instruction set's namespace, after its header. The .inl files name what
// they need, and one source file compiles them for one instruction set only.
#pragma once

/// r and n with e^x = r 2^n, n integral and r near 1, to about 1 ulp; |x| <= 180.
FLASHQLA_INLINE Vec exp_parts(Vec x, Vec& n) {
  n = round_to_integer(mul(x, set1(1.44269504f)));
  const Vec f =
      fnmadd(n, set1(-2.12194440e-4f), fnmadd(n, set1(0.693359375f), x));  // ln 2 in two parts, the first exact in products
  // (e^f - 1 - f) / f^2 interpolated at the Chebyshev nodes of |f| <= ln(2) / 2
  Vec r = fmadd(set1(0.0013926213f), f, set1(0.008363203f));
  r = fmadd(r, f, set1(0.041666556f));
  r = fmadd(r, f, set1(0.16666576f));
  r = fmadd(r, f, set1(0.5f));
  return add(fmadd(mul(f, f), r, f), set1(1.0f));
}

/// e^x to about 1 ulp; below the smallest normal number (x < -87.34) exactly 0, so that vanishing decays never become slow
/// denormals; infinity above 88.73; NaN stays NaN.
FLASHQLA_INLINE Vec exp(Vec x) {
  x = min(set1(90.0f), max(set1(-110.0f), x));
  Vec n;
  const Vec r = exp_parts(x, n);
  return select_less(x, set1(-87.336544f), zero(), scale_by_power(r, n));
}

/// log(1 + u) for 0 <= u <= 1, as 2 artanh(u / (2 + u)): full relative accuracy down to u = 0.
FLASHQLA_INLINE Vec log1p_unit(Vec u) {
  const Vec s = div(u, add(u, set1(2.0f)));
  const Vec t = mul(s, s);
  Vec r = fmadd(set1(0.11612165f), t, set1(0.108532876f));
  r = fmadd(r, t, set1(0.14296179f));
  r = fmadd(r, t, set1(0.19999853f));
  r = fmadd(r, t, set1(0.33333334f));
  const Vec twice = add(s, s);
  return fmadd(mul(twice, t), r, twice);
}

/// log(1 + e^x) for any x.
FLASHQLA_INLINE Vec softplus(Vec x) { return add(max(zero(), x), log1p_unit(exp(sub(zero(), abs(x))))); }

FLASHQLA_INLINE Vec sigmoid(Vec x) { return div(set1(1.0f), add(set1(1.0f), exp(sub(zero(), x)))); }

/// e^(high + low) where low is below one ulp of high.
FLASHQLA_INLINE Vec exp_sum(Vec high, Vec low) {
  const Vec e = exp(high);
  return fmadd(e, low, e);
}
