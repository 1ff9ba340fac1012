// AVX-512 and tiles of bf16 and of bytes: Sapphire Rapids and later.

#include "standard.h"

#pragma GCC target( \
    "avx2,fma,f16c,bmi2,avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx512bf16,avx512vnni,amx-tile,amx-bf16,amx-int8")
#define ISA_NS isa_amx
#define ISA_NAME "amx"
#define ISA_TABLE table_amx
#define ANTIPHON_AVX512 1
#define ANTIPHON_BF16 1
#define ANTIPHON_AMX 1

#include "isa_table.inc"
