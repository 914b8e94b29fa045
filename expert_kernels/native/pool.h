// Threads that share out the tiles of one job after the other.
//
// A job is a number of tiles and a function; tiles are handed out one by one, in ascending order,
// from one atomic counter, so a thread that the system takes off its core delays the one tile it
// holds and no other. The counter carries the number of its job: a helper that comes late finds
// another number or no tile left and touches nothing of a job that is over. Nobody waits for
// helpers to arrive or to leave, only for tiles to be done.
//
// A thread takes its next tile when it begins one, while enough are left for the others: who computes
// a tile can then ask memory for the next one's first lines before it is through.
//
// Waiting is bounded spinning, then sleep. Looking on for longer, yielding, takes the core from threads
// of other workers all the same (docs/performance.md, "Threads"). Who knows that a job follows soon
// keeps helpers awake for it, and says what it will read: they bring it nearer meanwhile.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

class TilePool {
  public:
    // Throws std::system_error when threads cannot be started.
    TilePool(int num_threads, int spin_us);
    ~TilePool();
    TilePool(const TilePool&) = delete;
    TilePool& operator=(const TilePool&) = delete;

    int num_threads() const { return int(helpers_.size()) + 1; }

    // Whether all threads look for work, so that giving them some costs next to nothing.
    bool is_awake() const { return num_asleep_.load(std::memory_order_relaxed) == 0; }

    // Helpers stay awake for so long from now on, or no longer than they do by themselves (0). Those
    // that sleep are woken where `wakes` says so.
    void keep_awake(int64_t for_us, bool wakes);
    // A job to come begins with these bytes. Helpers that are awake without work ask for the first of
    // them, as many as their own caches hold; who announces something else ends that.
    void announce(const void* begin, int64_t num_bytes);

    // work(context, tile, next) for every tile below num_tiles (< 2^24); returns when all are done.
    // `next` is the tile that the same thread computes after it, -1 where that is not known yet.
    // At most num_threads threads take part, the caller among them. One caller at a time.
    using Work = void (*)(void* context, int64_t tile, int64_t next);
    void run(int64_t num_tiles, int num_threads, Work work, void* context);

  private:
    bool work_on();
    int64_t take(int64_t num_others);
    bool is_tile_left() const;
    bool is_helper_wanted() const;
    bool ask_ahead();
    void help();

    struct Job {
        Work work = nullptr;
        void* context = nullptr;
        int64_t num_tiles = 0;
    };

    // number of the job (16 bits) | number of tiles (24) | next tile (24)
    alignas(64) std::atomic<uint64_t> ticket_{0};
    alignas(64) std::atomic<int64_t> num_done_{0};
    std::atomic<int> num_wanted_{0};  // helpers that may still join in
    Job job_;
    uint64_t job_number_ = 0;
    std::atomic<int64_t> awake_until_ns_{0};
    // Read and written apart: a stretch of neither the old bytes nor the new is asked for in vain.
    alignas(64) std::atomic<uintptr_t> next_ahead_{0};
    std::atomic<uintptr_t> end_ahead_{0};

    alignas(64) std::mutex mutex_;
    std::condition_variable has_work_;
    std::condition_variable is_done_;
    std::atomic<int> num_asleep_{0};
    std::atomic<bool> is_caller_asleep_{false};
    std::atomic<bool> is_stopping_{false};
    int64_t spin_ns_;
    std::vector<std::thread> helpers_;
};

// One short pause of a waiting loop, kind to the other thread of the core.
inline void pause_briefly() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}
