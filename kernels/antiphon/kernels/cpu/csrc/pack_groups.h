// Codes and scales of groups, as rows of a checkpoint have them, become lanes of panels (packed.h).

#pragma once

#include "gemm.h"
#include "team.h"

namespace ISA_NS {

// The codes of some inputs of one output, whose words lie PANEL apart.
INLINE void pack_codes(const uint8_t *codes, int64_t inputs, int64_t bits, char *to) {
    constexpr int64_t WORDS = PANEL * 4;
    const auto put = [&](int64_t index, uint32_t word) {
        std::memcpy(to + index * WORDS, &word, 4);
    };
    if (bits == 8) {
        for (int64_t k = 0; k < inputs; k += 4) std::memcpy(to + k / 4 * WORDS, codes + k, 4);
        return;
    }
    const int64_t unit = code_unit(bits), upper_bits = bits - 4;
    for (int64_t k = 0; k < inputs; k += unit, codes += unit, to += unit * bits * 4) {
        uint32_t upper = 0;
        for (int64_t i = 0; i < unit; i += 8) {
            uint32_t word = 0;
            for (int64_t j = 0; j < 8; ++j) {
                const uint32_t code = codes[i + j];
                const int64_t half = j % 2 * 16;
                word |= (code & 15) << (half + 4 * (j / 2));
                if (upper_bits) upper |= code >> 4 << (half + upper_bits * ((i + j) / 2));
            }
            put(i / 8, word);
        }
        if (upper_bits) put(unit / 8, upper);
    }
}

// One output: a row of codes, its scales and its minimums.
static void pack_output(const PackGroupsCall &call, int64_t row, char *panel, int64_t lane) {
    const Grouping &grouping = call.linear.grouping;
    const int64_t inputs = call.linear.inputs, groups = ceil_div(inputs, grouping.group);
    const int64_t size = scales_bytes(grouping), each = size / PANEL;
    const auto put = [&](const void *numbers, int64_t group) {
        const char *from = static_cast<const char *>(numbers) + (row * groups + group) * each;
        std::memcpy(panel + lane * each, from, each);
        panel += size;
    };
    for (int64_t group = 0, first = 0; group < groups; ++group, first += grouping.group) {
        const int64_t left = inputs - first, count = left < grouping.group ? left : grouping.group;
        put(call.scales, group);
        if (grouping.minimums) put(call.minimums, group);
        pack_codes(call.codes + row * inputs + first, count, grouping.bits, panel + lane * 4);
        panel += 4 * grouping.bits * count;
    }
}

static void pack_groups_call(const PackGroupsCall &call, int threads) {
    const int64_t bytes = panel_bytes(call.linear);
    Phase phase = {};
    in_team(call.count > 1 ? threads : 1, &phase, [&](TeamThread &team) {
        team.run(call.count, [&](int64_t panel) {
            for (int64_t i = 0; i < call.lanes; ++i)
                pack_output(
                    call, panel * call.lanes + i, call.panels + panel * bytes, call.lane + i);
        });
    });
}

}  // namespace ISA_NS
