// AVX-512 with bf16, byte dot products and byte permutes: Sapphire Rapids, Zen 4 and later.

#include "standard.h"

#pragma GCC target( \
    "avx2,fma,f16c,bmi2,avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx512bf16,avx512vnni")
#define ISA_NS isa_avx512bf16
#define ISA_NAME "avx512bf16"
#define ISA_TABLE table_avx512bf16
#define ANTIPHON_AVX512 1
#define ANTIPHON_BF16 1
#define ANTIPHON_AMX 0

#include "isa_table.inc"
