// How the keys and values of a page lie in memory: as attention multiplies them. The one description
// of it in C++; antiphon/kernels/kv.py has the same in Python.
//
// A word is what a lane multiplies at once, 32 bits as the model computes: two bf16 or one float. A
// cache in eight bits has as many codes to a word. Of each kv head of a page,
//
//   keys are words of the head by tokens,    (P, H, D / W, S, W): a lane is a token,
//   values are words of tokens by the head,  (P, H, S / W, D, W): a lane is a dimension,
//
// with S rounded up to an even number. Sixteen tokens by sixteen words of keys, and sixteen words of
// tokens by sixteen dimensions, are tiles of AMX as well. Latents are keys that are values too: they
// are kept once, as keys. A head of a page is one piece; how far pieces are apart, the cache says.

#pragma once

#include <cstdint>

#include "paged.h"

// Tokens that a page has room for: whole words.
constexpr int64_t page_slots(int64_t page_tokens) { return page_tokens + page_tokens % 2; }

struct KvLayout {
    int64_t head_size, word, tokens, page_tokens;

    explicit KvLayout(const CacheShape &shape)
        : head_size(shape.head_size),
          word(shape.dtype == Dtype::bf16 ? 2 : 1),
          tokens(page_slots(shape.page_tokens)),
          page_tokens(shape.page_tokens) {}

    // Numbers of a head of a page.
    int64_t head_numbers() const { return tokens * head_size; }

    // A cache whose heads, and pages, lie one after the other.
    LayerCache laid_out(LayerCache cache, int64_t heads) const {
        cache.head_step = head_numbers();
        cache.page_step = heads * cache.head_step;
        return cache;
    }

    // Where the first word of a token's key begins in its head; the next one is `key_step` further.
    int64_t key_at(int64_t offset) const { return offset * word; }
    int64_t key_step() const { return tokens * word; }

    // Where the first number of a token's value is in its head; the next one is `word` further.
    int64_t value_at(int64_t offset) const {
        return offset / word * word * head_size + offset % word;
    }
};
