// Names of the public enumerations, as messages spell them.
#include "flashqla/types.hpp"

namespace flashqla {

const char* name_of(DType dtype) {
  switch (dtype) {
    case DType::f64:
      return "float64";
    case DType::f32:
      return "float32";
    case DType::bf16:
      return "bfloat16";
    case DType::f16:
      return "float16";
    case DType::i64:
      return "int64";
    case DType::i32:
      return "int32";
  }
  return "unknown dtype";
}

}  // namespace flashqla
