# Flags for every target of ours. No -march and no -ffast-math anywhere: instruction sets are opened per region in src/cpu/isa, numerics stay visible.
add_library(flashqla_flags INTERFACE)
target_compile_options(flashqla_flags INTERFACE -Wall -Wextra -Wconversion -Wno-sign-conversion -ffp-contract=off)
if(FLASHQLA_WERROR)
  target_compile_options(flashqla_flags INTERFACE -Werror)
endif()
