// One layer-step as one job of tiles: first projection of all experts, then second of all.
//
//     tile of the first    some units of one expert's intermediate size: their gate and up outputs
//                          for all rows that chose the expert, then the gate
//     tile of the second   some outputs of one expert's result rows
//
// A tile of the second projection needs all tiles of the first of its expert. Those were handed out
// long before, since tiles go in order; so the wait for them, by counter, is almost never one.
// Tiles have about the same number of bytes whatever the expert's shape.

#include "experts.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <memory>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

#include "gates.h"
#include "kernels.h"
#include "pool.h"

namespace {

constexpr int64_t TILE_BYTES = 256 * 1024;
constexpr int MAX_TILE_OUTPUTS = 256;
constexpr int ROWS_PER_PASS = 12;  // rows whose sums are kept at once; a multiple of 3 and 4
constexpr int64_t MAX_TILES = (int64_t(1) << 24) - 1;
// Waking a thread costs 10 to 50 us, and a core reads about 10 bytes per ns: below this many bytes
// of weights per thread another one does not pay.
constexpr int64_t BYTES_PER_THREAD = 512 * 1024;

std::vector<const Kernels*> find_kernels() {
    std::vector<const Kernels*> found{&scalar_kernels};
    [[maybe_unused]] const auto add = [&found](const Kernels& kernels) {
        if (has_scalar_bits(kernels)) found.push_back(&kernels);
    };
#if defined(HR_HAS_X86)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
        __builtin_cpu_supports("f16c")) {
        add(avx2_kernels);
        if (__builtin_cpu_supports("avx512f")) add(avx512_kernels);
    }
#endif
#if defined(HR_HAS_NEON)
    add(neon_kernels);
#endif
    return found;
}

const std::vector<const Kernels*>& all_kernels() {
    static const std::vector<const Kernels*> kernels = find_kernels();
    return kernels;
}

int64_t round_up(int64_t value, int64_t multiple) {
    return (value + multiple - 1) / multiple * multiple;
}

// Memory that is kept from call to call and grows when a call needs more.
class Scratch {
  public:
    float* floats(int64_t count) {
        if (count > capacity_) {
            memory_.reset();
            capacity_ = 0;
            memory_.reset(new float[size_t(count)]);
            capacity_ = count;
        }
        return memory_.get();
    }

  private:
    std::unique_ptr<float[]> memory_;
    int64_t capacity_ = 0;
};

struct Expert {
    const char* block;
    int64_t first_pair;
    int64_t num_pairs;
};

struct StepJob {
    const HrForm& form;
    const HrStep& step;
    const Kernels& kernels;
    std::vector<Expert> experts;  // those that somebody chose
    std::unique_ptr<std::atomic<int32_t>[]> num_missing;  // per expert: first tiles not done yet
    const float* hidden;                                  // [row, hidden_stride] float32
    int64_t hidden_stride;
    float* middle;  // [pair, middle_stride]
    int64_t middle_stride;
    int64_t item;                // bytes of a weight
    int64_t up_rows;             // outputs of the first projection
    int32_t first_units;         // intermediate units per tile of the first projection
    int32_t first_tiles;         // tiles of the first projection per expert
    int32_t second_outputs;
    int32_t second_tiles;

    int64_t num_tiles() const {
        return int64_t(experts.size()) * (first_tiles + second_tiles);
    }
};

// Weights of `outputs` outputs from number `first` on, of `total`.
Product product_of(const StepJob& job, const char* weights, int64_t first, int64_t outputs,
                   int64_t total, int64_t depth) {
    Product product{};
    product.stride_bytes = (job.form.is_transposed ? total : depth) * job.item;
    product.weights =
        weights + first * (job.form.is_transposed ? job.item : product.stride_bytes);
    product.num_outputs = int32_t(outputs);
    product.depth = int32_t(depth);
    return product;
}

void multiply(const StepJob& job, const Product& product) {
    (job.form.is_transposed ? job.kernels.sum_columns
                            : job.kernels.dot_rows)[job.form.dtype](product);
}

