// See pool.h. Sleeping and waking use the usual pairing: who goes to sleep says so before looking
// once more, who brings work or its end shows it before looking for sleepers; all four in one total
// order (sequentially consistent), so at least one of the two sees the other.

#include "pool.h"

#include <chrono>

namespace {

constexpr int TILE_BITS = 24;
constexpr uint64_t TILE_MASK = (uint64_t(1) << TILE_BITS) - 1;
constexpr int PAUSES_PER_LOOK_AT_CLOCK = 64;
// What a core's second-level cache holds beside what it needs, and what it asks for between two looks.
constexpr int64_t AHEAD_BYTES_PER_HELPER = 1024 * 1024;
constexpr uintptr_t AHEAD_STRETCH_BYTES = 1024;

uint64_t next_of(uint64_t ticket) { return ticket & TILE_MASK; }
uint64_t count_of(uint64_t ticket) { return (ticket >> TILE_BITS) & TILE_MASK; }

int64_t now_ns() {
    const auto since = std::chrono::steady_clock::now().time_since_epoch();
    return std::chrono::duration_cast<std::chrono::nanoseconds>(since).count();
}

// True as soon as `condition` holds, false when it has not for spin_ns, nor until `until_ns`, which
// may be put off meanwhile. `rest` passes the time between looks.
template <class Condition, class Rest>
bool spin(int64_t spin_ns, const std::atomic<int64_t>& until_ns, Condition condition, Rest rest) {
    const int64_t end_ns = now_ns() + spin_ns;
    int64_t time_ns = 0;
    do {
        for (int i = 0; i < PAUSES_PER_LOOK_AT_CLOCK; i++) {
            if (condition()) return true;
            rest();
        }
        time_ns = now_ns();
    } while (time_ns < end_ns || time_ns < until_ns.load(std::memory_order_relaxed));
    return false;
}

}  // namespace

TilePool::TilePool(int num_threads, int spin_us) : spin_ns_(int64_t(spin_us) * 1000) {
    try {
        for (int i = 1; i < num_threads; i++) helpers_.emplace_back([this] { help(); });
    } catch (...) {
        is_stopping_ = true;
        has_work_.notify_all();
        for (auto& helper : helpers_) helper.join();
        throw;
    }
}

TilePool::~TilePool() {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        is_stopping_ = true;
    }
    has_work_.notify_all();
    for (auto& helper : helpers_) helper.join();
}

void TilePool::run(int64_t num_tiles, int num_threads, Work work, void* context) {
    const int num_helpers = (num_threads < this->num_threads() ? num_threads : this->num_threads()) - 1;
    if (num_helpers <= 0 || num_tiles <= 1) {
        for (int64_t tile = 0; tile < num_tiles; tile++)
            work(context, tile, tile + 1 < num_tiles ? tile + 1 : -1);
        return;
    }
    job_ = {work, context, num_tiles};
    num_done_.store(0);
    num_wanted_.store(num_helpers);
    job_number_++;
    ticket_.store(job_number_ << (2 * TILE_BITS) | uint64_t(num_tiles) << TILE_BITS);
    if (num_asleep_.load() > 0) {
        { std::lock_guard<std::mutex> lock(mutex_); }
        for (int i = 0; i < num_helpers; i++) has_work_.notify_one();
    }
    while (work_on()) {
    }
    const auto is_over = [this, num_tiles] { return num_done_.load() == num_tiles; };
    if (spin(spin_ns_, 0, is_over, pause_briefly)) return;
    std::unique_lock<std::mutex> lock(mutex_);
    is_caller_asleep_.store(true);
    is_done_.wait(lock, is_over);
    is_caller_asleep_.store(false);
}

bool TilePool::is_tile_left() const {
    const uint64_t ticket = ticket_.load();
    return next_of(ticket) < count_of(ticket);
}

// The next tile, -1 where none would be left beside `num_others`.
int64_t TilePool::take(int64_t num_others) {
    uint64_t ticket = ticket_.load();
    do {
        if (next_of(ticket) + uint64_t(num_others) >= count_of(ticket)) return -1;
    } while (!ticket_.compare_exchange_weak(ticket, ticket + 1));
    return int64_t(next_of(ticket));
}

// Tiles, as long as the next one is known; whether there was one. While a tile is ours its job
// cannot end, nor its description change, before we say it is done: so the next is of the same job.
bool TilePool::work_on() {
    int64_t tile = take(0);
    if (tile < 0) return false;
    const int64_t num_tiles = job_.num_tiles;
    while (tile >= 0) {
        const int64_t next = take(num_threads());
        job_.work(job_.context, tile, next);
        if (num_done_.fetch_add(1) + 1 == num_tiles && is_caller_asleep_.load()) {
            { std::lock_guard<std::mutex> lock(mutex_); }
            is_done_.notify_one();
        }
        tile = next;
    }
    return true;
}

void TilePool::keep_awake(int64_t for_us, bool wakes) {
    awake_until_ns_.store(for_us > 0 ? now_ns() + for_us * 1000 : 0);
    if (!wakes || num_asleep_.load() == 0) return;
    { std::lock_guard<std::mutex> lock(mutex_); }
    has_work_.notify_all();
}

void TilePool::announce(const void* begin, int64_t num_bytes) {
    const auto first = reinterpret_cast<uintptr_t>(begin);
    const int64_t most = AHEAD_BYTES_PER_HELPER * int64_t(helpers_.size());
    end_ahead_.store(0);
    next_ahead_.store(first);
    end_ahead_.store(first + uintptr_t(num_bytes < most ? num_bytes : most));
}

// Asks for a stretch of what was announced; whether there was one left.
bool TilePool::ask_ahead() {
    if (next_ahead_.load(std::memory_order_relaxed) >= end_ahead_.load(std::memory_order_relaxed))
        return false;
    const uintptr_t begin = next_ahead_.fetch_add(AHEAD_STRETCH_BYTES);
    for (uintptr_t line = begin; line < begin + AHEAD_STRETCH_BYTES; line += 64)
        __builtin_prefetch(reinterpret_cast<const void*>(line), 0, 2);
    return true;
}

bool TilePool::is_helper_wanted() const { return num_wanted_.load() > 0 && is_tile_left(); }

void TilePool::help() {
    const auto is_wanted = [this] { return is_helper_wanted() || is_stopping_.load(); };
    const auto is_kept = [this] { return awake_until_ns_.load() > now_ns(); };
    const auto rest = [this] {
        if (!ask_ahead()) pause_briefly();
    };
    while (!is_stopping_.load()) {
        if (is_helper_wanted() && num_wanted_.fetch_sub(1) > 0) {
            while (work_on()) {
            }
            continue;
        }
        if (spin(spin_ns_, awake_until_ns_, is_wanted, rest)) continue;
        std::unique_lock<std::mutex> lock(mutex_);
        num_asleep_.fetch_add(1);
        has_work_.wait(lock, [&] { return is_wanted() || is_kept(); });
        num_asleep_.fetch_sub(1);
    }
}
