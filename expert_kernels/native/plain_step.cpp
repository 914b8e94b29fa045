// Layer-steps of experts whose weights are row-major, in float32, bfloat16 or float16.
//
// Rows are float32 for the kernels, or, in bfloat16 where there are kernels for that, laid out as
// LaidProduct wants them: hidden rows before the job, once per pair; an expert's intermediate rows,
// which the gate has rounded to bfloat16, by whoever computes a tile of its first projection.

#include "number_formats.h"
#include "step_job.h"

namespace {

constexpr int64_t LEAST_TILE_BYTES = 256 * 1024;
constexpr int MAX_TILE_OUTPUTS = 256;
constexpr int ROWS_PER_PASS = 2 * LAID_BLOCK;  // rows whose sums are kept at once
// Sums of a row from those of the next: no power of two, which would put all of them into few lines
// of a cache.
constexpr int FIRST_STRIDE = 2 * MAX_TILE_OUTPUTS + NUM_LANES;
constexpr int SECOND_STRIDE = MAX_TILE_OUTPUTS + NUM_LANES;

struct StepJob {
    const HrForm& form;
    const HrStep& step;
    const Kernels& kernels;
    const LaidKernels* laid;  // null: rows are float32
    const Gates& gates;
    std::vector<Expert> experts;  // those that somebody chose
    std::unique_ptr<std::atomic<int32_t>[]> num_missing;  // per expert: first tiles not done yet
    const float* hidden;                                  // [row, hidden_stride] float32
    int64_t hidden_stride;
    float* middle;  // [pair, middle_stride]
    int64_t middle_stride;
    uint16_t* laid_hidden;  // a pair takes laid_hidden_depth values, see kernels.h
    int64_t laid_hidden_depth;
    uint16_t* laid_middle;
    int64_t laid_middle_depth;
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

// `laid`: the product's rows laid out, where job.laid is there.
void multiply(const StepJob& job, const Product& product, const uint16_t* laid) {
    if (job.laid)
        return job.laid->multiply({product.weights, product.stride_bytes, product.num_outputs,
                                   product.depth, laid, product.num_rows, product.out,
                                   product.out_stride, product.next});
    (job.form.is_transposed ? job.kernels.sum_columns
                            : job.kernels.dot_rows)[job.form.dtype](product);
}

// The gate's results, units begin .. begin + count of the rows of a pass, into their places.
void lay_middle(const StepJob& job, const uint16_t (&units)[ROWS_PER_PASS][MAX_TILE_OUTPUTS],
                int num_rows, int64_t pair, int64_t begin, int64_t count) {
    const char* rows[ROWS_PER_PASS];
    for (int m = 0; m < num_rows; m++) rows[m] = reinterpret_cast<const char*>(units[m]);
    const bool is_last = begin + count == job.form.intermediate_size;
    const int64_t end = is_last ? job.laid_middle_depth : begin + count;
    job.laid->lay(rows, num_rows, begin, count, end, job.laid_middle_depth,
                  job.laid_middle + pair * job.laid_middle_depth);
}

// Where the weights of a tile of the job begin, null for no tile.
const char* weights_of(const StepJob& job, int64_t tile) {
    if (tile < 0) return nullptr;
    const HrForm& form = job.form;
    const int64_t num_first = int64_t(job.experts.size()) * job.first_tiles;
    const bool is_first = tile < num_first;
    if (!is_first) tile -= num_first;
    const int64_t per_expert = is_first ? job.first_tiles : job.second_tiles;
    const int64_t step = is_first && form.has_gate && form.is_interleaved ? 2 : 1;
    const int64_t outputs = tile % per_expert * (is_first ? job.first_units : job.second_outputs);
    const int64_t depth = is_first ? form.hidden_size : form.intermediate_size;
    return job.experts[size_t(tile / per_expert)].block +
           (is_first ? form.first_offset : form.down_offset) +
           outputs * step * job.item * (form.is_transposed ? 1 : depth);
}

void run_first_tile(StepJob& job, size_t number, int64_t tile, const char* next) {
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

    alignas(64) float sums[ROWS_PER_PASS * FIRST_STRIDE];
    uint16_t units[ROWS_PER_PASS][MAX_TILE_OUTPUTS];
    const float* x[ROWS_PER_PASS];
    for (int64_t done = 0; done < expert.num_pairs; done += ROWS_PER_PASS) {
        const int num_rows = int(std::min<int64_t>(ROWS_PER_PASS, expert.num_pairs - done));
        const int64_t pair = expert.first_pair + done;
        if (!job.laid)
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
            product.out_stride = FIRST_STRIDE;
            product.next = is_split && half == 0
                               ? product.weights + form.intermediate_size * product.stride_bytes
                               : next;
            multiply(job, product, job.laid_hidden + pair * job.laid_hidden_depth);
        }
        for (int m = 0; m < num_rows; m++) {
            GateRow row{};
            row.sums = sums + m * FIRST_STRIDE;
            row.up_begin = is_split ? count : 1;
            row.step = step;
            row.bias = bias;
            row.bias_up_begin = is_split ? form.intermediate_size : 1;
            float gated[MAX_TILE_OUTPUTS];
            row.out =
                job.laid ? gated : job.middle + (pair + m) * job.middle_stride + begin;
            row.count = count;
            job.gates.apply_gate(form, row);
            if (job.laid)
                for (int i = 0; i < count; i++)
                    units[m][i] = uint16_t(bits_of_float(gated[i]) >> 16);
        }
        if (job.laid) lay_middle(job, units, num_rows, pair, begin, count);
    }
    job.num_missing[number].fetch_sub(1, std::memory_order_release);
}

void run_second_tile(StepJob& job, size_t number, int64_t tile, const char* next) {
    const HrForm& form = job.form;
    const Expert& expert = job.experts[number];
    const int64_t begin = tile * job.second_outputs;
    const int32_t count =
        int32_t(std::min<int64_t>(job.second_outputs, form.hidden_size - begin));
    const char* bias =
        form.has_bias ? expert.block + form.down_bias_offset + begin * job.item : nullptr;
    wait_for_zero(job.num_missing[number]);

    alignas(64) float sums[ROWS_PER_PASS * SECOND_STRIDE];
    const float* x[ROWS_PER_PASS];
    for (int64_t done = 0; done < expert.num_pairs; done += ROWS_PER_PASS) {
        const int num_rows = int(std::min<int64_t>(ROWS_PER_PASS, expert.num_pairs - done));
        const int64_t pair = expert.first_pair + done;
        if (!job.laid)
            for (int m = 0; m < num_rows; m++) x[m] = job.middle + (pair + m) * job.middle_stride;
        Product product = product_of(job, expert.block + form.down_offset, begin, count,
                                     form.hidden_size, form.intermediate_size);
        product.x = x;
        product.num_rows = num_rows;
        product.out = sums;
        product.out_stride = SECOND_STRIDE;
        product.next = next;
        multiply(job, product, job.laid_middle + pair * job.laid_middle_depth);
        for (int m = 0; m < num_rows; m++)
            job.gates.finish_row(
                form, sums + m * SECOND_STRIDE, bias,
                job.step.places + job.step.place_ids[pair + m] * form.hidden_size + begin, count);
    }
}

void run_tile(void* context, int64_t tile, int64_t next_tile) {
    StepJob& job = *static_cast<StepJob*>(context);
    const int64_t num_first = int64_t(job.experts.size()) * job.first_tiles;
    const char* next = weights_of(job, next_tile);
    if (tile < num_first)
        return run_first_tile(job, size_t(tile / job.first_tiles), tile % job.first_tiles, next);
    tile -= num_first;
    run_second_tile(job, size_t(tile / job.second_tiles), tile % job.second_tiles, next);
}

// Outputs per tile so that it has about `tile_bytes`: a multiple of 16, whole vectors of outputs.
int32_t outputs_per_tile(int64_t tile_bytes, int64_t bytes_per_output, int64_t num_outputs) {
    const int64_t wanted = std::max<int64_t>(tile_bytes / std::max<int64_t>(bytes_per_output, 1), 1);
    return int32_t(std::min(
        {round_up(wanted, 16), round_up(num_outputs, 16), int64_t(MAX_TILE_OUTPUTS)}));
}

// From one row of float32 values to the next: rows as long as a power of two would all lie in the
// same few lines of a cache. Two lines more than that, not one: else, where the rows begin as far from
// a page's begin as the weights do, eight of float32 take 1.13 times as long (docs/performance.md).
int64_t apart_in_cache(int64_t count) { return round_up(count, NUM_LANES) + 2 * NUM_LANES; }

void widen_hidden(HrPool& pool, const HrForm& form, const HrStep& step, StepJob& job) {
    const int64_t num_pairs = step.pair_begin[step.num_experts];
    const int64_t num_rows = num_rows_of(step);
    job.hidden_stride = apart_in_cache(form.hidden_size);
    job.middle_stride = apart_in_cache(form.intermediate_size);
    float* hidden = pool.hidden.values.items(num_rows * job.hidden_stride);
    float* middle = pool.middle.values.items(num_pairs * job.middle_stride);
    const int64_t row_bytes = form.hidden_size * job.item;
    for (int64_t row = 0; row < num_rows; row++) {
        float* target = hidden + row * job.hidden_stride;
        job.gates.widen_row(form.dtype, static_cast<const char*>(step.hidden) + row * row_bytes,
                            target, form.hidden_size);
        std::fill(target + form.hidden_size, target + job.hidden_stride, 0.0f);
    }
    for (int64_t p = 0; p < num_pairs; p++)
        std::fill(middle + p * job.middle_stride + form.intermediate_size,
                  middle + (p + 1) * job.middle_stride, 0.0f);
    job.hidden = hidden;
    job.middle = middle;
}

void lay_hidden(HrPool& pool, const HrForm& form, const HrStep& step, StepJob& job) {
    const int64_t num_pairs = step.pair_begin[step.num_experts];
    job.laid_hidden_depth = round_up(form.hidden_size, LAID_INPUTS);
    job.laid_middle_depth = round_up(form.intermediate_size, LAID_INPUTS);
    const auto laid = [num_pairs](Scratch<int16_t>& scratch, int64_t depth) {
        return reinterpret_cast<uint16_t*>(scratch.items(num_pairs * depth));
    };
    job.laid_hidden = laid(pool.hidden.codes, job.laid_hidden_depth);
    job.laid_middle = laid(pool.middle.codes, job.laid_middle_depth);
    const char* hidden = static_cast<const char*>(step.hidden);
    const int64_t row_bytes = form.hidden_size * job.item;
    for (const Expert& expert : job.experts)
        for (int64_t done = 0; done < expert.num_pairs; done += LAID_BLOCK) {
            const int size = int(std::min<int64_t>(LAID_BLOCK, expert.num_pairs - done));
            const int64_t pair = expert.first_pair + done;
            const char* rows[LAID_BLOCK];
            for (int m = 0; m < size; m++) rows[m] = hidden + step.row_ids[pair + m] * row_bytes;
            job.laid->lay(rows, size, 0, form.hidden_size, job.laid_hidden_depth,
                          job.laid_hidden_depth, job.laid_hidden + pair * job.laid_hidden_depth);
        }
}

}  // namespace