void run_first_tile(StepJob& job, size_t number, int64_t tile) {
    const HrForm& form = job.form;
    const Expert& expert = job.experts[number];
    const int64_t begin = tile * job.first_units;
    const int32_t count =
        int32_t(std::min<int64_t>(job.first_units, form.intermediate_size - begin));
    const char* weights = expert.block + form.first_offset;
    const bool is_split = form.has_gate && !form.is_interleaved;
    const int64_t step = form.has_gate && form.is_interleaved ? 2 : 1;
    const char* bias = form.has_bias
                           ? expert.block + form.first_bias_offset + begin * step * job.item
                           : nullptr;

    alignas(64) float sums[ROWS_PER_PASS * 2 * MAX_TILE_OUTPUTS];
    const float* x[ROWS_PER_PASS];
    for (int64_t done = 0; done < expert.num_pairs; done += ROWS_PER_PASS) {
        const int num_rows = int(std::min<int64_t>(ROWS_PER_PASS, expert.num_pairs - done));
        const int64_t pair = expert.first_pair + done;
        for (int m = 0; m < num_rows; m++)
            x[m] = job.hidden + job.step.row_ids[pair + m] * job.hidden_stride;
        // Not interleaved: gates of the tile, then ups. Interleaved: one stretch of both.
        for (int half = 0; half < (is_split ? 2 : 1); half++) {
            Product product =
                product_of(job, weights, half * form.intermediate_size + begin * step,
                           count * step, job.up_rows, form.hidden_size);
            product.x = x;
            product.num_rows = num_rows;
            product.out = sums + half * count;
            product.out_stride = 2 * MAX_TILE_OUTPUTS;
            multiply(job, product);
        }
        for (int m = 0; m < num_rows; m++) {
            GateRow row{};
            row.sums = sums + m * 2 * MAX_TILE_OUTPUTS;
            row.up_begin = is_split ? count : 1;
            row.step = step;
            row.bias = bias;
            row.bias_up_begin = is_split ? form.intermediate_size : 1;
            row.out = job.middle + (pair + m) * job.middle_stride + begin;
            row.count = count;
            apply_gate(form, row);
        }
    }
    job.num_missing[number].fetch_sub(1, std::memory_order_release);
}

void wait_for_first(const StepJob& job, size_t number) {
    constexpr int NUM_PAUSES = 1000;
    for (int i = 0; job.num_missing[number].load(std::memory_order_acquire) > 0; i++) {
        if (i < NUM_PAUSES)
            pause_briefly();
        else if (i < 2 * NUM_PAUSES)
            std::this_thread::yield();
        else
            std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
}

void run_second_tile(StepJob& job, size_t number, int64_t tile) {
    const HrForm& form = job.form;
    const Expert& expert = job.experts[number];
    const int64_t begin = tile * job.second_outputs;
    const int32_t count =
        int32_t(std::min<int64_t>(job.second_outputs, form.hidden_size - begin));
    const char* bias =
        form.has_bias ? expert.block + form.down_bias_offset + begin * job.item : nullptr;
    wait_for_first(job, number);

    alignas(64) float sums[ROWS_PER_PASS * MAX_TILE_OUTPUTS];
    const float* x[ROWS_PER_PASS];
    for (int64_t done = 0; done < expert.num_pairs; done += ROWS_PER_PASS) {
        const int num_rows = int(std::min<int64_t>(ROWS_PER_PASS, expert.num_pairs - done));
        const int64_t pair = expert.first_pair + done;
        for (int m = 0; m < num_rows; m++) x[m] = job.middle + (pair + m) * job.middle_stride;
        Product product = product_of(job, expert.block + form.down_offset, begin, count,
                                     form.hidden_size, form.intermediate_size);
        product.x = x;
        product.num_rows = num_rows;
        product.out = sums;
        product.out_stride = MAX_TILE_OUTPUTS;
        multiply(job, product);
        for (int m = 0; m < num_rows; m++)
            finish_row(form, sums + m * MAX_TILE_OUTPUTS, bias,
                       job.step.places + job.step.place_ids[pair + m] * form.hidden_size + begin,
                       count);
    }
}

void run_tile(void* context, int64_t tile) {
    StepJob& job = *static_cast<StepJob*>(context);
    const int64_t num_first = int64_t(job.experts.size()) * job.first_tiles;
    if (tile < num_first)
        return run_first_tile(job, size_t(tile / job.first_tiles), tile % job.first_tiles);
    tile -= num_first;
    run_second_tile(job, size_t(tile / job.second_tiles), tile % job.second_tiles);
}

// Outputs per tile so that it has about TILE_BYTES: a multiple of 16, whole vectors of outputs.
int32_t outputs_per_tile(int64_t bytes_per_output, int64_t num_outputs, int64_t most) {
    const int64_t wanted = std::max<int64_t>(TILE_BYTES / std::max<int64_t>(bytes_per_output, 1), 1);
    return int32_t(std::min({round_up(wanted, 16), round_up(num_outputs, 16), most}));
}

bool is_known(const HrForm& form, int32_t isa) {
    return form.hidden_size > 0 && form.intermediate_size > 0 && form.dtype >= HR_FLOAT32 &&
           form.dtype <= HR_FLOAT16 && form.gate >= HR_ACT_MUL && form.gate <= HR_ACT &&
           form.activation >= 0 && form.activation < HR_NUM_ACTIVATIONS &&
           (form.has_gate != 0) == (form.gate != HR_ACT) && isa >= 0 &&
           isa < int32_t(all_kernels().size());
}

}  // namespace

