// AVX-512 without bf16: Skylake to Ice Lake servers.

#include "standard.h"

#pragma GCC target("avx2,fma,f16c,bmi2,avx512f,avx512bw,avx512vl,avx512dq")
#define ISA_NS isa_avx512
#define ISA_NAME "avx512"
#define ISA_TABLE table_avx512
#define ANTIPHON_AVX512 1
#define ANTIPHON_BF16 0
#define ANTIPHON_AMX 0

#include "isa_table.inc"
