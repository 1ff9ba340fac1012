// Queries meet a block of keys on AMX: scores and sums in squares of 16 queries (amx.h).
//
// What is laid out for registers is what a tile holds: pairs of dimensions by keys, and pairs of
// keys by dimensions. One query alone is computed so too, and has the same bits.

#if ANTIPHON_AMX

// The scores of all keys of the block, four squares of them.
INLINE void score_on_squares(
    const AttentionCall &call, const AttentionTask &task, int64_t head, int64_t first,
    int64_t queries, AttentionRoom<bf16> &room) {
    constexpr int64_t KEY_BYTES = KEYS * sizeof(uint32_t);
    const int64_t size = call.shape.head_size, words = room.square_words;
    for (int64_t r = 0; r < queries; ++r)
        std::memcpy(
            room.tile + r * words, query_at<bf16>(call, task, head, first + r),
            size * sizeof(bf16));
    Squares::written();
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t word = 0; word < words; word += SQUARE) {
        const uint32_t *keys = room.keys + word * KEYS;
        _tile_loadd(4, room.tile + word, words * sizeof(uint32_t));
        _tile_loadd(6, keys, KEY_BYTES);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, keys + SQUARE, KEY_BYTES);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(6, keys + 2 * SQUARE, KEY_BYTES);
        _tile_dpbf16ps(2, 4, 6);
        _tile_loadd(7, keys + 3 * SQUARE, KEY_BYTES);
        _tile_dpbf16ps(3, 4, 7);
    }
    _tile_stored(0, room.scores[0], KEY_BYTES);
    _tile_stored(1, room.scores[0] + SQUARE, KEY_BYTES);
    _tile_stored(2, room.scores[0] + 2 * SQUARE, KEY_BYTES);
    _tile_stored(3, room.scores[0] + 3 * SQUARE, KEY_BYTES);
}

// Add the block's values to N squares of sums, 16 dimensions each.
template <int N>
INLINE void mix_on_squares(float *sums, const uint32_t *values, const AttentionRoom<bf16> &room,
                           int64_t steps) {
    const int64_t bytes = room.width * sizeof(float);
    _tile_loadd(0, sums, bytes);
    if constexpr (N > 1) _tile_loadd(1, sums + SQUARE, bytes);
    if constexpr (N > 2) _tile_loadd(2, sums + 2 * SQUARE, bytes);
    if constexpr (N > 3) _tile_loadd(3, sums + 3 * SQUARE, bytes);
    for (int64_t step = 0; step < steps; ++step, values += SQUARE * room.width) {
        _tile_loadd(4, room.shares[0] + step * STEP, KEYS * sizeof(bf16));
        _tile_loadd(6, values, bytes);
        _tile_dpbf16ps(0, 4, 6);
        if constexpr (N > 1) {
            _tile_loadd(7, values + SQUARE, bytes);
            _tile_dpbf16ps(1, 4, 7);
        }
        if constexpr (N > 2) {
            _tile_loadd(6, values + 2 * SQUARE, bytes);
            _tile_dpbf16ps(2, 4, 6);
        }
        if constexpr (N > 3) {
            _tile_loadd(7, values + 3 * SQUARE, bytes);
            _tile_dpbf16ps(3, 4, 7);
        }
    }
    _tile_stored(0, sums, bytes);
    if constexpr (N > 1) _tile_stored(1, sums + SQUARE, bytes);
    if constexpr (N > 2) _tile_stored(2, sums + 2 * SQUARE, bytes);
    if constexpr (N > 3) _tile_stored(3, sums + 3 * SQUARE, bytes);
}

// Up to SQUARE queries of one head, from `first` of the task's on, meet a block that is laid out.
static void meet_on_squares(
    const AttentionCall &call, const AttentionTask &task, int64_t head, int64_t first,
    int64_t queries, const KeyBlock &block, AttentionRoom<bf16> &room, Squares &squares) {
    squares.shape(queries, queries);
    score_on_squares(call, task, head, first, queries, room);

    room.ahead.step();
    const int count = static_cast<int>(queries);
    float kept[SQUARE];
    weigh_all(call, task, head, first, count, block, room, kept);

    room.ahead.step();
    const int64_t row = head * task.queries * call.shape.queries_per_head + first;
    float *sums = room.sums + row * room.width;
    for (int r = 0; r < count; ++r) {
        for (int64_t d = 0; kept[r] != 1.0f && d < room.width; d += LANES)
            store(sums + r * room.width + d, mul(load(sums + r * room.width + d), all(kept[r])));
        // What a step has beyond the keys weighs nothing.
        if (block.vectors() % 2) store(room.shares[r] + block.vectors() * LANES, zeros());
    }
    const int64_t steps = ceil_div(block.until, STEP), pairs = ceil_div(block.until, 2);
    std::memset(
        room.values + pairs * room.width, 0,
        (steps * SQUARE - pairs) * room.width * sizeof(uint32_t));
    Squares::written();
    const uint32_t *values = room.values;
    int64_t left = room.width / SQUARE;
    for (; left >= 4; left -= 4, sums += 4 * SQUARE, values += 4 * SQUARE)
        mix_on_squares<4>(sums, values, room, steps);
    switch (left) {
        case 3: return mix_on_squares<3>(sums, values, room, steps);
        case 2: return mix_on_squares<2>(sums, values, room, steps);
        case 1: return mix_on_squares<1>(sums, values, room, steps);
    }
}

#endif
