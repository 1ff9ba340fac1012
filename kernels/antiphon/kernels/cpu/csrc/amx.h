// Bf16 rows by panels of bf16 on AMX: squares of 16 rows by 16 outputs, four at a time.
//
// Sixteen pairs of inputs of half a panel are a tile as they lie, and so are as many inputs of
// sixteen rows. An output is summed 32 inputs at a step, in one square, whatever rows are beside
// its own: one row alone is summed on squares too, and has the same bits. They are not the bits of
// the dot products of AVX-512, which add the products of a step in another order.
// Intel 64 and IA-32 Architectures Software Developer's Manual, volume 1, chapter 18.

#if ANTIPHON_AMX

static constexpr int SQUARE = 16;
static constexpr int STEP = 32;
static constexpr int SQUARE_ROWS = 2 * SQUARE;

// The operand of LDTILECFG: how many rows and bytes a row each tile has.
struct alignas(64) TileShapes {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
};

// Pairs of inputs of a panel of bytes as bf16; its scales are still to come.
INLINE void unpack_pairs(const int8_t *panel, int64_t pairs, bf16 *to) {
    constexpr int64_t PAIR = 2 * PANEL;
    for (int64_t i = 0; i < pairs; ++i, panel += PAIR, to += PAIR) {
        prefetch_step(panel, PAIR);
        store_int(to, bf16_pairs(panel));
        store_int(to + PANEL, bf16_pairs(panel + PANEL));
    }
}

// The tile registers of this thread, while it lives. Tiles 0 to 3 are sums, first by rows, then by
// outputs; 4 and 5 are of x; 6 and 7 of the panel.
class Squares {
  public:
    Squares() = default;
    Squares(const Squares &) = delete;
    Squares &operator=(const Squares &) = delete;
    ~Squares() {
        if (upper_) _tile_release();
    }

    // Up to SQUARE_ROWS rows, from `row` of the block on, by its panel of bf16, or of bytes.
    void multiply(
        const Block<bf16> &block, int64_t row, int64_t height, bool in_bytes, void *y,
        Epilogue epilogue) {
        const int64_t upper = height < SQUARE ? height : SQUARE;
        shape(upper, height - upper);
        alignas(64) float sums[SQUARE_ROWS][PANEL];
        if (height > SQUARE) multiply<true>(block, row, in_bytes, sums[0]);
        else multiply<false>(block, row, in_bytes, sums[0]);
        finish(block, row, height, sums[0], y, epilogue);
    }

    // Give the squares of sums, and their squares of rows, so many rows.
    void shape(int64_t upper, int64_t lower) {
        if (upper == upper_ && lower == lower_) return;
        upper_ = upper;
        lower_ = lower;
        load({upper, upper, lower, lower, upper, lower, SQUARE, SQUARE});
    }

    // Give all squares of sums, and tile 4, so many rows, and tile 5 sixteen: it is a sum as well.
    void shape_for_few(int64_t rows) {
        upper_ = rows;
        lower_ = -1;
        load({rows, rows, rows, rows, rows, SQUARE, SQUARE, SQUARE});
    }

    // The intrinsics of GCC 12 do not say that they read memory: said before they do, and before
    // what they have read is written over.
    static void written() { __asm__ volatile("" ::: "memory"); }

  private:
    static void load(const std::array<int64_t, 8> &rows) {
        TileShapes shapes;
        for (int tile = 0; tile < 8; ++tile) {
            shapes.rows[tile] = static_cast<uint8_t>(rows[tile]);
            shapes.row_bytes[tile] = rows[tile] ? 64 : 0;
        }
        written();
        _tile_loadconfig(&shapes);
    }

    template <bool BOTH>
    void multiply(const Block<bf16> &block, int64_t row, bool in_bytes, float *sums) const {
        const int64_t inputs = block.linear.inputs, whole = inputs / STEP * STEP;
        const bf16 *x = block.x + row * inputs;
        _tile_zero(0);
        _tile_zero(1);
        if constexpr (BOTH) {
            _tile_zero(2);
            _tile_zero(3);
        }
        if (in_bytes) {
            multiply_bytes<BOTH>(block, x, whole);
        } else {
            const auto *panel = static_cast<const bf16 *>(block.weights);
            for (int64_t k = 0; k < whole; k += STEP) {
                // From the second tile of a block on, the panel is in the second-level cache.
                if (row == 0) prefetch_step(panel + k * PANEL, STEP * PANEL * sizeof(bf16));
                step<BOTH>(x + k, inputs, panel + k * PANEL);
            }
            if (whole < inputs) last_step<BOTH>(x + whole, inputs, panel + whole * PANEL);
        }
        constexpr int64_t STRIDE = PANEL * sizeof(float);
        _tile_stored(0, sums, STRIDE);
        _tile_stored(1, sums + SQUARE, STRIDE);
        if constexpr (BOTH) {
            _tile_stored(2, sums + SQUARE * PANEL, STRIDE);
            _tile_stored(3, sums + SQUARE * PANEL + SQUARE, STRIDE);
        }
    }

