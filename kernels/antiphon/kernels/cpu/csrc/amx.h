// Bf16 rows by panels of bf16 on AMX: tiles of 16 rows by 16 outputs, four at a time.
//
// Sixteen pairs of inputs of half a panel are a tile as they lie, and so are as many inputs of
// sixteen rows. An output is summed 32 inputs at a step, in one tile, whatever rows are beside
// its own: one row alone is summed in tiles too, and has the same bits. They are not the bits of
// the dot products of AVX-512, which add the products of a step in another order.
// Intel 64 and IA-32 Architectures Software Developer's Manual, volume 1, chapter 18.

#pragma once

#include "gemm.h"
#include "simd.h"

namespace ISA_NS {

#if ANTIPHON_AMX

static constexpr int AMX_ROWS = 16;
static constexpr int STEP = 32;
static constexpr int AMX_BLOCK_ROWS = 2 * AMX_ROWS;

// The operand of LDTILECFG: how many rows and bytes a row each tile has.
struct alignas(64) TileShapes {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
};

// The tile registers of this thread, while it lives. Tiles 0 to 3 are sums, first by rows, then by
// outputs; 4 and 5 are of x; 6 and 7 of the panel.
class AmxTiles {
  public:
    AmxTiles() = default;
    AmxTiles(const AmxTiles &) = delete;
    AmxTiles &operator=(const AmxTiles &) = delete;
    ~AmxTiles() {
        if (upper_) _tile_release();
    }

    // Give the tiles of sums, and those of x that they are of, so many rows.
    void shape(int64_t upper, int64_t lower) {
        if (upper == upper_ && lower == lower_) return;
        upper_ = upper;
        lower_ = lower;
        load({upper, upper, lower, lower, upper, lower, AMX_ROWS, AMX_ROWS});
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

    int64_t upper_ = 0, lower_ = 0;
};

// Whether a linear is computed so, and attention over numbers of a kind.
INLINE bool uses_amx(const PackedLinear &linear) {
    return linear.dtype == Dtype::bf16 &&
        (linear.weights == Weights::bf16 || linear.weights == Weights::int8);
}
template <class T> static constexpr bool USES_AMX = std::is_same_v<T, bf16>;

#else

static constexpr int AMX_ROWS = 1, STEP = 1, AMX_BLOCK_ROWS = TILE_ROWS;
struct AmxTiles {};
INLINE bool uses_amx(const PackedLinear &) { return false; }
template <class T> static constexpr bool USES_AMX = false;

#endif

}  // namespace ISA_NS
