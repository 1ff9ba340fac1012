// What the files of bindings share. Each binds one header's functions to Python: it checks shapes
// and number formats, allocates results, and lets go of the interpreter lock while it computes.

#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/utils/pybind.h>

#include "table.h"

namespace py = pybind11;

// The functions of the instruction set in use.
const Table &kernels();

// Threads of torch's pool that this thread may use.
int threads();

// One a file; bindings.cpp calls them all.
void bind_linear(py::module_ &module);
void bind_memory(py::module_ &module);
void bind_attention(py::module_ &module);
void bind_stack(py::module_ &module);
