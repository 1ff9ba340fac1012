// The module: which instruction set, and who binds what.

#include "bindings.h"

#include <ATen/Parallel.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "seat.h"

namespace {

// Linux lets a process have tiles if it asks, once and before its threads use any.
bool has_tiles() {
    constexpr long ASK = 0x1023, TILE_DATA = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    static const bool granted = __builtin_cpu_supports("amx-tile") &&
        __builtin_cpu_supports("amx-bf16") && __builtin_cpu_supports("amx-int8") &&
        syscall(SYS_arch_prctl, ASK, TILE_DATA) == 0;
    return granted;
}

bool runs(const Table &table) {
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
        __builtin_cpu_supports("bmi2");
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
        __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512dq");
    const bool bf16 = avx512 && __builtin_cpu_supports("avx512vbmi") &&
        __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni");
    if (&table == &table_amx) return bf16 && has_tiles();
    if (&table == &table_avx512bf16) return bf16;
    return &table == &table_avx512 ? avx512 : avx2;
}

// Best first.
std::vector<const Table *> available() {
    std::vector<const Table *> tables;
    for (const Table *table : {&table_amx, &table_avx512bf16, &table_avx512, &table_avx2})
        if (runs(*table)) tables.push_back(table);
    return tables;
}

const Table *chosen = nullptr;
bool forked = false;

std::vector<std::string> isas() {
    std::vector<std::string> names;
    for (const Table *table : available()) names.emplace_back(table->isa);
    return names;
}

void use_isa(const std::string &name) {
    for (const Table *table : available())
        if (table->isa == name) {
            chosen = table;
            return;
        }
    throw std::invalid_argument("this machine does not run " + name);
}

}  // namespace

const Table &kernels() { return *chosen; }

// A child of a fork has none of the pool's threads, and would wait for them for ever:
// https://gcc.gnu.org/bugzilla/show_bug.cgi?id=58378
int threads() {
    if (forked) return 1;
    return at::get_num_threads() + (TeamSeat::offered() == nullptr ? 0 : 1);
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
    const auto tables = available();
    if (tables.empty()) throw std::runtime_error("this processor has no AVX2 and FMA");
    chosen = tables.front();
    pthread_atfork(nullptr, nullptr, [] { forked = true; });
    module.def("isas", isas, "Instruction sets that this machine runs, best first.");
    module.def("isa", [] { return std::string(kernels().isa); }, "The one in use.");
    module.def("use_isa", use_isa, "Use another one; for tests, while no kernel runs.");
    module.def(
        "kernel_cpu_s", KernelTimer::seconds,
        "Processor time that calling threads have spent in kernels.");
    bind_linear(module);
    bind_memory(module);
    bind_attention(module);
    bind_experts(module);
    bind_recurrent(module);
    bind_stack(module);
    bind_team(module);
}
