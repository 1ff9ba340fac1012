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

    // Up to SQUARE_ROWS rows, from `row` of the block on, by its panel.
    void multiply(
        const Block<bf16> &block, int64_t row, int64_t height, void *y, Epilogue epilogue) {
        const int64_t upper = height < SQUARE ? height : SQUARE;
        shape(upper, height - upper);
        alignas(64) float sums[SQUARE_ROWS][PANEL];
        if (height > SQUARE) multiply<true>(block, row, sums[0]);
        else multiply<false>(block, row, sums[0]);
        finish(block, row, height, sums[0], y, epilogue);
    }

    // Give the squares of sums, and their squares of rows, so many rows.
    void shape(int64_t upper, int64_t lower) {
        if (upper == upper_ && lower == lower_) return;
        upper_ = upper;
        lower_ = lower;
        set({upper, upper, lower, lower, upper, lower, SQUARE, SQUARE});
    }

    // Give each tile so many rows.
    static void set(const std::array<int64_t, 8> &rows) {
        TileShapes shapes;
        for (int tile = 0; tile < 8; ++tile) {
            shapes.rows[tile] = static_cast<uint8_t>(rows[tile]);
            shapes.row_bytes[tile] = rows[tile] ? 64 : 0;
        }
        written();
        _tile_loadconfig(&shapes);
    }

    // The intrinsics of GCC 12 do not say that they read memory: said before they do.
    static void written() { __asm__ volatile("" ::: "memory"); }

  private:
    template <bool BOTH>
    void multiply(const Block<bf16> &block, int64_t row, float *sums) const {
        const int64_t inputs = block.linear.inputs, whole = inputs / STEP * STEP;
        const bf16 *x = block.x + row * inputs;
        const auto *panel = static_cast<const bf16 *>(block.weights);
        _tile_zero(0);
        _tile_zero(1);
        if constexpr (BOTH) {
            _tile_zero(2);
            _tile_zero(3);
        }
        for (int64_t k = 0; k < whole; k += STEP) {
            // From the second tile of a block on, the panel is in the second-level cache.
            if (row == 0) prefetch_step(panel + k * PANEL, STEP * PANEL * sizeof(bf16));
            step<BOTH>(x + k, inputs, panel + k * PANEL);
        }
        if (whole < inputs) last_step<BOTH>(x + whole, inputs, panel + whole * PANEL);
        constexpr int64_t STRIDE = PANEL * sizeof(float);
        _tile_stored(0, sums, STRIDE);
        _tile_stored(1, sums + SQUARE, STRIDE);
        if constexpr (BOTH) {
            _tile_stored(2, sums + SQUARE * PANEL, STRIDE);
            _tile_stored(3, sums + SQUARE * PANEL + SQUARE, STRIDE);
        }
    }

    template <bool BOTH>
    static void step(const bf16 *x, int64_t stride, const bf16 *panel) {
        constexpr int64_t PAIRS = 2 * PANEL * sizeof(bf16);
        const int64_t bytes = stride * static_cast<int64_t>(sizeof(bf16));
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
        written();
        step<BOTH>(rows[0], STEP, pairs[0]);
    }

    int64_t upper_ = 0, lower_ = 0;
};

// Whether a linear is computed so, and attention over numbers of a kind.
INLINE bool on_squares(const PackedLinear &linear) { return linear.weights == Weights::bf16; }
template <class T> static constexpr bool ON_SQUARES = std::is_same_v<T, bf16>;

#else

static constexpr int SQUARE = 1, SQUARE_ROWS = TILE_ROWS;
struct Squares {
    void multiply(const Block<bf16> &, int64_t, int64_t, void *, Epilogue) {}
};
INLINE bool on_squares(const PackedLinear &) { return false; }
template <class T> static constexpr bool ON_SQUARES = false;

#endif
