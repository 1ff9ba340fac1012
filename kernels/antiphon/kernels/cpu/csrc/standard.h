// What the kernels use of the standard library; compiled for every machine, see isa.h.

#pragma once

#include <immintrin.h>
#include <omp.h>
#include <sched.h>

#include <array>
#include <bit>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>
#include <type_traits>
#include <utility>

#include "table.h"
