// What a layer-step's job is made of, whatever the weights' format: see plain_step.cpp and
// packed_step.cpp, and pool.h for who runs its tiles.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <new>
#include <thread>
#include <vector>

#include "experts.h"
#include "gates.h"
#include "kernels.h"
#include "packed.h"
#include "pool.h"

constexpr int64_t MAX_TILES = (int64_t(1) << 24) - 1;
// Waking a thread costs 10 to 50 us, and a core reads about 10 bytes per ns: below this many bytes
// of weights per thread another one does not pay.
constexpr int64_t BYTES_PER_THREAD = 512 * 1024;
// One that is awake costs a microsecond or two.
constexpr int64_t BYTES_PER_AWAKE_THREAD = 64 * 1024;

inline int64_t round_up(int64_t value, int64_t multiple) {
    return (value + multiple - 1) / multiple * multiple;
}

// Memory that is kept from call to call and grows when a call needs more. It begins with a line of
// the cache: a vector that lies across two lines takes twice as long to load.
template <class T>
class Scratch {
  public:
    T* items(int64_t count) {
        constexpr uintptr_t CACHE_LINE_BYTES = 64;
        if (count > capacity_) {
            memory_.reset();
            capacity_ = 0;
            memory_.reset(new T[size_t(count) + CACHE_LINE_BYTES / sizeof(T)]);
            capacity_ = count;
        }
        const auto begin = reinterpret_cast<uintptr_t>(memory_.get());
        return reinterpret_cast<T*>((begin + CACHE_LINE_BYTES - 1) / CACHE_LINE_BYTES *
                                    CACHE_LINE_BYTES);
    }

  private:
    std::unique_ptr<T[]> memory_;
    int64_t capacity_ = 0;
};

struct RowScratch {
    Scratch<float> values;
    Scratch<int16_t> codes;
    Scratch<float> scales;
    Scratch<int32_t> sums;
    Scratch<PackedRow> rows;
};

struct HrPool {
    HrPool(int num_threads, int spin_us) : threads(num_threads, spin_us) {}

    std::mutex one_caller;
    TilePool threads;
    RowScratch hidden;
    RowScratch middle;
};

struct Expert {
    const char* block;
    int64_t first_pair;
    int64_t num_pairs;
};

// The experts of a step that somebody chose.
inline std::vector<Expert> chosen_experts(const HrStep& step) {
    std::vector<Expert> experts;
    for (int64_t e = 0; e < step.num_experts; e++) {
        const int64_t begin = step.pair_begin[e], end = step.pair_begin[e + 1];
        if (end > begin)
            experts.push_back({static_cast<const char*>(step.blocks[e]), begin, end - begin});
    }
    return experts;
}

// The most rows that one of them has.
inline int64_t most_rows_of(const std::vector<Expert>& experts) {
    int64_t most = 0;
    for (const Expert& expert : experts) most = std::max(most, expert.num_pairs);
    return most;
}

inline int64_t num_rows_of(const HrStep& step) {
    int64_t num_rows = 0;
    for (int64_t p = 0; p < step.pair_begin[step.num_experts]; p++)
        num_rows = std::max(num_rows, step.row_ids[p] + 1);
    return num_rows;
}

// How many threads a step of that many bytes of weights keeps busy.
// `most`: that may take part; 0: all of the pool.
inline int useful_threads(const HrPool& pool, int64_t num_bytes, int64_t most = 0) {
    const int64_t all = pool.threads.num_threads();
    const int64_t least = pool.threads.is_awake() ? BYTES_PER_AWAKE_THREAD : BYTES_PER_THREAD;
    return int(std::min(1 + num_bytes / least, most > 0 ? std::min(most, all) : all));
}

// Bytes of a job's tile: long enough to stream, short enough that threads end together.
inline int64_t job_tile_bytes(int64_t num_bytes, int num_threads, int64_t most) {
    constexpr int64_t TILES_PER_THREAD = 8, LEAST = 48 * 1024;
    return std::clamp(num_bytes / (num_threads * TILES_PER_THREAD), LEAST, most);
}

// Bytes of a tile of experts. A tile begins with misses in every stream, so it is as long as balance
// allows; where an expert has more than a few rows it is read again from a cache, for which it has to
// be shorter. `rows`: the most that an expert has.
inline int64_t expert_tile_bytes(int64_t num_bytes, int num_threads, int64_t rows, int64_t least) {
    constexpr int64_t FEW_ROWS = 2, MOST_ALONE = 2048 * 1024, MOST = 1024 * 1024,
                      MOST_OF_MANY = 512 * 1024, TILES_PER_THREAD = 8;
    if (num_threads == 1 && rows <= FEW_ROWS) return MOST_ALONE;
    return std::clamp(num_bytes / (num_threads * TILES_PER_THREAD), least,
                      rows <= FEW_ROWS ? MOST : MOST_OF_MANY);
}

inline void wait_for_zero(const std::atomic<int32_t>& counter) {
    constexpr int NUM_PAUSES = 1000;
    for (int i = 0; counter.load(std::memory_order_acquire) > 0; i++) {
        if (i < NUM_PAUSES)
            pause_briefly();
        else if (i < 2 * NUM_PAUSES)
            std::this_thread::yield();
        else
            std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
}

// `laid`: for bfloat16 instead of `kernels`, null where there are none.
void run_plain_step(HrPool& pool, const HrForm& form, const Kernels& kernels,
                    const LaidKernels* laid, const Gates& gates, const HrStep& step);
// `pairs`: for fp8 with rows of bfloat16 instead of `kernels`, null where there are none.
void run_packed_step(HrPool& pool, const HrForm& form, const PackedFormat& format,
                     const PackedKernels& kernels, const PairKernels* pairs, const Gates& gates,
                     const HrStep& step);

// Kernels of instruction set number `isa`, null when there is none of that number (experts.cpp).
const Kernels* plain_kernels(int32_t isa);
const PackedKernels* packed_kernels(int32_t isa);
