// AVX2 and FMA: Haswell, Zen 1 and later.

#include "standard.h"

#pragma GCC target("avx2,fma,f16c,bmi2")
#define ISA_NS isa_avx2
#define ISA_NAME "avx2"
#define ISA_TABLE table_avx2
#define ANTIPHON_AVX512 0
#define ANTIPHON_BF16 0
#define ANTIPHON_AMX 0

#include "isa_table.inc"
