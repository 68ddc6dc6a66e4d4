// Everything public.
#pragma once

#include "flashqla/error.hpp"
#include "flashqla/ops.hpp"
#include "flashqla/parallel.hpp"
#include "flashqla/problem.hpp"
#include "flashqla/types.hpp"
#include "flashqla/version.hpp"