struct HrPool {
    HrPool(int num_threads, int spin_us) : threads(num_threads, spin_us) {}

    std::mutex one_caller;
    TilePool threads;
    Scratch hidden;
    Scratch middle;
};

namespace {

void widen_hidden(HrPool& pool, const HrForm& form, const HrStep& step, StepJob& job) {
    const int64_t num_pairs = step.pair_begin[step.num_experts];
    int64_t num_rows = 0;
    for (int64_t p = 0; p < num_pairs; p++) num_rows = std::max(num_rows, step.row_ids[p] + 1);
    job.hidden_stride = round_up(form.hidden_size, NUM_LANES);
    job.middle_stride = round_up(form.intermediate_size, NUM_LANES);
    float* hidden = pool.hidden.floats(num_rows * job.hidden_stride);
    float* middle = pool.middle.floats(num_pairs * job.middle_stride);
    const int64_t row_bytes = form.hidden_size * job.item;
    for (int64_t row = 0; row < num_rows; row++) {
        float* target = hidden + row * job.hidden_stride;
        widen_row(form.dtype, static_cast<const char*>(step.hidden) + row * row_bytes, target,
                  form.hidden_size);
        std::fill(target + form.hidden_size, target + job.hidden_stride, 0.0f);
    }
    for (int64_t p = 0; p < num_pairs; p++)
        std::fill(middle + p * job.middle_stride + form.intermediate_size,
                  middle + (p + 1) * job.middle_stride, 0.0f);
    job.hidden = hidden;
    job.middle = middle;
}

void run_step(HrPool& pool, const HrForm& form, const Kernels& kernels, const HrStep& step) {
    StepJob job{form, step, kernels, {}, nullptr, nullptr, 0, nullptr, 0, 0, 0, 0, 0, 0, 0};
    for (int64_t e = 0; e < step.num_experts; e++) {
        const int64_t begin = step.pair_begin[e], end = step.pair_begin[e + 1];
        if (end > begin)
            job.experts.push_back({static_cast<const char*>(step.blocks[e]), begin, end - begin});
    }
    if (job.experts.empty()) return;
    job.item = item_bytes(form.dtype);
    job.up_rows = int64_t(form.intermediate_size) * (form.has_gate ? 2 : 1);
    const int64_t ways = form.has_gate ? 2 : 1;
    job.first_units = outputs_per_tile(form.hidden_size * job.item * ways, form.intermediate_size,
                                       MAX_TILE_OUTPUTS);
    job.first_tiles = (form.intermediate_size + job.first_units - 1) / job.first_units;
    job.second_outputs = outputs_per_tile(form.intermediate_size * job.item, form.hidden_size,
                                          MAX_TILE_OUTPUTS);
    job.second_tiles = (form.hidden_size + job.second_outputs - 1) / job.second_outputs;
    if (job.num_tiles() > MAX_TILES) throw std::bad_alloc();
    job.num_missing.reset(new std::atomic<int32_t>[job.experts.size()]);
    for (size_t e = 0; e < job.experts.size(); e++) job.num_missing[e] = job.first_tiles;
    widen_hidden(pool, form, step, job);

    const int64_t expert_bytes =
        (job.up_rows + form.intermediate_size) * form.hidden_size * job.item;
    const int64_t useful = 1 + int64_t(job.experts.size()) * expert_bytes / BYTES_PER_THREAD;
    pool.threads.run(job.num_tiles(), int(std::min<int64_t>(useful, pool.threads.num_threads())),
                     run_tile, &job);
}

struct ReadJob {
    const char* data;
    int64_t num_bytes;
    std::atomic<uint64_t> checksum{0};
};

constexpr int64_t READ_TILE_BYTES = 1024 * 1024;

void read_tile(void* context, int64_t tile) {
    ReadJob& job = *static_cast<ReadJob*>(context);
    const int64_t begin = tile * READ_TILE_BYTES;
    constexpr int NUM_STREAMS = 4;
    const int64_t stream_bytes =
        std::min(READ_TILE_BYTES, job.num_bytes - begin) / (64 * NUM_STREAMS) * 64;
    const char* data = job.data + begin;
    uint64_t sums[8] = {};
    for (int64_t i = 0; i < stream_bytes; i += 64)
        for (int stream = 0; stream < NUM_STREAMS; stream++) {
            const char* line = data + stream * stream_bytes + i;
            uint64_t words[8];
            memcpy(words, line, sizeof words);
            __builtin_prefetch(line + 512, 0, 3);
            for (int j = 0; j < 8; j++) sums[j] += words[j];
        }
    uint64_t total = 0;
    for (const uint64_t sum : sums) total += sum;
    job.checksum.fetch_add(total, std::memory_order_relaxed);
}

}  // namespace

