// A mixture of experts with what it points to; what Python holds.

#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "linear.h"
#include "packed_experts.h"

class MixtureOfExperts {
  public:
    // The linears must live as long as this.
    struct Linears {
        const Linear *router;
        std::vector<const Linear *> gate_up, down;
        const Linear *shared_gate_up, *shared_down, *shared_gate;  // or null
    };

    // The experts of `linears` are those from `first` on, of as many as the router has outputs.
    // Raises if the linears do not fit each other.
    MixtureOfExperts(
        const Linears &linears, int64_t first, const Routing &routing,
        std::optional<at::Tensor> correction, Activation activation, float alpha, float limit,
        bool share_on_input);
    MixtureOfExperts(const MixtureOfExperts &) = delete;
    MixtureOfExperts &operator=(const MixtureOfExperts &) = delete;

    // x (T, hidden) -> (T, hidden).
    at::Tensor forward(const at::Tensor &x) const;

    // Bytes that a call of so many tokens works in.
    int64_t room_bytes(int64_t tokens) const;
    // The same laid out, from a multiple of 64 on.
    ExpertsRoom room_at(char *memory, int64_t tokens) const;

    const PackedExperts &packed() const { return packed_; }

  private:
    template <class Part> int64_t lay_out(ExpertsRoom &room, int64_t tokens, Part &&part) const;

    std::optional<at::Tensor> correction_;
    std::vector<PackedExpert> experts_;
    PackedExpert shared_;
    PackedExperts packed_;
};
