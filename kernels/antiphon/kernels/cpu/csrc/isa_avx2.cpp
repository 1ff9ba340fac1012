// AVX2 and FMA: Haswell, Zen 1 and later.

#include "standard.h"

#pragma GCC target("avx2,fma,f16c,bmi2")
#define ISA_NS isa_avx2
#define ANTIPHON_AVX512 0
#define ANTIPHON_BF16 0
#define ANTIPHON_AMX 0

#include "kernels.inc"

const Table table_avx2 = {
    .isa = "avx2",
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
