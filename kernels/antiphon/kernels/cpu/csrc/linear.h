// Packed linears with the tensors that own their memory; what Python holds.

#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

#include "packed.h"

class Linear {
  public:
    // Raises if the tensors do not fit the shape; packed.h says what a panel holds.
    Linear(
        Weights weights, Dtype dtype, bool halves, int64_t inputs, int64_t outputs,
        at::Tensor panels, std::optional<at::Tensor> scales, std::optional<at::Tensor> bias);
    // The same of weights that are `grouped`; values (2^bits) are those of codes, in bf16.
    Linear(
        const Grouping &grouping, Dtype dtype, bool halves, int64_t inputs, int64_t outputs,
        at::Tensor panels, std::optional<at::Tensor> values, std::optional<at::Tensor> bias);

    // x (rows, inputs) -> (rows, outputs), see Epilogue.
    at::Tensor forward(const at::Tensor &x, Epilogue epilogue) const;

    // The weights of some outputs: (n) int64 -> (n, inputs).
    at::Tensor rows(const at::Tensor &outputs) const;

    // Put rows (P * lanes, inputs) into `lanes` lanes, from `lane` on, of P panels from `panel` on.
    void write(const at::Tensor &rows, int64_t panel, int64_t lane, int64_t lanes);

    // Put codes (P * lanes, inputs) uint8 there, with scales (P * lanes, groups) and minimums.
    void write_groups(
        const at::Tensor &codes, const at::Tensor &scales,
        const std::optional<at::Tensor> &minimums, int64_t panel, int64_t lane, int64_t lanes);

    const PackedLinear &packed() const { return packed_; }

  private:
    at::Tensor panels_;
    std::optional<at::Tensor> scales_, bias_, values_;
    PackedLinear packed_;
};

// The linears of heads, which must live as long as this.
class HeadLinears {
  public:
    // Raises if they have not one shape.
    explicit HeadLinears(const std::vector<const Linear *> &linears);

    // x (rows, heads, inputs) -> (rows, heads, outputs).
    at::Tensor multiply(const at::Tensor &x) const;

    const std::vector<const PackedLinear *> &packed() const { return linears_; }

  private:
    std::vector<const PackedLinear *> linears_;
};
