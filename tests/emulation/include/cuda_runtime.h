// The runtime together with the language.
#pragma once

#include <cuda_runtime_api.h>

#include "emulation/language.hpp"
