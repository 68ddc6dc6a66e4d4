# CUDA sources for the emulation of tests/emulation: .cu files are C++, and its headers stand before those of src and of the CUDA toolkit.
set(Boost_USE_STATIC_LIBS ON)
find_package(Boost 1.74 CONFIG REQUIRED COMPONENTS context)

set(FLASHQLA_EMULATION ${PROJECT_SOURCE_DIR}/tests/emulation)
file(GLOB FLASHQLA_EMULATION_SOURCES CONFIGURE_DEPENDS ${FLASHQLA_EMULATION}/*.cpp)
list(FILTER FLASHQLA_EMULATION_SOURCES EXCLUDE REGEX "/test_[a-z_]*\\.cpp$")
add_library(flashqla_emulation STATIC ${FLASHQLA_EMULATION_SOURCES})
target_include_directories(flashqla_emulation
  PUBLIC ${FLASHQLA_EMULATION}/include
  PRIVATE ${FLASHQLA_EMULATION} ${PROJECT_SOURCE_DIR}/src ${PROJECT_SOURCE_DIR}/include)
target_link_libraries(flashqla_emulation PUBLIC Boost::context PRIVATE flashqla_flags)
target_link_options(flashqla_emulation INTERFACE -fsanitize=alignment)  # flashqla_emulate_cuda

# flashqla_emulate_cuda(TARGET [SOURCE...]): a target of this folder whose .cu files, among the sources, are for the emulation.
function(flashqla_emulate_cuda target)
  set(sources ${ARGN})
  list(FILTER sources INCLUDE REGEX "\\.cu$")
  # Pragmas to unroll are nvcc's; registers and shared memory are read as other types than they were written, which nvcc permits.
  set_source_files_properties(${sources} PROPERTIES LANGUAGE CXX
    COMPILE_OPTIONS "-include;${FLASHQLA_EMULATION}/include/emulation/language.hpp;-Wno-unknown-pragmas;-fno-strict-aliasing;$<$<CXX_COMPILER_ID:GNU>:-fno-extern-tls-init>")
  # A device refuses reads of many bytes at places that are not multiples of as many; a CPU would not notice.
  target_compile_options(${target} PRIVATE -fsanitize=alignment -fno-sanitize-recover=alignment)
  target_include_directories(${target} BEFORE PRIVATE ${FLASHQLA_EMULATION}/include)
  target_link_libraries(${target} PUBLIC $<BUILD_INTERFACE:flashqla_emulation>)
endfunction()
