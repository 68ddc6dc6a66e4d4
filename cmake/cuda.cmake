# The CUDA language. CI builds sm_80 and sm_90a; a release gives its own CMAKE_CUDA_ARCHITECTURES. The runtime is linked in, so that programs need the
# driver only.
if(NOT CMAKE_CUDA_ARCHITECTURES)
  set(CMAKE_CUDA_ARCHITECTURES 80 90a-real)
endif()
enable_language(CUDA)
find_package(CUDAToolkit 12.8 REQUIRED)  # the first whose nvcc has --compress-mode
set(CMAKE_CUDA_STANDARD 20)
set(CMAKE_CUDA_STANDARD_REQUIRED ON)
set(CMAKE_CUDA_EXTENSIONS OFF)
set(CMAKE_CUDA_VISIBILITY_PRESET hidden)
set(CMAKE_CUDA_RUNTIME_LIBRARY Static)
# Registers and spills of every kernel, kept beside the objects: tools/check_ptxas.py.
set(CMAKE_CUDA_COMPILER_LAUNCHER ${PROJECT_SOURCE_DIR}/tools/keep_ptxas ${CMAKE_CUDA_COMPILER_LAUNCHER})
# No --use_fast_math: approximations are intrinsics where they are wanted, so that numerics stay visible.
add_compile_options($<$<COMPILE_LANGUAGE:CUDA>:-lineinfo> $<$<COMPILE_LANGUAGE:CUDA>:--compress-mode=size>)
