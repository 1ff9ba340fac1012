// A layer with a recurrence, and the rows of one pass as its states see them; what Python holds.

#pragma once

#include <ATen/core/Tensor.h>
#include <pybind11/numpy.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "recurrence.h"

// States of each row: which it continues from, and where it leaves those after its tokens.
class StateMetadata {
  public:
    using Ints = pybind11::array_t<int32_t, pybind11::array::c_style | pybind11::array::forcecast>;

    // reads, query_len (R,); writes (R, W), -1 beyond those of a row. Raises if a row leaves none.
    StateMetadata(const Ints &reads, const Ints &writes, const Ints &query_len);
    StateMetadata(const StateMetadata &) = delete;
    StateMetadata &operator=(const StateMetadata &) = delete;

    // Other states (R, 1 + W), those that are read first, of as many rows of one token each.
    void advance(const Ints &table);

    int64_t tokens() const { return static_cast<int64_t>(token_rows_.size()); }
    bool one_each() const { return token_rows_.size() == rows_.size(); }
    // One more than the greatest state that is read or written.
    int64_t states_needed() const { return states_needed_; }
    StateRows plain() const;

  private:
    void take(const int32_t *reads, int64_t step, const Ints &table, int64_t first);

    std::vector<int32_t> writes_;
    std::vector<StateRow> rows_;
    std::vector<int32_t> token_rows_;
    int64_t states_needed_ = 0;
};

class RecurrentLayer {
  public:
    using Optional = std::optional<at::Tensor>;

    // Raises if the tensors do not fit the sizes (recurrence.h).
    RecurrentLayer(
        const Recurrence &sizes, const at::Tensor &conv, const Optional &conv_bias,
        const at::Tensor &decay_log, const at::Tensor &step_bias, const Optional &skip,
        const Optional &scales, const Optional &norm);
    RecurrentLayer(const RecurrentLayer &) = delete;
    RecurrentLayer &operator=(const RecurrentLayer &) = delete;

    // projected (T, inputs); states (S, taps - 1, C) and (S, H, rows, columns) float32, overwritten
    // -> (T, H * columns).
    at::Tensor forward(
        const at::Tensor &projected, const at::Tensor &conv_states, const at::Tensor &states,
        const StateMetadata &rows) const;

    // Raises if states are not those of this layer.
    void check_states(const at::Tensor &conv_states, const at::Tensor &states) const;

    const Recurrence &packed() const { return packed_; }

  private:
    Recurrence packed_;
    std::vector<at::Tensor> kept_;
};
