// A packed linear on AMX: tiles of 32 rows by a panel, four squares of sums.

#if ANTIPHON_AMX

// The lower and the upper byte of each whole number below 128 as bf16, which has all of them.
struct NumberBytes {
    alignas(64) uint8_t lower[128], upper[128];
    constexpr NumberBytes() : lower(), upper() {
        for (int i = 0; i < 128; ++i) {
            const uint32_t bits = std::bit_cast<uint32_t>(static_cast<float>(i)) >> 16;
            lower[i] = static_cast<uint8_t>(bits);
            upper[i] = static_cast<uint8_t>(bits >> 8);
        }
    }
};
static constexpr NumberBytes NUMBER_BYTES;

// Pairs of inputs of a panel of bytes, none of them -128, as bf16; its scales are still to come.
INLINE void unpack_pairs(const int8_t *panel, int64_t pairs, bf16 *to) {
    constexpr int64_t PAIR = 2 * PANEL;
    const __m512i low = _mm512_load_si512(NUMBER_BYTES.lower);
    const __m512i low_64 = _mm512_load_si512(NUMBER_BYTES.lower + 64);
    const __m512i high = _mm512_load_si512(NUMBER_BYTES.upper);
    const __m512i high_64 = _mm512_load_si512(NUMBER_BYTES.upper + 64);
    const __m512i signs = _mm512_set1_epi8(static_cast<char>(0x80));
    // Bytes are joined within quarters of a register: the first half of them goes to lower parts.
    const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
    for (int64_t i = 0; i < pairs; ++i, panel += PAIR, to += PAIR) {
        const __m512i bytes = _mm512_permutexvar_epi64(order, _mm512_loadu_si512(panel));
        const __m512i size = _mm512_abs_epi8(bytes);
        const __m512i lower = _mm512_permutex2var_epi8(low, size, low_64);
        const __m512i unsigned_upper = _mm512_permutex2var_epi8(high, size, high_64);
        const __m512i upper = _mm512_or_si512(unsigned_upper, _mm512_and_si512(bytes, signs));
        store_int(to, {_mm512_unpacklo_epi8(lower, upper)});
        store_int(to + PANEL, {_mm512_unpackhi_epi8(lower, upper)});
    }
}

// A whole panel of bytes as one of bf16, in memory of this thread.
static const bf16 *unpacked_panel(const void *panel, int64_t inputs) {
    static thread_local Scratch scratch;
    const int64_t pairs = ceil_div(inputs, 2);
    auto *to = static_cast<bf16 *>(scratch.room(pairs * 2 * PANEL * sizeof(bf16)));
    unpack_pairs(static_cast<const int8_t *>(panel), pairs, to);
    return to;
}

// Load a tile, whose number must be a literal.
#define LOAD(TILE, PASSES, ...)                                  \
    if constexpr (PASSES) _tile_stream_loadd(TILE, __VA_ARGS__); \
    else _tile_loadd(TILE, __VA_ARGS__)

// Which operand of its tiles a thread finds in the first-level cache: the other is told not to
// drive it out.
enum class Stays { rows, panel };

// The tiles of one chunk, one after the other. Between the products of one, the sums of the one
// before are finished, and the memory is asked for what comes later: other units do that.
class SquareTiles {
  public:
    // How often a step asks the memory.
    static constexpr int64_t ASKS = 4;

    SquareTiles(const PackedLinear &linear, void *y, Epilogue epilogue, Coming coming)
        : linear_(linear), y_(y), epilogue_(epilogue), coming_(coming) {}

