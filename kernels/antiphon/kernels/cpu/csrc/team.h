// Work shared out among the threads of one OpenMP region, phase by phase.
//
// A phase is a number of chunks. Threads claim chunks until none is left, then wait until all are
// finished: they wait for work, not for each other. A thread whose core was taken by a neighbour
// while it held no chunk is not waited for at all; it finds its phases empty when it comes back,
// and catches up. What a chunk computes never depends on who computes it.

#pragma once

#include "seat.h"
#include "simd.h"

namespace ISA_NS {

// Counters of one phase, in a cache line of their own. All zero before the region begins.
struct alignas(64) Phase {
    int64_t claimed;
    int64_t finished;
};

// About 10 us; a wait is longer only when a core was taken away, and then it is given the core.
static constexpr int SPINS = 1000;

class TeamThread {
  public:
    TeamThread(Phase *phases, int threads, bool *failed)
        : phase_(phases), threads_(threads), failed_(failed) {}

    int threads() const { return threads_; }

    // Call `body` with each of 0 .. chunks - 1 once, in all threads together, then `after` in the
    // thread that finished last. When it returns, all of it is finished and visible. Every member
    // calls it with the same `chunks`; of none, it returns at once.
    template <class Body, class After> void run(int64_t chunks, Body &&body, After &&after) {
        if (chunks <= 0) return;  // no thread would finish last
        Phase &phase = *phase_++;
        int64_t finished = 0;
        for (;; ++finished) {
            const int64_t chunk = __atomic_fetch_add(&phase.claimed, 1, __ATOMIC_RELAXED);
            if (chunk >= chunks) break;
            attempt([&] { body(chunk); });
        }
        if (finished > 0 &&
            __atomic_add_fetch(&phase.finished, finished, __ATOMIC_ACQ_REL) == chunks) {
            attempt(after);
            __atomic_store_n(&phase.finished, chunks + 1, __ATOMIC_RELEASE);
            return;
        }
        for (int spins = 0; __atomic_load_n(&phase.finished, __ATOMIC_ACQUIRE) <= chunks; ++spins) {
            if (spins < SPINS) {
                _mm_pause();
            } else {
                sched_yield();
            }
        }
    }

    template <class Body> void run(int64_t chunks, Body &&body) {
        run(chunks, body, [] {});
    }

  private:
    // A chunk that has no memory to work in counts as finished, or else the others would wait for
    // it for ever; an exception that left the region would end the process.
    template <class Work> void attempt(Work &&work) {
        try {
            work();
        } catch (...) {
            __atomic_store_n(failed_, true, __ATOMIC_RELAXED);
        }
    }

    Phase *phase_;
    int threads_;
    bool *failed_;
};

// Run `body(member)` in every thread of one region, of which one may come late, if this thread has a
// seat for it. OpenMP may give fewer threads than asked for. Throws bad_alloc, the one thing that
// work throws, once all of them are done.
template <class Body> static inline void in_team(int threads, Phase *phases, Body &&body) {
    bool failed = false;
    TeamSeat *const seat = threads > 1 ? TeamSeat::offered() : nullptr;
    const int own = threads - (seat == nullptr ? 0 : 1);
    auto work = [&] {
        TeamThread member(phases, threads, &failed);
        body(member);
    };
    if (seat != nullptr)
        seat->open([](void *region) { (*static_cast<decltype(work) *>(region))(); }, &work);
#pragma omp parallel num_threads(own)
    work();
    if (seat != nullptr) seat->close();
    if (failed) throw std::bad_alloc();
}

// Memory that is read later, asked for a few lines at a time between the sums of what is there: in
// bursts the questions would stand in the way of what is read now.
class PrefetchRange {
  public:
    PrefetchRange() = default;
    PrefetchRange(const void *at, int64_t bytes) : now_{static_cast<const char *>(at), bytes} {}

    // What of it lies in the first so many bytes.
    PrefetchRange first(int64_t bytes) const {
        return PrefetchRange(now_.at, now_.bytes < bytes ? now_.bytes : bytes);
    }

    // Ask for all of it in so many steps.
    void share(int64_t steps) { each_ = lines_a_step(now_.bytes, steps); }

    // The same beside weights that are read once, front to back: for what lies a little further on,
    // and at their end for the beginning of what comes.
    void share_beside(const void *weights, int64_t bytes, int64_t steps) {
        const int64_t ahead = AHEAD < bytes ? AHEAD : bytes;
        then_ = {now_.at, now_.bytes < ahead ? now_.bytes : ahead};
        now_ = {static_cast<const char *>(weights) + ahead, bytes - ahead};
        each_ = lines_a_step(bytes, steps);
    }

    __attribute__((always_inline)) void step() {
        for (int64_t i = 0; i < each_; ++i, now_.at += LINE, now_.bytes -= LINE) {
            if (now_.bytes <= 0) now_ = std::exchange(then_, {});
            if (now_.bytes <= 0) break;
            _mm_prefetch(now_.at, _MM_HINT_T1);
        }
        // GCC takes a function that does nothing else for one that does nothing.
        __asm__ volatile("" ::: "memory");
    }

  private:
    static constexpr int64_t LINE = 64, AHEAD = 16 << 10;

    struct Range {
        const char *at = nullptr;
        int64_t bytes = 0;
    };

    static int64_t lines_a_step(int64_t bytes, int64_t steps) {
        return (bytes + LINE * steps - 1) / (LINE * steps);
    }

    Range now_, then_;
    int64_t each_ = 0;
};

// Memory of one thread that stays for the next call: fresh pages would cost more than the work.
class Scratch {
  public:
    Scratch() = default;
    Scratch(const Scratch &) = delete;
    Scratch &operator=(const Scratch &) = delete;
    ~Scratch() { std::free(memory_); }

    // At least so many bytes, on a page of their own, with whatever was there. Throws bad_alloc.
    void *reserve(size_t bytes) {
        if (bytes > bytes_) {
            std::free(memory_);
            bytes_ = 0;  // whatever becomes of the next line, the old memory is gone
            const size_t whole = (bytes + 4095) / 4096 * 4096;
            memory_ = std::aligned_alloc(4096, whole);
            if (memory_ == nullptr) throw std::bad_alloc();
            bytes_ = whole;
        }
        return memory_;
    }

  private:
    void *memory_ = nullptr;
    size_t bytes_ = 0;
};

}  // namespace ISA_NS
