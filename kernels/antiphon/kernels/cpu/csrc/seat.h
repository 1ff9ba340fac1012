// A seat for one more thread in the teams of another (team.h).
//
// The forward thread computes what the batching loop has launched. While the loop plans, commits and
// sends, it has a core for itself; as soon as it has nothing else to do it takes the seat and
// computes too, in the middle of whatever region runs: threads of a team wait for work, not for
// each other, so one that comes late finds what is finished and goes on with what is not.
//
// One thread offers a seat, and one other takes it. Steps are counted by the owner, from 1.

#pragma once

#include <atomic>
#include <cstdint>

class TeamSeat {
  public:
    // The one that the calling thread offers, or null.
    static TeamSeat *offered();

    // The owner, from now on until its thread ends.
    void offer();
    // A region begins: `work(region)` is what one more member does.
    void open(void (*work)(void *region), void *region);
    // It ends. Returns once the other thread has left it.
    void close();
    // A step is over, and all before it: it has no more regions.
    void finish(int64_t step);

    // The other thread: compute with the owner until a step is over. Blocks. Returns in how many
    // regions it has taken part.
    int64_t help(int64_t step);

  private:
    enum State : int { CLOSED, OPEN, TAKEN };

    void changed();

    void (*work_)(void *region) = nullptr;
    void *region_ = nullptr;
    std::atomic<int> state_ = CLOSED;
    std::atomic<int64_t> finished_ = 0;
    std::atomic<int> changes_ = 0;  // what the other thread sleeps on
};
