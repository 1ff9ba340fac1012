// AVX-512 and tiles of bf16 and of bytes: Sapphire Rapids and later.

#include "standard.h"

#pragma GCC target("avx2,fma,f16c,bmi2,avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vnni,amx-tile,amx-bf16,amx-int8")
#define ISA_NS isa_amx
#define ANTIPHON_AVX512 1
#define ANTIPHON_BF16 1
#define ANTIPHON_AMX 1

#include "kernels.inc"

const Table table_amx = {
    .isa = "amx",
    .linear = ISA_NS::linear_call,
    .linear_rows = ISA_NS::linear_rows,
    .pack = ISA_NS::pack_call,
    .norm = ISA_NS::norm_call,
    .gate = ISA_NS::gate_call,
    .qk_norm_rope_store = ISA_NS::qk_norm_rope_store_call,
    .finite = ISA_NS::finite_call,
    .argmax = ISA_NS::argmax_call,
    .attention = ISA_NS::attention_call,
    .stack = ISA_NS::stack_call,
};
