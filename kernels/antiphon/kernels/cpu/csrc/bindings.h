// What the files of bindings share. Each binds one header's functions to Python: it checks shapes
// and number formats, allocates results, and lets go of the interpreter lock while it computes.

#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/utils/pybind.h>

#include <atomic>
#include <cstdint>
#include <ctime>

#include "table.h"

namespace py = pybind11;

// The functions of the instruction set in use.
const Table &kernels();

// Threads of a team of this thread: of torch's pool, and the one in its seat.
int threads();

// While it lives a kernel runs: the interpreter is free for other threads, and the processor time
// of this one is counted.
class KernelTimer {
  public:
    KernelTimer() : began_(thread_ns()) {}
    KernelTimer(const KernelTimer &) = delete;
    KernelTimer &operator=(const KernelTimer &) = delete;
    ~KernelTimer() { total_ += thread_ns() - began_; }

    // Of all threads that have called kernels so far; their teams' other members are not counted.
    static double seconds() { return static_cast<double>(total_) * 1e-9; }

  private:
    static int64_t thread_ns() {
        timespec now{};
        clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
        return now.tv_sec * int64_t{1'000'000'000} + now.tv_nsec;
    }

    inline static std::atomic<int64_t> total_ = 0;
    const int64_t began_;
    const py::gil_scoped_release unlocked_;
};

// One a file; bindings.cpp calls them all.
void bind_linear(py::module_ &module);
void bind_memory(py::module_ &module);
void bind_attention(py::module_ &module);
void bind_experts(py::module_ &module);
void bind_recurrent(py::module_ &module);
void bind_stack(py::module_ &module);
void bind_team(py::module_ &module);
