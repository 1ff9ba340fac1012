// A packed linear shared out: chunks of rows by panels, for the threads of a team (team.h).
//
//     member.run(linear_chunks(linear, rows), [&](int64_t chunk) {
//         linear_chunk(linear, chunk, x, rows, y, Epilogue::store);
//     });

// How a call is cut: blocks of rows by groups of panels.
struct Cutting {
    int64_t rows, row_blocks, panels, panel_groups;
};

// How many rows are computed at once, and how many take no longer than a panel takes to be read.
struct Pace {
    int64_t tile_rows, free_rows, block_rows;
};

static Pace pace_of(const PackedLinear &linear) {
    // A block of rows stays in the second-level cache beside its panels.
    if (on_squares(linear))
        return {SQUARE_ROWS, SQUARE_ROWS, linear.weights == Weights::int8 ? 128 : 64};
    return {TILE_ROWS, 4, 48};
}

static Cutting cut(const PackedLinear &linear, int64_t rows) {
    // Enough chunks that a thread which lost its core holds up little; none so small that the
    // ticket costs more than the work. A group of panels stays in the second-level cache while
    // all blocks of rows come by.
    constexpr int64_t CHUNKS = 48, CHUNK_BYTES = 48 << 10, GROUP_BYTES = 768 << 10;
    const Pace pace = pace_of(linear);
    const int64_t panels = panels_of(linear);
    const int64_t row_blocks = ceil_div(rows, pace.block_rows);
    int64_t block = ceil_div(rows, row_blocks);
    if (row_blocks > 1) block = ceil_div(block, pace.tile_rows) * pace.tile_rows;
    // Each chunk of int8_dynamic cuts its rows to bytes again.
    const int64_t smallest =
        linear.weights == Weights::int8_dynamic && rows > 4
            ? 8
            : ceil_div(CHUNK_BYTES, panel_bytes(linear) * ceil_div(rows, pace.free_rows));
    const int64_t largest = GROUP_BYTES / panel_bytes(linear);
    int64_t group = panels * row_blocks / CHUNKS;
    group = group > largest ? largest : group;
    group = group < smallest ? smallest : group;
    group = group < 1 ? 1 : group > panels ? panels : group;
    return {block, ceil_div(rows, block), group, ceil_div(panels, group)};
}

// Chunks of a call of so many rows; they may be computed in any order, by any thread.
static int64_t linear_chunks(const PackedLinear &linear, int64_t rows) {
    const Cutting cutting = cut(linear, rows);
    return cutting.row_blocks * cutting.panel_groups;
}

// Rows from `first` on, by some panels.
template <class T>
static void linear_block(
    const PackedLinear &linear, int64_t panel_first, int64_t panel_last, const T *x, int64_t first,
    int64_t rows, void *y, Epilogue epilogue) {
    Block<T> block{linear, 0, first, nullptr, x + first * linear.inputs, {}};
    if (linear.weights == Weights::int8_dynamic)
        block.bytes = cut_rows(block.x, linear.inputs, rows);
    const int64_t tiles = ceil_div(rows, pace_of(linear).tile_rows);
    // Tiles of like height: 16 rows are 8 and 8.
    const auto by_tiles = [&](auto &&body) {
        for (int64_t i = 0, row = 0; i < tiles; ++i) {
            const int64_t height = (rows - row) / (tiles - i);
            body(row, height);
            row += height;
        }
    };
    const auto by_panels = [&](auto &&body) {
        for (block.panel = panel_first; block.panel < panel_last; ++block.panel) {
            const char *panels = static_cast<const char *>(linear.panels);
            block.weights = panels + block.panel * panel_bytes(linear);
            body();
        }
    };
    if constexpr (std::is_same_v<T, bf16>)
        if (on_squares(linear)) {
            Squares squares;
            const bool bytes = linear.weights == Weights::int8, unpacks = bytes && tiles > 1;
            const auto multiply = [&](int64_t row, int64_t height) {
                squares.multiply(block, row, height, bytes && !unpacks, y, epilogue);
            };
            if (unpacks)
                by_panels([&] {
                    block.weights = unpacked_panel(block.weights, linear.inputs);
                    by_tiles(multiply);
                });
            // The rows of a tile stay in the first-level cache, and panels come by from the second.
            else
                by_tiles([&](int64_t row, int64_t height) {
                    by_panels([&] { multiply(row, height); });
                });
            return;
        }
    // A panel stays in the first-level cache, and rows come by.
    by_panels([&] {
        by_tiles([&](int64_t row, int64_t height) {
            tile_for<T>(linear.weights, height)(block, row, y, epilogue);
        });
    });
}