    // A panel of bytes, unpacked a step before its products, and read once.
    template <bool BOTH>
    void multiply_bytes(const Block<bf16> &block, const bf16 *x, int64_t whole) const {
        alignas(64) bf16 room[2][STEP * PANEL];
        const int64_t inputs = block.linear.inputs;
        const auto *panel = static_cast<const int8_t *>(block.weights);
        if (whole) unpack_pairs(panel, SQUARE, room[0]);
        for (int64_t k = 0, side = 0; k < whole; k += STEP, side ^= 1) {
            if (k + STEP < whole)
                unpack_pairs(panel + (k + STEP) * PANEL, SQUARE, room[side ^ 1]);
            step<BOTH>(x + k, inputs, room[side]);
        }
        if (whole == inputs) return;
        unpack_pairs(panel + whole * PANEL, ceil_div(inputs - whole, 2), room[0]);
        last_step<BOTH>(x + whole, inputs, room[0]);
    }

    template <bool BOTH>
    static void step(const bf16 *x, int64_t stride, const bf16 *panel) {
        constexpr int64_t PAIRS = 2 * PANEL * sizeof(bf16);
        const int64_t bytes = stride * static_cast<int64_t>(sizeof(bf16));
        written();
        _tile_stream_loadd(6, panel, PAIRS);
        _tile_loadd(4, x, bytes);
        _tile_dpbf16ps(0, 4, 6);
        _tile_stream_loadd(7, panel + 2 * SQUARE, PAIRS);
        _tile_dpbf16ps(1, 4, 7);
        if constexpr (BOTH) {
            _tile_loadd(5, x + SQUARE * stride, bytes);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
        written();
    }

    // Fewer inputs than a step has: what lies behind them is others', and must count for nothing.
    template <bool BOTH>
    void last_step(const bf16 *x, int64_t inputs, const bf16 *panel) const {
        alignas(64) bf16 rows[SQUARE_ROWS][STEP] = {};
        alignas(64) bf16 pairs[SQUARE][2 * PANEL] = {};
        const int64_t rest = inputs % STEP;
        for (int64_t r = 0; r < upper_ + lower_; ++r)
            std::memcpy(rows[r], x + r * inputs, rest * sizeof(bf16));
        std::memcpy(pairs, panel, ceil_div(rest, 2) * sizeof(pairs[0]));
        step<BOTH>(rows[0], STEP, pairs[0]);
    }

    int64_t upper_ = 0, lower_ = 0;
};

// A whole panel of bytes as one of bf16, in memory of this thread.
static const bf16 *unpacked_panel(const void *panel, int64_t inputs) {
    static thread_local Scratch scratch;
    const int64_t pairs = ceil_div(inputs, 2);
    auto *to = static_cast<bf16 *>(scratch.room(pairs * 2 * PANEL * sizeof(bf16)));
    unpack_pairs(static_cast<const int8_t *>(panel), pairs, to);
    return to;
}

// Whether a linear is computed so, and attention over numbers of a kind.
INLINE bool on_squares(const PackedLinear &linear) {
    return linear.number == Number::bf16 &&
        (linear.weights == Weights::bf16 || linear.weights == Weights::int8);
}
template <class T> static constexpr bool ON_SQUARES = std::is_same_v<T, bf16>;

#else

static constexpr int SQUARE = 1, SQUARE_ROWS = TILE_ROWS;
struct Squares {
    void multiply(const Block<bf16> &, int64_t, int64_t, bool, void *, Epilogue) {}
};
INLINE bool on_squares(const PackedLinear &) { return false; }
INLINE const void *unpacked_panel(const void *panel, int64_t) { return panel; }
template <class T> static constexpr bool ON_SQUARES = false;

#endif
