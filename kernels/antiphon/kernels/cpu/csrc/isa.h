// The instruction set that a unit is compiled for. Each isa_*.cpp names its own, after the standard
// library: what that inlines must run on every machine. A header that is read alone, by an editor
// or a linter, takes the set of the compiler's flags.

#pragma once

#include "standard.h"

#ifndef ISA_NS
#define ISA_NS isa_of_flags
#ifdef __AVX512F__
#define ANTIPHON_AVX512 1
#else
#define ANTIPHON_AVX512 0
#endif
#ifdef __AVX512BF16__
#define ANTIPHON_BF16 1
#else
#define ANTIPHON_BF16 0
#endif
#ifdef __AMX_BF16__
#define ANTIPHON_AMX 1
#else
#define ANTIPHON_AMX 0
#endif
#ifndef __AVX2__
#pragma GCC target("avx2,fma,f16c,bmi2")
#endif
#endif
