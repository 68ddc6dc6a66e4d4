// Geometry of strided views: how many elements, where they lie, whether they can meet. All in checked arithmetic.
#pragma once

#include <cstdint>
#include <string>

#include "flashqla/types.hpp"

namespace flashqla::api {

/// Elements of a view of checked rank with sizes >= 0.
std::int64_t num_elements(const ConstTensorView& view);

std::string strides_text(const ConstTensorView& view);

/// Whether no element is further than 2^60 bytes from the first, and no address wraps (unless it is null). The functions below
/// rely on it.
bool extent_fits(const ConstTensorView& view);

/// Whether no two elements share memory. Says no to exotic interleavings that do not.
bool elements_distinct(const ConstTensorView& view);

/// Whether two views whose extents fit certainly have no byte in common: their ranges are apart, or, with some stride as a
/// modulus, their residues are (slices of one fused projection; the two halves of each slot of a pool).
bool certainly_disjoint(const ConstTensorView& x, const ConstTensorView& y);

}  // namespace flashqla::api
