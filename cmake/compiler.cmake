# Flags for every target of ours. No -march and no -ffast-math anywhere: instruction sets are opened per region in src/cpu/isa, numerics stay visible.
add_library(flashqla_flags INTERFACE)
target_compile_options(flashqla_flags INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -Wconversion -Wno-sign-conversion -ffp-contract=off>)
# Unrolling is a wish: clang says when it does not follow one, which it never does at -O1 with sanitizers.
target_compile_options(flashqla_flags INTERFACE $<$<CXX_COMPILER_ID:Clang,AppleClang>:-Wno-pass-failed>)
if(FLASHQLA_WERROR)
  target_compile_options(flashqla_flags INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-Werror> $<$<COMPILE_LANGUAGE:CUDA>:-Werror=all-warnings>)
endif()
if(FLASHQLA_FUZZ)
  # Without the null and pointer-overflow checks, which the address sanitizer mostly covers: with them clang 14 takes minutes on a kernel.
  add_compile_options(-fsanitize=fuzzer-no-link,address,undefined -fno-sanitize=null,pointer-overflow -fno-sanitize-recover=all
                      -fno-omit-frame-pointer)
  add_link_options(-fsanitize=address,undefined)
endif()
