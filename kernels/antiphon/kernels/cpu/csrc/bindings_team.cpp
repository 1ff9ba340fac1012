// The seat that the forward thread's teams have for the batching loop's thread.

#include <immintrin.h>

#include "bindings.h"
#include "seat.h"

namespace {

thread_local TeamSeat *offered_here = nullptr;

// About 20 us: sleeping and being woken takes longer.
constexpr int SPINS = 2000;

// Until `ready()`, for a short time; whether it came to that.
template <class Ready> bool soon(Ready &&ready) {
    for (int spins = 0; spins < SPINS; ++spins) {
        if (ready()) return true;
        _mm_pause();
    }
    return false;
}

}  // namespace

TeamSeat *TeamSeat::offered() { return offered_here; }

void TeamSeat::offer() { offered_here = this; }

void TeamSeat::open(void (*work)(void *region), void *region) {
    work_ = work;
    region_ = region;
    state_.store(OPEN, std::memory_order_release);
    changed();
}

void TeamSeat::close() {
    int open = OPEN;
    if (state_.compare_exchange_strong(open, CLOSED, std::memory_order_acquire)) return;
    // All of the region is finished, and the other thread leaves it, unless its core was taken away.
    while (state_.load(std::memory_order_acquire) != CLOSED)
        if (!soon([this] { return state_.load(std::memory_order_acquire) == CLOSED; }))
            sched_yield();
}

void TeamSeat::finish(int64_t step) {
    finished_.store(step, std::memory_order_release);
    changed();
}

void TeamSeat::changed() {
    changes_.fetch_add(1, std::memory_order_release);
    changes_.notify_one();
}

int64_t TeamSeat::help(int64_t step) {
    int64_t regions = 0;
    while (finished_.load(std::memory_order_acquire) < step) {
        const int seen = changes_.load(std::memory_order_acquire);
        int open = OPEN;
        if (state_.compare_exchange_strong(open, TAKEN, std::memory_order_acquire)) {
            work_(region_);
            state_.store(CLOSED, std::memory_order_release);
            ++regions;
            continue;
        }
        const auto is_changed = [&] { return changes_.load(std::memory_order_acquire) != seen; };
        if (finished_.load(std::memory_order_acquire) < step && !soon(is_changed))
            changes_.wait(seen, std::memory_order_acquire);
    }
    return regions;
}

void bind_team(py::module_ &module) {
    py::class_<TeamSeat>(
        module, "TeamSeat", "A seat for one more thread in the teams of the thread that offers it.")
        .def(py::init<>())
        .def("offer", &TeamSeat::offer, "Offer it in what this thread computes from now on.")
        .def("finish", &TeamSeat::finish, "The steps up to this one are over.")
        .def(
            "help",
            [](TeamSeat &seat, int64_t step) {
                const KernelTimer computing;
                return seat.help(step);
            },
            "Compute with the thread that offers it, until a step is over; return in how many "
            "regions.");
}