void run_plain_step(HrPool& pool, const HrForm& form, const Kernels& kernels,
                    const LaidKernels* laid, const Gates& gates, const HrStep& step) {
    StepJob job{form,  step,    kernels, nullptr, gates, chosen_experts(step), nullptr, nullptr, 0,
                nullptr, 0, nullptr, 0, nullptr, 0, 0, 0, 0, 0, 0, 0};
    if (job.experts.empty()) return;
    job.item = item_bytes(form.dtype);
    job.up_rows = int64_t(form.intermediate_size) * (form.has_gate ? 2 : 1);
    const int64_t ways = form.has_gate ? 2 : 1;
    const int64_t total = int64_t(job.experts.size()) * job.item * form.hidden_size *
                          (job.up_rows + form.intermediate_size);
    const int num_threads = useful_threads(pool, total, step.most_threads);
    if (form.dtype == HR_BFLOAT16 && !form.is_transposed) job.laid = laid;
    const int64_t rows = most_rows_of(job.experts);
    const int64_t tile_bytes =
        job.laid || rows <= ROWS_PER_PASS
            ? expert_tile_bytes(total, num_threads, rows, LEAST_TILE_BYTES)
            : LEAST_TILE_BYTES;
    job.first_units =
        outputs_per_tile(tile_bytes, form.hidden_size * job.item * ways, form.intermediate_size);
    job.first_tiles = (form.intermediate_size + job.first_units - 1) / job.first_units;
    job.second_outputs =
        outputs_per_tile(tile_bytes, form.intermediate_size * job.item, form.hidden_size);
    job.second_tiles = (form.hidden_size + job.second_outputs - 1) / job.second_outputs;
    if (job.num_tiles() > MAX_TILES) throw std::bad_alloc();
    job.num_missing.reset(new std::atomic<int32_t>[job.experts.size()]);
    for (size_t e = 0; e < job.experts.size(); e++) job.num_missing[e] = job.first_tiles;
    if (job.laid)
        lay_hidden(pool, form, step, job);
    else
        widen_hidden(pool, form, step, job);
    pool.threads.run(job.num_tiles(), num_threads, run_tile, &job);
}