// Compute one chunk of y. x (rows, inputs) and y are contiguous; y is (rows, outputs), of half as
// many columns with silu_mul.
static void linear_chunk(
    const PackedLinear &linear, int64_t chunk, const void *x, int64_t rows, void *y,
    Epilogue epilogue) {
    const Cutting cutting = cut(linear, rows);
    const int64_t first = chunk % cutting.row_blocks * cutting.rows;
    const int64_t count = rows - first < cutting.rows ? rows - first : cutting.rows;
    const int64_t panel = chunk / cutting.row_blocks * cutting.panels;
    const int64_t end = panel + cutting.panels;
    const int64_t last = end < panels_of(linear) ? end : panels_of(linear);
    if (linear.number == Number::bf16)
        linear_block(linear, panel, last, static_cast<const bf16 *>(x), first, count, y, epilogue);
    else
        linear_block(linear, panel, last, static_cast<const float *>(x), first, count, y, epilogue);
}

// A whole call, with a team of its own.
static void linear_call(
    const PackedLinear &linear, const void *x, int64_t rows, void *y, Epilogue epilogue,
    int threads) {
    Phase phase{};
    in_team(threads, &phase, [&](Member &member) {
        member.run(linear_chunks(linear, rows), [&](int64_t chunk) {
            linear_chunk(linear, chunk, x, rows, y, epilogue);
        });
    });
}

// The weights of one output, as floats are kept: what a table of embeddings is asked for.
template <class T> static void linear_row(const PackedLinear &linear, int64_t output, T *y) {
    const int64_t half = linear.outputs / 2;
    const bool second = linear.halves && output >= half;
    const int64_t within = second ? output - half : output;
    const int64_t width = linear.halves ? LANES : PANEL;
    const int64_t lane = within % width + (second ? LANES : 0);
    const char *panel =
        static_cast<const char *>(linear.panels) + within / width * panel_bytes(linear);
    if (linear.weights == Weights::bf16 || linear.weights == Weights::f32) {
        constexpr int64_t GROUP = std::is_same_v<T, bf16> ? 2 : 1;
        const T *at = reinterpret_cast<const T *>(panel) + lane * GROUP;
        for (int64_t k = 0; k < linear.inputs; ++k)
            y[k] = at[k / GROUP * GROUP * PANEL + k % GROUP];
        return;
    }
    const bool dynamic = linear.weights == Weights::int8_dynamic;
    const int64_t group = dynamic ? 4 : 2;
    const char *at = panel + lane * group;
    const float scale = linear.scales[within / width * PANEL + lane];
    for (int64_t k = 0; k < linear.inputs; ++k) {
        const char byte = at[k / group * group * PANEL + k % group];
        const int value = dynamic ? static_cast<uint8_t>(byte) - 128 : static_cast<int8_t>(byte);
        store(y + k, all(static_cast<float>(value) * scale), 1);
    }
}

// Several of them: y (count, inputs).
static void linear_rows(
    const PackedLinear &linear, const int64_t *outputs, int64_t count, void *y, int threads) {
#pragma omp parallel for num_threads(threads) if (count >= 32)
    for (int64_t i = 0; i < count; ++i) {
        if (linear.number == Number::bf16)
            linear_row(linear, outputs[i], static_cast<bf16 *>(y) + i * linear.inputs);
        else linear_row(linear, outputs[i], static_cast<float *>(y) + i * linear.inputs);
    }
}