int32_t hr_abi_version() { return HR_ABI_VERSION; }

const char* hr_isa_name(int32_t index) {
    const auto& kernels = all_kernels();
    return index >= 0 && size_t(index) < kernels.size() ? kernels[size_t(index)]->name : nullptr;
}

HrPool* hr_pool_create(int32_t num_threads, int32_t spin_us) {
    try {
        return new HrPool(std::max(num_threads, 1), std::max(spin_us, 0));
    } catch (const std::bad_alloc&) {
        return nullptr;
    } catch (const std::system_error&) {
        return nullptr;
    }
}

void hr_pool_destroy(HrPool* pool) { delete pool; }

int32_t hr_run(HrPool* pool, const HrForm* form, int32_t isa, const HrStep* step) {
    if (!is_known(*form, isa)) return 2;
    try {
        std::lock_guard<std::mutex> lock(pool->one_caller);
        run_step(*pool, *form, *all_kernels()[size_t(isa)], *step);
        return 0;
    } catch (const std::bad_alloc&) {
        return 1;
    }
}

uint64_t hr_read(HrPool* pool, const void* data, int64_t num_bytes) {
    std::lock_guard<std::mutex> lock(pool->one_caller);
    ReadJob job{static_cast<const char*>(data), num_bytes, {}};
    const int64_t num_tiles = (num_bytes + READ_TILE_BYTES - 1) / READ_TILE_BYTES;
    pool->threads.run(num_tiles, pool->threads.num_threads(), read_tile, &job);
    return job.checksum.load();
}