    // Up to SQUARE_ROWS rows, the `row`-th of y and on, by a panel: of bf16, or of bytes.
    template <Stays STAYS>
    void multiply(
        const bf16 *x, int64_t row, int64_t height, int64_t panel, const void *weights,
        bool in_bytes) {
        const int64_t upper = height < SQUARE ? height : SQUARE, lower = height - upper;
        squares_.shape(upper, lower);
        if (lower) multiply<STAYS, true>(x, height, weights, in_bytes);
        else multiply<STAYS, false>(x, height, weights, in_bytes);
        finish();
        left_ = {finish_of<bf16>(linear_, panel, epilogue_), panel, row, height, sums_[side_][0]};
        side_ ^= 1;
    }

    // Finish what is left.
    void finish() { finish(left_.rows); }

  private:
    // Rows of sums that are to be finished.
    struct Left {
        Finish finish;
        int64_t panel, row, rows;
        const float *sums;
    };

    __attribute__((always_inline)) void finish(int64_t rows) {
        if (rows > left_.rows) rows = left_.rows;
        if (rows == 0) return;
        left_.finish(linear_, left_.panel, left_.row, rows, left_.sums, y_);
        left_.row += rows;
        left_.rows -= rows;
        left_.sums += rows * PANEL;
    }

    template <Stays STAYS, bool BOTH>
    void multiply(const bf16 *x, int64_t height, const void *weights, bool in_bytes) {
        const int64_t inputs = linear_.inputs, whole = inputs / STEP * STEP;
        a_step_ = ceil_div(left_.rows * STEP, inputs);
        _tile_zero(0);
        _tile_zero(1);
        if constexpr (BOTH) {
            _tile_zero(2);
            _tile_zero(3);
        }
        if (in_bytes) {
            multiply_bytes<BOTH>(x, height, static_cast<const int8_t *>(weights));
        } else {
            const auto *panel = static_cast<const bf16 *>(weights);
            for (int64_t k = 0; k < whole; k += STEP)
                step<STAYS, BOTH>(x + k, inputs, panel + k * PANEL);
            if (whole < inputs) last_step<BOTH>(x + whole, height, panel + whole * PANEL);
        }
        constexpr int64_t STRIDE = PANEL * sizeof(float);
        float *sums = sums_[side_][0];
        _tile_stored(0, sums, STRIDE);
        _tile_stored(1, sums + SQUARE, STRIDE);
        if constexpr (BOTH) {
            _tile_stored(2, sums + SQUARE * PANEL, STRIDE);
            _tile_stored(3, sums + SQUARE * PANEL + SQUARE, STRIDE);
        }
        Squares::written();
    }

    // A panel of bytes, unpacked some steps before its products, which would wait for what has just
    // been written, and read once.
    template <bool BOTH> void multiply_bytes(const bf16 *x, int64_t height, const int8_t *panel) {
        constexpr int64_t ROOMS = 4;
        alignas(64) bf16 rooms[ROOMS][STEP * PANEL];
        const int64_t inputs = linear_.inputs, steps = inputs / STEP, rest = inputs % STEP;
        const auto unpack = [&](int64_t i) {
            if (i < steps)
                unpack_pairs(panel + i * STEP * PANEL, SQUARE, rooms[i % ROOMS]);
        };
        for (int64_t i = 0; i < ROOMS - 1; ++i) unpack(i);
        for (int64_t i = 0; i < steps; ++i) {
            unpack(i + ROOMS - 1);
            step<Stays::panel, BOTH>(x + i * STEP, inputs, rooms[i % ROOMS]);
        }
        if (rest == 0) return;
        unpack_pairs(panel + steps * STEP * PANEL, ceil_div(rest, 2), rooms[0]);
        last_step<BOTH>(x + steps * STEP, height, rooms[0]);
    }

    template <Stays STAYS, bool BOTH>
    __attribute__((always_inline)) void step(const bf16 *x, int64_t stride, const bf16 *panel) {
        constexpr int64_t PAIRS = 2 * PANEL * sizeof(bf16);
        const int64_t bytes = stride * static_cast<int64_t>(sizeof(bf16));
        Squares::written();
        coming_.step();
        LOAD(6, STAYS == Stays::rows, panel, PAIRS);
        coming_.step();
        LOAD(4, STAYS == Stays::panel, x, bytes);
        _tile_dpbf16ps(0, 4, 6);
        coming_.step();
        LOAD(7, STAYS == Stays::rows, panel + 2 * SQUARE, PAIRS);
        coming_.step();
        _tile_dpbf16ps(1, 4, 7);
        if constexpr (BOTH) {
            LOAD(5, STAYS == Stays::panel, x + SQUARE * stride, bytes);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
        Squares::written();
        finish(a_step_);
    }

    // Fewer inputs than a step has: what lies behind them is others', and must count for nothing.
    template <bool BOTH> void last_step(const bf16 *x, int64_t height, const bf16 *panel) {
        alignas(64) bf16 rows[SQUARE_ROWS][STEP] = {};
        alignas(64) bf16 pairs[SQUARE][2 * PANEL] = {};
        const int64_t inputs = linear_.inputs, rest = inputs % STEP;
        for (int64_t r = 0; r < height; ++r)
            std::memcpy(rows[r], x + r * inputs, rest * sizeof(bf16));
        std::memcpy(pairs, panel, ceil_div(rest, 2) * sizeof(pairs[0]));
        step<Stays::panel, BOTH>(rows[0], STEP, pairs[0]);
    }

    const PackedLinear &linear_;
    void *const y_;
    const Epilogue epilogue_;
    Coming coming_;
    Squares squares_;
    Left left_ = {};
    int64_t a_step_ = 0;  // rows that are finished in a step
    int side_ = 0;
    alignas(64) float sums_[2][SQUARE_ROWS][PANEL];
};

#undef LOAD

// Rows x, the `first` of y and on, by some panels.
static void linear_on_squares(
    const PackedLinear &linear, int64_t panel_first, int64_t panel_last, const bf16 *x,
    int64_t first, int64_t rows, void *y, Epilogue epilogue, Coming coming) {
    const int64_t tiles = ceil_div(rows, SQUARE_ROWS), panels = panel_last - panel_first;
    const bool bytes = linear.weights == Weights::int8, unpacks = bytes && tiles > 1;
    const int64_t asks = tiles * panels * ceil_div(linear.inputs, STEP) * SquareTiles::ASKS;
    const char *weights = static_cast<const char *>(linear.panels);
    if (tiles > 1) coming.share(asks);
    else coming.share_beside(
        weights + panel_first * panel_bytes(linear), panels * panel_bytes(linear), asks);
    SquareTiles squares(linear, y, epilogue, coming);
    const auto by_panels = [&](auto &&body) {
        for (int64_t panel = panel_first; panel < panel_last; ++panel)
            body(panel, weights + panel * panel_bytes(linear));
    };
    const auto by_tiles = [&](auto &&body) {
        // Of like height: 40 rows are 20 and 20.
        for (int64_t i = 0, row = 0; i < tiles; ++i) {
            const int64_t height = (rows - row) / (tiles - i);
            body(x + row * linear.inputs, first + row, height);
            row += height;
        }
    };
    if (unpacks || (panels < tiles && !bytes)) {
        by_panels([&](int64_t panel, const void *weights) {
            if (unpacks) weights = unpacked_panel(weights, linear.inputs);
            by_tiles([&](const bf16 *x, int64_t row, int64_t height) {
                squares.multiply<Stays::panel>(x, row, height, panel, weights, false);
            });
        });
    } else {
        by_tiles([&](const bf16 *x, int64_t row, int64_t height) {
            by_panels([&](int64_t panel, const void *weights) {
                squares.multiply<Stays::rows>(x, row, height, panel, weights, bytes);
            });
        });
    }
    squares.finish();
}

#else

static void linear_on_squares(
    const PackedLinear &, int64_t, int64_t, const bf16 *, int64_t, int64_t, void *, Epilogue,
    Coming) {}

#endif
